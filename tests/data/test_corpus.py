"""Corpora: every kind is prepared once, split by documents without overlap, and refused with the way out."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
from support.corpora import PLAIN, DyingFiles, config, stream, texts, write_jsonl, write_texts

from trainer.config import Config, ConfigError, SourceConfig
from trainer.data import documents, shards
from trainer.data.corpus import open_corpus
from trainer.data.text import CHUNK_BYTES, TextFiles


def sides(corpus):
    return stream(corpus.train, corpus.tokenizer), stream(corpus.eval, corpus.tokenizer)


def make_source(kind: str, folder: Path, rows: list[str]) -> SourceConfig:
    if kind == "text":
        return SourceConfig("text", str(write_texts(folder / "files", rows)))
    if kind == "jsonl":
        half = len(rows) // 2
        write_jsonl(folder / "a.jsonl", rows[:half], "body"), write_jsonl(folder / "b.jsonl", rows[half:], "body")
        return SourceConfig("jsonl", str(folder / "*.jsonl"), field="body")
    (folder / "table").mkdir()
    datasets.Dataset.from_dict({"body": rows}).to_parquet(str(folder / "table" / "train.parquet"))
    return SourceConfig(kind, str(folder / "table"), field="body")


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "hub"])
def test_kinds_hold_the_documents_and_split_them(kind, tmp_path):
    rows = texts(60)
    corpus = open_corpus(config(tmp_path, corpus=make_source(kind, tmp_path, rows)))
    train, held = sides(corpus)
    assert len(train) >= 46 and len(held) >= 10, (
        "at most the last document of each side is cut off by the sequence length"
    )
    assert not set(train) & set(held)
    assert set(train) | set(held) <= set(rows)
    assert train == [row for row in rows if row in set(train)], "the documents of a side keep their order"


def test_held_out_share_and_equal_documents(tmp_path):
    rows = texts(100)
    corpus = open_corpus(
        config(tmp_path, corpus=SourceConfig("jsonl", str(write_jsonl(tmp_path / "a.jsonl", rows + rows))))
    )
    train, held = sides(corpus)
    assert not set(train) & set(held), "copies of a document stay on one side"
    assert 38 <= len(held) <= 40
    unsplit = config(tmp_path, corpus=SourceConfig("jsonl", str(tmp_path / "a.jsonl")))
    unsplit.data.eval_fraction = 0.0
    corpus = open_corpus(unsplit)
    assert len(corpus.eval) == 0 and len(sides(corpus)[0]) >= 199


def test_document_limit(tmp_path):
    source = make_source("jsonl", tmp_path, texts(50))
    source.limit = 20
    train, held = sides(open_corpus(config(tmp_path, corpus=source)))
    assert 18 <= len(train) + len(held) <= 20
    source = SourceConfig("text", str(write_texts(tmp_path / "files", texts(50))), limit=20)
    train, held = sides(open_corpus(config(tmp_path, corpus=source)))
    assert 18 <= len(train) + len(held) <= 20


def test_a_long_file_is_cut_at_line_ends_and_joined_again(tmp_path):
    lines = [f"line {number} äöü€ " + "x" * (number % 200) + "\n" for number in range(3000)]
    (tmp_path / "long.txt").write_text("".join(lines))
    files = TextFiles("data.sources.corpus", [str(tmp_path / "long.txt")], strict=True)
    pieces = list(files.read(0, len(files)))
    assert len(files) == len(pieces) == -(-files.bytes // CHUNK_BYTES) > 3
    assert "".join(piece.text for piece in pieces) == "".join(lines)
    assert [piece.final for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.text.endswith("\n") for piece in pieces)

    settings = config(tmp_path, corpus=SourceConfig("text", str(tmp_path / "long.txt")))
    settings.data.eval_fraction = 0.0
    assert (open_corpus(settings).train.sources[0].tokens) == files.bytes + 1, "one end mark, at the end of the file"
    settings.data.eval_fraction = 0.01
    corpus = open_corpus(settings)
    train, held = (
        corpus.tokenizer.decode(np.concatenate([split.get(index)[0][:-1] for index in range(len(split))]))
        for split in (corpus.train, corpus.eval)
    )
    numbers = [set(re.findall(r"line (\d+) äöü", side)) for side in (train, held)]
    assert len(numbers[0]) > 2000 and len(numbers[1]) > 100 and not numbers[0] & numbers[1]


def test_lines_longer_than_a_piece(tmp_path):
    text = "a" * (3 * CHUNK_BYTES + 5) + "\n" + "b" * CHUNK_BYTES
    (tmp_path / "long.txt").write_text(text)
    files = TextFiles("data.sources.corpus", [str(tmp_path / "long.txt")], strict=True)
    pieces = list(files.read(0, len(files)))
    assert "".join(piece.text for piece in pieces) == text and pieces[-1].final


def test_the_standard_library_is_the_default(tmp_path):
    settings = Config()
    settings.model.vocab_size, settings.data.cache, settings.data.tokenizer = 257, str(tmp_path), "bytes"
    corpus = open_corpus(settings)
    assert corpus.train.sources[0].tokens > 5_000_000 and len(corpus.eval) > 64
    assert not any(
        "test" in path.split(os.sep) for path in documents.find_files("data.sources.stdlib", SourceConfig())[0]
    )


def test_document_numbers_follow_the_end_marks(tmp_path):
    corpus = open_corpus(
        config(tmp_path, length=64, corpus=SourceConfig("jsonl", str(write_jsonl(tmp_path / "a.jsonl", texts(80)))))
    )
    seen = 0
    for index in range(len(corpus.train)):
        tokens, numbers, _ = corpus.train.get(index)
        assert tokens.dtype == np.int64 and numbers.dtype == np.int32 and tokens.shape == numbers.shape == (65,)
        expected = [int((tokens[:at] == corpus.tokenizer.end_id).sum()) for at in range(65)]
        assert numbers.tolist() == expected
        seen = max(seen, numbers.max())
    assert seen > 1
    with pytest.raises(IndexError):
        corpus.train.get(len(corpus.train))


def test_neighbouring_sequences_share_a_token_and_files_run_on(tmp_path):
    corpus = open_corpus(
        config(tmp_path, length=7, corpus=SourceConfig("jsonl", str(write_jsonl(tmp_path / "a.jsonl", texts(30)))))
    )
    for index in range(1, len(corpus.train)):
        assert corpus.train.get(index - 1)[0][-1] == corpus.train.get(index)[0][0]


# ready-made token files


def write_tokens(path: Path, lengths: list[int], dtype: str = "uint16", end: int = 256) -> np.ndarray:
    tokens = np.concatenate([[*(np.arange(length) % 251), end] for length in lengths]).astype(dtype)
    np.save(path, tokens) if path.suffix == ".npy" else tokens.tofile(path)
    return tokens


@pytest.mark.parametrize(
    "suffix,dtype,setting",
    [(".bin", "uint16", "auto"), (".bin", "uint32", "uint32"), (".npy", "int32", "auto"), (".npy", "uint16", "auto")],
)
def test_token_files(suffix, dtype, setting, tmp_path):
    files = [write_tokens(tmp_path / f"{name}{suffix}", [30, 50, 20, 60, 40], dtype) for name in "ab"]
    corpus = open_corpus(config(tmp_path, corpus=SourceConfig("tokens", str(tmp_path), dtype=setting)))
    train = np.concatenate([corpus.train.get(index)[0][:-1] for index in range(len(corpus.train))])
    cut = 31 + 51 + 21 + 61  # the first document start after four fifths
    expected = np.concatenate([tokens[:cut] for tokens in files])
    assert np.array_equal(train, expected[: len(train)]) and len(expected) - len(train) <= 16
    held = np.concatenate([corpus.eval.get(index)[0][:-1] for index in range(len(corpus.eval))])
    assert np.array_equal(held, np.concatenate([tokens[cut:] for tokens in files])[: len(held)])
    assert not list((tmp_path / "cache").glob("tokens/*")), "ready-made files are not copied"


def test_a_token_file_without_end_mark_starts_a_document(tmp_path):
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.arange(100, 120, dtype=np.uint16).tofile(tmp_path / "b.bin")
    settings = config(tmp_path, length=32, corpus=SourceConfig("tokens", str(tmp_path)))
    tokens, numbers, _ = open_corpus(settings).train.get(0)
    assert tokens.tolist() == [*range(20), *range(100, 113)] and numbers.tolist() == [0] * 20 + [1] * 13


def test_token_files_are_refused(tmp_path):
    write_tokens(tmp_path / "a.bin", [100, 100])
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.save(tmp_path / "float.npy", np.zeros(4))
    with pytest.raises(ConfigError, match="3 bytes, no multiple of uint16.*data.sources.corpus.dtype"):
        open_corpus(config(tmp_path, corpus=SourceConfig("tokens", str(tmp_path / "odd.bin"))))
    with pytest.raises(ConfigError, match="float64 of shape"):
        open_corpus(config(tmp_path, corpus=SourceConfig("tokens", str(tmp_path / "float.npy"))))
    with pytest.raises(ConfigError, match="data.tokenizer=bpe is trained on text"):
        open_corpus(config(tmp_path, tokenizer="bpe", corpus=SourceConfig("tokens", str(tmp_path / "a.bin"))))
    with pytest.raises(ConfigError, match="limit=3 counts documents"):
        open_corpus(config(tmp_path, corpus=SourceConfig("tokens", str(tmp_path / "a.bin"), limit=3)))


# preparation: once, resumable, in parallel


def test_a_second_opening_tokenises_nothing(tmp_path, monkeypatch):
    source = SourceConfig("jsonl", str(write_jsonl(tmp_path / "a.jsonl", texts(50))))
    settings = config(tmp_path, tokenizer="bpe", corpus=source)
    settings.data.vocab_size = 270
    first = open_corpus(settings)
    with monkeypatch.context() as patch:
        for module, name in ((shards, "write_shard"), (documents, "JsonLines")):
            patch.setattr(module, name, lambda *_, **__: pytest.fail("prepared again"))
        patch.setattr("trainer.data.corpus.train_tokenizer", lambda *_: pytest.fail("trained again"))
        again = open_corpus(settings)
    assert again.fingerprint == first.fingerprint and np.array_equal(again.train.get(3)[0], first.train.get(3)[0])

    write_jsonl(tmp_path / "a.jsonl", texts(51))
    assert open_corpus(settings).fingerprint != first.fingerprint, "other content is prepared anew"


def test_fingerprint_is_of_the_content(tmp_path):
    rows = texts(50)
    prints = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        source = SourceConfig("jsonl", str(write_jsonl(tmp_path / folder / "a.jsonl", rows)))
        other = SourceConfig("jsonl", str(write_jsonl(tmp_path / folder / "b.jsonl", texts(30, "other"))), weight=2.0)
        prints.append(open_corpus(config(tmp_path / folder, a=source, b=other)).fingerprint)
        prints.append(open_corpus(config(tmp_path / folder, b=other, a=source)).fingerprint)
    assert len(set(prints)) == 1, "neither the folder nor the order in the configuration matters"
    other.weight = 3.0
    assert open_corpus(config(tmp_path / "two", a=source, b=other)).fingerprint != prints[0]
    assert open_corpus(config(tmp_path / "two", length=8, a=source, b=other)).fingerprint != prints[0]


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)


def prepared_tokens(settings: Config) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(settings.data.cache).glob("tokens/*/shard-*.bin"))]


def test_parallel_preparation_gives_the_same_tokens(tmp_path, small_shards, monkeypatch, capfd):
    source = SourceConfig("text", str(write_texts(tmp_path / "files", texts(100))))
    alone, parallel = config(tmp_path / "alone", corpus=source), config(tmp_path / "parallel", corpus=source)
    first = open_corpus(alone)
    parallel.data.workers = 2
    monkeypatch.setattr(shards, "_in_turn", lambda *_: pytest.fail("the workers' part was done here"))
    assert open_corpus(parallel).fingerprint == first.fingerprint
    assert prepared_tokens(parallel) == prepared_tokens(alone) and len(prepared_tokens(alone)) > 5


def test_a_bad_file_found_by_a_worker_is_named(tmp_path, small_shards):
    write_texts(tmp_path / "files", texts(40))
    (tmp_path / "files" / "0020.txt").write_bytes(b"caf\xe9 in latin-1, " * 20)
    settings = config(tmp_path, corpus=SourceConfig("text", str(tmp_path / "files")))
    settings.data.workers, settings.data.eval_fraction = 2, 0.0
    with pytest.raises(ConfigError, match="0020.txt is not UTF-8 text.*convert it"):
        open_corpus(settings)


KILLED = """
import os, signal, sys
from support.corpora import config, SourceConfig
from trainer.data import shards
from trainer.data.corpus import open_corpus
shards.SHARD_BYTES = 500
settings = config(__import__("pathlib").Path(sys.argv[1]), corpus=SourceConfig("text", sys.argv[1] + "/files"))
append, calls = shards.TokenWriter.append, []
def dying(writer, *ids):
    append(writer, *ids)
    calls.append(1)
    if len(calls) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
shards.TokenWriter.append = dying
open_corpus(settings)
"""


def run_python(code: str, *arguments: object) -> subprocess.Popen:
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_killed_preparation_goes_on_where_it_was(tmp_path, small_shards, monkeypatch):
    write_texts(tmp_path / "files", texts(100))
    killed = run_python(KILLED, tmp_path)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    settings = config(tmp_path, corpus=SourceConfig("text", str(tmp_path / "files")))
    [folder] = (tmp_path / "cache" / "tokens").glob("corpus-*/")
    assert list(folder.glob("*.part"))
    finished = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.json")}
    assert finished and not (folder / "manifest.json").exists()

    written = []
    write_shard = shards.write_shard
    monkeypatch.setattr(shards, "write_shard", lambda job, number: written.append(number) or write_shard(job, number))
    resumed = open_corpus(settings)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished and not list(folder.glob("*.part"))
    assert not {f"shard-{number:05d}.json" for number in written} & {path.name for path in finished}
    fresh = config(tmp_path / "fresh", corpus=settings.data.sources["corpus"])
    assert open_corpus(fresh).fingerprint == resumed.fingerprint and prepared_tokens(fresh) == prepared_tokens(settings)


def test_a_killed_worker_is_noticed_and_its_shards_are_made_later(tmp_path, small_shards, monkeypatch):
    write_texts(tmp_path / "files", texts(60))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    settings = config(tmp_path, corpus=SourceConfig("text", str(tmp_path / "files")))
    settings.data.workers = 2
    monkeypatch.setattr("trainer.data.documents.TextFiles", DyingFiles)
    with pytest.raises(RuntimeError, match="-9.*finished shards are kept"):
        open_corpus(settings)
    monkeypatch.undo()
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    train, held = sides(open_corpus(settings))
    assert 58 <= len(train) + len(held) <= 60


TWO = """
import sys, pathlib
from support.corpora import config, SourceConfig
from trainer.data.corpus import open_corpus
settings = config(pathlib.Path(sys.argv[1]), tokenizer="bpe", corpus=SourceConfig("jsonl", sys.argv[1] + "/a.jsonl"))
settings.data.vocab_size = 300
corpus = open_corpus(settings)
print(corpus.fingerprint, corpus.train.get(2)[0].sum())
"""


def test_processes_that_start_together_prepare_once(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(3000))
    processes = [run_python(TWO, tmp_path) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    messages = "".join(error for _, error in outputs)
    assert (
        messages.count("training a tokenizer") == 1 and len(re.findall(r"tokenising corpus .* \.\.\.\n", messages)) == 1
    ), messages


# what is refused


def test_all_missing_sources_are_named_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_corpus(
            config(
                tmp_path,
                a=SourceConfig("text", str(tmp_path / "nowhere")),
                b=SourceConfig("jsonl", str(tmp_path / "*.jsonl")),
            )
        )
    assert len(caught.value.problems) == 2
    assert "data.sources.a.path" in caught.value.problems[0] and "data.sources.b.path" in caught.value.problems[1]


@pytest.mark.parametrize(
    "kind,content,message",
    [
        ("text", b"", "is empty: 1 file of no bytes"),
        ("text", b"short\n", "holds 7 tokens to train on, and one sequence of batch.sequence_length=16 needs 17"),
        ("text", b"\xff\xfe\x00" * 50, "is not UTF-8 text"),
        ("jsonl", b'{"text": "a"}\n{"tex', "the line at byte 14, is not JSON: .*one object a line"),
        ("jsonl", b'{"test": "a"}\n', "data.sources.corpus.field=text is no column of .*did you mean 'test'"),
        ("jsonl", b'{"text": 1}\n', "the line at byte 0, holds 1 instead of text in data.sources.corpus.field=text"),
        ("parquet", b"no parquet", "cannot be opened: .*valid Parquet"),
    ],
)
def test_bad_files(kind, content, message, tmp_path):
    path = tmp_path / f"bad.{kind}"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_corpus(config(tmp_path, corpus=SourceConfig(kind, str(path))))


def test_a_folder_without_matching_files(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.csv").write_text("text")
    with pytest.raises(ConfigError, match="finds no file; the folder holds no file that ends in .jsonl"):
        open_corpus(config(tmp_path, corpus=SourceConfig("jsonl", str(tmp_path / "files"))))


def test_files_without_permission(tmp_path, monkeypatch):
    write_texts(tmp_path / "files", texts(3))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("0001.txt"))  # root may read anything
    with pytest.raises(ConfigError, match="no permission to read .*0001.txt"):
        open_corpus(config(tmp_path, corpus=SourceConfig("text", str(tmp_path / "files"))))


def test_too_little_is_held_out_for_evaluation(tmp_path):
    settings = config(tmp_path, corpus=SourceConfig("text", str(write_texts(tmp_path / "files", texts(1)))))
    settings.eval.every = 10
    with pytest.raises(ConfigError, match="eval.every=10 needs at least one held-out sequence"):
        open_corpus(settings)
    settings.eval.every = 0
    assert len(open_corpus(settings).train) > 0


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="data.cache=.* cannot be written"):
        open_corpus(config(tmp_path, corpus=SourceConfig("text", str(write_texts(tmp_path / "files", texts(20))))))


def flip(path: Path, at: int = 0) -> None:
    """Changes a bit of a file, of the byte `at`, and nothing that `stat` tells but its time."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a bit": flip,
    "the end": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "all": Path.unlink,
    "a link elsewhere": lambda path: path.rename(path.parents[3] / "tokens") and path.symlink_to("../../../tokens"),
}


@pytest.mark.parametrize("file", ["shard-00000.train.bin", "shard-00003.eval.bin", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_anew(damage, file, tmp_path, small_shards, monkeypatch, capfd):
    if damage == "a link elsewhere" and file == "manifest.json":
        pytest.skip("it is read as data, wherever it lies")
    settings = config(tmp_path, corpus=SourceConfig("text", str(write_texts(tmp_path / "files", texts(60)))))
    settings.data.eval_fraction = 0.3
    first, tokens = open_corpus(settings), prepared_tokens(settings)
    [path] = (tmp_path / "cache").glob(f"tokens/*/{file}")
    DAMAGE[damage](path)
    made = []
    write_shard = shards.write_shard
    monkeypatch.setattr(shards, "write_shard", lambda job, number: made.append(number) or write_shard(job, number))
    again = open_corpus(settings)
    assert again.fingerprint == first.fingerprint and prepared_tokens(settings) == tokens
    assert made == ([] if file == "manifest.json" else [int(file[6:11])]), "what is whole is kept"
    told = capfd.readouterr().err
    assert damage == "all" and file == "manifest.json" or path.name in told and "made anew" in told
    open_corpus(settings)
    assert "made anew" not in capfd.readouterr().err


@pytest.mark.parametrize("share", range(12))
def test_whatever_bit_of_a_manifest_is_wrong_the_tokens_are_right(share, tmp_path, small_shards):
    """The bit may be one of a name, a size, a digest or a count of rows."""
    settings = config(tmp_path, corpus=SourceConfig("text", str(write_texts(tmp_path / "files", texts(60)))))
    settings.data.eval_fraction = 0.3
    open_corpus(settings)
    tokens = prepared_tokens(settings)
    [path] = (tmp_path / "cache").glob("tokens/*/manifest.json")
    flip(path, path.stat().st_size * share // 12)
    open_corpus(settings)
    assert prepared_tokens(settings) == tokens


def test_the_content_of_a_cache_is_compared_once_a_start(tmp_path, small_shards, monkeypatch):
    settings = config(tmp_path, corpus=SourceConfig("text", str(write_texts(tmp_path / "files", texts(60)))))
    open_corpus(settings)
    [folder] = (tmp_path / "cache").glob("tokens/*")
    files = {str(path) for path in folder.glob("*.bin")}
    compared: list[str] = []
    digest = shards.content_digest
    monkeypatch.setattr(shards, "content_digest", lambda path: compared.append(path) or digest(path))
    open_corpus(settings)
    assert not compared, "they were written a moment ago"
    os.utime(folder / "verified", (time.time() - 2 * shards.AGAIN,) * 2)
    open_corpus(settings, prepare=False)
    assert not compared
    for _ in range(3):  # processes of one start
        open_corpus(settings)
    assert {*compared} == files and len(compared) == len(files)
    monkeypatch.setattr(shards, "MOST", 1)
    (folder / "verified").unlink()
    open_corpus(settings)
    assert len(compared) == len(files) + 1, "no more than the bound"


def test_marks_of_conversations_are_compared_too(tmp_path, capfd):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 30}]
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": messages}) + "\n") * 20)
    (tmp_path / "chat.jinja").write_text(PLAIN)
    settings = config(tmp_path, 64, corpus=SourceConfig("chat", str(path)))
    settings.data.chat_template = str(tmp_path / "chat.jinja")
    open_corpus(settings)
    [marks] = (tmp_path / "cache").glob("tokens/*/*.train.bin.marks")
    whole = marks.read_bytes()
    flip(marks)
    open_corpus(settings)
    assert marks.read_bytes() == whole and "made anew" in capfd.readouterr().err


def test_no_source_has_a_weight(tmp_path):
    with pytest.raises(ConfigError, match="no corpus with a weight above 0"):
        open_corpus(config(tmp_path, a=SourceConfig(weight=0.0)))
