"""Measured times of processes that mostly sleep: with priority over what else runs, they need not run alone."""

from __future__ import annotations

import os


def go_first() -> bool:
    """From here on this process computes before all that have no such priority; False where that is not permitted."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return False
    return True


def may_go_first() -> bool:
    """Whether `go_first` would be permitted here."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    permitted = go_first()
    if permitted:
        os.sched_setscheduler(0, *before)
    return permitted
