"""Rows that cannot be read: by default they end the run; where they are left out, they are counted and never many."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from support.corpora import config, stream, texts

from trainer.config import ConfigError, SourceConfig
from trainer.data.corpus import Corpus, open_corpus

ROWS = texts(3000)
GOOD = [json.dumps({"text": row}).encode() for row in ROWS]
DAMAGED = {
    50: (b'{"text": "cut off', "is not JSON"),
    700: (b'{"text": "\xff\xfe"}', "is not JSON"),
    701: (b'["text"]', "holds a list instead of an object"),
    1500: (b'{"text": 5}', "holds 5 instead of text"),
    2999: (b'{"text": "\\ud800"}', "half of a surrogate pair"),
}


def jsonl(folder: Path) -> SourceConfig:
    lines = [DAMAGED[number][0] if number in DAMAGED else line for number, line in enumerate(GOOD)]
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    return SourceConfig("jsonl", str(folder / "a.jsonl"))


def parquet(folder: Path) -> SourceConfig:
    values = [b"\xff" if number in DAMAGED else row.encode() for number, row in enumerate(ROWS)]
    table = pyarrow.table({"text": pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=1000)
    return SourceConfig("parquet", str(folder / "a.parquet"))


def opened(folder: Path, source: SourceConfig, most: float = 0.01, workers: int = 1) -> Corpus:
    made = config(folder, corpus=source)
    made.data.on_error, made.data.max_damaged, made.data.workers = "skip", most, workers
    return open_corpus(made)


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_rows_that_cannot_be_read_stop_or_are_left_out_and_counted(write, tmp_path):
    source = write(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.(jsonl|parquet), .*data.on_error=skip"):
        open_corpus(config(tmp_path, corpus=source))
    corpus = opened(tmp_path, source, workers=2)
    assert corpus.damaged == 5
    assert corpus.notes == ["data.sources.corpus: 5 of 3000 rows cannot be read and are left out"]
    kept = [row for number, row in enumerate(ROWS) if number not in DAMAGED]
    found = stream(corpus.train, corpus.tokenizer) + stream(corpus.eval, corpus.tokenizer)
    assert set(found) <= set(kept) and len(found) >= len(kept) - 2, "the last of each side may be cut off"
    (manifest,) = (tmp_path / "cache/tokens").glob("*/manifest.json")
    noted = json.loads(manifest.read_text())
    assert (noted["rows"], noted["damaged"]) == (3000, 5) and "a." in noted["first"]

    again = opened(tmp_path, source)
    assert (again.fingerprint, again.damaged, again.notes) == (corpus.fingerprint, 5, corpus.notes), "from the cache"
    with pytest.raises(ConfigError, match="5 of 3000 rows cannot be read, more than data.max_damaged=0.001 .*first: "):
        opened(tmp_path, source, most=0.001)


def test_every_kind_of_damage_of_a_line_is_named(tmp_path):
    for line, problem in DAMAGED.values():
        (tmp_path / "one.jsonl").write_bytes(b"\n".join([*GOOD[:10], line]))
        source = SourceConfig("jsonl", str(tmp_path / "one.jsonl"))
        with pytest.raises(ConfigError, match=problem):
            open_corpus(config(tmp_path, corpus=source))
        assert opened(tmp_path, source, most=0.1).damaged == 1


def test_lines_of_text_that_are_not_utf8(tmp_path):
    lines = [f"line {number} äö {number * 7919}\n".encode() for number in range(9000)]
    damaged = {10, 4000, 4001, *range(8000, 9000)}
    cut = [b"\xe4\xf6\n" if number in damaged else line for number, line in enumerate(lines)]
    (tmp_path / "a.txt").write_bytes(b"".join(cut))
    (tmp_path / "b.txt").write_text("another file\n" * 5)
    source = SourceConfig("text", str(tmp_path / "*.txt"))
    with pytest.raises(ConfigError, match="a.txt is not UTF-8 text .*data.on_error=skip"):
        open_corpus(config(tmp_path, corpus=source))
    with pytest.raises(ConfigError, match="1003 of 9005 rows cannot be read"):
        opened(tmp_path, source)
    corpus = opened(tmp_path, source, most=0.2)
    assert corpus.damaged == 1003
    sides = [
        [token for i in range(len(side)) for token in side.get(i).tokens[:-1]] for side in (corpus.train, corpus.eval)
    ]
    text = "".join(map(corpus.tokenizer.decode, sides))
    kept = [line.decode() for number, line in enumerate(lines) if number not in damaged]
    assert sum(line in text for line in kept) > len(kept) - 4 and "line 4000 " not in text, "but for the ends"
    ends = (corpus.train.sources[0], corpus.eval.sources[0])
    assert sum(side.tokens for side in ends) >= len("".join(kept).encode()) + 2, "each file has its end mark"


def test_a_last_line_without_a_line_break_is_a_line(tmp_path):
    for number, row in enumerate(texts(150)):
        (tmp_path / f"{number}.txt").write_text(row)
    (tmp_path / "0.txt").write_bytes(b"\xe4\xf6")
    source = SourceConfig("text", str(tmp_path / "*.txt"))
    with pytest.raises(ConfigError, match="1 of 150 rows cannot be read"):
        opened(tmp_path, source, most=0.001)
    assert opened(tmp_path, source).damaged == 1


def test_parquet_that_ends_early_is_counted_by_what_it_says(tmp_path):
    source = parquet(tmp_path)
    path = Path(source.path)
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)  # in a page of the first row group
    path.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match="cannot be decoded"):
        open_corpus(config(tmp_path, corpus=source))
    corpus = opened(tmp_path, source, most=0.5)
    assert 900 <= corpus.damaged <= 1005 and corpus.train.sources[0].tokens > 10_000


def test_a_wrong_column_is_no_damage(tmp_path):
    source = jsonl(tmp_path)
    source.field = "body"
    with pytest.raises(ConfigError, match="data.sources.corpus.field=body is no column of"):
        opened(tmp_path, source, most=1.0)
