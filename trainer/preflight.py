"""Finds what is wrong with the machines of a cluster before a run is started on them, and names the machines.

    python -m trainer.preflight check=node gpus=8 run_dir=runs/NAME         on each node, once
    torchrun ... -m trainer.preflight check=network                         on each node, a process a GPU

`node` checks the GPUs as nvidia-smi reports them, the disks, and whether all nodes see each other's files in run.dir.
`network` times all-reduces within nodes and between pairs of nodes, and compares clocks. The exit code is 0, or 3 after
printing what is wrong where, or 2 for wrong options."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainer.cluster.network import check_network
from trainer.cluster.node import check_node
from trainer.cluster.options import NODE, TORCHRUN, PreflightOptions
from trainer.config import ConfigError
from trainer.config.options import format_usage, parse_options
from trainer.util.exit_codes import DONE, REFUSED, UNFIT


def main(arguments: Sequence[str]) -> int:
    """Runs a check, prints what is wrong, and returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(format_usage(PreflightOptions, "trainer.preflight"))
        return 0
    try:
        options = parse_options(PreflightOptions, arguments)
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
        problems, measured = [f"{NODE}: {problem}" for problem in check_node(options)], ""
        prints = True
    else:
        problems, measured = check_network(options)
        prints = os.environ["RANK"] == "0"
    if prints and problems:
        print("\n".join(f"preflight: {problem}" for problem in problems), file=sys.stderr, flush=True)
    elif prints and measured:
        print(f"preflight: {measured}", flush=True)
    return UNFIT if problems else DONE


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # without waiting for threads of an all-reduce that hangs
