"""Time of the three GEMMs of one matrix by recipe of fp8, casts included and compiled.

    python bench/float8.py [tokens] [inputs] [outputs]

Prints a line of JSON for each recipe: milliseconds of the output, of the input's gradient and of the weight's; those
without casts; and the relative error of each product, beside fp32. On CPUs the products are emulated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from trainer.precision.products import Float8Multiply, GEMMRole, Multiply, matmul

RECIPES = ("rowwise_with_gw_hp", "tensorwise", "rowwise", "blockwise")


def main(tokens: int = 8192, inputs: int = 4096, outputs: int = 14336) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    x, weight, gradient = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)
    operands = {
        GEMMRole.OUTPUT: (x, weight),
        GEMMRole.INPUT_GRADIENT: (gradient, weight),
        GEMMRole.WEIGHT_GRADIENT: (gradient, x),
    }
    exact = {role: matmul(a.float(), b.float(), role) for role, (a, b) in operands.items()}
    for name, multiply in {"bf16": matmul, **{name: Float8Multiply(name) for name in RECIPES}}.items():
        whole, alone, errors = [], [], []
        for role, (a, b) in operands.items():
            torch._dynamo.reset()
            run = torch.compile(multiply.__call__, dynamic=False)
            errors.append(((run(a, b, role).float() - exact[role]).norm() / exact[role].norm()).item())
            whole.append(milliseconds(lambda run=run, a=a, b=b, role=role: run(a, b, role), device))
            alone.append(milliseconds(product_of(multiply, a, b, role), device))
        line = {"milliseconds": whole, "without_casts": alone, "errors": errors}
        print(json.dumps({"recipe": name, **{key: [round(one, 4) for one in few] for key, few in line.items()}}))


def product_of(multiply: Multiply, a: Tensor, b: Tensor, role: GEMMRole) -> Callable[[], Tensor]:
    left, right = multiply.left(a, role), multiply.right(b, role)
    return lambda: multiply.product(left, right, role, a.dtype)


def milliseconds(run: Callable[[], Tensor], device: str, samples: int = 5) -> float:
    """The median over samples, each of as many calls as take some 50 ms."""
    seconds, calls = [], 1
    for _ in range(samples + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begun) / calls)
        calls = max(1, min(100, int(0.05 / seconds[-1])))
    return 1000 * median(seconds[2:])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
