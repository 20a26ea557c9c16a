"""One node's torchrun, with its options: `python -m trainer.torchrun --nnodes 4 ... -m trainer ...`. It leaves stopping
to its workers.

Slurm, and a sweep, send a stop signal to the workers themselves. torchrun would die of SIGUSR1, and answer SIGTERM by a
second one to its workers and, in torch 2.11, by SIGKILL after 30 seconds, within many a save. Here both signals pass it
by, and it ends when its workers have."""

from __future__ import annotations

import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainer.util.exit_codes import REFUSED, STALLED, STOPPED, UNFIT

SAID = (REFUSED, UNFIT, STALLED, STOPPED)
"""Exit codes of workers that have said all there is to say: settings refused, unfit machine, no progress, saved and
stopped."""

CLOSING = 20.0
"""Seconds: torchrun itself kills the workers that remain after a failure, but only 30 s later."""


def main(arguments: list[str]) -> int:
    """Runs torchrun; returns the exit code of the worker that was the first to end otherwise than by 0, and 137 if one
    was killed."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # A handler, where ignoring would do for us: workers would inherit that, and not the handler.
        signal.signal(number, lambda *_: None)
    try:
        run.main(["--signals-to-handle", "SIGINT", *arguments])
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode not in SAID:
            print(failure, file=sys.stderr, flush=True)
        # A killed process is missed later than its peers complain of it.
        killed = any(
            other.exitcode == -signal.SIGKILL and other.timestamp - first.timestamp < CLOSING
            for other in failure.failures.values()
        )
        code = -signal.SIGKILL if killed else first.exitcode
        return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
