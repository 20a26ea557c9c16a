"""`trainer`, `python -m trainer` and `torchrun -m trainer`."""

import contextlib
import os
import sys

from trainer import __version__
from trainer.commands import main
from trainer.util.exit_codes import DONE


def run() -> None:
    """Ends the process with the command's exit code."""
    code = DONE
    with contextlib.suppress(BrokenPipeError):  # `--help | head`
        if sys.argv[1:] == ["--version"]:
            print(f"trainer {__version__}")
        else:
            code = main(sys.argv[1:], own=True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more, or its terminal is closed
            stream.flush()
    # os._exit skips the interpreter's tear-down, which gloo's threads now and then abort after the work has succeeded.
    os._exit(code)


if __name__ == "__main__":
    run()
