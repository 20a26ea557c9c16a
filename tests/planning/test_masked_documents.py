"""Masked documents in predictions: what attention computes of them, what is known of them, and what was measured."""

from __future__ import annotations

import pytest
import torch
from support.estimates import h200, settings, shipped
from support.reference import changed

from trainer.config import Config
from trainer.model.attention import block_mask, first_seen
from trainer.planning.documents import DocumentLengths, computed_keys, document_ranges, fit_documents
from trainer.planning.estimate.timing import time_units
from trainer.planning.resolve import config_problems, resolve_layout

SHORT = DocumentLengths(3000.0, 2000.0)


def lengths_given(mean: float | None, median: float | None, masked: bool) -> Config:
    names = {"mask_documents": masked, "documents__mean": mean, "documents__median": median}
    return changed(Config(), {f"data__{name}": value for name, value in names.items()})


@pytest.mark.parametrize("documents", [None, SHORT, DocumentLengths(300.0, 300.0), DocumentLengths(18900.0, 8100.0)])
@pytest.mark.parametrize("window", [0, 100, 1000, 5000])
@pytest.mark.parametrize("length", [1000, 8192])
def test_keys_are_those_of_the_blocks_of_real_masks(documents, window, length):
    """Counted in masks of FlexAttention, of the same documents."""
    parts = list(document_ranges(documents, length)) if documents else [(0, length)]
    sequences, current = [], []
    for start, end in parts[:200]:
        current.append(end - start)
        if end == length:
            sequences.append(current)
            current = []
    blocks = seen = 0.0
    for sizes in sequences:
        numbers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[None]
        first = first_seen(numbers, length, window if window < length else 0, numbers.device)
        places = torch.arange(length)
        mask = block_mask(first, places, length)
        blocks += (mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()).item()
        seen += (places + 1 - first).sum().item()
    if len(parts) <= 200:
        assert computed_keys(length, window, documents, 128) == pytest.approx(blocks * 128**2 / length / len(sequences))
        assert computed_keys(length, window, documents, 1) == pytest.approx(seen / length / len(sequences))
    else:
        exact = computed_keys(length, window, documents, 128), computed_keys(length, window, documents, 1)
        found = blocks * 128**2 / length / len(sequences), seen / length / len(sequences)
        assert found == pytest.approx(exact, rel=0.3)


def test_documents_are_as_long_as_they_are_said_to_be():
    sizes = [end - start for start, end in document_ranges(SHORT, 2**20)]
    assert sum(sizes) / len(sizes) == pytest.approx(3000, rel=0.03)
    assert sorted(sizes)[len(sizes) // 2] == pytest.approx(2000, rel=0.03)
    keys = sum(size * (size + 1) / 2 for size in sizes) / sum(sizes)
    assert computed_keys(2**20, 0, SHORT, 1) == pytest.approx(keys, rel=0.01)
    for documents in (SHORT, DocumentLengths(500.0, 500.0), DocumentLengths(18900.0, 8100.0)):
        again = fit_documents(documents.mean, computed_keys(2**17, 0, documents, 1), 2**17)
        assert tuple(again) == pytest.approx(tuple(documents), rel=0.05)


def test_lengths_without_a_meaning_are_refused():
    wrong = {
        (None, 10.0, True): "needs a mean",
        (10.0, 20.0, True): "must not be above",
        (10.0, None, False): "set data.mask_documents=true",
        (0.5, None, True): r"data.documents.mean=0.5",
    }
    for (mean, median, masks), text in wrong.items():
        found = config_problems(lengths_given(mean, median, masks))
        assert any(text in problem for problem in found), (mean, median, found)
    assert not [text for text in config_problems(lengths_given(10.0, 5.0, True)) if "documents" in text]


def seconds(world: int, **changes: object) -> float:
    """Of a layer of Llama-3 8B on 131,072 tokens, forward and backward, repeated whole, eager."""
    sizes = {"batch__sequence_length": 131072, "batch__micro_size": 1, "batch__accumulation": 1}
    off = {"loss__tile": 0, "activation__tile": 0, "activation__offload": False, "activation__mode": "full"}
    config = settings(shipped("llama3_8b"), **sizes, **off, parallel__cp=world, **changes)
    layer = time_units(config, resolve_layout(config, world, config.model), h200()).units[1]
    return sum(sum(passes.values()) for passes in (layer.forward, layer.input, layer.weight))


def drawn(length: int = 131072) -> DocumentLengths:
    """The 53 documents that bench/context.py draws."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.rand(1, length, generator=generator) < 1 / 3000).cumsum(1)[0]
    sizes = numbers.unique(return_counts=True)[1].double()
    return fit_documents(sizes.mean().item(), (sizes * (sizes + 1)).sum().item() / 2 / length, length)


@pytest.mark.parametrize("world, order, measured", [(1, "auto", 0.441), (2, "zigzag", 0.239), (2, "blocks", 0.235)])
def test_measured_layers_of_short_documents(world, order, measured):
    """bench/results/2026-11-h200-h100.md, sequences shared by several GPUs; the whole sequence as one document took
    1.54 s."""
    found = drawn()
    lengths = {"data__documents__mean": found.mean, "data__documents__median": found.median}
    way = {"parallel__context__method": "allgather", "parallel__context__order": order} if world > 1 else {}
    assert seconds(world, data__mask_documents=True, **lengths, **way) == pytest.approx(measured, rel=0.08)
    assert seconds(world, **way) > 3 * measured


def test_shorter_documents_take_less_and_one_takes_the_whole_sequence():
    found = [seconds(1, data__mask_documents=True, data__documents__mean=float(n)) for n in (128, 3000, 30000, 2**30)]
    assert found == sorted(found) and found[-1] > 3 * found[0]
    plain = seconds(1)
    assert plain < found[-1] < 1.5 * plain  # at the rate of another kernel
