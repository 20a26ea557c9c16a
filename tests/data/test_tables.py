"""JSON Lines and Parquet read in place: the rows that are there, and an end for files that would fill the machine."""

import bz2
import gzip
import json
import lzma
import os

import pyarrow
import pyarrow.parquet
import pytest
from support.corpora import config, texts, write_jsonl
from support.damage import pickled

from trainer.config import ConfigError, SourceConfig
from trainer.data import shards
from trainer.data.corpus import open_corpus
from trainer.data.tables import JsonLines, ParquetRows

ROWS = [*texts(3000), "", "äöü€ \u2028 \u0000 end"]


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PACK = {"jsonl": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


def read(documents) -> list[str]:
    return [document.text for chunk in range(len(documents)) for document in documents.read(chunk, chunk + 1)]


def jsonl(tmp_path, content: bytes, **source) -> JsonLines:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    return JsonLines("data.sources.corpus", [str(path)], SourceConfig("jsonl", **source), tmp_path / "expanded")


@pytest.mark.parametrize("kind", PACK)
def test_rows_are_those_of_the_file_however_it_is_packed(kind, tmp_path):
    lines = [
        json.dumps({"text": row, "more": [{}]}) + ("\r\n" if number % 7 else "\n\n") for number, row in enumerate(ROWS)
    ]
    documents = jsonl(tmp_path, PACK[kind](b"\xef\xbb\xbf" + "".join(lines).encode()))
    assert len(documents) > 2 and read(documents) == [row for row in ROWS if row]
    limited = jsonl(tmp_path, PACK[kind]("".join(lines).encode()), limit=900)
    assert read(limited) == ROWS[:900] and len(limited) < len(documents)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_a_packed_file_of_several_streams_is_read_whole_or_refused(kind, tmp_path):
    """`bz2` and `lzma` of Python pass over a stream that does not begin as one, and all that follows."""
    pack, lines = PACK[kind], [json.dumps({"text": row}).encode() + b"\n" for row in ROWS]
    first, empty, last = pack(b"".join(lines[:100])), pack(b""), pack(b"".join(lines[100:]))
    assert read(jsonl(tmp_path, first + empty + last)) == [row for row in ROWS if row]
    with pytest.raises(ConfigError, match="rows.jsonl cannot be opened"):
        jsonl(tmp_path, first + b"?" + last[1:])


def test_a_skippable_frame_may_stand_first(tmp_path):
    """As pzstd writes it."""
    frame = b"\x50\x2a\x4d\x18\x04\0\0\0size"
    assert read(jsonl(tmp_path, frame + zstd(b'{"text": "a"}\n') + frame + zstd(b'{"text": "b"}\n'))) == ["a", "b"]


def test_an_array_is_read_as_lines_and_null_is_no_text(tmp_path):
    rows = [{"text": row} for row in ROWS[:50]]
    assert read(jsonl(tmp_path, json.dumps([*rows, {"text": None}, {"id": 1}], indent=1).encode())) == ROWS[:50]


@pytest.mark.parametrize("limit", [0, 250])
def test_parquet_rows_are_those_of_the_file(limit, tmp_path):
    table = pyarrow.table({"nested": [{"a": [1]}] * 1000, "text": [*ROWS[:999], None]})
    for name in ("a", "b"):
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=300)
    paths = [str(tmp_path / f"{name}.parquet") for name in ("a", "b")]
    documents = ParquetRows("data.sources.corpus", paths, SourceConfig("parquet", limit=limit))
    assert len(documents) == (limit or 2000)
    assert [d.text for d in documents.read(0, len(documents))] == (ROWS[:999] * 2)[: limit or 1998]
    assert [d.text for d in documents.read(70, 130)] == ROWS[70:130], "a part of a row group"


def grows(tmp_path, monkeypatch, kind) -> None:
    """Opens and reads a file that becomes 4 MiB, where 1 MiB is allowed."""
    monkeypatch.setattr("trainer.data.tables.ALWAYS", 1 << 20)
    if kind == "parquet":
        table = pyarrow.table({"text": ["a" * 4000] * 1000})
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", use_dictionary=["text"])
        documents = ParquetRows("data.sources.corpus", [str(tmp_path / "rows.parquet")], SourceConfig("parquet"))
    elif kind == "parquet, plain":
        table = pyarrow.table({"text": ["a" * 4000] * 1000})
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", use_dictionary=False, compression="zstd")
        documents = ParquetRows("data.sources.corpus", [str(tmp_path / "rows.parquet")], SourceConfig("parquet"))
    else:
        documents = jsonl(tmp_path, PACK[kind](b'{"text": "a"}\n' * 300_000))
    read(documents)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst", "parquet", "parquet, plain"])
def test_a_file_that_would_fill_the_disk_is_refused(kind, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="corpus.path: .*rows.* expands to .*than any text does"):
        grows(tmp_path, monkeypatch, kind)
    assert not [path for path in (tmp_path / "expanded").glob("*")], "nothing half-written stays"


@pytest.mark.parametrize("kind, source", [("text", "text"), ("jsonl", "jsonl")])
def test_a_line_without_end_is_refused(kind, source, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.data.text.LINE", 1 << 20)
    path = tmp_path / f"long.{kind}"
    path.write_bytes(b'{"text": "' + b"a" * (3 << 20) + b'"}\n')
    with pytest.raises(ConfigError, match=f"long.{kind} has a line of more than 1048576 bytes"):
        open_corpus(config(tmp_path, corpus=SourceConfig(source, str(path))))


@pytest.mark.parametrize(
    "line, message",
    [
        (b"[" * 100_000, "not JSON: it is nested too deeply"),
        (b'{"text": "b", "id": ' + b"9" * 5000 + b"}", "not JSON: .*digits"),
        (b'{"text": "\xff"}', "not JSON: 'utf-8' codec"),
        (b'{"text": "a\0b"}', "not JSON: Invalid control character"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": {"a": 1}}', "holds a mapping instead of text"),
        (b'["a"]', "holds a list instead of an object"),
    ],
)
def test_the_line_at_fault_is_named(line, message, tmp_path):
    with pytest.raises(ConfigError, match=f"rows.jsonl, the line at byte 14, .*{message}"):
        read(jsonl(tmp_path, b'{"text": "a"}\n' + line + b'\n{"text": "c"}\n'))


def test_a_lock_is_not_a_way_to_empty_a_file(tmp_path):
    """Who shares a cache may put a link where others make their lock."""
    source = SourceConfig("jsonl", str(write_jsonl(tmp_path / "a.jsonl", texts(50))))
    open_corpus(config(tmp_path, corpus=source))
    [manifest] = (tmp_path / "cache" / "tokens").glob("*/manifest.json")
    manifest.unlink()
    victim = tmp_path / "victim"
    victim.write_text("kept")
    manifest.with_suffix(".lock").unlink()
    manifest.with_suffix(".lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="data.cache=.* cannot be written"):
        open_corpus(config(tmp_path, corpus=source))
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hosts", "..", "", "a\0b"])
def test_a_manifest_names_files_of_its_folder_only(name, tmp_path):
    (tmp_path / "outside.bin").write_bytes(b"\1\0" * 50)
    (tmp_path / "cache").mkdir()
    files = {"train": [{"file": name, "tokens": 50, "digest": ""}], "eval": []}
    shards.write_manifest(tmp_path / "cache", "<u2", files)
    with pytest.raises(ConfigError, match="data.cache: .*delete the folder .* and it is made anew"):
        shards.read_manifest(tmp_path / "cache")
    files["train"] = []
    shards.write_manifest(tmp_path / "cache", "O", files | {"train": [{"file": "x", "tokens": 1, "digest": ""}]})
    with pytest.raises(ConfigError, match="of type O; legal: <u2, <u4"):
        shards.read_manifest(tmp_path / "cache")


def test_a_half_made_cache_of_before_is_made_anew(tmp_path, monkeypatch):
    """Shards without their documents noted, as the version before wrote them, or with a pickle in their place."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 10)
    source = SourceConfig("text", str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(20_000)))
    settings = config(tmp_path, corpus=source)
    first = open_corpus(settings)
    [folder] = (tmp_path / "cache" / "tokens").iterdir()
    whole = (folder / "manifest.json").read_text()
    (folder / "manifest.json").unlink()
    one, other, *_ = sorted(folder.glob("shard-*.json"))
    one.write_text(json.dumps({key: value for key, value in json.loads(one.read_text()).items() if key != "documents"}))
    other.write_bytes(pickled(tmp_path / "canary"))
    assert open_corpus(settings).fingerprint == first.fingerprint
    assert (folder / "manifest.json").read_text() == whole and not (tmp_path / "canary").exists()
    assert not any(name.endswith(".part") for name in os.listdir(folder))
