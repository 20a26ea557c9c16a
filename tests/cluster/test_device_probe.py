"""Kernels of attention that the probe measures: which, at which shapes, and how much work they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.estimates import settings
from support.reference import tiny_spec
from torch.nn.attention.flex_attention import flex_attention

import trainer.cluster.device as device
import trainer.model.attention as attention
from trainer.config.model import ModelSpec
from trainer.model.attention import block_mask
from trainer.parallel.context.plan import KERNELS
from trainer.planning.documents import DocumentLengths, computed_keys
from trainer.planning.layer import attention_flops
from trainer.planning.parameters import layer_specs
from trainer.planning.resolve import resolve_layout

LENGTH = 512
SHORT = {"data__mask_documents": True, "data__documents__mean": 100.0, "data__documents__median": 60.0}


def probed(spec: ModelSpec, **changes: object) -> device.DeviceProbe:
    sizes = {"batch__sequence_length": LENGTH, "batch__micro_size": 2, "batch__accumulation": 1}
    config = settings(spec, **sizes, **changes)
    alone = SimpleNamespace(device=torch.device("cpu"), size=1)
    return device.DeviceProbe(config, resolve_layout(config, 1, spec), alone, 0.5, 2**33)


def spec_of(**changes: object) -> ModelSpec:
    return tiny_spec(depth=2, max_length=LENGTH, attention={"heads": 2, "kv_heads": 1, **changes})


@pytest.fixture
def on_blocks(monkeypatch):
    """Masks and the forward pass of the kernel as on a GPU; it has no backward pass on CPUs."""

    def flex(*operands: torch.Tensor, **settings: Any) -> Any:
        found = flex_attention(*(one.detach() for one in operands), **settings)
        forward, *more = found if isinstance(found, tuple) else (found,)
        forward = forward + 0 * sum(one.sum() for one in operands)
        return (forward, *more) if more else forward

    monkeypatch.setattr(device, "mask_of", block_mask)
    monkeypatch.setattr(attention, "flex_attention", lambda: flex)


@pytest.mark.parametrize("window, cap, changes", [(0, 0.0, {}), (100, 0.0, {}), (0, 20.0, {}), (100, 20.0, SHORT)])
@pytest.mark.parametrize("sinks", [False, True])
def test_every_kernel_is_measured_with_the_mask_of_the_recipe(window, cap, changes, sinks, on_blocks):
    spec = spec_of(window=window, soft_cap=cap, sinks=sinks)
    found = probed(spec, **changes).attention(1e12)
    assert tuple(found) == KERNELS and all(one.seconds > 0 for one in found.values())
    whole, late = (LENGTH + 1) / 2, LENGTH / 2 + (LENGTH / 2 + 1) / 2
    work = {"attention": (LENGTH, whole), "last_queries": (LENGTH // 2, late)}
    for name, (queries, keys) in work.items():
        flops = 3.5 * 2 * queries * attention_flops(layer_specs(spec)[0].attention, keys)
        assert found[name].amount == pytest.approx(flops), name
    blocks = found["block_mask"].amount / (3.5 * 2 * LENGTH * attention_flops(layer_specs(spec)[0].attention, 1))
    documents = DocumentLengths(100.0, 60.0) if changes else None
    assert blocks == pytest.approx(computed_keys(LENGTH, window, documents, 128), rel=0.3 if changes else 1e-9)


def test_a_dense_mask_leaves_out_nothing():
    spec = spec_of(window=100)
    found = probed(spec).attention(1e12)["block_mask"]
    assert found.amount == pytest.approx(3.5 * 2 * LENGTH * attention_flops(layer_specs(spec)[0].attention, LENGTH))


def test_a_kernel_that_fails_is_missed_only_where_it_is_used(monkeypatch):
    def lacking(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(device, "mask_of", lacking)
    assert tuple(probed(spec_of()).attention(1e12)) == KERNELS[:2]
    with pytest.raises(RuntimeError, match="no such kernel"):
        probed(spec_of(window=100)).attention(1e12)
