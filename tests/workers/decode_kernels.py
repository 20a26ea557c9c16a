"""The kernels of `kernels/decode.py` in Triton's interpreter, alone and on processes that share the slots, beside
attention in torch; without their wait or signal, where they have to fail; and compiled for a Hopper GPU, which needs
none.

    TRITON_INTERPRET=1 decode_kernels.py cpu
    decode_kernels.py sm_90
    decode_kernels.py cuda
"""

from __future__ import annotations

import re
import sys
from types import ModuleType

import torch
from support.triton_ranks import Memory, be_late, compare, compile_for_hopper, count_by_tensors, drawn, run, without

from trainer.distributed.sharded_kv import merge_attention
from trainer.kernels import decode as kernels
from trainer.kernels.exchange import check_error
from trainer.model.cache import add_sinks, attend_kv

ROWS, HEADS, KV_HEADS, DIM, SLOTS = 3, 6, 2, 20, 90
CASES = [{"window": window, "soft_cap": soft_cap} for window in (0, 1, 37) for soft_cap in (0.0, 5.0)]


def inputs(size: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of all ranks, and the place of each query: the first sees itself alone."""
    keys, values = (drawn(7 * epoch + number, ROWS, KV_HEADS, size * SLOTS, DIM) for number in (1, 2))
    places = torch.tensor([0, size * SLOTS // 2 + epoch, size * SLOTS - 1])
    return drawn(epoch, ROWS, HEADS, 1, DIM), keys, values, places


def work(made: ModuleType, rank: int, size: int, where: Memory, epochs: int, late: float, limit: int) -> None:
    """Some epochs of a rank without a barrier between them; the ranks are late in turn. Heads have sinks in every
    second one."""
    region = where.region(rank)
    for epoch in range(1, epochs + 1):
        query, keys, values, places = inputs(size, epoch)
        case, slots = CASES[epoch % len(CASES)], torch.arange(size * SLOTS)
        seen = slots <= places[:, None]
        if case["window"]:
            seen &= slots > places[:, None] - case["window"]
        expected, logsum = attend_kv(query, keys, values, seen[:, None, None], 0.3, case["soft_cap"])
        sinks = drawn(epoch, HEADS)
        if epoch % 2:
            expected, _ = merge_attention(*add_sinks(expected, logsum, sinks))
        mine = (x[:, :, rank::size].contiguous() for x in (keys, values))
        if epoch % size == rank:
            be_late(late)
        parts = made.attend_kv_parts(query, *mine, places, 0.3, case["soft_cap"], case["window"], rank, size)
        if epoch % 2:
            parts = add_sinks(*parts, sinks if rank == 0 else torch.full_like(sinks, -torch.inf))
        if size == 1:
            found = made.combine_parts(*parts, torch.float32)
        else:
            found = made.combine_parts(*parts, torch.float32, region, epoch, limit)
            check_error(region)
        compare(found, expected, f"attention in epoch {epoch}")


def said_by(made: ModuleType, size: int, epochs: int, late: float, limit: int) -> list[str]:
    where = Memory(size, made.buffer_elements(ROWS, HEADS, DIM, size), made.flag_count(ROWS, HEADS, size))
    return run(lambda rank: work(made, rank, size, where, epochs, late, limit), size)


LLAMA = {"DIM": 128, "RANK": 1, "SIZE": 2}
"""Of an 8B model whose cache two ranks share, or one has."""
CUTS = [
    *(
        (
            "_attend_kv_parts",
            LLAMA
            | {"GROUP": 4, "PARTS": 33, "CAPPED": False, "QUERIES": 16}
            | {"DIM": dim, "WIDTH": dim, "SLOTS": slots, "dtype": dtype},
            warps,
        )
        for dim, slots, dtype, warps in ((128, 64, "*bf16", 4), (256, 64, "*bf16", 4), (256, 32, "*fp32", 8))
    ),
    *(
        (
            "_combine",
            LLAMA
            | {"SIZE": size, "COUNT": 32, "PARTS": parts, "HALF": 2 * 32 * 129, "LIMIT": 0}
            | {"AT_ONCE": at_once, "WIDTH": 128},
            min(16, at_once * 128 // 2048),
        )
        for size, parts, at_once in ((1, 33, 64), (2, 33, 64), (1, 264, 512))
    ),
]
TYPES = {"positions": "*i64", "attended": "*fp32", "logsum": "*fp32", "scale": "fp32", "soft_cap": "fp32"} | {
    name: "i32" for name in ("row_stride", "head_stride", "window")
}


def inspect(name: str, numbers: dict, warps: int) -> None:
    numbers, types = dict(numbers), TYPES
    if dtype := numbers.pop("dtype", ""):
        types = TYPES | dict.fromkeys(("query", "key", "value"), dtype)
    ptx, resources = compile_for_hopper(getattr(kernels, name), numbers, types, warps)
    assert re.search(r"STACK:0 .*LOCAL:0", resources), f"{name} {numbers} spills registers: {resources}"
    if name == "_attend_kv_parts":
        assert dtype == "*fp32" or "mma.sync" in ptx or "wgmma" in ptx
        assert "cp.async" in ptx, "keys are not loaded ahead"
    sends = name == "_combine" and numbers["SIZE"] > 1
    operations = re.findall(r"bar\.sync|[\w.]*release[\w.]*|st\.global[\w.]*|[\w.]*sys\.acquire[\w.]*", ptx)
    released = [place for place, one in enumerate(operations) if "release" in one and ".sys." in one]
    assert len(released) == sends and all("bar.sync" in operations[:place] for place in released), operations


def on_gpu() -> None:
    """Attention of every type beside torch's in fp32 of the same numbers."""
    device, worst = torch.device("cuda", 0), dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0.0)
    generator = torch.Generator(device).manual_seed(0)
    for heads, kv_heads, dim, slots in ((32, 8, 128, 5000), (12, 12, 64, 300), (8, 1, 96, 20_000), (6, 2, 256, 77)):
        for dtype in worst:
            for case in CASES:
                query, keys, values = (
                    torch.randn(2, count, length, dim, device=device, generator=generator).to(dtype)
                    for count, length in ((heads, 1), (kv_heads, slots), (kv_heads, slots))
                )
                places = torch.tensor([slots - 1, slots // 3], device=device)
                seen = torch.arange(slots, device=device) <= places[:, None]
                if case["window"]:
                    seen &= torch.arange(slots, device=device) > places[:, None] - case["window"]
                wide = (x.double() for x in (query, keys, values))
                expected, _ = attend_kv(*wide, seen[:, None, None], dim**-0.5, case["soft_cap"])
                parts = kernels.attend_kv_parts(
                    query, keys, values, places, dim**-0.5, case["soft_cap"], case["window"]
                )
                found = kernels.combine_parts(*parts, torch.float32)
                error = ((found - expected).norm() / expected.norm()).item()
                worst[dtype] = max(worst[dtype], error)
    print({str(dtype): f"{error:.1e}" for dtype, error in worst.items()})
    assert worst[torch.float32] < 1e-5 and worst[torch.float16] < 2e-3 and worst[torch.bfloat16] < 1e-2


def main(what: str) -> None:
    torch.set_num_threads(1)
    if what == "cuda":
        on_gpu()
        return
    if what == "sm_90":
        for cut in CUTS:
            inspect(*cut)
        return
    count_by_tensors()
    for size, epochs in ((1, len(CASES)), (2, len(CASES)), (3, 3)):
        said = said_by(kernels, size, epochs, late=0.1, limit=10**7)
        assert not said, f"{size} ranks:\n" + "\n".join(said)
    for name, late, limit, words in (
        ("wait_for_flag", 60.0, 10000, "attention in epoch 1: nan"),
        ("signal_peer", 0.0, 1000, "waited in vain for tile 0 of rank"),
    ):
        said = said_by(without(kernels, name, 0, 1), 2, 1, late, limit)
        assert any(words in one for one in said), f"nobody misses {name}: {said}"


if __name__ == "__main__":
    main(sys.argv[1])
