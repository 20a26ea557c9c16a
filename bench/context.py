"""Context parallelism on GPUs: exactness in bf16, masks, kernels, and steps with and without communication.

    torchrun --nproc-per-node 2 bench/context.py OUT.jsonl [only=exact,layers,kernels,tables] \
        [lengths=32768,131072] [hardware=h200] [depth=2] [masks=causal,documents,window]

One GPU runs `tables` and `kernels`. As it stands it takes some five minutes of two H200s, most of them to compile
FlexAttention; only=layers lengths=262144 depth=1 some two.

exact    two layers in bf16 under every way and mask beside a CPU in fp32, and beside one GPU in bf16
tables   seconds and bytes of making a block mask, by length and ranks
kernels  TFLOP/s of attention, forward and backward, of what one of two ranks computes: dense kernel, zigzag, blocks
layers   `depth` layers of Llama-3 8B with full recompute, forward and backward: on one GPU, and shared by all in each
         way; again without its communication, which says what of it is exposed, beside the formulas. The longest
         sequence also under `masks`: of documents, and with a window
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from trainer.config import ActivationConfig, Config
from trainer.config.model import ModelSpec, assign_fields
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.mesh import World, join_world, local_device
from trainer.model.attention import block_mask, causal_attention, document_starts, first_seen, kernel_priority, mask_of
from trainer.model.context_attention import ContextGroup
from trainer.model.initial import InitialWeights, fill_parameters
from trainer.model.transformer import Transformer
from trainer.parallel.context.apply import share_sequences
from trainer.parallel.context.plan import context_traffic
from trainer.parallel.recompute import apply_recompute
from trainer.planning.documents import block_size
from trainer.planning.estimate.rates import link_bandwidth
from trainer.planning.features import resolve_plan
from trainer.planning.hardware import load_hardware
from trainer.planning.layer import ATTENTION_BACKWARD, model_programs
from trainer.planning.parameters import layer_specs
from trainer.planning.plan import Plan

WAYS = {  # method, order
    "gather": ("allgather", "zigzag"),
    "allgather blocks": ("allgather", "blocks"),
    "heads": ("ulysses", "auto"),
    "both": ("hybrid", "auto"),  # heads among neighbours of a node
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "documents": {"documents": True},
    "window": {"window": 200},
    "cap": {"soft_cap": 5.0},
    "all": {"documents": True, "window": 200, "soft_cap": 5.0},
}
DOCUMENT = 3000
"""Tokens of a packed document, where there are documents."""
WINDOW = 4096
"""Tokens that a query sees, where there is a window in `layers`."""
LAYER_WAYS = {
    "causal": ("gather", "allgather blocks", "heads", "both"),
    "documents": ("gather", "allgather blocks", "heads", "both"),
    "window": ("gather", "heads"),
}
"""What is measured of whole layers, by mask."""


class Silent(TensorGroup):
    """A group whose collectives only copy, as many bytes as arrive: what a step takes without its communication."""

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size)

    def scatter_sum(self, x: Tensor) -> Tensor:
        return self.own(x).clone()

    def exchange(self, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        return x.clone() if received is None else x.new_zeros(sum(received), *x.shape[1:])

    def wait(self, x: Tensor) -> Tensor:
        return x


def shared(model: Transformer, way: str, length: int, documents: bool, plan: Plan, world: World) -> ContextGroup:
    """Lets all ranks share the sequences of a model."""
    config = Config()
    config.batch.sequence_length, config.data.mask_documents = length, documents
    config.parallel.cp = plan.cp
    config.parallel.context.method, config.parallel.context.order = WAYS[way]
    share_sequences(model, config, model.spec, plan, world)
    return model.context


def two_by_two(plan: Plan) -> bool:
    """Whether two ranks can exchange heads and several such pairs gather keys."""
    return plan.cp > 2 and plan.cp % 2 == 0


def silenced(context: ContextGroup) -> ContextGroup:
    def quiet(group: TensorGroup | None) -> TensorGroup | None:
        return group and Silent(group.name, group.rank, group.size)

    return ContextGroup(context.plan, context.rank, quiet(context.heads), quiet(context.keys))


def layers(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The layers of a model but the first and the last, which take hidden states and return them."""
    with torch.device("meta"):
        model = Transformer(spec, range(1, spec.depth - 1))
    model.to_empty(device=device)
    fill_parameters(model, InitialWeights(spec, 0, device))
    model.to(dtype)
    for rotary in model.rotaries:
        rotary.float().reset_buffers()
    return model


def passes(
    model: Transformer, hidden: Tensor, tokens: Tensor, documents: Tensor | None, weight: Tensor
) -> list[Tensor]:
    """Output and gradients of one forward and backward pass; weight: of each element of the output in the loss."""
    model.zero_grad(set_to_none=True)
    hidden = hidden.detach().requires_grad_()
    result = model(tokens, documents=documents, hidden=hidden)
    (result.float() * weight).sum().backward()
    return [result.detach(), hidden.grad, *(parameter.grad for parameter in model.parameters())]


def exact(world: World, plan: Plan, length: int = 2048) -> Iterator[dict[str, Any]]:
    """The largest error of output and gradients, as a share of the largest number, with and without shared
    sequences."""
    kv_heads = 2
    for mask, changes in MASKS.items():
        attention = {name: value for name, value in changes.items() if name != "documents"}
        spec = ModelSpec(vocab_size=64, width=512, depth=4, max_length=length)
        assign_fields(spec, {"attention": {"heads": 8, "kv_heads": kv_heads, **attention}}, "model")
        spec.feed_forward.width = 512
        generator = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(2, length, spec.width, generator=generator).unbind()
        tokens = torch.zeros(1, length, dtype=torch.int64)
        documents = (torch.arange(length)[None] // 300).int() if "documents" in changes else None
        reference = layers(spec, torch.device("cpu"), torch.float32)
        weights = reference.state_dict()
        expected = passes(reference, hidden, tokens, documents, weight)
        on_device = [None if x is None else x.to(world.device) for x in (hidden, tokens, documents, weight)]
        hidden, tokens, documents, weight = on_device
        for dtype in (torch.float32, torch.bfloat16) if mask in ("causal", "all") else (torch.bfloat16,):
            model = layers(spec, world.device, dtype)
            model.load_state_dict(weights)
            plain = worst(passes(model, hidden.to(dtype), tokens, documents, weight), expected)
            for way in WAYS:
                if way == "heads" and kv_heads % plan.cp:
                    continue
                if way == "both" and not two_by_two(plan):
                    continue
                context = shared(model, way, length, documents is not None, plan, world)
                own = context.own(length, world.device)
                found = passes(model, hidden[own].to(dtype), tokens, documents, weight[own])
                model.context = None
                for number, value in enumerate(found):
                    if number < 2:
                        parts = [torch.empty_like(value) for _ in range(plan.cp)]
                        dist.all_gather(parts, value.contiguous())
                        found[number] = torch.empty_like(torch.cat(parts))
                        found[number][context.order(length, world.device)] = torch.cat(parts)
                    else:
                        found[number] = value.float()
                        dist.all_reduce(found[number])
                error = worst(found, expected)
                result = {"mask": mask, "kv_heads": kv_heads, "type": str(dtype), "way": way}
                yield result | {"error": error, "one_gpu": plain, "ok": error <= 2 * plain + 1e-6}


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        ((one.float().cpu() - two).abs().max() / two.abs().max()).item()
        for one, two in zip(found, expected, strict=True)
    )


def packed(length: int, device: torch.device) -> Tensor:
    """Documents of many lengths, 3,000 tokens in the mean."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.rand(1, length, generator=generator) < 1 / DOCUMENT
    return edges.cumsum(1).int().to(device)


def build_tables(world: World, plan: Plan, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Of a mask of packed documents, with its blocks dealt out to ranks."""
    for length, ranks in itertools.product(sorted({*lengths, 2**17, 2**19, 2**20}), (1, 2, 8)):
        places = torch.arange(length, device=world.device).view(-1, 128)[::ranks].flatten()
        documents = packed(length, world.device)

        def make(documents: Tensor = documents, places: Tensor = places, length: int = length) -> Any:
            return block_mask(first_seen(documents, length, 0, documents.device)[:, places], places, length)

        make()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mask, seconds = make(), timed(make, 3)
        kept = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
        size = block_size(1, len(places), length)
        yield {"length": length, "ranks": ranks, "block": size, "seconds": seconds, "bytes": kept, "peak": peak}
        del mask


def kernels(world: World, plan: Plan, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Attention of 8 heads of 128 with 2 key-value heads, of the first of two ranks, by order and mask."""
    heads, kv_heads, size = 8, 2, 128
    for length in lengths:
        random = partial_normal(world.device)
        query, key, value = random(heads, length, size), random(kv_heads, length, size), random(kv_heads, length, size)
        quarter, half = length // 4, length // 2
        whole, documents = torch.arange(length, device=world.device), packed(length, world.device)
        dealt = whole.view(-1, 2, 128).clone()
        dealt[1::2] = dealt[1::2].flip(1)
        blocks = dealt[:, 0].flatten()
        zero = torch.zeros_like(whole)[None]
        starts = document_starts(documents)
        pairs = float(length) * length / 2
        of_documents = (whole[None] - starts + 1).sum().item()
        mine = (blocks - starts[0, blocks] + 1).sum().item()

        def zigzag(q: Tensor, k: Tensor, v: Tensor, quarter: int = quarter) -> Tensor:
            first = causal_attention(q[:, :, :quarter], k[:, :, :quarter], v[:, :, :quarter], None, 0.1)
            return torch.cat([first, causal_attention(q[:, :, quarter:], k, v, None, 0.1)], 2)

        def masked(mask: Any) -> Callable[..., Tensor]:
            return lambda q, k, v: causal_attention(q, k, v, mask, 0.1)

        cases: dict[str, tuple[Callable[..., Tensor], int, float]] = {
            "dense": (masked(None), length, pairs),
            "zigzag": (zigzag, half, pairs / 2),
            "blocks": (masked(mask_of(zero[:, blocks], blocks, length)), half, pairs / 2),
            "documents, whole": (masked(mask_of(starts, whole, length)), length, of_documents),
            "documents, blocks": (masked(mask_of(starts[:, blocks], blocks, length)), half, mine),
        }
        for name, (function, queries, count) in cases.items():
            q, k, v = (
                x[:, :, :n].detach().requires_grad_() for x, n in ((query, queries), (key, length), (value, length))
            )
            out = function(q, k, v)
            gradient = torch.randn_like(out)
            forward = timed(lambda q=q, k=k, v=v, function=function: function(q, k, v), 3)
            both = timed(lambda q=q, k=k, v=v, function=function, g=gradient: function(q, k, v).backward(g), 3)
            rate = 4.0 * heads * size * count / 1e12
            yield {
                "length": length,
                "case": name,
                "forward_seconds": forward,
                "seconds": both,
                "forward_tflops": rate / forward,
                "tflops": 3.5 * rate / both,
            }


def partial_normal(device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return lambda heads, length, size: torch.randn(
        1, heads, length, size, device=device, dtype=torch.bfloat16, generator=generator
    )


def run_layers(
    world: World, plan: Plan, lengths: list[int], hardware: str, depth: int, masks: list[str]
) -> Iterator[dict[str, Any]]:
    """Seconds of a layer, forward and backward with full recompute, and what of them is exposed communication."""
    spec = ModelSpec.from_dict(
        {name: value for name, value in yaml.safe_load(Path("configs/model/llama3_8b.yaml").read_text()).items()}
    )
    spec.depth = depth + 2  # the first and the last are left out
    bandwidth = link_bandwidth(load_hardware(hardware).node)
    model = layers(spec, world.device, torch.bfloat16)
    apply_recompute(model, ActivationConfig(mode="full"))
    cases = [(length, mask) for mask in masks for length in (lengths if mask == "causal" else lengths[-1:])]
    for length, mask in cases:
        if mask == "window":
            assign_fields(spec, {"attention": {"window": WINDOW}}, "model")
            model = layers(spec, world.device, torch.bfloat16)
            apply_recompute(model, ActivationConfig(mode="full"))
        packing, attention = mask == "documents", layer_specs(spec)[0].attention
        documents, layer = packed(length, world.device) if packing else None, model_programs(spec, length, 1, 2)[0]
        tokens = torch.zeros(1, length, dtype=torch.int64, device=world.device)
        alone = 0.0
        ways = [way for way in LAYER_WAYS[mask] if way != "both" or two_by_two(plan)]
        for way in (None, *ways):
            context = None if way is None else shared(model, way, length, packing, plan, world)
            own = length if way is None else length // plan.cp
            hidden = torch.randn(own, spec.width, device=world.device, dtype=torch.bfloat16)
            result = {"length": length, "mask": mask, "way": way or "one GPU"}

            def step(context: ContextGroup | None, hidden: Tensor = hidden, tokens: Tensor = tokens) -> None:
                model.context = context
                model.zero_grad(set_to_none=True)
                model(tokens, documents=documents, hidden=hidden.detach().requires_grad_()).sum().backward()

            torch.cuda.reset_peak_memory_stats()
            seconds = timed(lambda context=context: step(context), 2) / depth
            result |= {"seconds": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
            if context is None:
                alone = seconds
                gemms, attention = (layer.total("flops", kind) for kind in ("gemm", "attention"))
                flops = 4 * gemms + (2 + ATTENTION_BACKWARD) * attention  # forward twice
                result["tflops"] = flops * length / seconds / 1e12 if not packing else None
            else:
                silent = timed(lambda context=context: step(silenced(context)), 2) / depth
                predicted = 2 * context_traffic(attention, context.plan, length, 1, again=1).all / bandwidth
                result |= {
                    "speedup": alone / seconds,
                    "exposed": 1 - silent / seconds,
                    "exposed_seconds": seconds - silent,
                    "formula_seconds": predicted,
                    "formula_share": predicted / seconds,
                }
            model.context = None
            yield result


def timed(function: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call after one to warm up, the slowest rank's mean."""
    function()
    torch.cuda.synchronize()
    if dist.get_world_size() > 1:
        dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    seconds = torch.tensor((time.perf_counter() - started) / repeats, device="cuda")
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def main(out: str, *words: str) -> None:
    options = {"only": "exact,layers,kernels,tables", "lengths": "32768,131072", "hardware": "h200"}
    options |= {"depth": "2", "masks": "causal,documents,window"}
    options |= dict(word.split("=", 1) for word in words)
    lengths, size = list(map(int, options["lengths"].split(","))), int(os.environ.get("WORLD_SIZE", 1))
    config = Config()
    config.parallel.cp = size
    plan, device = resolve_plan(config.parallel, size), local_device(config.run)
    world = join_world(plan, device)
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "exact": lambda: exact(world, plan),
        "tables": lambda: build_tables(world, plan, lengths),
        "kernels": lambda: kernels(world, plan, lengths),
        "layers": lambda: run_layers(
            world, plan, lengths, options["hardware"], int(options["depth"]), options["masks"].split(",")
        ),
    }
    with kernel_priority(deterministic=False):
        for name in options["only"].split(","):
            if size == 1 and name in ("exact", "layers"):
                continue
            for result in parts[name]():
                if world.rank == 0:
                    line = json.dumps({"part": name, "ranks": size, **result})
                    print(line, flush=True)
                    with open(out, "a") as file:
                        file.write(line + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
