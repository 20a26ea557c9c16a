"""What runs at the same time on a rank: work on side streams, and two passes in turns.

Two passes in turns overlap the communication of each with the computation of the other (DeepSeek-V3, arXiv 2412.19437,
section 3.2.1). A pass gives the turn to the other one after it has started a collective and before it waits for it
(`pass_turn`). What the other pass launches meanwhile runs beside the collective. Each pass has a thread, and only one
of the two threads runs at a time: collectives start in the same order on all ranks, and both never change what they
share at the same moment.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Semaphore

import torch
from torch import Tensor


@cache
def side_stream(use: str, device: torch.device) -> torch.cuda.Stream:
    """The side stream for one use. One stream for each use keeps the epochs of a buffer in order. Its kernels are short
    and have high priority, because other streams wait for them."""
    return torch.cuda.Stream(device, priority=-1)


def run_on_side_stream(use: str, device: torch.device, work: Callable[[], None]) -> torch.Event | None:
    """Runs `work` on the side stream, after what the current stream has queued. Returns an event behind it, None on
    CPUs."""
    if device.type != "cuda":
        work()
        return None
    side = side_stream(use, device)
    # The inputs may have been written by kernels that are still queued on the current stream.
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    return side.record_event()


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy of small values on the device, by way of pinned memory. To copy from pageable memory, the host would wait
    until the current stream has done all queued work."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def wait_for_event(ended: torch.Event | None) -> None:
    """Makes the current stream wait for an event."""
    if ended is not None:
        torch.cuda.current_stream().wait_event(ended)


class OtherPassFailed(RuntimeError):
    """Ends a pass when it would get the turn, because the other one has failed."""


class Turns:
    """Whose turn it is: pass 0, which begins, or pass 1. change_pass: called when the turn goes to the other pass."""

    def __init__(self, change_pass: Callable[[], None]):
        self.change_pass = change_pass
        self.running = 0
        self.failed = False
        self.ended = [False, False]
        self.signals = Semaphore(0), Semaphore(0)

    def give(self) -> None:
        """Lets the other pass run until it gives the turn back or ends. Does nothing if it has ended. Raises
        `OtherPassFailed`: other ranks will not reach the collectives of this pass any more."""
        mine = self.running
        if not self.ended[1 - mine]:
            self._start_other()
            self.signals[mine].acquire()
            if self.failed:
                raise OtherPassFailed

    def end(self) -> None:
        """The pass whose turn it is has ended."""
        self.ended[self.running] = True
        if not self.ended[1 - self.running]:
            self._start_other()

    def _start_other(self) -> None:
        self.change_pass()
        self.running = 1 - self.running
        self.signals[self.running].release()


_turns: Turns | None = None


def pass_turn() -> None:
    """To be called between the start of a collective and the wait for it. Does nothing outside of `run_in_turns`."""
    if _turns is not None:
        _turns.give()


def run_in_turns(
    first: Callable[[], None], second: Callable[[], None], change_pass: Callable[[], None], thread: ThreadPoolExecutor
) -> None:
    """Runs two functions in turns, which change at each `pass_turn`. If one of them fails, the other ends at its next
    turn, and the error of the first is raised.

    first: runs in the calling thread, and begins. second: runs in `thread`, on the calling thread's CUDA stream.
    change_pass: called when the turn goes to the other function, to exchange state of which each has its own.
    """
    global _turns
    turns = _turns = Turns(change_pass)
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
    failures: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as failure:
            failures.append(failure)
            turns.failed = True
        finally:
            turns.end()

    def wait_and_run() -> None:
        turns.signals[1].acquire()
        if not turns.failed:
            with torch.cuda.stream(stream):  # of the right device too; does nothing for None
                run(second)

    other = thread.submit(wait_and_run)
    try:
        run(first)
        other.result()
    finally:
        _turns = None
    if failures:
        raise failures[0]
