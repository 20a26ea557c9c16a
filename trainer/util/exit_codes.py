"""The exit codes of every command, and how a refused configuration or a missing package is reported."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.config.fields import ConfigError

DONE = 0
FAILED = 1
"""A crash, or a run that cannot go on; its messages and, under torchrun, its error file say which."""
REFUSED = 2
"""The settings are wrong; nothing was started."""
UNFIT = 3
"""The preflight found a machine that is not fit."""
LOST = 4
"""A node of a Slurm job does not answer."""
STALLED = 70
"""The watchdog ended a run that made no progress, or that a process had left; it resumes from the last checkpoint."""
STOPPED = 75
"""A signal, Ctrl-C or run.hours stopped the run, and its state is saved, to go on from (sysexits.h: EX_TEMPFAIL)."""
INTERRUPTED = 130
"""Ctrl-C twice, or before the first step: the run left at once. By the convention of shells."""


def process_rank() -> int:
    """This process's rank, as torchrun sets it; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def give_way() -> None:
    """Before a refusal: a rank other than 0 waits for it to be printed, and for torchrun to end this rank."""
    if process_rank() != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)


def refuse_config(error: ConfigError) -> int:
    """Prints what is wrong, once, and returns the exit code.

    Rank 0 prints at once, and torchrun then ends the other ranks. A rank that is still there after five seconds was
    refused for a reason of its own, and prints too.
    """
    give_way()
    count = len(error.problems)
    heading = "configuration error:" if count == 1 else f"configuration error, {count} problems:"
    print("\n  - ".join([heading, *error.problems]) if count > 1 else f"{heading} {error}", file=sys.stderr, flush=True)
    return REFUSED


# Packages that only some commands and settings need: the extras of the distribution.


DISTRIBUTION = "composable-trainer"
"""The name under which pip knows the project, as in pyproject.toml."""


@contextmanager
def requires_extra(extra: str, what: str) -> Iterator[None]:
    """Around the imports of an extra's packages; raises `ConfigError` with the command that installs them."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {error.name or extra}, which is not installed: pip install '{DISTRIBUTION}[{extra}]'"
        ) from None
