"""Weights that a step casts to fp8 once, beside those that each product casts: the same bits, and nothing stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest
import sympy
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from hypothesis import strategies as st
from support.estimates import shipped
from support.reference import random_batch, settings, tiny_spec
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

from trainer.config import Config, Float8Config
from trainer.config.model import ModelSpec
from trainer.distributed.mesh import join_world
from trainer.distributed.tensors import local_values
from trainer.model.layers import Linear, project_input
from trainer.model.linear import DeferredGrads
from trainer.model.loss import IGNORE
from trainer.parallel import parallelize
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.planning.decide import SHARE, MemoryLimit, decide
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.estimate.step import estimate_step, terms_of
from trainer.planning.features import resolve_plan
from trainer.planning.float8 import can_cast_once
from trainer.planning.hardware import load_hardware
from trainer.planning.plan import BatchPlan
from trainer.planning.resolve import Layout, resolve_layout
from trainer.precision.products import E4M3, E5M2, Float8Multiply, cast_weight, quantise_operand
from trainer.training.out_of_memory import memory_breakdown
from trainer.training.state import TrainState
from trainer.training.step import evaluate, train_step
from trainer.training.trainer import WARM, CUDAGraphStep

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SPEC = tiny_spec(width=64, feed_forward={"width": 96}, vocab_size=64, depth=2)
MATRICES = 7 * SPEC.depth
SEQUENCES, LENGTH, MICRO_BATCHES = 3, 16, 3
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", autouse=True)
def process():
    joined = dist.is_initialized()
    yield
    if not joined and dist.is_initialized():
        dist.destroy_process_group()


def build(device: str, recipe: str, once: bool, cast: Callable = quantise_operand, **changes: Any) -> TrainState:
    """cast: makes each operand."""
    config = settings(precision__compute="bf16", **changes)
    config.precision.float8 = Float8Config(recipe, ends=0)
    plan = replace(resolve_plan(config.parallel, 1, SPEC), casts_once=once)
    batch = BatchPlan(LENGTH, MICRO_BATCHES * SEQUENCES, SEQUENCES, MICRO_BATCHES)
    world = join_world(plan, torch.device(device, 0) if device == "cuda" else torch.device(device))
    with patch.object(parallelize, "quantise_operand", cast):
        return TrainState.build(config, SPEC, plan, resolve_pipeline(config, SPEC, plan, batch), world)


def batches(state: TrainState, step: int) -> list[Any]:
    device = state.world.device
    return [random_batch(9 * step + part, SEQUENCES, LENGTH, 64, False, device) for part in range(MICRO_BATCHES)]


def linears(state: TrainState) -> list[Linear]:
    return [module for module in state.stages[0].modules() if isinstance(module, Linear)]


def values(state: TrainState) -> list[Tensor]:
    return [local_values(tensor).detach() for tensor in state.tensors().values()]


def act(state: TrainState, action: str, step: int) -> list[Tensor]:
    """What is seen of an action: of a step, one without any target, an evaluation, or weights that are written over."""
    some = batches(state, step)
    if action == "evaluate":
        return [evaluate(state, some)]
    if action == "overwrite":
        for parameter in state.parameters.values():
            local_values(parameter).detach().mul_(1.25)
        return []
    if action == "skip":
        for batch in some:
            batch.targets.fill_(IGNORE)
    scalars = train_step(state, some, 0)
    assert scalars["found_inf"].item() == (action == "skip")
    return [scalars[name] for name in ("loss", "grad_norm", "squares", "losses")]


ACTIONS = st.lists(st.sampled_from(["train", "skip", "evaluate", "overwrite"]), min_size=2, max_size=5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@hypothesis.settings(deadline=None, max_examples=4)
@hypothesis.given(ACTIONS, st.sampled_from(RECIPES), st.sampled_from([0, 2]), st.sampled_from(["none", "full"]))
def test_nothing_is_stale(device, actions, recipe, stage, recompute):
    """Whatever happens between steps, each sees the weights as they are then."""
    changes = {"parallel__zero__stage": stage, "activation__mode": recompute, "lr__peak": 3e-2}
    ours, theirs = (build(device, recipe, once, **changes) for once in (True, False))
    for step, action in enumerate([*actions, "train", "evaluate"]):
        seen, expected = (act(state, action, step) for state in (ours, theirs))
        assert all(map(torch.equal, seen, expected)), (step, action)
        assert not any(len(module.held) for module in linears(ours)), "between steps"
    assert all(map(torch.equal, values(ours), values(theirs)))
    for state in (ours, theirs):
        state.free()


def test_a_step_casts_each_weight_once_for_each_product():
    """Each product would cast it in forward, recompute and backward of every micro-batch."""
    found: dict[bool, list[Any]] = {}
    shapes = {tuple(module.weight.shape) for module in linears(build("cpu", "rowwise", False))}
    shapes |= {shape[::-1] for shape in shapes}
    for once in (True, False):
        cast: list[int] = []

        def counted(x: Tensor, *how: Any, cast: list[int] = cast) -> tuple[Tensor, Tensor]:
            cast.append(tuple(x.shape) in shapes)
            return quantise_operand(x, *how)

        state = build("cpu", "rowwise", once, counted, activation__mode="full")
        sizes: list[int] = []
        down = state.stages[0].layers[str(SPEC.depth - 1)].feed_forward.down
        down.register_forward_hook(
            lambda *_, sizes=sizes, state=state: sizes.append(memory_breakdown(state)["gathered parameters"])
        )
        train_step(state, batches(state, 0), 0)
        weights = [module.weight for module in linears(state)]
        found[once] = [sum(cast), max(sizes)]
    assert [found[once][0] for once in (True, False)] == [2 * MATRICES, MICRO_BATCHES * 3 * MATRICES]
    # Two operands of a byte an element, and fp32 factors of their rows.
    held = sum(2 * weight.numel() + 4 * sum(weight.shape) for weight in weights)
    assert found[True][1] == found[False][1] + held


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("deferring", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_read_what_is_held(recipe, deferring, together):
    """Of layers with one input. What is left in the weights themselves is read by nothing."""
    generator, found = torch.Generator().manual_seed(0), []

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weights, x, gradients = [random(64, 48), random(32, 48)], random(16, 48), [random(16, 64), random(16, 32)]
    multiply = Float8Multiply(recipe)
    for once in (True, False):
        layers, deferred = [Linear(48, len(weight), ("embed", "mlp"), bias=True) for weight in weights], DeferredGrads()
        for layer, weight in zip(layers, weights):
            layer.multiply, layer.weight = multiply, torch.nn.Parameter(weight.clone())
            layer.bias = torch.nn.Parameter(torch.ones(len(weight)).bfloat16())
            if deferring:
                layer.defer(deferred)
            if once:
                layer.held = cast_weight(weight, multiply)
                layer.weight.detach().fill_(torch.nan)
        x = x.detach().requires_grad_()
        deferred.active = deferring
        products = project_input(x, *layers) if together else [project_input(x, layer)[0] for layer in layers]
        torch.autograd.backward(products, gradients)
        deferred.take()()
        found.append([*products, x.grad, *(one.grad for layer in layers for one in layer.parameters())])
    assert None not in found[0] and all(map(torch.equal, *found))


@pytest.mark.parametrize("device, recipe", [("cpu", "tensorwise"), pytest.param("cuda", "rowwise", marks=NEEDS_GPU)])
@inductor.patch(emulate_precision_casts=True)
def test_compiled_steps_have_the_same_bits(device, recipe, monkeypatch):
    """In one graph for all layers and steps. On CPUs what is captured runs eagerly; on GPUs kernels round what they
    compute between two products as eager ones do, or it would depend on what is fused."""
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    found = []
    for once in (True, False):
        torch._dynamo.reset()
        counters.clear()
        state = build(device, recipe, once, compile=True, activation__mode="full")
        seen = [train_step(state, batches(state, 0), 0)]
        graphs = counters["stats"]["unique_graphs"]
        seen.append(train_step(state, batches(state, 1), 0))
        assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == graphs
        found.append([one[name] for one in seen for name in ("loss", "grad_norm", "squares")] + values(state))
    assert all(map(torch.equal, *found))


def make_loops(reduces: bool, *writes: tuple[tuple[int, int], torch.dtype]) -> Any:
    """Operations that the compiler may put into one kernel, over 256 rows of 128. writes: strides and type of each
    result."""
    row, column = sympy.symbols("row column")

    def part(strides: tuple[int, int], dtype: torch.dtype) -> Any:
        write = MemoryDep("result", strides[0] * row + strides[1] * column, (row, column), (256, 128))
        node = SimpleNamespace(get_dtype=lambda: dtype)
        return SimpleNamespace(read_writes=SimpleNamespace(writes=[write]), node=node)

    parts = [part(*write) for write in writes]
    return SimpleNamespace(is_reduction=lambda: reduces, get_nodes=lambda: parts)


@pytest.mark.parametrize(
    "strides, dtype, fused",
    [((128, 1), E4M3, True), ((1, 256), E4M3, False), ((1, 256), E5M2, False), ((1, 256), torch.bfloat16, True)],
)
def test_transposed_operands_have_kernels_of_their_own(strides, dtype, fused, monkeypatch):
    monkeypatch.setattr(InductorChoices, "can_fuse", lambda *_: True)
    choices, plain = parallelize.choose_fusions(), ((128, 1), torch.bfloat16)
    cast, straight = (make_loops(False, (one, dtype)) for one in (strides, (128, 1)))
    reduction, other = make_loops(True, plain), make_loops(False, plain)
    for wide in (reduction, other, make_loops(False, plain, (strides, dtype))):
        assert choices.can_fuse(None, wide, cast, 0) == choices.can_fuse(None, cast, wide, 0) == fused
    assert choices.can_fuse(None, straight, cast, 0) and choices.can_fuse(None, reduction, other, 0)
    monkeypatch.setattr(InductorChoices, "can_fuse", lambda *_: False)
    assert not choices.can_fuse(None, reduction, other, 0)


@NEEDS_GPU
def test_on_a_gpu_a_norm_leaves_the_transposed_operand_to_another_kernel():
    """The backward pass of a norm beside the operand that is made of the norm's result."""
    x, gradient = (torch.randn(8192, 1024, device="cuda").bfloat16() for _ in range(2))
    weight, largest = torch.randn(1024, device="cuda").bfloat16(), torch.tensor(4.0, device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        scale = (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        normalised = (x.float() * scale * weight.float()).bfloat16()
        product = gradient.float() * weight
        shared = (product * x.float()).mean(-1, keepdim=True)
        to_x = product * scale - x.float() * scale**3 * shared
        return quantise_operand(normalised, 0, E4M3, None, largest)[0], to_x.bfloat16()

    def reductions_with_casts() -> list[str]:
        torch._dynamo.reset()
        _, code = run_and_get_code(torch.compile(run, dynamic=False))
        kernels = code[0].split("async_compile.triton(")[1:]
        return [
            one for one in kernels if one[1:].startswith(("triton_red", "triton_per")) and ".to(tl.float8e4nv)" in one
        ]

    with inductor.patch(fx_graph_cache=False):
        with V.set_choices_handler(InductorChoices()):
            assert reductions_with_casts()
        with V.set_choices_handler(parallelize.choose_fusions()):
            assert not reductions_with_casts()


@NEEDS_GPU
def test_a_replayed_step_on_a_gpu_casts_anew():
    """As it comes and in a CUDA graph, with casts in each product and once."""
    found = []
    for once, replayed in ((True, True), (True, False), (False, False)):
        state = build("cuda", "tensorwise", once, lr__peak=3e-2)
        step = CUDAGraphStep(state) if replayed else lambda some, asked, state=state: train_step(state, some, asked)
        losses = [step(batches(state, number), 0)["loss"].item() for number in range(WARM + 3)]
        evaluated = evaluate(state, batches(state, 0)).tolist()
        losses += [step(batches(state, number), 0)["loss"].item() for number in range(2)]
        found.append([*losses, *evaluated])
        assert not replayed or step.graph is not None
    assert found[1] == found[2] and found[0] == pytest.approx(found[1], rel=1e-5)


def planned(spec: ModelSpec = SPEC, **changes: Any) -> tuple[Config, Layout]:
    config = settings(precision__compute="bf16", batch__micro_size=1, **{"batch__accumulation": 4} | changes)
    config.precision.float8, config.model = Float8Config("rowwise", ends=0), spec
    return config, resolve_layout(config, 2, spec, 2)


@pytest.mark.parametrize(
    "changes, once",
    [
        ({}, True),
        ({"parallel__zero__stage": 1}, True),
        ({"parallel__zero__stage": 2}, True),
        ({"parallel__zero__stage": 3}, False),
        ({"parallel__tp": 2}, False),
        ({"parallel__pp": 2, "parallel__pipeline__schedule": "zb_h1"}, True),
        ({"batch__accumulation": 1}, False),
    ],
)
def test_where_weights_are_cast_once(changes, once):
    config, layout = planned(**changes)
    decided = decide(config, layout, MemoryLimit(None, inf), 2).layout.plan
    assert decided.casts_once == once and decided.to_dict() == layout.plan.to_dict()
    config.precision.float8.recipe = "none"
    assert not can_cast_once(config, SPEC, layout.plan, layout.batch.accumulation)


def test_operands_take_memory_that_nothing_else_needs():
    config, layout = planned()
    held = replace(layout, plan=replace(layout.plan, casts_once=True))
    (before,), (after,) = (find_peaks(config, one, lowered=False) for one in (layout, held))
    elements = sum(module.weight.numel() for module in linears(build("cpu", "rowwise", False)))
    more = after.categories["gathered parameters"] - before.categories["gathered parameters"]
    assert more == 2 * elements and after.reserved >= before.reserved + more
    for size, once in ((after.reserved, True), (after.reserved - 1, False)):
        assert decide(config, layout, MemoryLimit(size / SHARE, inf), 2).layout.plan.casts_once == once


def test_a_step_is_predicted_to_take_less():
    config, layout = planned(shipped("llama3_8b"), compile=True, parallel__zero__stage=2, batch__sequence_length=4096)
    config.parallel.zero.collectives = "nccl"
    estimate = estimate_step(config, layout, load_hardware("h200"))
    assert estimate.layout.plan.casts_once
    each = terms_of(config, layout, load_hardware("h200"))
    assert 0.95 * sum(each.values()) < estimate.seconds < 0.99 * sum(each.values())
