"""Progress of data preparation: a bar where a machine's first process has a terminal, elsewhere lines now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

EVERY = 10.0
"""Seconds between plain lines."""


def print_notice(text: str) -> None:
    """Prints a notice to stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether to draw bars: only on a terminal, and only in one process of a machine."""
    return sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def start_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with each amount of work done; the amounts add up to `total`."""
    if on_terminal():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda amount: bar.advance(task, amount)
        return
    done, start = 0, time.monotonic()
    last = start
    print_notice(f"{label} ...")

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last > EVERY:
            last = time.monotonic()
            print_notice(f"{label}: {100 * done // max(1, total)}%")

    yield advance
    print_notice(f"{label}: done in {time.monotonic() - start:.1f} s")
