"""`python -m trainer.parity` and `torchrun -m trainer.parity`."""

import os
import sys

from trainer.parity.cli import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads now and then abort the interpreter's tear-down after the work has succeeded.
    os._exit(code)
