"""launch/slurm: what its parts decide, and a run on a real Slurm through a time limit, a killed process and a
preemption."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cluster import Cluster, missing, wait_for
from support.launch import warm_python

from trainer import compose
from trainer.cluster import job
from trainer.config import ConfigError
from trainer.config.compose import quote_value
from trainer.observe import metrics

ROOT = Path(__file__).parents[2]
SCRIPT, TESTS = "launch/slurm/train.sbatch", str(ROOT / "tests")
SLOW, FULL = (
    [
        *("+config=debug", "model.depth=1", "batch.global_size=2", "imports=[support.disturbance]"),
        f"loss.terms.disturbance.sleep={seconds}",
    ]
    for seconds in (0.8, 0.0)
)
"""A run that mostly sleeps, so that it lasts without taking a core for itself, and the same at full speed."""


# What to do when a start has ended


def decided(status=None, code=1, told=False, state="RUNNING", idle=0, progress=True, reason=""):
    return job.decide_restart(status, code, told, state, job.JobRecord(idle), progress, 3, reason).split()[0]


def test_the_state_of_the_run_decides_and_not_the_exit_code():
    assert decided(None, 0) == "exit=0"  # nothing was left to train, and the folder says what it said before
    assert decided("done", 1) == "exit=0"  # rank 0 was done; another process was killed while it ended
    assert decided("stopped", 1) == decided("stopped", 143) == "requeue"
    assert decided("running", 137) == decided("failed", 1) == decided(None, 1) == "again"
    assert decided("running", 137, told=True) == "requeue"  # killed at the time limit: no time to start again
    assert decided("stopped", 75, state="CANCELLED") == decided("failed", 1, state="NODE_FAIL") == "exit=143"
    assert decided("stopped", state="") == "requeue" and decided("failed", state="") == "again"  # Slurm did not answer
    assert decided(None, job.LOST, progress=False) == "requeue"
    assert decided(None, 2) == "exit=2" and decided(None, 3) == "exit=3"
    assert decided(None, 3, told=True) == "requeue"  # the stop signal ended the preflight


def test_starts_without_progress_are_bounded():
    assert (
        decided("failed", idle=1, progress=False) == "again" and decided("failed", idle=2, progress=False) == "exit=1"
    )
    assert (
        decided("stopped", idle=2, progress=False) == "exit=1"
        and decided("stopped", idle=9, progress=True) == "requeue"
    )
    record = job.next_record(None, False)
    for progress, idle, saved in ((False, 1, False), (False, 2, False), (True, 0, True), (False, 1, True)):
        record = job.next_record(record, progress)
        assert (record.idle, record.saved) == (idle, saved)


def test_what_lacks_memory_is_not_tried_again():
    """Under the same plan it would end the same way, unless it has come further than before."""
    memory = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert decided("failed", progress=False, reason=memory) == "exit=1"
    assert decided("failed", progress=True, reason=memory) == decided("failed", progress=False, reason="no") == "again"


def checkpoint(folder: Path, step: int, age: float) -> None:
    """age: seconds that the clock has been set back since the job's start, which must change nothing."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(f'{{"sha256": "{step:064x}"\n}}\n')
    (path / "data").write_bytes(bytes(928))
    os.utime(path / "manifest.json", (time.time() - age,) * 2)


@pytest.mark.parametrize("age", [-1, 1_000_000])
def test_a_job_resumes_itself_only_after_it_has_saved(tmp_path, age):
    environment = {"SLURM_JOB_ID": "7"}
    overrides = ["+config=debug", f"run.dir={tmp_path}", "checkpoint.resume=none"]
    checkpoint(tmp_path, 90, age=100)  # of an earlier run
    assert job.begin_job(1, 2, overrides, environment)["args"] == overrides
    assert (
        job.begin_job(1, 2, overrides, environment)["args"] == overrides
    )  # a second start, with nothing saved by the first
    (tmp_path / "status.json").write_text('{"status": "stopped"}')
    assert job.end_job(tmp_path, "7", 1, False, "RUNNING", retries=2).startswith("exit=1")
    checkpoint(tmp_path, 5, age=age)
    os.utime(tmp_path / "status.json", (time.time() - age,) * 2)
    assert job.end_job(tmp_path, "7", 1, False, "RUNNING", retries=2).startswith("requeue")
    started = job.begin_job(1, 2, overrides, environment)
    assert started["args"] == [*overrides, "checkpoint.resume=auto"] and started["run_dir"] == str(tmp_path)
    assert float(started["free_gib"]) == pytest.approx(2 * 1002 / 2**30, abs=1e-3)
    assert job.end_job(tmp_path, "7", 1, False, "RUNNING", retries=2).startswith(
        "again"
    )  # what an earlier start said does not count


def test_a_second_job_on_the_same_folder_changes_nothing_for_the_first(tmp_path):
    overrides = ["+config=debug", f"run.dir={tmp_path}", "checkpoint.resume=none"]
    job.begin_job(1, 2, overrides, {"SLURM_JOB_ID": "7"})
    (tmp_path / "status.json").write_text('{"status": "running"}')
    checkpoint(tmp_path, 5, age=-1)
    os.utime(tmp_path / "slurm" / "7.json", (time.time() - 100,) * 2)
    os.utime(tmp_path / "status.json", (time.time() - 50,) * 2)
    assert (
        job.begin_job(1, 2, overrides, {"SLURM_JOB_ID": "8"})["args"] == overrides
    )  # its own count; the run itself refuses it
    assert job.end_job(tmp_path, "8", 2, False, "RUNNING", retries=3).startswith("exit=2")
    assert job.end_job(tmp_path, "7", 137, False, "RUNNING", retries=3) == (
        "again the run ended with code 137 and status running: starting it on the same nodes"
    )
    assert job.begin_job(1, 2, overrides, {"SLURM_JOB_ID": "7"})["args"] == [*overrides, "checkpoint.resume=auto"]


@pytest.mark.parametrize(
    "name, value", [("TRAINER_RETRIES", "three"), ("TRAINER_PROCESSES", "0"), ("TRAINER_PROCESSES", "abc")]
)
def test_counts_of_the_environment_are_checked_before_anything_starts(tmp_path, name, value):
    fake(tmp_path, srun="", scontrol='echo "n1 NodeAddr=127.0.0.1 "')
    done, calls = script(tmp_path, "+config=debug", f"run.dir={tmp_path / 'run'}", **{name: value})
    assert (
        done.returncode == 2
        and done.stderr == f"configuration error:\n  - {name}={value} must be a whole number of at least 1\n"
    )
    assert not any(call.startswith("srun") for call in calls) and not (tmp_path / "run").exists()


def test_settings_are_refused_for_the_processes_that_will_run(tmp_path):
    with pytest.raises(ConfigError, match="parallel.tp=4"):
        job.begin_job(
            2,
            1,
            ["+config=debug", f"run.dir={tmp_path}", "parallel.tp=4", "parallel.tp_across_nodes=true"],
            {"SLURM_JOB_ID": "7"},
        )
    assert not any(tmp_path.iterdir())


def test_arrays_take_lines_and_numbers(tmp_path):
    sweep = tmp_path / "sweep.txt"
    sweep.write_text("# peaks\nlr.peak=1e-3 'run.name=a b'\n\nlr.peak=3e-4 run.seed={task}\n")
    assert job.expand_task(["+config=debug", f"@{sweep}"], 1) == ["+config=debug", "lr.peak=1e-3", "run.name=a b"]
    assert job.expand_task([f"@{sweep}", "x={task}"], 2) == ["lr.peak=3e-4", "run.seed=2", "x=2"]
    assert job.expand_task([f"@{sweep}", "x={task}"], None) == [
        "lr.peak=1e-3",
        "run.name=a b",
        "lr.peak=3e-4",
        "run.seed={task}",
        "x={task}",
    ]
    for task in (0, 3):
        with pytest.raises(ConfigError, match="2 lines.*--array 1-2"):
            job.expand_task([f"@{sweep}"], task)
    with pytest.raises(ConfigError, match="absent.txt"):
        job.expand_task(["@absent.txt"], 1)


@pytest.mark.parametrize("line", ["root:x:0:0:root:/root:/bin/bash", "a secret='of two words'", "'no end"])
def test_another_file_than_one_of_overrides_is_not_quoted(line, tmp_path):
    (tmp_path / "file").write_text(f"# a comment\nrun.steps=3\n{line}\n")
    with pytest.raises(ConfigError, match=r"file cannot be read as lines of overrides: line 3") as caught:
        job.begin_job(1, 1, [f"@{tmp_path / 'file'}"], {"SLURM_JOB_ID": "7"})
    assert not any(word in str(caught.value) for word in line.replace("=", " ").split() if len(word) > 3)


def test_every_task_has_a_run_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert job.begin_job(1, 1, ["+config=debug", "run.seed={task}"], environment)["run_dir"] == "runs/debug-2"
    assert job.begin_job(1, 1, ["+config=debug", "run.name=peak-{task}"], environment)["run_dir"] == "runs/peak-2"
    for name in ("a=b", "a,b", "(q", 'a "b" \\'):
        started = job.begin_job(1, 1, ["+config=debug", f"run.name={quote_value(name)}"], environment)
        assert started["run_dir"] == f"runs/{name}-2" and compose(started["args"]).run.name == f"{name}-2"
    with pytest.raises(ConfigError, match="run.dir=all is the same for every task"):
        job.begin_job(1, 1, ["+config=debug", "run.dir=all"], environment)


def test_assignments_survive_the_shell():
    values = {"run_dir": "a 'b' $c", "args": ["x=[1, 2]", "y='", "*"], "cache": ""}
    script = job.format_shell(values) + '\nprintf "%s\\n" "$run_dir" "$cache" "${args[@]}"'
    assert subprocess.check_output(["bash", "-c", script], text=True).split("\n")[:-1] == [
        "a 'b' $c",
        "",
        "x=[1, 2]",
        "y='",
        "*",
    ]


def test_what_a_module_prints_is_no_assignment(tmp_path):
    """The script evaluates what `begin` prints: a module that `imports` names may print anything, by any way."""
    (tmp_path / "loud.py").write_text(
        "import atexit, os, subprocess, sys, threading\n"
        "line = 'touch evaluated; run_dir=/elsewhere'\n"
        "print(line); os.write(1, line.encode() + b'\\n'); subprocess.run(['echo', line])\n"
        "sys.__stdout__.write(line + '\\n')\n"
        "atexit.register(print, line)\n"
    )
    overrides = ["+config=debug", "imports=[loud]", f"run.dir={tmp_path / 'run'}"]
    text = (ROOT / SCRIPT).read_text()
    asked = next(line.strip() for line in text.splitlines() if "trainer.cluster.job begin" in line)
    evaluated = next(line.strip() for line in text.splitlines() if line.strip().startswith("eval "))
    shown = subprocess.run(
        ["bash", "-uc", f'python=$1; shift\nprocesses=1\n{asked}\n{evaluated}\necho "$run_dir"', "-", sys.executable]
        + overrides,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0 and shown.stdout == f"{tmp_path / 'run'}\n", shown
    assert shown.stderr.count("touch evaluated") == 5
    assert not (tmp_path / "evaluated").exists()


def fake(folder: Path, **scripts: str) -> None:
    """Commands for PATH that note how they were called in folder/calls."""
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{folder}/calls\n{script}\n')
        path.chmod(0o755)


def script(folder: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Runs the batch script with Slurm's commands replaced by those in `folder`; also what was called."""
    calm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": "1",
        "SLURM_JOB_ID": "44",
        "TRAINER_PYTHON": warm_python(),
        "PYTHON_EXEC": warm_python(),
        "TRAINER_PREFLIGHT": "0",
        "FAKES": str(folder),
    }
    done = subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **calm, "PATH": f"{folder}:{os.environ['PATH']}", **environment},
    )
    return done, (folder / "calls").read_text().splitlines()


STOPS = '[[ "$*" = *trainer\\ torchrun* ]] && echo "{\\"status\\": \\"stopped\\"}" >$FAKES/run-2/status.json; true'


def test_a_task_of_an_array_speaks_for_itself_and_is_patient_with_slurm(tmp_path):
    """The task that has the array's number, at a time when every second call of scontrol fails."""
    fake(
        tmp_path,
        srun=STOPS,
        sleep="",
        scontrol="""
        [ "$1 $2" = "show hostnames" ] && { echo n1; exit; }
        [ $(($(grep -c ^scontrol $FAKES/calls) % 2)) = 1 ] || exit 1
        case "$*" in *node*) echo " NodeAddr=127.0.0.1 " ;; *job*) echo " JobState=RUNNING " ;; esac""",
    )
    done, calls = script(
        tmp_path, "+config=debug", f"run.dir={tmp_path}/run-{{task}}", SLURM_ARRAY_JOB_ID="44", SLURM_ARRAY_TASK_ID="2"
    )
    asked = [call for call in calls if call.startswith("scontrol")]
    assert asked[1:] == 2 * ["scontrol show node -o n1"] + 2 * ["scontrol show job -o 44_2"] + 2 * [
        "scontrol requeue 44_2"
    ], (asked, done)
    assert done.returncode == 75  # since nothing ends the script here
    assert "job 44_2: the run stopped with nothing new to save" in done.stdout


def test_both_parts_of_the_preflight_get_its_options(tmp_path):
    fake(
        tmp_path,
        srun='[[ "$*" != *check=network* ]] || exit 3',
        scontrol='echo "n1 NodeAddr=127.0.0.1 JobState=RUNNING "',
    )
    settings = {"TRAINER_PREFLIGHT": "patience=7 skew=2", "TRAINER_PROCESSES": "2"}
    done, calls = script(tmp_path, "+config=debug", f"run.dir={tmp_path / 'run'}", **settings)
    asked = [call for call in calls if "trainer preflight" in call]
    assert done.returncode == 3 and len(asked) == 2 and all(call.endswith(" patience=7 skew=2") for call in asked), (
        done,
        calls,
    )


def test_a_node_hands_signals_to_its_workers_and_ends_as_they_do(tmp_path):
    """A worker that takes its time to stop, and is not killed for it."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, signal, sys, time\ngot = []\n[signal.signal(number, lambda number, _: got.append(number)) for "
        f"number in (signal.SIGTERM, signal.SIGUSR1)]\nopen({str(tmp_path / 'ready')!r}, 'w').close()\nwhile len(got) "
        "< 2: time.sleep(0.05)\ntime.sleep(1)\nos._exit(75 if got == [signal.SIGTERM, signal.SIGUSR1] else 9)\n"
    )
    agent = subprocess.Popen(
        [warm_python(), "-m", "trainer", "torchrun", "--standalone", "--nproc-per-node", "1", str(worker)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        wait_for((tmp_path / "ready").exists, 120, "worker")
        agent.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        agent.send_signal(signal.SIGUSR1)
        assert agent.wait(60) == 75
        assert "Traceback" not in agent.stderr.read()
    finally:
        agent.kill()


# A real Slurm


@pytest.fixture(scope="module")
def cluster():
    if why := missing():
        pytest.skip(why)
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.stop()
    assert not list(cluster.processes()), "Slurm left processes behind"


def submit(cluster: Cluster, log: Path, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> str:
    """Submits the script to two nodes of one process each, and returns the job's number. Slurm signals what it has
    started: here clients of `warm_python`, which pass signals on, unless TRAINER_PYTHON is another."""
    variables = {
        "TRAINER_PYTHON": warm_python(),
        "PYTHON_EXEC": warm_python(),
        "PYTHONPATH": TESTS,
        "TRAINER_FREE_GIB": "0.1",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return cluster.ask(
        "env",
        *(f"{name}={value}" for name, value in variables.items()),
        "sbatch",
        "--parsable",
        "--nodes=2",
        "--gpus-per-node=0",
        f"--output={log}",
        *options,
        SCRIPT,
        *arguments,
        cwd=ROOT,
    ).strip()


def ended(cluster: Cluster, number: str) -> bool:
    return cluster.job(number)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


def last_step(folder: Path) -> int:
    try:
        return metrics.read_metrics(folder)[-1]["step"]
    except ConfigError:
        return 0


def test_wrong_settings_and_unfit_nodes_end_the_job_at_once(cluster, tmp_path):
    refused = submit(cluster, tmp_path / "refused.log", "+config=debug", f"run.dir={tmp_path / 'run'}", "parallel.tp=4")
    unfit = submit(
        cluster, tmp_path / "unfit.log", "+config=debug", f"run.dir={tmp_path / 'run'}", TRAINER_FREE_GIB="1e6"
    )
    slow = submit(
        cluster, tmp_path / "slow.log", "+config=debug", f"run.dir={tmp_path / 'run'}", TRAINER_PREFLIGHT="between=1000"
    )
    wait_for(lambda: all(ended(cluster, one) for one in (refused, unfit, slow)), 240, "end of three jobs")
    assert cluster.job(refused)["ExitCode"] == "2:0" and "parallel.tp=4" in (tmp_path / "refused.log").read_text()
    log = (tmp_path / "unfit.log").read_text()
    assert cluster.job(unfit)["ExitCode"] == "3:0" and all(
        f"preflight: {node}: run.dir=" in log for node in ("n1", "n2")
    )
    assert cluster.job(slow)["ExitCode"] == "3:0"
    assert re.search(
        r"n(1 with n2|2 with n1): all-reduce at [\d.]+ GB/s, below the floor of 1000",
        (tmp_path / "slow.log").read_text(),
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_survives_time_limit_kill_and_preemption(cluster, tmp_path):
    """One job, four starts; its losses are those of a run that nothing disturbed."""
    run, log, steps = tmp_path / "run", tmp_path / "run.log", tmp_path / "steps.txt"
    settings = [
        "checkpoint.every=5",
        "checkpoint.at_end=true",
        "run.deterministic=true",
        "data=text",
        f"data.sources.text.path={ROOT / 'trainer'}/*.py",
        f"data.cache={tmp_path / 'cache'}",
    ]
    steps.write_text("run.steps=100000")
    number = submit(
        cluster,
        log,
        *SLOW,
        *settings,
        f"run.dir={run}",
        f"@{steps}",
        options=("--time=60", "--signal=B:USR1@150"),
        TRAINER_PREFLIGHT="0",
        TRAINER_PYTHON=sys.executable,  # Slurm's signals reach torchrun and its workers at once, as they do elsewhere
    )

    # The time limit, brought near once the run is under way. Slurm looks every half a minute whose is.
    wait_for(lambda: last_step(run) > 1, 180, "step")
    elapsed = cluster.job(number)["RunTime"].split(":")  # hours, minutes, seconds
    cluster.ask("scontrol", "update", f"jobid={number}", f"timelimit={int(elapsed[1]) + 2}")
    wait_for(lambda: cluster.job(number)["Restarts"] == "1", 180, "requeue at the time limit")
    assert json.loads((run / "status.json").read_text())["status"] == "stopped"
    first = last_step(run)
    assert first > 0 and f"stopped by a signal after step {first}" in log.read_text()
    cluster.ask("scontrol", "update", f"jobid={number}", "timelimit=60")

    # A killed process: started again on the same nodes, from the checkpoint before.
    wait_for(
        lambda: last_step(run) > first + 5 and any((run / "checkpoints").glob("step-*[05]")),
        180,
        "progress after the requeue",
    )
    [victim] = cluster.processes("RANK=1")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: log.read_text().count("resumed from") == 2, 180, "start after the kill")
    second = last_step(run)
    assert cluster.job(number)["Restarts"] == "1"
    wait_for(lambda: last_step(run) > second, 180, "progress after the kill")

    # A preemption: Slurm sends SIGTERM to the steps only, and takes the nodes when they have ended.
    other = cluster.ask(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=true"
    ).strip()
    wait_for(lambda: cluster.job(number)["Restarts"] == "2", 180, "requeue at the preemption")
    third = json.loads((run / "status.json").read_text())
    assert third["status"] == "stopped" and third["step"] >= second
    steps.write_text(f"run.steps={third['step'] + 5}")
    wait_for(lambda: ended(cluster, other) and ended(cluster, number), 180, "end of the run")
    assert cluster.job(number)["JobState"] == "COMPLETED" and cluster.job(number)["ExitCode"] == "0:0"

    lines = metrics.read_metrics(run)
    assert [line["step"] for line in lines] == list(range(1, third["step"] + 6))
    calm = tmp_path / "calm"
    subprocess.run(
        [
            warm_python(),
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "trainer",
            *FULL,
            *settings,
            f"run.dir={calm}",
            f"run.steps={third['step'] + 5}",
            "checkpoint.every=0",
        ],
        cwd=ROOT,
        check=True,
        timeout=300,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": warm_python(), "PYTHONPATH": TESTS},
    )
    assert [line["loss"] for line in lines] == [line["loss"] for line in metrics.read_metrics(calm)]


def test_a_task_of_an_array_stops_and_is_requeued_alone(cluster, tmp_path):
    """That whose job has the number of the array."""
    number = submit(
        cluster,
        tmp_path / "%a.log",
        *SLOW,
        "run.steps=100000",
        f"run.dir={tmp_path}/run-{{task}}",
        options=("--array=1-2", "--nodes=1", "--time=60"),
        TRAINER_PREFLIGHT="0",
    )
    wait_for(lambda: all(last_step(tmp_path / f"run-{task}") > 1 for task in (1, 2)), 180, "step of both tasks")
    tasks = [line.split() for line in cluster.ask("squeue", "-h", "-o", "%A %K").splitlines()]
    [(_, same), (_, other)] = sorted(tasks, key=lambda task: task[0] != number)
    cluster.ask("scancel", "--batch", "--signal=USR1", f"{number}_{same}")  # as the time limit does
    wait_for(lambda: cluster.job(f"{number}_{same}")["Restarts"] == "1", 60, "requeue")
    assert json.loads((tmp_path / f"run-{same}" / "status.json").read_text())["status"] == "stopped"
    assert f"job {number}_{same}: the run stopped after saving" in (tmp_path / f"{same}.log").read_text()
    left = cluster.job(f"{number}_{other}")
    assert (left["JobState"], left["Restarts"]) == ("RUNNING", "0")
    assert json.loads((tmp_path / f"run-{other}" / "status.json").read_text())["status"] == "running"
    cluster.ask("scancel", number)
    wait_for(lambda: all(ended(cluster, f"{number}_{task}") for task in (same, other)), 60, "end after scancel")


def test_a_cancelled_run_saves_and_stays_cancelled(cluster, tmp_path):
    run, log = tmp_path / "run", tmp_path / "run.log"
    number = submit(cluster, log, *SLOW, "run.steps=100000", f"run.dir={run}", TRAINER_PREFLIGHT="0")
    wait_for(lambda: last_step(run) > 1, 180, "step")
    cluster.ask("scancel", number)
    wait_for(lambda: ended(cluster, number), 60, "end after scancel")
    assert cluster.job(number)["JobState"] == "CANCELLED"
    assert json.loads((run / "status.json").read_text())["status"] == "stopped"
    step = last_step(run)
    assert re.fullmatch(r"step-0*(\d+)", max((run / "checkpoints").iterdir()).name)[1] == str(step)
