"""activation=auto: what each layer keeps, beside every other choice and every uniform mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from math import inf
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.estimates import estimated, h200, seconds, settings, shipped
from support.reference import changed
from transformers import AutoConfig

from trainer.config import Config
from trainer.config.model import ModelSpec
from trainer.hf.accepted import code_spec, plain_values
from trainer.hf.config import config_from_spec
from trainer.planning.code import check_code_settings
from trainer.planning.decide import MemoryLimit, decide
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.estimate.plans import rank_plans
from trainer.planning.estimate.recompute import EQUAL, CostPoint, LayerShare, decide_recompute, pareto_front
from trainer.planning.estimate.step import GIB, StepEstimate
from trainer.planning.layer import model_programs
from trainer.planning.recompute import ALL, entries_of, entry_problems, left_by_recompute, parse_entry, saved_in
from trainer.planning.resolve import check_config, resolve_layout

BEST = {"batch__sequence_length": 8192, "batch__micro_size": 2, "parallel__zero__stage": 3, "compile": True}
"""The plan of Llama-3 8B that was measured on two H200 (bench/results/2026-11-h200-h100.md)."""

UNIFORM: dict[str, dict[str, Any]] = {
    "none": {"activation__mode": "none"},
    "full": {"activation__mode": "full"},
    "every second layer": {"activation__mode": "selective", "activation__save": ["all@1-31/2"]},
    "attention": {"activation__mode": "selective", "activation__save": ["attention"]},
    "every second product": {"activation__mode": "selective"},
    "every product": {"activation__mode": "selective", "activation__save": ["attention", "matmul"]},
}
HERE = {"activation__tile": 0, "activation__offload": False, "loss__tile": 0}
PRODUCTS = ["attention", "attention.*", "feed_forward.gate", "feed_forward.up"]


def llama(world: int = 2, model: str = "llama3_8b", **changes: Any) -> StepEstimate:
    return estimated(settings(shipped(model), **BEST | changes), world, h200())


def fits(one: StepEstimate) -> bool:
    return one.fullest.reserved <= 0.92 * one.hardware.memory * GIB


def test_what_was_measured_to_be_fastest_is_found():
    """Attention and all products whose results something reads: 10,421 tokens/s where 9,666 were had with half of them,
    and 8,408 without recompute, which the allocator has to try again for."""
    found = llama(activation__mode="auto")
    assert (found.config.activation.mode, found.config.activation.save) == ("selective", PRODUCTS) and fits(found)
    others = {name: llama(**HERE | mode) for name, mode in UNIFORM.items()}
    assert not fits(others["none"]) and fits(others["every product"])
    assert all(found.seconds <= (1 + EQUAL) * one.seconds for one in others.values() if fits(one))


@pytest.mark.parametrize(
    "world, changes",
    [
        (2, {"activation__memory": 100.0}),
        (2, {"model": "gemma2_2b", "batch__micro_size": 4, "activation__memory": 60.0}),
        (4, {"parallel__tp": 2, "activation__memory": 70.0, "compile": False}),
        (4, {"parallel__pp": 4, "batch__accumulation": 8, "parallel__zero__stage": 1, "batch__micro_size": 1}),
        (4, {"parallel__pp": 2, "batch__accumulation": 8, "parallel__pipeline__schedule": "zb_v"}),
    ],
    ids=["zero3", "two kinds of layers", "tp2", "1f1b", "zb_v"],
)
def test_no_uniform_mode_that_fits_is_faster(world, changes):
    """And the chosen settings, given as such, have the same numbers and the same stages."""
    limit = changes.get("activation__memory", 0.92 * h200().memory) * GIB
    found = llama(world, **{"activation__mode": "auto"} | changes)
    assert found.fullest.reserved <= 1.001 * limit
    given_ = estimated(found.config, world, h200())
    assert (given_.seconds, given_.ranks, given_.layout) == (found.seconds, found.ranks, found.layout)
    shared = {name: value for name, value in changes.items() if name != "activation__memory"}
    for name, mode in UNIFORM.items():
        one = llama(world, **shared | HERE | mode)
        assert found.seconds <= (1 + EQUAL) * one.seconds or one.fullest.reserved > limit, name


def test_ranks_that_hold_more_micro_batches_keep_less():
    pipeline = {"parallel__pp": 4, "batch__accumulation": 8, "parallel__zero__stage": 1}
    found = llama(4, **pipeline, activation__mode="auto", activation__memory=60.0, **HERE)
    spec, split = found.layout.spec, found.layout.pipeline.split
    left = left_by_recompute(model_programs(spec, 8192, 1, 2), found.config.activation)
    kept = [sum(left[layer].saved for layer in part) / len(part) for part in split]
    assert kept == sorted(kept) and kept[0] < kept[-1]
    *others, last = found.ranks
    assert all(58 * GIB < peak.reserved <= 60.2 * GIB for peak in others)
    assert last.reserved < 58 * GIB and "all@25-31" in found.config.activation.save and split[-1].start == 25


def test_with_less_and_less_memory():
    """All is kept, then some, then nothing; then tiles and host memory are taken, where they are left open."""
    config, asked = settings(shipped("llama31_8b"), **BEST | {"batch__sequence_length": 65536}), []
    config.activation.mode = "auto"
    layout = resolve_layout(config, 8, config.model, 8)
    for size in (1000, 300, 140, 100, 60, 1):
        found, *_ = decide(config, layout, MemoryLimit(size * GIB, inf), 8, h200())
        asked.append((found.activation.mode, bool(found.activation.tile), found.activation.offload))
    assert asked[0] == ("none", False, False) and asked[1][0] == "selective" and asked[-1] == ("full", True, True)
    assert all(before[2] <= after[2] for before, after in pairwise(asked))
    tight, *_ = decide(config, layout, MemoryLimit(140 * GIB, 0.0), 8, h200())
    assert tight.activation.offload is False  # there is no host memory


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b"])
def test_layers_of_transformers_code_keep_what_fits(name):
    """Attention, all products, or everything, and no choice of these for all layers is faster. Nothing is tiled."""
    values = config_from_spec(replace(shipped(name), depth=8))
    spec = code_spec(plain_values(AutoConfig.for_model(**values).to_dict()))
    common = BEST | {"batch__micro_size": 4, "activation__offload": False}
    uniform = {mode: estimated(settings(spec, **common | HERE | UNIFORM[mode]), 2, h200()) for mode in UNIFORM}
    least, most = (uniform[mode].fullest.reserved / GIB for mode in ("full", "none"))
    for share, expected in ((1.1, "none"), (0.6, "selective"), (0.3, "selective"), (-0.1, "full")):
        limit = least + share * (most - least)
        found = estimated(settings(spec, **common, activation__mode="auto", activation__memory=limit), 2, h200())
        chosen = found.config.activation
        assert (chosen.mode, chosen.tile) == (expected, 0)
        assert not list(check_code_settings(found.config, spec, found.layout.plan, 2))
        if expected == "selective":
            assert {parse_entry(entry).name for entry in chosen.save} <= {"attention", "matmul", ALL}
        for mode, one in uniform.items():
            assert found.seconds <= (1 + EQUAL) * one.seconds or one.fullest.reserved > limit * GIB, (share, mode)


def test_a_cpu_takes_of_the_machines_memory():
    config = settings(shipped("llama3_8b"), **BEST, activation__mode="auto")
    layout = resolve_layout(config, 2, config.model, 2)
    modes = [
        decide(config, layout, MemoryLimit(None, size * GIB), 2, h200())[0].activation.mode for size in (200, 100, 50)
    ]
    assert modes == ["none", "selective", "full"]


def test_the_search_of_plans_decides_for_each():
    base = settings(shipped("llama3_8b"), **BEST, activation__mode="auto")
    best = rank_plans(base, h200(), 2, 4, most=3).best
    assert all(one.config.activation.mode != "auto" for one in best)
    for mode in ("none", "selective", "full"):
        base.activation = replace(base.activation, mode=mode)
        [other] = rank_plans(base, h200(), 2, 4, most=1, kept=("activation.mode",)).best
        assert best[0].seconds <= (1 + EQUAL) * other.seconds or not fits(other)


# Small models, of which every choice is tried.


def small(depth: int, width: int, hidden: int, heads: int, placement: str, length: int, micro: int) -> Config:
    spec = ModelSpec.from_dict(
        {
            "vocab_size": 1024,
            "width": width,
            "depth": depth,
            "attention": {"heads": heads, "kv_heads": heads, "head_dim": 64},
            "feed_forward": {"kind": "plain", "width": hidden},
            "norm": {"placement": placement},
        }
    )
    return settings(spec, batch__sequence_length=length, batch__micro_size=micro, compile=True, **HERE)


SMALL = st.builds(
    small,
    depth=st.integers(1, 2),
    width=st.sampled_from((256, 1024)),
    hidden=st.sampled_from((256, 4096)),
    heads=st.sampled_from((2, 16)),
    placement=st.sampled_from(("pre", "both")),
    length=st.sampled_from((512, 8192)),
    micro=st.integers(1, 4),
)
OPERATIONS = ["attention", *(f"attention.{name}" for name in "qkvo"), "feed_forward.up", "feed_forward.down"]
SLACK = 0.03
"""In pipelines of few layers, where another moment than the first backward pass can be the fullest."""
EXAMPLES = hypothesis_settings(max_examples=6, deadline=None)


def everything(config: Config) -> Iterator[tuple[float, float]]:
    """Seconds and bytes of every choice in which a layer keeps nothing, all, or the operations that save most seconds
    for a byte."""
    layout = resolve_layout(config, 1, config.model, 1)

    @cache
    def measured(kept: tuple[tuple[str, ...], ...]) -> tuple[float, float]:
        config.activation = replace(config.activation, mode="selective", save=entries_of(kept, [*OPERATIONS, ALL]))
        return seconds(config, layout, h200()), find_peaks(config, layout, lowered=False)[0].reserved

    depth, gains = config.model.depth, {}
    nothing, _ = measured(((),) * depth)
    computed = model_programs(config.model, layout.batch.sequence_length, 1, 2)[0].computed
    for name in (name for name in OPERATIONS if computed[name].read):
        faster, _ = measured(((name,),) * depth)
        if faster < nothing:
            gains[name] = (nothing - faster) / computed[name].result
    order = sorted(gains, key=lambda name: -float(f"{gains[name]:.2e}"))  # of equal ones the first
    rungs = [tuple(order[:count]) for count in range(len(order) + 1)] + [(ALL,)]
    for kept in product(rungs, repeat=depth):
        if len(set(kept)) <= 2:
            yield measured(kept)


@EXAMPLES
@example(small(2, 256, 4096, 2, "pre", 8192, 1), 0.0)  # choices behind one that does not fit do
@example(small(2, 256, 256, 2, "pre", 8192, 2), 0.25)  # what is as fast and simpler does not
@example(small(2, 1024, 256, 2, "both", 8192, 2), 0.115)  # one that is larger when backward begins has the lower peak
@given(SMALL, st.floats(0, 1))
def test_no_other_choice_is_faster(config, share):
    choices = list(everything(config))
    sizes = [size for _, size in choices]
    limit = min(sizes) + share * (max(sizes) - min(sizes))
    config.activation = replace(config.activation, mode="auto", save=Config().activation.save)
    found = decide_recompute(config, resolve_layout(config, 1, config.model, 1), h200(), limit, node=1)
    best = min(seconds for seconds, size in choices if size <= limit)
    assert found.peak <= limit and best * (1 - 1e-9) <= found.seconds <= (1 + EQUAL) * best * (1 + 1e-9)


@EXAMPLES
@given(SMALL, st.lists(st.floats(1, 5), min_size=2, max_size=4), st.sampled_from((1, 2)))
def test_more_memory_is_never_slower(config, shares, pp):
    if config.model.depth < pp:
        pp = 1
    config.parallel.pp, config.batch.accumulation, config.activation.mode = pp, 2 * pp, "auto"
    layout = resolve_layout(config, pp, config.model, pp)
    least = decide_recompute(config, layout, h200(), 0.0, node=1)
    assert least.config.activation.mode == "full"
    found = [decide_recompute(config, layout, h200(), share * least.peak, node=1) for share in sorted(shares)]
    assert all(after.seconds <= (1 + SLACK) * before.seconds for before, after in pairwise(found))
    assert all(one.peak <= share * least.peak for one, share in zip(found, sorted(shares)))


POINTS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5)


@given(st.lists(POINTS, min_size=1, max_size=4), st.integers(0, 80))
def test_fronts_hold_the_best_of_every_size(groups, limit):
    points = [
        [CostPoint(size, time, (LayerShare((place,), (), (), number),)) for number, (size, time) in enumerate(group)]
        for place, group in enumerate(groups)
    ]
    fitting = [
        sum(time for _, time in choice) for choice in product(*groups) if sum(size for size, _ in choice) <= limit
    ]
    found = pareto_front([points])
    assert min((one.seconds for one in found if one.size <= limit), default=None) == min(fitting, default=None)
    assert all(len(one.shares) == len(groups) for one in found)
    assert all(a.size < b.size and a.seconds > b.seconds for a, b in pairwise(found))


KEPT = st.lists(st.sets(st.sampled_from([*OPERATIONS, ALL])), min_size=1, max_size=40)


@given(KEPT)
def test_entries_name_what_each_layer_keeps(kept):
    save = entries_of(kept, [*OPERATIONS, ALL])
    assert not list(entry_problems(save, len(kept)))
    products = OPERATIONS[1:]
    for layer, names in enumerate(kept):
        entries = saved_in(save, layer)
        found = {name for entry in entries for name in entry.products(products)}
        assert found | {entry.name for entry in entries if entry.name in ("attention", ALL)} == names


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"activation__mode": "auto", "activation__save": ["matmul"]}, "activation.save=[matmul]"),
        ({"activation__mode": "auto", "parallel__zero__engine": "deepspeed"}, "activation.mode=auto: the memory of"),
        ({"activation__mode": "full", "activation__hardware": "h200"}, "activation.hardware=h200"),
        ({"activation__memory": 30.0, **HERE}, "activation.memory=30"),
        ({"activation__mode": "selective", "activation__save": ["matmul@7-4"]}, "activation.save: 'matmul@7-4'"),
        ({"activation__mode": "selective", "activation__save": ["matmul@"]}, "activation.save: 'matmul@'"),
        ({"activation__mode": "selective", "activation__save": ["all@99"]}, "activation.save: 'all@99'"),
    ],
)
def test_what_contradicts_it_is_refused_once(changes, words):
    config = changed(Config(), changes)
    assert len([problem for problem in check_config(config, 1) if problem.startswith(words)]) == 1
