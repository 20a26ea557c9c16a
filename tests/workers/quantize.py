"""The Triton kernels beside the torch code that they have to equal, bit by bit: on a GPU, or in Triton's interpreter
with TRITON_INTERPRET=1, which rounds conversions to bf16 toward zero, so that those are left to GPUs.

    python tests/workers/quantize.py cpu|cuda
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from trainer.parallel.compress.codec import (
    BlockCodec,
    BlockLayout,
    ErrorFeedback,
    pack_blocks,
    triton_pack,
    triton_unpack,
    unpack_blocks,
)

LAYOUTS = [  # segments, rows, grain of 256
    ([(0, 1)], 1, False),
    ([(5, 256), (300, 255), (555, 257)], 1, False),
    ([(0, 40), (41, 1700), (1800, 3)], 3, True),
    ([(7, 6000)], 4, False),
]


def cases(real: bool) -> Iterator[tuple[BlockCodec, bool, torch.dtype, int]]:
    """Codec, error feedback, type of the gradients, layout. Blocks and types take turns, since Triton compiles all anew
    for each; in the interpreter, which is slow, layouts do too."""
    forms = [(256, torch.bfloat16), (64, torch.float16), (4096, torch.float32)] if real else [(64, torch.float32)]
    for number, (kind, feedback) in enumerate(itertools.product(("int8", "int4"), (False, True))):
        for block, dtype in forms:
            for layout in range(len(LAYOUTS)) if real else [number]:
                yield BlockCodec(kind, block), feedback, dtype, layout


def differences(codec: BlockCodec, feedback: bool, dtype: torch.dtype, layout: int, device: torch.device) -> list[str]:
    """What differs over three steps, of which the second is skipped for numbers that are not finite."""
    segments, rows, coarse = LAYOUTS[layout]
    where = [
        BlockLayout(segments, codec.block, rows, place, max(256, codec.block) if coarse else 0)
        for place in (torch.device("cpu"), device)
    ]
    errors = [ErrorFeedback(blocks) if feedback else None for blocks in where]
    before: torch.Tensor | None = None
    wrong, size = [], segments[-1][0] + segments[-1][1] + 9
    for step in range(3):
        choose = torch.Generator().manual_seed(step)
        unit = 2.0 ** (10 - step)
        flat = (torch.randn(size, generator=choose) * unit * 10.0 ** (-5 * torch.rand(size, generator=choose))).to(
            dtype
        )
        flat[::37] = 0
        if step == 1:
            flat[segments[0][0]], flat[segments[-1][0] + 2] = math.nan, math.inf
        flats = [flat, flat.to(device)]
        payloads = [
            write(codec, part, blocks, kept, torch.tensor(unit, device=part.device))
            for write, part, blocks, kept in zip((pack_blocks, triton_pack), flats, where, errors)
        ]
        before = payloads[0] if before is None else before
        senders = torch.stack([before, payloads[0], payloads[0]])
        results = [torch.full((size,), 3.0, dtype=dtype, device=part.device) for part in flats]
        for read, blocks, result in zip((unpack_blocks, triton_unpack), where, results):
            read(codec, senders.to(result.device), blocks, result)
        expected, result = results[0], results[1].cpu()
        finite = torch.isfinite(expected)
        told = f"{codec}, {feedback}, {dtype}, layout {layout}, step {step}"
        if not torch.equal(finite, torch.isfinite(result)) or not torch.equal(expected[finite], result[finite]):
            wrong.append(f"{told}: unpacked values, off by {(expected[finite] - result[finite]).abs().max()} at most")
        if step != 1:
            same = payloads[0] == payloads[1].cpu()
            wrong += [f"{told}: {(~same).sum()} of {same.numel()} packed bytes"] * (not same.all())
        for kept in filter(None, errors):
            kept.end_step(torch.tensor(float(step == 1), device=kept.kept.device))
        if feedback and not torch.equal(errors[0].kept, errors[1].kept.cpu()):
            wrong.append(f"{told}: errors")
    return wrong


def check(case: tuple[BlockCodec, bool, torch.dtype, int], device: torch.device) -> tuple[str, list[str]]:
    codec, feedback, dtype, layout = case
    return f"{codec}, {feedback}, {dtype}, layout {layout}", differences(*case, device)


def main(device: torch.device) -> int:
    chosen, start = list(cases(device.type == "cuda")), time.monotonic()
    wrong: list[str] = []
    with contextlib.ExitStack() as stack:
        done = map(check, chosen, itertools.repeat(device))
        if device.type == "cuda":  # compilation takes nearly all of the time, each for itself
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(min(8, os.cpu_count() or 1), context))
            done = pool.map(check, chosen, itertools.repeat(device))
        for number, (name, found) in enumerate(done, 1):
            wrong += found
            if device.type == "cuda":
                print(f"{number} of {len(chosen)}, {time.monotonic() - start:.0f} s: {name}", flush=True)
    print(*wrong[:40], f"{len(chosen)} cases, {len(wrong)} differences", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(torch.device(sys.argv[1])))
