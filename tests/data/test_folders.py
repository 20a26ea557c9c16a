"""What a folder holds: every file is read, refused by name, or named as not read."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import config, texts

from trainer.config import ConfigError, SourceConfig
from trainer.data import documents
from trainer.data.corpus import Corpus, open_corpus
from trainer.data.documents import find_files
from trainer.data.tokens import DataError

JSON = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".ndjson.bz2")
PARQUET = (".parquet", ".pq")
OTHER = (".csv", ".md", ".lock", "")
READ = {"jsonl": JSON, "parquet": PARQUET, "text": (*JSON, *PARQUET, *OTHER)}
SILENT = (
    "_SUCCESS",
    "_metadata",
    "_committed_123",
    ".hidden.jsonl",
    ".a.parquet.crc",
    "part.jsonl.crc",
    ".git/inner.jsonl",
)
STEMS = ("a", "part-0001", "x.y", "name with blank", "ä", "_b")

ONE = st.tuples(
    st.sampled_from(["", "sub", "sub/more", "UPPER"]),
    st.sampled_from(STEMS),
    st.sampled_from([*JSON, *PARQUET, *OTHER]),
    st.sampled_from([str.lower, str.upper, str.title]),
)


def write_row(path: Path, suffix: str, text: str, plain: bool) -> None:
    """A file that holds one document: as its suffix says, or as plain text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"text": text}).encode() + b"\n"
    if plain:
        path.write_text(text)
    elif suffix in PARQUET:
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), path)
    else:
        pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(suffix).suffix, bytes)
        path.write_bytes(pack(line))


def whole(folder: Path, kind: str, path: Path | str, **data: object) -> Corpus:
    made = config(folder, length=1, corpus=SourceConfig(kind, str(path)))
    made.data.eval_fraction = 0.0
    for name, value in data.items():
        setattr(made.data, name, value)
    return open_corpus(made)


def documents_of(corpus: Corpus) -> list[str]:
    """The texts before each end mark of the tokenizer of bytes."""
    tokens = [int(token) for run in corpus.train.sources[0].runs for token in run.map()]
    text = bytes(token if token < 256 else 0 for token in tokens).decode()
    return text.split("\0")[:-1]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(READ)),
    st.lists(ONE, max_size=8),
    st.lists(st.sampled_from(SILENT), max_size=3),
    st.lists(st.sampled_from(["sub", "sub/more", "."]), max_size=2),
)
def test_every_file_of_a_folder_is_read_or_named(kind, files, silent, links):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "data"
        paths = {folder / where / f"{stem}{case(suffix)}": suffix for where, stem, suffix, case in files}
        paths |= {folder / "base.jsonl": ".jsonl", folder / "base.parquet": ".parquet"}
        for number, (path, suffix) in enumerate(paths.items()):
            write_row(path, suffix, f"document {number}", plain=kind == "text")
        for name in silent:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"\xff")
        for number, target in enumerate(links):
            if (folder / target).is_dir():
                (folder / f"link{number}").symlink_to(folder / target)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(documents, "NAMED_KINDS", 99)
            corpus = whole(Path(place), kind, folder)
        read = [number for number, suffix in enumerate(paths.values()) if suffix in READ[kind]]
        assert sorted(documents_of(corpus)) == sorted(f"document {number}" for number in read)
        counts = re.findall(r"(\d+) (?:\.\S+|without extension) \(", " ".join(corpus.notes))
        assert sum(map(int, counts)) == len(paths) - len(read), corpus.notes
        assert not any(Path(name).name in note for name in silent for note in corpus.notes)


def test_the_note_is_printed_before_the_work_and_again_at_the_start(tmp_path, capsys):
    folder = tmp_path / "data"
    for number, name in enumerate(["a.jsonl", "b.csv", "c.csv", "d.csv", "README"]):
        write_row(folder / name, ".jsonl", f"document {number}", plain=False)
    (folder / "e.jsonl").touch()
    note = (
        f"data.sources.corpus.path={folder}: not read: 3 .csv (b.csv, c.csv, ...), 1 without extension (README); "
        "of no bytes: 1 .jsonl (e.jsonl)"
    )
    assert whole(tmp_path, "jsonl", folder).notes == [note]
    told = capsys.readouterr().err
    assert told.index(note) < told.index("tokenising")
    assert whole(tmp_path, "jsonl", folder).notes == [note]
    assert note not in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"finds no file; .* it holds 3 .csv \(b.csv, c.csv, ...\), 2 .jsonl"):
        find_files("data.sources.x", SourceConfig("parquet", str(folder)))


def test_a_note_stays_short(tmp_path):
    for number in range(30):
        write_row(tmp_path / f"{number}.{number % 8}x", ".jsonl", "document", plain=True)
    write_row(tmp_path / "a.jsonl", ".jsonl", "document", plain=False)
    _, note = find_files("data.sources.x", SourceConfig("jsonl", str(tmp_path)))
    assert "not read: 4 .0x (0.0x, 16.0x, ...), 4 .1x" in note and note.endswith(", 3 more kinds")


def test_a_glob_names_folders_that_it_matches_and_does_not_read(tmp_path):
    write_row(tmp_path / "data/a.jsonl", ".jsonl", "document", plain=False)
    write_row(tmp_path / "data/sub/b.jsonl", ".jsonl", "document", plain=False)
    paths, note = find_files("data.sources.x", SourceConfig("jsonl", str(tmp_path / "data/*")))
    assert len(paths) == 1 and note.endswith("not read: 1 folders (sub)")
    paths, note = find_files("data.sources.x", SourceConfig("jsonl", str(tmp_path / "data/**")))
    assert len(paths) == 2 and not note


def test_linked_folders_are_read_once(tmp_path):
    """A folder that is hidden under its own name, and links in circles."""
    folder = tmp_path / "data"
    write_row(folder / ".store/a.jsonl", ".jsonl", "document", plain=False)
    for name in ("one", "two", ".store/back"):
        (folder / name).symlink_to(folder / ("" if "/" in name else ".store"))
    (folder / ".store/up").symlink_to("..")
    assert documents_of(whole(tmp_path, "jsonl", folder)) == ["document"]


def outside_link(folder: Path) -> str:
    (folder.parent / "elsewhere").mkdir()
    (folder / "sub").symlink_to(folder.parent / "elsewhere")
    return "sub is a link out of the folder"


def lost_link(folder: Path) -> str:
    (folder / "b.jsonl").symlink_to("nothing.jsonl")
    return "b.jsonl is a link to nothing"


def delta(folder: Path) -> str:
    (folder / "_delta_log").mkdir()
    return "is a table of Delta Lake"


def closed(folder: Path) -> str:
    (folder / "closed").mkdir()
    return "closed cannot be listed: Permission denied"


@pytest.mark.parametrize("spoil", [outside_link, lost_link, delta, closed])
def test_what_cannot_be_read_is_refused_by_name(spoil, tmp_path, monkeypatch):
    write_row(tmp_path / "data/a.jsonl", ".jsonl", "document", plain=False)
    message, scan = spoil(tmp_path / "data"), os.scandir

    def denied(path: str) -> Iterator[os.DirEntry]:  # root may list any folder
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ConfigError, match=message):
        find_files("data.sources.x", SourceConfig("jsonl", str(tmp_path / "data")))


def test_chats_in_parquet_are_told_by_any_of_its_names(tmp_path):
    for name in ("a.pq", "b.PARQUET"):
        write_row(tmp_path / name, ".pq", "document", plain=False)
    for names in (["a.pq"], ["a.pq", "b.PARQUET"]):
        chats = SourceConfig("chat", str(tmp_path / "*"))
        source = documents.DocumentSource("data.sources", "x", chats, tmp_path, once=lambda *_: None)
        source.paths = [str(tmp_path / name) for name in names]
        source.template = object()
        with pytest.raises(ConfigError, match="is no column of"):  # its reader looks for messages
            _ = source.documents


# texts


@pytest.mark.parametrize("kind, suffix", [("text", ".txt"), ("jsonl", ".jsonl"), ("jsonl", ".json")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_text_is_read_without_its_byte_order_mark_or_refused(kind, suffix, encoding, on_error, tmp_path):
    rows = ["line one\nand two" + " äö" * encoding.startswith("utf-8")] if kind == "text" else texts(3)
    content = rows[0] if kind == "text" else "\n".join(json.dumps({"text": row}) for row in rows)
    content = f"[{content.replace(chr(10), ',')}]" if suffix == ".json" else content
    (tmp_path / f"a{suffix}").write_bytes(content.encode(encoding))
    if encoding.startswith("utf-8"):
        assert documents_of(whole(tmp_path, kind, tmp_path / f"a{suffix}", on_error=on_error)) == rows
    else:
        with pytest.raises(ConfigError, match=f"a{suffix}"):
            whole(tmp_path, kind, tmp_path / f"a{suffix}", on_error=on_error)


def test_carriage_returns_are_kept_and_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\nthree\r\n")
    corpus = whole(tmp_path, "text", tmp_path / "a.txt")
    assert documents_of(corpus) == ["one\r\ntwo\nthree\r\n"]
    assert corpus.notes == ["data.sources.corpus: 2 of 3 lines end in CRLF, of which the carriage return is kept"]


# rows without text

ABSENT, EMPTY, WRONG = "absent", "empty", "wrong"
VALUES = {ABSENT: [None], EMPTY: [""], WRONG: [0, 7, False, True, 1.5, [], ["a"], {}, {"a": 1}], "text": ["a", "some"]}


def rows_of(kinds: list[str], pick: int) -> tuple[list[object], list[str]]:
    values = [VALUES[kind][(pick + number) % len(VALUES[kind])] for number, kind in enumerate(kinds)]
    return values, [f"{value}" for value, kind in zip(values, kinds) if kind == "text"]


def write_rows(path: Path, kind: str, values: list[object]) -> SourceConfig:
    if kind == "jsonl":
        rows = [{"id": 1} if value is None and number % 2 else {"text": value} for number, value in enumerate(values)]
        path.write_text("".join(json.dumps(row) + "\n" for row in [{"text": "first"}, *rows]))
        return SourceConfig("jsonl", str(path))
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(["first", *values], pyarrow.string())}), path)
    if kind == "parquet":
        return SourceConfig("parquet", str(path))
    (path.parent / "hub").mkdir()
    path.rename(path.parent / "hub" / "train.parquet")
    return SourceConfig("hub", str(path.parent / "hub"))


KINDS = st.lists(st.sampled_from([ABSENT, EMPTY, WRONG, "text", "text"]), max_size=12)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["jsonl", "parquet", "hub"]), KINDS, st.integers(0, 20), st.sampled_from(["stop", "skip"]))
def test_every_row_is_read_refused_or_counted(kind, kinds, pick, on_error):
    if kind != "jsonl":  # a column of text holds nothing else
        kinds = [ABSENT if one == WRONG else one for one in kinds]
    values, wanted = rows_of(kinds, pick)
    left = sum(one in (ABSENT, WRONG) for one in kinds)
    with tempfile.TemporaryDirectory() as place:
        made = config(Path(place), length=1, corpus=write_rows(Path(place) / "rows.file", kind, values))
        made.data.eval_fraction, made.data.on_error, made.data.max_damaged = 0.0, on_error, 1.0
        if left and on_error == "stop":
            with pytest.raises(ConfigError) as caught:
                open_corpus(made)
            counted = f"{left} of {len(kinds) + 1} rows cannot be read; set data.on_error=skip"
            assert (counted in str(caught.value)) == (WRONG not in kinds), "a wrong value ends the reading"
            assert "data.sources.corpus.field=text" in str(caught.value)
            return
        corpus = open_corpus(made)
        assert documents_of(corpus) == ["first", *wanted]
        notes, empty = " ".join(corpus.notes), kinds.count(EMPTY)
        assert (f"{left} of {len(kinds) + 1} rows cannot be read" in notes) == bool(left)
        assert (f"{empty} of {len(kinds) + 1} rows hold an empty text" in notes) == bool(empty)


def test_rows_refused_for_their_number_are_not_tokenised_again(tmp_path, capsys):
    rows = "".join(json.dumps({"text": f"row {number}" if number % 2 else None}) + "\n" for number in range(1500))
    (tmp_path / "a.jsonl").write_text(rows)
    with pytest.raises(
        ConfigError, match="750 of 1500 rows cannot be read; set data.on_error=skip and data.max_damaged above 0.01"
    ):
        whole(tmp_path, "jsonl", tmp_path / "a.jsonl")
    capsys.readouterr()
    corpus = whole(tmp_path, "jsonl", tmp_path / "a.jsonl", on_error="skip", max_damaged=0.5)
    assert len(documents_of(corpus)) == corpus.damaged == 750 and "tokenising" not in capsys.readouterr().err


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_rows_of_a_stream_are_told_while_it_is_read(on_error, tmp_path, capsys):
    source = write_rows(tmp_path / "rows.file", "hub", [None, "text", "", None] * 3)
    source.streaming = True
    made = config(tmp_path, length=1, corpus=source)
    made.data.eval_fraction, made.data.on_error = 0.0, on_error
    samples = open_corpus(made).train.sources[0]
    if on_error == "stop":
        with pytest.raises(DataError, match="a row of the stream .* holds null or nothing .*data.on_error=skip"):
            samples.get(3)
    else:
        samples.get(3)
        assert "this process left out 6 damaged and 3 empty of" in capsys.readouterr().err


VIEWS = [
    pyarrow.string(),
    pyarrow.large_string(),
    pyarrow.string_view(),
    *(pyarrow.dictionary(pyarrow.int32(), kind) for kind in (pyarrow.string(), pyarrow.large_string())),
]


@pytest.mark.parametrize("kind", VIEWS, ids=str)
def test_columns_of_every_type_of_text_are_read(kind, tmp_path):
    column = pyarrow.array(["a", "b", "a", ""]).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert documents_of(whole(tmp_path, "parquet", tmp_path / "a.parquet")) == ["a", "b", "a"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_columns_beside_the_text_are_named_with_their_rows(kind, tmp_path):
    rows = [{"text": f"text {number}", "id": number, "url\n": "x"} for number in range(5)]
    (tmp_path / "rows").mkdir()
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows" / "a.parquet")
    else:
        (tmp_path / "rows" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = config(tmp_path, length=4, corpus=SourceConfig(kind, str(tmp_path / "rows")))
    made.data.eval_fraction = 0.0
    (note,) = open_corpus(made).notes
    assert re.fullmatch(r"data.sources.corpus: columns not read: id, url\S* \(5 rows\)", note), note
