"""Tests run on the CPU with one thread a process, as the many-process ones have to."""
from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

hypothesis.settings.register_profile("suite", deadline=None)  # a first call imports and compiles, and cores are shared
hypothesis.settings.load_profile("suite")

WAITING = ("test_slurm.py", "test_sweep.py", "test_faults.py", "test_watchdog.py")
"""Tests that wait for schedulers, restarts and time limits most of the time. Under pytest-xdist they run beside the others."""

QUIET = ("test_simulator_predicts_measured_times", "test_int8_is_faster_at_fifty_megabits")
"""Tests that measure times: they come last, when the cores have nothing else to do."""


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.xdist_group("waiting" if item.path.name in WAITING else "computing"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.originalname in QUIET)
