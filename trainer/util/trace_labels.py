"""Labels by which a run marks what it does in a profiler's trace, and by which `diagnosis/` finds it there."""

from __future__ import annotations

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
