"""What is wrong with the machines of a cluster, by name, before a run is started on them.

    python -m trainer.preflight check=node gpus=8 run_dir=runs/NAME         on each node, once
    torchrun ... -m trainer.preflight check=network                         on each node, a process a GPU

`node` looks at the node alone: its GPUs as nvidia-smi sees them, its disks, and whether what it writes into run.dir is
seen by the others. `network` times all-reduces within nodes and between pairs of nodes, and compares clocks. Exit code
0, or 3 after saying what is wrong where, or 2 for wrong options. What is decided from what was measured is pure
functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainer.cluster.network import check_network
from trainer.cluster.node import check_node
from trainer.cluster.options import NODE, TORCHRUN, PreflightOptions
from trainer.config import ConfigError
from trainer.config.options import parse, usage
from trainer.util.exit_codes import DONE, REFUSED, UNFIT

# GPUs

# Disks, and what nodes see of each other

# The network


def main(arguments: Sequence[str]) -> int:
    """Runs a check, says what is wrong, and returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(usage(PreflightOptions, "trainer.preflight"))
        return 0
    try:
        options = parse(PreflightOptions, arguments)
        missing = [name for name in TORCHRUN if name not in os.environ]
        if options.check == "network" and missing:
            raise ConfigError(
                "check=network is started by torchrun, on every process of the run; the environment has no "
                + ", ".join(missing)
            )
    except ConfigError as error:
        print("\n".join(f"trainer.preflight: {problem}" for problem in error.problems), file=sys.stderr)
        return REFUSED
    if options.check == "node":
        problems, said = [f"{NODE}: {problem}" for problem in check_node(options)], ""
        speaks = True
    else:
        problems, said = check_network(options)
        speaks = os.environ["RANK"] == "0"
    if speaks and problems:
        print("\n".join(f"preflight: {problem}" for problem in problems), file=sys.stderr, flush=True)
    elif speaks and said:
        print(f"preflight: {said}", flush=True)
    return UNFIT if problems else DONE


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # past threads of an all-reduce that does not end
