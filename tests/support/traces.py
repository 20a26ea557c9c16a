"""Traces as torch's profiler writes them (Kineto, in Chrome's format), written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.util import tables

MAIN, AUTOGRAD, GLOO = 100, 101, 200
"""Threads of the host."""

NODE = "autograd::engine::evaluate_function: MmBackward0"
"""What surrounds an operator of backward."""


class Written:
    """A trace of a rank; times are given in microseconds.

    groups: axis and ranks by name. clock: of this rank, by which its times are off from those of others."""

    def __init__(self, rank: int = 0, device: str = "NVIDIA H200", groups: dict[str, Any] | None = None, clock=1e6):
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0}]
        self.clock, self.launched = clock, 0
        self.note: dict[str, Any] = {
            "rank": rank,
            "step": 7,
            "place": {"pp": 0, "replicate": 0, "shard": rank, "tp": 0},
            "device": device,
            "groups": {name: {"axis": axis, "ranks": list(ranks)} for name, (axis, ranks) in (groups or {}).items()},
            "schedule": [],
            "placement": [0],
            "actions": [],
            "spent": {},
        }

    def add(self, kind: str, name: str, start: float, end: float, thread: int = MAIN, **details: Any) -> Written:
        self.events.append(
            {
                "ph": "X",
                "cat": kind,
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": self.clock + start,
                "dur": end - start,
                "args": details,
            }
        )
        return self

    def op(self, name: str, start: float, end: float, thread: int = MAIN, **details: Any) -> Written:
        return self.add("cpu_op", name, start, end, thread, **details)

    def label(self, name: str, start: float, end: float, thread: int = MAIN) -> Written:
        return self.add("user_annotation", name, start, end, thread)

    def step(self, start: float, end: float) -> Written:
        return self.label(tables.STEP, start, end)

    def kernel(self, name: str, launch: float, start: float, end: float, thread=MAIN, stream=7, **details) -> Written:
        """A kernel, and the call that launched it."""
        self.launched += 1
        self.add("cuda_runtime", "cudaLaunchKernel", launch, launch + 1, thread, correlation=self.launched)
        return self.add("kernel", name, start, end, stream, correlation=self.launched, stream=stream, **details)

    def nccl(self, group: str, launch: float, start: float, end: float, name="AllGather", **details: Any) -> Written:
        details = {"Process Group Name": group, "Process Group Description": "mesh_shard", "Seq": 3, **details}
        return self.kernel(f"ncclDevKernel_{name}_RING_LL", launch, start, end, stream=20, **details)

    def synchronised(self, start: float, end: float) -> Written:
        return self.add("cuda_runtime", "cudaStreamSynchronize", start, end, correlation=-1)

    def gloo(self, operation: str, start: float, end: float, thread: int = GLOO) -> Written:
        return self.label(f"gloo:{operation}", start, end, thread)

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events, tables.NOTE: self.note}))
        return path
