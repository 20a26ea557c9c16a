"""Block masks from where runs of keys begin, beside what every pair of tokens says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import settings
from support.live import Live
from support.reference import tiny_spec
from torch.nn.attention.flex_attention import BlockMask

from trainer.distributed.collectives import TensorGroup
from trainer.model import attention, context_attention
from trainer.model.attention import block_mask, first_seen, key_tables, mask_of, query_tables
from trainer.model.context_attention import ContextGroup, SharedMask
from trainer.planning import documents as masks
from trainer.planning.documents import block_size
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.estimate.memory import mask_bytes_by_layer as masks_of
from trainer.planning.resolve import resolve_layout


def dense(numbers: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """The blocks of a table, as bool [batch, rows, columns]; each is named once."""
    found = torch.zeros(numbers.shape[0], numbers.shape[2], columns, dtype=torch.int64)
    for batch, row in torch.cartesian_prod(*map(torch.arange, found.shape[:2])).tolist():
        for column in indices[batch, 0, row, : numbers[batch, 0, row]].tolist():
            found[batch, row, column] += 1
    assert found.max() <= 1
    return found.bool()


@given(st.data())
def test_tables_are_those_of_every_pair(data):
    size, ranks = data.draw(st.sampled_from([1, 2, 4, 8]), "block"), data.draw(st.integers(1, 4), "ranks")
    length = data.draw(st.integers(1, 6), "runs") * ranks * size - data.draw(st.integers(0, size - 1), "short")
    window = data.draw(st.integers(0, length + 2), "window")
    edges = data.draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length), "documents")
    documents = torch.tensor(edges).view(2, length).cumsum(1) if data.draw(st.booleans(), "packed") else None
    first = first_seen(documents, length, window, torch.device("cpu"))
    rank = data.draw(st.integers(0, ranks - 1), "rank")
    places = torch.arange(length)[torch.arange(length) // size % ranks == rank]
    first, seen = first[:, places], mask_of(first[:, places], places, length)[:, 0]
    rows, columns = -(-len(places) // size), -(-length // size)
    if rows == 0:
        return
    pairs = torch.zeros(len(seen), rows * size, columns * size, dtype=torch.bool)
    pairs[:, : len(places), :length] = seen
    blocks = pairs.view(len(seen), rows, size, columns, size).transpose(2, 3).flatten(3)
    behind = torch.arange(rows * size).view(rows, 1, size, 1) >= len(places)  # queries that are not there
    whole = (blocks | behind.expand(-1, columns, -1, size).flatten(2)).all(-1)
    for tables, wanted in (
        (query_tables(first, places, size, length), (blocks.any(-1), whole)),
        (key_tables(first, places, size, length), (blocks.any(-1).mT, whole.mT)),
    ):
        part, inside = dense(*tables[:2], wanted[0].shape[2]), dense(*tables[2:], wanted[0].shape[2])
        assert not (part & inside).any()
        assert torch.equal(part | inside, wanted[0]) and torch.equal(inside, wanted[1])


@pytest.mark.parametrize("queries, keys, size", [(2**17, 2**17, 128), (2**17, 2**20, 128), (2**20, 2**20, 512)])
def test_tables_of_a_million_tokens_are_bounded(queries, keys, size):
    assert block_size(1, queries, keys) == size
    assert 16 * (queries // size) * (keys // size) <= masks.TABLES == 2**27


@pytest.mark.parametrize("batch", [1, 3])
def test_making_a_mask_takes_little_more_than_it_holds(batch):
    """Beside the tables: a bool for each pair of blocks, for one table at a time, and the places of tokens."""
    queries, keys = 2**14, 2**17
    documents = (torch.arange(keys) // 1000).int().expand(batch, -1)
    places = torch.arange(keys).view(-1, 128)[::8].flatten()
    first = first_seen(documents, keys, 0, torch.device("cpu"))[:, places]
    pairs = batch * (queries // 128) * (keys // 128)
    with Live() as live:
        mask = block_mask(first, places, keys)
    held = sum(getattr(mask, f"{kind}{side}_indices").nbytes for kind in ("", "full_") for side in ("kv", "q"))
    assert held == 16 * pairs
    assert live.peak < held + pairs + 4 * (batch + 1) * queries + 64 * batch * keys // 128


def held(value: Any) -> dict[int, int]:
    """Bytes of all tensors in masks, by storage."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    parts: Iterable[Any] = ()
    if isinstance(value, BlockMask):
        parts = [*vars(value).values(), *(cell.cell_contents for cell in value.mask_mod.__closure__)]
    elif isinstance(value, SharedMask):
        parts = [value.order, value.inverse, value.parts]
    elif isinstance(value, tuple):
        parts = value
    return {place: size for part in parts for place, size in held(part).items()}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    "cp, way, window, packed",
    [
        (1, {}, 0, True),
        (1, {}, 300, False),
        (4, {"method": "allgather", "order": "blocks"}, 0, True),
        (4, {"method": "allgather", "order": "zigzag"}, 0, True),
        (4, {"method": "allgather", "order": "blocks"}, 0, False),
        (4, {"method": "ulysses"}, 0, True),
        (4, {"method": "allgather"}, 300, False),
    ],
)
def test_memory_of_masks_is_that_of_their_tensors(cp, way, window, packed, micro, monkeypatch):
    """Those that a GPU would have, made on a CPU; a rank in the middle, which has most."""
    length, device = 4096, torch.device("cpu")
    spec = tiny_spec(depth=3, max_length=length, attention={"window": window})
    sizes = {"batch__sequence_length": length, "batch__micro_size": micro, "data__mask_documents": packed}
    ways = {f"parallel__context__{name}": value for name, value in way.items()}
    config = settings(spec, parallel__cp=cp, **sizes, **ways)
    layout = resolve_layout(config, cp, spec, cp)
    for place in (attention, context_attention):
        monkeypatch.setattr(place, "mask_of", block_mask)
    documents = (torch.arange(length)[None] // 500).expand(micro, -1).int() if packed else None
    build = attention.build_mask
    if layout.context is not None:
        gathers = TensorGroup("", 1, layout.context.outer) if layout.context.outer > 1 else None
        build = ContextGroup(layout.context, 1, None, gathers).build_mask
    found = sum(held(build(documents, length, window, False, device)).values())
    assert masks_of(layout, packed) == [found, 0, 0]
    assert find_peaks(config, layout)[0].categories["activations"] > found > 16 * (length // 128) ** 2 // cp
