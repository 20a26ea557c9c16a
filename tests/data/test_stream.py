"""Streams: every document once a round, the same samples for any number of ranks, each rank reads its share, a run
resumes from any position, and network errors are waited out."""

import collections
import itertools
import json
import random

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.corpora import config, texts, write_jsonl, write_texts
from support.damage import damaged_values

import trainer
from trainer.config import ConfigError, SourceConfig
from trainer.config.registry import SOURCES
from trainer.data import batches as batches_module
from trainer.data import corpus as corpus_module
from trainer.data import documents as documents_module
from trainer.data.batches import BatchLoader, assign_ranks
from trainer.data.corpus import open_corpus
from trainer.data.documents import PERMANENT, count_lanes, digest_text
from trainer.data.tokens import DataError, LanePoint, merge_points, parse_points
from trainer.planning.plan import BatchPlan
from trainer.planning.resolve import check_config

LENGTH, END = 16, 256
ROWS = texts(300)
FILES = ["\n".join(ROWS[first : first + 5]) for first in range(0, 300, 5)]
KINDS = ("parquet", "jsonl", "text", "long", "hub")
"""Kinds of streams; "text": `FILES`, each of several chunks; "long": two files of many chunks."""


def write(folder, kind):
    """A corpus of `ROWS`, and its source."""
    path = folder / kind
    path.mkdir(parents=True)
    if kind == "jsonl":
        for part in range(3):
            write_jsonl(path / f"{part}.jsonl", ROWS[part * 100 : (part + 1) * 100])
    elif kind == "text":
        write_texts(path, FILES)
    elif kind == "long":
        write_texts(path, ["\n".join(ROWS[:200]), "\n".join(ROWS[200:])])
    else:
        for part in range(12):
            table = pyarrow.table({"text": ROWS[part * 25 : (part + 1) * 25]})
            pyarrow.parquet.write_table(table, path / f"train-{part}.parquet", row_group_size=10)
    return SourceConfig({"long": "text"}.get(kind, kind), str(path), streaming=True)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small corpora have many lanes and blocks."""
    monkeypatch.setattr(documents_module, "LANE_DOCUMENTS", 12)
    monkeypatch.setattr(documents_module, "BLOCK", 500)
    monkeypatch.setattr(documents_module, "GROUP", 8)
    monkeypatch.setattr(corpus_module, "GROUP", 300)
    monkeypatch.setattr("trainer.data.text.CHUNK_BYTES", 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("streams")


@pytest.fixture(scope="module")
def sources(folder):
    return {kind: write(folder, kind) for kind in KINDS}


def setting(folder, **sources):
    made = config(folder, length=LENGTH, **sources)
    made.eval.every, made.eval.sequences = 5, 4
    return made


@pytest.fixture(params=KINDS)
def streamed(request, folder, sources):
    return setting(folder, stream=sources[request.param])


def lane_documents(sequences, lane, count):
    """The first `count` documents of a lane, as texts."""
    tokens = []
    for index in itertools.count(lane, sequences.stream.lanes):
        tokens += sequences.get(index).tokens[:-1].tolist()
        if tokens.count(END) >= count:
            ends = [place for place, token in enumerate(tokens) if token == END][:count]
            return [bytes(tokens[first + 1 : end]).decode() for first, end in itertools.pairwise([-1, *ends])]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "text", "hub"])
def test_the_parts_of_the_lanes_are_the_corpus(kind, folder, sources):
    made = setting(folder, stream=sources[kind])
    if kind == "text":  # its chunks are held out one by one
        made.data.eval_fraction, made.eval.every = 0.0, 0
    sequences = open_corpus(made).train.sources[0]
    written = FILES if kind == "text" else ROWS
    trained = [text for text in written if kind == "text" or digest_text(text) >= sequences.threshold]
    assert sequences.stream.lanes > 2 and (kind == "text") == (trained == written)
    read = {lane: lane_documents(sequences, lane, len(trained) + 5) for lane in range(sequences.stream.lanes)}
    found = []
    for lane, documents in read.items():
        assert sorted(documents[: len(trained)]) == sorted(trained), "a lane reads all before it reads one again"
        assert documents[len(trained) :] == documents[:5]
        found += documents[: documents.index(read[(lane + 1) % len(read)][0])]
    assert collections.Counter(found) == collections.Counter(trained), "the first parts are the corpus, each text once"


def test_long_files_get_no_end_marks_where_a_block_ends(folder, sources):
    made = setting(folder, stream=sources["long"])
    made.data.eval_fraction, made.eval.every = 0.0, 0
    sequences = open_corpus(made).train.sources[0]
    stream = sequences.stream
    assert stream.lanes > 2 and stream.rounds > 1 and not any(map(str.startswith, ROWS, itertools.repeat("\n")))
    whole, places = "\n".join(ROWS[:200]) + "\0" + "\n".join(ROWS[200:]) + "\0", collections.Counter()
    for lane in range(stream.lanes):
        for _, _, found in itertools.islice(stream.read_lane(lane, 0, None), stream.rounds):
            text = "".join(document.text + "\0" * document.final for document in found)
            assert whole.count(text) == 1
            places[whole.index(text), whole.index(text) + len(text)] += 1
    assert all(end == first for (_, end), (first, _) in itertools.pairwise(sorted(places)))
    assert sum(end - first for first, end in places) == len(whole)
    sample = next(
        sample
        for index in range(200)
        if 0 < (sample := sequences.get(index)).documents.max() and END not in sample.tokens
    )
    assert sample.documents.max() == 1, "where a block ends inside of a file, a document is known to end"


def read_run(made, position, steps, size, dp, points=None, prefetch=2):
    """Samples of some steps by id, the points after them, and how many texts each rank has tokenised."""
    samples, parts, counts = {}, [], []
    for rank in range(dp):
        corpus = open_corpus(made)  # each rank is a process of its own
        read, plain = [], corpus_module.encode_pieces
        plan = BatchPlan(LENGTH, size, size // dp, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                corpus_module,
                "encode_pieces",
                lambda tokenizer, pieces: (read.extend(pieces), plain(tokenizer, pieces))[1],
            )
            loader = BatchLoader(
                corpus.train, plan, rank, dp, seed=0, position=position, points=points, prefetch=prefetch
            )
            for _ in range(steps):
                for batch in next(loader):
                    rows = zip(batch.ids, batch.tokens.tolist())
                    assert not samples.keys() & set(batch.ids)
                    samples |= dict(rows)
            assert loader.epoch is None and loader.position == position + steps * size
            parts.append(loader.points_at(loader.position))
            loader.close()
        counts.append(len(read))
    return samples, parts, counts


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 5)), min_size=2, max_size=4),
)
def test_a_run_resumes_anywhere_with_any_number_of_ranks(folder, sources, kind, starts):
    made = setting(folder, stream=sources[kind])
    steps = sum(count for _, count in starts)
    whole, *_ = read_run(made, 0, steps, 12, 1)
    assert sorted(whole) == sorted(f"stream:{number}" for number in range(12 * steps))
    read, position, points = {}, 0, {}
    for dp, count in starts:
        samples, parts, _ = read_run(made, position, count, 12, dp, points)
        points, position = parse_points(json.loads(json.dumps(merge_points(parts)))), position + 12 * count
        read |= samples
    assert read == whole


@pytest.mark.parametrize("known", [True, False])
def test_a_resumed_run_reads_again_what_its_points_do_not_say(streamed, known):
    whole, parts, (read,) = read_run(streamed, 0, 30, 24, 1)
    _, parts, _ = read_run(streamed, 0, 10, 24, 2)
    _, parts, _ = read_run(streamed, 10 * 24, 18, 24, 2, merge_points(parts))  # a rank knows old points of the other
    rest, _, (again,) = read_run(streamed, 28 * 24, 2, 24, 1, merge_points(parts) if known else None, prefetch=0)
    assert rest == {name: whole[name] for name in rest} and len(rest) == 2 * 24
    assert again < 0.5 * read if known else again > 0.9 * read


def test_points_of_steps_before_the_last_are_known(streamed, monkeypatch):
    monkeypatch.setattr(batches_module, "POINTS", 5)
    loader = BatchLoader(open_corpus(streamed).train, BatchPlan(LENGTH, 24, 24, 1), 0, 1, seed=0, prefetch=3)
    for _ in range(10):
        next(loader)
    lanes = loader.samples.sources[0].stream.lanes
    for steps in range(11):
        points = loader.points_at(24 * steps)
        taken = {lane: -(-(24 * steps - lane) // lanes) for lane in range(min(lanes, 24 * steps))}
        assert points == {} if steps < 6 else {lane: point.next for lane, point in points["stream"].items()} == taken
    loader.close()


def test_a_run_goes_on_from_its_checkpoint_without_a_cache(folder, sources, tmp_path, monkeypatch):
    read, plain = [], corpus_module.encode_pieces
    monkeypatch.setattr(
        corpus_module, "encode_pieces", lambda tokenizer, pieces: (read.extend(pieces), plain(tokenizer, pieces))[1]
    )

    def run(name, steps, cache):
        config = trainer.compose(
            [
                f"data.sources={{stream: {{kind: parquet, path: {sources['parquet'].path}, streaming: true}}}}",
                *("~data.sources.stdlib", "data.tokenizer=bytes", f"data.cache={tmp_path / cache}", "eval.every=0"),
                *("model=tiny", "model.width=16", "model.depth=1", "model.vocab_size=257", "lr.schedule=constant"),
                *("batch.sequence_length=16", "batch.global_size=24", "batch.micro_size=24", f"run.steps={steps}"),
                *(f"run.dir={tmp_path / name}", "run.device=cpu", "logging.console=none"),
            ]
        )
        read.clear()
        result = trainer.run(config)
        return [line["loss"] for line in result.metrics if "loss" in line], len(read)

    whole, counted = run("whole", 30, "cache")
    run("parts", 28, "cache")
    losses, again = run("parts", 30, "elsewhere")
    assert losses == whole and again < 0.6 * counted


@pytest.mark.parametrize("dp", [2, 3, 6])
def test_each_rank_reads_its_share(dp, folder, sources, monkeypatch):
    for kind in ("parquet", "hub"):
        made = setting(folder, stream=sources[kind])
        monkeypatch.setattr(documents_module, "GROUP", 1)  # rows of the hub
        monkeypatch.setattr(corpus_module, "GROUP", 1)
        whole, _, (alone,) = read_run(made, 0, 15, 24, 1)
        samples, parts, counts = read_run(made, 0, 15, 24, dp)
        assert samples == whole
        assert max(counts) < 1.25 * alone / dp, (kind, counts, alone)
        lanes = [set(part["stream"]) for part in parts]
        assert sum(map(len, lanes)) == len(set.union(*lanes)), "no lane has two readers"


@pytest.mark.parametrize("others", [["tokenised"], ["stream2"], ["stream2", "tokenised"]], ids=" ".join)
@pytest.mark.parametrize("weight", [0.3, 1.0, 4.0])
def test_mixtures_are_the_same_on_any_ranks(folder, sources, others, weight):
    made = setting(folder, stream=sources["parquet"])
    for name in others:
        kind = {"tokenised": "jsonl", "stream2": "hub"}[name]
        made.data.sources[name] = SourceConfig(kind, sources[kind].path, streaming=name == "stream2", weight=weight)
    whole, *_ = read_run(made, 0, 8, 12, 1)
    for dp in (2, 4):
        samples, parts, _ = read_run(made, 0, 8, 12, dp)
        assert samples == whole
        if len(others) == 1:
            for name in parts[0]:
                lanes = [set(part[name]) for part in parts]
                assert sum(map(len, lanes)) == len(set.union(*lanes)), "no lane has two readers"


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_ranks_take_equally_many_samples_at_home_where_they_can(ranks, micro, data):
    homes = data.draw(st.lists(st.integers(-1, ranks - 1), min_size=ranks * micro, max_size=ranks * micro))
    taken = assign_ranks(corpus_module.np.array(homes), ranks)
    assert sorted(collections.Counter(taken.tolist()).values()) == [micro] * ranks
    for rank in range(ranks):
        at_home = sum(home == rank == mine for home, mine in zip(homes, taken))
        assert at_home == min(micro, homes.count(rank))


@given(st.integers(-5, 1000))
def test_the_number_of_lanes_is_shared_by_common_numbers_of_ranks(most):
    lanes = count_lanes(most)
    assert 192 % lanes == 0 and 1 <= lanes <= max(1, most) and (most > 191 or lanes * 2 > most)


def test_the_split_is_that_of_the_tokenised_corpus(folder, sources):
    for kind in ("parquet", "jsonl", "text"):
        made = setting(folder, stream=sources[kind])
        made.eval.sequences = 1000
        held = open_corpus(made).eval.sources[0]
        made.data.sources["stream"] = SourceConfig(kind, sources[kind].path)
        tokenised = open_corpus(made).eval.sources[0]
        assert held.length == tokenised.length > 20
        assert all((held.get(n).tokens == tokenised.get(n).tokens).all() for n in range(held.length))
        made.data.sources["stream"].streaming = True
        assert open_corpus(made).fingerprint == open_corpus(made).fingerprint


def test_nothing_is_tokenised_before_the_first_step(folder, sources):
    made = setting(folder, stream=sources["parquet"])
    made.eval.every = 0
    _, _, (count,) = read_run(made, 0, 1, 12, 1)
    assert count < 150


def test_a_limit_is_that_of_the_stream(folder, sources):
    for kind in ("parquet", "jsonl", "text", "hub"):
        made = setting(folder, stream=sources[kind])
        made.data.sources["stream"].limit, made.data.eval_fraction, made.eval.every = 10, 0.0, 0
        sequences = open_corpus(made).train.sources[0]
        found = {text for lane in range(sequences.stream.lanes) for text in lane_documents(sequences, lane, 30)}
        made.data.sources["stream"].limit = 0
        assert found == set(FILES[:10] if kind == "text" else ROWS[:10])


def test_a_tokenizer_is_trained_first(folder, sources):
    for kind in ("parquet", "hub"):
        made = setting(folder, stream=sources[kind])
        made.data.tokenizer, made.data.vocab_size = "bpe", 280
        corpus = open_corpus(made)
        assert corpus.vocab_size == 280 and corpus.train.sources[0].get(0).tokens.max() > END


ERRORS = {
    "reset": ConnectionResetError("reset by peer"),
    "timeout": TimeoutError("timed out"),
    "disk": OSError(5, "Input/output error"),
    "foreign": type("ClientPayloadError", (Exception,), {})("payload not complete"),
    "busy": type("HTTPError", (OSError,), {"response": collections.namedtuple("R", "status_code")(429)})("429"),
}
DAMAGE = {
    "value": ValueError("bad page"),
    "missing": FileNotFoundError("gone"),
    "denied": type("HTTPError", (OSError,), {"response": collections.namedtuple("R", "status_code")(403)})("403"),
}


@pytest.fixture
def faulty(monkeypatch):
    """Lets rows of the hub fail: `faulty.errors` yields an error or None for each row. faulty.waits: pauses made."""

    class Faulty:
        errors, waits = iter(()), []

    plain = datasets.IterableDataset.__iter__

    def failing(self):
        for row in plain(self):
            if error := next(Faulty.errors, None):
                raise error
            yield row

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", failing)
    monkeypatch.setattr(documents_module.time, "sleep", Faulty.waits.append)
    Faulty.waits.clear()
    return Faulty


@pytest.mark.parametrize("seed", range(4))
def test_network_errors_are_waited_out(folder, sources, faulty, capsys, seed):
    made = setting(folder, stream=sources["hub"])
    whole, *_ = read_run(made, 0, 10, 24, 1)
    draws = random.Random(seed)
    faulty.errors = (draws.choice([*ERRORS.values()]) if draws.random() < 0.02 else None for _ in range(10**6))
    samples, _, _ = read_run(made, 0, 10, 24, 1)
    assert samples == whole and faulty.waits
    told = capsys.readouterr().err
    assert "data.sources.stream: the stream" in told and "it is tried again in 1 s" in told


@pytest.mark.parametrize("name", [*ERRORS, *DAMAGE])
def test_a_stream_that_does_not_come_back_ends_the_run_and_can_be_read_on(folder, sources, faulty, name):
    made = setting(folder, stream=sources["hub"])
    whole, *_ = read_run(made, 0, 6, 24, 1)
    corpus = open_corpus(made)
    loader = BatchLoader(corpus.train, BatchPlan(LENGTH, 24, 24, 1), 0, 1, seed=0, prefetch=0)
    samples = dict(zip((batch := next(loader)[0]).ids, batch.tokens.tolist()))
    faulty.errors = itertools.chain([None] * 9, itertools.repeat(({**ERRORS, **DAMAGE})[name]))
    told = "cannot be read on: .*checkpoint.data=restart" if name in DAMAGE else "broke off: .*; start the run again"
    with pytest.raises(DataError, match=f"data.sources.stream: the stream .* {told}"):
        while True:
            samples |= dict(zip((batch := next(loader)[0]).ids, batch.tokens.tolist()))
    assert len(faulty.waits) == (0 if name in DAMAGE else len(documents_module.WAITS))
    assert all(0.7 * wait < slept < 1.3 * wait for wait, slept in zip(documents_module.WAITS, faulty.waits))
    faulty.errors = iter(())
    while loader.position < 6 * 24:
        samples |= dict(zip((batch := next(loader)[0]).ids, batch.tokens.tolist()))
    assert samples == whole
    loader.close()


def test_damaged_rows_are_counted_and_bounded(tmp_path, capsys):
    lines = [json.dumps({"text": row}) if number % 10 != 5 else "{" for number, row in enumerate(ROWS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    made = setting(tmp_path, stream=SourceConfig("jsonl", str(tmp_path / "a.jsonl"), streaming=True))
    made.eval.every, made.data.eval_fraction = 0, 0.0
    with pytest.raises(DataError, match="is not JSON.*data.on_error=skip"):
        read_run(made, 0, 4, 24, 1)
    made.data.on_error, made.data.max_damaged = "skip", 0.5
    read_run(made, 0, 20, 24, 1)
    assert "data.sources.stream: this process left out 1 damaged and 0 empty of" in capsys.readouterr().err
    made.data.max_damaged = 0.02
    with pytest.raises(DataError, match="more than data.max_damaged=0.02 allows.*The first: .*a.jsonl, the line at"):
        read_run(made, 0, 20, 24, 1)


def test_what_is_refused(folder, sources, tmp_path):
    made = setting(folder, stream=SourceConfig("hub", sources["hub"].path, field="txet", streaming=True))
    source = made.data.sources["stream"]
    with pytest.raises(ConfigError, match="data.sources.stream.field=txet is no column of .*did you mean 'text'"):
        open_corpus(made)
    source.field, source.split = "text", "nope"
    with pytest.raises(ConfigError, match="cannot be opened: .*nope.*; check path, subset and split"):
        open_corpus(made)
    made.eval.every, source.split = 0, "train"
    for kind in ("hub", "jsonl"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "train.jsonl").write_text((json.dumps({"text": ""}) + "\n") * 100)
        source.kind, source.path = kind, str(tmp_path / kind)
        with pytest.raises(DataError, match="holds no text to train on"):
            open_corpus(made).train.sources[0].get(0)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "chat", "tokens", "hub", "stdlib"])
def test_a_kind_is_streamed_or_refused(kind):
    made = config(corpus_module.Path("/nowhere"), stream=SourceConfig(kind, "somewhere", streaming=True))
    made.data.mask_documents = True
    refused = [problem for problem in check_config(made, 1) if "streaming=true" in problem]
    assert bool(refused) == (kind in ("chat", "tokens")) and kind not in SOURCES.registered


def test_points_of_a_damaged_checkpoint_are_refused(tmp_path):
    point = [3, 1, {"shard_idx": 0}, 2, 7]
    assert parse_points({"a": {"5": point}}) == {"a": {5: LanePoint(*point)}}
    for _, content in damaged_values({"a": {"5": point}}):
        try:
            found = parse_points(json.loads(content))
        except ValueError:
            continue
        for lanes in found.values():
            assert all(
                type(lane) is int and min(one.next, one.turn, one.piece, one.used) >= 0 for lane, one in lanes.items()
            )


def test_what_a_new_attempt_does_not_mend_is_known():
    assert not any(documents_module.is_network_error(kind("x")) for kind in (*PERMANENT, ConfigError))
    assert all(documents_module.is_network_error(error) for error in ERRORS.values())
    refused = ConfigError("cannot be opened")
    refused.__cause__ = ConnectionError("no route to host")
    assert documents_module.is_network_error(refused)
