"""Opens the corpus of a configuration: prepared once by whichever process comes first, then memory-mapped by all.

The cache holds trained tokenizers (`tokenizers/`), token files (`tokens/`), what `datasets` downloads or converts
(`datasets/`), compressed files as lines (`expanded/`) and notes on streams (`streams/`); every name is a hash of what
its content depends on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import Config, ConfigError
from trainer.data.documents import Source, held_out_threshold
from trainer.data.progress import say
from trainer.data.shards import TokeniseJob, read_manifest, tokenise, write_manifest
from trainer.data.stream import StreamedSequences, hold_out
from trainer.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_tokenizer
from trainer.data.tokens import (
    Packed,
    Sequences,
    TokenRun,
    TokenWriter,
    file_digest,
    hold_out_tail,
    open_token_file,
    token_dtype,
)
from trainer.util.files import replacing

FORMAT = 1
"""Part of every key of the cache; raised when the same input would be prepared differently."""

TRAINING_BYTES = 100 << 20
"""Text that a tokenizer is trained on, at most, over all sources."""


class Samples:
    """The sequences of one side of the split, over all sources.

    `len` is an epoch: the sequences of all sources together. A stream, whose length is unknown, adds none.
    """

    def __init__(self, sources: list[Sequences], weights: list[float]):
        self.sources, self.weights = sources, weights
        self.names = [source.name for source in sources]
        self._ends = np.cumsum([source.length or 0 for source in sources], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.sources else 0

    @property
    def endless(self) -> bool:
        """Whether a stream is among the sources, so that no epoch can be counted."""
        return any(source.length is None for source in self.sources)

    def locate(self, index: int) -> tuple[int, int]:
        """The source, and the sequence there, of sequence `index` of all sources one after the other."""
        source = int(np.searchsorted(self._ends, index, "right"))
        return source, index - (int(self._ends[source - 1]) if source else 0)

    def get(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays [sequence_length + 1]: tokens (int64), and the number of each token's document (int32)."""
        if not 0 <= index < len(self):
            raise IndexError(f"{len(self)} sequences, not {index}")
        source, within = self.locate(index)
        return self.sources[source].get(within)


@dataclass
class Corpus:
    """What a run trains on and is evaluated on.

    `fingerprint` identifies what sample numbers refer to: tokens, sequence length and weights. The seed is no part of
    it."""

    tokenizer: Tokenizer
    train: Samples
    eval: Samples
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size


def open_corpus(config: Config) -> Corpus:
    """The corpus of `config.data`, tokenised first if the cache does not have it.

    Safe to call from many processes at once, on one or several machines, before any process group exists. Raises
    `ConfigError` with everything that is wrong with the sources, the tokenizer or their sizes.
    """
    sources = _sources(config)
    tokenizer = _tokenizer(config, sources)
    limit = _model_vocab_size(config)
    if tokenizer.vocab_size > limit:
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer} has {tokenizer.vocab_size} tokens, more than the model's "
            f"vocab_size={limit}; set model.vocab_size={tokenizer.vocab_size} or more, or take a smaller tokenizer"
        )
    opened = _collect(lambda source=source: _open(config, source, tokenizer) for source in sources)
    weights = [source.config.weight for source in sources]
    train, held = Samples([split[0] for split in opened], weights), Samples([split[1] for split in opened], weights)
    _check_sizes(config, train, held)
    parts = [
        config.batch.sequence_length,
        *(
            (source.name, round(source.config.weight / sum(weights), 9), split[2])
            for source, split in zip(sources, opened)
        ),
    ]
    return Corpus(tokenizer, train, held, _key(parts))


def _sources(config: Config) -> list[Source]:
    """The sources with a weight, by name: their order in the configuration means nothing."""
    named = [(name, source) for name, source in sorted(config.data.sources.items()) if source.weight > 0]
    if not named:
        raise ConfigError("data.sources names no corpus with a weight above 0; the default is data=stdlib")
    cache = _cache(config)
    return _collect(lambda name=name, source=source: Source(name, source, cache) for name, source in named)


def _collect(makers: Iterable[Callable[[], Any]]) -> list[Any]:
    """What each maker returns; the `ConfigError`s of all of them are raised as one."""
    made, problems = [], []
    for make in makers:
        try:
            made.append(make())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return made


def _tokenizer(config: Config, sources: list[Source]) -> Tokenizer:
    data = config.data
    if data.tokenizer == "bytes":
        return byte_tokenizer()
    if data.tokenizer != "bpe":
        return load_tokenizer(data.tokenizer)
    if config.model.from_hf:  # pretrained weights know one tokenizer: their own
        folder = Path(config.model.from_hf).expanduser()
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise ConfigError(
                f"model.from_hf={folder} holds no tokenizer; set data.tokenizer to the one that its weights were "
                "trained with"
            )
        return load_tokenizer(folder)
    texts = [source for source in sources if source.config.kind != "tokens"]
    if not texts:
        raise ConfigError(
            "data.tokenizer=bpe is trained on text, and all of data.sources are token files; name the tokenizer that "
            "they were made with"
        )
    if not 257 <= data.vocab_size <= _model_vocab_size(config):
        raise ConfigError(
            f"data.vocab_size={data.vocab_size} must lie between 257 (256 bytes and the end mark) and the model's "
            f"vocab_size={_model_vocab_size(config)}"
        )
    key = _key(["bpe", data.vocab_size, [source.identity for source in texts]])
    path = _cache(config) / "tokenizers" / f"{key}.json"

    def train() -> None:
        say(f"training a tokenizer of {data.vocab_size} tokens on {', '.join(source.name for source in texts)} ...")
        share = TRAINING_BYTES // len(texts)
        tokenizer = train_tokenizer((text for source in texts for text in source.sample_texts(share)), data.vocab_size)
        with replacing(path) as part:
            tokenizer.backend.save(part)

    _once(path, train, config)
    return load_tokenizer(path)


def _open(config: Config, source: Source, tokenizer: Tokenizer) -> tuple[Sequences, Packed, Any]:
    """Training and held-out sequences of a source, and what identifies their content."""
    if source.config.kind == "tokens":
        runs, content = _token_files(config, source, tokenizer)
    elif source.streams:
        return _open_stream(config, source, tokenizer)
    else:
        key = [source.identity, tokenizer.digest, config.data.eval_fraction]
        folder = _cache(config) / "tokens" / f"{source.name}-{_key(key)}"

        def prepare() -> None:
            threshold = held_out_threshold(source.documents, config.data.eval_fraction)
            job = TokeniseJob(source.documents, tokenizer, token_dtype(tokenizer.vocab_size), threshold, folder)
            tokenise(job, source.name, config.data.workers)

        _once(folder / "manifest.json", prepare, config)
        runs, content = read_manifest(folder)
    return *(_packed(config, source, tokenizer, runs[split]) for split in ("train", "eval")), content


def _open_stream(config: Config, source: Source, tokenizer: Tokenizer) -> tuple[Sequences, Packed, Any]:
    threshold, length = held_out_threshold(source.documents, config.data.eval_fraction), config.batch.sequence_length
    content = [source.identity, tokenizer.digest, threshold]
    source.documents.open()  # errors in its name or columns are found now
    wanted = config.eval.sequences * length + 1 if config.eval.every else 0
    folder = _cache(config) / "tokens" / f"{source.name}-{_key([*content, wanted])}"

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        writer = TokenWriter(str(folder / "eval.bin"), token_dtype(tokenizer.vocab_size))
        try:
            hold_out(source.documents, tokenizer, threshold, wanted, writer)
            write_manifest(folder, writer.dtype, {"train": [], "eval": [writer.finish()] if writer.count else []})
        finally:
            writer.discard()

    _once(folder / "manifest.json", prepare, config)
    notes = _cache(config) / "streams" / _key([*content, length])
    train = StreamedSequences(source.documents, tokenizer, threshold, length, notes)
    return train, _packed(config, source, tokenizer, read_manifest(folder)[0]["eval"]), content


def _token_files(config: Config, source: Source, tokenizer: Tokenizer) -> tuple[dict[str, list[TokenRun]], Any]:
    if source.config.limit:
        raise ConfigError(
            f"data.sources.{source.name}.limit={source.config.limit} counts documents, and token files are not read "
            "by documents; leave it at 0"
        )
    whole = [open_token_file(source.name, source.config, path, tokenizer.vocab_size) for path in source.paths]
    parts = [hold_out_tail(run, config.data.eval_fraction, tokenizer.end_id) for run in whole]
    return (
        {split: [part[side] for part in parts] for side, split in enumerate(("train", "eval"))},
        [[file_digest(run), part[0].length] for run, part in zip(whole, parts)],
    )


def _packed(config: Config, source: Source, tokenizer: Tokenizer, runs: list[TokenRun]) -> Packed:
    runs = [run for run in runs if run.length]
    return Packed(source.name, runs, tokenizer.end_id, tokenizer.vocab_size, config.batch.sequence_length)


def _check_sizes(config: Config, train: Samples, held: Samples) -> None:
    length = config.batch.sequence_length
    problems = [
        f"data.sources.{source.name} holds {source.tokens} tokens to train on, and one sequence of "
        f"batch.sequence_length={length} needs {length + 1}; shorten it, or add text"
        for source in train.sources
        if source.length == 0
    ]
    if config.eval.every and not len(held):
        tokens = sum(source.tokens for source in held.sources)
        problems.append(
            f"eval.every={config.eval.every} needs at least one held-out sequence of batch.sequence_length={length}, "
            f"and data.eval_fraction={config.data.eval_fraction} holds out {tokens} tokens in whole documents; raise "
            "data.eval_fraction, shorten the sequence, or set eval.every=0"
        )
    if problems:
        raise ConfigError(problems)


def _model_vocab_size(config: Config) -> int:
    if config.model.from_hf:
        from trainer.hf import spec_from_hf

        return spec_from_hf(config.model.from_hf).vocab_size
    return config.model.vocab_size


def _cache(config: Config) -> Path:
    return Path(config.data.cache).expanduser().absolute()


def _key(parts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps([FORMAT, *parts]).encode(), digest_size=12).hexdigest()


def _once(target: Path, make: Callable[[], None], config: Config) -> None:
    """Makes `target` in the first process that needs it; the others wait for that process's file lock."""
    if target.exists():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Others may share the folder: a link that one of them has put there is not followed, and nothing is cut off.
        lock = os.open(target.with_suffix(".lock"), os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if not target.exists():
                make()
    except OSError as error:
        raise ConfigError(
            f"data.cache={config.data.cache} cannot be written ({error}); name a folder with room and permission"
        ) from error
