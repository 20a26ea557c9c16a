"""What a rank has in memory at this moment, by category. It is read where memory has run out: nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from trainer.distributed.tensors import Fragment, local_values
from trainer.training.state import TrainState

HOST = "states in host memory"
"""Of a run on GPUs: what is told of tensors that do not lie on its device."""


@torch.no_grad()
def memory_breakdown(state: TrainState) -> dict[str, float | None]:
    """Bytes by the estimator's categories, None where they cannot be known; in the middle of a step too.

    Memory counts whole, padding included, and once: of categories whose tensors share it, the first has it."""
    found: dict[str, float | None] = {}
    seen, host = set[int](), 0
    engine = state.engine.holds()
    for name, own in state_bytes(state).items():
        theirs = engine.get(name, ())
        if theirs is None:
            found[name] = None
            continue
        found[name] = 0
        for tensor in chain(own, theirs):
            memory = tensor.untyped_storage()
            size = memory.nbytes()
            if not size or memory.data_ptr() in seen:
                continue
            seen.add(memory.data_ptr())
            if tensor.device.type == state.world.device.type:
                found[name] += size
            else:
                host += size
    return found | ({HOST: host} if host else {})


def state_bytes(state: TrainState) -> dict[str, Iterable[Tensor]]:
    """What does not depend on the engine; empty of the categories that only it knows of."""
    parameters: list[Tensor | Fragment] = list(state.optimizer.parameters.values())
    return {
        "parameters": map(local_values, parameters),
        "optimizer": state.optimizer.moments(),
        "average of weights": state.average.values.values() if state.average is not None else (),
        "error feedback": state.compression.errors,
        "gradients": [local_values(one.grad) for one in parameters if one.grad is not None],
        "gathered parameters": (),
        "communication buffers": (),
    }
