"""What the folder of a run says of its starts, and where the traces of an earlier run go. Rank 0 alone writes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trainer.checkpointing.manifest import list_checkpoints
from trainer.config import Config, ConfigError, typed
from trainer.data.tokenizer import Tokenizer
from trainer.distributed.mesh import World
from trainer.observe.report import StartReport, device_name
from trainer.observe.sinks import reason_of, write_status
from trainer.util.exit_codes import DISTRIBUTION
from trainer.util.lines import (
    CHECKPOINTS,
    EARLIER,
    LOG,
    METRICS_FILE,
    PART,
    RECORD,
    REPORT,
    SETTINGS,
    STARTS,
    TRACES,
    LineFile,
    read_json_lines,
    read_status,
)
from trainer.util.reading import FolderError, Malformed, explain_errors, temporary_name, write_atomic
from trainer.util.tables import Rows

START = {"step": int, "processes": int, "settings": dict}
"""What a line of starts.jsonl has to have to be compared with."""
PACKAGES = (DISTRIBUTION, "numpy", "triton", "transformers", "tokenizers", "datasets", "deepspeed")


def recover_folder(folder: Path) -> None:
    """Brings a run's folder back to where it was before a start that was killed while it set an earlier run aside, and
    removes files that the start had not completed. The caller holds the folder's lock.

    A set-aside is not completed here: the present start may want to go on from what the killed one set aside."""
    undo_set_aside(folder)
    for name in (*RECORD, "wandb-id"):
        for part in [*folder.glob(f"{name}.????????{PART}"), *(folder / name).glob(f"*.????????{PART}")]:
            shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink()


def begin_start(
    config: Config,
    step: int,
    resumed: Path | None,
    places: list[tuple[str, str]],
    opening: StartReport,
    tokenizer: Tokenizer,
    own: bool = False,
) -> list[str]:
    """Makes the run folder that of this start: sets an earlier run aside, and notes what is about to be trained, with
    which settings, by whom. Returns what is to be said.

    A start that is killed here at any point is followed by one that ends in the same state. The arguments are those of
    `set_aside` and `note_start`; opening: what the start prints. Raises `ConfigError` and `FolderError`; status.json
    then says so, unless it is that of an earlier run which stays in its place."""
    folder = Path(config.run.dir)
    own = own or is_own(resumed, folder)
    with report_errors(config, step) if own else contextlib.nullcontext(), explain_errors(folder):
        aside = set_aside(folder, resumed, step, own)
    with report_errors(config, step), explain_errors(folder):
        changed = note_start(config, step, resumed, aside, places, opening.sections, own)
        save_tokenizer(tokenizer, folder / "tokenizer")
        text = io.StringIO()
        opening.print(Console(file=text))
        with LineFile(folder / LOG) as log:
            log.append(text.getvalue())
    return [
        *([f"what an earlier run left in {folder} is now in {aside}"] if aside else []),
        *([f"settings changed since: {format_changes(changed)}"] if changed else []),
    ]


@contextlib.contextmanager
def report_errors(config: Config, step: int) -> Iterator[None]:
    """Around what a start does with its folder: status.json names the error that ends it, where it can be written."""
    try:
        yield
    except (ConfigError, FolderError) as error:
        with contextlib.suppress(OSError):
            write_status(Path(config.run.dir), "failed", step, config.run.steps, reason_of(error))
        raise


def is_own(resumed: Path | None, folder: Path) -> bool:
    """Whether a start goes on from a checkpoint of the run folder itself."""
    return resumed is not None and resumed.resolve().parent == (folder / CHECKPOINTS).resolve()


def set_aside(folder: Path, resumed: Path | None, step: int, own: bool = False) -> Path | None:
    """Moves what a start would overwrite into a numbered folder of `earlier/`, a run's folder like any other, and
    returns that; None where there is nothing to move.

    resumed: the checkpoint that the start goes on from, and its step. If it is one of the folder's own
    (`own`: known to be, though it lies elsewhere), only checkpoints of later steps move, with a copy of the record; if
    not, the start begins another run here, and all of the old one moves, but for a copy of `schedule`: the new run may
    have taken the old one's choice.

    Everything is gathered in a folder that ends in `PART`; its last rename completes the move. Before that,
    `recover_folder` takes the move back. Raises `OSError`; the folder is then as before."""
    found = list_checkpoints(folder / CHECKPOINTS)
    moved, copied = list[Path](), RECORD
    if own or is_own(resumed, folder):
        moved = [path for saved, path in found.items() if saved > step]
    else:
        copied, metrics = ("schedule",), folder / METRICS_FILE
        if found or metrics.exists() and metrics.stat().st_size:
            moved = [folder / name for name in TRACES if name not in copied and (folder / name).exists()]
    if not moved:
        return None
    before = [int(path.name) for path in (folder / EARLIER).glob("*") if path.name.isdecimal()]
    aside = folder / EARLIER / str(max(before, default=0) + 1)
    part = aside.with_name(aside.name + PART)
    try:
        part.mkdir(parents=True)
        for name in copied:
            copy_path(folder / name, part / name)
        for path in moved:
            there = part / path.relative_to(folder)
            there.parent.mkdir(exist_ok=True)
            path.rename(there)
        part.rename(aside)
    except OSError:
        with contextlib.suppress(OSError):
            undo_set_aside(folder)
        raise
    return aside


def undo_set_aside(folder: Path) -> None:
    """Takes back moves of `set_aside` that were not completed. What lies both in the run folder and in the unfinished
    one was copied, since a rename leaves one of the two only."""
    for part in (folder / EARLIER).glob(f"*{PART}"):
        for path in [*(part / CHECKPOINTS).glob("*"), *part.glob("*")]:
            there = folder / path.relative_to(part)
            if not there.exists() and (there.parent.exists() or there.parent == folder):
                path.rename(there)
        shutil.rmtree(part)
        with contextlib.suppress(OSError):  # others lie there
            part.parent.rmdir()


def copy_path(old: Path, new: Path) -> None:
    """Copies a file or a folder, where it exists. Raises the first `OSError`, unlike `shutil.copytree`."""
    if old.is_dir():
        new.mkdir()
        for inner in old.iterdir():
            copy_path(inner, new / inner.name)
    elif old.exists():
        shutil.copy2(old, new)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer's files, each whole or not at all."""
    part = Path(temporary_name(folder))
    part.mkdir()
    try:
        tokenizer.save(part)
        for path in part.rglob("*"):
            if path.is_file():
                there = folder / path.relative_to(part)
                there.parent.mkdir(parents=True, exist_ok=True)
                path.replace(there)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def note_start(
    config: Config,
    step: int,
    resumed: Path | None,
    aside: Path | None,
    places: list[tuple[str, str]],
    table: dict[str, Rows],
    own: bool = False,
) -> dict[str, list[Any]]:
    """Appends to starts.jsonl what is about to train, and writes its settings to config.yaml.

    step: after which it begins. places: `describe_place` of every rank. table: what the start prints. own: as in
    `set_aside`. Returns the settings that differ from those under which the checkpoint `resumed` was written, as
    {name: [old, new]}.
    """
    folder, settings = Path(config.run.dir), json.loads(json.dumps(typed.to_plain(config)))
    now = {"processes": len(places), "settings": settings}
    changed = list_changes(start_of(folder if own else resumed.resolve().parent.parent, step), now) if resumed else {}
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "resumed": resumed and str(resumed),
        "set_aside": aside and str(aside),
        "command": shlex.join(sys.orig_argv),
        "job": os.environ.get("SLURM_JOB_ID"),
        "code": code_version(),
        "versions": list_versions(),
        "hosts": Counter(host for host, _ in places),
        "devices": Counter(device for _, device in places),
        "changed": changed,
        "table": {title: [(label, str(value)) for label, value in rows] for title, rows in table.items()},
        **now,
    }
    with LineFile(folder / STARTS) as starts:
        starts.append(json.dumps(line) + "\n")
    write_atomic(folder / SETTINGS, typed.to_yaml(config))
    return changed


def describe_place(world: World) -> tuple[str, str]:
    """The host and the device of this rank."""
    return socket.gethostname(), device_name(world.device)


def start_of(run: Path, step: int) -> dict[str, Any]:
    """`processes` and `settings` of the start that wrote the checkpoint of `step`, as far as the folder `run` tells."""
    found: dict[str, Any] = {"settings": {}}
    with contextlib.suppress(OSError, Malformed):
        for start in read_json_lines(run / STARTS, START):
            found = start if start["step"] < step else found
    return found


def list_changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """{name: [old, new]} of what differs between two starts. A setting that another version does not have is no
    change; an entry of a mapping such as data.sources is."""
    old, new = (
        {name: start[name] for name in ("processes",) if name in start} | typed.flatten_values(start["settings"])
        for start in (before, now)
    )
    return {
        name: [old.get(name), new.get(name)]
        for name in {**new, **old}
        if old.get(name) != new.get(name) and (name in old and name in new or old and typed.is_entry(name))
    }


def format_changes(changed: dict[str, list[Any]]) -> str:
    """Changes for people: `lr.peak 0.001 -> 0.005, processes 4 -> 2`."""
    return ", ".join(f"{name} {json.dumps(old)} -> {json.dumps(new)}" for name, (old, new) in changed.items())


def code_version() -> dict[str, Any] | None:
    """Commit of the checkout that this package runs from, and whether files of it were changed; None if it runs from
    none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # an environment may lie in somebody else's checkout
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno", ":/"))}
    except (OSError, subprocess.SubprocessError):
        return None


def list_versions() -> dict[str, str]:
    """What computes: the interpreter, torch's build, CUDA, and the installed packages that numbers may depend on."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    found |= {"cuda": torch.version.cuda} if torch.version.cuda else {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def write_report(folder: Path) -> None:
    """Writes report.html. The run is over, and whatever is wrong with the page leaves it as it is."""
    try:
        from trainer.pages.page import write_page  # what the page needs is not loaded before the run is over

        write_page([folder], folder / REPORT)
    except Exception as error:
        retry = f"trainer report {shlex.quote(str(folder))} tries again"
        print(f"{folder / REPORT} was not written: {reason_of(error)}; {retry}", file=sys.stderr, flush=True)


def settle_status(folder: Path, step: int, steps: int) -> None:
    """Makes status.json say `done` for a run whose checkpoint of `step` has all `steps`, and that was killed before it
    could say so. What was said of a run of another length stays."""
    known = read_status(folder, steps=int) or {"status": None, "steps": steps}
    if known["status"] != "done" and known["steps"] == steps:
        write_status(folder, "done", step, steps)


def way_on(config: Config) -> str:
    """How a run goes on from what it has saved."""
    how = "" if config.checkpoint.resume == "auto" else " with checkpoint.resume=auto"
    return f"the same command{how} resumes {config.run.dir}"
