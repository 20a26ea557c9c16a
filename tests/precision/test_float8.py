"""Products in fp8: casts and products beside fp64, infinities, a tiny model beside bf16, what is kept, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.estimates import estimated, shipped
from support.estimates import settings as planned
from support.launch import launch
from support.reference import random_batch, rows, tiny_spec
from support.reference import settings as config_with
from torch import Tensor

from trainer.config import ConfigError, Float8Config, ParameterTypes, PrecisionConfig, TypePolicy
from trainer.config.model import ModelSpec
from trainer.model.initial import initialize_model
from trainer.model.layers import Linear, project_input
from trainer.model.linear import DeferredGrads, column_parallel
from trainer.model.transformer import Transformer
from trainer.parallel.parallelize import multiply_in_float8
from trainer.parity.compare import Trajectory, train_reference
from trainer.planning.features import resolve_plan
from trainer.planning.float8 import float8_linears, gathered_in_float8
from trainer.planning.hardware import load_hardware
from trainer.planning.resolve import check_config, compose
from trainer.precision.products import (
    E4M3,
    E5M2,
    Float8Multiply,
    GEMMRole,
    Multiply,
    check_device,
    matmul,
    multiply_blocks,
    quantise_operand,
)

CPU = torch.device("cpu")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
ROUNDING = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Half the distance of neighbours, relative."""
SMALLEST = {E4M3: 2.0**-10, E5M2: 2.0**-17}
"""Half the distance of the smallest numbers."""
SHAPES = {GEMMRole.OUTPUT: ((32, 256), (128, 256)), GEMMRole.INPUT_GRADIENT: ((32, 256), (256, 128))}
SHAPES[GEMMRole.WEIGHT_GRADIENT] = ((144, 32), (144, 64))


def random(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounding(x: Tensor, dtype: torch.dtype, largest: Tensor) -> Tensor:
    """The largest error of each element of `x` in `dtype`, if `largest` takes at least half of the type's range."""
    return x.abs() * ROUNDING[dtype] + largest * 2 * SMALLEST[dtype] / torch.finfo(dtype).max


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([None, -120, -90, -30, 0, 3, 60, 120]), min_size=1, max_size=4),
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from([None, (1, 0), (1, 8), (2, 8)]),
    st.sampled_from([0, 1]),
    st.integers(0, 9),
)
def test_casts_round_and_nothing_saturates(exponents, dtype, block, summed, seed):
    """Rows of zeros (None), tiny and huge ones together; the last block of a row is half full."""
    exponents = exponents * (block[0] if block else 1)
    x = random((len(exponents), 12), seed).double()
    x *= torch.tensor([0.0 if power is None else 2.0**power for power in exponents])[:, None]
    values, back = quantise_operand((x if summed else x.t()).bfloat16(), summed, dtype, block)
    x = torch.nn.functional.pad(x.bfloat16().double(), (0, 4 if block and block[1] else 0))
    assert values.is_contiguous() and values.shape == x.shape and torch.isfinite(back).all()
    largest, factors = x.abs().amax(), back
    if block:
        height, width = block[0], block[1] or x.shape[1]
        assert torch.equal(back.log2(), back.log2().round())
        assert back.shape == (len(x) // height, x.shape[1] // width)
        ones = torch.ones(height, width)
        parts = [row.split(width, 1) for row in x.split(height)]
        largest = torch.tensor([[part.abs().max() for part in row] for row in parts], dtype=torch.float64).kron(ones)
        factors = back.kron(ones)
    allowed = rounding(x, dtype, largest.clamp(min=2.0**-100))
    assert ((values.double() * factors.double() - x).abs() <= allowed).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("role", GEMMRole)
def test_products_are_those_of_fp64_but_for_rounding(recipe, role):
    a, b = (random(shape, seed) for seed, shape in enumerate(SHAPES[role]))
    a[3], b[5] = a[3] * 300, b[5] / 300
    multiply = Float8Multiply(recipe)
    seen, exact = multiply(a, b, role), matmul(a.double(), b.double(), role)
    assert seen.dtype is torch.bfloat16
    if recipe == "rowwise_with_gw_hp" and role is GEMMRole.WEIGHT_GRADIENT:
        assert torch.equal(seen, matmul(a, b, role))
        return
    wide = recipe == "tensorwise" and role is not GEMMRole.OUTPUT
    worst = [ROUNDING[E5M2 if wide else E4M3], ROUNDING[E4M3]]
    sizes = matmul(a.double().abs(), b.double().abs(), role)
    allowed = sizes * (worst[0] + worst[1] + worst[0] * worst[1] + 2.0**-8) + 1e-3 * sizes.max()
    error = (seen.double() - exact).abs()
    assert (error <= allowed).all() and error.norm() <= (0.07 if wide else 0.045) * exact.norm()
    assert error.norm() > 0.01 * exact.norm()  # that of fp8, not of bf16
    added = random(tuple(exact.shape), 7)
    assert torch.allclose(multiply(a, b, role, added), seen + added)


def test_a_row_of_its_own_scale_is_not_lost_beside_huge_ones():
    a, b = random((32, 48), 0), random((64, 48), 1)
    a[0] *= 2.0**-20
    exact = matmul(a.double(), b.double(), GEMMRole.OUTPUT)[0]
    errors = {
        name: (Float8Multiply(name)(a, b, GEMMRole.OUTPUT)[0] - exact).norm() / exact.norm() for name in RECIPES[:2]
    }
    assert errors["rowwise"] < 0.05 < errors["tensorwise"]


@pytest.mark.parametrize("role", GEMMRole)
def test_a_block_of_its_own_scale_is_not_lost_beside_huge_ones_of_its_row(role):
    """Huge numbers meet small ones, so that each block adds as much to the product."""
    summed = [0 if role is GEMMRole.WEIGHT_GRADIENT else 1, 1 if role is GEMMRole.OUTPUT else 0]
    a, b = (random((384, 128) if dim == 0 else (128, 384), seed) for seed, dim in enumerate(summed))
    a.narrow(summed[0], 128, 128).mul_(2.0**20)
    b.narrow(summed[1], 128, 128).mul_(2.0**-20)
    exact = matmul(a.double(), b.double(), role)
    errors = [(Float8Multiply(name)(a, b, role) - exact).norm() / exact.norm() for name in ("blockwise", "rowwise")]
    assert errors[0] < 0.045 and errors[1] > 10 * errors[0]


def test_operands_of_blocks_lie_as_cublas_reads_them():
    """By torch's own rules for the shapes and strides, which its meta device checks."""
    multiply = Float8Multiply("blockwise")
    for tokens in (5, 128, 272):
        for inputs, outputs in ((128, 128), (640, 256)):
            x, weight, gradient = (
                torch.empty(shape, dtype=torch.bfloat16, device="meta")
                for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
            )
            for a, b, role in zip((x, gradient, gradient), (weight, weight, x), GEMMRole):
                left, right = multiply.left(a, role), multiply.right(b, role)
                of_blocks = len(right.back) < len(right.values)
                operands = left.values, right.values.t(), left.back, right.back, of_blocks
                product = multiply_blocks(*operands, torch.bfloat16)
                assert product.stride() == torch.ops.trainer.multiply_blocks(*operands, torch.bfloat16).stride()
                assert product.shape == matmul(a, b, role).shape


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("role", GEMMRole)
def test_what_is_not_finite_stays_so(recipe, role, bad):
    """In every result that the element has a part in."""
    for operand in (0, 1):
        factors = [random(shape, seed) for seed, shape in enumerate(SHAPES[role])]
        factors[operand][2, 4] = bad
        exact = matmul(*(factor.float() for factor in factors), role)
        seen = Float8Multiply(recipe)(*factors, role)
        assert not torch.isfinite(seen[~torch.isfinite(exact)]).any() and not torch.isfinite(exact).all()


@pytest.mark.parametrize("block", [None, (1, 0), (1, 16)])
def test_scales_of_nan_are_nan(block):
    x = random((8, 16), 0)
    x[2, 4] = float("nan")
    cast, back = quantise_operand(x, 1, E4M3, block)
    bad = torch.isnan(back).expand(8, 1)[:, 0]
    assert bad.tolist() == [row == 2 or not block for row in range(8)]
    assert torch.equal(cast.float().isnan(), bad[:, None].expand(8, 16))


SPEC = tiny_spec(width=64, depth=3, feed_forward={"width": 96})


BLOCKS = tiny_spec(width=256, depth=3, attention={"kv_heads": 4}, feed_forward={"width": 256})
"""Of whole blocks."""


def model_of(float8: Float8Config | None, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    model = Transformer(SPEC)
    initialize_model(model, SPEC, 0, CPU)
    if float8 is not None:
        multiply_in_float8(model, SPEC, PrecisionConfig(float8=float8))
    return model.to(dtype)


def test_put_off_weight_gradients_are_the_same():
    batch, found = random_batch(0, 4, 16, SPEC.vocab_size, False), []
    for split in (False, True):
        model, deferred = model_of(Float8Config("rowwise"), torch.float32), DeferredGrads()
        model.defer(deferred)
        objective, _ = model(batch.tokens, batch.targets)
        deferred.active = split
        objective.backward()
        if split:
            assert model.layers["1"].attention.q.weight.grad is None
            deferred.take()()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


MIXED = PrecisionConfig(
    types=ParameterTypes(
        matrix=TypePolicy(float8="rowwise"),
        rules={
            "*.feed_forward.*": {"float8": "tensorwise"},
            "*.attention.[kv].*": {"float8": "none"},
            "layers.1.*.down.*": {"float8": "rowwise_with_gw_hp"},
        },
    ),
    float8=Float8Config(ends=0),
)


def trained(steps: int, float8: PrecisionConfig | None, spec: ModelSpec = SPEC) -> Trajectory:
    """The same batch again and again, in two micro-batches."""
    config = config_with(run__steps=steps, lr__peak=3e-3)
    whole = random_batch(0, 4, 16, spec.vocab_size, False)
    batches = [[rows(whole, 0, 2), rows(whole, 2, 4)]] * steps
    return train_reference(config, spec, batches, CPU, compute=torch.bfloat16, float8=float8)


@pytest.fixture(scope="module")
def plain() -> Trajectory:
    return trained(30, None)


@pytest.mark.parametrize("recipe", [*RECIPES, "mixed"])
def test_a_model_in_fp8_beside_bf16(recipe, plain):
    precision = MIXED if recipe == "mixed" else PrecisionConfig(float8=Float8Config(recipe, ends=0))
    seen = trained(30 if recipe == "tensorwise" else 3, precision, BLOCKS if recipe == "blockwise" else SPEC)
    plain = trained(3, None, BLOCKS) if recipe == "blockwise" else plain
    for name, expected in plain.gradients[0].items():
        error = (seen.gradients[0][name] - expected).norm() / expected.norm()
        assert error < 0.25, (name, error)
    found, exact = (torch.cat([value.flatten() for value in run.gradients[0].values()]) for run in (seen, plain))
    assert 0.01 < (found - exact).norm() / exact.norm() < 0.1
    assert any(not torch.equal(seen.gradients[0][name], value) for name, value in plain.gradients[0].items())
    assert recipe == "blockwise" or plain.losses[-1] < 0.8 * plain.losses[0]
    assert seen.losses == pytest.approx(plain.losses[: len(seen.losses)], rel=0.02)


@pytest.mark.parametrize("deferring", [False, True])
def test_an_operand_of_several_products_is_cast_once(deferring):
    cast: list[tuple[int, ...]] = []

    def counted(x: Tensor, *how: object) -> tuple[Tensor, Tensor]:
        cast.append(tuple(x.shape))
        return quantise_operand(x, *how)

    multiply, deferred = Float8Multiply("rowwise", counted), DeferredGrads()
    layers = [Linear(48, outputs, ("embed", "mlp")) for outputs in (64, 32)]
    for seed, layer in enumerate(layers):
        layer.multiply, layer.weight = multiply, torch.nn.Parameter(random((len(layer.weight), 48), seed))
        if deferring:
            layer.defer(deferred)
    x, y = random((16, 48), 2).requires_grad_(), [random((16, 64), 3), random((16, 32), 4)]
    products = project_input(x, *layers)
    assert sorted(cast) == [(16, 48), (32, 48), (64, 48)]
    expected = [multiply(gradient, x.detach(), GEMMRole.WEIGHT_GRADIENT) for gradient in y]
    cast.clear()
    deferred.active = deferring
    torch.autograd.backward(products, y)
    deferred.take()()
    assert cast.count((16, 48)) == 1 and len(cast) == 2 * 2 + 2 + 1
    assert all(torch.equal(layer.weight.grad, gradient) for layer, gradient in zip(layers, expected))


def test_compiled_layers_keep_no_weights_in_fp8():
    """As ZeRO-3 would then hold of all layers at once; and of activations no more than in bf16."""
    x, weight, kept = random((64, 64), 0), random((96, 64), 1).requires_grad_(), {}

    def activated(x: Tensor, weight: Tensor, multiply: Multiply) -> Tensor:
        (y,) = column_parallel(2 * x, [weight], [None], None, multiply=multiply)
        return torch.nn.functional.silu(y)

    for multiply in (matmul, Float8Multiply("tensorwise")):
        torch._dynamo.reset()
        sizes = {}

        def pack(value: Tensor, sizes: dict = sizes) -> Tensor:
            if value.data_ptr() != weight.data_ptr() and value.dim():  # largest elements are scalars
                sizes[value.data_ptr()] = value.nbytes
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            run = torch.compile(activated, backend="aot_eager_decomp_partition", dynamic=False)
            run(x.requires_grad_(), weight, multiply).sum().backward()
        kept[multiply] = sum(sizes.values())
    plain, narrow = kept.values()
    assert 64 * 96 * 2 <= narrow <= plain


def test_which_layers():
    names = float8_linears(PrecisionConfig(float8=Float8Config("rowwise")), SPEC)
    assert {name.split(".")[1] for name in names} == {"1"} and len(names) == 7
    chosen = float8_linears(PrecisionConfig(float8=Float8Config("rowwise", ["*.feed_forward.*"], 0)), SPEC)
    assert len(chosen) == 3 * 3 and float8_linears(PrecisionConfig(), SPEC) == {}
    model = model_of(Float8Config("rowwise"))
    assert {
        name for name, part in model.named_modules() if isinstance(getattr(part, "multiply", None), Float8Multiply)
    } == {*names}


def test_recipes_by_the_parameter_type_map():
    """A type has a recipe, a rule on names another one, the last that matches; the ends of the model may have none."""
    chosen = {name: one.recipe for name, one in float8_linears(MIXED, SPEC).items()}
    assert {chosen[f"layers.{layer}.attention.{name}"] for layer in range(3) for name in "qo"} == {"rowwise"}
    assert not any(name.endswith((".k", ".v")) for name in chosen)
    downs = [chosen[f"layers.{layer}.feed_forward.down"] for layer in range(3)]
    assert downs == ["tensorwise", "rowwise_with_gw_hp", "tensorwise"]
    assert set(float8_linears(replace(MIXED, float8=Float8Config()), SPEC)) == {
        name for name in chosen if "s.1." in name
    }
    model = Transformer(SPEC)
    multiply_in_float8(model, SPEC, MIXED)
    found = {
        name: part.multiply.recipe
        for name, part in model.named_modules()
        if hasattr(part, "multiply") and isinstance(part.multiply, Float8Multiply)
    }
    assert found == chosen


def test_predicted_steps_of_mixed_recipes():
    """Between those of their recipes; what is gathered in fp8 has one scale."""
    found = {}
    for name, types in {
        "none": {},
        "rows": {"*": {"float8": "rowwise"}},
        "half": {"*.feed_forward.*": {"float8": "rowwise"}},
        "wide": {"*": {"float8": "rowwise"}, "*.feed_forward.*": {"float8": "rowwise_with_gw_hp"}},
    }.items():
        config = planned(shipped("llama3_8b"), compile=True, parallel__zero__stage=3, batch__sequence_length=8192)
        config.precision.types.rules = types
        found[name] = estimated(config, 8, load_hardware("h200")).terms["matrix products"]
    assert found["rows"] < found["wide"] < found["none"] and found["rows"] < found["half"] < found["none"]
    config.precision.types.rules = {"*": {"float8": "rowwise"}, "*.attention.*": {"float8": "tensorwise"}}
    config.precision.float8.gather = True
    plan = resolve_plan(config.parallel, 8)
    assert max(gathered_in_float8(config, config.model, plan)) == 2 * 4096 * (4096 + 1024)


def test_predicted_steps_are_faster():
    """On machines whose peak in fp8 is known; other ones are refused."""
    found = []
    for recipe in ("none", "rowwise_with_gw_hp", "rowwise"):
        config = planned(shipped("llama3_8b"), compile=True, parallel__zero__stage=3, batch__sequence_length=8192)
        config.precision.float8 = Float8Config(recipe)
        found.append(estimated(config, 8, load_hardware("h200")).terms["matrix products"])
    assert 0.5 * found[0] < found[2] < found[1] < 0.85 * found[0]
    with pytest.raises(ConfigError, match="no known peak in fp8"):
        estimated(config, 8, load_hardware("a100"))


def test_gathered_in_fp8_a_run_has_the_same_bits(tmp_path):
    """Embedding, head and norms travel in bf16, the matrices of both layers in fp8."""
    launch("float8_gather.py", 2, tmp_path / "out.json", forks=True)
    for stage, found in json.loads((tmp_path / "out.json").read_text()).items():
        assert found["equal"] and len(set(found["losses"])) == 3, stage
        plain, narrow = found["bytes"]
        assert 0.5 * plain < narrow < 0.6 * plain, stage


def test_gathers_in_fp8_are_predicted_to_take_less_between_nodes():
    found = []
    for gather in (False, True):
        config = planned(shipped("llama3_8b"), compile=True, parallel__zero__stage=3, batch__sequence_length=2048)
        config.precision.float8 = Float8Config("tensorwise", gather=gather)
        found.append(estimated(config, 32, load_hardware("h200", ["devices=8"])).terms["sharding collectives"])
    assert 0.7 * found[0] < found[1] < 0.95 * found[0]  # what is not hidden: gathers, and reductions in fp32


def test_layers_that_share_an_input_may_differ():
    batch = random_batch(0, 2, 16, SPEC.vocab_size, False)
    losses = []
    for linears in ([], ["*.attention.q"], ["*.attention.[qkv]"]):
        model = model_of(Float8Config("rowwise", linears, 0))
        objective, _ = model(batch.tokens, batch.targets)
        objective.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        losses.append(objective.item())
    assert len(set(losses)) == 3 and losses == pytest.approx([losses[0]] * 3, rel=1e-2)


@pytest.mark.parametrize("misplaced", ["head.float8=rowwise", "rules={*.norm.*: {float8: rowwise}}"])
def test_a_recipe_that_no_matrix_has_is_told_by_itself(misplaced: str):
    """And not of the layers that might multiply in fp8 besides."""
    with pytest.raises(ConfigError) as refused:
        compose(["+config=debug", "precision=bf16", f"precision.types.{misplaced}"], world_size=1)
    assert len(refused.value.problems) == 1 and "linears" not in str(refused.value)


FP8 = ["precision=fp8", "model=llama3_8b"]
BY_TYPE = "precision.types.rules={PATTERN: {float8: rowwise}}"
REFUSED = [
    (
        ["precision.types.head.float8=rowwise"],
        ["precision.types.head.float8=rowwise: only matrices", "precision.types.head.float8=null"],
    ),
    (
        [BY_TYPE.replace("PATTERN", "*.norm.*"), "precision.float8.recipe=none"],
        ["rules.*.norm.*.float8=rowwise matches no matrix", "layers.0.feed_forward.up.weight"],
    ),
    (
        ["precision.types.matrix.float8=rowwise", "precision.float8.recipe=none", "precision.compute=fp32"],
        ["precision.types.matrix.float8=rowwise multiplies", "precision.types.matrix.float8=none"],
    ),
    (
        ["precision.types.matrix.float8=rowwise", "precision.float8.gather=true", "parallel.zero.stage=3"],
        ["precision.float8.gather=true", "no one scale"],
    ),
    (["precision.types.matrix.float8=int8"], ["precision.types.matrix.float8=int8", "rowwise_with_gw_hp"]),
    (["precision.compute=fp16"], ["precision.compute=fp16", "precision.compute=bf16"]),
    (["precision.compute=fp32"], ["precision.compute=fp32", "precision.float8.recipe=none"]),
    (["parallel.zero.engine=deepspeed"], ["precision.float8.recipe=tensorwise", "parallel.zero.engine=torch"]),
    (["model.feed_forward.width=1032"], ["layers.1.feed_forward.gate", "1032", "multiples of 16", "[*.attention.*]"]),
    (
        ["precision.float8.linears=[*.experts.*]"],
        ["precision.float8.linears=['*.experts.*'] match no", "layers.0.feed_forward.up"],
    ),
    (
        ["model.feed_forward.width=1040", "precision.float8.recipe=blockwise"],
        ["layers.1.feed_forward.gate", "1040", "blockwise needs multiples of 128", "[*.attention.*]"],
    ),
    (["precision.float8.ends=16"], ["precision.float8.ends=16 at each end", "precision.float8.ends=0"]),
    (
        ["batch.sequence_length=1000"],
        ["batch.sequence_length=1000", "batch.sequence_length=1008", "rowwise_with_gw_hp"],
    ),
    (["activation=full", "activation.tile=1000"], ["activation.tile=1000", "activation.tile=1008"]),
    (
        ["precision.float8.gather=true", "precision.float8.recipe=rowwise"],
        ["precision.float8.gather=true", "recipe=rowwise has no one scale", "precision.float8.recipe=tensorwise"],
    ),
    (
        ["precision.float8.gather=true", "parallel.zero.stage=0"],
        ["precision.float8.gather=true", "parallel.zero.stage=0 gathers nothing", "parallel.zero.stage=1, 2 or 3"],
    ),
    (
        ["precision.float8.gather=true", "precision.float8.recipe=none"],
        ["precision.float8.gather=true", "recipe=none has no one scale"],
    ),
    (
        ["precision.float8.gather=true", "parallel.zero.collectives=copy_engine", "parallel.zero.stage=3"],
        ["precision.float8.gather=true", "parallel.zero.collectives=nccl"],
    ),
]


@pytest.mark.parametrize("changes, words", REFUSED, ids=[" ".join(changes) for changes, _ in REFUSED])
def test_what_is_refused(changes, words):
    with pytest.raises(ConfigError) as error:
        compose([*FP8, *changes], world_size=1)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_parts_of_matrices_are_refused_by_their_plan():
    config = compose([*FP8, "model.feed_forward.width=1040"], world_size=1)
    config.parallel.tp = 2
    assert any("520" in problem and "parallel.tp=2" in problem for problem in check_config(config, 2))


def test_parts_of_blocks_are_refused_by_their_plan():
    config = compose([*FP8, "precision.float8.recipe=blockwise"], world_size=1)
    config.parallel.tp = 8
    assert not check_config(config, 8)
    config.model.feed_forward.width = 113 * 128
    assert any(
        "1808" in problem and "blockwise needs multiples of 128" in problem for problem in check_config(config, 8)
    )


@pytest.mark.parametrize(
    "capability, cuda, taken", [((9, 0), "13.0", True), ((9, 0), "12.8", False), ((10, 0), "13.0", False)]
)
def test_devices_that_multiply_no_blocks_are_refused(capability, cuda, taken):
    precision = compose([*FP8, "precision.types.matrix.float8=blockwise"], world_size=1).precision
    with (
        patch("torch.cuda.get_device_name", return_value="NVIDIA B200"),
        patch("torch.cuda.get_device_capability", return_value=capability),
        patch("torch.version.cuda", cuda),
    ):
        if taken:
            return check_device(precision, torch.device("cuda"))
        with pytest.raises(ConfigError, match=r"matrix\.float8=blockwise: NVIDIA B200 with CUDA.*float8=rowwise"):
            check_device(precision, torch.device("cuda"))


def test_devices_without_fp8_are_refused():
    precision = compose(FP8, world_size=1).precision
    check_device(precision, CPU)
    with (
        patch("torch.cuda.get_device_name", return_value="NVIDIA A100-SXM4-80GB"),
        patch("torch.cuda.get_device_capability", return_value=(8, 0)),
    ):
        with pytest.raises(ConfigError, match=r"A100.*precision\.float8\.recipe=none"):
            check_device(precision, torch.device("cuda"))
        plain = compose([], world_size=1).precision
        check_device(plain, torch.device("cuda"))
        with pytest.raises(ConfigError, match=r"adapter\.weights=fp8: compiled code on NVIDIA A100.*compile=false"):
            check_device(plain, torch.device("cuda"), True)
