"""Feed-forward blocks and losses in tiles, and inputs in host memory: the same numbers, and less memory at once."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from support.reference import random_batch, tiny_spec
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.checkpointing.activation import apply_recompute
from trainer.config import ActivationConfig
from trainer.config.model import ModelSpec
from trainer.model.initial import initialize
from trainer.model.linear import DeferredGrads
from trainer.model.transformer import Transformer

CPU = torch.device("cpu")
SPECS: dict[str, dict[str, Any]] = {
    "gated": {},
    "plain, tied, caps": {
        "norm": {"kind": "layer"},
        "feed_forward": {"kind": "plain", "bias": True},
        "tied": True,
        "logit_soft_cap": 5.0,
    },
    "parallel": {"parallel_residual": True, "feed_forward": {"kind": "plain", "bias": True}},
    "norms around blocks": {"norm": {"placement": "both", "offset": 1.0}},
}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"mode": "full", "offload": True},
    "selective": {"mode": "selective", "offload": True},
    "every second": {"mode": "full", "every": 2, "offload": True},
    "attention": {"mode": "selective", "modules": ["*.attention"]},
}


def built(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(spec)
    initialize(model, spec, 0, CPU)
    return model.to(dtype)


def gradients(model: Transformer, split: bool = False) -> list[Tensor]:
    """Of two micro-batches that are in flight together; then of the entropies, summed."""
    deferred = DeferredGrads()
    if split:
        model.defer(deferred)
    batches = [random_batch(step, 2, 16, model.spec.vocab_size, False) for step in range(2)]
    outputs = [model(batch.tokens, batch.targets) for batch in batches]
    for objective, _ in outputs:
        deferred.active = split
        (objective / 7).backward()
        deferred.active = False
        deferred.take()()
    return [*(parameter.grad for parameter in model.parameters()), sum(entropy for _, entropy in outputs)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", SPECS)
def test_tiles_and_host_memory_change_no_gradient(kind, policy):
    spec = tiny_spec(**SPECS[kind])
    expected = gradients(built(spec))
    for tile, split in ((5, False), (0, False), (8, True)):
        model = built(spec)
        model.set_loss(0.0, 3, False, tile)
        apply_recompute(model, ActivationConfig(**POLICIES[policy], tile=tile))
        for one, other in zip(gradients(model, split), expected, strict=True):
            assert ((one - other).norm() / other.norm()).item() < 1e-14


def test_gradients_of_tiles_are_added_up_in_fp32():
    """In bf16 a sum of 512 terms would lose several percent."""
    spec = tiny_spec(depth=1)
    batch = random_batch(0, 32, 16, spec.vocab_size, False)
    found = {}
    for name, dtype, tile in (("exact", torch.float64, 0), ("plain", torch.bfloat16, 0), ("tiles", torch.bfloat16, 1)):
        model = built(spec, dtype)
        model.set_loss(0.0, 0, False, tile)
        apply_recompute(model, ActivationConfig(tile=tile))
        model(batch.tokens, batch.targets)[0].backward()
        found[name] = [parameter.grad.double() for parameter in model.parameters()]
    for exact, plain, tiles in zip(*found.values(), strict=True):
        assert (tiles - exact).norm() < 1.5 * (plain - exact).norm() + 1e-3 * exact.norm()


class Live(TorchDispatchMode):
    """Bytes of the tensors that are made meanwhile and still live, and the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.gone, storage._cdata)
        return result

    def gone(self, key: int) -> None:
        self.bytes -= self.known.pop(key, 0)
