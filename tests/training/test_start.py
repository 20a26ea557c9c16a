"""What a start does with the files of its run folder: it takes place whole or not at all, writes nothing elsewhere, and
does not take longer for a longer run."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.accounts import Case
from support.accounts import accounts as accounts_of
from support.faults_of_files import DIED, REFUSED, SURVIVED, every_fault
from support.launch import warm_python

import trainer
from trainer.cluster import job, node
from trainer.cluster.node import PreflightOptions
from trainer.config import Config, ConfigError
from trainer.data.tokenizer import byte_tokenizer
from trainer.observe import metrics, sinks
from trainer.observe.diagnose_run import diagnose_run
from trainer.observe.report import StartReport
from trainer.observe.sinks import Logger
from trainer.pages.folder import RunFolder
from trainer.sweep.results import clear_trial
from trainer.training import history
from trainer.training.session import claim_folder
from trainer.util import reading
from trainer.util.lines import MANY, count_lines, refuse_links
from trainer.util.reading import FolderError

ALONE = SimpleNamespace(rank=0, agree=lambda decide: decide())
"""What a start needs to know of a world of one process."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def overrides(cache):
    """What a run in a folder is started with."""

    def make(folder: Path, **more: object) -> list[str]:
        values = {
            "model": "tiny",
            "model.width": 32,
            "model.depth": 2,
            "data.tokenizer": "bytes",
            "data.cache": cache,
            "data.sources.stdlib.limit": 20,
            "batch.sequence_length": 16,
            "batch.micro_size": 1,
            "batch.accumulation": 2,
            "run.steps": 8,
            "run.dir": folder,
            "run.device": "cpu",
            "lr.warmup": 1,
            "checkpoint.every": 2,
            "checkpoint.keep_last": 0,
            "logging.console": "none",
            **more,
        }
        return [f"{name}={value}" for name, value in values.items()]

    return make


@pytest.fixture(scope="module")
def settings(overrides):
    return lambda folder, **more: trainer.compose(overrides(folder, **more))


# A start that is killed, or fails


@pytest.fixture
def quick(monkeypatch):
    """Leaves out what takes a second and writes no file, for hundreds of starts."""
    monkeypatch.setattr(history, "code_version", lambda: None)
    monkeypatch.setattr(history, "list_versions", dict)
    monkeypatch.setattr(history, "list_changes", lambda before, now: {})
    told = SimpleNamespace(to_plain=lambda config: {"run": {"steps": 8}}, to_yaml=lambda config: "run: {steps: 8}\n")
    monkeypatch.setattr(history, "typed", told)


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """A run folder to be made hundreds of times: in memory where the machine has such a file system."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as place:
        yield Path(place) / "run"


def line(step: int) -> str:
    return json.dumps({"step": step, "time": 1e9 + step, "loss": 1.0 / step}) + "\n"


def earlier_run(folder: Path) -> None:
    """The folder of a run that was killed at step 7, after its checkpoint of step 6."""
    for step in (2, 4, 6):
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps({"saved": step, "step": step}))
        (checkpoint / "rank-00000.bin").write_text(f"weights {step}")
    (folder / "metrics.jsonl").write_text("".join(map(line, range(1, 8))) + '{"step": 8, "lo')
    (folder / "metrics-replaced.jsonl").write_text(line(3).replace("1000000003", "900000003"))
    (folder / "starts.jsonl").write_text('{"step": 0, "processes": 1, "settings": {}, "mine": 1}\n')
    (folder / "status.json").write_text('{"status": "running", "step": 7, "steps": 8}\n')
    (folder / "config.yaml").write_text("the old settings: 1\n")
    (folder / "samples.jsonl").write_text('{"step": 2}\n')
    (folder / "console.log").write_text("the old log\n")
    for name in ("tokenizer/tokenizer.json", "schedule/choice.yaml", "wandb/offline/x", "traces/step", "wandb-id"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the old {name}")
    (folder / "earlier" / "1").mkdir(parents=True)
    (folder / "earlier" / "1" / "metrics.jsonl").write_text(line(1).replace("1000000001", "800000001"))


def nothing(folder: Path) -> None:
    folder.mkdir()


def start(config: Config, resumed: int | None) -> Callable[[], None]:
    """The part of a start that has to do with its folder."""
    folder = Path(config.run.dir)
    path = folder / "checkpoints" / f"step-{resumed:08d}" if resumed else None
    table = StartReport({"model": [("name", "tiny")]}, {})

    def opened() -> None:
        with claim_folder(folder, ALONE):
            try:
                history.begin_start(config, resumed or 0, path, [("host", "CPU")], table, byte_tokenizer())
                Logger(folder, config.logging, config.run, resumed or 0, {})
            finally:
                sys.setprofile(None)  # the end of the claim belongs to the end of the run

    return opened


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def state(folder: Path) -> dict[str, object]:
    """What lies in a folder. Of the lines of starts.jsonl those of the earlier run and the last one count, without what
    differs between any two starts: a start that was killed may have its own; and of console.log that it is there."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        content = "a folder" if path.is_dir() else path.read_text()
        if name == "starts.jsonl":
            *before, last = map(json.loads, content.splitlines())
            kept = [one for one in before if "mine" in one]
            content = json.dumps([kept, {key: last[key] for key in last if key not in ("time", "set_aside")}])
        found[name] = "a log" if name == "console.log" else content
    return found


def treasure(folder: Path) -> list[str]:
    """What took time to make, whole files and lines of metrics, each as often as it is there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    lines = [text for path in files if path.name.startswith("metrics") for text in path.read_text().split("\n")[:-1]]
    return sorted(
        lines + [str(path.parent.name) + path.read_text() for path in files if path.parent.name[:4] == "step"]
    )


SITUATIONS = {
    "resumed": (earlier_run, 6),
    "gone back": (earlier_run, 2),
    "begun anew": (earlier_run, None),
    "new": (nothing, None),
}
FAULTS = {
    "killed": None,
    "no space": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "no rights": OSError(errno.EACCES, os.strerror(errno.EACCES)),
}


@pytest.mark.parametrize(
    "situation, fault",
    [
        *((situation, "killed") for situation in SITUATIONS if situation != "resumed"),
        ("resumed", "no space"),
        ("begun anew", "no rights"),
    ],
)
def test_a_start_is_whole_or_the_next_one_is_as_if_it_had_not_been(quick, settings, folder, capfd, situation, fault):
    """A start that goes back does all that one does which goes on with the newest checkpoint."""
    make, resumed = SITUATIONS[situation]
    work = start(settings(folder), resumed)

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        make(folder)

    prepare()
    before, old = treasure(folder), files(folder)
    work()
    wanted, kept, seen = state(folder), treasure(folder), set()
    assert set(before) <= set(kept)
    refusals = (ConfigError,) if fault == "no rights" else (FolderError, ConfigError)
    for number, code in every_fault(prepare, work, FAULTS[fault], refusals):
        seen.add(code)
        assert code in (DIED, REFUSED, SURVIVED), (number, capfd.readouterr().err)
        assert set(before) <= set(treasure(folder)), number
        for name in ("config.yaml", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"):
            met = (folder / name).read_text() if (folder / name).exists() else None
            assert met in (old.get(name), wanted[name], None), (number, name)  # never half of it
        work()
        assert state(folder) == wanted, number
        assert treasure(folder) == kept, number  # nothing lost, nothing twice
    assert (DIED if fault == "killed" else REFUSED) in seen and number > 25


def test_a_start_with_other_wishes_finds_what_a_killed_one_was_moving(quick, settings, folder):
    whole = folder.with_name("whole")
    anew, resume = (start(settings(folder), resumed) for resumed in (None, 6))

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        earlier_run(folder)

    prepare()
    resume()
    wanted = state(folder)
    earlier_run(whole)
    places = set()
    for number, _ in every_fault(prepare, anew, None):
        with claim_folder(folder, ALONE):  # before a start looks for checkpoints
            steps = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
            aside = sorted(path.name for path in (folder / "earlier" / "2" / "checkpoints").glob("step-*"))
        assert (len(steps), len(aside)) in ((3, 0), (0, 3)), number
        places.add(len(steps))
        if steps:
            resume()
            assert state(folder) == wanted, number
        else:
            moved = (folder / "earlier" / "2" / "metrics.jsonl").read_text()
            assert moved == (whole / "metrics.jsonl").read_text(), number
    assert places == {0, 3}


def test_moved_lines_may_be_cut_anywhere_and_none_is_lost_or_there_twice(tmp_path):
    """A process may be killed within one write, or between the copy and the cut."""
    lines = [line(step) for step in range(1, 8)]
    tail = "".join(lines[3:])
    for before in ("", "".join(line(step).replace("1000000", "900000") for step in (5, 6, 7))):
        for written in range(len(tail) + 1):
            (tmp_path / "metrics.jsonl").write_text("".join(lines))
            (tmp_path / "metrics-replaced.jsonl").write_text(before + tail[:written])
            sinks.JsonLines(tmp_path, 3, print).close("done")
            assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:3])
            assert (tmp_path / "metrics-replaced.jsonl").read_text() == before + tail, written


def test_lines_that_only_look_as_if_they_had_been_moved_are_moved(tmp_path):
    """Of a metrics.jsonl that a user has put back: its last line is in the other file, and its first is not."""
    (tmp_path / "metrics.jsonl").write_text("".join(map(line, range(1, 8))))
    (tmp_path / "metrics-replaced.jsonl").write_text("".join(map(line, (5, 6, 7))))
    sinks.JsonLines(tmp_path, 3, print).close("done")
    assert (tmp_path / "metrics-replaced.jsonl").read_text() == "".join(map(line, (5, 6, 7, 4, 5, 6, 7)))


def test_status_tells_why_a_start_failed(settings, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tokenizer").write_text("no folder")
    with pytest.raises(ConfigError, match=f"run.dir={folder} cannot be prepared for this start .*tokenizer"):
        start(settings(folder), None)()
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "failed" and "tokenizer" in status["reason"]


FAILURES = {  # exit code, and what the one message says
    "a setting": (2, "cannot be prepared for this start (Is a directory"),
    "the logger": (2, "metrics.jsonl is no regular file"),
    "the machine": (1, "cannot be prepared for this start (No space left on device"),
}


@pytest.mark.parametrize("problem", FAILURES)
def test_all_ranks_end_with_one_message_where_a_start_fails(overrides, tmp_path, problem):
    folder = tmp_path / "run"
    folder.mkdir()
    before, (code, words) = [], FAILURES[problem]
    if problem == "a setting":
        (folder / "console.log").mkdir()
    elif problem == "the logger":  # which rank 0 alone opens, when the model exists
        os.mkfifo(folder / "metrics.jsonl")
    else:  # a limit of 2,000 bytes a file, which the line of starts.jsonl exceeds
        before = ["prlimit", "--fsize=2000"]
    ended = processes(2, overrides(folder), *before)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count(words) == 1 and "Traceback" not in ended.stderr, ended.stderr
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "failed" and words in status["reason"]


# Links of a stranger's run folder


@pytest.fixture(scope="module")
def trained(overrides, settings, tmp_path_factory) -> Path:
    """The folder of a run with much that a run may write: under a pipeline, profiled, resumed from an older checkpoint,
    started by Slurm, looked at by the preflight."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    more = {"eval.generate.every": 2, "eval.generate.tokens": 2, "logging.profile": 4}
    more |= {"logging.tensorboard": bool(find_spec("tensorboard")), "logging.wandb.enabled": bool(find_spec("wandb"))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        launcher = [
            "trainer",
            "torchrun",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--log-dir",
            str(folder / "torchrun/0"),
        ]
        command = [warm_python(), "-m", *launcher, "-m", "trainer", *overrides(folder, **more, **{"parallel.pp": 2})]
        ended = run_warm(command)
        assert ended.returncode == 0, ended.stderr
        back = {"checkpoint.resume": folder / "checkpoints" / "step-00000006"}
        assert trainer.run(settings(folder, **(more | back | {"logging.wandb.enabled": False}))).code == 0
    slurm(folder)
    assert not check(folder)
    for name in (
        "starts.jsonl",
        "earlier",
        "slurm",
        "schedule",
        "tokenizer",
        "samples.jsonl",
        "accounts.jsonl",
        "traces",
    ):
        assert (folder / name).exists(), name
    return folder


def processes(count: int, arguments: list[str], *before: str) -> subprocess.CompletedProcess[str]:
    return run_warm([*before, warm_python(), "-m", "trainer", "train", "--processes", str(count), *arguments])


def run_warm(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON_EXEC": warm_python(), "PYTHONPATH": str(Path(trainer.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def slurm(folder: Path) -> None:
    job.begin_job(1, 1, ["model=tiny", "data.tokenizer=bytes", f"run.dir={folder}"], {"SLURM_JOB_ID": "7"})


def check(folder: Path) -> list[str]:
    return node.check_node(PreflightOptions(check="node", run_dir=str(folder), nodes=node.NODE, free_gib=0, stamp="1"))


def names(folder: Path) -> list[str]:
    """All that lies in a run's folder but the content of checkpoints, of earlier runs, and of wandb's own folders,
    which are written once, under names of their own."""
    paths = (path.relative_to(folder) for path in folder.rglob("*"))
    return sorted(str(path) for path in paths if path.parts[0] not in MANY or len(path.parts) == 1)


def put_link(place: Path, outside: Path) -> None:
    """A link in the place of a file or folder, to one with the same content elsewhere."""
    if place.is_dir():
        shutil.move(place, outside)
    else:
        outside.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(place, outside)
    place.symlink_to(outside)


def content(path: Path) -> dict[str, bytes]:
    return {str(found): found.read_bytes() for found in [path, *path.rglob("*")] if found.is_file()}


def test_no_name_that_a_run_writes_may_be_a_link_out_of_its_folder(settings, trained, tmp_path):
    """A whole run is asked about the names that lie in the folder itself, in the next test."""
    looked_at = names(trained)
    assert len(looked_at) > 25
    config, asked = settings(tmp_path, **{"run.steps": 9}), set()
    for number, name in enumerate(looked_at):
        folder, outside = tmp_path / f"{number}" / "run", tmp_path / f"{number}" / "outside"
        shutil.copytree(trained, folder, symlinks=True)
        put_link(folder / name, outside)
        before, inside = content(outside), content(folder)
        words = rf"holds {re.escape(name)}, a link to {re.escape(str(outside))} outside of it.*remove the link"
        if name == "checkpoints":  # the user's own, on another disk
            refuse_links(folder)
            continue
        begins = [start(replace(config, run=replace(config.run, dir=str(folder))), 6), partial(clear_trial, folder)]
        begins += [partial(slurm, folder)]
        if "/" in name and name.split("/")[0] not in asked:
            asked.add(name.split("/")[0])
            begins.append(partial(trainer.run, settings(folder, **{"run.steps": 9})))
        for begin in begins:
            with pytest.raises(ConfigError, match=words):
                begin()
        (problem,) = check(folder)
        assert re.search(words, problem)
        assert content(outside) == before and content(folder) == inside, name


def test_names_that_do_not_exist_yet_may_not_be_links_either(settings, trained, tmp_path):
    for number, name in enumerate({path.name for path in trained.iterdir()} - {"checkpoints"}):
        folder, outside = tmp_path / f"{number}" / "run", tmp_path / f"{number}" / "outside"
        folder.mkdir(parents=True)
        (folder / name).symlink_to(outside)
        with pytest.raises(ConfigError, match=f"holds {name}, a link to .*outside of it"):
            trainer.run(settings(folder))
        assert not outside.exists() and [path.name for path in folder.iterdir()] == [name]


def test_no_file_of_a_run_is_changed_under_another_name(quick, settings, trained, tmp_path):
    """Of hard links: a file that is appended to is refused, others are replaced and leave the other name alone."""
    refused = set()
    for number, name in enumerate(names(trained)):
        folder, outside = tmp_path / f"{number}" / "run", tmp_path / f"{number}" / "outside"
        if not (trained / name).is_file():
            continue
        shutil.copytree(trained, folder, symlinks=True)
        os.link(folder / name, outside)
        before = outside.read_bytes()
        try:
            start(settings(folder), 6)()
            slurm(folder)
        except ConfigError as error:
            assert f"{folder / name} is a hard link" in str(error)
            refused.add(name)
        assert outside.read_bytes() == before, name
    assert {"metrics.jsonl", "starts.jsonl", "console.log"} <= refused


def test_links_within_the_folder_are_no_way_out_and_are_not_appended_to(quick, settings, trained, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))
    (folder / "best").symlink_to("checkpoints/step-00000006")
    (folder / "notes").symlink_to(tmp_path)  # a name that no run writes
    refuse_links(folder)
    (folder / "console.log").unlink()
    (folder / "console.log").symlink_to("config.yaml")
    with pytest.raises(ConfigError, match=r"console\.log is a symbolic link"):
        start(settings(folder), 6)()


def test_checkpoints_may_lie_on_another_disk_and_not_in_another_run(settings, trained, tmp_path, monkeypatch):
    disk, folder, link = tmp_path / "disk", tmp_path / "real", tmp_path / "runs"
    disk.mkdir()
    folder.mkdir()
    link.symlink_to(folder)  # run.dir itself may be a link
    (folder / "checkpoints").symlink_to(disk)
    assert trainer.run(settings(link, **{"run.steps": 2})).code == 0
    assert trainer.run(settings(link, **{"run.steps": 4})).code == 0
    assert sorted(path.name for path in disk.iterdir()) == ["step-00000002", "step-00000004"]
    for target in (trained / "checkpoints", trained, trained / "checkpoints" / "step-00000002", tmp_path / "nowhere"):
        (folder / "checkpoints").unlink()
        (folder / "checkpoints").symlink_to(target)
        with pytest.raises(ConfigError, match="holds checkpoints, a link to"):
            refuse_links(folder)
    (folder / "checkpoints").unlink()
    (folder / "checkpoints").symlink_to(disk)
    refuse_links(folder)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(disk).st_uid + 1)
    with pytest.raises(ConfigError, match="holds checkpoints, a link to"):
        refuse_links(folder)


def test_what_a_killed_start_had_moved_is_not_taken_back_through_a_link(settings, tmp_path):
    outside = tmp_path / "outside"
    (outside / "home").mkdir(parents=True)
    (tmp_path / "run" / "earlier").mkdir(parents=True)
    (tmp_path / "run" / "earlier" / "1.part").symlink_to(outside)
    with pytest.raises(ConfigError, match=r"holds earlier/1\.part, a link to"), claim_folder(tmp_path / "run", ALONE):
        pass
    assert (outside / "home").is_dir()
    (tmp_path / "run" / "earlier" / "1.part").unlink()
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-00000002.tmp").symlink_to(outside)  # which a start would remove
    with pytest.raises(ConfigError, match=r"holds checkpoints/step-00000002\.tmp, a link to"):
        refuse_links(tmp_path / "run")


# A long run

TIMED = """
import re, sys, time
from pathlib import Path
from trainer.observe import sinks
def memory():  # ru_maxrss would count the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
def seconds(step):
    before = time.process_time()
    sinks.JsonLines(Path(sys.argv[1]), step, print).close("done")
    return time.process_time() - before
before, count = memory(), int(sys.argv[2])
print(seconds(count - 1000), seconds(count // 2), memory() - before)
"""
"""Seconds of CPU of two resumes, and MiB of memory that they take beside what was imported."""


def test_a_start_of_a_long_run_takes_no_longer_and_no_more_memory(tmp_path):
    """Measured on 2 busy cores with 2 million lines of 1,474 bytes, 2.9 GB: 0.02 s of CPU where 1,000 lines are moved,
    17 s where all of them are, and 52 MiB of memory either way. The time of a file that is read whole by adding up its
    lines grows with the square: 10,000 lines took 26 s. Half of the file here, 30 MB, is more than may be held."""
    count, more = 200_000, "0" * 270
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(f'{{"step": {step}, "loss": 2.5{more}}}\n' for step in range(1, count + 1))
    done = subprocess.run(
        [sys.executable, "-c", TIMED, str(tmp_path), str(count)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    few, many, more = map(float, done.stdout.split())
    assert few < 5 and many < 240 and more < 20
    assert count_lines(tmp_path / "metrics.jsonl") == count_lines(tmp_path / "metrics-replaced.jsonl") == count // 2
    assert sum(1 for _ in metrics.iterate_metrics(tmp_path)) == count // 2


def test_no_file_that_grows_with_a_run_is_too_long_to_be_read(quick, settings, tmp_path, monkeypatch):
    """Every limit of a file's size is set below what the files have; lines stay below it."""
    folder = tmp_path / "run"
    earlier_run(folder)
    (folder / "metrics.jsonl").write_text("".join(map(line, range(1, 400))))
    (folder / "metrics-replaced.jsonl").write_text("".join(map(line, range(2, 401))))
    now = {
        "time": "now",
        "step": 0,
        "processes": 1,
        "settings": {"lr": {"peak": 1}},
        "hosts": {},
        "devices": {"CPU": 1},
    }
    (folder / "starts.jsonl").write_text((json.dumps(now) + "\n") * 400)
    account = next(iter(accounts_of(Case({"products": 1.0, "data": 0.5}, ranks=1), random.Random(0), steps=1)))
    (folder / "accounts.jsonl").write_text((account.dumps() + "\n") * 50)
    for name in ("reading", "lines"):
        monkeypatch.setattr(f"trainer.util.{name}.LIMIT", 20_000)
    monkeypatch.setattr(reading.read_bytes, "__defaults__", (20_000, 0))
    assert min((folder / name).stat().st_size for name in ("metrics.jsonl", "starts.jsonl", "accounts.jsonl")) > 20_000
    assert history.start_of(folder, 6)["settings"] == {"lr": {"peak": 1}}
    found = RunFolder("run", folder)
    assert found.problems == [] and found.replaced == 399 and len(found.curves) == 399 and len(found.starts) == 100
    assert found.profile and diagnose_run(folder) and len(metrics.read_metrics(folder)) == 399
    start(settings(folder), 6)()
    assert count_lines(folder / "metrics.jsonl") == 6 and count_lines(folder / "metrics-replaced.jsonl") == 399 + 393
