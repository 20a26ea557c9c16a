"""Products in fp8 on a GPU beside their emulation, and casts compiled beside eager ones.

python tests/workers/float8.py cuda
"""

from __future__ import annotations

import sys

import torch

from trainer.precision.products import (
    BLOCK,
    E4M3,
    E5M2,
    Float8Multiply,
    GEMMRole,
    emulate_product,
    quantise_operand,
    scaled_product,
)

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
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"):
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
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
