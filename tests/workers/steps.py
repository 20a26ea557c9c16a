"""Steps of two ranks that the host queues ahead, and steps that are replayed as CUDA graphs, beside steps one by one,
under several plans.

steps.py
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from support.launch import leave
from support.reference import settings, tiny_spec
from support.steps import AHEAD, REPLAYED, compare_steps

from trainer.config import Config
from trainer.distributed.mesh import join_world, local_device
from trainer.planning.features import resolve_plan

PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"parallel__zero__stage": 0},
    "zero1": {"parallel__zero__stage": 1, "precision__compute": "fp16"},
    "zero2": {"parallel__zero__stage": 2, "precision__compute": "bf16"},
    "zero3": {"parallel__zero__stage": 3, "activation__mode": "full", "optimizer__ema__decay": 0.9},
    "tensors": {"parallel__tp": 2},
    "keys": {"parallel__cp": 2, "parallel__context__method": "allgather"},
    "heads": {"parallel__cp": 2, "parallel__context__method": "ulysses", "parallel__zero__stage": 3},
    "experts": {"parallel__zero__stage": 3, "precision__compute": "bf16"},
}
ONLY_AHEAD: dict[str, dict[str, Any]] = {
    "whole shards": {"parallel__zero__stage": 3, "parallel__shard": 1},
    "shards in host memory": {"parallel__zero__stage": 3, "parallel__zero__offload": True},
    "inputs in host memory": {"activation__mode": "full", "activation__offload": True},
    "frozen layers": {
        "activation__mode": "full",
        "activation__offload": True,
        "model__adapter__rank": 4,
        "model__adapter__targets": ["layers.2.*"],
    },
    "int8": {"parallel__zero__stage": 3, "parallel__grad_comm__inner__codec": "int8"},
    "copies": {"parallel__zero__stage": 3, "parallel__zero__collectives": "copy_engine"},
    "copied sums": {"parallel__zero__stage": 2, "parallel__zero__collectives": "copy_engine"},
    "copied tensors": {"parallel__tp": 2, "parallel__tp_overlap": "copy_engine"},
    "shared experts": {"parallel__ep": 2, "parallel__ep_dispatch": "alltoall", "parallel__zero__stage": 3},
    "overlapped experts": {"parallel__ep": 2, "parallel__ep_dispatch": "alltoall_overlap", "parallel__zero__stage": 2},
    "experts in shared memory": {"parallel__ep": 2, "parallel__ep_dispatch": "shared_memory"},
    "pipeline": {"parallel__pp": 2, "parallel__pipeline__schedule": "zb_v"},
}
"""What a graph cannot hold."""

EXPERTS = {"family": "mixtral", "feed_forward": {"width": 64, "experts": {"count": 8, "top_k": 2}}}


def main() -> None:
    device = local_device(Config().run)
    join_world(resolve_plan(Config().parallel, 2), device)
    for name, changes in (PLANS | ONLY_AHEAD).items():
        config, replays = settings(**changes), name in PLANS and device.type == "cuda"
        config.run.cuda_graphs = replays
        spec = tiny_spec(max_length=64, width=64, depth=4, **(EXPERTS if "experts" in name else {}))
        spec.adapter = config.model.adapter
        compare_steps(config, spec, device, 2, ways=(AHEAD, REPLAYED) if replays else (AHEAD,))
        if dist.get_rank() == 0:
            print(f"{name}: equal", flush=True)


if __name__ == "__main__":
    main()
    leave()
