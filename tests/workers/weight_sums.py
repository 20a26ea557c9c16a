"""Weight gradients that GEMMs add to their sums, beside sums by kernels of their own and in fp64; and a model that is
trained both ways, compiled and not.

python tests/workers/weight_sums.py cuda|cpu [OUT.json]

On a GPU: at the shapes of a layer of an 8B model, with times. A line of JSON says everything, and goes to OUT.json."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support.reference import random_batch, rows, settings, tiny_spec
from torch import Tensor
from torch._dynamo.utils import counters

from trainer.distributed.mesh import World, join_world, local_device
from trainer.model.initial import InitialWeights
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.parallel.zero.fsdp_internals import UnshardedSum
from trainer.parity.compare import Trajectory
from trainer.parity.watch import train_plan
from trainer.planning.features import resolve_plan
from trainer.planning.plan import BatchPlan
from trainer.precision.products import add_weight_gradient
from trainer.training import state as training_state

MICRO_BATCHES = 4
LARGE = {
    "q": (4096, 4096, 8192),
    "k": (1024, 4096, 8192),
    "up": (14336, 4096, 8192),
    "down": (4096, 14336, 8192),
    "odd": (333, 1000, 77),
}
"""Outputs, inputs and tokens."""
WIDER = {"width": 512, "attention": {"heads": 8, "kv_heads": 2}, "feed_forward": {"width": 1408}}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Of the largest difference between a model's runs."""
SMALL = {"even": (24, 40, 16), "odd": (7, 13, 5)}


def add_apart(total: Tensor, gradient: Tensor, x: Tensor, new: bool) -> Tensor:
    """What autograd and FSDP do: the product in the compute type, then a cast or a sum in fp32."""
    product = gradient.t() @ x
    return total.copy_(product) if new else total.add_(product)


def sum_up(add: Callable[..., Tensor], pairs: list[tuple[Tensor, Tensor]], total: Tensor) -> Tensor:
    for number, (gradient, x) in enumerate(pairs):
        add(total, gradient, x, number == 0)
    return total


def measure(work: Callable[[], Any]) -> float:
    """Microseconds on the device, the least of several tries."""
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return round(min(times), 1)


def check_products(device: str, dtype: torch.dtype) -> dict[str, Any]:
    generator, found = torch.Generator(device).manual_seed(0), {}
    for name, (outputs, inputs, tokens) in (LARGE if device == "cuda" else SMALL).items():

        def draw(width: int, whole: bool) -> Tensor:
            shape, options = (tokens, width), dict(generator=generator, device=device)
            values = torch.randint(-1, 2, shape, **options) if whole else torch.randn(shape, **options)
            return values.to(dtype)

        # Small whole numbers: every product and every sum is exact in every type, so the bits are known.
        few = [(draw(outputs, True)[:120], draw(inputs, True)[:120]) for _ in range(2)]
        exact = sum(g.double().t() @ x.double() for g, x in few).float()
        buffer = torch.full((outputs + 2, inputs), torch.nan, device=device)
        inside = buffer[1:-1]  # some rows of a larger matrix
        for add in (add_weight_gradient, add_apart):
            assert torch.equal(sum_up(add, few, inside), exact), (name, dtype, add.__name__)
        assert buffer[0].isnan().all() and buffer[-1].isnan().all(), "rows beside the sum were written"

        pairs = [(draw(outputs, False), draw(inputs, False)) for _ in range(MICRO_BATCHES)]
        total, apart = (torch.empty(outputs, inputs, device=device) for _ in range(2))
        sum_up(add_weight_gradient, pairs, total)
        sum_up(add_apart, pairs, apart)
        exact = sum(g.double().t() @ x.double() for g, x in pairs)
        errors = {
            kind: ((seen - exact).norm() / exact.norm()).item() for kind, seen in (("gemm", total), ("apart", apart))
        }
        assert errors["gemm"] < (errors["apart"] / 3 if dtype.itemsize == 2 else 1e-5), (name, errors)
        found[name] = errors
        if device == "cuda":
            found[name] |= on_the_device(pairs, total)
    return found


def on_the_device(pairs: list[tuple[Tensor, Tensor]], total: Tensor) -> dict[str, Any]:
    """The same bits again; in place, without memory and without waiting for the device, also in a CUDA graph; and the
    times of a further micro-batch."""
    gradient, x = pairs[0]
    first, place = total.clone(), total.data_ptr()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = sum_up(add_weight_gradient, pairs, total)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    extra = torch.cuda.max_memory_allocated() - before
    assert result.data_ptr() == place and extra == 0, f"{extra} bytes beside the sum"
    assert torch.equal(total, first), "a second time, other bits"
    total.zero_()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the workspace of this stream
        add_weight_gradient(torch.empty_like(total), gradient, x, True)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        sum_up(add_weight_gradient, pairs, total)
    graph.replay()
    assert ((total - first).norm() / first.norm()).item() < 1e-5, "in a CUDA graph, another sum"
    return {
        "microseconds": {
            add.__name__: measure(lambda add=add: add(total, gradient, x, False))
            for add in (add_weight_gradient, add_apart)
        }
        | {"product": measure(lambda: gradient.t() @ x)}
    }


def train(world: World, sums: bool, **changes: Any) -> Trajectory:
    """Steps of a small model on this process alone. sums: whether GEMMs add to sums."""
    device = world.device
    spec, config = tiny_spec(**(WIDER if device.type == "cuda" else {})), settings(**changes)
    length, sequences = 32, 4 * MICRO_BATCHES
    config.batch.sequence_length = length
    plan = resolve_plan(config.parallel, 1, spec)
    batch = BatchPlan(length, sequences, sequences // MICRO_BATCHES, MICRO_BATCHES)
    whole = [random_batch(step, sequences, length, spec.vocab_size, False, device) for step in range(2)]
    steps = ([rows(one, at, at + batch.micro_size) for at in range(0, sequences, batch.micro_size)] for one in whole)
    added: list[Any] = []
    real = UnshardedSum.add

    def count(self: UnshardedSum, gradient: Tensor, x: Tensor) -> Tensor:
        added.append(self)
        return real(self, gradient, x)

    counters.clear()
    with patch.object(training_state, "sums_in_gemms", lambda *_: sums), patch.object(UnshardedSum, "add", count):
        seen = train_plan(
            config,
            spec,
            plan,
            resolve_pipeline(config, spec, plan, batch),
            world,
            steps,
            InitialWeights(spec, config.run.seed, device),
        )
    weights = 7 * spec.depth + 1
    products = weights * MICRO_BATCHES * len(whole)
    assert len(added) == products * sums and len(set(map(id, added))) == weights * sums, len(added)
    assert not counters["graph_break"], counters["graph_break"]
    assert not seen.problems and not seen.overflows, seen.problems
    return seen


def compare_runs(ours: Trajectory, theirs: Trajectory) -> dict[str, float]:
    """The largest relative differences over all steps and parameters."""
    different = {"loss": 0.0, "norm": 0.0, "gradient": 0.0}
    for kind, pairs in (("loss", zip(ours.losses, theirs.losses)), ("norm", zip(ours.norms, theirs.norms))):
        different[kind] = max(abs(one - other) / abs(other) for one, other in pairs)
    for one, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert one.keys() == other.keys()
        for name, gradient in other.items():
            error = ((one[name] - gradient).norm() / max(gradient.norm(), 1e-3 * max(ours.norms))).item()
            different["gradient"] = max(different["gradient"], error)
    return different


def main(kind: str, out: str = "") -> None:
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if kind == "cuda" else kind}
    result["torch"] = torch.__version__
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        result[str(dtype)] = check_products(kind, dtype)
    config = settings(run__device=kind)
    world = join_world(resolve_plan(config.parallel, 1), local_device(config.run))
    exact = train(world, False)
    for precision, compile in (("fp32", False), ("bf16", False), ("fp16", False), *[("bf16", True)] * (kind == "cuda")):
        ours = train(world, True, compile=compile, precision__compute=precision)
        theirs = exact if precision == "fp32" else train(world, False, compile=compile, precision__compute=precision)
        found = {"apart": compare_runs(ours, theirs), "fp32": compare_runs(ours, exact)}
        result[f"{precision} {'compiled' if compile else 'eager'}"] = found
        assert max(found["apart"].values()) < TOLERANCE[precision], (precision, compile, found)
        assert max(found["fp32"].values()) < TOLERANCE[precision], (precision, compile, found)
    text = json.dumps(result)
    print(text, flush=True)
    if out:
        Path(out).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
