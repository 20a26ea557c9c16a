"""The kernels of `kernels/multi_tensor.py` beside casts and sums by torch, bit by bit: on a GPU, or in Triton's
interpreter with TRITON_INTERPRET=1, which rounds conversions to bf16 toward zero, so that fp16 stands for it. And
compiled for a Hopper GPU, which needs none: whether they move 16 bytes at a time.

    TRITON_INTERPRET=1 shard_kernels.py cpu
    shard_kernels.py sm_90
    shard_kernels.py cuda
"""

from __future__ import annotations

import itertools
import re
import sys

import torch
from support.triton_ranks import compile_for_hopper

from trainer.kernels import multi_tensor as kernels

SIZES = (1, 4095, 4096, 10_000)


def compare(device: torch.device) -> None:
    narrow = torch.bfloat16 if device.type == "cuda" else torch.float16
    draw = torch.Generator(device).manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=draw)

    for size, start in itertools.product(SIZES, (0, 3)):  # where tensors begin, in elements
        source, narrowed = drawn(size + start)[start:], drawn(2, size + start).to(narrow)
        kernels.cast_twice(source, *narrowed[:, start:])
        assert all(torch.equal(one[start:], source.to(narrow)) for one in narrowed), (size, start)
        for ranks, wide, adds in itertools.product((2, 3, 4), (torch.float32, narrow), (False, True)):
            parts = drawn(ranks, size + start + 5).to(narrow)  # further apart than they are long
            expected = parts[0].float()
            for part in parts[1:]:
                expected = expected + part
            earlier = drawn(len(expected)).to(wide)
            expected = expected + earlier.float() if adds else expected
            for rank in range(ranks):
                arrived = torch.stack([parts[(rank + step) % ranks] for step in range(1, ranks)])[:, start:][:, :size]
                total = torch.full((size + 2,), float("nan"), dtype=wide, device=device)
                if adds:
                    total[1:-1] = earlier[start:][:size]
                kernels.add_up(parts[rank, start:][:size], arrived, total[1:-1], rank, adds)
                assert torch.equal(total[1:-1], expected[start:][:size].to(wide)), (size, start, ranks, rank, wide)
                assert total[[0, -1]].isnan().all(), "writes beside what it adds up"


def inspect() -> None:
    types = {"count": "i32", "stride": "i32", "source": "*fp32", "total": "*fp32"}
    for name, numbers in (
        ("_cast", {}),
        *(("_add_up", {"RANK": 1, "SIZE": size, "ADDS": adds}) for size in (2, 8) for adds in (0, 1)),
    ):
        numbers = {"TILE": kernels.TILE, **numbers}
        ptx, resources = compile_for_hopper(getattr(kernels, name), numbers, types, whole=("count", "stride"))
        assert re.search(r"STACK:0 .*LOCAL:0", resources), f"{name} spills registers: {resources}"
        moved = set(re.findall(r"(?:ld|st)\.global[.\w]*", ptx))
        assert moved == {"ld.global.v4.b32", "st.global.v4.b32"}, f"{name}: {moved}"


if __name__ == "__main__":
    inspect() if sys.argv[1] == "sm_90" else compare(torch.device(sys.argv[1]))
