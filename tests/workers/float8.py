"""Products in fp8 on a GPU beside their emulation, and casts compiled beside eager ones.

    python tests/workers/float8.py cuda [TOKENS INPUTS OUTPUTS]

With sizes it prints a line of JSON for each recipe instead: milliseconds of the output, of the input's gradient and of
the weight's, casts included and compiled; those without casts; and the relative error of each product, beside fp32.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import torch

from trainer.precision.products import (
    BLOCK,
    E4M3,
    E5M2,
    Float8Multiply,
    GEMMRole,
    Multiply,
    emulate_product,
    matmul,
    quantise_operand,
    scaled_product,
)

RECIPES = ("rowwise_with_gw_hp", "tensorwise", "rowwise", "blockwise")
TOKENS, INPUTS, OUTPUTS = 192, 256, 384
SHAPES = {
    GEMMRole.OUTPUT: ((TOKENS, INPUTS), (OUTPUTS, INPUTS)),
    GEMMRole.INPUT_GRADIENT: ((TOKENS, OUTPUTS), (OUTPUTS, INPUTS)),
    GEMMRole.WEIGHT_GRADIENT: ((TOKENS, OUTPUTS), (TOKENS, INPUTS)),
}


def main(device: str) -> None:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    compiled = torch.compile(quantise_operand, dynamic=False)
    for block, dtype in ((None, E4M3), (None, E5M2), ((1, 0), E4M3), ((1, BLOCK), E4M3), ((64, BLOCK), E4M3)):
        torch._dynamo.reset()
        for summed in (0, 1):
            x = random(TOKENS, INPUTS)
            x[3], x[5], x[7] = 0, x[5] * 2.0**90, x[7] * 2.0**-90
            for bad in (None, float("inf"), float("nan")):
                if bad is not None:
                    x[9, 11] = bad
                ours, theirs = quantise_operand(x, summed, dtype, block), compiled(x, summed, dtype, block)
                on_host = quantise_operand(x.cpu(), summed, dtype, block)
                for other in (theirs, on_host):
                    for mine, its in zip(ours, other):
                        same = torch.equal(
                            mine.float().nan_to_num(nan=-1.0).cpu(), its.float().nan_to_num(nan=-1.0).cpu()
                        )
                        assert same, (block, dtype, summed, bad)
    for fast in (True, False):
        for kind in (E4M3, E5M2):
            left, right = (
                quantise_operand(random(TOKENS, INPUTS), 1, kind, None),
                quantise_operand(random(OUTPUTS, INPUTS), 1, E4M3, None),
            )
            back = left[1], right[1]
            seen = scaled_product(left[0], right[0], back, torch.bfloat16, fast).float()
            exact = emulate_product(left[0], right[0], back, torch.float32)
            print(f"fast={fast} {kind}: {((seen - exact).norm() / exact.norm()).item():.1e}", flush=True)
            assert (seen - exact).norm() <= (2e-2 if fast else 4e-3) * exact.norm()
    for recipe in RECIPES:
        for role, shapes in SHAPES.items():
            a, b = (random(*shape) for shape in shapes)
            multiply = Float8Multiply(recipe)
            seen, exact = multiply(a, b, role), multiply(a.cpu(), b.cpu(), role).to(device)
            torch._dynamo.reset()
            again = torch.compile(multiply.__call__, dynamic=False)(a, b, role)
            assert (again - seen).norm() < 6e-3 * exact.norm(), (recipe, role)
            error = ((seen - exact).norm() / exact.norm()).item()
            print(f"{recipe} {role.name}: {error:.1e}", flush=True)
            assert seen.dtype is torch.bfloat16 and error < (2e-2 if role is GEMMRole.OUTPUT else 6e-3), (
                recipe,
                role,
                error,
            )
            a[5, 7] = float("inf")
            assert not torch.isfinite(Float8Multiply(recipe)(a, b, role)).all(), (recipe, role)
        # Any number of tokens, as in generation.
        a, b = random(5, INPUTS), random(OUTPUTS, INPUTS)
        seen, exact = Float8Multiply(recipe)(a, b, GEMMRole.OUTPUT), matmul(a, b, GEMMRole.OUTPUT)
        assert (seen - exact).norm() < 0.06 * exact.norm(), recipe
    print("done")


def measure(device: str, tokens: int, inputs: int, outputs: int) -> None:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    x, weight, gradient = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)
    operands = {
        GEMMRole.OUTPUT: (x, weight),
        GEMMRole.INPUT_GRADIENT: (gradient, weight),
        GEMMRole.WEIGHT_GRADIENT: (gradient, x),
    }
    for name, multiply in {"bf16": matmul, **{name: Float8Multiply(name) for name in RECIPES}}.items():
        found: dict[str, list[float]] = {"milliseconds": [], "without_casts": [], "errors": []}
        for role, (a, b) in operands.items():
            torch._dynamo.reset()
            run, exact = torch.compile(multiply.__call__, dynamic=False), matmul(a.float(), b.float(), role)
            found["errors"].append(((run(a, b, role) - exact).norm() / exact.norm()).item())
            found["milliseconds"].append(milliseconds(lambda run=run, a=a, b=b, role=role: run(a, b, role), device))
            found["without_casts"].append(milliseconds(product_of(multiply, a, b, role), device))
        print(json.dumps({"recipe": name} | {key: [round(one, 4) for one in few] for key, few in found.items()}))


def product_of(multiply: Multiply, a: torch.Tensor, b: torch.Tensor, role: GEMMRole) -> Callable[[], torch.Tensor]:
    left, right = multiply.left(a, role), multiply.right(b, role)
    return lambda: multiply.product(left, right, role, a.dtype)


def milliseconds(run: Callable[[], torch.Tensor], device: str, samples: int = 5) -> float:
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
    if len(sys.argv) > 2:
        measure(sys.argv[1], *map(int, sys.argv[2:]))
    else:
        main(sys.argv[1])
