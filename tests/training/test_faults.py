"""Runs that meet faults: killed, stopped and broken ranks, lost nodes, full disks, damaged checkpoints, vanished data.

Whatever happens, the run ends with the losses of one that nothing disturbed, and goes on from a checkpoint no older
than the newest that was whole. Moments and victims are drawn from a seed that is printed; FAULT_SEED=N draws the same
again."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.launch import WORKERS, program_of, warm_python

from trainer.checkpointing.manifest import list_checkpoints, read_manifest
from trainer.checkpointing.retention import find_newest
from trainer.cluster.node import free_ports
from trainer.config import GuardConfig
from trainer.diagnosis.time_breakdown import find_straggler, logged_ratios
from trainer.observe import metrics
from trainer.observe.slowdown import SlowdownAlert

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("FAULT_SEED", random.randrange(10**6)))
STEPS, EVERY = 40, 5
SETTINGS = [
    "+config=debug",
    "model.depth=2",
    "batch.global_size=4",
    "batch.micro_size=2",
    f"run.steps={STEPS}",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep_last=3",
    "checkpoint.at_end=true",
    "run.deterministic=true",
    "run.device=cpu",
    "logging.console=plain",
    "guard.stall_seconds=5",
    "guard.stall_allowance=40",
    "guard.max_skipped=2",
    "guard.slow_factor=1.5",
    "guard.slow_lines=5",
]


class Launch:
    """A run that is under way: one process, or torchrun's, whose output goes to a file beside the run's folder."""

    def __init__(
        self,
        folder: Path,
        processes: int,
        *overrides: str,
        torchrun: tuple[str, ...] = ("--standalone",),
        name: str = "log",
        **environment: str,
    ):
        self.folder, self.log = folder, folder.parent / f"{folder.name}.{name}.txt"
        corpus = folder.parent / "corpus"
        if not corpus.exists():
            shutil.copytree(ROOT / "trainer" / "model", corpus, ignore=shutil.ignore_patterns("__pycache__"))
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), *torchrun] if processes else []
        variables = {
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHON_EXEC": warm_python(),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "BREAK": str(folder.parent / "break"),
            **environment,
        }
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [
                    warm_python(),
                    *launcher,
                    str(WORKERS / "faults.py"),
                    *SETTINGS,
                    "data=text",
                    f"data.sources.text.path={corpus}/**/*.py",
                    f"run.dir={folder}",
                    f"data.cache={folder.parent / 'cache'}",
                    *overrides,
                ],
                env={**os.environ, **variables},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if (ended := self.process.poll() is not None) or time.monotonic() > end:
                self.kill()
                raise AssertionError(
                    f"seed {SEED}: no {what}; the launch {'ended' if ended else 'lasts'}:\n{self.text()[-5000:]}"
                )
            time.sleep(0.01)

    def reached(self, step: int) -> Callable[[], bool]:
        return lambda: last_step(self.folder) >= step

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for child in children(program_of(self.process.pid)):
            if f"RANK={number}" in Path(f"/proc/{child}/environ").read_text(errors="replace").split("\0"):
                return program_of(child)
        raise AssertionError(f"there is no rank {number}")

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self, seconds: float = 180) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"seed {SEED}: no end of the run:\n{self.text()[-5000:]}") from None

    def kill(self) -> None:
        """Ends the launcher and its processes, without a word."""
        launcher = program_of(self.process.pid)
        for child in [launcher, self.process.pid, *children(launcher)]:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def children(process: int) -> list[int]:
    """None, where it has ended."""
    try:
        return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))
    except OSError:
        return []


def last_step(folder: Path) -> int:
    """The last step of the present start: a resume cuts off what was lost."""
    try:
        return metrics.read_metrics(folder)[-1]["step"]
    except Exception:
        return 0


def losses(folder: Path, steps: int = STEPS) -> list[float]:
    lines = metrics.read_metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), f"seed {SEED}"
    return [line["loss"] for line in lines]


def newest(folder: Path) -> int:
    path, _ = find_newest(folder / "checkpoints")
    return read_manifest(path)["step"] if path else 0


def resumed(launch: Launch) -> list[int]:
    """The steps that the starts of a launch went on from."""
    return [int(step) for step in re.findall(r"resumed from \S+ at step (\d+)", launch.text())]


@pytest.fixture(scope="module", autouse=True)
def say_seed() -> None:
    print(f"FAULT_SEED={SEED}")


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Launch:
    """The undisturbed run, with one slow rank, which changes no number; torchrun's store is the one that breaks
    restarts."""
    launch = Launch(
        tmp_path_factory.mktemp("faults") / "calm",
        2,
        torchrun=("--standalone", "--max-restarts", "1"),
        SLOW_RANK="1",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0",
    )
    assert launch.end() == 0, launch.text()
    return launch


@pytest.fixture
def folder(calm, tmp_path) -> Iterator[Path]:
    """For a run on the corpus of the calm one, which need not be tokenised again."""
    (tmp_path / "cache").symlink_to(calm.folder.parent / "cache")
    yield tmp_path / "run"


def test_a_slow_rank_is_measured_and_named(calm):
    slow = [line["straggler_rank"] == 1 and line["straggler"] > 1.5 for line in metrics.read_metrics(calm.folder)]
    assert sum(slow[20:]) > 14 > sum(slow[:20]), slow
    assert "rank 1 takes" in calm.text()


def test_a_run_that_slows_down_says_so(calm):
    """It says what its lines of metrics say, whatever the machine did meanwhile; and they show the slow rank."""
    lines = metrics.read_metrics(calm.folder)
    alert = SlowdownAlert(GuardConfig(slow_factor=1.5, slow_lines=5), str(calm.folder))
    expected = [text for line in lines for text in alert.add(line)]
    said = re.findall(r"^.{19}  (slow: .*)$", (calm.folder / "console.log").read_text(), re.MULTILINE)
    assert said == expected
    slow = find_straggler(logged_ratios(lines[20:]))
    assert slow.rank == 1 and slow.is_slow(1.5), calm.text()


def test_restarts_that_would_fail_are_told_at_the_first_start(calm, folder):
    assert calm.text().count("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == 1


def test_killed_stopped_and_broken_ranks(calm, folder):
    """One launch, four faults: a rank killed at any moment and within a save, stopped (rank 0 has the store), and
    NaN."""
    draw = random.Random(SEED)
    launch = Launch(folder, 2, torchrun=("--standalone", "--max-restarts", "4"))
    try:
        for number, fault in enumerate(draw.sample(["kill", "kill saving", f"stop {draw.randrange(2)}", "break"], 4)):
            launch.wait_for(
                lambda: len(resumed(launch)) == number and last_step(folder) >= 6 * number + 7 and newest(folder),
                f"progress before '{fault}'",
            )
            time.sleep(draw.uniform(0, 0.3))
            if fault == "kill saving":
                launch.wait_for(lambda: any((folder / "checkpoints").glob("*.tmp/*")), "save")
            if fault == "break":
                (folder.parent / "break").touch()
                launch.wait_for(lambda: "steps in a row without an update" in launch.text(), "end for broken steps")
                saved = newest(folder)
            elif fault.startswith("stop"):
                stop_and_read(launch, int(fault[-1]))
                saved = newest(folder)
            else:
                saved = newest(folder)
                os.kill(launch.rank(draw.randrange(2)), signal.SIGKILL)
            launch.wait_for(lambda: len(resumed(launch)) > number, f"start after '{fault}'")
            assert resumed(launch)[-1] >= saved > 0, f"seed {SEED}, {fault}"
        assert launch.end() == 0, launch.text()
    finally:
        launch.kill()
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in launch.text()
    assert losses(folder) == losses(calm.folder), f"seed {SEED}"
    assert json.loads((folder / "status.json").read_text()) == {"status": "done", "step": STEPS, "steps": STEPS}


def test_a_rank_that_waits_for_its_gpu_leaves_when_another_is_killed(calm, folder):
    """It takes no signal and hears of no broken connection of gloo; torchrun would end it after 30 seconds."""
    launch = Launch(folder, 2, WAITING_RANK="0")
    try:
        launch.wait_for(lambda: "waits for ever" in launch.text(), "step 20")
        began = time.monotonic()
        os.kill(launch.rank(1), signal.SIGKILL)
        assert launch.end() != 0
    finally:
        launch.kill()
    assert time.monotonic() - began < 25, launch.text()
    reason = "the process of rank 1 ended during training, step 21"
    assert f"rank 0 leaves: {reason}" in launch.text()
    status = json.loads((folder / "status.json").read_text())
    assert status == {"status": "failed", "step": 20, "steps": STEPS, "reason": reason}


def stop_and_read(launch: Launch, rank: int) -> None:
    """Stops a rank until the watchdog has ended the run for it, and reads what it says."""
    before = set((launch.folder / "flight").glob("*/report.txt"))
    victim = launch.rank(rank)
    os.kill(victim, signal.SIGSTOP)
    try:
        launch.wait_for(
            lambda: "reason" in json.loads((launch.folder / "status.json").read_text()), "report of the watchdog"
        )
    finally:
        os.kill(victim, signal.SIGCONT)  # else torchrun waits half a minute before it kills it
    [report] = set((launch.folder / "flight").glob("*/report.txt")) - before
    text, status = report.read_text(), json.loads((launch.folder / "status.json").read_text())
    assert "guard.stall_" in text and f"rank {rank} does not answer" in text.splitlines()[1]
    assert re.search(rf"rank {1 - rank} in \w+ .*, which rank {rank} may not have entered", text), text
    assert re.search(r" at (parallel/|distributed/|checkpointing/|training/)", text), text
    assert (
        status["status"] == "failed"
        and "no progress for" in status["reason"]
        and f"rank {rank} does not answer" in status["reason"]
    )
    stacks = (report.parent / f"rank-{1 - rank}.stack.txt").read_text()
    assert "training/trainer.py" in stacks


def test_a_lost_node_and_a_stopped_launcher(calm, folder):
    """Two agents of torchrun, one of which is lost for good; then SIGTERM to the other, and one process that finishes
    the run."""
    draw = random.Random(SEED)
    [port] = free_ports()
    options = (
        "--nnodes",
        "1:2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "test",
        "--max-restarts",
        "2",
    )
    # The rendezvous is on the node that stays: with it, a launch is lost.
    first, second = (
        Launch(
            folder,
            1,
            torchrun=(
                *options,
                "--rdzv-conf",
                f"is_host={host},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2",
            ),
            name=name,
        )
        for name, host in (("first", 1), ("second", 0))
    )
    try:
        first.wait_for(
            lambda: "2 x CPU" in first.text() + second.text() and last_step(folder) > EVERY + 3 and newest(folder),
            "step of both",
        )
        time.sleep(draw.uniform(0, 0.5))
        already, saved = len(resumed(first)), newest(folder)
        second.kill()
        first.wait_for(
            lambda: len(resumed(first)) > already and last_step(folder) > resumed(first)[-1] + 2, "progress on one node"
        )
        assert resumed(first)[-1] >= saved > 0 and "2 a micro-batch x 2 micro-batches x 1 rank" in first.text()
        first.process.send_signal(signal.SIGTERM)
        first.end()
    finally:
        first.kill(), second.kill()
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "stopped" and newest(folder) == status["step"] < STEPS

    refused = Launch(
        folder, 0, "checkpoint.resume=auto", "batch.global_size=null", "batch.accumulation=1", name="refused"
    )
    assert (
        refused.end() == 2
        and "batch.global_size=4 batch.accumulation=null, which fits any number of ranks" in refused.text()
    )
    last = Launch(folder, 0, "checkpoint.resume=auto", name="last")
    assert last.end() == 0 and resumed(last) == [status["step"]]
    assert losses(folder) == pytest.approx(losses(calm.folder), rel=2e-6)


def test_a_lost_node_is_made_up_for_by_the_memory_of_another(calm, folder):
    """Two agents of torchrun, each with a memory file system of its own. One is lost with all that it has. The other
    goes on alone from what it holds of both, and no checkpoint was ever on disk."""
    draw, every = random.Random(SEED), 3
    [port] = free_ports()
    rendezvous = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=2,is_host="
    options = (
        "--nnodes",
        "1:2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "memory",
    )
    options += ("--max-restarts", "2", "--rdzv-conf")
    memories = [folder.parent / name for name in ("memory0", "memory1")]
    for memory in memories:
        memory.mkdir()
    first, second = (
        Launch(
            folder,
            1,
            "checkpoint.every=0",
            f"checkpoint.peer_every={every}",
            f"checkpoint.peer_folder={memory}",
            torchrun=(*options, f"{rendezvous}{number}"),
            name=f"memory-{number}",
        )
        for number, memory in zip((1, 0), memories)
    )
    try:
        first.wait_for(
            lambda: "2 x CPU" in first.text() + second.text() and last_step(folder) > 2 * every + 1, "step of both"
        )
        time.sleep(draw.uniform(0, 0.3))
        second.kill()
        memories[1].rename(folder.parent / "lost")  # at once, though the process may take a moment to die
        reached = last_step(folder)
        first.wait_for(lambda: resumed(first), "start from memory")
        assert str(memories[0]) in first.text() and "x 1 rank" in first.text()
        assert reached - 2 * every <= resumed(first)[-1] <= reached + 1
        assert first.end() == 0
    finally:
        first.kill(), second.kill()
    assert losses(folder) == pytest.approx(losses(calm.folder), rel=2e-6)
    assert not any(memories[0].iterdir()), "a run that is done needs no in-memory checkpoint"


def test_damaged_checkpoints_and_a_vanished_corpus(calm, folder):
    shutil.copytree(calm.folder, folder)
    (folder / "status.json").unlink()
    checkpoints = list_checkpoints(folder / "checkpoints")
    truncated, flipped, whole = checkpoints  # newest first
    file = next(checkpoints[truncated].glob("*.bin"))
    os.truncate(file, file.stat().st_size // 2)
    file = next(checkpoints[flipped].glob("*.bin"))
    content = bytearray(file.read_bytes())
    content[random.Random(SEED).randrange(len(content))] ^= 1
    file.write_bytes(content)
    corpus = folder.parent / "corpus"
    shutil.copytree(calm.folder.parent / "corpus", corpus)
    lost = corpus / "loss.py"
    lost.rename(folder.parent / "elsewhere.py")
    refused = Launch(folder, 0, "checkpoint.resume=auto", name="refused")
    assert refused.end() == 2 and "the data differ from the checkpoint's" in refused.text(), refused.text()
    (folder.parent / "elsewhere.py").rename(lost)
    again = Launch(folder, 2, "checkpoint.resume=auto")
    again.wait_for(lambda: resumed(again), "resume")
    shutil.rmtree(corpus)  # a run has its tokens in the cache
    assert (
        again.end() == 0
        and again.text().count("passing over the damaged checkpoint") == 2
        and resumed(again) == [whole]
    ), again.text()
    assert losses(folder) == losses(calm.folder)


@pytest.fixture
def small_disk(folder) -> Iterator[Path]:
    """The folder of the run's checkpoints as a disk of its own, which holds one of them and half."""
    place = folder / "checkpoints"
    place.mkdir(parents=True)
    mount = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, text=True)
        if shutil.which("mount")
        else None
    )
    if mount is None or mount.returncode:
        pytest.skip(f"no disk can be mounted here: {mount.stderr.strip() if mount else 'there is no mount'}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk(calm, folder, small_disk):
    few = ["run.steps=12", "checkpoint.keep_last=1"]
    full = Launch(folder, 0, *few, name="full")
    assert full.end() == 1 and last_step(folder) == 12, full.text()
    assert (
        re.search(r"checkpoint of step 10 could not be saved: .*No space left on device", full.text())
        and newest(folder) == EVERY
    )
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    again = Launch(folder, 0, *few, "checkpoint.resume=auto", name="again")
    assert again.end() == 0 and resumed(again) == [EVERY], again.text()
    assert losses(folder, 12) == pytest.approx(losses(calm.folder)[:12], rel=2e-6)
