"""A picture of which of four ranks computes which pairs of queries and keys of a shared sequence, and how even that is.

    python bench/sharing.py docs/sharing.png

Drawn from what a run shares by: the order of tokens (`ContextGroup.order`) and the first key of each query
(`first_seen`, `mask_of`), for a sequence of 64 tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from trainer.model.attention import first_seen, mask_of
from trainer.model.context import ContextGroup
from trainer.planning.context import Context
from trainer.plots.estimate import PARTS
from trainer.plots.files import save
from trainer.plots.runs import STYLE

RANKS, LENGTH, BLOCK, WINDOW = 4, 64, 2, 14
DOCUMENTS = [30, 6, 18, 4, 6]
"""Tokens of each, one after the other."""
CPU = torch.device("cpu")
COLOURS = torch.tensor([to_rgb(colour) for colour in PARTS[:RANKS]])


def holders(order: str, length: int = LENGTH) -> Tensor:
    """The rank that holds each token: int [length]."""
    group = ContextGroup(Context(1, RANKS, order, BLOCK, False, 1), 0, None, None)
    held = torch.empty(length, dtype=torch.int64)
    held[group.order(length, CPU)] = torch.arange(RANKS).repeat_interleave(length // RANKS)
    return held


def pairs(documents: bool, window: int) -> Tensor:
    """Which keys each query sees: bool [queries, keys]."""
    numbers = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))[None] if documents else None
    return mask_of(first_seen(numbers, LENGTH, window, CPU), torch.arange(LENGTH), LENGTH)[0, 0]


def busiest(computed: Tensor) -> float:
    """The pairs of the rank that computes most over the mean. computed: the rank of each pair, or -1."""
    counts = torch.bincount(computed[computed >= 0], minlength=RANKS).double()
    return (counts.max() / counts.mean()).item()


def by_tokens(order: str, seen: Tensor) -> Tensor:
    """The rank that computes each pair where each has its queries, -1 where there is none: int [queries, keys]."""
    return torch.where(seen, holders(order)[:, None], -1)


def by_heads(seen: Tensor) -> Tensor:
    """The same where each rank has a quarter of the heads, and all pairs: four small ones, at every second token."""
    small = seen[::2, ::2]
    quarters = [torch.where(small, rank, -1) for rank in range(RANKS)]
    return torch.cat([torch.cat(quarters[:2], 1), torch.cat(quarters[2:], 1)])


def panels() -> dict[str, Tensor]:
    """By title, a row of panels a kind of mask."""
    found = {}
    for what, seen in (("", pairs(False, 0)), (", documents", pairs(True, 0))):
        for order in ("contiguous", "zigzag", "blocks"):
            computed = by_tokens(order, seen)
            found[f"{order}{what}: {busiest(computed):.2f}"] = computed
        if not what:
            found["heads, a quarter each: 1.00"] = by_heads(seen)
    computed = by_tokens("zigzag", pairs(False, WINDOW))
    found[f"zigzag, window (halo): {busiest(computed):.2f}"] = computed
    return found


def draw(axes: Axes, computed: Tensor) -> None:
    picture = torch.where((computed >= 0)[..., None], COLOURS[computed.clamp(min=0)], 1.0)
    axes.imshow(picture.numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[], xlabel="keys", ylabel="queries")
    axes.grid(False)


def main(out: str) -> None:
    found = panels()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 5.6), layout="constrained")
        for axes, (title, computed) in zip(figure.subplots(2, 4).flat, found.items(), strict=True):
            draw(axes, computed)
            axes.set_title(title, fontsize=9)
        patches = [Patch(facecolor=colour) for colour in PARTS[:RANKS]]
        figure.legend(patches, [f"rank {rank}" for rank in range(RANKS)], ncols=RANKS, loc="outside lower center")
        save(figure, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
