"""Finds what is wrong with the machines of a cluster before a run is started on them, and names the machines.

    trainer preflight check=node gpus=8 run_dir=runs/NAME                  on each node, once
    torchrun ... -m trainer preflight check=network                        on each node, a process a GPU

`node` checks the GPUs as nvidia-smi reports them, the disks, and whether all nodes see each other's files in run.dir.
`network` times all-reduces within nodes and between pairs of nodes, and compares clocks. The exit code is 0, or 3 after
printing what is wrong where, or 2 for wrong options."""

from __future__ import annotations

import os
import sys

from trainer.cluster.node import NODE, TORCHRUN, PreflightOptions, check_node
from trainer.commands.grammar import Command
from trainer.config import ConfigError
from trainer.util.exit_codes import DONE, UNFIT


def run(options: PreflightOptions) -> int:
    """Runs a check, prints what is wrong, and returns the exit code."""
    missing = [name for name in TORCHRUN if name not in os.environ]
    if options.check == "network" and missing:
        raise ConfigError(
            "check=network is started by torchrun, on every process of the run; the environment has no "
            + ", ".join(missing)
        )
    if options.check == "node":
        problems, measured = [f"{NODE}: {problem}" for problem in check_node(options)], ""
        prints = True
    else:
        from trainer.cluster.node import check_network

        problems, measured = check_network(options)
        prints = os.environ["RANK"] == "0"
    if prints and problems:
        print("\n".join(f"preflight: {problem}" for problem in problems), file=sys.stderr, flush=True)
    elif prints and measured:
        print(f"preflight: {measured}", flush=True)
    return UNFIT if problems else DONE


main = Command(
    "preflight",
    "Checks the machines of a cluster before a run is started on them: GPUs, disks, folders, network.",
    "trainer preflight check=node gpus=8 run_dir=runs/demo",
    PreflightOptions,
    run,
)
