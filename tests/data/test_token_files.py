"""Ready-made token files: recognised by their content, checked once, and never many of them open."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.corpora import config

from trainer.config import ConfigError, SourceConfig
from trainer.config.model import ModelSpec
from trainer.data import tokens as token_files
from trainer.data.corpus import Corpus, open_corpus
from trainer.data.tokens import infer_dtype, open_token_file
from trainer.hf import HFWeights, export_model
from trainer.planning.parameters import declare_parameters

END = 256
"""The end mark of the tokenizer of bytes."""


def raw(dtype: str, suffix: str) -> Callable[[Path, list[np.ndarray]], Path]:
    def write(folder: Path, documents: list[np.ndarray]) -> Path:
        path = folder / f"tokens{suffix}"
        np.concatenate(documents).astype(dtype).tofile(path)
        return path

    return write


def npy(dtype: str) -> Callable[[Path, list[np.ndarray]], Path]:
    def write(folder: Path, documents: list[np.ndarray]) -> Path:
        np.save(folder / "tokens.npy", np.concatenate(documents).astype(dtype))
        return folder / "tokens.npy"

    return write


def llm_c(magic: int, version: int, dtype: str) -> Callable[[Path, list[np.ndarray]], Path]:
    def write(folder: Path, documents: list[np.ndarray]) -> Path:
        path, tokens, header = folder / "tokens.bin", np.concatenate(documents), np.zeros(256, "<i4")
        header[:3] = magic, version, len(tokens)
        path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
        return path

    return write


def megatron(code: int, dtype: str) -> Callable[[Path, list[np.ndarray]], Path]:
    def write(folder: Path, documents: list[np.ndarray]) -> Path:
        """Every document but the first in two sequences, as Megatron cuts sentences."""
        path, parts, borders = folder / "tokens.bin", [], [0]
        for number, document in enumerate(documents):
            parts += np.array_split(document, 1 + (number > 0))
            borders.append(len(parts))
        np.concatenate(parts).astype(dtype).tofile(path)
        lengths = np.array([len(part) for part in parts], "<i4")
        pointers = (np.cumsum(lengths) - lengths).astype("<i8") * np.dtype(dtype).itemsize
        head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(parts), len(borders))
        index = head + lengths.tobytes() + pointers.tobytes() + np.array(borders, "<i8").tobytes()
        path.with_suffix(".idx").write_bytes(index)
        return path

    return write


def datatrove(dtype: str) -> Callable[[Path, list[np.ndarray]], Path]:
    def write(folder: Path, documents: list[np.ndarray]) -> Path:
        path = folder / "tokens.ds"
        np.concatenate(documents).astype(dtype).tofile(path)
        np.cumsum([len(document) for document in documents]).astype("<u8").tofile(f"{path}.index")
        Path(f"{path}.metadata").write_text(f"bytes|{np.dtype(dtype).itemsize}\n17\n17 T")
        return path

    return write


INDEXED = {
    "Megatron, 16 bits": megatron(8, "<u2"),
    "Megatron, 32 bits": megatron(4, "<i4"),
    "Megatron, 64 bits": megatron(5, "<i8"),
    "datatrove, 16 bits": datatrove("<u2"),
    "datatrove, 32 bits": datatrove("<u4"),
}
FORMATS = {
    "nanoGPT": raw("<u2", ".bin"),
    "32 bits": raw("<u4", ".bin"),
    "int32": raw("<i4", ".bin"),
    "int64": raw("<i8", ".bin"),
    "dolma, 16 bits": raw("<u2", ".npy"),
    "dolma, 32 bits": raw("<u4", ".npy"),
    "numpy, 16 bits": npy("<u2"),
    "numpy, int64": npy("<i8"),
    "numpy, big-endian": npy(">u4"),
    "llm.c, modded-nanogpt": llm_c(20240520, 1, "<u2"),
    "llm.c, Llama 3": llm_c(20240801, 7, "<u4"),
    **INDEXED,
}


def documents_of(count: int, marked: bool) -> list[np.ndarray]:
    """Documents of bytes, with the end mark or without."""
    made = [np.frombuffer(b"%d is %d kg" % (n, n * n) * (1 + n % 4), np.uint8).astype(int) for n in range(count)]
    return [np.append(one, END) for one in made] if marked else made


def opened(folder: Path, path: Path | str, length: int = 1, **data: object) -> Corpus:
    made = config(folder, length=length, corpus=SourceConfig("tokens", str(path)))
    made.data.eval_fraction = 0.0
    for name, value in data.items():
        setattr(made.data.sources["corpus"] if name == "dtype" else made.data, name, value)
    return open_corpus(made)


def tokens_and_starts(corpus: Corpus, side: str = "train") -> tuple[list[int], list[int]]:
    """All tokens of sequences of one token, and the places where a document starts behind the first."""
    samples = getattr(corpus, side)
    found = [samples.get(index) for index in range(len(samples))]
    tokens = [int(sample.tokens[0]) for sample in found] + [int(found[-1].tokens[1])]
    return tokens, [index + 1 for index, sample in enumerate(found) if sample.documents[1]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_recognised_by_its_content(name, tmp_path):
    documents = documents_of(40, marked=name not in INDEXED)
    (tmp_path / "data").mkdir()
    path = FORMATS[name](tmp_path / "data", documents)
    starts = np.cumsum([len(document) for document in documents])[:-1].tolist()
    for place in (path, tmp_path / "data"):  # the files beside it are no tokens
        corpus = opened(tmp_path, place, mask_documents=True)
        assert tokens_and_starts(corpus) == (np.concatenate(documents).tolist(), starts) and not corpus.notes
    long = opened(tmp_path, path, length=64, mask_documents=True).train
    numbers = np.searchsorted([*starts], np.arange(len(np.concatenate(documents))), "right")
    for index in range(len(long)):
        part = numbers[64 * index : 64 * index + 65]
        assert long.get(index).documents.tolist() == (part - part[0]).tolist()
    held = opened(tmp_path, path, eval_fraction=0.3)
    (train, _), (rest, inner) = tokens_and_starts(held), tokens_and_starts(held, "eval")
    assert train + rest == np.concatenate(documents).tolist()
    assert len(train) == next(start for start in starts if start >= round(0.7 * len(train + rest)))
    assert inner == [start - len(train) for start in starts if start > len(train)]


def zipf(size: int, most: int, seed: int) -> np.ndarray:
    """Ids as a tokenizer of this size makes them: frequent ones are small."""
    draw = np.random.default_rng(seed)
    return np.minimum(np.exp(draw.random(size) * np.log(most + 1)) - 1, most).astype(np.int64)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["<u2", "<u4", "<i4", "<u8", "<i8", ">u4", ">i8"]),
    st.sampled_from([2, 4, 27, 257, 5000, 32_000, 50_257, 65_536, 100_277, 128_256, 262_144]),
    st.integers(32, 3000),
    st.integers(0, 1 << 30),
    st.sampled_from([zipf, lambda size, most, seed: np.random.default_rng(seed).integers(0, most + 1, size)]),
    st.booleans(),
)
def test_the_width_of_raw_tokens_is_told(dtype, vocab_size, size, seed, draw, larger):
    """By all ids that fit, also with a larger tokenizer than theirs."""
    ids = draw(size // 4 * 4, vocab_size - 1, seed)
    assume(np.dtype(dtype).itemsize > 2 or ids.max() < 1 << 16)
    assume(vocab_size > 4 or len(set(ids.tolist())) > 1)
    words = np.frombuffer(ids.astype(dtype).tobytes(), "<u2")
    found = infer_dtype(words[: len(words) // 4 * 4].reshape(-1, 4), 300_000 if larger else vocab_size)
    wanted = dtype.replace("i", "u")
    assert found == wanted or found is None and vocab_size <= 4 and larger


def test_too_few_or_equal_words_tell_nothing():
    assert infer_dtype(np.zeros((1000, 4), np.uint16), 257) is None
    assert infer_dtype(np.array([[5, 0, 7, 0]], np.uint16), 257) is None


def beside(index: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        file = path.with_suffix(".idx") if index == ".idx" else Path(f"{path}{index}")
        file.write_bytes(change(file.read_bytes()))

    return spoil


def packed(path: Path, offset: int, layout: str, value: object) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(layout, content, offset, value)
    path.write_bytes(content)


REFUSED = {
    "header, cut off": ("llm.c, Llama 3", lambda path: os.truncate(path, 5000), "not those of the .* of its header"),
    "header, version": ("llm.c, Llama 3", lambda path: packed(path, 4, "<i", 9), "version 9, which is not known"),
    "header, of an evaluation": ("llm.c, Llama 3", lambda path: packed(path, 0, "<i", 20240522), "evaluation set"),
    "big-endian": ("32 bits", lambda path: raw(">u4", ".bin")(path.parent, documents_of(40, True)), "big-endian"),
    "ids": ("nanoGPT", lambda path: packed(path, 100, "<H", 257), "token 257, beyond the tokenizer's 257; data.tok"),
    "negative ids": ("numpy, int64", lambda path: packed(path, 1000, "<q", -100), "token -100, beyond"),
    "negative raw ids": ("int32", lambda path: packed(path, 400, "<i", -100), "token 4294967196, beyond"),
    "an index as tokens": ("Megatron, 16 bits", lambda path: path.with_suffix(".idx").rename(path), "is the index"),
    "index, cut off": ("Megatron, 16 bits", beside(".idx", lambda data: data[:-8]), "not those of"),
    "index, of modes": (
        "Megatron, 16 bits",
        beside(".idx", lambda data: data + bytes(79)),
        "modes, which are not read",
    ),
    "index, of another file": (
        "Megatron, 16 bits",
        lambda path: packed(path.with_suffix(".idx"), 34 + 4 * 79 + 8, "<q", 2),
        "is not the file that .* describes",
    ),
    "index, old": ("Megatron, 16 bits", beside(".idx", lambda data: b"TNTIDX\0\0" + data[8:]), "an old format"),
    "index, of floats": ("Megatron, 16 bits", beside(".idx", lambda data: data[:17] + b"\7" + data[18:]), "type 7"),
    "tokens, cut off": ("Megatron, 16 bits", lambda path: os.truncate(path, 500), "is not the file that .* describes"),
    "ends, cut off": ("datatrove, 32 bits", beside(".index", lambda data: data[:-8]), "not those of the .* tokens"),
    "ends, unordered": (
        "datatrove, 32 bits",
        beside(".index", lambda data: data[8:16] + data[:8] + data[16:]),
        "no rising ends",
    ),
    "losses": ("datatrove, 16 bits", lambda path: Path(f"{path}.loss").touch(), "says which tokens are learned"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_damaged_or_unknown_file_is_refused_by_name(name, tmp_path):
    written, spoil, message = REFUSED[name]
    path = FORMATS[written](tmp_path, documents_of(40, marked=written not in INDEXED))
    spoil(path)
    with pytest.raises(ConfigError, match=f"(?s)data.sources.corpus.path: {path}.*{message}"):
        opened(tmp_path, path)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(INDEXED)), st.data())
def test_whatever_an_index_holds_ends_in_borders_or_an_error(name, data):
    with tempfile.TemporaryDirectory() as place:
        path = INDEXED[name](Path(place), documents_of(6, marked=False))
        index = Path(token_files.index_of(str(path)))
        content = bytearray(index.read_bytes())
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
            content[at] = data.draw(st.integers(0, 255))
        index.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
        try:
            corpus = opened(Path(place), path)
        except ConfigError as error:
            assert str(path) in str(error)
            return
        tokens, starts = tokens_and_starts(corpus)
        assert tokens == np.concatenate(documents_of(6, marked=False)).tolist() and starts == sorted(set(starts))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_configured_type_has_to_be_that_of_the_file(name, dtype, tmp_path):
    path = FORMATS[name](tmp_path, documents_of(40, marked=True))
    width = np.dtype(open_token_file("data.sources.corpus", SourceConfig("tokens"), str(path), 257).dtype).itemsize
    if width == np.dtype(dtype).itemsize:
        assert opened(tmp_path, path, dtype=dtype).train.sources[0].tokens
    else:
        with pytest.raises(ConfigError, match=f"tokens of {8 * width} bits, and data.sources.corpus.dtype={dtype}"):
            opened(tmp_path, path, dtype=dtype)


def test_masked_documents_need_borders(tmp_path):
    (tmp_path / "data").mkdir()
    raw("<u2", "1.bin")(tmp_path / "data", documents_of(40, marked=False))
    message = r"1 of 1 token files hold neither the end mark of data.tokenizer=bytes \(token 256\) nor an index"
    with pytest.raises(ConfigError, match=f"{message}.*so that data.mask_documents=true masks nothing"):
        opened(tmp_path, tmp_path / "data", mask_documents=True)
    assert not opened(tmp_path, tmp_path / "data").notes
    raw("<u2", "2.bin")(tmp_path / "data", documents_of(40, marked=True))
    (note,) = opened(tmp_path, tmp_path / "data", mask_documents=True).notes
    assert "1 of 2 token files" in note and note.endswith("each of them is masked as one document")


def test_the_ids_are_read_once_and_after_a_change(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    path = megatron(8, "<u2")(tmp_path / "data", documents_of(40, marked=False))
    calls: list[int] = []
    check = token_files.check_token_files
    monkeypatch.setattr("trainer.data.corpus.check_token_files", lambda *given: calls.append(1) or check(*given))
    first = opened(tmp_path, path).fingerprint
    assert opened(tmp_path, path).fingerprint == first and len(calls) == 1
    (starts,) = (tmp_path / "cache").glob("checked/*/*.starts")
    os.truncate(starts, 8)
    with pytest.raises(ConfigError, match="data.cache: .* is damaged; delete it"):
        opened(tmp_path, path)
    megatron(8, "<u2")(tmp_path / "data", documents_of(40, marked=False)[::-1])
    assert opened(tmp_path, path).fingerprint != first and len(calls) == 2
    packed(path, 200, "<H", 5000)
    with pytest.raises(ConfigError, match="holds token 5000"):
        opened(tmp_path, path)


def test_pieces_of_a_large_file_are_all_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "PIECE", 100)
    path = FORMATS["nanoGPT"](tmp_path, documents_of(40, marked=True))
    size = path.stat().st_size
    for place in range(0, size, 198):
        packed(path, place, "<H", 300)
        with pytest.raises(ConfigError, match="holds token 300"):
            opened(tmp_path, path)
        packed(path, place, "<H", 1)


MANY = """
import json, os, sys
from pathlib import Path
import numpy as np, pyarrow, pyarrow.parquet
from support.corpora import PLAIN, config, SourceConfig
from trainer.data import shards
from trainer.data.corpus import open_corpus
from trainer.data.tokens import MAPS
messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 30}]
shards.SHARD_BYTES = 1
folder, files = Path(sys.argv[1]), {"tokens": 300, "jsonl": 80, "parquet": 80, "chat": 80}
(folder / "chat.jinja").write_text(PLAIN)
for kind, n in ((kind, n) for kind, most in files.items() for n in range(most)):
    (folder / kind).mkdir(exist_ok=True)
    name, text = folder / kind / f"{n:03d}", f"document {n} " * 5
    ids = np.append(np.frombuffer(text.encode(), np.uint8), 256)
    if kind == "tokens":
        ids.astype("<u2").tofile(f"{name}.ds")
        np.array([20, len(ids)], "<u8").tofile(f"{name}.ds.index")
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), f"{name}.parquet")
    else:
        row = {"text": text} if kind == "jsonl" else {"messages": messages}
        Path(f"{name}.jsonl").write_text(json.dumps(row))
made = config(folder, 64, **{kind: SourceConfig(kind, str(folder / kind)) for kind in files})
made.data.eval_fraction, made.data.chat_template = 0.0, str(folder / "chat.jinja")
corpus = open_corpus(made)
assert [len(source.runs) for source in corpus.train.sources] == [files[name] for name in corpus.train.names]
for _ in range(2):
    for index in range(len(corpus.train)):
        corpus.train.get(index)
maps = sum(str(folder) in line for line in open("/proc/self/maps"))
print(len(os.listdir("/proc/self/fd")), maps, MAPS)
"""


def test_more_files_than_may_be_open(tmp_path):
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    command = f'ulimit -n 64; exec {sys.executable} -c "$CODE" {tmp_path}'
    done = subprocess.run(
        ["bash", "-c", command], env={**environment, "CODE": MANY}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    held, maps, most = map(int, done.stdout.split())
    assert held < 64 and 0 < maps <= most <= 8


def test_few_weight_files_are_open_at_a_time(tmp_path, monkeypatch):
    spec = ModelSpec(vocab_size=512, width=16, depth=2, max_length=32)
    spec.attention.heads, spec.feed_forward.width = 2, 24
    tensors = {name: torch.randn(info.shape) for name, info in declare_parameters(spec).items()}
    export_model(spec, tensors, tmp_path / "model", torch.float32, shard_size=2000)
    monkeypatch.setattr("trainer.hf.weights.HANDLES", 3)
    weights = HFWeights(tmp_path / "model", spec)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 10
    for name, info in declare_parameters(spec).items():
        assert torch.equal(weights(name, info), tensors[name])
        assert len({line.split()[-1] for line in open("/proc/self/maps") if str(tmp_path) in line}) <= 3
