"""`trainer prepare` says what it has tokenised and can be killed; `trainer show` prints what a run trains on."""

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.corpora import MARKED, chat_tokenizer, conversations, texts, write_conversations, write_jsonl, write_texts
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from trainer import commands, compose
from trainer.data import shards, tokens
from trainer.data.batches import BatchLoader
from trainer.data.corpus import open_corpus
from trainer.data.tokenizer import byte_tokenizer
from trainer.model.loss import IGNORE
from trainer.planning.plan import BatchPlan

LENGTH = 32

UNSHRUNK = (Phase.explicit, Phase.generate)


def words(folder: Path, source: dict[str, object], *more: str) -> list[str]:
    """Settings of a corpus of one source, mine, that is tokenised to bytes in this process."""
    named = [f"data.sources.mine.{name}={value}" for name, value in source.items()]
    given = [
        f"data.cache={folder / 'cache'}",
        f"run.dir={folder / 'run'}",
        "~data.sources.stdlib",
        "data.tokenizer=bytes",
        "data.workers=1",
        "data.eval_fraction=0.2",
        f"batch.sequence_length={LENGTH}",
    ]
    return ["+config=debug", *named, *given, *more]


def call(word: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = commands.main([word, *arguments])
    return code, out.getvalue(), error.getvalue()


def facts(output: str) -> dict[str, list[float]]:
    """The numbers of each line that `trainer prepare` prints of a source."""
    lines = re.findall(r"^  (\w[\w ]*?)  +(.*)$", output, re.MULTILINE)
    return {label: [float(one.replace(",", "")) for one in re.findall(r"[\d][\d,.]*", text)] for label, text in lines}


# What prepare says.


def make_source(kind: str, folder: Path, rows: list[str]) -> dict[str, object]:
    if kind == "text":
        return {"kind": kind, "path": write_texts(folder / "files", rows)}
    if kind == "jsonl":
        return {"kind": kind, "path": write_jsonl(folder / "rows.jsonl", rows)}
    datasets.Dataset.from_dict({"text": rows}).to_parquet(str(folder / "rows.parquet"))
    return {"kind": kind, "path": folder / "rows.parquet"}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_the_summary_equals_an_independent_count(kind, workers, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 10)
    rows = [f"{text}\näöü 漢字" for text in texts(200)]
    source = make_source(kind, tmp_path, rows if kind == "text" else [*rows, "", ""])
    code, out, error = call("prepare", *words(tmp_path, source, f"data.workers={workers}", "run.steps=7"))
    found, size = facts(out), sum(len(row.encode()) for row in rows)
    assert code == 0 and error.startswith("tokenising mine"), error
    assert found["documents"] == [200, 40]
    total, held = found["tokens"]
    assert total == size + 200 and 0.1 * total < held < 0.3 * total
    length = (total - held - 1) // LENGTH
    assert found["sequences"][0] == length
    assert found["bytes per token"] == [1.0]
    assert found["lines" if kind == "text" else "rows"] == ([400, 0] if kind == "text" else [202, 0, 2])
    batch = compose(words(tmp_path, source)).batch
    size = batch.global_size or batch.micro_size * (batch.accumulation or 1)
    assert found["epochs"][0] == pytest.approx(7 * size / length, rel=0.01)


def test_a_document_that_the_split_cuts_counts_once_for_each_end_mark(tmp_path, monkeypatch):
    """A long file is cut into chunks, of which some are held out; shards begin inside of it."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 64 << 10)
    source = make_source("text", tmp_path, ["".join(f"line {number}\n" for number in range(120_000))])
    given = words(tmp_path, source, "data.eval_fraction=0.5")
    code, out, error = call("prepare", *given)
    sides = open_corpus(compose(given)).opened["mine"]
    runs = [[run.map() for run in side.runs] for side in (sides.held, sides.train)]
    held, trained = (sum(int((ids == 256).sum()) for ids in side) for side in runs)
    assert code == 0 and held > 1 and facts(out)["documents"] == [held + trained, held], error


ROWS = st.lists(st.sampled_from(["text", "empty", "cut", "list"]), min_size=40, max_size=80)


@settings(max_examples=8, deadline=None, phases=UNSHRUNK)
@given(kinds=ROWS)
def test_every_row_is_counted_once(kinds, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    kinds = ["text"] * 20 + kinds
    lines = {"empty": '{"text": ""}', "cut": '{"text": "a', "list": "[1]"}
    written = [lines.get(kind) or json.dumps({"text": f"row {number}"}) for number, kind in enumerate(kinds)]
    (folder / "rows.jsonl").write_text("\n".join(written) + "\n")
    source = {"kind": "jsonl", "path": folder / "rows.jsonl"}
    code, out, error = call("prepare", *words(folder, source, "data.on_error=skip", "data.max_damaged=1"))
    found, damaged = facts(out), kinds.count("cut") + kinds.count("list")
    assert code == 0, error
    assert found["documents"][0] == kinds.count("text")
    empty = [kinds.count("empty")] * ("empty" in kinds)
    assert found["rows"] == [len(kinds), damaged, *empty]
    assert (f"{damaged} of {len(kinds)} rows cannot be read" in out) == bool(damaged)


def test_evaluated_sets_and_mixtures_are_told_apart(tmp_path):
    source = {"kind": "jsonl", "path": write_jsonl(tmp_path / "a.jsonl", texts(100)), "weight": 3}
    other, apart = write_jsonl(tmp_path / "b.jsonl", texts(50, "other")), write_jsonl(tmp_path / "c.jsonl", texts(30))
    more = [f"data.sources.other={{kind: jsonl, path: {other}}}", f"eval.sets.apart={{kind: jsonl, path: {apart}}}"]
    code, out, error = call("prepare", *words(tmp_path, source, *more, "eval.every=2", "batch.global_size=4"))
    assert code == 0, error
    parts = {part.split("\n")[0]: facts(part) for part in re.split(r"^(?=\w)", out, flags=re.MULTILINE) if part}
    mine, others, evaluated = parts["mine"], parts["other"], parts["apart (evaluated)"]
    assert [part["documents"][0] for part in (mine, others, evaluated)] == [100, 50, 30]
    assert "epochs" not in evaluated
    epochs = [part["epochs"][0] * part["sequences"][0] for part in (mine, others)]
    assert epochs[0] / epochs[1] == pytest.approx(3, rel=0.02)


def test_prepared_by_an_earlier_version(tmp_path):
    """Which did not count; the tokens are as good."""
    source = {"kind": "jsonl", "path": write_jsonl(tmp_path / "a.jsonl", texts(100))}
    assert call("prepare", *words(tmp_path, source))[0] == 0
    [manifest] = tmp_path.glob("cache/tokens/*/manifest.json")
    content = json.loads(manifest.read_text())
    for file in (file for files in content["files"].values() for file in files):
        for name in shards.COUNTS:
            del file[name]
    manifest.write_text(json.dumps(content))
    code, out, error = call("prepare", *words(tmp_path, source))
    assert (code, error) == (0, "") and "documents" not in facts(out) and facts(out)["tokens"]


# How prepare runs.

CALL = """
import contextlib, os, pathlib, sys
from trainer import commands
from trainer.data import shards
shards.SHARD_BYTES = 1 << 10
death, cache = int(sys.argv[1]), pathlib.Path(sys.argv[2])
start = shards.start_progress

@contextlib.contextmanager
def start_progress(label, kept):
    with start(label, kept) as report:
        def count_shards(*numbers):
            report(*numbers)
            if death and len([*cache.glob("tokens/*/shard-*.json")]) >= 3:
                os.kill(os.getpid(), death)
        yield count_shards

shards.start_progress = start_progress
code = commands.main(["prepare", *sys.argv[3:]])
print("torch loaded" if "torch" in sys.modules else "no torch", file=sys.stderr)
sys.exit(code)
"""


def start_prepare(folder: Path, source: dict[str, object], death: int, *more: str) -> subprocess.Popen:
    """`trainer prepare`, which sends itself a signal once three shards are there."""
    given = words(folder, source, *more)
    return subprocess.Popen(
        [sys.executable, "-c", CALL, str(int(death)), str(folder / "cache"), *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def prepared(folder: Path) -> dict[str, bytes]:
    """Every file of the token cache, except locks and notes of when it was compared."""
    paths = (path for path in (folder / "cache" / "tokens").rglob("*") if path.is_file())
    return {path.name: path.read_bytes() for path in paths if path.suffix in (".bin", ".json", ".marks", ".part")}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A source of thirty shards or more, and what is prepared of it without a disturbance."""
    folder = tmp_path_factory.mktemp("whole")
    source = {"kind": "jsonl", "path": write_jsonl(folder / "rows.jsonl", texts(40_000))}
    process = start_prepare(folder, source, 0, "data.workers=2")
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and "no torch" in error, error
    assert sum(name.startswith("shard") and name.endswith(".json") for name in prepared(folder)) > 20
    return source, facts(out), prepared(folder)


@pytest.mark.parametrize(
    "death, workers", [(signal.SIGKILL, 2), (signal.SIGTERM, 2), (signal.SIGINT, 1)], ids=["kill", "term", "int"]
)
def test_a_killed_preparation_goes_on_and_the_run_starts_at_once(large, death, workers, tmp_path, monkeypatch):
    source, found, whole = large
    killed = start_prepare(tmp_path, source, death, f"data.workers={workers}")
    out, error = killed.communicate(timeout=120)
    assert killed.returncode == (-death if death == signal.SIGKILL else 75) and "Traceback" not in error, error
    assert death == signal.SIGKILL or "the same command goes on" in error
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cache/tokens/*/shard-*.json")}
    assert 3 <= len(finished) < len(whole) // 3 and "manifest.json" not in prepared(tmp_path)

    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 10)
    given = words(tmp_path, source, "data.workers=2")
    code, out, error = call("prepare", *given)
    assert code == 0 and facts(out) == found, error
    assert {path: path.stat().st_mtime_ns for path in finished} == finished, "finished shards are not made again"
    assert prepared(tmp_path) == whole
    open_corpus(compose(given), prepare=False)  # a run would raise here if anything were left to be made
    assert call("prepare", *given)[2] == "", "nothing is tokenised a second time"


def test_two_preparations_at_once_make_one_cache(large, tmp_path):
    source, found, whole = large
    both = [start_prepare(tmp_path, source, 0, "data.workers=2") for _ in range(2)]
    ended = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    assert [facts(out) for out, _ in ended] == [found, found] and prepared(tmp_path) == whole
    assert sum("tokenising mine" in error for _, error in ended) == 1


def test_a_process_that_tokenises_and_dies_is_one_message(tmp_path, monkeypatch):
    def die(job, numbers, workers):
        raise tokens.DataError("processes that tokenise ended with [-9]")
        yield

    monkeypatch.setattr(shards, "_in_processes", die)
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 10)
    source = make_source("text", tmp_path, texts(50))
    code, _, error = call("prepare", *words(tmp_path, source, "data.workers=2"))
    assert code == 1 and "the corpus is not ready: processes that tokenise ended with [-9]" in error


def test_progress_has_rate_and_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 64 << 10)
    monkeypatch.setattr(tokens, "EVERY", 0.0)
    rows = [{"text": "some text " * 50, "other": "x" * 2000} for _ in range(2000)]  # most bytes are not read
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, error = call("prepare", *words(tmp_path, {"kind": "jsonl", "path": tmp_path / "a.jsonl"}))
    line = r"^tokenising mine \(5\.\d MB\): (\d+)%, [\d.]+ MB/s, [\d.]+[kM]? tokens/s, ETA (?:[\d.]+ m?s|\d+m \d\ds)$"
    shares = [int(share) for share in re.findall(line, error, re.MULTILINE)]
    assert code == 0 and len(shares) > 10 and shares[-1] in (99, 100) and max(shares) <= 100, error
    middle = shares[len(shares) // 2]
    assert 40 <= middle <= 60, "the bytes of what is not read are no work to come"
    assert re.search(r"done in [\d.]+ s, [\d.]+ MB/s, [\d.]+[kM]? tokens/s$", error)


@pytest.mark.parametrize("columns", [120, 60])
def test_a_terminal_has_one_line_that_is_drawn_anew(columns, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 64 << 10)
    monkeypatch.setattr(tokens, "REDRAWN", 0.0)
    monkeypatch.setattr(tokens, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    code, _, error = call("prepare", *words(tmp_path, make_source("jsonl", tmp_path, texts(8000))))
    first, drawn_lines, rest = error.split("\n")
    drawn_lines = drawn_lines.split("\r")[1:]
    assert code == 0 and first == "tokenising mine (0.5 MB) ..." and not rest and len(drawn_lines) > 5, error
    assert all(len(line) < columns for line in drawn_lines[:-1])
    assert all(re.search(r" MB/s, \S+ tokens/s, ETA .*s *$", line) for line in drawn_lines[:-2])
    assert drawn_lines[-2].isspace() and re.search("done in .* tokens/s$", drawn_lines[-1])


# Tokenizers that make nothing of the text.

PROSE = "the quick brown fox jumps over the lazy dog and says something of no great importance\n" * 400
CODE = ("def f(x):\n" + " " * 24 + "return {\n" + " " * 60 + "}\n") * 200
HAN = "漢字仮名交じり文は日本語で書かれた文章である\n" * 300
WORDS = ["[UNK]", *dict.fromkeys(PROSE.split())]
LETTERS = ["[UNK]", *dict.fromkeys(HAN + PROSE + CODE)]
SPLIT = pre_tokenizers.WhitespaceSplit()


def number(names: list[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


LOST = {
    "letters that are removed": (
        models.BPE(number(LETTERS), []),
        SPLIT,
        PROSE,
        f"makes 0 tokens of {len(PROSE)} bytes",
    ),
    "words, all unknown": (models.WordLevel(number(WORDS[:1]), unk_token="[UNK]"), SPLIT, PROSE, "100%"),
    "words of another script": (models.WordLevel(number(WORDS), unk_token="[UNK]"), SPLIT, HAN, "makes 300 tokens"),
    "letters, none known": (models.BPE(number(["q", "z"]), []), SPLIT, HAN, "makes 0 tokens"),
    "letters, all unknown": (models.BPE(number(["<u>", "q"]), [], unk_token="<u>"), SPLIT, HAN, "100%"),
    "pieces, all unknown": (models.Unigram([("<unk>", 0.0), ("q", -1.0)], unk_id=0), None, HAN, "makes"),
    "sub-words, all unknown": (models.WordPiece(number(["[UNK]", "q"]), unk_token="[UNK]"), SPLIT, PROSE, "100%"),
}
LEGAL = {
    "words": (models.WordLevel(number(WORDS), unk_token="[UNK]"), SPLIT, PROSE),
    "words, a third unknown": (models.WordLevel(number(WORDS[:10]), unk_token="[UNK]"), SPLIT, PROSE),
    "characters of prose": (models.BPE(number(LETTERS), []), None, PROSE),
    "characters of Chinese": (models.BPE(number(LETTERS), []), None, HAN),
    "characters of code": (models.BPE(number(LETTERS), []), None, CODE),
}


def saved(folder: Path, model: object, split: object | None, name: str = "") -> str:
    backend = Tokenizer(model)
    if name.endswith("removed"):
        backend.normalizer = normalizers.Replace(Regex("[a-z]"), "")
    if split is not None:
        backend.pre_tokenizer = split
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    return f"data.tokenizer={folder / 'tokenizer.json'}"


@pytest.mark.parametrize("word", ["prepare", "train"])
@pytest.mark.parametrize("name", LOST)
def test_a_tokenizer_that_loses_the_text_is_refused(name, word, tmp_path):
    model, split, text, said = LOST[name]
    source = make_source("text", tmp_path, [text])
    code, out, error = call(word, *words(tmp_path, source, saved(tmp_path, model, split, name)))
    assert code == 2 and "configuration error: data.tokenizer=" in error and "Traceback" not in error
    assert said in error and "data.sources.mine" in error and "set data.tokenizer to one" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", LEGAL)
def test_a_tokenizer_of_such_text_is_legal(name, tmp_path):
    model, split, text = LEGAL[name]
    source = make_source("text", tmp_path, [text])
    code, out, error = call("prepare", *words(tmp_path, source, saved(tmp_path, model, split)))
    assert code == 0, error


@pytest.mark.parametrize("text", [PROSE, CODE, HAN, "\n" * 9000 + "a", " " * 50_000 + "a"], ids=range(5))
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokenizers_made_here_lose_nothing(tokenizer, text, tmp_path):
    source = make_source("text", tmp_path, [text])
    more = [f"data.tokenizer={tokenizer}", "data.vocab_size=300", "data.eval_fraction=0", "batch.sequence_length=1"]
    code, out, error = call("prepare", *words(tmp_path, source, *more))
    assert code == 0, error


def test_tokenising_is_broken_off_early(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 10 << 10)
    monkeypatch.setattr(shards, "JUDGED_FROM", 30 << 10)
    monkeypatch.setattr(shards, "BATCH", 4 << 10)
    model, split, text, said = LOST["words, all unknown"]
    source = {"kind": "jsonl", "path": write_jsonl(tmp_path / "a.jsonl", PROSE.splitlines() * 20)}
    code, _, error = call("prepare", *words(tmp_path, source, saved(tmp_path, model, split)))
    assert code == 2 and "100%" in error
    assert len([*tmp_path.glob("cache/tokens/*/shard-*.json")]) <= 2, "most of ten shards are not made"


def test_a_stream_is_looked_at_first(tmp_path):
    model, split, text, said = LOST["letters, none known"]
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_dict({"text": text.splitlines()}).to_parquet(str(tmp_path / "hub" / "rows.parquet"))
    source = {"kind": "hub", "path": tmp_path / "hub", "streaming": "true"}
    code, _, error = call("prepare", *words(tmp_path, source, saved(tmp_path, model, split)))
    assert code == 2 and said in error
    code, out, error = call("prepare", *words(tmp_path, source))
    assert code == 0 and "read while training" in out, error


# What show prints.


def shown(output: str) -> list[tuple[str, list[int], list[bool], list[int]]]:
    """Of each sequence: its sample, tokens, which are learned, and where documents begin."""
    found = []
    for part in re.split(r"^sequence ", output, flags=re.MULTILINE)[1:]:
        sample, ids, learned, borders = re.match(r"\d+ of \d+: (\S+),", part)[1], [], [], []
        mark = None
        for line in part.splitlines()[1:]:
            if border := re.match(r"--- document (\d+), from position (\d+)$", line):
                borders.append(int(border[2]))
                assert int(border[1]) == len(borders)
            elif row := re.match(r" *(\d+) ([-+]) ", line):
                assert int(row[1]) == len(ids)
                mark = row[2] == "+"
            elif line:
                some = [int(one) for one in line.split()]
                ids, learned = ids + some, learned + [mark] * len(some)
        found.append((sample, ids, learned, borders))
    return found


def drawn(config, count: int):
    """The same of the first step of a run on two ranks with several micro-batches each; by hand of the sources' own
    sequences where documents are concerned."""
    opened = open_corpus(config)
    plan = BatchPlan(config.batch.sequence_length, count, 1, count // 2)
    options = {"seed": config.run.seed, "mask_documents": config.data.mask_documents}
    loaders = [BatchLoader(open_corpus(config).train, plan, rank, 2, **options) for rank in range(2)]
    steps = [next(loader) for loader in loaders]
    for loader in loaders:
        loader.close()
    found = []
    for batch in (steps[rank][number] for number in range(count // 2) for rank in range(2)):
        name, index = batch.ids[0].split(":")
        sample = opened.train.sources[opened.train.names.index(name)].get(int(index))
        targets, ids = batch.targets[0].tolist(), batch.tokens[0].tolist()
        learned = [False, *(target != IGNORE for target in targets)]
        ids += [targets[-1]] * learned[-1]
        assert ids == sample.tokens.tolist()[: len(ids)]
        starts = [0, *(n for n in range(1, len(ids)) if sample.documents[n] != sample.documents[n - 1])]
        found.append((batch.ids[0], ids, learned[: len(ids)], starts))
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["text", "jsonl", "chat", "stream", "fitting"])
def test_show_prints_what_the_first_step_trains_on(kind, masked, tmp_path):
    more = [f"data.mask_documents={masked}", "run.seed=5"]
    if kind == "chat":
        if not masked:
            pytest.skip("conversations are always masked")
        chat_tokenizer(tmp_path / "tokenizer", MARKED)
        path = write_conversations(tmp_path / "a.jsonl", conversations(60))
        source, length = {"kind": "chat", "path": path}, 192
        more += [f"data.tokenizer={tmp_path / 'tokenizer'}", f"batch.sequence_length={length}"]
    elif kind == "stream":
        (tmp_path / "hub").mkdir()
        datasets.Dataset.from_dict({"text": texts(200)}).to_parquet(str(tmp_path / "hub" / "rows.parquet"))
        source = {"kind": "hub", "path": tmp_path / "hub", "streaming": "true"}
    elif kind == "fitting":  # the last target of a sequence begins the next document
        source = make_source("jsonl", tmp_path, [f"{number:0{LENGTH - 1}d}" for number in range(100)])
    else:
        source = make_source(kind, tmp_path, texts(200))
        second = write_jsonl(tmp_path / "second.jsonl", texts(100, "other\x1b[31m"))
        more.append(f"data.sources.second={{kind: jsonl, path: {second}}}")
    given = words(tmp_path, source, *more)
    code, out, error = call("show", *given, "count=6", "--ids")
    assert code == 0, error
    expected = drawn(compose(given), 6)
    assert shown(out) == expected
    shares = [float(share) for share in re.findall(r"(\d+\.\d)% learned", out)]
    size = compose(given).batch.sequence_length
    assert shares == [pytest.approx(100 * sum(learned) / size, abs=0.06) for _, _, learned, _ in expected]
    if kind == "chat":
        assert 5 < min(shares) and max(shares) < 95 and "times)" in out
    elif masked:
        assert min(shares) < 100
    assert f"attention {'ends at' if masked else 'crosses'} the borders" in out


HOSTILE = st.text(
    st.sampled_from("ab \n\t\\\r\x00\x1b\x07\x9b\u202e\u2028\ufeff漢é😀\U000e0041"), min_size=1, max_size=60
)


@settings(max_examples=5, deadline=None, phases=UNSHRUNK)
@given(rows=st.lists(HOSTILE, min_size=6, max_size=9, unique=True))
def test_text_of_strangers_is_printed_harmless_and_whole(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("strange")
    source = {"kind": "jsonl", "path": write_jsonl(folder / "a.jsonl", [row + "." * LENGTH for row in rows])}
    given = words(folder, source, "data.eval_fraction=0")
    code, out, error = call("show", *given, "count=2")
    assert code == 0, error
    assert all(line.isprintable() for line in out.split("\n"))
    decode = byte_tokenizer().backend.decode
    for (_, ids, _, _), part in zip(drawn(compose(given), 2), out.split("\nsequence ")[1:]):
        found = re.findall(r"^ *(\d+) [-+] (.*?)(?:  \((\d+) times\))?$", part, re.MULTILINE)
        starts = [int(start) for start, _, _ in found] + [len(ids)]
        for (_, text, times), start, end in zip(found, starts, starts[1:]):
            printed = text.encode("latin-1", "backslashreplace").decode("unicode_escape") * int(times or 1)
            assert printed == decode(ids[start:end], skip_special_tokens=False)


def test_colours_are_for_terminals_that_want_them(tmp_path, monkeypatch):
    given = words(tmp_path, make_source("text", tmp_path, texts(50)))

    def colours(terminal: bool, **environment: str) -> set[str]:
        with contextlib.redirect_stdout(io.StringIO()) as out, monkeypatch.context() as patch:
            out.isatty = lambda: terminal
            for name in ("NO_COLOR", "TERM"):
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            assert commands.main(["show", *given]) == 0
        return set(re.findall(r"\x1b\[(\d+)m", out.getvalue()))

    assert colours(True) == {"32", "2", "0"}
    assert colours(False) == colours(True, NO_COLOR="1") == colours(True, TERM="dumb") == set()


def test_the_blank_before_a_word_is_not_lost_at_the_begin_of_a_row(tmp_path):
    """Decoders of sentencepiece leave out the first blank of a text."""
    model = models.Unigram([("<unk>", 0.0), *((f"▁{word}", -1.0) for word in WORDS), ("▁", -2.0)], unk_id=0)
    backend = Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    source = {"kind": "jsonl", "path": write_jsonl(tmp_path / "a.jsonl", ["the quick brown fox jumps"] * 50)}
    code, out, error = call("show", *words(tmp_path, source, f"data.tokenizer={tmp_path / 'tokenizer.json'}"))
    assert code == 0, error
    rows = re.findall(r"^ *\d+ [-+] (.*)$", out, re.MULTILINE)
    assert any(row.startswith(" ") for row in rows) and "thequick" not in out


# Both.


def test_settings_are_checked_as_for_a_run_on_any_number_of_processes(tmp_path):
    source = make_source("text", tmp_path, texts(50))
    for word in ("prepare", "show"):
        code, out, error = call(word, *words(tmp_path, source, "parallel.tp=2", "parallel.pp=2"))
        assert code == 0, error
        code, out, error = call(word, *words(tmp_path, source, "lr.peak=-1", "data.workers=x"))
        assert code == 2 and "lr.peak" in error and "data.workers" in error and not out
        code, out, error = call(word, *words(tmp_path, {"kind": "text", "path": tmp_path / "nowhere"}))
        assert code == 2 and "finds no file" in error
    assert call("show", *words(tmp_path, source, "count=0"))[0] == 2
