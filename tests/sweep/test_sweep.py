"""--multirun: trials are Hydra's, checked before the first starts, apart from each other; lack of memory is a
result."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.cluster import wait_for
from support.launch import warm_python

import trainer
from trainer.commands import train
from trainer.config import ConfigError
from trainer.config.typed import to_yaml
from trainer.sweep.plan import expand_sweep, make_trials, name_trials
from trainer.sweep.results import trial_outcome
from trainer.util.machine import missing_memory

ROOT = Path(__file__).parents[2]


def trials(*arguments: str, gpus: int = 0):
    return make_trials(*expand_sweep(arguments), None, gpus)


def test_trials_do_not_share_their_copies_of_checkpoints():
    """Each would resume from what another has saved."""
    arguments = ["+config=debug", "lr.peak=0.1,0.2"]
    refused = r"upload=s3://b/r is that of 2 trials.*'checkpoint.upload=s3://b/r/\$\{run.name\}'"
    with pytest.raises(ConfigError, match=refused):
        trials(*arguments, "checkpoint.upload=s3://b/r")
    made = trials(*arguments, "checkpoint.upload=s3://b/r/${run.name}")
    assert len({trial.settings["checkpoint"]["upload"] for trial in made}) == 2


# From overrides to trials


@pytest.mark.parametrize(
    "arguments, common, expected",
    [
        (
            ["+config=debug", "parallel=zero1,tp2", "lr.peak=1e-3,3e-4", "run.steps=7"],
            ["+config=debug", "run.steps=7"],
            [
                ["parallel=zero1", "lr.peak=0.001"],
                ["parallel=zero1", "lr.peak=0.0003"],
                ["parallel=tp2", "lr.peak=0.001"],
                ["parallel=tp2", "lr.peak=0.0003"],
            ],
        ),
        (
            ["+config=debug,demo", "parallel=glob(zero?)"],
            [],
            [[f"+config={recipe}", f"parallel=zero{stage}"] for recipe in ("debug", "demo") for stage in (1, 2, 3)],
        ),
        (
            ["parallel=glob([zero*,tp*],exclude=*_*)"],
            [],
            [[f"parallel={x}"] for x in ("tp2", "zero1", "zero2", "zero3")],
        ),
        (
            ["lr.peak=choice(1e-3)", "data.tokenizer='a, b',bytes", "activation.save=[attention],[matmul/2,attention]"],
            [],
            [
                ["lr.peak=0.001", tokenizer, save]
                for tokenizer in ("data.tokenizer='a, b'", "data.tokenizer=bytes")
                for save in ("activation.save=[attention]", "activation.save=[matmul/2,attention]")
            ],
        ),
        (
            ["model.pattern=[{attention: {window: 16}}],[{attention: {window: 0}}]", "+model.name='x y'"],
            ["+model.name='x y'"],
            [["model.pattern=[{attention:{window:16}}]"], ["model.pattern=[{attention:{window:0}}]"]],
        ),
        (["run.seed=sort(3,1,2)"], [], [["run.seed=1"], ["run.seed=2"], ["run.seed=3"]]),
        (["++compile=true,false"], [], [["++compile=True"], ["++compile=False"]]),
        (
            ["eval.every=null,3", "run.seed=range(4,6)"],
            [],
            [[every, seed] for every in ("eval.every=null", "eval.every=3") for seed in ("run.seed=4", "run.seed=5")],
        ),
        (["lr.peak=range(0.1,0.25,0.1)"], [], [["lr.peak=0.1"], ["lr.peak=0.2"]]),
        (["lr.peak=1e-3"], ["lr.peak=1e-3"], [[]]),
    ],
)
def test_trials_are_those_of_hydras_sweeper(arguments, common, expected):
    """As Hydra 1.3's own sweeper gave them, in its order; an override with one value is passed on as it was written."""
    assert expand_sweep(arguments)[1:] == (common, expected)


def test_shuffled_values_are_all_tried():
    assert sorted(expand_sweep(["run.seed=shuffle(range(0,4))"])[2]) == [[f"run.seed={seed}"] for seed in range(4)]


def test_removals_and_quotes_reach_the_trials():
    _, common, swept = expand_sweep(["data=mix", "~data.sources.text", 'run.name="a=b"', "lr.peak=1,2"])
    assert common == ["data=mix", "~data.sources.text", 'run.name="a=b"'] and swept == [["lr.peak=1"], ["lr.peak=2"]]
    [first, _] = trials("+config=debug", 'run.name="a=b"', "lr.peak=1,2", "sweep.dir='/tmp/a \"b\", c'")
    assert (
        first.settings["run"]["dir"] == '/tmp/a "b", c/peak-1' and first.settings["run"]["name"] == "a=b-sweep/peak-1"
    )


def test_names_are_readable_and_stay_when_the_sweep_grows():
    assert name_trials([["parallel=zero1", "lr.peak=0.001"]]) == ["parallel-zero1_peak-0.001"]
    assert name_trials([["a.every=1", "b.every=2"]]) == ["a.every-1_b.every-2"]
    assert name_trials([["activation.save=[attention,matmul/2]"]]) == ["save-attention-matmul-2"]
    assert name_trials([[]]) == ["single"]
    grown = name_trials([["s=[a,b]"], ["s=[a b]"], ["s=" + "x" * 300]])
    assert grown[:1] == name_trials([["s=[a,b]"]]) and len(set(grown)) == 3 and max(map(len, grown)) < 130


def test_processes_are_the_plans_or_the_machines():
    assert [trial.processes for trial in trials("+config=debug", "parallel=zero1,tp2,cp2,tp2_pp2")] == [1, 2, 2, 4]
    assert [trial.processes for trial in trials("+config=debug", "parallel.dp=1,2,4", gpus=8)] == [1, 2, 4]
    assert [trial.processes for trial in trials("+config=debug", "parallel=zero1,tp2", "sweep.parallel=2", gpus=8)] == [
        4,
        4,
    ]
    assert [trial.processes for trial in trials("+config=debug", "parallel=zero1,tp2", "run.device=cpu", gpus=8)] == [
        1,
        2,
    ]
    assert {trial.processes for trial in trials("+config=debug", "lr.peak=1,2", "sweep.processes=2")} == {2}
    few, many = trials("+config=debug", "parallel.dp=2,4", gpus=2)
    assert not few.refusal and "4 processes need as many GPUs, and there are 2" in many.refusal[0]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["+config=debug", "lr.peek=1,2", "parallel=zero1,zero9"], ["did you mean 'lr.peak'", "parallel=zero9"]),
        (
            ["+config=debug", "parallel.tp=3,5", "lr.peak=-1"],
            ["lr.peak=-1", "trial tp-3: parallel.tp=3", "trial tp-5: parallel.tp=5"],
        ),
        (
            ["lr.peak=interval(0,1)", "parallel=glob(x*)", "run.dir=x", "run.name=a,b"],
            ["interval", "fits nothing", "sweep.dir", "run.name=a,b"],
        ),
        (["lr.peak=1,2", "++lr.peak=3,4"], ["lr.peak has several values twice"]),
        (
            ["sweep.paralel=1", "sweep.sort=lr", "sweep.processes=0", "sweep.parallel=1,2"],
            [
                "'sweep.parallel'",
                "sweep.sort=lr is not one of",
                "sweep.processes=0 must be at least 1",
                "sweep.parallel=1,2",
            ],
        ),
        (
            ["sweep=3", "sweep.sort=lr", "lr.peek=interval(0,1)"],
            ["sweep=3: the settings of a sweep are", "sweep.sort=lr", "interval"],
        ),
        (["~sweep"], ["~sweep: the settings of a sweep"]),
        (["run.seed=range(0,3,0)"], ["range(0,3,0): more than 10000 trials, or without end"]),
        (["run.seed=shuffle(range(0,1e9))", "lr.peak=1,2"], ["lr.peak=1,2: more than"]),
        (["lr.peak=range(0,inf)"], ["without end"]),
        (["run.seed=range(3,0)"], ["fits nothing"]),
        (["run.seed=range(0,200)", "run.steps=range(100,0,-1)"], ["more than 10000 trials"]),
        (["+config=nothing", "lr.peak=1,2"], ["config=nothing"]),
        (["lr.peak=1,2", "--cfg", "job"], ["--cfg shows the settings of one run"]),
    ],
)
def test_what_no_trial_can_mean_is_an_error(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--multirun", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("configuration error") and all(word in error for word in words), error
    assert not any(tmp_path.iterdir())


def test_several_values_need_multirun(capsys, monkeypatch):
    assert train.main(["+config=debug", "lr.peak=1,2", "sweep.parallel=2"]) == 2
    error = capsys.readouterr().err
    assert "lr.peak=1,2: several values are a sweep, which --multirun runs" in error and "sweep.parallel=2" in error
    monkeypatch.setenv("RANK", "0")
    assert train.main(["-m", "+config=debug", "lr.peak=1,2"]) == 2
    assert "say trainer sweep" in capsys.readouterr().err


# What has become of a trial


def put(folder: Path, status: dict | None = None, log: str = "", **errors: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text(log)
    if status:
        (folder / "status.json").write_text(json.dumps(status))
    for number, (name, message) in enumerate(errors.items()):
        path = folder / "torchrun" / "0" / "run" / "attempt_0" / name / "error.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": str(number)}}}))
    return folder


def test_outcomes(tmp_path):
    gpu = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free. See documentation "
        "for more"
    )
    first = put(
        tmp_path / "a",
        {"status": "failed", "reason": "PeerError: rank 1"},
        r0="RuntimeError: Connection closed by peer",
        r1=gpu,
    )
    assert trial_outcome(first, 1) == (
        "out_of_memory",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free",
    )
    # The kernel's way: whoever was killed says nothing, and the peers complain.
    killed = put(tmp_path / "b", {"status": "running"}, r0="RuntimeError: Connection closed by peer")
    assert [trial_outcome(killed, 137, kernel_killed=known)[0] for known in (True, None, False)] == [
        "out_of_memory",
        "out_of_memory",
        "failed",
    ]
    assert (
        "probably by the kernel" in trial_outcome(killed, 137)[1]
        and "SIGKILL" in trial_outcome(killed, 137, kernel_killed=False)[1]
    )
    assert trial_outcome(killed, 1) == ("failed", "Connection closed by peer")
    assert trial_outcome(killed, 143, requested="timeout")[0] == "timeout"
    told = (
        "old\nconfiguration error: old\nconfiguration error, 2 problems:\n  - a=1 is wrong\n  - b=2 too\nW1121 "
        "torchrun says\n"
    )
    assert trial_outcome(put(tmp_path / "c", log=told), 2) == ("refused", "a=1 is wrong; b=2 too")
    assert trial_outcome(put(tmp_path / "d", log="Fatal\n\n"), 134) == ("failed", "Fatal")
    assert trial_outcome(put(tmp_path / "e", {"status": "stopped"}), 1)[0] == "stopped"
    assert trial_outcome(put(tmp_path / "f", {"status": "done"}), 0, requested="stopped")[0] == "done"
    late = put(tmp_path / "g", {"status": "failed", "reason": "OutOfMemoryError: CUDA out of memory"})
    assert trial_outcome(late, 1, requested="timeout")[0] == "out_of_memory"


def test_errors_are_those_of_the_last_start(tmp_path):
    folder = put(tmp_path / "a", {"status": "running"}, log="Fatal\n")
    (folder / "torchrun" / "latest").mkdir(parents=True)  # no number of a start
    assert trial_outcome(folder, 1) == ("failed", "Fatal")
    for start in ("0.9", "1.2", "1.10"):  # of a job: requeues, and launches since
        path = folder / "torchrun" / start / "7" / "attempt_0" / "0" / "error.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"message": {"message": f"RuntimeError: {start}", "extraInfo": {}}}))
    assert trial_outcome(folder, 1) == ("failed", "1.10")


def test_lack_of_memory_behind_another_error():
    try:
        try:
            raise MemoryError("Unable to allocate 4 TiB")
        except MemoryError as cause:
            raise RuntimeError("rank 1 failed in 1F0") from cause
    except RuntimeError as error:
        assert missing_memory(error) == "Unable to allocate 4 TiB"
    assert missing_memory(ValueError("memory")) is None


# Sweeps


def sweep(*arguments: object, **options) -> subprocess.Popen:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHON_EXEC": warm_python(),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **options.pop("environment", {}),
    }
    start = options.pop("preexec_fn", lambda: None)

    def begin() -> None:
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # ignored where the suite itself was started with & by a script
        start()

    SWEEPS.append(
        subprocess.Popen(
            [warm_python(), "-m", "trainer", "--multirun", *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=begin,
            **options,
        )
    )
    return SWEEPS[-1]


SWEEPS: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def no_sweep_is_left():
    yield
    for process in SWEEPS:
        for _ in range(2):  # the second signal kills its trials
            if process.poll() is None:
                process.terminate()
                time.sleep(0.5)
    SWEEPS.clear()


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=300)
    return process.returncode, out, error


def lines(folder: Path) -> dict[str, dict]:
    return {line["trial"]: line for line in map(json.loads, (folder / "results.jsonl").read_text().splitlines())}


RECIPES = {
    "fine": "eval: {every: 5, sequences: 8}",
    "big_model": "run: {force: true}\nmodel: {vocab_size: 1000000000000}",
    "too_big": "model: {vocab_size: 1000000000000}",
    "big_batch": "batch: {global_size: 8192, micro_size: 8192}",
    "illegal": "parallel: {tp: 3}",
    "diverges": "lr: {peak: 1.0e+30}\noptimizer: {clip_norm: 0}\nguard: {max_skipped: 1}",
    "no_data": "data: {sources: {stdlib: {kind: text, path: /not/there}}}",
}


def little_memory():
    """Limits a process of `warm_python` to 2 GiB beyond what it needs to start: enough for all but big_batch, which
    thus fails in the midst of a step."""
    words = subprocess.check_output(
        [warm_python(), "-c", "print(open('/proc/self/status').read())"],
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    ).split()
    limit = 1024 * int(words[words.index("VmPeak:") + 1]) + 2 * 2**30
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def test_every_trial_ends_in_a_result(tmp_path):
    """A sweep of everything that can happen to a trial, and the same sweep again."""
    (tmp_path / "mine" / "config").mkdir(parents=True)
    for name, text in RECIPES.items():
        (tmp_path / "mine" / "config" / f"{name}.yaml").write_text(
            f"# @package _global_\ndefaults: [/config/debug, _self_]\n{text}\n"
        )
    arguments = [
        "--config-dir",
        tmp_path / "mine",
        f"+config={','.join(RECIPES)}",
        "run.device=cpu",
        f"sweep.dir={tmp_path / 'sweep'}",
    ]
    limits = {"preexec_fn": little_memory()}
    code, out, error = finish(sweep(*arguments, "sweep.parallel=3", "sweep.processes=1", **limits))
    found = {name.removeprefix("config-"): line for name, line in lines(tmp_path / "sweep").items()}
    assert {name: line["status"] for name, line in found.items()} == {
        "fine": "done",
        "big_model": "out_of_memory",
        "too_big": "out_of_memory",
        "big_batch": "out_of_memory",
        "illegal": "refused",
        "diverges": "failed",
        "no_data": "refused",
    }, (out, error)
    assert code == 1 and not error
    fine = found["fine"]
    assert (
        fine["overrides"] == ["+config=fine"]
        and fine["loss"] > 1
        and fine["eval_loss"] > 1
        and fine["tokens_per_second"] > 0
    )
    assert fine["memory_gib"] > 0 and fine["step_seconds_p50"] > 0 and fine["mfu"] is None and fine["reason"] is None
    assert (
        Path(fine["folder"]) == tmp_path / "sweep" / "config-fine"
        and (tmp_path / "sweep" / "config-fine" / "metrics.jsonl").exists()
    )
    assert "/not/there" in found["no_data"]["reason"] and "parallel.tp=3 does not divide" in found["illegal"]["reason"]
    assert "without an update" in found["diverges"]["reason"] and found["big_model"]["loss"] is None
    assert found["too_big"]["reason"].startswith("the model's states do not fit: ")
    for name in ("big_model", "big_batch"):
        assert "can't allocate memory: you tried to allocate" in found[name]["reason"]
        log = (tmp_path / "sweep" / f"config-{name}" / "log.txt").read_text()
        said = log[log.index("\nout of memory on rank 0: ") :]
        assert (
            "planned on the fullest rank" in said
            and "taken on rank 0 after the error:" in said
            and "parallel.tp" not in said
        )
        assert (tmp_path / "sweep" / f"config-{name}" / "out_of_memory.json").exists()
        status = json.loads((tmp_path / "sweep" / f"config-{name}" / "status.json").read_text())
        assert status["status"] == "failed" and "can't allocate memory" in status["reason"]
    table = out[out.index("\ntrial  ") :]
    assert re.search(r"evaluation +tokens/s +memory +step +reason\nconfig-fine ", table) and "MFU" not in table
    place = ["+config=fine", "run.device=cpu", "run.name=debug-sweep/config-fine", f"run.dir={fine['folder']}"]
    place += ["loss.tile=0", "activation.tile=0", "activation.offload=false"]
    place += ["parallel.zero.collectives=nccl"]  # what auto is on a CPU
    assert (Path(fine["folder"]) / "config.yaml").read_text() == to_yaml(trainer.compose(place, tmp_path / "mine"))

    # What was done stays; what failed is tried again, here with no time to finish. Other settings are not mixed in.
    before = (tmp_path / "sweep" / "config-fine" / "metrics.jsonl").stat().st_mtime_ns
    again = [
        "sweep.processes=1",
        "sweep.time_minutes=0.001",
        f"+config={','.join(name for name in RECIPES if name != 'no_data')}",
    ]
    code, out, _ = finish(sweep(*arguments[:2], *arguments[3:], *again, **limits))
    assert (
        "6 trials, 1 done, 3 out of memory, 1 refused, 1 to run" in out
        and "trial config-diverges: timeout" in out
        and code == 0
    ), out
    assert (
        out.count(": started") == 1
        and (tmp_path / "sweep" / "config-fine" / "metrics.jsonl").stat().st_mtime_ns == before
    )
    assert (
        lines(tmp_path / "sweep")["config-no_data"]["status"] == "refused"
    )  # no part of this sweep, but of its results
    code, _, error = finish(sweep(*arguments, "sweep.processes=1", "run.steps=9"))
    assert code == 2 and "config-fine holds this trial with other settings (run.steps=9, then 5)" in error


def started(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 0


def test_a_signal_ends_the_trials_with_a_checkpoint_and_the_sweep_goes_on_later(tmp_path):
    arguments = [
        "+config=debug",
        "run.seed=range(0,3)",
        "run.steps=100000",
        f"sweep.dir={tmp_path}",
        "sweep.parallel=2",
    ]
    process = sweep(*arguments)
    wait_for(lambda: all(started(tmp_path / f"seed-{seed}") for seed in (0, 1)), 120, "step of two trials")
    [victim] = [
        pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if is_worker(pid, tmp_path / "seed-1")
    ]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: started(tmp_path / "seed-2"), 120, "step of the trial in the place of the killed one")
    process.send_signal(signal.SIGINT)
    code, out, error = finish(process)
    found = lines(tmp_path)
    assert {name: line["status"] for name, line in found.items()} == {
        "seed-0": "stopped",
        "seed-1": "failed",
        "seed-2": "stopped",
    }, (out, error)
    assert code == 1 and "SIGKILL" in found["seed-1"]["reason"] and found["seed-0"]["loss"] > 1
    steps = {seed: max((tmp_path / f"seed-{seed}" / "checkpoints").iterdir()).name for seed in (0, 2)}

    process = sweep(*arguments, "sweep.parallel=1")
    wait_for(lambda: "resumed from" in (tmp_path / "seed-0" / "log.txt").read_text(), 120, "resumed trial")
    process.send_signal(signal.SIGTERM)
    code, out, error = finish(process)
    assert code == 75 and f"{steps[0]} at step" in (tmp_path / "seed-0" / "log.txt").read_text(), (out, error)
    assert [line["status"] for line in lines(tmp_path).values()].count("not_started") == 2
    assert "resumed" not in (tmp_path / "seed-2" / "log.txt").read_text()


def is_worker(pid: int, folder: Path) -> bool:
    try:
        return (
            f'run.dir="{folder}"' in Path(f"/proc/{pid}/cmdline").read_text()
            and "LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_text()
        )
    except OSError:
        return False
