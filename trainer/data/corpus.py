"""Opens the corpus of a configuration: prepared once by whichever process comes first, then memory-mapped by all.

The cache holds trained tokenizers (`tokenizers/`), token files (`tokens/`), what `datasets` downloads or converts
(`datasets/`), objects of a store (`objects/`), compressed files as lines (`expanded/`) and notes on streams
(`streams/`); every name is a hash of what its content depends on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config import Config, ConfigError
from trainer.data.documents import DocumentSource, HubStream, MakeCached, digest_text, held_out_threshold
from trainer.data.mixture import Mixture, MixtureStage
from trainer.data.shards import (
    SPLITS,
    TokeniseJob,
    cuts_documents,
    is_due,
    mark_verified,
    read_manifest,
    remove_damaged,
    tokenise_shards,
    write_manifest,
)
from trainer.data.text import ChatTemplate, PackedConversations, read_template
from trainer.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_tokenizer
from trainer.data.tokens import (
    DataError,
    PackedSequences,
    TokenRun,
    TokenSample,
    TokenSequences,
    TokenWriter,
    file_digest,
    hold_out_tail,
    number_documents,
    open_token_file,
    print_notice,
    token_dtype,
)
from trainer.util.reading import Malformed, read_json, replace_file, shorten_foreign, write_atomic

# A data set of the Hugging Face hub, streamed while training and packed in the order in which its documents arrive.
# Sequence i of a stream depends on the stream, the tokenizer and the sequence length, not on ranks. The position in
# samples is therefore enough to resume under any plan. Unlike other sources, a stream is not shuffled beyond the
# hub's own order, every rank reads and tokenises all of it, and an epoch has no known length. When the stream ends,
# it starts again. To reach a position, a reader has to read all that comes before. It therefore saves its state to
# the cache every `NOTE_EVERY` sequences, and starts from the last saved state before its position. Without saved
# states (on another machine) it reads from the start.


GROUP = 64
"""Documents tokenised together."""

NOTE_EVERY = 1024
"""Sequences between two saved states of the reader."""


class StreamedSequences:
    """Sequences of a stream, see `tokens.TokenSequences`. Rising order is fast; going back starts the stream again."""

    length = None

    def __init__(self, documents: HubStream, tokenizer: Tokenizer, threshold: int, sequence_length: int, notes: Path):
        self.name, self.documents, self.tokenizer = documents.name, documents, tokenizer
        self.threshold, self.size, self.notes = threshold, sequence_length, notes
        self._rows: Iterator[dict] | None = None

    def get(self, index: int) -> TokenSample:
        """See `Sequences`. Raises `DataError` when the stream breaks off or holds no text."""
        if self._rows is None or index < self._next:
            self._start(index)
        while True:
            while len(self._buffer) <= self.size:
                self._pull()
            tokens = self._buffer[: self.size + 1]
            self._buffer, self._next = self._buffer[self.size :], self._next + 1
            if self._next > index:
                return TokenSample(tokens, number_documents(tokens, self.tokenizer.end_id))

    def _start(self, index: int) -> None:
        """Goes to the last saved state at or before sequence `index`, else to the start."""
        self._next, self._buffer, self._kept, self._note_read = 0, np.empty(0, np.int64), False, None
        self._dataset = self.documents.open()
        found = {int(path.stem): path for path in self.notes.glob("*.json") if re.fullmatch("[0-9]{12,18}", path.stem)}
        for number in sorted((number for number in found if number <= index), reverse=True):
            try:
                self._go_to(number, found[number])
                break
            except (OSError, Malformed) as error:
                print_notice(f"{error}; it is left out")
                self._dataset = self.documents.open()
        self._noted, self._rows = self._next, self.documents.rows(self._dataset)

    def _go_to(self, number: int, path: Path) -> None:
        """Continues as the note at `path` says. Raises `Malformed` where it says nothing that could be true."""
        note = read_json(path, {"state": dict, "tokens": [int]}, "delete it")
        if not all(0 <= token < self.tokenizer.vocab_size for token in note["tokens"]):
            raise Malformed(f"{path} holds tokens beyond the tokenizer's {self.tokenizer.vocab_size}; delete it")
        try:
            self._dataset.load_state_dict(note["state"])
        except Exception as error:  # whatever datasets meets in a state that it has not written
            raise Malformed(f"{path} is no state of the stream: {shorten_foreign(error)}; delete it") from error
        self._next, self._buffer, self._kept = number, np.asarray(note["tokens"], np.int64), True
        self._note_read = path

    def _pull(self) -> None:
        """Tokenises the next group of documents; at the end of the stream, opens it again."""
        if self._next - self._noted >= NOTE_EVERY and os.environ.get("LOCAL_RANK", "0") == "0":
            self._note()
        try:
            rows = list(islice(self._rows, GROUP))
        except DataError as error:
            self._rows = None  # otherwise the failed reader would look as if it were at its end
            if self._note_read is None:
                raise
            raise DataError(
                f"{error} (it was read on as {self._note_read} says; delete that if it is damaged)"
            ) from error
        self._note_read = None
        texts = [text for text in self.documents.texts(rows) if digest_text(text) >= self.threshold]
        if texts:
            self._kept = True
            encoded = self.tokenizer.encode_batch(texts)
            self._buffer = np.concatenate([self._buffer, *([*ids, self.tokenizer.end_id] for ids in encoded)])
        if len(rows) < GROUP:
            if not self._kept:
                raise DataError(
                    f"{self.documents.setting}: the stream {self.documents.source.path} holds no text to train on"
                )
            self._dataset = self.documents.open()
            self._rows = self.documents.rows(self._dataset)

    def _note(self) -> None:
        self._noted = self._next
        self.notes.mkdir(parents=True, exist_ok=True)
        note = {"state": self._dataset.state_dict(), "tokens": self._buffer.tolist()}
        write_atomic(self.notes / f"{self._next:012d}.json", json.dumps(note))


def hold_out(documents: HubStream, tokenizer: Tokenizer, threshold: int, tokens: int, writer: TokenWriter) -> None:
    """Writes the stream's first held-out documents: at least `tokens` tokens, or all there are."""
    for text in documents.texts(documents.rows(documents.open())):
        if writer.count >= tokens:
            return
        if digest_text(text) < threshold:
            writer.append([*tokenizer.encode(text), tokenizer.end_id])


# The corpus of a configuration, of all kinds of sources.


FORMAT = 1
"""Part of every key of the cache; raised when the same input would be prepared differently."""

TRAINING_BYTES = 100 << 20
"""Text that a tokenizer is trained on, at most, over all sources."""


class CorpusSide:
    """The sequences of one side of the split, over all sources.

    `len` is an epoch: the sequences of all sources together. A stream, whose length is unknown, adds none. weights:
    of the sources at the start of a run. later: other weights later in the run. limits: the most sequences of a source
    over a run, by name.
    """

    def __init__(
        self,
        sources: list[TokenSequences],
        weights: list[float],
        later: Iterable[MixtureStage] = (),
        limits: Mapping[str, int] | None = None,
    ):
        self.sources, self.weights = sources, weights
        self.names = [source.name for source in sources]
        self.stages, self.limits = [MixtureStage(0, dict(zip(self.names, weights))), *later], limits or {}
        self._ends = np.cumsum([source.length or 0 for source in sources], dtype=np.int64)

    def plan_mixture(self, history: Mixture | None = None, position: int = 0) -> Mixture:
        """By what a run draws its samples. history, position: of a run that is resumed, see `Mixture.plan`."""
        return Mixture.plan(self.stages, self.limits, history, position)

    def count_epochs(self, mixture: Mixture, position: int) -> dict[str, float]:
        """Passes over each source, by name, when a run has drawn `position` samples; streams are left out."""
        drawn = mixture.consumed(position)
        return {source.name: drawn.get(source.name, 0) / source.length for source in self.sources if source.length}

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

    def get(self, index: int) -> TokenSample:
        """Sequence `index` of all sources one after the other."""
        if not 0 <= index < len(self):
            raise IndexError(f"{len(self)} sequences, not {index}")
        source, within = self.locate(index)
        return self.sources[source].get(within)


@dataclass
class Corpus:
    """What a run trains on and is evaluated on.

    `fingerprint` identifies what sample numbers refer to: tokens, sequence length and weights. The seed is no part of
    it. contents: identifies the tokens of each source to train on, by its name. sets: what else is evaluated, by name;
    sets_fingerprint: identifies it. damaged: rows to train on that were left out, None where none may be. notes: what
    is to be said of the data."""

    tokenizer: Tokenizer
    train: CorpusSide
    eval: CorpusSide
    fingerprint: str
    contents: dict[str, str]
    sets: dict[str, CorpusSide]
    sets_fingerprint: str
    damaged: int | None
    notes: list[str]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size


class MissingPart(ConfigError):
    """A part of the corpus would have to be made first."""


def open_corpus(config: Config, prepare: bool = True) -> Corpus:
    """The corpus of `config.data`, tokenised first if the cache does not have it, or, unless it is to be prepared, a
    `MissingPart` raised.

    Safe to call from many processes at once, on one or several machines, before any process group exists. Raises
    `ConfigError` with everything that is wrong with the sources, the tokenizer or their sizes.
    """
    once = partial(_make_cached, config=config, prepare=prepare)
    sources, sets = _sources(config, once)
    tokenizer = _tokenizer(config, sources, once)
    _use_template(config, [*sources, *sets], tokenizer)
    limit = _model_vocab_size(config)
    if tokenizer.vocab_size > limit:
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer} has {tokenizer.vocab_size} tokens, more than the model's "
            f"vocab_size={limit}; set model.vocab_size={tokenizer.vocab_size} or more, or take a smaller tokenizer"
        )
    opened = _collect(
        [
            *(
                lambda source=source: _open(config, source, tokenizer, config.data.eval_fraction, once)
                for source in sources
            ),
            *(lambda source=source: _open(config, source, tokenizer, 1.0, once) for source in sets),
        ]
    )
    evaluated = {source.name: CorpusSide([one.held], [1.0]) for source, one in zip(sets, opened[len(sources) :])}
    weights = [source.config.weight for source in sources]
    trained, held_out = ([one[side] for one in opened[: len(sources)]] for side in (0, 1))
    limits = {name: limit for name, limit in map(partial(_limit, config), trained) if limit is not None}
    train, held = CorpusSide(trained, weights, _stages(config), limits), CorpusSide(held_out, weights)
    _check_sizes(config, train, held, evaluated)
    parts = [
        config.batch.sequence_length,
        *(
            (source.name, round(source.config.weight / sum(weights), 9), one.content)
            for source, one in zip(sources, opened)
        ),
    ]
    return Corpus(
        tokenizer,
        train,
        held,
        _key(parts),
        {source.name: _key([one.content]) for source, one in zip(sources, opened)},
        evaluated,
        _key([[source.name, one.content] for source, one in zip(sets, opened[len(sources) :])]),
        sum(one.damaged for one in opened[: len(sources)]) if config.data.on_error == "skip" else None,
        [note for one in [*sources, *sets, *opened] for note in one.notes],
    )


class OpenedSource(NamedTuple):
    """A source, tokenised: training and held-out sequences, what identifies their content, how many rows were left out,
    and what is to be said of it."""

    train: TokenSequences
    held: PackedSequences | PackedConversations
    content: Any
    damaged: int = 0
    notes: tuple[str, ...] = ()


def _sources(config: Config, once: MakeCached) -> tuple[list[DocumentSource], list[DocumentSource]]:
    """The sources that have a weight at some time of the run, and the sets, by name: their order in the configuration
    means nothing."""
    later = {name for stage in config.data.stages.values() for name, weight in stage.weights.items() if weight > 0}
    named = [
        (name, source) for name, source in sorted(config.data.sources.items()) if source.weight > 0 or name in later
    ]
    if not named:
        raise ConfigError("data.sources names no corpus with a weight above 0; the default is data=stdlib")
    sets = sorted(config.eval.sets.items()) if config.eval.every else []
    entries = [*(("data.sources", *source) for source in named), *(("eval.sets", *one) for one in sets)]
    cache, skip = _cache(config), config.data.on_error == "skip"
    made = _collect(lambda entry=entry: DocumentSource(*entry, cache, once, skip) for entry in entries)
    return made[: len(named)], made[len(named) :]


def _stages(config: Config) -> list[MixtureStage]:
    """The stages of the configuration, in sequences. A stage begins with the first sequence after its tokens."""
    length = config.batch.sequence_length
    return [MixtureStage(-(-stage.start // length), stage.weights) for stage in config.data.stages.values()]


def _limit(config: Config, source: TokenSequences) -> tuple[str, int | None]:
    """The name of a source, and the most sequences of it over the run, None where it has no limit. Raises
    `ConfigError` for one that cannot be kept."""
    given, setting, limits = config.data.sources[source.name], f"data.sources.{source.name}", []
    if given.max_tokens is not None:
        limits.append(given.max_tokens // config.batch.sequence_length)
        if not limits[0]:
            raise ConfigError(
                f"{setting}.max_tokens={given.max_tokens} is less than one sequence of batch.sequence_length="
                f"{config.batch.sequence_length}; raise it, or leave the source out with {setting}.weight=0"
            )
    if given.max_epochs is not None:
        if source.length is None:
            raise ConfigError(
                f"{setting}.max_epochs={given.max_epochs:g} needs the length of the source, and a stream has none; set "
                f"{setting}.max_tokens instead"
            )
        limits.append(max(1, int(given.max_epochs * source.length)))
    return source.name, min(limits, default=None)


def _use_template(config: Config, sources: list[DocumentSource], tokenizer: Tokenizer) -> None:
    """Gives conversations their template, which is the tokenizer's from now on."""
    named = f"the chat template of data.tokenizer={config.data.tokenizer}"
    if config.data.chat_template:
        named = f"data.chat_template={config.data.chat_template}"
        tokenizer.chat_template = read_template(config.data.chat_template)
    chats = [source for source in sources if source.config.kind == "chat"]
    if chats and not tokenizer.chat_template:
        raise ConfigError(
            f"{chats[0].setting}.kind=chat needs a chat template, and data.tokenizer={config.data.tokenizer} has none; "
            "set data.chat_template to the file of one"
        )
    for source in chats:
        source.template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, named)


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


def _tokenizer(config: Config, sources: list[DocumentSource], once: MakeCached) -> Tokenizer:
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
    texts = [source for source in sources if source.config.kind not in ("tokens", "chat")]
    if not texts:
        raise ConfigError(
            "data.tokenizer=bpe is trained on text, and all of data.sources are token files or conversations; name the "
            "tokenizer that they were made with, or are for"
        )
    if not 257 <= data.vocab_size <= _model_vocab_size(config):
        raise ConfigError(
            f"data.vocab_size={data.vocab_size} must lie between 257 (256 bytes and the end mark) and the model's "
            f"vocab_size={_model_vocab_size(config)}"
        )
    key = _key(["bpe", data.vocab_size, [source.identity for source in texts]])
    path = _cache(config) / "tokenizers" / f"{key}.json"

    def train() -> None:
        print_notice(
            f"training a tokenizer of {data.vocab_size} tokens on {', '.join(source.name for source in texts)} ..."
        )
        share = TRAINING_BYTES // len(texts)
        tokenizer = train_tokenizer((text for source in texts for text in source.sample_texts(share)), data.vocab_size)
        with replace_file(path) as part:
            tokenizer.backend.save(part)

    once(path, train)
    return load_tokenizer(path)


def _open(
    config: Config, source: DocumentSource, tokenizer: Tokenizer, fraction: float, once: MakeCached
) -> OpenedSource:
    """A source, of whose documents the share `fraction` is held out."""
    if source.config.kind == "tokens":
        runs, content = _token_files(source, tokenizer, fraction)
        return OpenedSource(*(_packed(config, source, tokenizer, runs[split]) for split in SPLITS), content)
    if source.streams:
        return _open_stream(config, source, tokenizer, fraction, once)
    key = [source.identity, tokenizer.digest, fraction]
    # "blanks": earlier versions left blanks out of what is learned where a tokenizer trims offsets.
    key += [source.template.digest, "blanks"] if source.template else []
    if source.config.kind in ("stdlib", "text") and cuts_documents(source.documents):
        key += ["whole"]  # earlier versions put end marks into these documents
    folder = _cache(config) / "tokens" / f"{source.name}-{_key([*key, 'skip'] if source.skip else key)}"

    def prepare() -> None:
        threshold = held_out_threshold(source.documents, fraction)
        dtype = token_dtype(tokenizer.vocab_size)
        job = TokeniseJob(source.documents, tokenizer, dtype, threshold, folder, chat=source.template is not None)
        tokenise_shards(job, source.name, config.data.workers)

    once(folder / "manifest.json", prepare, verified=True)
    runs, content, tally = read_manifest(folder)
    if tally.damaged > config.data.max_damaged * max(tally.rows, tally.damaged):
        raise ConfigError(
            f"{source.setting}: {tally.damaged} of {tally.rows} rows cannot be read, more than "
            f"data.max_damaged={config.data.max_damaged:g} allows; mend them, leave out the file, or raise it. The "
            f"first: {tally.first}"
        )
    damaged = f"{source.setting}: {tally.damaged} of {tally.rows} rows cannot be read and are left out"
    notes = [damaged] if tally.damaged else []
    sides = [_packed(config, source, tokenizer, runs[split]) for split in SPLITS]
    if source.template and (cut := sum(side.cut for side in sides)):
        notes.append(
            f"{source.setting}: {cut} conversations are longer than batch.sequence_length="
            f"{config.batch.sequence_length}, and end there"
        )
    return OpenedSource(*sides, content, tally.damaged, tuple(notes))


def _open_stream(
    config: Config, source: DocumentSource, tokenizer: Tokenizer, fraction: float, once: MakeCached
) -> OpenedSource:
    threshold, length = held_out_threshold(source.documents, fraction), config.batch.sequence_length
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

    once(folder / "manifest.json", prepare, verified=True)
    notes = _cache(config) / "streams" / _key([*content, length])
    train = StreamedSequences(source.documents, tokenizer, threshold, length, notes)
    return OpenedSource(train, _packed(config, source, tokenizer, read_manifest(folder)[0]["eval"]), content)


def _token_files(
    source: DocumentSource, tokenizer: Tokenizer, fraction: float
) -> tuple[dict[str, list[TokenRun]], Any]:
    if source.config.limit:
        raise ConfigError(
            f"{source.setting}.limit={source.config.limit} counts documents, and token files are not read "
            "by documents; leave it at 0"
        )
    whole = [open_token_file(source.setting, source.config, path, tokenizer.vocab_size) for path in source.paths]
    parts = [run.cut(0) if fraction == 1 else hold_out_tail(run, fraction, tokenizer.end_id) for run in whole]
    return (
        {split: [part[side] for part in parts] for side, split in enumerate(SPLITS)},
        [[file_digest(run), part[0].length] for run, part in zip(whole, parts)],
    )


def _packed(
    config: Config, source: DocumentSource, tokenizer: Tokenizer, runs: list[TokenRun]
) -> PackedSequences | PackedConversations:
    runs, kind = [run for run in runs if run.length], PackedConversations if source.template else PackedSequences
    return kind(source.name, runs, tokenizer.end_id, tokenizer.vocab_size, config.batch.sequence_length)


def _check_sizes(config: Config, train: CorpusSide, held: CorpusSide, sets: dict[str, CorpusSide]) -> None:
    length = config.batch.sequence_length
    problems = [
        f"data.sources.{source.name} holds {source.tokens} tokens to train on, and one sequence of "
        f"batch.sequence_length={length} needs {length + 1}; shorten it, or add text"
        for source in train.sources
        if source.length == 0
    ]
    problems += [
        f"eval.sets.{name} holds {samples.sources[0].tokens} tokens, and one sequence of "
        f"batch.sequence_length={length} needs {length + 1}; shorten it, or add text"
        for name, samples in sets.items()
        if not len(samples)
    ]
    if config.eval.every and config.data.eval_fraction and not len(held):
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


def _make_cached(
    target: Path, make: Callable[[], None], verified: bool = False, *, config: Config, prepare: bool
) -> None:
    """Makes `target` in the first process that needs it; the others wait for that process's file lock. Raises
    `MissingPart` where it is not to be made. verified: `target` is the manifest of token files, of which that process
    compares the content, and makes anew what is damaged."""
    if target.exists() and not (verified and prepare and is_due(target.parent)):
        return
    if not prepare:
        raise MissingPart(f"{target} has not been made")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Others may share the folder: a link that one of them has put there is not followed, and nothing is cut off.
        try:
            lock = os.open(target.with_suffix(".lock"), os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError:
            if not target.exists():
                raise
            lock = os.open(target, os.O_RDONLY)  # a cache that is somebody else's is read
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if verified and target.exists() and is_due(target.parent):
                remove_damaged(target.parent)
            if not target.exists():
                make()
            if verified:
                mark_verified(target.parent)
    except OSError as error:
        raise ConfigError(
            f"data.cache={config.data.cache} cannot be written ({error}); name a folder with room and permission"
        ) from error
