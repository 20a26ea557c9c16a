"""Feed-forward blocks and losses in tiles, and inputs in host memory: the same numbers, and less memory at once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support.live import Live
from support.reference import random_batch, tiny_spec
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from trainer.config import ActivationConfig
from trainer.config.model import AdapterSpec, ModelSpec
from trainer.model.initial import initialize_model
from trainer.model.linear import DeferredGrads
from trainer.model.transformer import Transformer
from trainer.parallel import recompute
from trainer.parallel.recompute import apply_recompute

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
    "every second": {"mode": "selective", "save": ["all@1-99/2"], "offload": True},
    "products": {"mode": "selective", "save": ["feed_forward.*"]},
}


def built(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Transformer:
    model = Transformer(spec)
    initialize_model(model, spec, 0, CPU)
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


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_parts_of_a_layer_are_compiled_each_by_itself(policy):
    spec = tiny_spec()
    expected, model = gradients(built(spec)), built(spec)
    model.set_loss(0.0, 3, False, 5)
    apply_recompute(model, ActivationConfig(**POLICIES[policy], tile=5))
    for layer in model.layers.values():
        layer.run, layer.run_tile = (
            torch.compile(part, dynamic=False, backend="aot_eager") for part in (layer.run, layer.run_tile)
        )
    for one, other in zip(gradients(model), expected, strict=True):
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


def peak(spec: ModelSpec, tile: int, loss_tile: int) -> int:
    """Bytes that a pass forward and backward takes at once, beside parameters; gradients included."""
    model = built(spec, torch.float32)
    model.set_loss(0.0, 32, False, loss_tile)
    apply_recompute(model, ActivationConfig(tile=tile))
    batch = random_batch(0, 1, 512, spec.vocab_size, False)
    gc.collect()
    with Live() as live:
        model(batch.tokens, batch.targets)[0].backward()
    return live.peak


def test_one_tile_of_logits_lives_at_a_time():
    spec = tiny_spec(vocab_size=4096, depth=1, max_length=512)
    logits, weight = 4 * 512 * 4096, 4 * 4096 * spec.width
    assert peak(spec, 0, 0) > logits
    assert peak(spec, 0, 32) < 8 * logits / (512 / 32) + 5 * weight < logits


def test_one_tile_of_hidden_units_lives_at_a_time():
    spec = tiny_spec(depth=2, max_length=512, feed_forward={"width": 4096})
    hidden, weights = 4 * 512 * 4096, 3 * 4 * 4096 * spec.width
    assert peak(spec, 0, 0) > 2 * 4 * hidden  # two layers, of each gate, up, and two of what is between
    assert peak(spec, 32, 0) < 10 * hidden / (512 / 32) + 6 * weights + hidden


@pytest.mark.parametrize("schedule", ["one", "in flight"])
def test_inputs_leave_the_device_and_come_back_in_time(schedule, monkeypatch):
    """At any time the device has two of them at most, and the host the others; nothing is left at the end."""
    alive: list[weakref.ref] = []
    inputs: list[StorageWeakRef] = []
    made = recompute.HostTensor.__init__

    def noted(kept: recompute.HostTensor, x: Tensor, *arguments: Any) -> None:
        made(kept, x, *arguments)
        alive.append(weakref.ref(kept))
        inputs.append(StorageWeakRef(x.untyped_storage()))

    monkeypatch.setattr(recompute.HostTensor, "__init__", noted)
    spec = tiny_spec(depth=5)
    model = built(spec)
    apply_recompute(model, ActivationConfig(mode="full", tile=8, offload=True))
    batches = [random_batch(step, 2, 16, spec.vocab_size, False) for step in range(2)]
    on_device = []

    def count(*_: Any) -> None:
        on_device.append(sum(kept is not None and kept.on_device is not None for kept in (ref() for ref in alive)))
        on_device.append(sum(not storage.expired() for storage in inputs))  # whoever else holds them

    for layer in model.layers.values():
        layer.register_forward_hook(count)
        layer.register_full_backward_hook(count)
    for some in [batches[:1], batches[1:]] if schedule == "one" else [batches]:
        objectives = [model(batch.tokens, batch.targets)[0] for batch in some]
        assert len([ref for ref in alive if ref()]) == len(some) * 2 * spec.depth
        for objective in objectives:
            objective.backward()
        del objectives, objective
        gc.collect()
        assert not [ref for ref in alive if ref()]
    assert len(alive) == 4 * spec.depth and max(on_device) <= 2


@pytest.mark.parametrize("tile", [0, 8])
@pytest.mark.parametrize(
    "targets", [["*"], ["layers.0.*"], ["layers.2.*", "layers.3.*"], ["*.feed_forward.*"], ["*.q"], ["layers.1.*.v"]]
)
def test_nothing_is_fetched_that_backward_does_not_take(targets, tile, monkeypatch):
    """Where layers are frozen. On a GPU the copy would go on while other tensors have its memory."""
    in_flight: list[bool] = []

    def freed(kept: recompute.HostTensor) -> None:
        in_flight.append(kept.on_device is not None)

    monkeypatch.setattr(recompute.HostTensor, "__del__", freed, raising=False)
    spec = tiny_spec(depth=5)
    spec.adapter = AdapterSpec(rank=4, targets=targets)
    model = built(spec)
    apply_recompute(model, ActivationConfig(mode="full", tile=tile, offload=True))
    for step in range(2):
        batch = random_batch(step, 2, 16, spec.vocab_size, False)
        model(batch.tokens, batch.targets)[0].backward()
    assert in_flight and not any(in_flight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_host_memory_frees_that_of_a_gpu():
    spec, device = tiny_spec(depth=16, width=512, max_length=16384), torch.device("cuda")
    spec.attention.kv_heads = 4
    found, peaks = [], []
    for offload in (False, True):
        gc.collect()  # a layer refers to itself (`run`): the model before this one lives until it is collected
        before = torch.cuda.memory_allocated()
        model = Transformer(spec).to(device)
        initialize_model(model, spec, 0, device)
        model.set_loss(0.0, 2048, False, 2048)
        apply_recompute(model, ActivationConfig(mode="full", tile=2048, offload=offload))
        batch = random_batch(0, 1, 16384, spec.vocab_size, False, device)
        for _ in range(2):  # memory that the first pass allocates is reused
            model.zero_grad(set_to_none=False)  # gradients count in both peaks, wherever these are
            torch.cuda.reset_peak_memory_stats()
            model(batch.tokens, batch.targets)[0].backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append([parameter.grad.double().cpu() for parameter in model.parameters()])
        del model
    for one, other in zip(*found, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-5
    stream = 4 * 16384 * spec.width
    assert peaks[1] - peaks[3] > 2 * (spec.depth - 3) * stream
