"""Numbers for people, the tables printed at start-up, and the labels of a run in a profiler's trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Rows = Sequence[tuple[str, Any]]


def format_count(value: float | None) -> str:
    """Three significant digits with k, M, B, T: 8.03B parameters, 12.3k tokens/s; small whole numbers as they are."""
    return _scaled(value, ("", "k", "M", "B", "T"), 1000, "")


def format_flops(value: float | None) -> str:
    """Floating-point operations: 48.1 GFLOP."""
    return _scaled(value, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"), 1000, " ")


def format_bytes(value: float | None) -> str:
    """Bytes in binary units: 54.3 GiB."""
    return _scaled(value, ("B", "KiB", "MiB", "GiB", "TiB"), 1024, " ")


def format_sizes(values: Sequence[float]) -> list[str]:
    """Bytes in one unit, that of the largest, so that they can be compared: 0.12 GiB, 54.3 GiB."""
    power = max(0, min(4, (int(max(values, default=0)).bit_length() - 1) // 10))
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    return [f"{_three_digits(value / 1024**power) if power else int(value)} {units[power]}" for value in values]


def format_number(value: int, one: str, more: str = "s") -> str:
    """A number with what it counts: 1 process, 4 processes."""
    return f"{value} {one}{more if value != 1 else ''}"


def format_percent(value: float | None) -> str:
    """A share of one: 0.532 is 53.2%."""
    return "-" if value is None else f"{100 * value:.1f}%"


def format_duration(value: float | None) -> str:
    """Seconds, in the two largest units that matter: 12.3 ms, 4.56 s, 2m 05s, 3h 07m, 4d 02h."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 0.9995:
        return f"{_three_digits(1000 * value)} ms"
    if value < 59.95:
        return f"{_three_digits(value)} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m {seconds:02d}s"
    hours, minutes = divmod(round(value / 60), 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(round(value / 3600), 24)
    return f"{days}d {hours:02d}h"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _scaled(value: float | None, units: Sequence[str], base: int, space: str) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    sign, value, index = "-" if value < 0 else "", abs(value), 0
    if value == round(value) and value < base:
        return f"{sign}{value:.0f}{space}{units[0]}"
    while value >= base - 0.5 and index < len(units) - 1:
        value, index = value / base, index + 1
    return f"{sign}{_three_digits(value)}{space}{units[index]}"


def console_for(console: Console | None) -> tuple[Console, box.Box | None]:
    """The console to print on, and a table's frame. Outside a terminal there is no frame, and lines are not wrapped."""
    console = console or Console(highlight=False)
    if console.is_terminal:
        return console, box.ROUNDED
    return Console(file=console.file, width=1000, highlight=False), None


def titled_table(title: str, frame: box.Box | None) -> Table:
    """A table with its title on the left, and a header."""
    return Table(
        box=frame,
        title=title,
        title_justify="left",
        title_style="bold cyan",
        header_style="dim",
        pad_edge=frame is not None,
    )


def print_sections(rows: Mapping[str, Rows], console: Console | None = None) -> None:
    """Prints one table of titled sections, each a list of (label, value) rows.

    Values are printed by `str`; numbers should be formatted by this module's functions. On a terminal the table has a
    frame; elsewhere it is aligned plain text.
    """
    console, frame = console_for(console)
    table = Table(box=frame, show_header=False, pad_edge=frame is not None)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for title, section in rows.items():
        for index, (label, value) in enumerate(section):
            table.add_row("" if index else title, label, _cell(value), end_section=index == len(section) - 1)
    print_table(console, table)


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Prints a titled table: the keys of the first row as header, whole numbers abbreviated."""
    console, frame = console_for(console)
    if frame is None:  # or a title would be wrapped to the width of its table
        console.print(title, markup=False)
        title = ""
    table = titled_table(title, frame)
    names = list(rows[0]) if rows else []
    for name in names:
        table.add_column(name, justify="right" if isinstance(rows[0][name], (int, float)) else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(format_count(row[name]) if type(row[name]) is int else _cell(row[name]) for name in names))
    print_table(console, table)


def _cell(value: Any) -> str:
    return "-" if value is None else escape(str(value))


def print_table(console: Console, table: Table) -> None:
    """Prints a table, without trailing spaces where it goes to a file."""
    if console.is_terminal:
        return console.print(table)
    with console.capture() as capture:
        console.print(table)
    console.file.write("".join(text.rstrip() + "\n" for text in capture.get().splitlines()))
    console.file.flush()


# Labels by which a run marks what it does in a profiler's trace, and by which `diagnosis/` finds it there.


NOTE = "trainer"
"""Key in the trace under which the run says what the profiler does not know; `diagnosis/traces.py` has its shape."""
STEP, DATA, OPTIMIZER, COLLECTOR, GROUP = (
    f"trainer:{name}" for name in ("step", "data", "optimizer", "collector", "group ")
)
"""Labels in the trace: the step; waiting for the batch; norm and update; garbage collection; and, with a group's name
behind it, a collective of this group that shows on which thread gloo runs them."""
SENDS, AWAITS = "trainer:sends ", "trainer:awaits "
"""Labels in the trace, with a group's name behind them: copies between the memory of this rank and others; waiting, or
having a stream wait, for what another rank copies."""
WAIT = "PP:wait"
"""Label in the trace: the host waits for a transfer of the pipeline."""
