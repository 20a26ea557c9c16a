"""The plans that CI compares with one process: data parallelism in full, everything else as a covering sample.

Of the product of all features, which has millions of cases, the sample takes few in which each pair of values that can
occur together does (Cohen et al. 1997, "The AETG system"): what breaks is nearly always one feature, or two that meet.
Needs no torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

Case = dict[str, Any]

WAYS = ("allgather zigzag", "allgather blocks", "ulysses")
"""How context-parallel ranks share sequences: method and order."""

LAYOUT = {
    "dp": (1, 2, 4),
    "cp": (1, 2),
    "way": ("none", *WAYS),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "stage": (0, 1, 2, 3),
    "schedule": (
        "none",
        "gpipe",
        "1f1b",
        "interleaved",
        "interleaved3",
        "zb_h1",
        "zb_h2",
        "zb_v",
        "v_half",
        "v_min",
        "dualpipe_v",
        "greedy",
        "csv",
    ),
}
FEATURES = {
    "micro_batches": (3, 2, 6, 1),
    "recompute": ("none", "full", "every2", "selective", "attention", "tiles"),
    "precision": ("fp32", "bf16", "fp16"),
    "tied": (False, True),
    "attention": ("causal", "documents", "window_cap"),
    "bias": (False, True),
    "qk_norm": ("none", "head", "full"),
    "kv_heads": (1, 2, 4),
    "family": ("llama", "gpt2", "neox", "gemma"),
    "loss": ("plain", "chunk", "z_loss", "tile"),
}
FACTORS = LAYOUT | FEATURES
CHUNKS = {"interleaved": 2, "interleaved3": 3, "zb_v": 2, "v_half": 2, "v_min": 2, "dualpipe_v": 2, "csv": 2}
SEQUENCES = 24
COSTS = {1: 0.3, 2: 0.8, 4: 1.4, 8: 5}
"""Of a case in seconds of processor time, by processes."""
PLAIN = dict(
    stage=0,
    schedule="none",
    micro_batches=2,
    recompute="none",
    precision="fp32",
    tied=False,
    attention="causal",
    bias=True,
    qk_norm="head",
    kv_heads=2,
    family="llama",
    loss="plain",
    dp=1,
    cp=1,
    way="none",
    tp=1,
    pp=1,
)


def world(case: Case) -> int:
    return case["dp"] * case["cp"] * case["tp"] * case["pp"]


def legal(case: Case) -> bool:
    """Whether the layout exists on at most 8 processes: a pipeline has a schedule, whose stages 9 layers can fill; what
    ZeRO shards has ranks to be sharded over; sequences that are shared have a way, and 4 heads to exchange."""
    return (
        world(case) <= 8
        and (case["schedule"] == "none") == (case["pp"] == 1)
        and case["pp"] * CHUNKS.get(case["schedule"], 1) <= 9
        and (case["stage"] == 0 or case["dp"] * case["cp"] > 1)
        and (case["way"] == "none") == (case["cp"] == 1)
        and (case["way"] != "ulysses" or case["tp"] < 4)
    )


def depth(case: Case) -> int:
    """Layers: one more than stages, which therefore do not divide them."""
    return case["pp"] * CHUNKS.get(case["schedule"], 1) // 2 * 2 + 1 if case["pp"] > 1 else 3


def pairs(case: Case) -> set[tuple]:
    return set(itertools.combinations(sorted(case.items()), 2))


def layouts() -> list[Case]:
    return [case for values in itertools.product(*LAYOUT.values()) if legal(case := dict(zip(LAYOUT, values)))]


KINDS = ("none", "1f1b", "interleaved", "zb_v")
"""Schedules that meet every other value: between them they have all that a rank executes (whole and split backward
passes, one stage and several, in a loop and in a V). The others are further orders of the same actions."""


def possible() -> set[tuple]:
    """All pairs of values that some legal case holds; but schedules and shared sequences need meet two data-parallel,
    tensor-parallel or pipeline ranks only, not four, and four tensor or pipeline ranks the ZeRO stages 0 and 3 only, or
    most of the time would go to cases on eight processes; and schedules that are no `KINDS` every number of stages, and
    ranks that share sequences, only, among whatever features."""
    few = (
        place
        for place in layouts()
        if max(place["dp"], place["tp"]) < 4 or place["pp"] == 1
        if max(place["dp"], place["tp"], place["pp"]) < 4 or place["cp"] == 1
    )
    found = set().union(*map(pairs, few)) | {(("dp", 4), ("pp", 2)), (("pp", 2), ("tp", 4))}
    for one, two in itertools.combinations(FACTORS, 2):
        if one in FEATURES or two in FEATURES:
            found |= {
                tuple(sorted(pair))
                for pair in itertools.product(*([(name, value) for value in FACTORS[name]] for name in (one, two)))
            }
    return {pair for pair in found if asked(pair)}


def asked(pair: tuple) -> bool:
    """Whether the sample is to have two values together. See `possible`."""
    case = dict(pair)
    return (case.get("schedule", "none") in KINDS or "pp" in case or case.get("cp") == 2) and not (
        case.get("stage") in (1, 2) and 4 in (case.get("tp"), case.get("pp"))
    )


@cache
def covered() -> set[tuple]:
    """The pairs that cases outside the sample hold, which run anyway and are compared with the tolerances of the
    sample: all but those whose products or gradients are quantised, and those with frozen weights."""
    exact = [case for processes in (1, 2, 4) for case in data_parallel(processes)]
    exact += [*CONTEXT, *MUON, *FUSED, *COPIED, *EXPERTS, *EXPERT_PARALLEL, *LATENT, *BALANCED]
    plain = (
        {name: case[name] for name in FACTORS} for case in exact if case.keys().isdisjoint(("float8", "gradients"))
    )
    return set().union(*map(pairs, plain))


@cache
def sample() -> tuple[Case, ...]:
    """A covering sample of the pairs that no other case holds: each case is the one of several tries, on few processes,
    that covers most new pairs for its cost. The seed is the best of 24."""
    left, chosen, choose, places = possible() - covered(), [], random.Random(7), layouts()
    while left:
        needed = dict(min(left, key=repr))
        fitting = [
            place for place in places if legal(place | needed) and all(place.get(n, v) == v for n, v in needed.items())
        ]
        few = 2 * min(map(world, fitting))
        fitting = [place for place in fitting if world(place) <= few]
        tries = [completed(dict(choose.choice(fitting)), needed, left, choose) for _ in range(40)]
        best = max(tries, key=lambda case: len(pairs(case) & left) / COSTS[world(case)])
        left -= pairs(best)
        chosen.append(best)
    return tuple(chosen)


def completed(case: Case, needed: Case, left: set[tuple], choose: random.Random) -> Case:
    """The layout with the features that are needed, and of the others those that cover most; three micro-batches if all
    are alike, since more take time and fewer make all schedules one."""
    case |= needed
    for name in choose.sample(list(FEATURES), len(FEATURES)):
        if name not in case:
            values = choose.sample(FACTORS[name], len(FACTORS[name]))
            if name == "micro_batches":
                values = FACTORS[name]
            case[name] = max(
                (value for value in values if legal(case | {name: value})),
                key=lambda value: sum(tuple(sorted([(name, value), item])) in left for item in case.items()),
            )
    return case


OFFLOADED = {
    1: [{"stage": 3}],
    2: [{"stage": 1}, {"stage": 3}, {"stage": 2, "precision": "bf16", "reduce": "bf16"}],
    4: [
        {"stage": 3},
        {"stage": 3, "shard": 2},
        {"stage": 2, "pp": 2, "dp": 2, "schedule": "zb_h1", "micro_batches": 3},
    ],
}
"""What is not plain about plans with their state in host memory, by processes."""


def data_parallel(processes: int) -> Iterator[Case]:
    """Every ZeRO stage, shard size and accumulation; and on one process each other feature beside nothing but a ZeRO
    stage (`sample` has it on more, under all stages and among other features)."""
    base = PLAIN | {"dp": processes}
    for stage, shard, micro_batches in itertools.product(range(4), (-1, 2), (1, 2)):
        if shard == -1 and (processes < 4 or micro_batches == 2) or shard == 2 and stage > 0 and processes == 4:
            yield base | {"stage": stage, "shard": shard, "micro_batches": micro_batches}
    features = [
        {"recompute": "full"},
        {"recompute": "every2"},
        {"recompute": "selective"},
        {"recompute": "attention"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"loss": "chunk"},
        {"tied": True},
        {"attention": "documents"},
        {"attention": "window_cap"},
        {"precision": "bf16", "recompute": "full"},
    ]
    if processes == 1:
        yield from (base | {"stage": 3 - index % 4} | feature for index, feature in enumerate(features))
    if processes == 2:
        yield base | {"stage": 3, "shard": 1, "micro_batches": 3}
    yield from (base | {"offload": True} | more for more in OFFLOADED[processes])
    yield base | {"stage": 2, "precision": "bf16", "reduce": "bf16", "micro_batches": 1}


CONTEXT = [
    PLAIN | {"cp": 4, "way": "allgather blocks", "attention": "documents", "stage": 3, "recompute": "attention"},
    PLAIN | {"cp": 4, "way": "hybrid zigzag", "attention": "window_cap", "stage": 2, "precision": "bf16"},
    PLAIN | {"cp": 4, "way": "ulysses", "kv_heads": 1, "stage": 1, "recompute": "every2"},
    PLAIN | {"cp": 2, "way": "auto", "dp": 2, "stage": 3, "shard": 2, "attention": "documents"},
    PLAIN | {"cp": 2, "way": "allgather zigzag", "dp": 2, "stage": 3, "offload": True, "micro_batches": 3},
]
"""Sequences that ranks share, where the sample has less: on four, and states that fewer or the host hold."""

RECOMPUTED = [
    PLAIN | layout
    for layout in (
        {"dp": 2, "stage": 0},
        {"dp": 2, "stage": 3},
        {"tp": 2, "family": "gpt2"},
        {"pp": 2, "schedule": "zb_h1"},
        {"pp": 2, "schedule": "1f1b", "tied": True},
    )
]
"""Where recompute is to change no bit; tiles add up gradients in another order. Each layout meets two of the four
modes, each mode two or three layouts."""

COMPILED = [
    PLAIN | layout
    for layout in (
        {"compile": "graphs", "recompute": "tiles", "loss": "tile"},
        {"compile": "graphs", "tp": 2, "recompute": "selective", "tp_overlap": "copy_engine"},
        {"compile": "graphs", "dp": 2, "stage": 1, "precision": "bf16", "micro_batches": 3, "recompute": "selective"},
        {"compile": "kernels", "precision": "fp16", "tied": True},
    )
]
"""graphs: on CPUs without kernels, whose C++ takes half a minute a case; what is captured, cut and recomputed is that
of a compiled run. Kernels are compiled from such graphs whatever the plan, so one process stands for them; the graphs
of split backward passes with tied weights: `COMPILED_ADAPTERS`; those beside ZeRO-3 and states in host memory:
`COMPILED_EXPERTS`. Sequences that ranks share are compiled by workers/context.py, products in fp8 by
tests/precision/test_casts_once.py and, under tensor parallelism, by tests/parallel/test_code_plans.py."""


FUSED = [
    PLAIN | more
    for more in (
        {"tp": 2, "tp_overlap": "copy_engine", "recompute": "selective", "family": "gpt2", "loss": "z_loss"},
        {
            "tp": 2,
            "tp_overlap": "copy_engine",
            "dp": 2,
            "stage": 3,
            "precision": "bf16",
            "tied": True,
            "micro_batches": 2,
        },
        {"tp": 2, "tp_overlap": "copy_engine", "pp": 2, "schedule": "zb_v", "recompute": "full", "micro_batches": 3},
        {
            "tp": 4,
            "tp_overlap": "copy_engine",
            "precision": "fp16",
            "kv_heads": 1,
            "qk_norm": "full",
            "micro_batches": 1,
        },
        {"tp": 2, "tp_overlap": "copy_engine", "pp": 2, "schedule": "zb_h1", "recompute": "selective", "tied": True},
    )
]
"""Products of tensor-parallel ranks beside their collectives, by copies."""


COPIED = [
    PLAIN | {"collectives": "copy_engine"} | more
    for more in (
        {"dp": 2, "stage": 3, "recompute": "selective", "family": "gpt2"},
        {"dp": 2, "stage": 2, "precision": "bf16", "reduce": "bf16", "tied": True},
        {"dp": 2, "stage": 1, "micro_batches": 3, "precision": "fp16", "kv_heads": 1},
        {"cp": 2, "way": "ulysses", "stage": 3, "attention": "documents", "micro_batches": 3, "recompute": "full"},
        {"dp": 4, "stage": 3, "precision": "bf16", "micro_batches": 3, "tied": True},
        {"dp": 4, "stage": 2, "shard": 2},
        {"dp": 2, "tp": 2, "stage": 3, "tp_overlap": "copy_engine", "family": "gemma"},
        {"dp": 2, "pp": 2, "stage": 3, "schedule": "zb_v", "micro_batches": 3, "tied": True},
        {"dp": 2, "pp": 2, "stage": 2, "schedule": "interleaved", "micro_batches": 3, "precision": "bf16"},
    )
]
"""Parameters and gradients that copies between ranks move, some of which cannot be cut into equal parts."""


def hop(kind: str, codec: str, **more: Any) -> dict[str, Any]:
    """Settings of parallel.grad_comm with two underscores for a dot."""
    return {f"{kind}__{name}": value for name, value in {"codec": codec, **more}.items()}


QUANTISED = [
    PLAIN | more | {"gradients": {"min_size": 0, **gradients}}
    for more, gradients in (
        ({"dp": 2, "stage": 0, "micro_batches": 3}, hop("outer", "int8")),
        ({"cp": 2, "way": "ulysses", "stage": 3, "precision": "fp16", "recompute": "full"}, hop("inner", "int8")),
        (
            {"dp": 2, "stage": 2, "tp": 2, "pp": 2, "schedule": "zb_v", "tied": True},
            hop("inner", "int4", error_feedback="classic"),
        ),
    )
]
"""Gradients that travel quantised; four processes: tests/workers/compress.py."""


FLOAT8 = [
    PLAIN | {"bias": False, "micro_batches": 2} | more
    for more in (
        {"float8": "tensorwise", "dp": 2, "stage": 3, "recompute": "selective"},
        {"float8": "mixed", "gather": True, "dp": 2, "stage": 3, "tied": True},
        {"float8": "tensorwise", "gather": True, "dp": 4, "shard": 2, "stage": 2, "recompute": "full"},
        {"float8": "tensorwise", "gather": True, "dp": 2, "stage": 3, "pp": 2, "schedule": "zb_v", "offload": True},
        {"float8": "tensorwise", "gather": True, "dp": 2, "stage": 3, "family": "all experts", "precision": "bf16"},
        {"float8": "rowwise", "tp": 2, "recompute": "full", "bias": True},
        {"float8": "tensorwise", "pp": 2, "schedule": "zb_v", "tied": True},
        {"float8": "rowwise_with_gw_hp", "cp": 2, "way": "allgather zigzag", "stage": 2, "recompute": "tiles"},
        {"float8": "rowwise", "tp": 2, "dp": 2, "stage": 3},
        {"float8": "mixed rows", "tp": 2, "pp": 2, "schedule": "zb_v", "micro_batches": 3, "recompute": "selective"},
        {"float8": "rowwise", "tp": 2, "tp_overlap": "copy_engine", "recompute": "selective"},
        {"float8": "rowwise_with_gw_hp", "tp": 2, "tp_overlap": "copy_engine", "bias": True, "tied": True},
        {"float8": "blockwise", "tp": 2, "kv_heads": 4, "tp_overlap": "copy_engine", "recompute": "selective"},
        {"float8": "blockwise", "dp": 2, "stage": 3, "pp": 2, "schedule": "zb_v"},
    )
]
"""Products in fp8, beside those of one process with the same micro-batches."""

MUON = [
    PLAIN | {"optimizer": "muon"} | layout
    for layout in (
        {"micro_batches": 1, "family": "gpt2", "kv_heads": 1},
        {"dp": 2, "stage": 0},
        {"dp": 2, "stage": 3, "tied": True},
        {"tp": 2, "kv_heads": 1, "family": "gpt2"},
        {"pp": 2, "schedule": "zb_v", "precision": "fp16"},
        {"dp": 2, "stage": 2, "offload": True},
        {"dp": 4, "stage": 3},
        {"dp": 4, "stage": 2, "shard": 2, "micro_batches": 1},
        {"cp": 2, "way": "ulysses", "tp": 2, "stage": 3},
        {"tp": 2, "pp": 2, "schedule": "1f1b", "tied": True},
        {"dp": 2, "pp": 2, "schedule": "interleaved", "stage": 1, "family": "neox"},
        {"pp": 2, "schedule": "1f1b", "optimizer": "muon_in_one_layer"},
    )
]
"""Matrices that are updated whole, whoever holds what of them."""


EXPERTS = [
    PLAIN | {"family": "experts"} | more
    for more in (
        {"recompute": "full"},
        {"dp": 2, "stage": 1, "micro_batches": 3, "precision": "bf16", "recompute": "attention"},
        {"dp": 2, "stage": 2, "recompute": "selective", "optimizer": "muon"},
        {"dp": 2, "stage": 3, "recompute": "full", "gradients": {"min_size": 0, **hop("inner", "int8")}},
        {"tp": 2, "recompute": "selective"},
        {"tp": 2, "precision": "bf16", "tp_overlap": "copy_engine"},
        {"cp": 2, "way": "allgather zigzag", "stage": 3, "recompute": "full"},
        {"pp": 2, "schedule": "1f1b", "recompute": "full", "micro_batches": 3},
        {"pp": 2, "schedule": "zb_v", "precision": "fp16", "recompute": "selective"},
        {"dp": 2, "stage": 3, "collectives": "copy_engine", "micro_batches": 3, "tied": True},
        {"dp": 4, "stage": 3, "precision": "fp16", "recompute": "attention"},
        {"dp": 4, "stage": 2, "shard": 2, "family": "all experts", "recompute": "every2", "optimizer": "muon"},
        {"dp": 2, "tp": 2, "stage": 3, "offload": True, "optimizer": "muon"},
        {"tp": 2, "pp": 2, "schedule": "zb_h1", "recompute": "full", "micro_batches": 3},
        {"dp": 2, "pp": 2, "stage": 3, "schedule": "zb_v", "micro_batches": 3, "tied": True},
        {"family": "gpt_oss", "tp": 2, "recompute": "selective"},
        {"family": "gpt_oss", "dp": 2, "stage": 3, "recompute": "attention"},
        {"family": "gpt_oss", "cp": 2, "way": "ulysses", "stage": 2, "kv_heads": 1, "attention": "documents"},
        {"family": "gpt_oss", "pp": 2, "schedule": "zb_v", "micro_batches": 3, "recompute": "full"},
    )
]
"""Experts beside a dense layer. In 16 bits tokens go to the experts that they go to in fp32. Of `all experts`, two or
four ranks share three: each holds a part of every expert."""


EXPERT_PARALLEL = [
    PLAIN | {"family": "eight experts", "ep": 2} | more
    for more in (
        {"dp": 2},
        {"dp": 2, "ep_dispatch": "alltoall", "stage": 1, "micro_batches": 3, "recompute": "selective", "tied": True},
        {"dp": 2, "ep_dispatch": "alltoall", "stage": 2, "recompute": "full", "optimizer": "muon"},
        {"dp": 2, "stage": 3, "recompute": "attention", "family": "experts"},
        {"dp": 2, "ep_dispatch": "alltoall", "stage": 3, "family": "two experts", "micro_batches": 3, "offload": True},
        {"tp": 2, "ep_dispatch": "alltoall", "recompute": "selective"},
        {"tp": 2, "family": "balanced experts", "recompute": "full", "micro_batches": 3},
        {"pp": 2, "tp": 2, "family": "gpt_oss", "schedule": "zb_v", "micro_batches": 3, "recompute": "full"},
        {"cp": 2, "way": "allgather zigzag", "ep_dispatch": "alltoall", "stage": 3, "recompute": "full"}
        | {"precision": "bf16"},
        {"dp": 2, "ep_dispatch": "allgather", "ep_capacity": 2.0, "stage": 1, "recompute": "full"},
        *(
            {"dp": 2, "ep_dispatch": way, "stage": 2, "recompute": "selective", "micro_batches": 3, "bits": True}
            for way in ("alltoall", "alltoall_overlap")
        ),
        {"tp": 2, "ep_dispatch": "alltoall_overlap", "family": "two experts", "recompute": "full", "micro_batches": 4},
        {"cp": 2, "way": "allgather zigzag", "ep_dispatch": "alltoall_overlap", "stage": 1, "micro_batches": 3}
        | {"precision": "bf16", "recompute": "attention", "family": "balanced experts", "tied": True},
        {"dp": 2, "ep_dispatch": "shared_memory", "stage": 3, "recompute": "full", "micro_batches": 3},
        {"dp": 2, "ep_dispatch": "shared_memory", "ep_capacity": 2.0, "family": "gpt_oss", "recompute": "selective"},
        {
            "tp": 2,
            "ep_dispatch": "shared_memory",
            "ep_capacity": 2.0,
            "family": "two experts",
            "recompute": "attention",
        },
        {"dp": 4, "ep": 4, "ep_dispatch": "shared_memory", "ep_capacity": 4.0, "stage": 3, "recompute": "every2"},
        {"dp": 2, "pp": 2, "ep_dispatch": "shared_memory", "ep_capacity": 2.0, "stage": 2, "schedule": "zb_v"},
        {"dp": 4, "stage": 2, "shard": 2, "ep_dispatch": "alltoall", "optimizer": "muon"},
        {"dp": 4, "stage": 3, "shard": 2, "precision": "fp16"},
        {"dp": 2, "tp": 2, "ep": 4, "stage": 1, "micro_batches": 3},
        {"dp": 2, "tp": 2, "stage": 3, "ep_dispatch": "alltoall", "recompute": "full", "optimizer": "muon"},
        {"cp": 2, "tp": 2, "way": "allgather zigzag", "ep": 4, "ep_dispatch": "alltoall", "stage": 2},
        *(
            {"dp": 2, "pp": 2, "ep_dispatch": way, "schedule": "dualpipe_v", "micro_batches": 6, "stage": 2}
            | {"recompute": "selective", "bits": True, "family": "balanced experts"}
            for way in ("alltoall", "alltoall_overlap")
        ),
        {"dp": 2, "pp": 2, "stage": 3, "schedule": "zb_v", "ep_dispatch": "alltoall", "micro_batches": 3, "tied": True},
    )
]
"""Experts that data-, context- or tensor-parallel ranks share. Of `two experts` each token has one, so that ranks may
receive nothing. Products of experts are the same whatever brought the tokens; not every family meets every dispatch."""
LATENT = [
    PLAIN | {"family": "latent"} | more
    for more in (
        {"dp": 2, "stage": 3, "precision": "bf16", "recompute": "selective"},
        {"tp": 2, "recompute": "selective", "attention": "documents"},
        {"tp": 2, "tp_overlap": "copy_engine", "recompute": "full", "bias": False},
        {"tp": 2, "float8": "rowwise", "bias": False, "recompute": "attention"},
        {"cp": 2, "way": "allgather zigzag", "stage": 3, "micro_batches": 3},
        {"cp": 2, "way": "ulysses", "stage": 1, "recompute": "full"},
        {"pp": 2, "schedule": "zb_v", "precision": "fp16", "tied": True, "micro_batches": 3},
        {"dp": 2, "tp": 2, "stage": 3, "optimizer": "muon"},
        {"tp": 2, "pp": 2, "schedule": "zb_h1", "micro_batches": 3},
    )
]
"""Keys and values from latent vectors, with and without latent vectors of queries."""


BALANCED = [
    PLAIN | {"family": "balanced experts"} | more
    for more in (
        {"micro_batches": 6, "recompute": "selective"},
        {"dp": 2, "stage": 3, "recompute": "full", "micro_batches": 3},
        {"dp": 2, "stage": 1, "offload": True},
        {"tp": 2, "recompute": "full", "micro_batches": 8},
        {"cp": 2, "way": "ulysses", "stage": 2, "attention": "documents", "recompute": "attention"},
        {"pp": 2, "schedule": "zb_v", "recompute": "full", "micro_batches": 3, "precision": "fp16"},
        {"cp": 2, "way": "allgather zigzag", "tp": 2, "recompute": "selective", "stage": 3},
        {"cp": 4, "way": "hybrid zigzag", "stage": 1, "attention": "documents"},
        {"dp": 2, "tp": 2, "stage": 3, "shard": 1, "recompute": "full"},
    )
]
"""Biases, and losses over sequences and over the previous step. Counts of tokens are sums over all ranks and
micro-batches, and those of a sequence over the ranks that share it: with three sequences in a micro-batch, two
tensor-parallel ranks hold half of the second one each."""


ADAPTERS = [
    PLAIN | {"adapter": "all", "qk_norm": "none"} | more
    for more in (
        {"recompute": "selective", "tied": True},
        {"dp": 2, "stage": 1, "precision": "bf16", "micro_batches": 3, "adapter": "trained", "tied": True},
        {"dp": 2, "stage": 2, "recompute": "full", "family": "gpt2"},
        {"dp": 2, "stage": 3, "micro_batches": 3, "recompute": "selective", "adapter": "trained", "optimizer": "muon"},
        {"dp": 2, "stage": 3, "precision": "fp16", "adapter": "some", "offload": True},
        {"tp": 2, "adapter": "trained", "family": "neox", "recompute": "tiles"},
        {"tp": 2, "tp_overlap": "copy_engine", "recompute": "selective", "adapter": "some"},
        {"cp": 2, "way": "allgather zigzag", "stage": 3, "recompute": "full", "attention": "documents"},
        {"pp": 2, "schedule": "zb_h1", "adapter": "first layer", "recompute": "selective", "tied": True},
        {"adapter": "last layer", "recompute": "tiles"},
        {"float8": "rowwise", "tp": 2, "bias": False},
        {"float8": "tensorwise", "dp": 2, "stage": 3, "bias": False, "adapter": "some", "gather": True},
        {"family": "eight experts", "dp": 2, "ep": 2, "stage": 3, "adapter": "dense", "recompute": "full"},
        {"family": "latent", "tp": 2, "adapter": "all", "recompute": "selective"},
        {"dp": 2, "stage": 3, "collectives": "copy_engine", "micro_batches": 3},
        {"dp": 2, "stage": 3, "gradients": {"min_size": 0, **hop("inner", "int8")}},
        {"dp": 4, "stage": 3, "shard": 2, "micro_batches": 3, "adapter": "trained"},
        {"dp": 2, "pp": 2, "stage": 3, "schedule": "zb_v", "micro_batches": 3, "tied": True, "adapter": "trained"},
        {"tp": 2, "pp": 2, "schedule": "interleaved", "adapter": "first layer", "micro_batches": 2},
        {"dp": 2, "tp": 4, "stage": 3, "kv_heads": 2, "precision": "bf16", "micro_batches": 1},
        {"family": "experts", "adapter": "experts", "recompute": "selective", "bias": False},
        {"family": "experts", "adapter": "experts", "dp": 2, "stage": 3, "precision": "bf16", "recompute": "full"},
        {"family": "gpt_oss", "adapter": "experts", "tp": 2, "recompute": "selective"},
        {"family": "eight experts", "adapter": "experts", "dp": 2, "ep": 2, "stage": 3, "micro_batches": 3},
        {"family": "experts", "adapter": "experts", "pp": 2, "schedule": "zb_v", "micro_batches": 3},
        {"family": "eight experts", "adapter": "experts", "dp": 4, "ep": 2, "stage": 3, "ep_dispatch": "alltoall"},
        {"frozen": "fp8", "recompute": "selective"},
        {"frozen": "fp8", "dp": 2, "stage": 3, "precision": "bf16", "micro_batches": 3, "adapter": "trained"},
        {"frozen": "fp8", "dp": 2, "stage": 3, "collectives": "copy_engine", "adapter": "some"},
        {"frozen": "fp8", "tp": 2, "kv_heads": 1, "recompute": "layers", "tied": True, "qk_norm": "full"},
        {"frozen": "fp8", "tp": 2, "float8": "rowwise", "bias": False},
        {"frozen": "fp8", "pp": 2, "schedule": "zb_v", "micro_batches": 3, "adapter": "trained", "tied": True},
        {"frozen": "fp8", "dp": 2, "tp": 2, "stage": 3, "offload": True, "recompute": "full", "family": "latent"},
    )
]
"""Low-rank adapters beside frozen matrices: beside all or some of them, with other parameters that are trained too, or
in one layer alone, so that a pipeline rank has nothing to train. Norms of heads would amplify the rounding of the few
gradients that there are: weights that differ in the last bit change some of them by 2e-5. What holds beside frozen
weights in fp8 is not repeated beside others."""


COMPILED_ADAPTERS = [ADAPTERS[0] | {"compile": "graphs", "pp": 2, "schedule": "zb_v"}]


COMPILED_EXPERTS = [
    EXPERT_PARALLEL[0]
    | {"compile": "graphs", "stage": 3, "recompute": "selective", "ep_dispatch": "alltoall", "offload": True}
]


COMPILED_ON_GPUS = [
    COMPILED_EXPERTS[0] | {"ep_dispatch": "alltoall_overlap", "stage": 2, "micro_batches": 4, "offload": False},
    PLAIN | {"compile": "graphs", "dp": 2, "stage": 3, "recompute": "selective", "float8": "tensorwise"},
    COMPILED[-1] | {"pp": 2, "schedule": "zb_v"},
    COMPILED[0] | {"cp": 2, "way": "allgather zigzag", "stage": 3},
    EXPERTS[0] | {"compile": "graphs", "pp": 2, "schedule": "zb_v", "recompute": "selective"},
    COMPILED_EXPERTS[0] | {"ep_dispatch": "shared_memory", "ep_capacity": 2.0},
    *(FLOAT8[place] | {"compile": "graphs"} for place in (1, -4, -2)),
    ADAPTERS[0] | {"compile": "graphs", "frozen": "fp8", "dp": 2, "stage": 3, "recompute": "full"},
    LATENT[1] | {"compile": "graphs", "attention": "causal"},
    PLAIN | {"compile": "graphs", "tp": 2, "recompute": "selective", "attention": "documents", "float8": "rowwise"},
    ADAPTERS[0] | {"adapter": "trained", "compile": "graphs", "tp": 2},
    BALANCED[0] | {"compile": "graphs", "dp": 2, "stage": 3, "recompute": "full"},
    EXPERTS[0] | {"family": "gpt_oss", "compile": "graphs", "dp": 2, "stage": 3, "recompute": "selective"},
]
"""Left to bench/gpu_check.sh: on CPUs they take four minutes, and other cases compile the same layers."""


def cases(processes: int, compiled: bool) -> list[Case]:
    """Everything that runs on this number of processes."""
    chosen = [*data_parallel(processes)] if processes <= 4 else []
    chosen += [
        case
        for case in [
            *sample(),
            *CONTEXT,
            *QUANTISED,
            *FLOAT8,
            *MUON,
            *FUSED,
            *COPIED,
            *EXPERTS,
            *EXPERT_PARALLEL,
            *LATENT,
            *BALANCED,
            *ADAPTERS,
        ]
        if world(case) == processes
    ]
    if processes == 2:
        chosen += [
            case | {"recompute": recompute, "bits": True}
            for number, case in enumerate(RECOMPUTED)
            for place, recompute in enumerate(("none", "full", "every2", "selective", "attention"))
            if recompute == "none" or (place + number) % 4 < 2
        ]
        chosen += [case | {"recompute": "layers", "bits": True} for case in RECOMPUTED[1:4]]
    if compiled:
        some = COMPILED + COMPILED_EXPERTS + COMPILED_ADAPTERS + COMPILED_ON_GPUS * torch.cuda.is_available()
        chosen += [case for case in some if world(case) == processes]
    if processes == 4:
        chosen.append(PLAIN | {"dp": 2, "tp": 2, "stage": 1, "precision": "fp16", "overflow": True})
    return chosen


def deepspeed(processes: int) -> list[Case]:
    """What DeepSpeed's engine does otherwise on GPUs, where it has streams; all of it, on CPUs:
    tests/workers/deepspeed_engine.py."""
    base = PLAIN | {"engine": "deepspeed", "dp": processes}
    chosen = [base | {"stage": stage} for stage in (1, 2, 3)]
    chosen += [base | {"stage": stage, "offload": True, "precision": "bf16"} for stage in (2, 3)]
    chosen += [base | {"stage": 2, "precision": "fp16"}, base | {"stage": 3, "precision": "bf16", "recompute": "full"}]
    if processes > 1:
        chosen.append(base | {"stage": 1, "dp": processes // 2, "tp": 2})
        chosen += [
            base | {"stage": 1, "dp": processes // 2, "pp": 2, "schedule": schedule, "tied": True}
            for schedule in ("1f1b", "zb_v")
        ]
    return chosen


def parts(chosen: list[Case], count: int) -> list[list[Case]]:
    """The cases dealt to `count` launches of about equal length; what compiles the same attention stays together."""
    kinds: dict[Any, list[Case]] = {}
    for number, case in enumerate(chosen):
        kind: Any = number
        if case["attention"] != "causal":
            kind = case["attention"], case["kv_heads"], case["precision"]
        elif case.get("compile"):
            kind = number, "compiled"
        kinds.setdefault(kind, []).append(case)
    dealt: list[list[Case]] = [[] for _ in range(count)]
    length = [0] * count
    for kind, some in sorted(kinds.items(), key=lambda kind: -weight(kind)):
        place = length.index(min(length))
        dealt[place] += some
        length[place] += weight((kind, some))
    return dealt


def weight(kind: tuple[Any, list[Case]]) -> int:
    """How long cases take, in those that compile nothing."""
    return (8 if isinstance(kind[0], tuple) else 1) * len(kind[1])
