"""The index of a checkpoint: chunks hold every element once, however they were cut, or are refused."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.chunks import Chunk, StoredTensor, join_parts
from trainer.checkpointing.loading import load_tensors
from trainer.config import CheckpointConfig
from trainer.distributed.tensors import Fragment


@st.composite
def cuts(draw, most=3):
    """A shape, and the rectangles (offsets, sizes) that a tensor of it was cut into, along any dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=most)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[axis]))
        for begin, size in ((0, at), (at, sizes[axis] - at)):
            moved = tuple(offset + begin * (i == axis) for i, offset in enumerate(offsets))
            boxes.append((moved, tuple(size if i == axis else other for i, other in enumerate(sizes))))
    return shape, boxes


def stored(shape, boxes) -> StoredTensor:
    chunks = (Chunk(offsets, sizes, "file", 0, prod(sizes)) for offsets, sizes in boxes)
    return StoredTensor(torch.Size(shape), torch.int8, tuple(chunks))


@settings(deadline=None)
@given(cuts(), st.data())
def test_chunks_are_taken_if_they_hold_each_element_once(cut, data):
    shape, boxes = cut
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[place]
        moved = tuple(data.draw(st.integers(0, whole - size)) for whole, size in zip(shape, sizes))
        boxes[place] = (moved, sizes)
    seen = torch.zeros(shape)
    for offsets, sizes in boxes:
        seen[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))] += 1
    tensor = stored(shape, boxes)
    low = tuple(data.draw(st.integers(0, size)) for size in shape)
    high = tuple(data.draw(st.integers(first, size)) for first, size in zip(low, shape))
    if data.draw(st.booleans(), label="the whole"):
        low, high = (0,) * len(shape), shape
    region, wanted = seen[tuple(map(slice, low, high))], prod(map(int.__sub__, high, low))
    try:
        pieces = tensor.pieces(low, tuple(map(int.__sub__, high, low)))
    except ValueError:
        assert (region != 1).any()
    else:
        assert (region == 1).all() and sum(prod(map(int.__sub__, piece.high, piece.low)) for piece in pieces) == wanted


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_runs_of_elements_are_read_from_chunks_cut_elsewhere(tmp_path_factory, data):
    """As DeepSpeed shares a parameter out: each of several ranks holds a run of elements, without regard to rows."""
    folder = tmp_path_factory.mktemp("runs")
    shape = torch.Size(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    values = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
    checkpointer = Checkpointer(folder, CheckpointConfig())
    zero = torch.Size([0] * len(shape))
    checkpointer.save(1, {"whole": Fragment(values.flatten(), 0, shape, zero, shape)}, {}, wait=True)
    checkpointer.close()
    first = data.draw(st.integers(0, shape.numel()))
    last = data.draw(st.integers(first, shape.numel()))
    run = Fragment(torch.zeros(last - first), first, shape, zero, shape)
    load_tensors(folder / "step-00000001", {"whole": run})
    assert torch.equal(run.values, values.flatten()[first:last])


def test_what_ranks_have_written_must_be_the_whole():
    half = stored([4], [((0,), (2,))])
    assert join_parts([{"a": half}, {"a": stored([4], [((2,), (2,))])}])["a"].chunks[1].offsets == (2,)
    with pytest.raises(ValueError, match="a: its chunks hold 2 of 4"):
        join_parts([{"a": half}, {}])
    with pytest.raises(ValueError, match="a: its chunks hold 4 of 4 elements, or some of them twice"):
        join_parts([{"a": half}, {"a": half}])
    with pytest.raises(ValueError, match="another shape or dtype"):
        join_parts([{"a": half}, {"a": stored([2], [((0,), (2,))])}])


def test_a_type_that_checkpoints_do_not_know_fails_the_save(tmp_path):
    checkpointer = Checkpointer(tmp_path, CheckpointConfig())
    checkpointer.save(1, {"phase": torch.zeros(2, dtype=torch.complex64)}, {}, wait=True)
    (message,) = checkpointer.poll()
    assert "phase is torch.complex64; checkpoints hold float64, float32" in message
