"""Metrics as text: the lines of a run on the terminal, in a pipe and in console.log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from trainer.observe import metrics
from trainer.util.lines import LineFile
from trainer.util.run_folder import LOG
from trainer.util.tables import format_bytes, format_count, format_duration, format_percent

MetricsLine = dict[str, Any]


def _summary(record: MetricsLine) -> list[str]:
    """The parts of a step's line on the console, padded so that lines align; unknown values are left out."""
    parts = [
        f"loss {_number(record['loss'], '7.4f')}{_by_name(record, 'loss')}",
        f"{format_count(record['tokens_per_second']):>5} tokens/s" if record["tokens_per_second"] is not None else None,
        f"grad norm {_number(record['grad_norm'], '7.3g')}" if record["grad_norm"] is not None else None,
        f"lr {_number(record['lr'], '.2e')}" if record["lr"] is not None else None,
        f"MFU {format_percent(record['mfu']):>5}" if record["mfu"] is not None else None,
        f"bubble {format_percent(record['bubble']):>5}" if record["bubble"] is not None else None,
        f"memory {format_bytes(record['memory_gib'] * 2**30):>8}" if record["memory_gib"] is not None else None,
        f"skipped {record['skipped']}" if record["skipped"] else None,
        f"ETA {format_duration(record['eta_seconds'])}" if record["eta_seconds"] else None,
    ]
    return [part for part in parts if part]


def _by_name(record: MetricsLine, kind: str) -> str:
    """The values by source or set, in brackets; nothing where there are none."""
    values = metrics.of_names(record, kind).items()
    named = ", ".join(f"{name} {'-' if value is None else format(value, '.4f')}" for name, value in values)
    return f" ({named})" if named else ""


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _evaluation(record: MetricsLine, total: int) -> str:
    loss = f"{_number(record['eval_loss'], '.4f')}{_by_name(record, 'eval_loss')}"
    if record["eval_loss"] is None and metrics.of_names(record, "eval_loss"):  # nothing is held out
        loss = _by_name(record, "eval_loss").strip(" ()")
    return f"{format_step(record['step'], total)}  evaluation loss {loss}"


def format_step(step: int, total: int) -> str:
    return f"step {step:>{len(str(total))}}/{total}"


class PlainConsole:
    """One line a logged step, for logs and pipes."""

    def __init__(self, total: int):
        self.total = total

    def write(self, record: MetricsLine) -> None:
        self.event(
            _evaluation(record, self.total)
            if "eval_loss" in record
            else f"{format_step(record['step'], self.total)}  {'  '.join(_summary(record))}"
        )

    def event(self, text: str) -> None:
        print(text, flush=True)

    def close(self, status: str) -> None:
        pass


class LogFile(PlainConsole):
    """console.log: the plain lines with the time of day, whatever the console shows; every start appends to it."""

    def __init__(self, folder: Path, total: int):
        super().__init__(total)
        self.file = LineFile(folder / LOG)

    def event(self, text: str) -> None:
        self.file.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def close(self, status: str, reason: str | None = None) -> None:
        self.event(f"{status}: {reason}" if reason else status)
        self.file.close()


class _Bar(Progress):
    """The progress bar, with the newest step's numbers on a line of their own below it."""

    numbers = Text()

    def get_renderables(self):
        yield self.make_tasks_table(self.tasks)
        yield self.numbers


class RichConsole:
    """A progress bar for a terminal; evaluations and notices scroll above it."""

    REFRESH = 0.1  # seconds between redraws

    def __init__(self, name: str, total: int, resume_step: int):
        self.total = total
        self.bar = _Bar(
            TextColumn("[bold cyan]{task.description}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
            console=Console(force_terminal=True, highlight=False),
            auto_refresh=False,
            expand=True,
        )
        self.task = self.bar.add_task(escape(name), total=total, completed=resume_step, eta="")
        self.drawn = 0.0
        self.bar.start()

    def write(self, record: MetricsLine) -> None:
        if "eval_loss" in record:
            return self.event(_evaluation(record, self.total))
        self.bar.update(
            self.task,
            completed=record["step"],
            eta="" if not record["eta_seconds"] else f"ETA {format_duration(record['eta_seconds'])}",
        )
        # 80 columns are full without the word, which the unit stands for.
        parts = [" ".join(part.removeprefix("memory").split()) for part in _summary(record | {"eta_seconds": None})]
        self.bar.numbers = Text("  ".join(parts), no_wrap=True, overflow="ellipsis")
        if time.monotonic() - self.drawn >= self.REFRESH:
            self.bar.refresh()
            self.drawn = time.monotonic()

    def event(self, text: str) -> None:
        self.bar.console.print(text, markup=False)

    def close(self, status: str) -> None:
        self.bar.refresh()
        self.bar.stop()
