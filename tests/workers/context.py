"""One model in fp64 whose sequences are shared by 2 and by 4 ranks, in every way, beside one process; and which
collectives each rank took part in.

context.py OUT
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.reference import tiny_spec
from torch import Tensor

from trainer.checkpointing.activation import apply_recompute
from trainer.config import ActivationConfig, Config
from trainer.config.model import ModelSpec
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.world import World, join
from trainer.generate.placed import PlacedModel
from trainer.generate.sampling import Sampling, generate_tokens
from trainer.model import shared_attention
from trainer.model.cache import Cache
from trainer.model.initial import fill, initial_weights
from trainer.model.shared_attention import Arrive
from trainer.model.transformer import Transformer
from trainer.parallel.context import share_sequences
from trainer.parallel.parallelize import keep_buffers
from trainer.planning.plan import resolve_plan
from trainer.training.samples import sharing

LENGTH, BATCH, RANKS = 32, 2, 4
CPU = torch.device("cpu")

WAYS = {  # method, order, inner
    "gather zigzag": ("gather", "zigzag", None),
    "gather contiguous": ("gather", "contiguous", None),
    "gather blocks": ("gather", "blocks", None),
    "halo zigzag": ("halo", "zigzag", None),
    "halo contiguous": ("halo", "contiguous", None),
    "heads": ("heads", "auto", None),
    "both zigzag": ("both", "zigzag", 2),
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "documents": {"documents": True},
    "window": {"window": 5},  # 4 ranks in zigzag order hold runs of 4: a window of one more is fetched, of two gathered
    "longer window": {"window": 6},
    "cap": {"soft_cap": 2.0},
    "all": {"documents": True, "window": 4, "soft_cap": 2.0},
}


def batch(documents: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, targets and documents. Only the last quarter of a sequence has targets. Documents have one token, end at
    runs' edges, and span them."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 61, (2, BATCH, LENGTH), generator=generator).unbind()
    targets[:, : LENGTH * 3 // 4] = -100
    edges = torch.zeros(BATCH, LENGTH, dtype=torch.int32)
    edges[0, [1, 4, 16]] = 1
    edges[1, [3, 11, 12, 13, 24]] = 1
    return tokens, targets, edges.cumsum(1).int() if documents else None


def build(spec: ModelSpec) -> Transformer:
    with torch.device("meta"):
        model = Transformer(spec)
    model.to_empty(device="cpu")
    fill(model, initial_weights(spec, 0, CPU))
    for rotary in model.rotaries:
        rotary.reset_buffers()
    return model.double()


def numbers(model: Transformer, documents: bool) -> dict[str, Tensor]:
    """Loss and gradients of what this rank computes."""
    tokens, targets, edges = batch(documents)
    model.zero_grad()
    loss, entropy = model(tokens, targets, edges)
    loss.backward()
    return {"loss": entropy.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


class Counted(TensorGroup):
    """A group that notes which collectives its rank starts, and how many results of exchanges are there at once."""

    seen: Counter = Counter()
    exchanged: list[weakref.ref] = []
    most = 0

    def gather(self, x: Tensor) -> Tensor:
        self.seen["gather"] += 1
        return super().gather(x)

    def exchange(self, *arguments: Any) -> Tensor:
        self.seen["exchange"] += 1
        result = noted(super().exchange(*arguments), self.exchanged)
        Counted.most = max(self.most, sum(each() is not None for each in self.exchanged))
        return result


def shared(model: Transformer, way: str, spec: ModelSpec, masked: bool, world: World, groups: int = 2) -> Counter:
    """Lets the ranks of `world` share the model's sequences; what they will do is counted."""
    config, size = Config(), world.context.size()
    config.batch.sequence_length, config.data.mask_documents = LENGTH, masked
    config.parallel.cp, context = size, config.parallel.context
    context.method, context.order, context.inner = WAYS[way]
    context.block, context.groups = 4, groups
    plan = resolve_plan(config.parallel, RANKS, spec)
    share_sequences(model, config, spec, plan, world)
    Counted.seen = Counter()
    for name in ("heads", "keys"):
        if (group := getattr(model.context, name)) is not None:
            object.__setattr__(model.context, name, Counted(group.name, group.rank, group.size))
    return Counted.seen


def measure(worlds: dict[int, World]) -> list[dict[str, Any]]:
    results = []
    for (mask, changes), heads in itertools.product(MASKS.items(), (1, 2, 4)):
        attention = {name: value for name, value in changes.items() if name != "documents"}
        spec = tiny_spec(depth=1, attention=attention | {"kv_heads": heads})
        model, masked = build(spec), "documents" in changes
        expected = {name: value.clone() for name, value in numbers(model, masked).items()}
        for size, world in worlds.items():
            for way in WAYS:
                if "halo" in way and mask != "window" or size == 2 and (way.startswith("both") or heads != 2):
                    continue
                counts = shared(model, way, spec, masked, world)
                found = numbers(model, masked)
                model.context, counts = None, dict(counts)
                flat = torch.cat([found[name].flatten() for name in expected])
                dist.all_reduce(flat)  # every group of `size` ranks has computed the whole
                parts = (flat * size / RANKS).split([value.numel() for value in expected.values()])
                error = max(
                    ((part - value.flatten()).abs().max() / value.abs().max()).item()
                    for part, value in zip(parts, expected.values(), strict=True)
                )
                everyone = world.gather(counts)
                results.append(
                    {"way": way, "mask": mask, "kv_heads": heads, "size": size, "error": error, "counts": everyone}
                )
    return results


def noted(x: Tensor, seen: list[weakref.ref]) -> Tensor:
    seen.append(weakref.ref(x))
    return x


def recomputed(world: World) -> dict[str, dict[str, Any]]:
    """Collectives of two layers, sums of gradients, gathered groups of heads that are there after the forward pass, and
    groups whose gradients from all ranks are there at once, by recompute and number of groups; `kept` is without
    gathering again."""
    results: dict[str, dict[str, Any]] = {}
    spec = tiny_spec(depth=2, attention={"kv_heads": 4})
    tokens, targets, _ = batch(False)
    for mode, groups in (
        ("none", 1),
        ("none", 2),
        ("none", 4),
        ("kept", 2),
        ("full", 2),
        ("selective", 2),
        ("modules", 2),
    ):
        model = build(spec)
        activation = ActivationConfig(mode={"kept": "none", "modules": "selective"}.get(mode, mode))
        activation.modules = ["*.attention"] if mode == "modules" else []
        apply_recompute(model, activation)
        counts = shared(model, "gather zigzag", spec, False, world, groups)
        if mode == "kept":
            for layer in model.layers.values():
                layer.attention.recomputed = True  # as the mask is told, and nobody does
        whole: list[weakref.ref] = []
        shared_attention.Arrive = SimpleNamespace(apply=lambda *given: noted(Arrive.apply(*given), whole))
        loss, _ = model(tokens, targets)
        gc.collect()
        kept = sum(each() is not None for each in whole)
        shared_attention.Arrive, Counted.most = Arrive, 0
        loss.backward()
        digest = sum(parameter.grad.double().sum().item() for parameter in model.parameters())
        results[f"{mode} {groups}"] = {"counts": dict(counts), "digest": digest, "kept": kept, "received": Counted.most}
    return results


LOGITS: list[Tensor] = []
CACHES: list[Cache] = []


class Noting(Sampling):
    """Keeps the logits that tokens are chosen from."""

    def choose(self, logits: Tensor, draw: Tensor) -> Tensor:
        LOGITS.append(logits.clone())
        return super().choose(logits, draw)


class Kept(PlacedModel):
    """Keeps the cache that it makes."""

    def cache(self, rows: int, capacity: int) -> Cache:
        CACHES.append(super().cache(rows, capacity))
        return CACHES[-1]


def generated(worlds: dict[int, World]) -> list[dict[str, Any]]:
    """The largest difference of any logit where ranks share the slots of a cache from that of one rank, and the slots
    of a row that a rank holds."""
    results, generator = [], torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 61, (length,), generator=generator).tolist() for length in (1, 9, 60)]
    for mask in ("causal", "window", "cap"):
        spec = tiny_spec(max_length=90, attention=MASKS[mask] | {"kv_heads": 2})
        model = build(spec)
        keep_buffers(model, CPU)
        seen = []
        for size, world in {1: None, **worlds}.items():
            group = None if world is None else sharing(world)
            placed = Kept(spec, {0: model}, CPU, torch.float64, sequence=group)
            LOGITS.clear()
            generate_tokens(placed, prompts, 7, Noting(1.0))
            seen.append(torch.stack(LOGITS))
            slots = [keys.shape[2] for keys, _ in CACHES[-1].layers.values()]
            error = (seen[-1] - seen[0]).abs().max() / seen[0].abs().max()
            results.append({"mask": mask, "size": size, "error": error.item(), "slots": slots})
    return results


def main(out: str) -> None:
    mesh = resolve_plan(Config().parallel, RANKS).mesh
    worlds = {size: join(mesh, CPU, cp=size) for size in (2, 4)}
    results = {"ways": measure(worlds), "recompute": recomputed(worlds[4]), "generated": generated(worlds)}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    fork()
    main(*sys.argv[1:])
    leave()
