"""What the folder of a run says of its starts, and where the traces of an earlier run go. Rank 0 alone writes."""

from __future__ import annotations

import contextlib
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
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trainer.checkpointing.manifest import list_checkpoints
from trainer.config import Config, typed
from trainer.diagnosis.account import ACCOUNTS
from trainer.distributed.world import World
from trainer.observe.report import device_name
from trainer.observe.samples import SAMPLES
from trainer.observe.sinks import reason_of, write_status
from trainer.pages.page import write_page
from trainer.util.extras import DISTRIBUTION
from trainer.util.reading import Malformed, mismatch, parse_json, read_bytes, read_json, read_yaml
from trainer.util.run_folder import (
    DIAGNOSIS,
    EARLIER,
    LOG,
    METRICS_FILE,
    REPLACED,
    REPORT,
    SETTINGS,
    SHORTAGE,
    STARTS,
    STATUS,
)
from trainer.util.tables import Rows

RECORD = (METRICS_FILE, REPLACED, SAMPLES, STATUS, SETTINGS, STARTS, LOG, ACCOUNTS, "tokenizer", "schedule")
"""What a run leaves beside its checkpoints, without which nobody knows what they are."""
TRACES = ("checkpoints", *RECORD, DIAGNOSIS, REPORT, SHORTAGE, "traces", "tensorboard", "wandb", "wandb-id")
"""All that a run writes itself. What a launcher writes (slurm, torchrun, flight) tells of every start, and stays."""
START = {"step": int, "processes": int, "settings": dict}
"""What a line of starts.jsonl has to have to be compared with."""
PACKAGES = (DISTRIBUTION, "numpy", "triton", "transformers", "tokenizers", "datasets", "deepspeed")


def set_aside(folder: Path, resumed: Path | None, step: int, own: bool = False) -> Path | None:
    """Moves what a start would overwrite into a numbered folder of `earlier/`, a run's folder like any other, and
    returns that; None where there is nothing to move.

    resumed: the checkpoint that the start goes on from, and its step. If it is one of the folder's own (`own`: known to
    be, though it lies elsewhere), only checkpoints of later steps move, with a copy of the record; if not, the start
    begins another run here, and all of the old one moves.
    """
    checkpoints = folder / "checkpoints"
    found = list_checkpoints(checkpoints)
    if own or resumed is not None and resumed.resolve().parent == checkpoints.resolve():
        leaving, copied = [path for saved, path in found.items() if saved > step], RECORD
    else:
        metrics = folder / METRICS_FILE
        used = found or metrics.exists() and metrics.stat().st_size
        leaving = [folder / name for name in TRACES if (folder / name).exists()] if used else []
        copied = ("schedule",)  # of schedule=auto: the new run may have taken the old one's choice
    if not leaving:
        return None
    before = [int(path.name) for path in (folder / EARLIER).glob("*") if path.name.isdecimal()]
    aside = folder / EARLIER / str(max(before, default=0) + 1)
    aside.mkdir(parents=True)
    for path in leaving:
        there = aside / path.relative_to(folder)
        there.parent.mkdir(exist_ok=True)
        path.rename(there)
    for name in copied:
        copy(*((aside / name, folder / name) if (aside / name).exists() else (folder / name, aside / name)))
    return aside


def copy(old: Path, new: Path) -> None:
    """A file or a folder, where it exists."""
    if old.is_dir():
        shutil.copytree(old, new)
    elif old.exists():
        shutil.copy2(old, new)


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

    step: after which it begins. places: `place` of every rank. table: what the start prints. own: as in
    `set_aside`. Returns the settings that differ from those under which the checkpoint `resumed` was written, as
    {name: [old, new]}.
    """
    folder, settings = Path(config.run.dir), json.loads(json.dumps(typed.plain(config)))
    now = {"processes": len(places), "settings": settings}
    changed = changes(start_of(folder if own else resumed.resolve().parent.parent, step), now) if resumed else {}
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": step,
        "resumed": resumed and str(resumed),
        "set_aside": aside and str(aside),
        "command": shlex.join(sys.orig_argv),
        "job": os.environ.get("SLURM_JOB_ID"),
        "code": code_version(),
        "versions": versions(),
        "hosts": Counter(host for host, _ in places),
        "devices": Counter(device for _, device in places),
        "changed": changed,
        "table": {title: [(label, str(value)) for label, value in rows] for title, rows in table.items()},
        **now,
    }
    with open(folder / STARTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    (folder / SETTINGS).write_text(typed.to_yaml(config))
    return changed


def place(world: World) -> tuple[str, str]:
    """The host and the device of this rank."""
    return socket.gethostname(), device_name(world.device)


def start_of(run: Path, step: int) -> dict[str, Any]:
    """`processes` and `settings` of the start that wrote the checkpoint of `step`, as far as the folder `run` tells."""
    with contextlib.suppress(OSError, ValueError, Malformed, IndexError):
        starts = [parse_json(text) for text in read_bytes(run / STARTS).splitlines()]
        return [start for start in starts if not mismatch(start, START) and start["step"] < step][-1]
    with contextlib.suppress(OSError, Malformed):  # of a version without starts.jsonl
        start = {"settings": read_yaml(run / SETTINGS)}
        return start if isinstance(start["settings"], dict) else {"settings": {}}
    return {"settings": {}}


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """{name: [old, new]} of what differs between two starts. A setting that another version does not have is no
    change; an entry of a mapping such as data.sources is."""
    old, new = (
        {name: start[name] for name in ("processes",) if name in start} | typed.flat(start["settings"])
        for start in (before, now)
    )
    return {
        name: [old.get(name), new.get(name)]
        for name in {**new, **old}
        if old.get(name) != new.get(name) and (name in old and name in new or old and typed.is_entry(name))
    }


def shown(changed: dict[str, list[Any]]) -> str:
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


def versions() -> dict[str, str]:
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
        write_page([folder], folder / REPORT)
    except Exception as error:
        retry = f"python -m trainer.report {shlex.quote(str(folder))} tries again"
        print(f"{folder / REPORT} was not written: {reason_of(error)}; {retry}", file=sys.stderr, flush=True)


def settle_status(folder: Path, step: int, steps: int) -> None:
    """Makes status.json say `done` for a run whose checkpoint of `step` has all `steps`, and that was killed before it
    could say so. What was said of a run of another length stays."""
    try:
        known = read_json(folder / STATUS, {"status": str, "steps": int}, "")
    except (OSError, Malformed):
        known = {"status": None, "steps": steps}
    if known["status"] != "done" and known["steps"] == steps:
        write_status(folder, "done", step, steps)


def way_on(config: Config) -> str:
    """How a run goes on from what it has saved."""
    how = "" if config.checkpoint.resume == "auto" else " with checkpoint.resume=auto"
    return f"the same command{how} resumes {config.run.dir}"
