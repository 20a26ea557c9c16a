"""`trainer tune`: searches whose trials are answered at once, and one that trains on two processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from math import log
from pathlib import Path

import pytest
import yaml
from support.cluster import wait_for
from support.launch import warm_python

from trainer.commands.tune import main
from trainer.config import typed
from trainer.observe.metrics import STEP
from trainer.planning.resolve import compose
from trainer.sweep import local
from trainer.sweep.results import clear_trial, note_start, trial_outcome

ROOT = Path(__file__).parents[2]

SMALL = ["+config=debug", "parallel.pp=1", "activation.mode=none"]
"""Sixteen plans on two processes."""


@pytest.fixture
def answered(tmp_path, monkeypatch):
    """Words for a search whose trials end at once, each faster than the one before; `faults` by number of the trial."""
    faulty: dict[int, str] = {}

    def run_locally(trials, sweep, config_dir, gpus, on_end, say) -> None:
        for trial in trials:
            clear_trial(trial.folder)
            note_start(trial)
            with open(tmp_path / "tune" / "calls", "a+") as calls:
                calls.write(trial.name + "\n")
                calls.seek(0)
                number = len(calls.readlines())
            fault = faulty.get(number)
            step = dict.fromkeys(STEP) | {"step": 9, "loss": 6.0, "tokens_per_second": 1.0, "memory_gib": 1.5}
            step["step_seconds_p50"] = 2.0 / number
            status = {"status": "failed", "reason": fault} if fault else {"status": "done"}
            (trial.folder / "status.json").write_text(json.dumps(status))
            (trial.folder / "metrics.jsonl").write_text("" if fault else 2 * (json.dumps(step) + "\n"))
            on_end(trial, *trial_outcome(trial.folder, int(bool(fault))))

    monkeypatch.setattr(local, "run_locally", run_locally)

    def words(*more: str, faults: dict[int, str] | None = None) -> list[str]:
        faulty.clear()
        faulty.update(faults or {})
        return [*SMALL, "hardware=cpu", "sweep.processes=2", f"sweep.dir={tmp_path / 'tune'}", *more]

    return words


def lines(folder: Path) -> list[dict]:
    return list(map(json.loads, (folder / "trials.jsonl").read_text().splitlines()))


def test_whatever_becomes_of_trials_is_a_result(answered, tmp_path, capsys):
    """Out of memory, a crash and a hang count; the budget may grow later; what the folder was begun with may not
    change."""
    faults = {1: "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", 3: "RuntimeError: a defect"}
    folder = tmp_path / "tune"
    assert main(answered("budget=1", faults=faults)) == 1  # no trial has a time
    assert "best" not in capsys.readouterr().out and not (folder / "config").exists()
    before = {one["plan"]: one for one in json.loads((folder / "search.json").read_text())["foretold"]}
    assert main(answered("budget=4", faults=faults)) == 0
    shown = capsys.readouterr().out
    assert f"page: {folder / 'report.html'}" in shown
    assert "debug-tune: 15 plans, 1 of 4 trials" in shown and "ended: budget=4 trials are measured" in shown
    found = lines(folder)
    assert [line["status"] for line in found] == ["out_of_memory", "done", "failed", "done"]
    assert found[2]["reason"] == "a defect" and found[0]["step_seconds_p50"] is None
    assert all(line["predicted_seconds"] > 0 and line["predicted_memory_gib"] > 0 for line in found)
    # The machine is many times slower than predicted, which the second trial shows.
    assert found[1]["expected_seconds"] == pytest.approx(found[1]["predicted_seconds"])
    best = folder / "config" / "best.yaml"
    assert found[3]["trial"] in best.read_text()
    again = compose(["+config=[debug,best]"], folder, 2)
    micro, stage = again.batch.micro_size, again.parallel.zero.stage
    assert f"zero{stage}" in best.read_text() and f"micro{micro}" in best.read_text()

    search, page = json.loads((folder / "search.json").read_text()), (folder / "report.html").read_text()
    assert search["best"] == found[3]["trial"] and search["ended"] == "ended: budget=4 trials are measured"
    start, words = search["command"].split(" --processes 2 ")
    assert start == "trainer train" and compose(shlex.split(words), folder, 2) == again
    told = {one["plan"]: one for one in search["foretold"]}
    assert len(told) == 15 and all(one["low"] < one["expected"] < one["high"] for one in told.values())
    tried = [told[line["trial"]] for line in found]
    assert [one["expected"] for one in tried] == [line["expected_seconds"] for line in found]
    width, wide = ({name: log(one["high"] / one["low"]) for name, one in some.items()} for some in (told, before))
    early = [line["trial"] for line in found[:2]]  # foretold before any time was measured
    assert all(width[name] == wide[name] if name in early else 0 < width[name] < wide[name] for name in told)
    left = {name: one for name, one in told.items() if name not in {line["trial"] for line in found}}
    alike = [one["expected"] for name, one in left.items() if name.startswith("dp2")]  # as the second trial
    assert alike and all(0.3 < one / found[1]["step_seconds_p50"] < 3 for one in alike), alike
    assert all(one["expected"] > 2 * one["predicted"] for one in left.values()), "corrected by what was measured"
    assert f"{found[3]['trial']}</p>" in page and page.index("out of memory</td>") < page.index("failed</td>")

    (folder / "trials.jsonl").write_text((folder / "trials.jsonl").read_text().replace('"failed"', '"timeout"'))
    assert main(answered("budget=5")) == 0
    assert [line["trial"] for line in lines(folder)][:4] == [line["trial"] for line in found]
    assert len((folder / "calls").read_text().splitlines()) == len(lines(folder)) == 5
    capsys.readouterr()
    assert main(answered("budget=6", "optimizer.weight_decay=0.2", "steps=12")) == 2
    refusal = capsys.readouterr().err
    assert "steps=12, then 10" in refusal and "settings.optimizer.weight_decay=0.2, then" in refusal
    assert len((folder / "calls").read_text().splitlines()) == 5


def test_values_of_other_settings_are_tried_where_they_are_allowed(answered, tmp_path, capsys):
    """A plan that is refused with them, as one without recompute is with `activation.offload`, is not tried."""
    kept = ["parallel.tp=1", "parallel.zero.stage=1", "batch.micro_size=2", "activation.offload=true"]
    values = ["activation.mode=none,full", "precision.compute=fp32,bf16", "allow=[precision.compute]"]
    words = [word for word in answered() if not word.startswith("activation")]
    assert main([*words, *kept, *values, "budget=3"]) == 0
    found = {line["trial"]: line for line in lines(tmp_path / "tune")}
    assert {name: line["status"] for name, line in found.items()} == {
        f"dp2_zero1_micro2_full_eager_inputs-of-recomputed-layers-in-host-memory_compute{kind}": "done"
        for kind in ("fp32", "bf16")
    }
    written = {name for name, line in found.items() if 'compute="bf16"' in " ".join(line["overrides"])}
    assert written == {name for name in found if name.endswith("bf16")}
    assert "ended: every plan is measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, problem",
    [
        (["budget=0"], "budget=0 must be at least 1"),
        (["steps=2"], "steps=2 must be at least 3"),
        (["engine=random"], "unknown setting 'engine'"),
        (["hardware=cpu", "sweep.parallel=2"], "trials that run beside others are slowed down"),
        (["hardware=cpu", "parallel.tp=3"], "parallel.tp=3 is in none; legal: 1, 2"),
        (["hardware=cpu", "batch.micro_sizes=3"], "did you mean 'batch.micro_size'"),
        (["hardware=cpu", "allow=[precision]"], "allow=[precision] allows nothing"),
        (["hardware=cpu", "optimizer=adamw,sgd"], "optimizer.name has several values, and changes the numbers"),
    ],
)
def test_refusals(words, problem, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["+config=debug", "run.device=cpu", *words]) == 2
    assert problem in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


FAULTS = '''
import pathlib, time
from trainer import register

@register.callback("tune_faults")
class Faults:
    """The second trial finds no memory; the third hangs, and again the next time."""

    def __init__(self, settings): pass

    def start(self, run):
        folder = pathlib.Path(run.folder).parent
        trials = len([*folder.glob("*/trial.json")])
        if trials == 2:
            raise MemoryError("Unable to allocate 4 TiB")
        if trials == 3:
            time.sleep(1)  # until the other rank has looked
            (folder / "hung").touch()
            time.sleep(600)
'''


def test_a_search_on_two_processes(tmp_path):
    """Real trials, interrupted and gone on with, one of which hangs beyond its limit; the best plan then runs."""
    (tmp_path / "tune_faults.py").write_text(FAULTS)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHON_EXEC": warm_python(),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    recipe = [*SMALL, "run.device=cpu", "imports=[tune_faults]", "callbacks.tune_faults={}"]
    folder = tmp_path / "tune"
    command = [warm_python(), "-m", "trainer", "tune", *recipe, "steps=4", "batch.sequence_length=32"]

    def start(*words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, f"sweep.dir={folder}", "sweep.processes=2", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    first = start("budget=3")
    try:
        wait_for(lambda: (folder / "hung").exists() or first.poll() is not None, 120, "third trial")
        first.send_signal(signal.SIGINT)
        shown, _ = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 75 and "stopped; the same command goes on" in shown, shown
    found = lines(folder)
    assert [line["status"] for line in found] == ["done", "out_of_memory", "stopped"], shown
    assert "Unable to allocate 4 TiB" in found[1]["reason"]
    assert 0 < found[0]["step_seconds_p50"] < 60 and found[0]["memory_gib"] > 0

    second = start("budget=3", "sweep.time_minutes=0.12")
    shown, _ = second.communicate(timeout=120)
    assert second.returncode == 0 and shown.count(": started") == 1, shown
    after = lines(folder)
    assert after[:2] == found[:2] and after[2]["trial"] == found[2]["trial"]
    assert after[2]["status"] == "timeout" and after[2]["step_seconds_p50"] is None
    page = (folder / "report.html").read_text()
    statuses = re.findall(
        r'<td class="whole[^>]*>([^<]*)</td>', page[page.index('id="trials"') : page.index('id="compared"')]
    )
    assert statuses == ["done", "out of memory", "timeout"]

    _, *words = shlex.split(json.loads((folder / "search.json").read_text())["command"])
    words += ["run.steps=4", f"run.dir={tmp_path / 'run'}"]
    command = [warm_python(), "-m", "trainer", *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert found[0]["trial"] in (folder / "config" / "best.yaml").read_text()
    config = typed.flatten_values(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()))
    asked = dict(text.split("=", 1) for text in found[0]["overrides"])
    assert {name: yaml.safe_load(value) for name, value in asked.items()} == {name: config[name] for name in asked}
