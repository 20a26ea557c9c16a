"""Options of the preflight, the variables that torchrun sets, and this node's name."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from trainer.config.fields import option

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

NODE = os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass
class PreflightOptions:
    check: str = option(None, "what to look at", ("node", "network"))
    gpus: int = option(0, "GPUs that this node must have; 0: it is used for its CPUs, and GPUs are not looked at")
    run_dir: str = option("", "node: folder that all nodes must see; empty looks at none")
    cache: str = option("", "node: folder of tokenised corpora, written on first use; empty looks at none")
    free_gib: float = option(20.0, "node: GiB that must be free for run_dir")
    cache_gib: float = option(1.0, "node: GiB that must be free for cache")
    nodes: str = option(
        "", "node: names of all nodes, separated by commas, which must see each other's files in run_dir"
    )
    stamp: str = option("once", "node: a name for this check, so that files of an earlier one do not count")
    patience: float = option(60.0, "seconds to wait for other nodes' files, and for an all-reduce to end")
    within: float = option(
        -1.0, "network: least bus bandwidth of an all-reduce within a node, GB/s; -1: 20 (GPUs), 0.01 (CPUs)"
    )
    between: float = option(-1.0, "network: the same between two nodes, GB/s; -1: 2 (GPUs), 0.002 (CPUs)")
    share: float = option(-1.0, "network: least share of the median over nodes; -1: 0.6 (GPUs), 0 (CPUs)")
    skew: float = option(1.0, "network: most seconds that a node's clock may differ from the others'")
