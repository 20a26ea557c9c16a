"""Tests run on the CPU with one thread a process, as the many-process ones have to."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support import launch
from support.priority import may_go_first

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores, and all it starts
for number in (signal.SIGHUP, signal.SIGQUIT):  # nohup and background jobs ignore these
    signal.signal(number, signal.SIG_DFL)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

hypothesis.settings.register_profile("suite", deadline=None)  # a first call imports and compiles, and cores are shared
hypothesis.settings.load_profile("suite")

SLEEPING = "test_simulator_predicts_measured_times"
"""Measures times of processes that sleep, which need not be alone where they may go first."""

QUIET = (
    *([] if may_go_first() else [SLEEPING]),
    "test_eight_causes_of_eight_are_named_and_the_larger_of_two",
    "test_the_file_is_hardware_and_says_what_was_measured",
    "test_the_estimate_with_it_is_near_a_run",
)
"""Tests that measure times: nothing else runs beside them."""

LONG = (
    "test_plans.py",
    "test_slurm.py",
    "test_code_plans.py",
    "test_agreement.py",
    "test_replicas.py",
    "test_good_checkpoints.py",
    "test_start.py",
    "test_deepspeed.py",
    "test_parallel_runs.py",
    "test_training.py",
    "test_sweep.py",
    "test_soak.py",
    "test_compress.py",
    "test_faults.py",
    "test_context_parallel.py",
    "test_documents.py",
    "test_recompute.py",
    "test_prepare.py",
    "test_tune.py",
    "test_site.py",
    "test_planted_defects.py",
    "test_signals.py",
    "test_extreme_numbers.py",
    "test_slow_network.py",
    "test_tensor_parallel.py",
    "test_drawn_page.py",
    "test_pipeline_runtime.py",
    "test_watchdog.py",
    "test_pipeline_defects.py",
    "test_copied.py",
    "test_end_of_run.py",
    "test_run_folder.py",
    "test_worked_examples.py",
    "test_resume_precision.py",
)
"""Files that take longest, in the order in which pytest-xdist's workers take them: those that compute and those that
mostly wait in turn, short ones last. All but those of `FAST` are marked slow."""

freeze = gc.freeze

LAUNCHERS = ("launch", "warm_python", "Cluster")
"""Helpers of tests/support that start processes. Files that import one are marked slow."""

FAST = (
    "test_checkpoint_files.py",
    "test_foreign.py",
    "test_gloo.py",
    "test_hooks.py",
    "test_pipeline_runtime.py",
    "test_tensor_parallel.py",
    "test_zero.py",
)
"""Files that start processes and are not marked slow: in a minute of one core they run ranks under each axis."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """One server for the programs of all workers, which imports while they collect."""
    os.environ[launch.SHARED] = str(launch.start_warm())


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(is_slow, items):
        item.add_marker("slow")
    quiet = {item.path for item in items if item.originalname in QUIET}
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: (item.path in quiet, places.get(item.path.name, len(LONG))))


def is_slow(item: pytest.Item) -> bool:
    """Whether the fast lane leaves a test out, by its file."""
    name = item.path.name
    return name not in FAST and (name in LONG or any(helper in vars(item.module) for helper in LAUNCHERS))


def pytest_collection_finish() -> None:
    gc.set_threshold(20_000, 20, 20)
    keep()
    # A run freezes what is there and unfreezes it at its end. Here that would be all that tests import, which the next
    # run would look at for seconds.
    gc.freeze = gc.unfreeze = lambda: None


def keep() -> None:
    """What is imported, compiled and remembered stays, and need not be looked at by each collection to come."""
    gc.collect()
    freeze()


@pytest.fixture(scope="module", autouse=True)
def kept() -> Iterator[None]:
    """At the end of a file, when what its fixtures made is gone. A run that fails leaves its process group, which is
    not for the next file."""
    yield
    if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
        distributed.destroy_process_group()
    keep()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Who has to be alone waits at the door until the others have left, and meanwhile nobody passes it."""
    kind = fcntl.LOCK_EX if item.originalname in QUIET else fcntl.LOCK_SH
    with contextlib.ExitStack() as room:
        with locked(Path(__file__), kind):
            room.enter_context(locked(Path(__file__).parent, kind))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows how the logs end that jobs and runs left in the test's folder, which is gone later."""
    report = yield
    if report.failed and (folder := getattr(item, "funcargs", {}).get("tmp_path")):
        logs = {log for name in ("*.log", "log.txt") for log in folder.rglob(name) if log.is_file()}
        for log in sorted(logs, key=lambda log: log.stat().st_mtime)[-3:]:
            report.sections.append((f"end of {log.relative_to(folder)}", log.read_text(errors="replace")[-3000:]))
    return report


@contextlib.contextmanager
def locked(path: Path, kind: int) -> Iterator[None]:
    """A lock among processes, by `fcntl.LOCK_SH` or `fcntl.LOCK_EX`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # processes that were forked meanwhile hold it too
        os.close(descriptor)


@pytest.fixture(scope="session")
def store_server() -> Iterator[Any]:
    """An S3 server for all tests of a worker; see `support.stores`."""
    from support.stores import serve_store

    with serve_store() as store:
        yield store


@pytest.fixture
def store(store_server: Any) -> Iterator[Any]:
    """The S3 server without objects."""
    store_server.clear()
    yield store_server
    store_server.clear()


@pytest.fixture
def kept_registries() -> Iterator[None]:
    """What a test registers is forgotten afterwards."""
    from trainer.config.registry import REGISTRIES

    before = [dict(registry.registered) for registry in REGISTRIES]
    yield
    for registry, registered in zip(REGISTRIES, before):
        registry.registered.clear()
        registry.registered.update(registered)
