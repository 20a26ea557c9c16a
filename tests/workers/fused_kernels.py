"""The kernels of `kernels/experimental/tensor_parallel.py` in Triton's interpreter, on processes that share memory,
beside plain products; and without one of their waits or signals, where they have to fail. Or compiled for a Hopper GPU,
which needs none: what the compiler has to make of them.

    TRITON_INTERPRET=1 fused_kernels.py cpu
    fused_kernels.py sm_90
"""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import torch
from support.triton_ranks import Memory, be_late, compare, compile_for_hopper, drawn, run, without

from trainer.kernels.exchange import check_error
from trainer.kernels.experimental import tensor_parallel as kernels
from trainer.kernels.experimental.tiles import RATES

Late = tuple[float, float]
"""By how many seconds: to the gathered products, then to the reduced ones."""

CALLS = {"wait_for_flag": 2, "signal_peer": 2}
"""What synchronises: how often the kernels call it."""
TOKENS, DEPTHS, WIDTHS = 24, (32, 16, 48), (48, 16, 32)
"""Of a rank: a tile and a half of rows; depths of operands, and widths of products, that are no whole tiles."""
TILE = {"rows": 16, "columns": 32, "step": 32, "group": 2, "programs": 2, "copiers": 2}


def memories(size: int) -> list[Memory]:
    """For gathers and for reductions, as large as they need to be."""
    shape = kernels.TileShape(**TILE)
    return [
        Memory(size, size * TOKENS * DEPTHS[0], shape.flags(TOKENS, shape.columns, size)),
        Memory(size, size * TOKENS * WIDTHS[0], shape.flags(TOKENS, WIDTHS[0], size)),
    ]


def work(
    made: ModuleType, rank: int, size: int, pull: bool, where: list[Memory], epochs: int, late: Late, limit: int
) -> None:
    """Some epochs of a rank without a barrier between them; the ranks are late in turn."""
    gathers, reductions = (one.region(rank) for one in where)
    for epoch in range(1, epochs + 1):
        shape = made.TileShape(**TILE, limit=limit)
        if epoch % size == rank:
            be_late(late[0])
        whole = drawn(epoch, size * TOKENS, DEPTHS[0])
        mine = whole.view(size, TOKENS, -1)[rank].contiguous()
        weights = [drawn(100 * rank + width, width, DEPTHS[0]) for width in WIDTHS]
        chosen = weights[: 1 + epoch % 3]
        products = made.gather_matmul(gathers, shape, epoch, mine, chosen, True, pull)
        for product, weight in zip(products, chosen):
            compare(product, whole @ weight.t(), f"gathered product in epoch {epoch}")
        parts = [
            [drawn(epoch + 10 * source + depth, size * TOKENS, depth) for depth in DEPTHS] for source in range(size)
        ]
        matrices = [[drawn(7 * source + depth, depth, WIDTHS[0]) for depth in DEPTHS] for source in range(size)]
        count = 1 + (epoch + 1) % 3
        if epoch % size == rank:
            be_late(late[1])
        made.matmul_scatter(reductions, shape, epoch, parts[rank][:count], matrices[rank][:count], False)
        reduced = made.sum_received(reductions, shape, epoch, torch.full((TOKENS, WIDTHS[0]), float("nan")))
        sums = sum(a @ b for some, of in zip(parts, matrices) for a, b in zip(some[:count], of))
        compare(reduced, sums.view(size, TOKENS, -1)[rank], f"reduced product in epoch {epoch}")
        for region in (gathers, reductions):
            check_error(region)


def said_by(made: ModuleType, size: int, pull: bool, epochs: int, late: Late, limit: int) -> list[str]:
    where = memories(size)
    return run(lambda rank: work(made, rank, size, pull, where, epochs, late, limit), size)


LLAMA = {
    **{"RANK": 1, "SIZE": 2, "TOKENS": 4096, "HALF": 8192 * 4096, "WIDTH": 4096, "LIMIT": 0, "PULL": False},
    **{"ROWS": 128, "COLUMNS": 256, "STEP": 64, "GROUP": 8, "PROGRAMS": 112, "COPIERS": 16, "PART": 16, "DEPTH": 4096},
}
"""Of an 8B model on two ranks, 8,192 tokens."""
CUTS = {
    "_gather_matmul": {"WIDTH0": 7168, "WIDTH1": 7168, "WIDTH2": 0, "TRANSPOSED": True},
    "_matmul_scatter": {"DEPTH0": 2048, "DEPTH1": 512, "DEPTH2": 512, "TRANSPOSED": False},
    "_sum_received": {"TRANSPOSED": False},
}

WAITS = {"_gather_matmul": 1, "_matmul_scatter": 0, "_sum_received": LLAMA["SIZE"]}
"""For how many tiles they wait before they take one: a first look at a flag each, and those of the loop."""
NARROW = {
    **{"DEPTH": 64, "DEPTH0": 64, "DEPTH1": 0, "DEPTH2": 0, "WIDTH": 64, "WIDTH0": 64, "WIDTH1": 0},
    **{"TOKENS": 16, "ROWS": 64, "COLUMNS": 128},
}
"""Of a model whose sums take one step, where Triton would take `for` loops over tiles ahead."""


def inspect(name: str, **choices: Any) -> None:
    multiplies = sends = name != "_sum_received"
    numbers = LLAMA | CUTS[name] | choices
    ptx, resources = compile_for_hopper(getattr(kernels, name), numbers)
    assert re.search(r"STACK:0 .*LOCAL:0", resources), f"{name} spills registers: {resources}"
    operations = re.findall(r"bar\.sync|[\w.]*release[\w.]*|st\.global[\w.]*|[\w.]*sys\.acquire[\w.]*|wgmma[\w.]*", ptx)
    assert any(one.startswith("wgmma.mma_async") for one in operations) == multiplies, name
    assert {one for one in operations if one.startswith("st.global")} == {"st.global.v4.b32"} or not sends, operations
    released = [place for place, one in enumerate(operations) if "release" in one and ".sys." in one]
    assert len(released) == sends, operations
    for place in released:
        assert "bar.sync" in operations[:place] and not operations[place - 1].startswith("st."), (
            f"{name} says that tiles are there before all warps have stored theirs"
        )
    looks = [one for one in operations if "acquire" in one and one.startswith("ld.")]
    assert len(looks) == 2 * WAITS[name], f"{name} waits for tiles ahead of the one it takes: {operations}"
    ahead = multiplies and numbers["DEPTH"] > numbers["STEP"]  # loads of the next steps beside a product
    assert ("cp.async.cg.shared" in ptx) == ahead, name
    assert "cp.async.bulk" not in ptx, f"{name} loads behind the back of acquire and release"


def main(what: str) -> None:
    torch.set_num_threads(1)
    if what == "sm_90":
        for name in CUTS:
            inspect(name)
        for name in ("_gather_matmul", "_matmul_scatter"):
            for rows, columns in RATES:
                inspect(name, WIDTH1=0, DEPTH1=0, DEPTH2=0, ROWS=rows, COLUMNS=columns)
            inspect(name, **NARROW)
        return
    for size, pull, epochs in ((2, False, 3), (3, True, 2)):
        said = said_by(kernels, size, pull, epochs, late=(0.1, 0.1), limit=10**7)
        assert not said, f"{size} ranks, pull={pull}:\n" + "\n".join(said)
    for name, latest, limit, words in (
        ("wait_for_flag", 60.0, 10000, "product in epoch 1: nan"),
        ("signal_peer", 0.0, 1000, "waited in vain for tile 0 of rank"),
    ):
        for number in range(CALLS[name]):
            late = (0.0, latest) if number else (latest, 0.0)
            said = said_by(without(kernels, name, number, CALLS[name]), 2, bool(number), 1, late, limit)
            assert any(words in one for one in said), f"nobody misses {name} {number}: {said}"


if __name__ == "__main__":
    main(sys.argv[1])
