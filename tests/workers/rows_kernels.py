"""The kernels of `kernels/rows.py` beside the same in torch, in Triton's interpreter or on a GPU.

TRITON_INTERPRET=1 rows_kernels.py cpu
rows_kernels.py cuda
"""

from __future__ import annotations

import sys

import torch

from trainer.distributed.rows import add_rows
from trainer.kernels import rows as kernels


def table_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The addresses of tensors, as kernels read them."""
    return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64, device=tensors[0].device)


def compare(device: str, ranks: int, tokens: int, choices: int, width: int, each: int, dtype: torch.dtype) -> None:
    """What rank 0 of `ranks` does with `each` experts of its own. One of its choices has no row."""
    make = torch.Generator().manual_seed(ranks + tokens)
    chosen = torch.stack([torch.randperm(ranks * each, generator=make)[:choices] for _ in range(ranks * tokens)])
    own = chosen.flatten() < each
    rows_of = own.nonzero().flatten()[torch.randperm(int(own.sum()), generator=make)][:-1]
    places = torch.full((ranks * tokens * choices,), -1).scatter_(0, rows_of, torch.arange(len(rows_of)))
    places, chosen = places.view(-1, choices).to(device), chosen.to(device)
    parts = [torch.randn(tokens, width, generator=make).to(device, dtype) for _ in range(ranks)]
    everything = torch.cat(parts)

    for peers, source in ((True, table_of(parts)), (False, everything)):
        rows = torch.full((len(rows_of) + 3, width), torch.nan, dtype=dtype, device=device)
        kernels.copy_to_rows(source.data_ptr(), peers, places, tokens if peers else len(everything), rows)
        assert torch.equal(rows[:-3], everything[rows_of.to(device) // choices])
        assert rows[-3:].isnan().all()

    sums = add_rows(rows[:-3], places)
    result = torch.full_like(everything, torch.nan)
    kernels.add_up_rows(rows, places, len(places), result.data_ptr(), False)
    torch.testing.assert_close(result, sums)
    received = [torch.full((ranks, tokens, width), torch.nan, dtype=dtype, device=device) for _ in range(ranks)]
    slot = ranks - 1
    inboxes = table_of(received)
    kernels.add_up_rows(rows, places, tokens, inboxes.data_ptr(), True, slot)
    found = (places >= 0).any(1).view(ranks, tokens)
    for rank, one in enumerate(received):
        torch.testing.assert_close(one[slot][found[rank]], sums.view(ranks, tokens, width)[rank][found[rank]])
        assert one[slot][~found[rank]].isnan().all() and one[:slot].isnan().all()

    inbox = torch.randn(ranks, tokens, width, generator=make).to(device, dtype)
    mine = chosen[:tokens]
    sent = torch.stack([(mine // each == rank).any(1) for rank in range(ranks)])
    inbox = inbox.masked_fill(~sent[..., None], torch.nan)  # nobody has written there
    expected = torch.where(sent[..., None], inbox, 0).sum(0, dtype=torch.float32).to(dtype)
    torch.testing.assert_close(kernels.add_parts(inbox, mine, each), expected)


def main(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        compare(device, 1, 5, 2, 8, 4, dtype)
        compare(device, 2, 7, 3, 72, 3, dtype)
        compare(device, 4, 3, 8, 24, 4, dtype)
    if device == "cuda":
        compare(device, 2, 4096, 8, 2048, 64, torch.bfloat16)
        compare(device, 2, 1024, 6, 7168, 32, torch.bfloat16)
    print("the kernels of rows are right")


main(*sys.argv[1:])
