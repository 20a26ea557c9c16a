"""`python -m trainer` and `torchrun -m trainer`."""

import contextlib
import os
import sys

from trainer.cli import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    with contextlib.suppress(BrokenPipeError):  # `--help | head`
        sys.stdout.flush()
    sys.stderr.flush()
    # os._exit skips the interpreter's tear-down, which gloo's threads now and then abort after the work has succeeded.
    os._exit(code)
