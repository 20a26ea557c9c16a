"""Activation checkpointing recomputes what it says, and changes no gradient."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
from support.launch import CAN_COMPILE
from support.reference import random_batch, tiny_spec
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import ActivationConfig, ConfigError
from trainer.model.initial import initialize_model
from trainer.model.transformer import Transformer
from trainer.parallel.recompute import apply_recompute, check_recompute

needs_compiler = pytest.mark.skipif(not CAN_COMPILE, reason="needs a C++ compiler")


class Operations(TorchDispatchMode):
    """Counts operators while active."""

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.counts[str(function.overloadpacket).split(".")[-1]] += 1
        return function(*arguments, **(keywords or {}))


def backward(compile: str = "", depth: int = 3, **settings):
    """Gradients of a tiny model, and the operators that its backward pass ran."""
    spec = tiny_spec(depth=depth)
    spec.attention.bias = False
    model = Transformer(spec)
    initialize_model(model, spec, 0, torch.device("cpu"))
    apply_recompute(model, ActivationConfig(**settings))
    if compile:
        for layer in model.layers.values():
            layer.run = torch.compile(layer.run, dynamic=False, backend=compile)
    batch = random_batch(0, 2, 16, spec.vocab_size, False)
    objective, _ = model(batch.tokens, batch.targets)
    operations = Operations()
    with contextlib.nullcontext() if compile else operations:  # compiled code does not pass through the counter
        objective.backward()
    return {name: p.grad for name, p in model.named_parameters()}, operations.counts


LAYERS, MATMULS = 3, 7  # a layer has q, k, v, o, gate, up, down
# The last product of a recomputed region is not repeated: nothing in the backward pass reads its output.


@pytest.mark.parametrize(
    "settings, attention, matmuls",
    [
        (dict(mode="full"), LAYERS, LAYERS * (MATMULS - 1)),
        (dict(mode="selective", save=["attention", "matmul"]), 0, 0),
        (dict(mode="selective", save=["attention"]), 0, LAYERS * (MATMULS - 1)),
        (dict(mode="selective", save=["attention", "matmul/2"]), 0, LAYERS * 3),
        (dict(mode="selective", save=["aten.mm", "all@1-9"]), 1, 0),
        (dict(mode="selective", save=["attention.*", "feed_forward.up"]), LAYERS, LAYERS),
        (dict(mode="selective", save=["attention@0-2/2", "matmul@1", "all@2"]), 1, MATMULS - 1),
        (dict(mode="selective", save=[]), LAYERS, LAYERS * (MATMULS - 1)),
        (dict(mode="selective", save=["attention", "attention.*"]), 0, LAYERS * 2),
    ],
)
def test_recomputed_operations(settings, attention, matmuls):
    reference, plain = backward(mode="none")
    gradients, counts = backward(**settings)
    forward = "_scaled_dot_product_flash_attention_for_cpu"
    assert plain[forward] == 0
    assert counts[forward] == attention
    assert counts["mm"] - plain["mm"] == matmuls
    assert all(torch.equal(gradients[name], reference[name]) for name in reference)


@needs_compiler
def test_compiled_recompute_keeps_gradients():
    """Of one layer, since all of a kind share a graph, see below. Without recompute the matrix of plans has kernels;
    with full recompute they are the same, in another order."""
    reference, _ = backward(mode="none", depth=1)
    for mode, backend in (("full", "aot_eager_decomp_partition"), ("selective", "inductor")):
        gradients, _ = backward(compile=backend, depth=1, mode=mode)
        for name in reference:
            torch.testing.assert_close(gradients[name], reference[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        dict(mode="none"),
        dict(mode="full"),
        dict(mode="selective", save=["attention", "attention.*@5-9", "feed_forward.up@5-9"]),
    ],
)
def test_layers_of_one_kind_share_one_compiled_graph(settings):
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    reference, _ = backward(mode="none", depth=10)
    gradients, _ = backward(compile="aot_eager", depth=10, **settings)
    for name in reference:
        torch.testing.assert_close(gradients[name], reference[name], rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(save=["atention"]), "activation.save: 'atention'"),
        (dict(save=["matmul/x"]), "'matmul/x' names no operation"),
        (dict(save=["aten.nothing"]), "aten.nothing"),
        (dict(save=["attention.z"]), "'attention.z' names no operation"),
        (dict(save=["matmul@0-9"]), "'matmul@0-9' names layers that are not there"),
    ],
)
def test_names_that_match_nothing_are_refused(settings, words):
    with pytest.raises(ConfigError, match="activation") as caught:
        check_recompute(Transformer(tiny_spec()), ActivationConfig(mode="selective", **settings))
    assert words in str(caught.value)
