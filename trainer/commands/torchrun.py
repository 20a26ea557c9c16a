"""torchrun for one node, whose workers stop by themselves: `trainer torchrun --nnodes 4 ... -m trainer ...`.

It takes torchrun's options. Signals that ask a run to stop, or to leave at once, go to the workers; this process ends
when they have ended, however long their save takes. torchrun itself would die of some of them, such as SIGUSR1, and
leave its workers running. Of the others it would kill, in torch 2.11, what has not ended 30 seconds later. Workers may
get a signal twice, as Slurm sends it to all processes: for a run the second changes nothing, but for Ctrl-C, which only
torchrun gets from the terminal. The first time they save, the second time they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.commands.grammar import Command
from trainer.util.exit_codes import INTERRUPTED, REFUSED, STALLED, STOPPED, UNFIT
from trainer.util.machine import AT_ONCE, STOPPED_VARIABLE, child_processes, handled_signals, name_of

REPORTED = (REFUSED, UNFIT, STALLED, STOPPED, INTERRUPTED, *(-number for number in AT_ONCE))
"""Exit codes of workers that have printed the reason themselves: settings refused, unfit machine, no progress, saved
and stopped, left at once. torchrun's own report would add nothing."""

CLOSING = 20.0
"""A worker killed within so many seconds of the first failure was not killed by torchrun, which waits 30 s for that."""

TORCHS = signal.SIGSTKFLT
"""torch's own handler takes what is named to it, and has to be named something. Linux sends this to nobody."""


def run_workers(arguments: Sequence[str], brief: bool = False) -> int:
    """Runs torchrun. brief: one line instead of torchrun's report where a worker failed. Returns the exit code of the
    first worker that failed, or 137 (128 + SIGKILL) if one was killed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    pressed = []

    def hand_on(number: int, _: object) -> None:
        if number == signal.SIGINT:
            pressed.append(number)
            if len(pressed) > 2:  # a worker that hangs heeds nothing else
                number = signal.SIGKILL
        os.environ[STOPPED_VARIABLE] = name_of(number)  # for workers that are not started yet, or are started again
        for worker in child_processes(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, number)

    # A handler, also for what would do nothing: workers would inherit SIG_IGN, and could not be stopped.
    interrupts = (
        {signal.SIGINT} if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else set()
    )  # ignored in the background
    for number in handled_signals() | interrupts:
        signal.signal(number, hand_on)
    try:
        run.main(["--signals-to-handle", TORCHS.name, *arguments])
    except SignalException:  # torch has passed it on, and its workers have ended
        return STOPPED
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode not in REPORTED and len(pressed) < 3:
            one_line = f"rank {rank} failed first, with exit code {first.exitcode}; what it said is above"
            with contextlib.suppress(OSError):  # its terminal is closed
                print(one_line if brief else failure, file=sys.stderr, flush=True)
        # The peers of a killed process may fail, and be noticed, before the killed process is.
        killed = any(
            other.exitcode == -signal.SIGKILL and other.timestamp - first.timestamp < CLOSING
            for other in failure.failures.values()
        )
        code = -signal.SIGKILL if killed else first.exitcode
        return code if code > 0 else 128 - code
    return 0


@dataclass
class TorchrunOptions:
    """torchrun has its own parser."""


main = Command(
    "torchrun",
    "Starts the processes of a run on one node with torchrun's options (torchrun --help), and passes signals to them.",
    "trainer torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint node0:29500 -m trainer +config=llama3_8b",
    TorchrunOptions,
    run_workers,
    bare=False,
    foreign=True,
)
