"""Steps of two ranks that are replayed as CUDA graphs, beside steps that run as they come, under several plans.

recorded.py
"""

from __future__ import annotations

import os
from typing import Any

import torch
from support.launch import leave
from support.recorded import compare_replayed
from support.reference import settings, tiny_spec

PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"parallel__zero__stage": 0},
    "zero1": {"parallel__zero__stage": 1, "precision__compute": "fp16"},
    "zero2": {"parallel__zero__stage": 2, "precision__compute": "bf16"},
    "zero3": {"parallel__zero__stage": 3, "activation__mode": "full", "optimizer__ema__decay": 0.9},
    "tensors": {"parallel__tp": 2},
    "keys": {"parallel__cp": 2, "parallel__context__method": "allgather"},
    "heads": {"parallel__cp": 2, "parallel__context__method": "ulysses", "parallel__zero__stage": 3},
}


EXPERTS = {"family": "mixtral", "feed_forward": {"width": 64, "experts": {"count": 8, "top_k": 2}}, "width": 64}


def main() -> None:
    device, world_size = torch.device("cuda", int(os.environ["LOCAL_RANK"])), int(os.environ["WORLD_SIZE"])
    cases = [(name, changes, {}) for name, changes in PLANS.items()]
    cases.append(("experts", {"parallel__zero__stage": 3, "precision__compute": "bf16"}, EXPERTS))
    for name, changes, model in cases:
        spec = tiny_spec(max_length=64, **model)
        compare_replayed(settings(run__cuda_graphs=True, **changes), spec, device, world_size)
        print(f"{name}: equal", flush=True)


if __name__ == "__main__":
    main()
    leave()
