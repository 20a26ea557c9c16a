"""One model in fp64 whose sequences are shared by 2 and by 4 ranks, in every way, beside one process; and which
collectives each rank took part in, and the elements that came to it.

context.py OUT
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import sys
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.reference import tiny_spec
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from trainer.config import ActivationConfig, Config
from trainer.config.model import ModelSpec
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.mesh import World, join_world
from trainer.model import context_attention
from trainer.model.context_attention import KVAllGather
from trainer.model.initial import InitialWeights, fill_parameters
from trainer.model.layers import Layer
from trainer.model.transformer import Transformer
from trainer.parallel.context.apply import share_sequences
from trainer.parallel.context.plan import ContextPlan, context_traffic, divide_heads
from trainer.parallel.parallelize import compile_layers
from trainer.parallel.recompute import apply_recompute
from trainer.planning.features import resolve_plan
from trainer.planning.layer import model_programs
from trainer.planning.recompute import left_by_recompute

LENGTH, RANKS = 32, 4
CPU = torch.device("cpu")

WAYS = {  # method, order
    "allgather zigzag": ("allgather", "zigzag"),
    "allgather blocks": ("allgather", "blocks"),
    "ulysses": ("ulysses", "auto"),
    "hybrid zigzag": ("hybrid", "zigzag"),
    "hybrid blocks": ("hybrid", "blocks"),
}
LONGROPE = {
    "scaling": "longrope",
    "original_length": 6,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 5.0],
}
MASKS: dict[str, dict[str, Any]] = {  # window: beyond the run of tokens that a rank holds
    "causal": {},
    "documents": {"documents": True, "rope": LONGROPE},
    "window": {"window": 1},
    "longer window": {"window": 2},
    "cap": {"soft_cap": 2.0, "sinks": True},
    "all": {"documents": True, "window": 0, "soft_cap": 2.0, "rope": {"scaling": "dynamic", "factor": 4.0}},
}


class Case(NamedTuple):
    """Sequences that `size` ranks share. run: tokens of a rank that are neighbours in zigzag order."""

    way: str
    mask: str
    kv_heads: int
    size: int
    batch: int
    length: int
    run: int

    @property
    def window(self) -> int:
        beyond = MASKS[self.mask].get("window")
        return 0 if beyond is None else self.run + beyond


def cases() -> list[Case]:
    """Every way with every mask, and both with every number of key-value heads: what breaks is one of the three, or two
    that meet. Sizes are drawn, with a seed for which each number of ranks, sequences and heads meets each method."""
    drawn, choose = [], random.Random(4375)
    for (row, way), (column, mask) in itertools.product(enumerate(WAYS), enumerate(MASKS)):
        heads = (1, 2, 4)[(row + column) % 3]
        size = 4 if "hybrid" in way else choose.choice((2, 4))
        length, batch = choose.choice((2 * size, 16, 24, 48)), choose.choice((1, 3))
        ranks = {"ulysses": 1, "hybrid": 2}.get(way.split()[0], size)
        drawn.append(Case(way, mask, heads, size, batch, length, length // (2 * ranks)))
    return drawn


def batch(documents: bool, size: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, targets and documents of `size` sequences. Only the last quarter of a sequence has targets. Documents
    have one token, end at runs' edges, and span them."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 61, (2, size, length), generator=generator).unbind()
    targets[:, : length * 3 // 4] = -100
    edges = torch.zeros(size, length, dtype=torch.int32)
    edges[:, [1, length // 8, length // 2]] = 1
    edges[-1, [length // 2 - 1, length * 3 // 4 - 1]] = 1
    return tokens, targets, edges.cumsum(1).int() if documents else None


def build(spec: ModelSpec) -> Transformer:
    with torch.device("meta"):
        model = Transformer(spec)
    model.to_empty(device="cpu")
    fill_parameters(model, InitialWeights(spec, 0, CPU))
    for rotary in model.rotaries:
        rotary.reset_buffers()
    return model.double()


def numbers(model: Transformer, documents: bool, size: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    """Loss and gradients of what this rank computes."""
    tokens, targets, edges = batch(documents, size, length)
    model.zero_grad()
    loss, entropy = model(tokens, targets, edges)
    loss.backward()
    return {"loss": entropy.detach()} | {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


class Counted(TensorGroup):
    """A group that notes which collectives its rank starts, how many elements come of other ranks in them, and how many
    results of exchanges are there at once."""

    seen: Counter = Counter()
    received: Counter = Counter()
    exchanged: list[weakref.ref] = []
    most = 0

    def note(self, kind: str, elements: int) -> None:
        self.seen[kind] += 1
        self.received["elements"] += elements

    def gather(self, x: Tensor) -> Tensor:
        self.note("gather", x.numel() * (self.size - 1))
        return super().gather(x)

    def exchange(self, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        tokens = [len(x) // self.size] * self.size if received is None else received
        self.note("exchange", (sum(tokens) - tokens[self.rank]) * x.shape[1:].numel())
        result = noted(super().exchange(x, received, sent), self.exchanged)
        Counted.most = max(self.most, sum(each() is not None for each in self.exchanged))
        return result


def formula(
    spec: ModelSpec, context: ContextPlan, again: bool, kept: bool = False, size: int = 2, length: int = LENGTH
) -> float:
    """What the plan says that the busiest rank receives, where no layer, or each, is recomputed; kept: whether keys
    are not gathered again."""
    return size * spec.depth * context_traffic(spec.layer(0).attention, context, length, 1, float(again), kept).all


def share(model: Transformer, world: World, way: str, masked: bool, length: int = LENGTH) -> None:
    """Lets the ranks of `world` share the model's sequences."""
    config, size = Config(), world.context.size()
    config.batch.sequence_length, config.data.mask_documents = length, masked
    config.parallel.cp, context = size, config.parallel.context
    context.method, context.order = WAYS[way]
    plan = resolve_plan(config.parallel, RANKS, model.spec)
    share_sequences(model, config, model.spec, plan, world)


def counted(model: Transformer) -> Counter:
    """What the ranks that share the model's sequences will do."""
    Counted.seen, Counted.received = Counter(), Counter()
    for name in ("heads", "keys"):
        if (group := getattr(model.context, name)) is not None:
            object.__setattr__(model.context, name, Counted(group.name, group.rank, group.size))
    return Counted.seen


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor], world: World) -> float:
    """The largest error of a loss or gradient that the ranks of `world` have computed parts of."""
    flat = torch.cat([found[name].flatten() for name in expected])
    dist.all_reduce(flat, group=world.context.get_group())
    parts = flat.split([value.numel() for value in expected.values()])
    return max(
        ((part - value.flatten()).abs().max() / value.abs().max()).item()
        for part, value in zip(parts, expected.values(), strict=True)
    )


def measure(worlds: dict[int, World]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    models: dict[str, Transformer] = {}
    expected: dict[str, dict[str, Tensor]] = {}
    for case in cases():
        mask, world = MASKS[case.mask], worlds[case.size]
        attention = {"window": case.window, "soft_cap": mask.get("soft_cap", 0.0), "kv_heads": case.kv_heads}
        attention |= {"rope": mask.get("rope", {}), "sinks": mask.get("sinks", False)}
        data = "documents" in mask, case.batch, case.length
        kind, key = str(attention), str((attention, data))
        if kind not in models:
            models[kind] = build(tiny_spec(depth=1, max_length=6, attention=attention))
        model = models[kind]
        if key not in expected:
            expected[key] = numbers(model, *data)
        share(model, world, case.way, data[0], case.length)
        counts, found = counted(model), numbers(model, *data)
        # A CPU's soft caps are computed with copies of keys, which are kept.
        elements = formula(model.spec, model.context.plan, False, "soft_cap" in mask, case.batch, case.length)
        model.context = None
        told = {"error": furthest(found, expected[key], world), "formula": elements}
        results.append(case._asdict() | told | {"counts": dict(counts), "received": Counted.received["elements"]})
    everyone = worlds[RANKS].gather([(result["counts"], result["received"]) for result in results])
    return [
        result | {"counts": [counts for counts, _ in noted], "received": [elements for _, elements in noted]}
        for result, *noted in zip(results, *everyone)
    ]


def kept_by(layer: Layer) -> list[list[int]]:
    """Shapes of the numbers that a layer will keep for backward, but for its parameters."""
    shapes: list[list[int]] = []

    def note(saved: Tensor) -> Tensor:
        if saved.is_floating_point() and not isinstance(saved, Parameter):
            shapes.append(list(saved.shape))
        return saved

    layer.keep = lambda *_: saved_tensors_hooks(note, lambda saved: saved)
    return shapes


def compiled(world: World) -> list[dict[str, Any]]:
    """Ways of two ranks whose layers are compiled: captured and cut as by default, and run eagerly. The first two ranks
    save everything, the others recompute."""
    results, compile = [], torch.compile
    mode = ("none", "full")[dist.get_rank() // 2]
    for way, changes in (
        ("allgather zigzag", {}),
        ("allgather blocks", {"documents": True, "window": 5}),
        ("ulysses", {}),
    ):
        masked = "documents" in changes
        attention = {"kv_heads": 4, "window": changes.get("window", 0), "rope": LONGROPE if masked else {}}
        model = build(tiny_spec(depth=1, attention=attention))
        expected = numbers(model, masked)
        apply_recompute(model, ActivationConfig(mode=mode))
        share(model, world, way, masked)
        counters.clear()
        with patch.object(torch, "compile", partial(compile, backend="aot_eager_decomp_partition")):
            compile_layers(model, deferring=False)
            kept = kept_by(model.layers["0"])
            error = furthest(numbers(model, masked), expected, world)
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        told = {"way": way, "mode": mode, "error": error, "graphs": graphs, "breaks": breaks}
        of_two = [2 * LENGTH // world.context.size(), model.spec.width]
        results.append(told | {"kept": kept, "input": of_two})
    return [one for some in world.gather(results)[::2] for one in some]


def noted(x: Tensor, seen: list[weakref.ref]) -> Tensor:
    seen.append(weakref.ref(x))
    return x


def recomputed(world: World) -> dict[str, dict[str, Any]]:
    """Collectives of two layers, what they bring and should bring, sums of gradients, gathered groups of heads that are
    there after the forward pass, and groups whose gradients from all ranks are there at once, by way, recompute and
    number of groups; `kept` is without gathering again."""
    results: dict[str, dict[str, Any]] = {}
    tokens, targets, _ = batch(False)
    gathering = [("allgather zigzag", *case) for case in (("none", 1), ("none", 4), ("kept", 2))]
    modes = "none", "full", "selective"
    every = itertools.product(("allgather zigzag", "ulysses"), modes, (2,))
    for way, mode, groups in [*gathering, *every]:
        spec = tiny_spec(depth=2, attention={"kv_heads": 4})
        model = build(spec)
        activation = ActivationConfig(mode="none" if mode == "kept" else mode)
        apply_recompute(model, activation)
        share(model, world, way, False)
        context_attention.divide_heads = lambda heads, groups=groups: groups
        counts = counted(model)
        whole: list[weakref.ref] = []
        context_attention.KVAllGather = SimpleNamespace(apply=lambda *given: noted(KVAllGather.apply(*given), whole))
        with patch.object(Layer, "recomputes_attention", mode == "kept" or activation.mode != "none"):
            loss, _ = model(tokens, targets)  # kept: as the mask is told, and nobody does
        gc.collect()
        kept = sum(each() is not None for each in whole)
        context_attention.KVAllGather, Counted.most = KVAllGather, 0
        loss.backward()
        context_attention.divide_heads = divide_heads
        digest = sum(parameter.grad.double().sum().item() for parameter in model.parameters())
        again = {left.attends for left in left_by_recompute(model_programs(spec, LENGTH, 1, 8), activation)}
        expected = formula(spec, model.context.plan, again == {1.0}, mode == "kept")
        result = {"counts": dict(counts), "digest": digest, "kept": kept, "arriving": Counted.most, "formula": expected}
        results[f"{way} {mode} {groups}"] = result | {"received": world.gather(Counted.received["elements"])}
    return results


def main(out: str) -> None:
    plan = resolve_plan(Config().parallel, RANKS)
    worlds = {size: join_world(replace(plan, cp=size), CPU) for size in (2, 4)}
    results = {"ways": measure(worlds), "recompute": recomputed(worlds[4]), "compiled": compiled(worlds[2])}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    fork(compiles=True)
    main(*sys.argv[1:])
    leave()
