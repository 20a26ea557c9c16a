"""Streams: packed in the order of arrival whatever the ranks, resumable from a position, without touching held-out
documents."""

import json

import datasets
import pytest
from support.corpora import config, texts

from trainer.config import ConfigError, SourceConfig
from trainer.data import corpus as corpus_module
from trainer.data.batches import BatchLoader
from trainer.data.corpus import open_corpus
from trainer.data.documents import HubStream, digest_text
from trainer.data.tokens import DataError
from trainer.planning.plan import BatchPlan

LENGTH = 16
ROWS = texts(300)


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "hub").mkdir()
    for part in range(2):  # two files: the reader's state has to know in which it is
        datasets.Dataset.from_dict({"body": ROWS[part * 150 : (part + 1) * 150]}).to_parquet(
            str(tmp_path / "hub" / f"train-{part}.parquet")
        )
    made = config(
        tmp_path, length=LENGTH, stream=SourceConfig("hub", str(tmp_path / "hub"), field="body", streaming=True)
    )
    made.eval.every, made.eval.sequences = 5, 12
    return made


def packed(corpus, count):
    return [corpus.train.sources[0].get(index)[0] for index in range(count)]


def expected(tokenizer, threshold):
    return [
        token for row in ROWS if digest_text(row) >= threshold for token in [*tokenizer.encode(row), tokenizer.end_id]
    ]


def test_documents_are_packed_in_order_and_start_again(settings):
    corpus = open_corpus(settings)
    ids = expected(corpus.tokenizer, corpus.train.sources[0].threshold)
    count = int(1.5 * len(ids) / LENGTH)
    read = [token for tokens in packed(corpus, count) for token in tokens[:-1].tolist()]
    assert read == (ids + ids)[: len(read)] and len(read) > len(ids)
    tokens, documents, _ = corpus.train.sources[0].get(0)
    assert documents.tolist() == [int((tokens[:at] == 256).sum()) for at in range(LENGTH + 1)]


def test_held_out_documents_are_never_trained_on(settings):
    corpus = open_corpus(settings)
    assert len(corpus.eval) >= 12
    held = [corpus.tokenizer.decode(corpus.eval.get(index)[0]) for index in range(len(corpus.eval))]
    ids = expected(corpus.tokenizer, corpus.train.sources[0].threshold)
    trained = corpus.tokenizer.decode(ids)
    named = [row.split(":")[0] + ":" for row in ROWS if digest_text(row) < corpus.train.sources[0].threshold]
    assert any(name in "".join(held) for name in named) and not any(name in trained for name in named)
    assert corpus.fingerprint == open_corpus(settings).fingerprint


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "unnoted"])
def test_resume_reads_exactly_the_rest_on_any_layout(settings, monkeypatch, noted):
    monkeypatch.setattr(corpus_module, "NOTE_EVERY", 20 if noted else 10**9)
    monkeypatch.setattr(corpus_module, "GROUP", 8)
    reference = packed(open_corpus(settings), 400)
    size, position = 12, 0
    for dp in (1, 3, 2):
        corpora = [open_corpus(settings) for _ in range(dp)]  # each rank is a process of its own
        loaders = [
            BatchLoader(corpus.train, BatchPlan(LENGTH, size, size // dp, 1), rank, dp, seed=0, position=position)
            for rank, corpus in enumerate(corpora)
        ]
        for _ in range(8):
            rows = {
                int(sample.split(":")[1]): row
                for loader in loaders
                for batch in next(loader)
                for sample, row in zip(batch.ids, batch.tokens)
            }
            assert sorted(rows) == list(range(position, position + size))
            assert all((row.numpy() == reference[index][:-1]).all() for index, row in rows.items())
            position += size
        assert all(loader.epoch is None and loader.position == position for loader in loaders)
        for loader in loaders:
            loader.close()


def test_a_noted_state_saves_reading_again(settings, monkeypatch):
    monkeypatch.setattr(corpus_module, "NOTE_EVERY", 20)
    monkeypatch.setattr(corpus_module, "GROUP", 8)
    reference = packed(open_corpus(settings), 300)
    assert len(list(open_corpus(settings).train.sources[0].notes.glob("*.json"))) > 5
    read = []
    monkeypatch.setattr(
        HubStream,
        "texts",
        lambda self, rows, plain=HubStream.texts: (read.append(text) or text for text in plain(self, rows)),
    )
    assert (open_corpus(settings).train.sources[0].get(299)[0] == reference[299]).all()
    assert 0 < len(read) < 60


def test_a_stream_beside_a_corpus(settings):
    settings.data.sources["library"] = SourceConfig(
        "hub", settings.data.sources["stream"].path, field="body", weight=3.0
    )
    corpus = open_corpus(settings)
    assert corpus.train.endless and len(corpus.train) == corpus.train.sources[0].length
    loader = BatchLoader(corpus.train, BatchPlan(LENGTH, 40, 40, 1), 0, 1, seed=0)
    ids = [sample for _ in range(3) for batch in next(loader) for sample in batch.ids]
    assert [sample for sample in ids if sample.startswith("stream")] == [f"stream:{index}" for index in range(30)]
    loader.close()


def test_limit(settings):
    settings.data.sources["stream"].limit, settings.data.eval_fraction, settings.eval.every = 10, 0.0, 0
    corpus = open_corpus(settings)
    ids = [token for row in ROWS[:10] for token in [*corpus.tokenizer.encode(row), 256]]
    read = [token for tokens in packed(corpus, 2 * len(ids) // LENGTH) for token in tokens[:-1].tolist()]
    assert read == (ids * 2)[: len(read)]


def test_a_tokenizer_is_trained_on_the_first_documents(settings):
    settings.data.tokenizer, settings.data.vocab_size = "bpe", 280
    corpus = open_corpus(settings)
    assert corpus.vocab_size == 280
    ids = expected(corpus.tokenizer, corpus.train.sources[0].threshold)
    assert [token for tokens in packed(corpus, 20) for token in tokens[:-1].tolist()] == ids[: 20 * LENGTH]


def test_a_stream_that_breaks_off_can_be_read_on(settings, monkeypatch):
    corpus, rows = open_corpus(settings), HubStream.rows
    reference = packed(corpus, 200)

    def breaking(self, dataset):
        def some():
            for number, row in enumerate(dataset):
                if number == 100:
                    raise OSError("connection reset")
                yield row

        return rows(self, some())

    again = open_corpus(settings).train.sources[0]
    monkeypatch.setattr(HubStream, "rows", breaking)
    with pytest.raises(DataError, match="data.sources.stream: the stream .* broke off: connection reset"):
        for index in range(200):
            again.get(index)
    monkeypatch.undo()
    assert all((again.get(number)[0] == reference[number]).all() for number in range(index, 200))


def test_what_is_refused(settings, tmp_path):
    source = settings.data.sources["stream"]
    source.field = "boddy"
    with pytest.raises(ConfigError, match="data.sources.stream.field=boddy is no column of .*did you mean 'body'"):
        open_corpus(settings)
    source.field, source.split = "body", "nope"
    with pytest.raises(ConfigError, match="cannot be opened: .*nope.*; check path, subset and split"):
        open_corpus(settings)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "train.jsonl").write_text(json.dumps({"body": ""}) + "\n")
    source.split, source.path, settings.eval.every = "train", str(tmp_path / "empty"), 0
    with pytest.raises(DataError, match="holds no text to train on"):
        open_corpus(settings).train.sources[0].get(0)
