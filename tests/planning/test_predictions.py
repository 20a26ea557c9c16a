"""Predicted memory and time beside what was measured, and what must hold of every prediction."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from operator import attrgetter
from statistics import mean

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.estimates import estimated, h200, settings, shipped, sums_apart

from trainer.config import Config, ConfigError
from trainer.hf.accepted import code_spec, plain_values
from trainer.hf.config import config_from_spec
from trainer.parallel.pipeline.plan import layer_costs
from trainer.planning.estimate.memory import find_peaks, programs_of
from trainer.planning.estimate.plans import given_settings, rank_plans
from trainer.planning.estimate.rates import RingTimes
from trainer.planning.estimate.report import show_plans
from trainer.planning.estimate.step import GIB
from trainer.planning.estimate.timing import communication_seconds, time_units
from trainer.planning.hardware import load_hardware
from trainer.planning.layer import flops_per_token, model_programs, parameter_counts
from trainer.planning.plan import Plan
from trainer.planning.resolve import resolve_layout
from trainer.planning.schedules.simulate import simulate_schedule
from trainer.planning.states import rank_states

LLAMA = {"activation__mode": "selective", "compile": True, "batch__sequence_length": 8192}
ZERO3 = {"parallel__zero__stage": 3, "batch__micro_size": 1, "batch__accumulation": 1}
PIPELINE = {"parallel__zero__stage": 1, "batch__micro_size": 1, "batch__accumulation": 8}

KEPT, COPIED = {"activation__save": ["attention", "matmul"]}, {"parallel__zero__collectives": "copy_engine"}
CP2 = {"parallel__cp": 2, "batch__sequence_length": 32768}
TP2 = ZERO3 | {"parallel__tp": 2, "batch__micro_size": 2, "activation__save": ["attention"]}
TP2 |= {"activation__offload": False}


def pipeline(ranks: int, schedule: str, split: list[int], **changes: object) -> dict:
    names = {"parallel__pipeline__schedule": schedule, "parallel__pipeline__split": split}
    return PIPELINE | {"parallel__pp": ranks} | names | changes


MEASURED = {
    # bench/results/2026-11-h200-h100.md, Llama-3 8B: H200s, settings, tokens/s of a GPU, GiB allocated at the
    # peak, GiB reserved.
    "1 sequence": (2, ZERO3, 8887, 64.8, 82.5),
    "2 sequences": (2, ZERO3 | {"batch__micro_size": 2}, 9576, 79.8, 98.7),
    "2 sequences, today": (2, ZERO3 | {"batch__micro_size": 2}, 9666, None, 99.0),
    "all products kept, today": (2, ZERO3 | KEPT | {"batch__micro_size": 2}, 10421, None, 116.7),
    "all products kept, copied": (2, ZERO3 | KEPT | COPIED | {"batch__micro_size": 2}, 10593, 99.3, 114.8),
    "eager": (2, ZERO3 | {"compile": False}, 7887, 67.6, None),
    "attention kept": (2, ZERO3 | {"batch__micro_size": 2, "activation__save": ["attention"]}, 8930, 65.3, None),
    "full": (2, ZERO3 | {"batch__micro_size": 2, "activation__mode": "full"}, 8596, 65.5, None),
    "ZeRO-2": (2, ZERO3 | {"parallel__zero__stage": 2}, 9077, None, None),
    "tp2": (4, ZERO3 | {"parallel__tp": 2, "batch__micro_size": 2}, 8439, None, 49.9),
    "tp4": (4, ZERO3 | {"parallel__tp": 4, "batch__micro_size": 2, "parallel__zero__stage": 1}, 7446, None, None),
    # Of plans whose shards are whole, others were measured before gradients of these had no pool of their own.
    "tp2, whole shards": (2, TP2, 8150, 60.9, 65.0),
    "cp2": (2, ZERO3 | CP2, 6633, 79.8, 99.2),
    "cp2, all products kept, copied": (2, ZERO3 | CP2 | KEPT | COPIED, 7181, 98.8, 114.1),
    "ZeRO-2, two micro-batches": (2, ZERO3 | {"parallel__zero__stage": 2, "batch__accumulation": 2}, None, 92.2, None),
    "tp2, two micro-batches": (
        2,
        ZERO3 | {"parallel__tp": 2, "parallel__zero__stage": 0, "batch__accumulation": 2},
        None,
        75.8,
        None,
    ),
    "pp2, two micro-batches": (2, pipeline(2, "1f1b", [17, 15], batch__accumulation=2), None, 79.6, None),
    "pp2 1F1B": (4, pipeline(2, "1f1b", [17, 15]), 8320, None, 73.6),
    "pp2 interleaved": (4, pipeline(2, "interleaved", [8, 9, 9, 6]), 9196, None, 78.5),
    "pp2 ZB-V": (4, pipeline(2, "zb_v", [8, 8, 9, 7]), 9110, None, 92.5),
    "pp2 DualPipeV": (4, pipeline(2, "dualpipe_v", [8, 8, 9, 7]), 9242, None, None),
    "tp2 x pp2": (4, pipeline(2, "interleaved", [8, 9, 9, 6], parallel__tp=2), 8050, None, None),
    "pp4 1F1B": (4, pipeline(4, "1f1b", [9, 9, 9, 5]), 6655, None, None),
    "pp4 interleaved": (4, pipeline(4, "interleaved", [3, 3, 4, 4, 5, 5, 5, 3]), 7815, None, None),
    "pp4 ZB-V": (4, pipeline(4, "zb_v", [4, 4, 4, 4, 4, 4, 5, 3]), 7991, None, None),
}


@pytest.fixture(scope="module")
def predicted():
    hardware = h200()
    with sums_apart():
        return {
            name: estimated(settings(shipped("llama3_8b"), **LLAMA | changes), world, hardware)
            for name, (world, changes, *_) in MEASURED.items()
        }


def errors(predicted, column, value) -> dict[str, float]:
    """Relative errors of the predictions that have something measured in a column."""
    rows = {name: row[column] for name, row in MEASURED.items() if row[column]}
    return {name: value(predicted[name]) / measured - 1 for name, measured in rows.items()}


def test_speed_of_measured_plans(predicted):
    """One set of constants was fitted to these rows: see configs/hardware/h200.yaml. The pipelines were measured while
    gradients of micro-batches were added one tensor after the other. They are predicted up to 6.1% too fast."""
    found = errors(predicted, 2, lambda one: one.tokens_per_second / one.layout.plan.world)
    assert all(abs(error) < 0.062 if "pp" in name else 0.052 for name, error in found.items()), found
    assert mean(map(abs, found.values())) < 0.03


def test_memory_of_measured_plans(predicted):
    """What is allocated follows from the spec; of what is reserved one constant is fitted."""
    allocated = errors(predicted, 3, lambda one: max(peak.allocated for peak in one.ranks) / GIB)
    reserved = errors(predicted, 4, lambda one: one.fullest.reserved / GIB)
    assert all(abs(error) < 0.02 for error in allocated.values()), allocated
    assert all(-0.03 < error < h200().memory_band for error in reserved.values()), reserved
    assert mean(map(abs, reserved.values())) < 0.015


H100S = {
    # bench/results/2026-11-h200-h100.md, two H100, 16 layers of Llama-3 8B: settings, tokens/s of a GPU, GiB reserved.
    "2 sequences": (ZERO3 | {"batch__micro_size": 2}, 17633, 59.0),
    "2 sequences, copied": (ZERO3 | COPIED | {"batch__micro_size": 2}, 18188, 56.5),
    "1 sequence": (ZERO3, 16039, 49.7),
    "1 sequence, copied": (ZERO3 | COPIED, 17418, 46.8),
    "nothing recomputed": (ZERO3 | {"activation__mode": "none"}, 17284, 59.4),
    "nothing recomputed, copied": (ZERO3 | COPIED | {"activation__mode": "none"}, 18731, 56.6),
}


def test_speed_and_memory_of_two_h100s():
    """configs/hardware/h100.yaml is fitted to these and to `ACCUMULATED`."""
    hardware, spec = load_hardware("h100"), replace(shipped("llama3_8b"), depth=16)
    found = {}
    for name, (changes, speed, reserved) in H100S.items():
        one = estimated(settings(spec, **LLAMA | changes), 2, hardware)
        found[name] = (one.tokens_per_second / 2 / speed - 1, one.fullest.reserved / GIB / reserved - 1)
    assert all(abs(speed) < 0.025 and abs(reserved) < 0.035 for speed, reserved in found.values()), found


FLOAT8 = {"precision__float8__recipe": "tensorwise"}
WHOLE = ZERO3 | {"parallel__zero__stage": 1}
EIGHT = {"batch__accumulation": 8}
ACCUMULATED = {
    # Two H100, 16 layers of Llama-3 8B that keep attention and products: settings, tokens/s of a GPU.
    "ZeRO-1": (WHOLE | EIGHT, 20714),
    "ZeRO-1, fp8": (WHOLE | EIGHT | FLOAT8, 24584),
    "ZeRO-3": (ZERO3 | EIGHT, 18267),
    "ZeRO-3, copied": (ZERO3 | EIGHT | COPIED | {"batch__micro_size": 2}, 20503),
    "ZeRO-3, copied, fp8": (ZERO3 | EIGHT | COPIED | FLOAT8 | {"batch__micro_size": 2}, 25746),
    "ZeRO-3, copied, one micro-batch": (ZERO3 | COPIED | {"batch__micro_size": 2}, 20266),
    "ZeRO-3, copied, fp8, one micro-batch": (ZERO3 | COPIED | FLOAT8 | {"batch__micro_size": 2}, 25352),
}


def test_speed_of_accumulation_and_float8_on_two_h100s():
    hardware, spec = load_hardware("h100"), replace(shipped("llama3_8b"), depth=16)
    found = {}
    for name, (changes, speed) in ACCUMULATED.items():
        with sums_apart():
            one = estimated(settings(spec, **LLAMA | KEPT | changes), 2, hardware)
        found[name] = one.tokens_per_second / 2 / speed - 1
    assert max(map(abs, found.values())) < 0.025, found


def test_gradients_that_gemms_sum_cost_less():
    """Where gradients of several micro-batches are summed on each rank; elsewhere nothing changes."""
    spec, terms = replace(shipped("llama3_8b"), depth=16), ("sharding copies", "matrix products")
    for name, changes in {
        "ZeRO-1": WHOLE | EIGHT,
        "pipeline": pipeline(2, "zb_v", [4, 4, 5, 3], batch__accumulation=8),
        "one micro-batch": WHOLE,
        "ZeRO-3": ZERO3 | EIGHT,
        "in 16 bits": WHOLE | EIGHT | {"precision__reduce": "bf16"},
        "in fp8 and tiles": WHOLE | EIGHT | FLOAT8 | {"precision__float8__ends": 0, "loss__tile": 1024},
    }.items():
        config = settings(spec, **LLAMA | changes)
        inside = estimated(config, 2, h200())
        with sums_apart():
            apart = estimated(config, 2, h200())
        copies, products = (inside.terms[term] - apart.terms[term] for term in terms)
        if name in ("ZeRO-1", "pipeline"):
            assert -copies > 4 * products > 0 and inside.seconds < 0.99 * apart.seconds, name
            assert inside.memory < apart.memory or inside.memory == apart.memory and name == "pipeline", name
        else:
            assert (inside.seconds, inside.memory) == (apart.seconds, apart.memory), name


def test_speed_of_float8_on_two_h200s():
    """`achieved.float8` of configs/hardware/h200.yaml is fitted to these."""
    found = []
    for changes, speed in ((ZERO3, 13225), (ZERO3 | COPIED, 13844)):
        config = settings(shipped("llama3_8b"), **LLAMA | KEPT | FLOAT8 | changes | {"batch__micro_size": 2})
        found.append(estimated(config, 2, h200()).tokens_per_second / 2 / speed - 1)
    assert max(map(abs, found)) < 0.02, found


def test_speed_of_recipes_on_one_h200():
    """Measured after all constants were fitted, but for the rate of blockwise GEMMs, which is that of GEMMs alone."""
    spec, errors = replace(shipped("llama3_8b"), depth=8), {}
    for recipe, speed in {"none": 31920, "tensorwise": 35818, "rowwise": 36944, "blockwise": 33635}.items():
        changes = {"precision__float8__recipe": recipe, "precision__float8__ends": 0, "parallel__zero__stage": 0}
        one = estimated(settings(spec, **LLAMA | changes), 1, h200())
        errors[recipe] = one.tokens_per_second / speed - 1
    assert max(map(abs, errors.values())) < 0.10 and abs(errors["blockwise"] - errors["rowwise"]) < 0.04, errors


ADAPTERS = ZERO3 | {"model__adapter__rank": 16, "batch__sequence_length": 4096, "batch__micro_size": 2}
ADAPTERS |= {"activation__mode": "none"}
NARROW, FULL = {"model__adapter__weights": "fp8"}, {"activation__mode": "full"}
SHARED_MEMORY = {"parallel__ep_dispatch": "shared_memory", "parallel__ep_capacity": 1.5}
LATER = {
    # H100s, torch 2.11, measured after all constants were fitted: GPUs, model, layers, settings, tokens/s of a GPU, GiB
    # reserved.
    "ZeRO-3": (4, "llama3_8b", 32, ZERO3 | KEPT, 9526, 61.4),
    "ZeRO-3, fp8": (4, "llama3_8b", 32, ZERO3 | KEPT | FLOAT8 | {"precision__float8__gather": True}, 11320, 62.6),
    "tp4": (4, "llama3_8b", 8, ZERO3 | {"parallel__tp": 4, "batch__micro_size": 2}, 24486, 13.0),
    "one": (1, "llama3_8b", 16, ZERO3, 17305, 75.0),
    "one, 8 layers": (1, "llama3_8b", 8, ZERO3, 30915, None),
    "adapters": (1, "llama3_8b", 32, ADAPTERS, 15521, 51.95),
    "adapters, fp8 weights": (1, "llama3_8b", 32, ADAPTERS | NARROW, 15400, 46.04),
    "adapters, fp8 weights, full": (
        1,
        "llama3_8b",
        32,
        ADAPTERS | NARROW | FULL | {"batch__micro_size": 1},
        10861,
        11.21,
    ),
    "70B, adapters, tp2": (2, "llama3_70b", 80, ADAPTERS | NARROW | FULL | {"parallel__tp": 2}, 1278, 42.97),
    "30B-A3B, ep4": (4, "qwen3_30b_a3b", 24, {"parallel__ep": 4} | SHARED_MEMORY, 16218, 67.8),
    "30B-A3B": (4, "qwen3_30b_a3b", 24, {}, 14007, 73.8),
    "30B-A3B, 8 layers": (2, "qwen3_30b_a3b", 8, {}, 48915, 59.5),
    "30B-A3B, ep2": (2, "qwen3_30b_a3b", 8, {"parallel__ep": 2} | SHARED_MEMORY, 57603, 51.9),
    "Lite": (2, "deepseek_v2_lite", 8, {}, 51547, 50.0),
    "Lite, ep2 shared": (2, "deepseek_v2_lite", 8, {"parallel__ep": 2} | SHARED_MEMORY, 57292, 41.5),
    "Lite, ep2 to all": (
        2,
        "deepseek_v2_lite",
        8,
        {"parallel__ep": 2, "parallel__ep_dispatch": "alltoall"},
        50640,
        40.9,
    ),
    "Lite, ep2 gathered": (
        2,
        "deepseek_v2_lite",
        8,
        {"parallel__ep": 2, "parallel__ep_dispatch": "allgather"},
        56927,
        42.0,
    ),
}


def test_speed_and_memory_of_runs_that_served_for_no_fit():
    """Of memory the rule for one large message of whole shards was found with three of these. A run that is told to fit
    has to fit: hardly anything is predicted too low."""
    speeds, sizes = {}, {}
    for name, (world, model, depth, changes, speed, reserved) in LATER.items():
        if not model.startswith("llama"):
            length = {"batch__sequence_length": 4096, "batch__micro_size": 2 if world == 4 else 4}
            changes = ZERO3 | length | changes
        one = estimated(settings(replace(shipped(model), depth=depth), **LLAMA | changes), world, load_hardware("h100"))
        speeds[name] = one.tokens_per_second / world / speed - 1
        if reserved:
            sizes[name] = one.fullest.reserved / GIB / reserved - 1
    assert mean(map(abs, speeds.values())) < 0.035, speeds
    dense = [abs(error) for name, error in speeds.items() if not name.startswith(("30B", "Lite"))]
    assert mean(dense) < 0.025 and max(dense) < 0.042 and max(map(abs, speeds.values())) < 0.17, speeds
    assert mean(map(abs, sizes.values())) < 0.019 and all(-0.03 < error < 0.06 for error in sizes.values()), sizes


FILLED = LLAMA | COPIED | {"parallel__zero__stage": 2, "batch__micro_size": 2}
FLOAT8_THROUGHOUT = FLOAT8 | {"precision__float8__ends": 0}
FEED_FORWARD = ["feed_forward.gate@3-31", "feed_forward.up@3-31"]
LATER_LAYERS = {"activation__save": ["attention", "attention.*@3-31", *FEED_FORWARD]}
LEFT = {"activation__save": ["attention", "attention.[qkv]@3-31", "attention.o", *FEED_FORWARD]}
MOST = ["attention", "attention.*", "feed_forward.gate"]
TO_ALL = {"parallel__zero__stage": 2, "batch__micro_size": 4, "batch__accumulation": 4, "batch__sequence_length": 4096}
TO_ALL |= {"activation__mode": "selective", "compile": True, "parallel__ep": 2}
LATEST = {
    # Two H200, torch 2.11, what `activation=auto` chose, and all-to-alls of experts: tokens/s of a GPU, GiB reserved.
    "bf16, 8 micro-batches": (FILLED | EIGHT | LATER_LAYERS, 10811, 125.5),
    "fp8, 8 micro-batches": (FILLED | EIGHT | LATER_LAYERS | FLOAT8_THROUGHOUT, 14880, 124.9),
    "bf16": (FILLED | {"activation__save": [*MOST, "feed_forward.up@7-31"]}, 10714, 124.2),
    "fp8": (FILLED | LEFT | FLOAT8_THROUGHOUT, 14778, 124.4),
    "bf16, ZeRO-3": (FILLED | {"parallel__zero__stage": 3, "activation__save": [*MOST, "feed_forward.up"]}, 10853, 114),
    "alltoall": (TO_ALL | {"parallel__ep_dispatch": "alltoall"}, 55819, 62.0),
    "alltoall_overlap": (TO_ALL | {"parallel__ep_dispatch": "alltoall_overlap"}, 57490, 67.5),
}


def test_speed_and_memory_of_two_h200s_that_are_nearly_full():
    """One share of the last row, what overlapped passes hide, is fitted to it, and nothing else."""
    speeds, sizes, mixture = {}, {}, replace(shipped("qwen3_30b_a3b"), depth=8)
    for name, (changes, speed, reserved) in LATEST.items():
        spec = mixture if changes.get("parallel__ep") else shipped("llama3_8b")
        one = estimated(settings(spec, **changes), 2, h200())
        speeds[name] = one.tokens_per_second / 2 / speed - 1
        sizes[name] = one.fullest.reserved / GIB / reserved - 1
    assert max(map(abs, speeds.values())) < 0.05 and mean(map(abs, speeds.values())) < 0.03, speeds
    assert abs(speeds["alltoall_overlap"] - speeds["alltoall"]) < 0.01, speeds
    assert max(map(abs, sizes.values())) < 0.06 and mean(map(abs, sizes.values())) < 0.03, sizes


CODE = {(16, True): (17081, 74.2), (16, False): (13221, 75.3), (8, True): (30728, None)}
"""The same layers of Llama-3 8B on one H100 by transformers' code: layers, whether they are compiled, tokens/s, GiB
reserved."""


def test_speed_and_memory_of_transformers_code():
    from transformers import AutoConfig

    found = {}
    for (depth, compiled), (speed, reserved) in CODE.items():
        values = config_from_spec(replace(shipped("llama3_8b"), depth=depth))
        spec = code_spec(plain_values(AutoConfig.for_model(**values).to_dict()))
        one = estimated(settings(spec, **LLAMA | ZERO3 | {"compile": compiled}), 1, load_hardware("h100"))
        found[depth, compiled] = one.tokens_per_second / speed - 1
        assert reserved is None or one.fullest.reserved / GIB == pytest.approx(reserved, rel=0.02)
        (layer, *_) = model_programs(spec, 8192, 1, 2)
        (own, *_) = model_programs(replace(shipped("llama3_8b"), depth=1), 8192, 1, 2)
        assert layer.flops == pytest.approx(own.flops)
    assert all(abs(error) < (0.03 if compiled else 0.055) for (_, compiled), error in found.items()), found


def mixture(ep: int, **changes: object) -> Config:
    """8 layers of Qwen3-30B-A3B on 4 sequences of 4,096 tokens a GPU."""
    plan = {"parallel__ep": ep, "batch__micro_size": 4, "batch__sequence_length": 4096}
    return settings(replace(shipped("qwen3_30b_a3b"), depth=8), **LLAMA | ZERO3 | plan | changes)


def test_speed_of_a_mixture_on_two_h100s():
    """bench/results/2026-11-h200-h100.md. No constant is fitted to these. The experts were far from equal load, which a
    GPU feels that holds half of them: then the prediction is too fast. It assumes equal load, and says so."""
    found = {speed: estimated(mixture(ep), 2, load_hardware("h100")) for ep, speed in ((1, 45_900), (2, 43_300))}
    errors = {speed: one.tokens_per_second / 2 / speed - 1 for speed, one in found.items()}
    assert 0 < errors[45_900] < 0.11 and 0 < errors[43_300] < 0.32, errors
    assert [len(one.assumptions) for one in found.values()] == [0, 1]
    assert "experts/fullest_rank" in found[43_300].assumptions[0]


@pytest.mark.parametrize("ep", [1, 2])
def test_time_of_a_mixture_by_its_parts(ep):
    """Where memory costs nothing, routers multiply in fp32, and the last tile of each expert is half empty.
    Where arithmetic costs nothing, rows are permuted, in both passes."""
    config = mixture(ep, activation__mode="none")
    layout, hardware = resolve_layout(config, 2, config.model, 2), load_hardware("h100")
    tokens, rows, top_k, width, inner, count = 16_384, 16_384 * 8, 8, 2048, 768, 128
    fast = replace(hardware, bandwidth=1e12, kernel=0.0, launch=0.0)
    found = time_units(config, layout, fast).units[1].forward["matrix products"]
    dense = 2 * tokens * (2 * 4096 * width + 2 * 512 * width)
    experts = 2 * 3 * inner * width * (rows + count / ep * 64)
    products = (dense + experts) / 989.4e12 + 2 * tokens * width * count / 66.9e12
    assert found == pytest.approx(products / hardware.achieved.product)
    # Without experts on other ranks: each choice is read and written on the way there and read on the way back.
    moved = {"alltoall": 7 * top_k + 1, "allgather": 3 * top_k + 2}
    seconds = {}
    for way, times in moved.items() if ep > 1 else [("auto", 3 * top_k + 1)]:
        config = mixture(ep, activation__mode="none", parallel__ep_dispatch=way)
        unit = time_units(config, layout, replace(hardware, kernel=0.0)).units[1]
        (program, *_) = model_programs(config.model, 4096, 1, 2)
        held = tokens * (program.saved - 2 * top_k * width)  # the rows, which are moved instead
        memory = 3350e9 * hardware.achieved.memory
        seconds[way] = unit.forward["memory-bound kernels"]
        assert seconds[way] == pytest.approx((held + 2 * tokens * width * times) / memory)
        assert unit.input["memory-bound kernels"] == pytest.approx((2 * held + 2 * tokens * width * times) / memory)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_casts_to_float8_are_shared(recipe):
    """GEMMs that read one operand share its cast. A cast moves five bytes an element: two reads in bf16 and a write."""
    config = settings(shipped("llama3_8b"), **LLAMA | ZERO3 | {"activation__mode": "none"})
    layout, hardware = resolve_layout(config, 2, config.model, 2), load_hardware("h100")
    plain = time_units(config, layout, hardware).units[2]
    config = settings(config.model, **LLAMA | ZERO3 | {"activation__mode": "none", "precision__float8__recipe": recipe})
    narrow = time_units(config, layout, hardware).units[2]
    tokens, weights = 8192, 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    inputs, gradients = tokens * (3 * 4096 + 14336), tokens * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    second = inputs * (recipe == "tensorwise")  # for the weight gradient, which the other recipe computes in bf16
    for passed, elements in (("forward", inputs + weights), ("input", gradients + weights + second)):
        added = [getattr(one, passed)["memory-bound kernels"] for one in (narrow, plain)]
        assert added[0] - added[1] == pytest.approx(5 * elements / (3350e9 * hardware.achieved.memory)), passed


MICRO = {
    # One H200, TinyLlama 1.1B, eager, 16 sequences of 2,048 tokens: micro-batch, recompute, seconds of a step.
    (1, "none"): 1.192,
    (1, "selective"): 3.517,
    (1, "full"): 2.541,
    (2, "none"): 0.624,
    (2, "selective"): 1.544,
    (2, "full"): 1.376,
    (4, "none"): 0.576,
    (4, "selective"): 0.825,
    (4, "full"): 0.718,
    (16, "none"): 0.542,
    (16, "selective"): 0.620,
    (16, "full"): 0.669,
}


def test_eager_layers_of_a_few_tokens_wait_for_their_host():
    """The two constants of the host are fitted to six of these."""
    found = {}
    for (micro, mode), measured in MICRO.items():
        changes = {"batch__sequence_length": 2048, "batch__global_size": 16, "batch__micro_size": micro}
        config = settings(shipped("tinyllama_1b"), activation__mode=mode, **changes)
        found[micro, mode] = estimated(config, 1, h200()).seconds / measured - 1
    assert max(map(abs, found.values())) < 0.3 and mean(map(abs, found.values())) < 0.08, found
    assert abs(mean(found.values())) < 0.05


LONG = {
    # H200s: two layers and the head of Llama-3.1 8B with everything that saves memory. GPUs that
    # share a sequence, its tokens, GiB allocated at the peak, GiB reserved in segments that grow. Of two that share one
    # the first held the states of the other 30 layers (48.8 GiB, left out here), the others have all on their host.
    # Those of 1,310,720 tokens were H100s, of which a plan takes as much.
    "131,072": (1, 131072, {}, 33.9, 34.8),
    "262,144": (1, 262144, {}, 47.0, 48.6),
    "524,288": (1, 524288, {}, 73.1, 76.8),
    "786,432": (1, 786432, {}, 99.3, 100.8),
    "1,048,576 of two": (2, 1048576, ZERO3 | CP2, 64.9, 71.8),
    "1,310,720 of two": (2, 1310720, ZERO3 | CP2 | {"parallel__zero__offload": True}, 69.7, 75.1),
    "2,097,152 of two": (2, 2097152, ZERO3 | CP2 | {"parallel__zero__offload": True}, 109.0, 116.8),
}


@pytest.mark.parametrize("name", LONG)
def test_memory_of_long_sequences(name):
    """Where little else is left, the backward kernel of attention takes most: cuDNN adds the gradients up beside."""
    ranks, length, plan, allocated, reserved = LONG[name]
    changes = {"activation__mode": "full", "activation__offload": True, "activation__tile": 8192, "loss__tile": 8192}
    sizes = {"batch__sequence_length": length, "batch__micro_size": 1, "batch__accumulation": 1}
    spec = replace(shipped("llama31_8b"), depth=2)
    one = estimated(settings(spec, compile=True, **plan | changes | sizes), ranks, h200())
    assert -0.03 < one.ranks[0].allocated / GIB / allocated - 1 < 0.05
    assert abs(one.fullest.reserved / GIB / reserved - 1) < 0.04


SHARED = {
    # All layers of Llama-3.1 8B on two GPUs that share a sequence: hardware, tokens, tile of feed-forward, tokens/s of
    # both, GiB allocated.
    "h100": (131072, 8192, 5037, 68.6),
    "h200": (393216, 0, 1860, 107.6),
}


@pytest.mark.parametrize("hardware", SHARED)
def test_a_long_sequence_that_two_share(hardware):
    length, tile, speed, allocated = SHARED[hardware]
    changes = LLAMA | ZERO3 | CP2 | {"activation__mode": "full", "activation__offload": True, "loss__tile": 8192}
    changes |= {"batch__sequence_length": length, "activation__tile": tile}
    one = estimated(settings(shipped("llama31_8b"), **changes), 2, load_hardware(hardware))
    assert -0.08 < one.tokens_per_second / speed - 1 < 0.02
    assert abs(one.fullest.allocated / GIB / allocated - 1) < 0.02


def test_memory_of_one_gpu():
    """TinyLlama 1.1B without recompute: GiB reserved, in segments that grow."""
    sizes = {"batch__sequence_length": 2048, "batch__micro_size": 16, "batch__accumulation": 1}
    config = settings(shipped("tinyllama_1b"), compile=True, activation__mode="none", **sizes)
    assert abs(estimated(config, 1, h200()).fullest.reserved / GIB / 58.5 - 1) < 0.03


def test_bubbles_of_measured_plans(predicted):
    """Shares of the step, as bench/results/2026-11-h200-h100.md has them."""
    measured = {"pp2 1F1B": 0.121, "pp2 interleaved": 0.045, "pp2 ZB-V": 0.039, "pp4 1F1B": 0.295, "pp4 ZB-V": 0.142}
    for name, share in measured.items():
        assert predicted[name].terms["bubble"] / predicted[name].seconds == pytest.approx(share, abs=0.02), name


def test_terms_add_up(predicted):
    for name, one in predicted.items():
        assert min(one.terms.values()) >= 0 and one.seconds == pytest.approx(sum(one.terms.values()))
        assert one.seconds == pytest.approx(one.simulation.makespan + one.terms["optimizer"], rel=1e-6), name
        assert sum(one.exposed.values()) <= sum(one.communication.values()) * (1 + 1e-9), name
        world = one.layout.plan.world
        assert one.mfu(True) < one.mfu(False) < 1
        batch = one.layout.batch
        work = flops_per_token(one.layout.spec, batch.sequence_length, True) * batch.tokens
        assert one.mfu(True) == pytest.approx(work / one.seconds / (world * 989.4e12))


NETWORKS = {"bandwidth": st.sampled_from([0.05, 5, 50]), "latency": st.sampled_from([1, 1000])}


@given(
    st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (1, 1, 4)]),
    st.integers(0, 3),
    st.sampled_from([-1, 2]),
    st.sampled_from(["1f1b", "zb_h1", "interleaved", "dualpipe_v"]),
    st.sampled_from([1, 8]),
    st.fixed_dictionaries(NETWORKS),
    st.sampled_from([1, 2, 8]),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_terms_of_any_plan_add_up_to_its_step(degrees, stage, shard, schedule, accumulation, network, node):
    """What a faster link takes off the step is what that axis has exposed."""
    (tp, pp, cp), spec = degrees, shipped("llama_60m")
    config = settings(
        spec,
        **{f"parallel__{name}": value for name, value in {"tp": tp, "pp": pp, "cp": cp}.items()},
        parallel__zero__stage=stage,
        parallel__shard=shard if stage else -1,
        parallel__tp_across_nodes=True,
        parallel__pipeline__schedule=schedule,
        batch__sequence_length=1024,
        batch__accumulation=max(accumulation, 2 * pp),
    )
    changes = [f"devices={node}", *(f"network.{name}={value}" for name, value in network.items())]
    one = estimated(config, 8, load_hardware("h200", changes))
    assert min(*one.terms.values(), *one.hidden.values()) >= 0
    assert sum(one.terms.values()) == pytest.approx(one.simulation.makespan + one.terms["optimizer"], rel=1e-9)
    shared = {"tensor": tp, "context": cp, "pipeline": pp, "shard": one.layout.plan.shard}
    shared["replicate"] = one.layout.plan.replicate
    assert set(one.communication) == {axis for axis, ranks in shared.items() if ranks > 1}
    costs = replace(one.simulation.costs, unshard=(), reduce=())
    waiting = [
        simulate_schedule(one.layout.pipeline.schedule, replace(costs, transfer=t)).makespan
        for t in (0, costs.transfer)
    ]
    assert one.exposed["pipeline"] == pytest.approx(waiting[1] - waiting[0], abs=1e-9)


def test_transfers_of_a_slow_network_are_no_bubble():
    """Of 0.1 GB/s between two nodes: what they wait for each other is communication; the schedule's bubble stays."""
    config = settings(shipped("llama3_8b"), **LLAMA | PIPELINE | {"parallel__pp": 2, "batch__accumulation": 4})
    found = {
        speed: estimated(config, 2, load_hardware("h200", ["devices=1", f"network.bandwidth={speed}"]), 1)
        for speed in (0.1, 50)
    }
    assert found[0.1].seconds > 2 * found[50].seconds and found[0.1].exposed["pipeline"] > 3
    assert found[0.1].terms["bubble"] == pytest.approx(found[50].terms["bubble"], rel=1e-6)
    assert found[0.1].hidden["pipeline"] < 0.1 and found[50].exposed["pipeline"] < 0.02


def test_memory_has_the_states_of_the_start_up_table(predicted):
    """One memory model: what stays is what a run prints at its start."""
    for name, one in predicted.items():
        layout = one.layout
        states = rank_states(layout.spec, layout.plan, 2, layout.pipeline.split, layout.pipeline.schedule.placement)
        for peak, state in zip(one.ranks, states, strict=True):
            assert (peak.categories["parameters"], peak.categories["optimizer"]) == (state.parameters, state.optimizer)
            assert peak.categories["gradients"] <= state.gradients * 1.2 + 2e9, name


def test_error_feedback_is_in_the_peak():
    """Two nodes of eight: N / 8 elements a rank, and half as many on the way back (docs/sharding.md)."""
    hop = {"parallel__grad_comm__outer__codec": "int8", "parallel__zero__stage": 1, "parallel__shard": 8}
    spec, found = shipped("llama3_8b"), {}
    for feedback in ("none", "classic"):
        changes = hop | {"parallel__grad_comm__outer__error_feedback": feedback}
        found[feedback] = estimated(settings(spec, **LLAMA | ZERO3 | changes), 16, h200()).fullest
    kept = found["classic"].categories["error feedback"]
    assert kept == pytest.approx(8.0 * parameter_counts(spec)["total"] / 8 * 1.5, rel=0.001)
    assert found["none"].categories["error feedback"] == 0
    assert found["classic"].allocated == pytest.approx(found["none"].allocated + kept)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "gpipe"])
def test_activations_in_flight_are_the_simulators(schedule):
    """The replay, with transfers or without, holds what the simulation of the schedule holds."""
    spec = shipped("tiny")
    spec.depth, spec.vocab_size = 16, 8  # the simulation keeps the head's share for W, and a run does not
    config = settings(
        spec,
        batch__sequence_length=4096,
        batch__micro_size=4,
        batch__accumulation=8,
        parallel__pp=4,
        parallel__pipeline__schedule=schedule,
    )
    layout = resolve_layout(config, 4, spec)
    costs = layer_costs(spec, 4096, 4, 1).stage(layout.pipeline.split)
    simulated = simulate_schedule(layout.pipeline.schedule, costs).memory
    for lowered in (True, False):
        for peak, memory in zip(find_peaks(config, layout, lowered), simulated, strict=True):
            held = peak.categories["activations"] + peak.categories["logits and loss"]
            assert held == pytest.approx(memory, rel=0.03)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v", "dualpipe_v"])
def test_transfers_are_those_that_ranks_run(schedule):
    """Each sends hidden states of a micro-batch, or their gradient."""
    config = settings(shipped("llama_60m"), parallel__pp=4, parallel__pipeline__schedule=schedule)
    config.batch.accumulation = 8
    layout = resolve_layout(config, 4, config.model)
    timing = time_units(config, layout, h200())
    ran = sum(
        action.kind.startswith("SEND") for program in programs_of(layout.pipeline.schedule, False) for action in program
    )
    moved = communication_seconds(layout, timing)["pipeline"]
    assert ran > 0 and moved * layout.plan.pp / timing.costs.transfer == pytest.approx(ran)
    size = 2 * layout.batch.micro_size * layout.batch.sequence_length * layout.spec.width
    assert timing.costs.transfer == pytest.approx(RingTimes.of(h200(), layout.plan, "pp").transfer(size))


def test_memory_of_whole_shards_does_not_grow_with_micro_batches():
    """Each ends with the one message of embedding and head."""
    changes = LLAMA | ZERO3 | {"parallel__tp": 2, "batch__sequence_length": 4096}
    few, many = (
        estimated(settings(shipped("llama3_8b"), **changes | {"batch__accumulation": n}), 2, h200()).fullest.reserved
        for n in (4, 64)
    )
    assert many == pytest.approx(few)


def test_a_table_of_plans_has_one_band_that_holds_those_of_all():
    """Where lengths of documents are not known, each plan has its own."""
    changes = {"data__mask_documents": True, "batch__sequence_length": 16384}
    models = [shipped(name) for name in ("llama_60m", "tinyllama_1b", "llama3_8b", "qwen3_0_6b", "gemma2_2b")]
    found = [estimated(settings(model, **changes), 1, h200()) for model in models]
    assert len({one.band for one in found}) == 5
    with redirect_stdout(StringIO()) as shown:
        show_plans(found, "plans", 0.0)
    assert all(len(line) <= 120 for line in shown.getvalue().splitlines())
    below, above = (round(100 * max(ends)) for ends in zip(*(one.band for one in found)))
    assert f"step: -{below}% +{above}%, tokens/s" in shown.getvalue()


def test_offloaded_states_are_not_on_the_device():
    config = settings(
        shipped("llama3_8b"), **LLAMA | ZERO3 | {"parallel__zero__offload": True, "batch__global_size": 8}
    )
    one = estimated(config, 8, h200())
    assert one.fullest.categories["parameters"] == one.fullest.categories["optimizer"] == 0
    assert one.fullest.reserved < 40 * GIB


def test_the_best_of_all_plans():
    """The search leaves out nothing that is faster: beside every plan estimated by itself."""
    spec, hardware = shipped("llama_60m"), load_hardware("h200", ["memory=8"])
    config = settings(spec, batch__sequence_length=1024, compile=True)
    ranking = rank_plans(config, hardware, 4, 8, most=3)
    everything = rank_plans(config, hardware, 4, 8, most=10**6)
    assert [one.seconds for one in ranking.best] == [one.seconds for one in everything.best[:3]]
    assert len(everything.best) <= everything.fitting <= everything.legal
    for one in ranking.best:
        again = estimated(one.config, 4, hardware)
        assert again.seconds == pytest.approx(one.seconds) and again.layout == one.layout
        assert again.memory == pytest.approx(one.memory, rel=0.05) and one.fits != "no"
        assert one.layout.batch.global_size == 8


def test_every_plan_is_ranked_once_and_interleaving_goes_to_one_layer_a_stage():
    """Copies are tried among two ranks, and among more where the settings ask for them."""
    spec, hardware = replace(shipped("llama_60m"), depth=12), load_hardware("h200")
    copied = {"parallel__zero__collectives": "copy_engine", "activation__mode": "none", "compile": True}
    config = settings(spec, batch__sequence_length=1024, **copied)
    found = rank_plans(config, hardware, 4, 8, most=10**6, kept={"activation.mode"}).best
    keys = [(one.seconds, one.memory, tuple(one.layout.plan.degrees.items()), one.layout.batch) for one in found]
    assert len(set(keys)) == len(keys) > 200
    assert not any(one.layout.plan.stage == 2 and one.layout.batch.accumulation == 1 for one in found)
    orders = {one.layout.pipeline.schedule.placement for one in found if one.layout.plan.pp == 2}
    assert max(len(placement) for placement in orders) == 12
    assert {one.layout.plan.tp for one in found if one.config.parallel.tp_overlap == "copy_engine"} == {2}
    shards = {one.layout.plan.shard for one in found if one.config.parallel.zero.collectives == "copy_engine"}
    assert shards == {2, 4}
    config = settings(spec, batch__sequence_length=1024, activation__mode="none", parallel__pp=1)
    plain = rank_plans(config, hardware, 4, 8, most=10**6, kept={"activation.mode", "parallel.pp"}).best
    assert {one.layout.plan.shard for one in plain if one.config.parallel.zero.collectives == "copy_engine"} == {2}


GIVEN = {
    "parallel.dp": [-1, 1, 2, 3, 4],
    "parallel.tp": [1, 2, 4, 8],
    "parallel.pp": [1, 2, 4],
    "parallel.cp": [1, 2],
    "parallel.ep": [1, 2],
    "parallel.shard": [-1, 1, 2, 4],
    "parallel.zero.stage": [0, 1, 2, 3],
    "parallel.tp_overlap": ["off", "copy_engine"],
    "parallel.zero.collectives": ["nccl", "copy_engine"],
    "parallel.pipeline.schedule": ["1f1b", "gpipe", "interleaved", "zb_v", "greedy"],
    "parallel.pipeline.chunks": [None, 2, 3],
    "parallel.pipeline.split": ["balanced", "even"],
    "parallel.pipeline.memory_cap": [None, 2.0],
    "batch.micro_size": [1, 2, 3],
    "batch.accumulation": [1, 2, 8, 512],
    "activation.mode": ["none", "selective", "full"],
}
ANY = st.lists(st.sampled_from(sorted(GIVEN)), min_size=1, max_size=3, unique=True)


@given(ANY.flatmap(lambda names: st.fixed_dictionaries({name: st.sampled_from(GIVEN[name]) for name in names})))
@hypothesis_settings(max_examples=20, deadline=None)
@example({"parallel.shard": 4, "parallel.zero.stage": 2})
@example({"parallel.pipeline.schedule": "interleaved", "parallel.pipeline.chunks": 3})
def test_a_search_keeps_what_overrides_give(given):
    """Or refuses it by name."""
    kept = given_settings(f"{name}={value}" for name, value in given.items())
    assert kept == given.keys() <= given_settings(["parallel=tp2", "batch={}", "activation=full"])
    changes = {name.replace(".", "__"): value for name, value in given.items()}
    config = settings(replace(shipped("llama_60m"), depth=12), batch__sequence_length=1024, compile=True, **changes)
    try:
        found = rank_plans(config, load_hardware("h200"), 4, 8, most=4, kept=kept).best
    except ConfigError as error:
        (problem,) = error.problems
        assert any(f"{name}={value}" in problem for name, value in given.items()), problem
        return
    assert found
    for one in found:
        plan, parallel = one.layout.plan, one.config.parallel
        pipeline = {"parallel.pipeline.schedule", "parallel.pipeline.chunks"} if plan.pp == 1 else set()
        for name, value in given.items():
            if value is not None and name not in pipeline:
                assert value == attrgetter(name)(one.config), name
        assert parallel.dp in (-1, plan.dp) and one.layout.batch.global_size == 8


@pytest.mark.parametrize("world", [7, 8, 1024, 16384])
def test_plans_of_any_number_of_processes(world):
    """With what a plan has of each degree given, few plans are left: what remains must not grow with the processes."""
    config = settings(shipped("llama_60m"), batch__sequence_length=1024, activation__mode="none")
    config.parallel.pp = config.parallel.tp = config.batch.micro_size = 1
    kept = {"parallel.pp", "parallel.tp", "parallel.cp", "batch.micro_size", "activation.mode"}
    ranking = rank_plans(config, load_hardware("h200"), world, 8 * world, kept=kept)
    assert 0 < ranking.legal < 40 and all(one.layout.plan.world == world for one in ranking.best)


@given(st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 5), st.sampled_from([1, 2]))
def test_the_first_group_of_a_dimension(sizes, stage):
    pp, replicate, shard, tp, cp = sizes
    plan = Plan(pp=pp, replicate=replicate, shard=shard * cp, tp=tp, cp=cp, stage=stage, ep=tp)
    for dimension in (*plan.mesh, *plan.expert_mesh, "dp", "cp"):
        groups = plan.groups(dimension)
        assert list(plan.first_group(dimension)) == groups[0]
        assert sorted(rank for group in groups for rank in group) == list(range(plan.world))


@given(st.lists(st.sampled_from(["zero3", "tp", "pp", "cp", "long"]), min_size=1, max_size=4), st.booleans())
@hypothesis_settings(max_examples=12, deadline=None)
@example(["tp", "pp", "long"], True)
def test_tables_of_plans_are_at_most_120_wide(kinds, budget):
    changes = {
        "zero3": ZERO3 | {"parallel__shard": 8},
        "tp": ZERO3 | {"parallel__tp": 2, "parallel__tp_overlap": "copy_engine", "parallel__shard": 4} | COPIED,
        "pp": PIPELINE | {"parallel__pp": 4, "parallel__pipeline__schedule": "interleaved"},
        "cp": ZERO3 | CP2 | {"parallel__tp": 4, "parallel__pp": 2, "batch__accumulation": 4},
        "long": ZERO3 | {"activation__tile": 8192, "loss__tile": 8192, "activation__offload": True},
    }
    found = [estimated(settings(shipped("llama3_8b"), **LLAMA | changes[kind]), 64, h200()) for kind in kinds]
    with redirect_stdout(StringIO()) as shown:
        show_plans(found, "plans", 1e12 * budget)
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 120 and len(lines) == len(kinds) + 3
    assert "GiB" in lines[-1] and "tokens/s" in lines[2]
    for kind, line in zip(kinds, lines[3:]):
        assert "tiles+offload" in line if kind == "long" else "copies: tp ZeRO" in line if kind == "tp" else True
