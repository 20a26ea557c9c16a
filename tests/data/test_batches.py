"""The loader: global batches do not depend on ranks, a position is enough to resume, and failures surface by name."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import config, texts, write_jsonl, write_texts

from trainer.config import ConfigError, SourceConfig
from trainer.data.batches import BatchLoader, eval_batches
from trainer.data.corpus import CorpusSide, open_corpus
from trainer.data.tokens import DataError, TokenSample
from trainer.model.loss import IGNORE
from trainer.planning.plan import BatchPlan

LENGTH = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return open_corpus(
        config(
            folder,
            length=LENGTH,
            a=SourceConfig("jsonl", str(write_jsonl(folder / "a.jsonl", texts(60))), weight=2.0),
            b=SourceConfig("text", str(write_texts(folder / "files", texts(40, "other")))),
        )
    )


def plan(size: int, dp: int, accumulation: int) -> BatchPlan:
    return BatchPlan(LENGTH, size, size // dp // accumulation, accumulation)


def read(
    samples: CorpusSide, size: int, dp: int, accumulation: int, position: int, steps: int, **options
) -> list[dict[str, torch.Tensor]]:
    """Per step, all ranks' tokens by sample id."""
    loaders = [
        BatchLoader(samples, plan(size, dp, accumulation), rank, dp, seed=5, position=position, **options)
        for rank in range(dp)
    ]
    read_steps = []
    for step in range(steps):
        rows = [
            (sample, row)
            for loader in loaders
            for batch in next(loader)
            for sample, row in zip(batch.ids, batch.tokens)
        ]
        assert all(loader.position == position + (step + 1) * size for loader in loaders)
        assert len(rows) == size
        read_steps.append(rows)
    for loader in loaders:
        loader.close()
    return read_steps


def ids(steps) -> list[list[str]]:
    return [sorted(sample for sample, _ in step) for step in steps]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_global_batches_do_not_depend_on_the_layout(corpus, dp, accumulation):
    reference, steps = read(corpus.train, 96, 1, 1, 0, 3), read(corpus.train, 96, dp, accumulation, 0, 3, prefetch=1)
    assert ids(steps) == ids(reference)
    for expected, step in zip(reference, steps):
        tokens = {sample: row for sample, row in step}
        assert all(torch.equal(row, tokens[sample]) for sample, row in expected)


@given(
    st.integers(0, 5000),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([12, 24]),
    st.sampled_from([1, 2, 6]),
    st.sampled_from([12, 36]),
)
@settings(max_examples=15, deadline=None)
def test_resume_on_another_layout_reads_exactly_the_rest(corpus, position, dp, size, other_dp, other_size):
    whole = read(corpus.train, 1, 1, 1, position, 2 * size + 2 * other_size, prefetch=8)
    first = read(corpus.train, size, dp, 1, position, 2, prefetch=0)
    rest = read(corpus.train, other_size, other_dp, 1, position + 2 * size, 2)
    order = [sample for step in whole for sample, _ in step]
    assert ids(first) == [sorted(order[:size]), sorted(order[size : 2 * size])]
    assert ids(rest) == [sorted(order[2 * size : 2 * size + other_size]), sorted(order[2 * size + other_size :])]


def test_each_source_is_read_whole_once_per_epoch_and_by_weight(corpus):
    counted = [sample for step in read(corpus.train, 12, 2, 1, 0, 100) for sample, _ in step]
    shares = {name: sum(sample.startswith(f"{name}:") for sample in counted) for name in "ab"}
    assert abs(shares["a"] - 800) <= 2 and abs(shares["b"] - 400) <= 2
    for name, source in zip("ab", corpus.train.sources):
        mine = [int(sample.split(":")[1]) for sample in counted if sample.startswith(f"{name}:")]
        assert sorted(mine[: source.length]) == list(range(source.length))
        assert mine[: source.length] != mine[source.length : 2 * source.length]


def test_seeds_differ(corpus):
    first, second = (next(BatchLoader(corpus.train, plan(24, 1, 1), 0, 1, seed=seed))[0].ids for seed in (1, 2))
    assert first != second


def test_targets_follow_tokens(corpus):
    loader = BatchLoader(corpus.train, plan(24, 1, 2), 0, 1, seed=0)
    batches = next(loader)
    assert [batch.tokens.shape for batch in batches] == [(12, LENGTH)] * 2
    for batch in batches:
        assert batch.documents is None and batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1]) and (batch.targets >= 0).all()
        assert batch.tokens.is_contiguous() and batch.targets.is_contiguous()
    assert 0 < loader.epoch == 24 / len(corpus.train) and loader.wait_seconds > 0
    loader.close()


def test_masked_documents_ignore_only_what_crosses(corpus):
    end, crossings = corpus.tokenizer.end_id, 0
    for batch in next(BatchLoader(corpus.train, plan(48, 1, 2), 0, 1, seed=0, mask_documents=True)):
        assert batch.documents.dtype == torch.int32 and batch.documents.shape == batch.tokens.shape
        assert torch.equal(batch.targets == IGNORE, batch.tokens == end), "after an end mark another document starts"
        assert torch.equal(
            batch.targets[:, :-1][batch.targets[:, :-1] != IGNORE], batch.tokens[:, 1:][batch.targets[:, :-1] != IGNORE]
        )
        steps = batch.documents.diff(dim=1)
        assert torch.equal(steps == 1, batch.tokens[:, :-1] == end) and steps.min() >= 0
        crossings += int((batch.targets == IGNORE).sum())
    assert crossings > 10


@pytest.mark.parametrize("sequences", [1, 5, 17, 10**6])
def test_evaluation_is_the_same_on_any_number_of_ranks(corpus, sequences):
    def collect(dp: int, micro: int):
        ranks = [list(eval_batches(corpus.eval, sequences, micro, rank, dp, mask_documents=True)) for rank in range(dp)]
        assert len({len(batches) for batches in ranks}) == 1
        assert all(
            batch.tokens.shape == (micro, LENGTH) and batch.tokens.min() >= 0 for batches in ranks for batch in batches
        )
        rows = [row for batches in ranks for batch in batches for row in zip(batch.ids, batch.targets, batch.documents)]
        assert all((targets == IGNORE).all() for sample, targets, _ in rows if sample == "padding")
        return {sample: targets for sample, targets, _ in rows if sample != "padding"}

    reference = collect(1, 1)
    assert len(reference) == min(sequences, len(corpus.eval))
    for dp, micro in ((2, 1), (3, 2), (8, 4)):
        other = collect(dp, micro)
        assert other.keys() == reference.keys() and all(
            torch.equal(other[sample], row) for sample, row in reference.items()
        )


class Breaking:
    """Sequences of which one, and then none, cannot be read."""

    name, length = "breaking", 50

    def __init__(self):
        self.broken, self.reads = set(), 0

    def get(self, index: int):
        self.reads += 1
        if index in self.broken:
            raise DataError(f"file {index} vanished")
        return TokenSample(np.full(LENGTH + 1, index, np.int64), np.zeros(LENGTH + 1, np.int32))


def test_errors_of_the_thread_surface_and_lose_nothing():
    source = Breaking()
    expected = [next_ids for next_ids in ids(read(CorpusSide([source], [1.0]), 5, 1, 1, 0, 4))]
    source.broken.add(int(expected[2][0].split(":")[1]))
    loader = BatchLoader(CorpusSide([source], [1.0]), plan(5, 1, 1), 0, 1, seed=5, prefetch=2)
    assert [sorted(next(loader)[0].ids) for _ in range(2)] == expected[:2]
    with pytest.raises(DataError, match="vanished"):
        next(loader)
    assert loader.position == 10
    source.broken.clear()
    assert [sorted(next(loader)[0].ids) for _ in range(2)] == expected[2:], "no step is skipped"
    loader.close()


def test_prefetch_reads_ahead_and_no_further():
    for depth in (0, 1, 3):
        source = Breaking()
        loader = BatchLoader(CorpusSide([source], [1.0]), plan(5, 1, 1), 0, 1, seed=5, prefetch=depth)
        next(loader)
        deadline = time.monotonic() + 5
        while source.reads < 5 * (1 + depth) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert source.reads == 5 * (1 + depth) and loader.position == 5
        loader.close()


def test_a_vanished_token_file_is_named(tmp_path):
    opened = open_corpus(
        config(tmp_path, length=LENGTH, a=SourceConfig("jsonl", str(write_jsonl(tmp_path / "a.jsonl", texts(60)))))
    )
    [path] = (tmp_path / "cache").glob("tokens/*/shard-00000.train.bin")
    path.unlink()
    loader = BatchLoader(opened.train, plan(4, 1, 1), 0, 1, seed=0)
    with pytest.raises(DataError, match=f"token file {path} vanished"):
        next(loader)
    loader.close()


def test_token_ids_beyond_the_tokenizer_are_named(tmp_path):
    """Also where a file changes after its ids were checked."""
    np.full(400, 200, np.uint16).tofile(tmp_path / "a.bin")
    settings = config(tmp_path, length=LENGTH, a=SourceConfig("tokens", str(tmp_path / "a.bin")))
    opened, message = open_corpus(settings), "a.bin holds token 300, beyond the tokenizer's 257; data.tokenizer is not"
    np.full(400, 300, np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=message):
        next(BatchLoader(opened.train, plan(4, 1, 1), 0, 1, seed=0))
    with pytest.raises(ConfigError, match=message):
        open_corpus(settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_the_gpu(corpus):
    loader = BatchLoader(corpus.train, plan(24, 1, 2), 0, 1, seed=0, mask_documents=True, device="cuda")
    here = next(BatchLoader(corpus.train, plan(24, 1, 2), 0, 1, seed=0, mask_documents=True))
    for there, batch in zip(next(loader), here):
        assert (
            there.tokens.is_cuda
            and torch.equal(there.tokens.cpu(), batch.tokens)
            and torch.equal(there.targets.cpu(), batch.targets)
        )
        assert torch.equal(there.documents.cpu(), batch.documents)
    loader.close()
