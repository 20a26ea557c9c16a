"""Whole runs: resume under any plan, signals, kills, broken numbers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.launch import launch, warm_python
from workers.training import MIXED, RESUMED, STEPS

from trainer.observe import metrics
from trainer.observe.hardware import over_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What tests/workers/training.py saw on 4 processes, and on 2 and 1 resuming what the 4 left behind."""
    root = tmp_path_factory.mktemp("training")
    seen: dict = {}
    for world in (4, 2, 1):
        launch("training.py", world, root, forks=True)
        seen |= json.loads((root / f"results_{world}.json").read_text())
    return seen


def test_a_run_repeats_bit_by_bit(results):
    whole, again = results["whole"], results["again"]
    assert whole["code"] == 0 and whole["steps"] == list(range(1, STEPS + 1)) and len(whole["eval"]) == 2
    for name in ("losses", "norms", "ids", "eval", "draws"):
        assert whole[name] == again[name], name
    assert len({sample for step in whole["ids"] for sample in step}) == STEPS * 8  # every sample once


def test_a_signal_to_one_rank_stops_all_after_a_save(results):
    stopped = results["stopped"]
    assert stopped["code"] == 75 and stopped["steps"][-1] in (STEPS // 2, STEPS // 2 + 1)


def test_a_resume_under_any_plan_goes_on_as_if_nothing_had_happened(results):
    whole, done = results["whole"], results["stopped"]["steps"][-1]
    resumed = {name: result for name, result in results.items() if name.startswith("resumed")}
    assert len(resumed) == sum(map(len, RESUMED.values()))
    for name, result in resumed.items():
        assert result["code"] == 0 and result["steps"] == list(range(1, STEPS + 1)), name
        assert result["ids"] == whole["ids"][done:], name
        for series in ("losses", "norms", "eval", "lr"):
            assert result[series] == pytest.approx(whole[series], rel=2e-6), (name, series)
    same = resumed["resumed_zero3_4"]
    assert same["losses"] == whole["losses"] and same["norms"] == whole["norms"] and same["eval"] == whole["eval"]
    assert same["draws"] == whole["draws"][done:]


def test_mixed_precision_resumes_bit_by_bit(results):
    for stage in MIXED:
        first, again = results[f"bf16_zero{stage}"], results[f"bf16_again{stage}"]
        assert again["ids"] == first["ids"][2:] and len(first["eval"]) == 2
        assert (
            again["losses"] == first["losses"] and again["norms"] == first["norms"] and again["eval"] == first["eval"]
        )


def test_a_finished_run_says_so_and_trains_no_more(results):
    assert results["done"]["code"] == 0 and results["done"]["ids"] == []


def test_a_broken_step_is_skipped_by_all_and_not_counted(results):
    whole, broken = results["whole"], results["broken"]
    assert broken["code"] == 0 and broken["skipped"] == [0, 0, 0, 1, 2, 2, 2, 2]
    assert broken["updates"] == [1, 2, 3, 3, 3, 3, 3, 4, 5, 6], "steps 4 and 5 are run again, and change nothing"
    assert broken["losses"][:4] == whole["losses"][:4]
    assert broken["lr"][3] == broken["lr"][4] == broken["lr"][5] == whole["lr"][3]  # the schedule waits


def test_an_fp16_overflow_lowers_the_scale_on_all_ranks(results):
    overflow = results["overflow"]
    assert overflow["code"] == 0 and overflow["skipped"][-1] == 2 and overflow["updates"][-1] == 6
    assert overflow["scales"] == [1024, 1024, 1024, 512, 256, 256, 256, 256]


def test_a_hopeless_run_stops_and_says_what_was_seen(results):
    error = results["hopeless"]["error"]
    assert "3 steps in a row" in error and "step 6" in error and "embedding.weight" in error and "samples with" in error
    assert results["hopeless"]["steps"] == [1, 2, 3, 4, 5, 6]


def test_another_model_or_corpus_is_refused_on_resume(results):
    assert "model.feed_forward.width=64 but the checkpoint has 352" in results["other_model"]["error"]
    assert "checkpoint.data=restart" in results["other_data"]["error"]
    assert results["other_data_restart"]["code"] == 0


def test_ranks_started_with_different_settings_are_refused(results):
    assert "lr.peak=0.001 on rank 0, but 0.01 on rank 1" in results["different"]["error"]


# Through the command line, as users and schedulers see it.

COMMAND = [
    "+config=debug",
    "run.steps=30",
    "checkpoint.every=4",
    "checkpoint.keep_last=0",
    "checkpoint.resume=auto",
    "checkpoint.at_end=true",
    "batch.global_size=2",
    "model.depth=2",
    "data.sources.stdlib.limit=40",
    "run.deterministic=true",
    "logging.console=plain",
    "run.device=cpu",
]


CACHE: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory) -> None:
    """One folder of tokens for all runs."""
    CACHE.append(tmp_path_factory.mktemp("cache"))


def start(folder: Path, *overrides: str, processes: int = 1, launcher: Sequence[str] = ()) -> subprocess.Popen:
    """A run by torchrun, or by words of our own command."""
    by_torchrun = processes > 1 and not launcher
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] * by_torchrun
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONUNBUFFERED": "1",
        "PYTHON_EXEC": warm_python(),
    }
    return subprocess.Popen(
        [
            warm_python(),
            *torchrun,
            "-m",
            "trainer",
            *launcher,
            *COMMAND,
            f"run.dir={folder}",
            f"data.cache={CACHE[-1]}",
            *overrides,
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Until the run has logged `step`."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        file = folder / "metrics.jsonl"
        if file.exists() and f'"step": {step},' in file.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[0][-3000:]}")


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    process = start(folder)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output
    return folder, output


def test_the_run_folder_keeps_the_contract(undisturbed):
    folder, output = undisturbed
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "starts.jsonl",
        "console.log",
        "status.json",
        "checkpoints",
        "report.html",
        "tokenizer",
    }
    assert len(losses(folder)) == 30 and "step 30/30" in output and f"everything is in {folder}" in output
    names = {
        "step",
        "time",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_second",
        "mfu",
        "mfu_full",
        "memory_gib",
        "step_seconds",
        "data_seconds",
        "evaluation_seconds",
        "checkpoint_seconds",
        "bubble",
        *(
            f"experts/{name}"
            for name in ("overflow", "fullest", "fullest_rank", "idle", "entropy", "balance", "z_loss", "bias")
        ),
        "loss_scale",
        "learned",
        "skipped",
        "repeated",
        "damaged",
        "epoch",
        "eta_seconds",
        "step_seconds_p50",
        "step_seconds_p95",
        "straggler",
        "straggler_rank",
        "comm/bytes_inner",
        "comm/bytes_outer",
        "bubble_imbalance",
        "host",
        "launch_delay",
        "profiled_step",
        *over_ranks([]),
    }
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(line) == names and line["mfu"] is None and line["tokens"] == 30 * 2 * 64
    stood = [line["step"] for line in metrics.read_metrics(folder) if line.get("checkpoint_seconds")]
    assert stood == [5, 9, 13, 17, 21, 25, 29], "the step behind each save; the last one is behind none"


def test_a_killed_run_resumes_from_its_newest_checkpoint(undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(folder, 11, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    again = start(folder, processes=2)  # and on two processes
    output = again.communicate(timeout=200)[0]
    assert again.returncode == 0 and "resumed from" in output, output
    assert losses(folder) == pytest.approx(losses(undisturbed[0]), rel=2e-6)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_exits_with_75(undisturbed, tmp_path, number):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(folder, 6, process)
    process.send_signal(number)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 75 and "stopped by a signal" in output, output
    last = len(losses(folder))
    assert (folder / "checkpoints" / f"step-{last:08d}").is_dir() and last < 30
    again = start(folder)
    assert again.communicate(timeout=200)[0] and again.returncode == 0
    assert losses(folder) == losses(undisturbed[0])


def test_sigterm_to_torchrun_saves_on_all_ranks(tmp_path):
    folder = tmp_path / "run"
    process = start(folder, processes=2)
    wait_for(folder, 6, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=100)[0]
    assert "stopped by a signal" in output, output
    assert (folder / "checkpoints" / f"step-{len(losses(folder)):08d}" / "manifest.json").is_file()


def test_ctrl_c_to_our_launcher_saves_without_a_report_of_its_own(tmp_path):
    folder = tmp_path / "run"
    process = start(folder, "run.steps=3000", processes=2, launcher=["train", "--processes", "2"])
    wait_for(folder, 6, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 75 and not re.search("Traceback|^[WE][0-9]{4} ", output, re.MULTILINE), output
    assert output.startswith("starting 2 processes; Ctrl-C saves and stops them\n"), output
    assert output.count("stopping: this step ends") == 1 and output.count("the same command resumes") == 1, output
    assert (folder / "checkpoints" / f"step-{len(losses(folder)):08d}" / "manifest.json").is_file()


def test_a_signal_is_told_even_where_few_steps_are_logged(tmp_path):
    folder = tmp_path / "run"
    process = start(folder, "run.steps=5000", "logging.every=5000", "checkpoint.every=0")
    time.sleep(1)
    deadline = time.monotonic() + 100
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.5)
    process.send_signal(signal.SIGUSR1)
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 75 and "resumes" in output, output


def test_a_last_checkpoint_that_cannot_be_written_is_a_failure(undisturbed, tmp_path):
    """The files of this run may not grow beyond 100 kB, which no checkpoint fits in."""
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [warm_python(), "-m", "trainer", *COMMAND, f"run.dir={folder}", f"data.cache={CACHE[-1]}", "run.steps=6"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 100; exec "$@"', "-", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1 and "could not be written" in done.stderr, done.stdout + done.stderr
    assert [line for line in losses(folder)] == losses(undisturbed[0])[:6]  # it had trained on all the same


def test_a_run_folder_has_one_run_at_a_time(undisturbed, tmp_path):
    folder = tmp_path / "run"
    first = start(folder, "run.steps=100000")
    wait_for(folder, 2, first)
    second = start(folder)
    output = second.communicate(timeout=100)[0]
    first.kill()
    first.communicate()
    assert second.returncode == 2 and "in use by another run" in output, output


def test_a_run_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    process = start(tmp_path / "run")
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 2 and "run.dir=" in output and "Traceback" not in output, output


def test_a_run_folder_stands_for_its_newest_checkpoint(undisturbed, tmp_path):
    output = start(tmp_path / "run", f"checkpoint.resume={undisturbed[0]}", "run.steps=31").communicate(timeout=200)[0]
    assert f"resumed from {undisturbed[0]}/checkpoints/step-00000030 at step 30" in output, output


def test_recompute_of_nothing_is_refused_before_any_process_group(tmp_path):
    for setting, words in (("activation.save=[atention]", "'atention' names no operation"),):
        process = start(tmp_path / "run", "activation=selective", setting)
        output = process.communicate(timeout=100)[0]
        assert (
            process.returncode == 2
            and words in output
            and "tokenising" not in output
            and not (tmp_path / "run").exists()
        ), output


def test_compiling_without_a_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    process = start(tmp_path / "run", "compile=true")
    output = process.communicate(timeout=100)[0]
    assert process.returncode == 2 and "compile=true needs a compiler" in output, output


def test_a_damaged_checkpoint_is_passed_over(undisturbed, tmp_path):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(undisturbed[0], folder)
    file = next((folder / "checkpoints" / "step-00000030").glob("*.bin"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    process = start(folder)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0 and "passing over the damaged checkpoint" in output and "at step 28" in output, (
        output
    )
    assert losses(folder) == losses(undisturbed[0])
