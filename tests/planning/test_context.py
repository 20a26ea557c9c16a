"""Who holds which tokens of a shared sequence, what is sent, what `auto` chooses, and what is refused."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import settings, shipped
from support.reference import changed, tiny_spec

import trainer
from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec
from trainer.model.attention import first_seen
from trainer.model.context_attention import ContextGroup
from trainer.observe.report import describe_context
from trainer.parallel.context.plan import DRAWS, ContextPlan, context_traffic, load_imbalance, resolve_context
from trainer.planning.documents import USUAL, draw_documents
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.estimate.plans import rank_plans
from trainer.planning.estimate.report import print_estimate
from trainer.planning.estimate.step import estimate_step
from trainer.planning.estimate.timing import time_units
from trainer.planning.features import resolve_plan
from trainer.planning.hardware import load_hardware
from trainer.planning.resolve import check_config, collect_warnings, resolve_layout

CPU = torch.device("cpu")


def resolved(spec: ModelSpec, world: int, node: int | None = None, **changes: Any) -> ContextPlan:
    config = changed(Config(), {"batch__sequence_length": 4096, **changes})
    plan = resolve_plan(config.parallel, world, spec, node or world)
    context = resolve_context(config, spec, plan, node or world)
    assert context is not None
    return context


def spec_of(heads: int, kv_heads: int, *windows: int) -> ModelSpec:
    spec = tiny_spec(attention={"heads": heads, "kv_heads": kv_heads, "head_dim": 8})
    spec.pattern = [{"attention": {"window": window}} for window in windows]
    return spec


@given(st.sampled_from(["zigzag", "blocks"]), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_every_token_is_held_once_and_in_order(order, inner, outer, unit):
    length = 2 * inner * outer * unit * 4
    groups = [ContextGroup(ContextPlan(inner, outer, order), rank, None, None) for rank in range(inner * outer)]
    held = [group.own(length, CPU) for group in groups]
    assert {len(one) for one in held} == {length // (inner * outer)}
    assert torch.cat(held).sort().values.tolist() == list(range(length))
    assert torch.equal(torch.cat(held), groups[0].order(length, CPU))
    for outer_rank in range(outer):  # masks are built of places that rise, in runs
        group, size = groups[outer_rank * inner], groups[0].plan.run(length)
        places = torch.cat(held[outer_rank * inner : (outer_rank + 1) * inner])
        assert (places.diff() > 0).all()
        assert (places[::size] // size).tolist() == group.runs(length)


def counted_balance(order: str, ranks: int, first: torch.Tensor) -> float:
    """Keys that the queries of the busiest rank see, over the mean, from what each query sees."""
    length = first.shape[1]
    seen = torch.arange(length) - first[0] + 1
    group = ContextGroup(ContextPlan(1, ranks, order), 0, None, None)
    work = seen[group.order(length, CPU)].view(ranks, -1).sum(1).double()
    return (work.max() / work.mean()).item()


@pytest.mark.parametrize("window", [0, 3000])
@pytest.mark.parametrize("length, ranks", [(2**17, 2), (2**17, 8), (2**16, 32)])
def test_balance_is_that_of_the_keys_that_queries_see(length, ranks, window):
    starts = [draw_documents(USUAL, length, draw) for draw in range(DRAWS)]
    sizes = [torch.tensor([*one, length]).diff() for one in starts]
    documents = [torch.arange(len(one)).repeat_interleave(one)[None] for one in sizes]
    for order in ("zigzag", "blocks"):
        context = ContextPlan(1, ranks, order)
        alone = counted_balance(order, ranks, first_seen(None, length, window, CPU))
        packs = mean(counted_balance(order, ranks, first_seen(one, length, window, CPU)) for one in documents)
        assert load_imbalance(context, length, window, None) == pytest.approx(alone)
        assert load_imbalance(context, length, window, USUAL) == pytest.approx(packs)


def test_each_order_is_balanced_for_what_it_is_for():
    def of(order: str, masked: bool, inner: int = 1) -> float:
        return load_imbalance(ContextPlan(inner, 8 // inner, order), 2**17, 0, USUAL if masked else None)

    assert of("zigzag", False) == 1.0
    assert of("blocks", False) < 1.001 and of("blocks", True) < 1.02 and 1.3 < of("zigzag", True)
    assert of("zigzag", True, inner=8) == 1.0  # whole sequences
    drawn = [float(size) for seed in range(40) for size in torch.tensor(draw_documents(USUAL, 2**21, seed)).diff()]
    assert mean(drawn) == pytest.approx(USUAL.mean, rel=0.05)
    assert sorted(drawn)[len(drawn) // 2] == pytest.approx(USUAL.median, rel=0.05)


CHOSEN = [  # model, processes, node, settings -> method, order
    ("whole sequences take the faster kernel", spec_of(32, 1), 2, 2, {"cp": 2}, (2, 1, "whole")),
    ("few keys of short sequences are gathered", spec_of(32, 1), 2, 2, {"cp": 2, "length": 1024}, (1, 2, "blocks")),
    ("blocks of few tokens compute more", spec_of(32, 1), 2, 2, {"cp": 2, "length": 512}, (1, 2, "zigzag")),
    ("what is not gathered need not be dealt out", spec_of(32, 8), 2, 2, {"cp": 2, "length": 30}, (2, 1, "whole")),
    ("heads enough are exchanged", spec_of(32, 8), 2, 2, {"cp": 2}, (2, 1, "whole")),
    ("many ranks exchange heads", spec_of(16, 8), 16, 16, {"cp": 16}, (16, 1, "whole")),
    ("heads stay on a node", spec_of(32, 8), 32, 8, {"cp": 32}, (8, 4, "blocks")),
    ("tensor ranks leave none", spec_of(8, 1), 16, 8, {"cp": 2, "tp": 8, "dp": 1}, (1, 2, "blocks")),
    ("documents", spec_of(32, 1), 2, 2, {"cp": 2, "mask": True}, (1, 2, "blocks")),
    ("short documents", spec_of(32, 1), 2, 2, {"cp": 2, "mask": True, "length": 1024}, (1, 2, "blocks")),
    ("an odd number of blocks", spec_of(32, 1), 2, 2, {"cp": 2, "mask": True, "length": 1792}, (1, 2, "zigzag")),
    (
        "documents leave little to compute",
        spec_of(32, 8),
        4,
        4,
        {"cp": 4, "mask": True, "length": 2**17},
        (1, 4, "blocks"),
    ),
    ("and one document much", spec_of(32, 8), 4, 4, {"cp": 4, "length": 2**17}, (4, 1, "whole")),
    ("documents and windows", spec_of(32, 8, 64, 64, 0), 2, 2, {"cp": 2, "mask": True}, (1, 2, "blocks")),
    ("blocks are not cut", spec_of(32, 1), 2, 2, {"cp": 2, "mask": True, "length": 4092}, (1, 2, "zigzag")),
    ("an order means gathering", spec_of(32, 8), 8, 8, {"cp": 8, "context__order": "zigzag"}, (4, 2, "zigzag")),
]


@pytest.mark.parametrize("name, spec, world, node, changes, expected", CHOSEN, ids=[case[0] for case in CHOSEN])
def test_auto_takes_what_is_fastest(name, spec, world, node, changes, expected):
    paths = {"mask": "data__mask_documents", "length": "batch__sequence_length"}
    settings = {paths.get(key, f"parallel__{key}"): value for key, value in changes.items()}
    found = resolved(spec, world, node, **settings)
    assert (found.inner, found.outer, found.order) == expected


@pytest.mark.parametrize("again", [0.0, 1.0])
def test_traffic_is_that_of_the_published_formulas(again):
    """Per token of a rank with L / c tokens: gather 2 g d (c - 1), heads (2 h + 2 max(g, c)) d (c - 1) / c. What a run
    counts: tests/parallel/test_context_parallel.py."""
    attention = spec_of(32, 8).layer(0).attention
    for cp in (2, 4, 8, 16):
        own = 2**15 // cp
        gather, once = ContextPlan(1, cp, "zigzag"), 2 * 8 * 8 * (cp - 1) * own
        assert context_traffic(attention, gather, 2**15, 1, again) == ((0, 0), (once, 2 * once))
        compiled = context_traffic(attention, gather, 2**15, 1, again, compiled=True)
        assert compiled.outer == (once, (1 + again) * once)  # what it has gathered it keeps
        inner, outer = context_traffic(attention, ContextPlan(cp, 1, "whole"), 2**15, 1, again)
        once = (64 + 2 * max(8, cp)) * 8 * (cp - 1) / cp * own
        assert inner == pytest.approx((once, (1 + again) * once)) and outer == (0, 0)


@pytest.mark.parametrize(
    "length, cp, gathered, exchanged", [(2**15, 8, 112, 70), (2**17, 8, 448, 280), (2**17, 32, 496, 124)]
)
def test_a_step_of_llama3_8b_is_estimated(length, cp, gathered, exchanged):
    """MiB that a layer receives in its forward pass; seconds and memory of a step follow."""
    base = ["+config=llama3_8b", f"batch.sequence_length={length}", "activation=full", "batch.global_size=1"]
    base += ["parallel.zero.stage=3", "batch.micro_size=1", "model.max_length=131072"]
    found = {}
    for method, megabytes in (("allgather", gathered), ("ulysses", exchanged)):
        config = trainer.compose([*base, f"parallel.cp={cp}", f"parallel.context.method={method}"], world_size=cp)
        layout = resolve_layout(config, cp, config.model, cp)
        one = context_traffic(config.model.layer(0).attention, layout.context, length, 1, again=1)
        assert (one.outer.forward or one.inner.forward) * 2 == megabytes * 2**20
        hardware = load_hardware("h200", [f"devices={cp}", "node.latency=1e-6"])
        found[method] = estimate_step(config, layout, hardware)
        link = hardware.node.bandwidth * 1e9 * hardware.node.achieved
        expected = config.model.depth * 3 * megabytes * 2**20 / link
        assert found[method].communication["context"] == pytest.approx(expected, rel=1e-3)
        assert 0 < found[method].terms["context collectives"] < 1.001 * expected
    assert (
        found["allgather"].terms["context collectives"] < 0.5 * found["allgather"].communication["context"]
    )  # behind attention
    alone = trainer.compose([*base, "parallel.dp=1"], world_size=1)
    whole = find_peaks(alone, resolve_layout(alone, 1, alone.model, 1))[0].categories
    part = found["allgather"].fullest.categories
    assert part["activations"] < 1.3 * whole["activations"] / cp


@pytest.mark.parametrize(
    "method, more, expected",
    [  # 32 layers of 112 and of 70 MiB, in two or three passes
        ("allgather", "", "keys gathered over 8 ranks, blocks order; 10.5 GiB a rank and step"),
        ("allgather", "compile=true", "keys gathered over 8 ranks, blocks order; 7.00 GiB a rank and step"),
        (
            "allgather",
            "activation=full compile=true",
            "keys gathered over 8 ranks, blocks order; 10.5 GiB a rank and step",
        ),
        ("ulysses", "", "heads exchanged over 8 ranks; 4.38 GiB a rank and step"),
        ("ulysses", "activation=full", "heads exchanged over 8 ranks; 6.56 GiB a rank and step"),
        (
            "ulysses",
            "activation.mode=selective activation.save=[all@1-31/2]",
            "heads exchanged over 8 ranks; 5.47 GiB a rank and step",
        ),
    ],
)
def test_the_start_says_what_is_sent(method, more, expected):
    sizes = ["batch.sequence_length=32768", "batch.global_size=1", "batch.micro_size=1", "model.max_length=32768"]
    config = trainer.compose(
        ["+config=llama3_8b", *sizes, "activation=none", "compile=false"]
        + ["parallel.cp=8", f"parallel.context.method={method}", *more.split()],
        world_size=8,
    )
    assert describe_context(config, resolve_layout(config, 8, config.model, 8)) == expected


WAYS = {
    "zigzag": ("allgather", "zigzag"),
    "blocks": ("allgather", "blocks"),
    "ulysses": ("ulysses", "auto"),
    "hybrid": ("hybrid", "auto"),
}
MEASURED = [
    # bench/results/2026-11-h200-h100.md, H200s and layers of Llama-3 8B with full recompute: ranks, tokens, way, how
    # many times as long one GPU takes for the whole sequence, and the limit of the error. The first four are of the
    # first run.
    (2, 2**15, "zigzag", 1.43, 0.06),
    (2, 2**15, "ulysses", 1.94, 0.03),
    (2, 2**17, "zigzag", 1.30, 0.03),
    (2, 2**17, "ulysses", 1.95, 0.03),
    (2, 2**15, "zigzag", 1.36, 0.11),
    (2, 2**15, "blocks", 1.54, 0.08),
    (2, 2**15, "ulysses", 1.88, 0.04),
    (2, 2**17, "zigzag", 1.30, 0.02),
    (2, 2**17, "blocks", 1.52, 0.03),
    (2, 2**17, "ulysses", 1.94, 0.03),
    (2, 2**18, "zigzag", 1.29, 0.06),
    (2, 2**18, "blocks", 1.47, 0.03),
    (2, 2**18, "ulysses", 1.97, 0.02),
    # Keys of 8,192 tokens a rank: the one layer pays for a mask that all layers of a model share.
    (4, 2**15, "zigzag", 2.70, 0.11),
    (4, 2**15, "blocks", 2.72, 0.21),
    (4, 2**15, "ulysses", 3.71, 0.04),
    (4, 2**15, "hybrid", 2.75, 0.18),
    (4, 2**17, "zigzag", 2.56, 0.01),
    (4, 2**17, "blocks", 2.99, 0.02),
    (4, 2**17, "ulysses", 3.81, 0.04),
    (4, 2**17, "hybrid", 2.90, 0.02),
    (4, 2**18, "zigzag", 2.56, 0.05),
    (4, 2**18, "blocks", 2.90, 0.02),
    (4, 2**18, "ulysses", 3.90, 0.02),
    (4, 2**18, "hybrid", 2.90, 0.02),
]
ON_H100 = [  # the same of two H100
    (2, 2**15, "zigzag", 1.36, 0.12),
    (2, 2**15, "blocks", 1.55, 0.08),
    (2, 2**15, "ulysses", 1.85, 0.06),
    (2, 2**17, "zigzag", 1.28, 0.02),
    (2, 2**17, "blocks", 1.50, 0.02),
    (2, 2**17, "ulysses", 1.93, 0.03),
    (2, 2**18, "zigzag", 1.26, 0.03),
    (2, 2**18, "blocks", 1.43, 0.01),
    (2, 2**18, "ulysses", 1.97, 0.01),
]
MASKED = {"zigzag": (1.84, 0.15), "blocks": (1.87, 0.08)}
"""The same of two and 131,072 tokens in masked documents, and the limit of the error: they were short ones."""


def layer_seconds(cp: int, length: int, masked: bool, method: str, order: str, hardware: str = "h200") -> float:
    """Of a layer in a step, without its update."""
    spec = shipped("llama3_8b")
    ways = {"parallel__context__method": method, "parallel__context__order": order} if cp > 1 else {}
    sizes = {"batch__sequence_length": length, "batch__micro_size": 1, "batch__global_size": 1}
    changes = {"activation__mode": "full", "data__mask_documents": masked, "parallel__cp": cp}
    config = settings(spec, **changes, **sizes, **ways)
    unit = time_units(config, resolve_layout(config, cp, spec, cp), load_hardware(hardware)).units[1]
    return sum(sum(terms.values()) for terms in (unit.forward, unit.input, unit.weight))


def times_as_fast(ranks: int, length: int, masked: bool, way: str, hardware: str = "h200") -> float:
    one, several = (layer_seconds(count, length, masked, *WAYS[way], hardware) for count in (1, ranks))
    return one / several


@pytest.mark.parametrize("hardware, rows", [("h200", MEASURED), ("h100", ON_H100)], ids=["h200", "h100"])
def test_ways_are_as_fast_as_measured(hardware, rows):
    found = {}
    for ranks, length, way, measured, limit in rows:
        found[ranks, length, way] = times_as_fast(ranks, length, False, way, hardware)
        assert abs(found[ranks, length, way] / measured - 1) < limit, (ranks, length, way, found)
    for shape in {(ranks, length) for ranks, length, *_ in rows}:
        assert found[*shape, "ulysses"] > found[*shape, "blocks"] > found[*shape, "zigzag"], shape


def test_ways_of_documents_are_as_fast_as_measured():
    found = {way: times_as_fast(2, 2**17, True, way) for way in MASKED}
    assert all(abs(found[way] / ratio - 1) < limit for way, (ratio, limit) in MASKED.items()), found
    assert found["blocks"] > found["zigzag"]


@pytest.mark.parametrize("length, measured, limit", [(2**15, 0.170, 0.1), (2**17, 1.542, 0.15), (2**18, 5.66, 0.1)])
def test_a_layer_of_one_gpu_is_as_fast_as_measured(length, measured, limit):
    """Attention reaches more of the peak the longer the sequence."""
    assert layer_seconds(1, length, False, *WAYS["ulysses"]) == pytest.approx(measured, rel=limit)


REMARKS = [  # processes, of a node, settings, words; no words: nothing is said
    (1, 1, "batch.sequence_length=131072", ["model.extend={max_length: 131072, scaling: yarn, factor: 16", "=8192"]),
    (1, 1, "batch.sequence_length=8192", []),
    (
        1,
        1,
        "batch.sequence_length=131072 model.attention.rope.scaling=llama3 model.attention.rope.factor=4",
        ["model.extend={max_length: 131072, factor: 64}"],
    ),
    (1, 1, "batch.sequence_length=131072 model.attention.rope.scaling=dynamic", []),
    (16, 8, "parallel.cp=16 parallel.context.method=ulysses", ["16 ranks", "nodes of 8", "=hybrid"]),
    (16, 8, "parallel.cp=8 parallel.context.method=ulysses", []),
    (16, 8, "parallel.cp=16", []),
    (
        2,
        2,
        "parallel.cp=2 data.mask_documents=true parallel.context.method=allgather batch.sequence_length=8000",
        ["batch.sequence_length=8000", "zigzag order", "=7680 or 8192 can", "1."],
    ),
    (2, 2, "parallel.cp=2 data.mask_documents=true parallel.context.method=allgather", []),
    (2, 2, "parallel.cp=2 parallel.context.method=allgather batch.sequence_length=8000", ["zigzag order", "1.2 times"]),
    (2, 2, "parallel.cp=2 parallel.context.method=allgather", []),
    (2, 2, "parallel.cp=2 parallel.context.method=allgather model.attention.window=512 batch.sequence_length=8000", []),
    (2, 2, "parallel.cp=2 parallel.context.order=zigzag", []),
]


@pytest.mark.parametrize("world, node, settings, words", REMARKS, ids=[str(case[2]) for case in REMARKS])
def test_what_may_be_a_mistake_is_said(world, node, settings, words, capsys):
    config = trainer.compose(["+config=llama3_8b", *settings.split()], world_size=world)
    layout = resolve_layout(config, world, config.model, node)
    found = collect_warnings(config, layout, node)
    assert len(found) == bool(words) and all(word in found[0] for word in words), found
    print_estimate(estimate_step(config, layout, load_hardware("h200", [f"devices={node}"])))
    assert (" note " in capsys.readouterr().out) == bool(words)


def test_the_best_plan_of_a_long_sequence_shares_it():
    """One sequence of 128k tokens of Llama-3 8B on 8 GPUs, which data-parallel ranks alone could not divide."""
    base = ["+config=llama3_8b", "batch.sequence_length=131072", "model.max_length=131072", "batch.global_size=1"]
    config = trainer.compose([*base, "batch.micro_size=1"], world_size=1)
    best, *_ = rank_plans(config, load_hardware("h200"), 8, 1, most=3).best
    assert best.layout.plan.cp > 1 and best.fits != "no" and best.communication["context"] > 0


REFUSED = [  # processes, model, settings, words, a legal neighbour that they name
    (3, spec_of(4, 2), {"cp": 2}, ["parallel.cp=2", "needs a multiple of 2", "set parallel.cp=1"], {"cp": 1}),
    (2, spec_of(4, 2), {"cp": 2, "length": 31}, ["batch.sequence_length=31", "30 or 32"], {"cp": 2, "length": 30}),
    (
        2,
        spec_of(4, 2),
        {"cp": 2, "context__method": "allgather", "length": 30},
        ["batch.sequence_length=30", "zigzag order", "set batch.sequence_length=28, or batch.sequence_length=32"],
        {"cp": 2, "context__method": "allgather", "length": 32},
    ),
    (
        2,
        spec_of(4, 2),
        {"cp": 2, "context__order": "blocks", "length": 502},
        ["batch.sequence_length=502", "blocks order", "=500, or batch.sequence_length=504"],
        {"cp": 2, "context__order": "blocks", "length": 504},
    ),
    (4, spec_of(4, 2), {"cp": 2, "tp": 2, "length": 510}, ["parallel.cp=2 x parallel.tp=2", "508 or 512"], {"cp": 2}),
    (
        8,
        spec_of(4, 2),
        {"cp": 8, "context__method": "ulysses"},
        ["method=ulysses", "heads=4, kv_heads=2", "set parallel.cp=4, or parallel.context.method=allgather"],
        {"cp": 8, "context__method": "allgather"},
    ),
    (
        2,
        spec_of(4, 2),
        {"cp": 2, "context__method": "ulysses", "context__order": "zigzag"},
        ["order=zigzag has no meaning", "method=allgather"],
        {"cp": 2, "context__method": "allgather", "context__order": "zigzag"},
    ),
    (
        2,
        spec_of(4, 2),
        {"cp": 2, "context__method": "hybrid"},
        ["method=hybrid", "parallel.cp=2", "method=allgather, or parallel.context.method=ulysses"],
        {"cp": 2, "context__method": "ulysses"},
    ),
    (
        4,
        spec_of(6, 3),
        {"cp": 4, "context__method": "hybrid"},
        ["heads=6, kv_heads=3", "set parallel.context.method=allgather"],
        {"cp": 4, "context__method": "allgather"},
    ),
    (
        1,
        spec_of(4, 2),
        {"cp": 1, "context__method": "ulysses", "context__order": "blocks"},
        [
            "method=ulysses",
            "order=blocks",
            "parallel.cp=1",
            "set parallel.context.method=auto parallel.context.order=auto",
        ],
        {"cp": 1},
    ),
    (4, spec_of(4, 2), {"cp": 2, "shard": 3, "zero__stage": 3}, ["4 data- and context-parallel ranks"], {"cp": 2}),
    (
        2,
        spec_of(4, 2),
        {"cp": 2, "zero__stage": 1, "zero__engine": "deepspeed"},
        ["parallel.zero.engine=deepspeed", "parallel.cp=2", "parallel.zero.engine=torch"],
        {"cp": 2, "zero__stage": 1},
    ),
    (2, spec_of(4, 2), {"cp": 0}, ["parallel.cp=0"], {"cp": 1}),
]


def problems_of(spec: ModelSpec, world: int, changes: dict[str, Any], node: int | None = None) -> list[str]:
    """What is wrong with settings by path, on `world` processes."""
    config = changed(Config(), {"batch__sequence_length": 2048, **changes})
    for name, value in vars(spec).items():
        setattr(config.model, name, value)
    config.data.vocab_size = 16
    config.data.tokenizer = "bpe"
    return [text for text in check_config(config, world, node) if "vocab" not in text]


@pytest.mark.parametrize("world, spec, settings, words, legal", REFUSED, ids=[str(case[2]) for case in REFUSED])
def test_refusals_name_the_setting_and_a_way_out(world, spec, settings, words, legal):
    def problems(settings: dict[str, Any]) -> list[str]:
        paths = {"length": "batch__sequence_length", "mask": "data__mask_documents"}
        return problems_of(spec, world, {paths.get(name, f"parallel__{name}"): settings[name] for name in settings})

    found = "; ".join(problems(settings))
    assert all(word in found for word in words), found
    assert not problems(legal)


def ways_out(problem: str) -> list[dict[str, Any]]:
    """The settings that a refusal names, by path."""
    ways = problem.partition("; set ")[2].split(", or ")
    return [
        {name.replace(".", "__"): yaml.safe_load(value) for name, value in (word.split("=") for word in way.split())}
        for way in ways
    ]


@st.composite
def asked(draw: st.DrawFn) -> tuple[ModelSpec, int, int, dict[str, Any]]:
    """Model, processes, processes of a node, settings."""
    kv_heads, cp, tp = (
        draw(st.sampled_from([1, 2, 3, 4])),
        draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
        draw(st.integers(1, 2)),
    )
    spec = spec_of(
        kv_heads * draw(st.integers(1, 6)), kv_heads, *draw(st.lists(st.sampled_from([0, 5, 90]), max_size=3))
    )
    world = cp * tp * draw(st.integers(1, 2))
    lengths = st.one_of(st.sampled_from([1536, 2048, 4096]), st.integers(1, 300).map(lambda n: n * cp * tp))
    settings = {
        "parallel__cp": cp,
        "parallel__tp": tp,
        "parallel__dp": draw(st.sampled_from([-1, world // cp // tp])),
        "parallel__context__method": draw(st.sampled_from(["auto", "allgather", "ulysses", "hybrid"])),
        "parallel__context__order": draw(st.sampled_from(["auto", "auto", "zigzag", "blocks"])),
        "batch__sequence_length": draw(lengths),
        "batch__global_size": draw(st.sampled_from([None, world // cp // tp])),
        "data__mask_documents": draw(st.booleans()),
    }
    return spec, world, draw(st.sampled_from([world, max(world // 2, tp)])), settings


@given(asked())
def test_every_way_out_is_legal(case):
    """Where one thing is wrong, each way that is named leads to a plan."""
    spec, world, node, settings = case
    problems = problems_of(spec, world, settings, node)
    if len(problems) == 1 and ("parallel.context" in problems[0] or "dealt out" in problems[0]):
        for way in ways_out(problems[0]):
            assert way, problems
            assert not problems_of(spec, world, settings | way, node), (problems, way)


def test_an_unknown_model_is_not_judged():
    config = changed(
        Config(), {"parallel__cp": 8, "parallel__context__method": "ulysses", "batch__sequence_length": 4096}
    )
    with pytest.raises(ConfigError, match="method=ulysses"):
        resolve_context(config, spec_of(4, 2), resolve_plan(config.parallel, 8), 8)
    config.model.from_hf = "somewhere"
    assert not check_config(config, 8)
