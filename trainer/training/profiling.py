"""Profiles steps while a run goes on; a process beside the run makes their accounts.

The profiler records one step on a few ranks (`diagnosis/time_breakdown.py`), and each leaves its trace in a file, with
what the profiler does not know: which process group serves what, when the schedule's actions ran. Rank 0 then starts a
process that reads the traces, at the lowest priority (`diagnosis/accounts.py`). On a device the step before is recorded
too, since a host runs ahead: where the device was when the host began the step is seen in the work that it had left."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from trainer.config import Config
from trainer.diagnosis.time_breakdown import TRACES, axis_of, choose_ranks, trace_of
from trainer.distributed.c10d_internals import list_groups
from trainer.distributed.mesh import World
from trainer.observe.report import device_name
from trainer.observe.slowdown import PauseTimes
from trainer.parallel.pipeline.runtime import PipelineRuntime
from trainer.planning.plan import OVERLAPPED
from trainer.planning.schedules import ir
from trainer.util.reading import parse_json, replace_file
from trainer.util.tables import COLLECTOR, GROUP, NOTE, STEP

PACKAGE = Path(__file__).parents[1]

PATIENCE = 60.0
"""Seconds that the end of a run waits for the last accounts."""


class StepProfiler:
    """The profiles of a run. All ranks call its methods together.

    metrics: what the account of the newest profiled step says, on rank 0."""

    def __init__(self, config: Config, world: World, first: int, pauses: PauseTimes):
        """first: step after which this start begins. pauses: of training."""
        self.every, self.kept = config.logging.profile, set(config.logging.trace)
        self.overlaps = config.parallel.ep_dispatch == OVERLAPPED
        self.folder, self.world, self.first, self.last = Path(config.run.dir), world, first, first
        self.cuda = world.device.type == "cuda"
        self.mesh = {name: dimension.size() for name, dimension in world.dimensions.items()}
        self.metrics: dict[str, float] = {}
        self.pauses = pauses
        self.profiler: profile | None = None
        self.reader: subprocess.Popen | None = None
        self.collecting: record_function | None = None

    def due(self, step: int) -> bool:
        """Whether a step is profiled. Not as an n-th one: the first of a start, which compiles and allocates, and the
        second, before which it is."""
        return step in self.kept or bool(self.every) and step % self.every == 0 and step > self.first + 2

    @contextlib.contextmanager
    def step(self, number: int, runtime: PipelineRuntime, slow: int | None) -> Iterator[None]:
        """Surrounds a step of the loop, from the wait for its batch to its line of metrics. slow: a rank that has been
        slow, if one has."""
        due = self.due(number)
        self.poll()
        if not due and not (self.cuda and self.due(number + 1)):
            yield
            return
        mine = self.world.rank in (ranks := choose_ranks(self.mesh, slow))
        if self.profiler is None and mine:
            self.start()
        if due and not self.cuda:
            self.show_groups()
        with record_function(STEP):
            yield
        if due:
            spent = self.pauses.since("profiles")
            try:
                if mine:
                    self.finish(number, runtime, spent)
                if self.world.rank == 0:
                    self.read(number, ranks)
            except OSError as error:  # on some ranks alone, which must not leave the others
                print(f"the profile of step {number} was not written: {error}", file=sys.stderr, flush=True)
            self.last = number

    def start(self) -> None:
        """Begins to record."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it says on the terminal that it begins and ends
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        # Of passes that run in turns, one has a thread of its own.
        threads = _ExperimentalConfig(profile_all_threads=self.overlaps)
        self.profiler = profile(activities=activities, record_shapes=True, experimental_config=threads)
        self.profiler.start()
        gc.callbacks.append(self.collector)

    def collector(self, phase: str, _: dict[str, int]) -> None:
        """Labels a garbage collection."""
        if phase == "start":
            self.collecting = record_function(COLLECTOR)
            self.collecting.__enter__()
        elif self.collecting is not None:
            self.collecting.__exit__(None, None, None)
            self.collecting = None

    def show_groups(self) -> None:
        """One small sum in each group of this rank, under its name: gloo's threads, one for each group, have none. All
        ranks take part."""
        for name, group in groups_of_steps().items():
            with record_function(GROUP + name):
                dist.all_reduce(torch.zeros(1), group=group)

    def finish(self, number: int, runtime: PipelineRuntime, spent: Mapping[str, float]) -> None:
        """Writes the trace. spent: seconds that training has stood still since the account before."""
        if self.cuda:
            torch.cuda.synchronize()
        profiler, self.profiler = self.profiler, None
        profiler.add_metadata_json(NOTE, json.dumps(self.note(number, runtime, spent)))
        profiler.stop()
        gc.callbacks.remove(self.collector)
        path = trace_of(self.folder, number, self.world.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as part:
            profiler.export_chrome_trace(part)

    def note(self, number: int, runtime: PipelineRuntime, spent: Mapping[str, float]) -> dict[str, Any]:
        """What the profiler does not know of the step."""
        axes = {
            name: (axis_of(ranks, self.mesh, group.group_desc), ranks)
            for name, group in groups_of_steps().items()
            for ranks in [dist.get_process_group_ranks(group)]
        }
        channels, pipelined = runtime.channels, self.mesh["pp"] > 1
        if channels is not None:
            axes |= {name: ("pipeline", list(ranks)) for name, ranks in channels.members.items()}
        return {
            "rank": self.world.rank,
            "step": number,
            "place": self.world.places,
            "device": device_name(self.world.device) if self.cuda else "cpu",
            "groups": {name: {"axis": axis, "ranks": ranks} for name, (axis, ranks) in axes.items()},
            "schedule": ir.format_schedule(runtime.schedule).splitlines() if pipelined else [],
            "placement": list(runtime.schedule.placement),
            "actions": [(str(action), start, end) for action, start, end in runtime.times.spans()],
            "spent": {term: seconds / (number - self.last) for term, seconds in spent.items() if seconds},
        }

    def read(self, number: int, ranks: list[int]) -> None:
        """Starts to make the accounts. The traces of earlier steps go, unless they were asked for."""
        self.poll(PATIENCE)
        if self.reader is not None:  # it would wait for traces that go now
            self.reader.kill()
            self.reader.communicate()
        for path in (self.folder / TRACES).glob("step-*-rank-*.json"):
            if int(path.name.split("-")[1]) not in self.kept | {number}:
                path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "trainer.diagnosis.accounts", str(self.folder), str(number), *map(str, ranks)]
        path = os.pathsep.join([str(PACKAGE.parent), *sys.path])
        self.reader = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
        )

    def poll(self, patience: float = 0.0) -> None:
        """Takes up the metrics of accounts that have been made; waits for them as long as `patience`."""
        if self.reader is None:
            return
        try:
            out, _ = self.reader.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            return
        if self.reader.returncode == 0 and out:
            self.metrics.update(parse_json(out))
        self.reader = None

    def close(self) -> None:
        """Waits for the last accounts."""
        if self.profiler is not None:
            self.profiler.stop()
            gc.callbacks.remove(self.collector)
        self.poll(PATIENCE)


def groups_of_steps() -> dict[str, dist.ProcessGroup]:
    """All process groups but that of checkpoints, which another thread uses meanwhile."""
    return {name: group for name, group in list_groups().items() if group.group_desc != "checkpoint"}
