"""Experts of a mixture on one GPU in bf16: their grouped GEMMs and whole layers, beside the ceiling of one large GEMM.

    python bench/experts.py OUT.json [models=mixtral,qwen3,deepseek] [repeats=10]

products   forward, input gradient and weight gradient of gate, up and down together: milliseconds, TFLOP/s and the
           ratio to the ceiling
layers     a layer's whole mixture (route, sort, gather, multiply, combine), compiled and not, forward and forward with
           backward: the same, and the peak of memory

The ceiling is what GEMMs with equal FLOPs take that multiply all rows by one matrix. Routing is random.
On CPUs it runs to be tried: with `scale=64 repeats=1`, which divides widths and rows.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.config.model import ExpertsSpec, FeedForwardSpec
from trainer.model.experts import grouped_weight_gradient, multiply_grouped
from trainer.model.layers import Mixture
from trainer.model.stage import compile_function

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARM = 3
"""Calls before those that are measured."""


class Shape(NamedTuple):
    """Experts of a layer on one GPU."""

    experts: int
    top_k: int
    width: int
    inner: int
    tokens: int


SHAPES = {
    "mixtral": Shape(8, 2, 4096, 14336, 8192),
    "qwen3": Shape(128, 8, 2048, 768, 16384),
    "deepseek": Shape(32, 8, 7168, 2048, 8192),
}
"""Mixtral 8x7B, Qwen3-30B-A3B, and an eighth of the experts of DeepSeek-V3."""


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def elapsed(work: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call."""
    found = []
    for _ in range(repeats + WARM):
        start = time.perf_counter()
        work()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found[WARM:])


def measure_ceilings(shape: Shape, repeats: int) -> dict[str, float]:
    """Milliseconds of one large GEMM for each pass of gate and up together, and of down."""
    rows, width, inner = shape.tokens * shape.top_k, shape.width, shape.inner
    x, h, wide, narrow = draw(rows, width), draw(rows, 2 * inner), draw(2 * inner, width), draw(width, inner)
    hidden = h[:, :inner].contiguous()
    works = {
        "forward": (lambda: x @ wide.t(), lambda: hidden @ narrow.t()),
        "input gradient": (lambda: h @ wide, lambda: x @ narrow),
        "weight gradient": (lambda: h.t() @ x, lambda: x.t() @ hidden),
    }
    return {name: sum(elapsed(work, repeats) for work in pair) for name, pair in works.items()}


def measure_products(shape: Shape, repeats: int) -> Iterator[tuple[str, float]]:
    """Milliseconds of the grouped GEMMs of each pass."""
    rows, width, inner = shape.tokens * shape.top_k, shape.width, shape.inner
    ends = torch.bincount(torch.randint(shape.experts, (rows,), device=DEVICE), minlength=shape.experts)
    ends = ends.cumsum(0, dtype=torch.int32)
    ups, down = [draw(shape.experts, inner, width) for _ in range(2)], draw(shape.experts, width, inner)
    x, hidden = draw(rows, width), draw(rows, inner)

    def forward() -> None:
        for weight in ups:
            multiply_grouped(x, weight.transpose(1, 2), ends)
        multiply_grouped(hidden, down.transpose(1, 2), ends)

    def to_input() -> None:
        for weight in ups:
            multiply_grouped(hidden, weight, ends)
        multiply_grouped(x, down, ends)

    def to_weight() -> None:
        for _ in ups:
            grouped_weight_gradient(hidden, x, ends)
        grouped_weight_gradient(x, hidden, ends)

    for name, work in (("forward", forward), ("input gradient", to_input), ("weight gradient", to_weight)):
        yield name, elapsed(work, repeats)


def measure_layer(shape: Shape, repeats: int, compiled: bool) -> tuple[float, float]:
    """Milliseconds of a whole mixture: forward, and forward with backward."""
    spec = FeedForwardSpec(width=shape.inner, experts=ExpertsSpec(count=shape.experts, top_k=shape.top_k))
    with torch.device(DEVICE):
        block = Mixture(spec, shape.width).to(torch.bfloat16).eval()
    for name, parameter in block.named_parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        if name.startswith("router"):
            parameter.data = parameter.data.float()
    run = compile_function(block) if compiled else block
    x, gradient = draw(shape.tokens, shape.width).requires_grad_(), draw(shape.tokens, shape.width)

    def both() -> None:
        block.zero_grad()
        run(x).backward(gradient)

    def forward() -> None:
        with torch.no_grad():
            run(x)

    return elapsed(forward, repeats), elapsed(both, repeats)


def main(out: str, *changes: str) -> None:
    options = {"models": ",".join(SHAPES), "scale": "1", "repeats": "10"}
    options |= dict(change.split("=", 1) for change in changes)
    scale, repeats, lines = int(options["scale"]), int(options["repeats"]), []
    torch.manual_seed(0)
    for model in options["models"].split(","):
        shape = SHAPES[model]
        if scale > 1:
            small = {name: max(64, getattr(shape, name) // scale) for name in ("width", "inner", "tokens")}
            shape = shape._replace(**small)
        flops = 6.0 * shape.tokens * shape.top_k * shape.width * shape.inner
        ceilings = measure_ceilings(shape, repeats)
        cases: list[tuple[str, int, float, float]] = [
            (f"grouped GEMMs, {name}", 1, found, ceilings[name]) for name, found in measure_products(shape, repeats)
        ]
        for compiled in (False, True):
            forward, both = measure_layer(shape, repeats, compiled)
            how = "compiled" if compiled else "eager"
            cases.append((f"layer, forward, {how}", 1, forward, ceilings["forward"]))
            cases.append((f"layer, forward and backward, {how}", 3, both, sum(ceilings.values())))
        for case, passes, milliseconds, ceiling in cases:
            line: dict[str, Any] = {"model": model, "case": case, "ms": round(milliseconds, 2)}
            line |= {
                "TFLOP/s": round(passes * flops / milliseconds / 1e9),
                "of ceiling": round(ceiling / milliseconds, 3),
            }
            print(line, flush=True)
            lines.append(line)
        device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
        Path(out).write_text(json.dumps({"device": device, "torch": torch.__version__, "cases": lines}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
