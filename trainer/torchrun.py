"""torchrun for one node, whose workers stop by themselves: `python -m trainer.torchrun --nnodes 4 ... -m trainer ...`.

It takes torchrun's options. Slurm and sweeps send stop signals to the workers themselves. On SIGUSR1 torchrun would
die. On SIGTERM it would send its workers a second SIGTERM and, in torch 2.11, SIGKILL after 30 seconds, in which many a
save does not end. This torchrun ignores both signals, and ends when its workers have ended. Ctrl-C, which only torchrun
gets from the terminal, it hands on to them: the first time they save, the second time they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainer.util.exit_codes import INTERRUPTED, REFUSED, STALLED, STOPPED, UNFIT
from trainer.util.processes import children

REPORTED = (REFUSED, UNFIT, STALLED, STOPPED, INTERRUPTED)
"""Exit codes of workers that have printed the reason themselves: settings refused, unfit machine, no progress, saved
and stopped, left at once. torchrun's own report would add nothing."""

CLOSING = 20.0
"""A worker killed within so many seconds of the first failure was not killed by torchrun, which waits 30 s for that."""


def main(arguments: list[str], brief: bool = False) -> int:
    """Runs torchrun. brief: one line instead of torchrun's report where a worker failed. Returns the exit code of the
    first worker that failed, or 137 (128 + SIGKILL) if one was killed."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # A handler that does nothing, not SIG_IGN: workers would inherit SIG_IGN, and could not be stopped.
        signal.signal(number, lambda *_: None)
    pressed = []

    def hand_on(*_: object) -> None:
        pressed.append(signal.SIGINT if len(pressed) < 2 else signal.SIGKILL)  # a worker that hangs heeds nothing else
        for worker in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, pressed[-1])

    signal.signal(signal.SIGINT, hand_on)
    try:
        run.main(["--signals-to-handle", "SIGQUIT", *arguments])  # torch's own handler of what is named; never empty
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode not in REPORTED and len(pressed) < 3:
            one_line = f"rank {rank} failed first, with exit code {first.exitcode}; what it said is above"
            print(one_line if brief else failure, file=sys.stderr, flush=True)
        # The peers of a killed process may fail, and be noticed, before the killed process is.
        killed = any(
            other.exitcode == -signal.SIGKILL and other.timestamp - first.timestamp < CLOSING
            for other in failure.failures.values()
        )
        code = -signal.SIGKILL if killed else first.exitcode
        return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
