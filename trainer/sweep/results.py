"""Results of trials: read from their folders, kept in results.jsonl, shown as a table."""

from __future__ import annotations

import json
import re
import shutil
import signal
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from rich.markup import escape
from rich.table import Table

from trainer.config import ConfigError
from trainer.config.typed import flatten_values
from trainer.observe import metrics
from trainer.planning.decide import TOO_BIG
from trainer.sweep.plan import Trial
from trainer.util.exit_codes import REFUSED, STOPPED
from trainer.util.lines import RESULTS, TRIAL, read_lines, refuse_links
from trainer.util.machine import error_reason, lacks_memory
from trainer.util.reading import find_mismatch, make_printable, parse_json, read_json, shorten_foreign, write_atomic
from trainer.util.tables import console_for, format_bytes, format_count, format_duration, format_percent, print_table

TrialResult = dict[str, Any]
"""A line of results.jsonl: trial, overrides, processes, status, the names of MEASURED, reason, folder."""

MEASURED = ("loss", "eval_loss", "tokens_per_second", "mfu", "memory_gib", "step_seconds_p50")
FINISHED = ("done", "out_of_memory")
"""Statuses of trials that a later start of the same sweep leaves as they are."""

RESULT: dict[str, Any] = {
    "trial": str,
    "overrides": [str],
    "processes": int,
    "status": str,
    **dict.fromkeys(MEASURED, (int, float, NoneType)),
    "reason": (str, NoneType),
    "folder": str,
}
"""What has to stand in a line of results.jsonl."""


def clear_trial(folder: Path) -> None:
    """Prepares a trial's folder for a start: removes the status and errors that an earlier start has left. Raises
    `ConfigError` where a link leads out of the folder."""
    refuse_links(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "torchrun", ignore_errors=True)


def note_start(trial: Trial) -> None:
    """Writes what a trial is started with, so that a later start can tell whether its settings are the same."""
    content = {"processes": trial.processes, "settings": trial.settings}
    write_atomic(trial.folder / TRIAL, json.dumps(content) + "\n")


def read_start(trial: Trial) -> dict[str, Any]:
    """What `note_start` wrote at the trial's last start; empty if there was none. Raises `ConfigError` for a file that
    says something else."""
    path, way_out = trial.folder / TRIAL, f"set another sweep.name, or remove {trial.folder}"
    try:
        start = read_json(path, {"processes": int, "settings": dict}, way_out)
        flatten_values(start["settings"])
    except OSError:
        return {}
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; {way_out}") from None
    return start


def changed_since_start(trial: Trial, started: dict[str, Any]) -> list[str]:
    """The settings in which a trial differs from the one that was started in its folder before."""
    old, new = (
        {"sweep.processes": one["processes"], **flatten_values(one["settings"])}
        for one in (started, {"processes": trial.processes, "settings": trial.settings})
    )
    return [
        f"{name}={new.get(name)}, then {old.get(name)}"
        for name in {**new, **old}
        if old.get(name) != new.get(name) and name not in ("run.dir", "run.name", "checkpoint.resume")
    ]


def oom_kills() -> int | None:
    """How many processes the kernel has killed for lack of host memory since boot; None where /proc does not say."""
    try:
        return int(re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)[1])
    except (OSError, TypeError):
        return None


def trial_outcome(
    folder: Path, code: int, requested: str | None = None, kernel_killed: bool | None = None
) -> tuple[str, str | None]:
    """A trial's status and the reason for it, after its start has ended.

    code: the agent's exit code. requested: the status to give it if the sweep itself has stopped it by
    a signal. kernel_killed: whether the kernel has killed processes for lack of memory meanwhile, None if unknown."""
    status = _read(folder / "status.json")
    if code == 0:
        return "done", None
    errors = error_texts(folder) + ([str(status["reason"])] if "reason" in status else [])
    if short := next(filter(lacks_memory, errors), None):
        return "out_of_memory", error_reason(short)
    text = _tail(folder / "log.txt")
    refusals = re.findall(r"^configuration error[^:\n]*:(.*(?:\n  - .*)*)", text, re.MULTILINE)
    refusal = "; ".join(part for line in refusals[-1].split("\n  - ") if (part := line.strip())) if refusals else ""
    if not status and TOO_BIG in refusal:  # whatever the code: it may be that of another node
        return "out_of_memory", refusal
    if requested is not None:
        return requested, None
    if code == 128 + signal.SIGKILL and kernel_killed is not False:
        return "out_of_memory", "a process was killed, probably by the kernel for lack of host memory"
    if code == REFUSED:
        return "refused", refusal or "see log.txt"
    if code == STOPPED or status.get("status") == "stopped":
        return "stopped", "by a signal from elsewhere, after saving"
    if code == 128 + signal.SIGKILL:
        return "failed", "a process was killed by SIGKILL, and not by the kernel for lack of memory"
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), f"ended with code {code}")
    return "failed", error_reason(errors[0]) if errors else last


def error_texts(folder: Path) -> list[str]:
    """The errors that the ranks of a trial's last start left for torchrun, the first one first.

    Starts are named by a number, or in a Slurm job by two: requeues, and launches since."""
    starts = [path for path in (folder / "torchrun").glob("*/") if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", path.name)]
    found = []
    for path in max(starts, key=lambda path: [*map(int, path.name.split("."))]).glob("**/error.json") if starts else []:
        message = _read(path).get("message")
        if isinstance(message, dict):
            extra = message.get("extraInfo")
            stamp = str(extra.get("timestamp")) if isinstance(extra, dict) else ""
            found.append((int(stamp) if re.fullmatch("[0-9]{1,18}", stamp) else 0, str(message.get("message"))))
    return [text for _, text in sorted(found)]


def measure_trial(folder: Path) -> dict[str, float | None]:
    """Last losses, highest memory, and median speed of the logged steps without the first, which is a warm-up."""
    none = dict.fromkeys(MEASURED)
    try:
        lines = metrics.read_metrics(folder) if (folder / "status.json").exists() else []
    except ConfigError:
        return none
    steps, evaluations = [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line]
    if not steps:
        return none
    steady = {
        name: [line[name] for line in steps[1:] or steps if line[name] is not None]
        for name in ("tokens_per_second", "mfu")
    }
    return (
        none
        | {name: statistics.median(values) if values else None for name, values in steady.items()}
        | {
            "loss": steps[-1]["loss"],
            "step_seconds_p50": steps[-1]["step_seconds_p50"],
            "eval_loss": evaluations[-1]["eval_loss"] if evaluations else None,
            "memory_gib": max((line["memory_gib"] for line in steps if line["memory_gib"] is not None), default=None),
        }
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, dict, "it is left out")
    except (OSError, ConfigError):
        return {}


def _tail(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 2**16))
            return file.read(2**16).decode(errors="replace")
    except OSError:
        return ""


class SweepResults:
    """results.jsonl of a sweep: one object a trial, those of earlier starts included; rewritten whole at each
    change. more: names of numbers that its lines have besides, of `Trial.more`."""

    def __init__(self, folder: Path, name: str = RESULTS, more: Sequence[str] = ()):
        self.path, self.lines = folder / name, {}
        shape = RESULT | dict.fromkeys(more, RESULT["loss"])
        try:
            for number, text in enumerate(read_lines(self.path, rest=True), 1):
                line = parse_json(text)
                if wrong := find_mismatch(line, shape):
                    raise ValueError(f"line {number}: {wrong}")
                if strange := [name for name in (*MEASURED, *more) if not metrics.is_number(line.get(name))]:
                    raise ValueError(f"line {number}: {strange[0]} is no number that was measured")
                self.lines[line["trial"]] = {name: line.get(name) for name in shape}
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path} cannot be read as results of a sweep ({shorten_foreign(error)}); set another "
                "sweep.name, or "
                "remove it"
            ) from None

    def put(self, trial: Trial, status: str, reason: str | None = None) -> TrialResult:
        """Records a trial's status with what its folder says, and returns the line."""
        line = {
            "trial": trial.name,
            "overrides": trial.swept,
            "processes": trial.processes,
            "status": status,
            **(dict.fromkeys(MEASURED) if status in ("refused", "not_started") else measure_trial(trial.folder)),
            **trial.more,
            "reason": reason,
            "folder": str(trial.folder),
        }
        self.lines[trial.name] = line
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in self.lines.values()))
        return line


COLUMNS = {
    "loss": ("loss", lambda value: f"{value:.4f}"),
    "eval_loss": ("evaluation", lambda value: f"{value:.4f}"),
    "tokens_per_second": ("tokens/s", format_count),
    "mfu": ("MFU", format_percent),
    "memory_gib": ("memory", lambda value: format_bytes(value * 2**30)),
    "step_seconds_p50": ("step", format_duration),
}


def print_results(results: Iterable[TrialResult], sort: str) -> None:
    """Prints the results as a table, the best first. A value that no trial has gets no column."""
    sign = -1 if sort in ("tokens_per_second", "mfu") else 1
    rows = sorted(results, key=lambda line: (line["status"] != "done", line[sort] is None, sign * (line[sort] or 0)))
    console, frame = console_for(None)
    table = Table(box=frame, header_style="dim", pad_edge=frame is not None)
    known = [name for name in COLUMNS if any(row[name] is not None for row in rows)]
    reasons = any(row["reason"] for row in rows)
    for title in (
        "trial",
        "processes",
        "status",
        *(COLUMNS[name][0] for name in known),
        *(["reason"] if reasons else []),
    ):
        words = title in ("trial", "status", "reason")
        table.add_column(title, justify="left" if words else "right", no_wrap=title != "reason", overflow="fold")
    for row in rows:
        table.add_row(
            escape(make_printable(row["trial"])),
            str(row["processes"]),
            escape(make_printable(row["status"].replace("_", " "))),
            *("-" if row[name] is None else COLUMNS[name][1](row[name]) for name in known),
            *([escape(make_printable(row["reason"] or ""))] if reasons else []),
        )
    print_table(console, table)
