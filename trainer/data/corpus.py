"""Opens the corpus of a configuration: prepared once by whichever process comes first, then memory-mapped by all.

The cache holds trained tokenizers (`tokenizers/`), token files (`tokens/`), what `datasets` downloads or converts
(`datasets/`), objects of a store (`objects/`), compressed files as lines (`expanded/`) and what is known of ready-made
token files (`checked/`); every name is a hash of what its content depends on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from trainer.config import Config, ConfigError
from trainer.data.documents import DocumentSource, HubStream, LocalStream, MakeCached, Stream, held_out_threshold
from trainer.data.mixture import Mixture, MixtureStage
from trainer.data.shards import (
    SPLITS,
    TextCount,
    TokeniseJob,
    check_count,
    count_tokens,
    encode_pieces,
    is_due,
    mark_pieces,
    mark_verified,
    read_manifest,
    remove_damaged,
    tokenise_shards,
    write_manifest,
)
from trainer.data.text import FIXED_DATE, ChatTemplate, PackedConversations, RowTally, read_template
from trainer.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_tokenizer
from trainer.data.tokens import (
    DataError,
    LanePoint,
    PackedSequences,
    Points,
    TokenCheck,
    TokenRun,
    TokenSample,
    TokenSequences,
    TokenWriter,
    check_token_files,
    file_digest,
    file_states,
    hold_out_tail,
    locate_index,
    number_documents,
    open_token_file,
    print_notice,
    start_progress,
    token_dtype,
)
from trainer.util.reading import Shape, read_json, replace_file, write_atomic

# Streams: documents that are read and tokenised while the run trains on them. Sample i of a stream is sequence
# i // lanes of lane i % lanes, and a lane is packed on its own. Which tokens a sample holds therefore depends on the
# content, the tokenizer and the sequence length, not on the number of ranks, and a rank reads the lanes of its samples
# only. Checkpoints hold where each lane stands (`LanePoint`), so that a resumed run reads nothing twice.


GROUP = 1 << 16
"""Characters of a lane tokenised together, about."""


class Lane:
    """The sequences of one lane of a stream, from a point on."""

    def __init__(self, stream: Stream, tokenizer: Tokenizer, threshold: int, size: int, lane: int, point: LanePoint):
        self.stream, self.tokenizer, self.threshold, self.size, self.lane = stream, tokenizer, threshold, size, lane
        self.point = point
        self._tokens, self._starts = np.empty(0, np.int64), np.empty(0, bool)
        self._groups: deque[tuple[int, LanePoint]] = deque()  # where the groups in the buffer begin
        self._source, self._skip = self._read(), point.used

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """The next sequence: tokens, and where a document is known to start. Raises `ConfigError` or `DataError` for a
        stream that cannot be read, after which the lane is of no use."""
        while len(self._tokens) <= self._skip + self.size:
            point, tokens, starts = next(self._source)
            self._groups.append((len(self._tokens), point))
            self._tokens, self._starts = np.append(self._tokens, tokens), np.append(self._starts, starts)
        taken = slice(self._skip, self._skip + self.size + 1)
        sample = self._tokens[taken], self._starts[taken]
        self._skip += self.size
        while len(self._groups) > 1 and self._groups[1][0] <= self._skip:
            self._groups.popleft()
        first, point = self._groups[0]
        self.point = point._replace(next=self.point.next + 1, used=self._skip - first)
        self._tokens, self._starts, self._skip = self._tokens[first:], self._starts[first:], self._skip - first
        self._groups = deque((start - first, point) for start, point in self._groups)
        return sample

    def _read(self) -> Iterator[tuple[LanePoint, np.ndarray, np.ndarray]]:
        """Groups of texts, tokenised: the point at which each begins, tokens, and known starts of documents."""
        first, kept = self.point.piece, self.point.turn
        for turn, state, documents in self.stream.read_lane(self.lane, self.point.turn, self.point.state):
            pieces = [piece for piece in mark_pieces(documents, self.threshold) if not piece.held]
            kept = turn if pieces else kept
            if turn - kept > self.stream.circle:
                raise DataError(f"{self.stream.setting}: the stream holds no text to train on")
            while first < len(pieces):
                end, characters = first, 0
                while end < len(pieces) and characters < GROUP:
                    end, characters = end + 1, characters + len(pieces[end].text)
                encoded = [ids for ids, _ in encode_pieces(self.tokenizer, pieces[first:end])]
                tokens = np.fromiter(chain.from_iterable(encoded), np.int64)
                starts = np.zeros(len(tokens), bool)
                starts[:1] = first == 0
                yield LanePoint(0, turn, state, first), tokens, starts
                first = end
            first = 0


class StreamedSequences:
    """Sequences of a stream, see `tokens.TokenSequences`. Rising order is fast in each lane; going back starts at the
    last known point of the lane again.

    points: where lanes can be read on, by lane."""

    length, share = None, 1.0

    def __init__(self, name: str, stream: Stream, tokenizer: Tokenizer, threshold: int, sequence_length: int):
        self.name, self.stream, self.tokenizer = name, stream, tokenizer
        self.threshold, self.size = threshold, sequence_length
        self.points: dict[int, LanePoint] = {}
        self._lanes: dict[int, Lane] = {}

    def get(self, index: int) -> TokenSample:
        """See `TokenSequences`. Raises `DataError` when the stream cannot be read or holds no text. `go_to` has to be
        called before the next `get` then."""
        number, lane = divmod(index, self.stream.lanes)
        if lane not in self._lanes or self._lanes[lane].point.next > number:
            point = self.points.get(lane, LanePoint())
            point = point if point.next <= number else LanePoint()
            self._lanes[lane] = Lane(self.stream, self.tokenizer, self.threshold, self.size, lane, point)
        try:
            while self._lanes[lane].point.next <= number:
                tokens, starts = self._lanes[lane].take()
        except ConfigError as error:  # of a file that is read only now
            raise DataError(str(error)) from error
        return TokenSample(tokens, number_documents(tokens, self.tokenizer.end_id, starts.copy()))

    def list_points(self) -> dict[int, LanePoint]:
        """Where the lanes stand that this process reads, and where others stood when they were last known."""
        return self.points | {lane: reader.point for lane, reader in self._lanes.items()}

    def go_to(self, points: dict[int, LanePoint]) -> None:
        """Goes on at `points`; lanes without a point begin anew."""
        self.points = dict(points)
        self._lanes.clear()


def hold_out(stream: Stream, tokenizer: Tokenizer, threshold: int, tokens: int, writer: TokenWriter) -> None:
    """Writes the stream's first held-out documents: at least `tokens` tokens, or all there are."""
    pieces = (piece for piece in mark_pieces(stream.read_all(), threshold) if piece.held)
    while writer.count < tokens and (piece := next(pieces, None)):
        for ids, _ in encode_pieces(tokenizer, [piece]):
            writer.append(ids)


# The corpus of a configuration, of all kinds of sources.


FORMAT = 1
"""Part of every key of the cache; raised when the same input would be prepared differently."""

READING = 2
"""Part of the name of every folder of tokens; raised when rows are read or counted in another way."""

TRAINING_BYTES = 100 << 20
"""Text that a tokenizer is trained on, at most, over all sources."""


CHECKED: Shape = {
    **dict.fromkeys(("smallest", "largest", "ends"), int),
    "documents": (int, NoneType),
    "starts": (str, NoneType),
}
"""What is noted of each ready-made token file, see `TokenCheck`."""

SAMPLED = 1 << 20
"""Characters of a stream that tell what the tokenizer makes of it."""


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
        """The mixture by which a run draws samples. history, position: of a run that is resumed, see `Mixture.plan`."""
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
        return locate_index(self._ends, index)

    @property
    def streams(self) -> list[StreamedSequences]:
        """The sources that are streams."""
        return [source for source in self.sources if isinstance(source, StreamedSequences)]

    def list_points(self) -> Points:
        """Where the lanes of the streams stand, as far as this process knows."""
        return {stream.name: stream.list_points() for stream in self.streams}

    def go_to(self, points: Points) -> None:
        """Lets the streams go on at `points`."""
        for stream in self.streams:
            stream.go_to(points.get(stream.name, {}))

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
    sets_fingerprint: identifies it. damaged: rows to train on that were left out, None where none may be, and with a
    stream, which prints them. notes: what is to be said of the data. opened: sources and sets, by name. marks: what
    stands before and behind a document, for the table of a start. stop_ids: the tokens that end what the model
    writes."""

    tokenizer: Tokenizer
    train: CorpusSide
    eval: CorpusSide
    fingerprint: str
    contents: dict[str, str]
    sets: dict[str, CorpusSide]
    sets_fingerprint: str
    damaged: int | None
    notes: list[str]
    opened: dict[str, OpenedSource]
    marks: str
    stop_ids: list[int]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size


class MissingPart(ConfigError):
    """A part of the corpus would have to be made first."""


def open_corpus(config: Config, prepare: bool = True, begin: list[int] | None = None) -> Corpus:
    """The corpus of `config.data`, tokenised first if the cache does not have it, or, unless it is to be prepared, a
    `MissingPart` raised. begin: the ids with which documents begin under data.bos=auto; None means as the tokenizer
    says.

    Safe to call from many processes at once, on one or several machines, before any process group exists. Raises
    `ConfigError` with everything that is wrong with the sources, the tokenizer or their sizes.
    """
    once = partial(_make_cached, config=config, prepare=prepare)
    sources, sets = _open_sources(config, once)
    tokenizer = _tokenizer(config, sources, once)
    marks = _use_bos(config, tokenizer, begin)
    _use_template(config, [*sources, *sets], tokenizer)
    limit = _model_vocab_size(config)
    if tokenizer.vocab_size > limit:
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer} has {tokenizer.vocab_size} tokens, more than the model's "
            f"vocab_size={limit}; set model.vocab_size={tokenizer.vocab_size} or more, or take a smaller tokenizer"
            + "".join(f"; {note}" for note in tokenizer.notes)
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
    limits = {name: limit for name, limit in map(partial(_find_limit, config), trained) if limit is not None}
    train, held = CorpusSide(trained, weights, _list_stages(config), limits), CorpusSide(held_out, weights)
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
        None
        if train.endless or config.data.on_error != "skip"
        else sum(one.tally.damaged for one in opened[: len(sources)]),
        [*tokenizer.notes, *(note for one in opened for note in one.notes)],
        {source.name: one for source, one in zip([*sources, *sets], opened)},
        *_describe_turns(marks, sources, tokenizer),
    )


class OpenedSource(NamedTuple):
    """A source, tokenised: training and held-out sequences, what identifies their content, the rows that were read,
    what is to be said of it, and what was tokenised of each split, zeros where that was not counted."""

    train: TokenSequences
    held: PackedSequences
    content: Any
    tally: RowTally = RowTally()
    notes: tuple[str, ...] = ()
    counts: dict[str, TextCount] = dict.fromkeys(SPLITS, TextCount())


def _open_sources(config: Config, once: MakeCached) -> tuple[list[DocumentSource], list[DocumentSource]]:
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


def _list_stages(config: Config) -> list[MixtureStage]:
    """The stages of the configuration, in sequences. A stage begins with the first sequence after its tokens."""
    length = config.batch.sequence_length
    return [MixtureStage(-(-stage.start // length), stage.weights) for stage in config.data.stages.values()]


def _find_limit(config: Config, source: TokenSequences) -> tuple[str, int | None]:
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


def _use_bos(config: Config, tokenizer: Tokenizer, begin: list[int] | None) -> str:
    """Makes the tokenizer begin texts as data.bos says; `begin`: as in `open_corpus`. Returns what stands before and
    behind a document."""
    data, own = config.data, tokenizer.begin
    if data.bos == "true":
        if tokenizer.bos_id in (None, tokenizer.end_id) and not own:
            what = (
                "no BOS" if tokenizer.bos_id is None else "one token for BOS and end mark, which is before it already"
            )
            raise ConfigError(
                f"data.bos=true, but data.tokenizer={data.tokenizer} has {what}; leave data.bos out, or name a "
                "tokenizer folder whose tokenizer_config.json has another bos_token"
            )
        begin = own or [tokenizer.bos_id]
    elif data.bos == "false":
        begin = []
    tokenizer.begin_with(own if begin is None else begin)
    named = (
        f"{tokenizer.name_tokens(tokenizer.document_begin)} text {tokenizer.name_tokens([tokenizer.end_id])}".strip()
    )
    if tokenizer.begin == own:
        return named
    why = "as the run has begun" if data.bos == "auto" else f"data.bos={data.bos}"
    return f"{named} ({why}; the tokenizer itself begins with {tokenizer.name_tokens(own) or 'the text'})"


def _describe_turns(marks: str, sources: list[DocumentSource], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """What stands before and behind documents and conversations, and the tokens that end what the model writes."""
    chats = [source for source in sources if source.template]
    if not chats:
        return marks, [tokenizer.end_id]
    begin, end = tokenizer.begin, tokenizer.turn_end_id
    missing = f", without {tokenizer.name_tokens(begin)}" * (tokenizer.render_probe()[0][: len(begin)] != begin)
    turns = f"turns of the assistant end with {'text' if end is None else tokenizer.name_tokens([end])}"
    conversations = f"conversations as their template writes them{missing}; {turns}"
    stop_ids = [tokenizer.end_id, *([] if end in (None, tokenizer.end_id) else [end])]
    return "; ".join([marks] * (len(chats) < len(sources)) + [conversations]), stop_ids


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
        names, folder = ("tokenizer.json", "tokenizer_config.json"), Path(config.model.from_hf).expanduser()
        if not any((folder / name).is_file() for name in names):
            from trainer.hf import find_base

            folder = find_base(folder)
        if not any((folder / name).is_file() for name in names):
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
        return _token_files(config, source, tokenizer, fraction, once)
    if source.streams:
        return _open_stream(config, source, tokenizer, fraction, once)
    key = [READING, source.identity, tokenizer.digest, fraction, source.template and source.template.digest]
    folder = _cache(config) / "tokens" / f"{source.name}-{_key(key)}"

    def prepare() -> None:
        if source.unread:
            print_notice(source.unread)
        threshold = held_out_threshold(source.documents, fraction)
        dtype = token_dtype(tokenizer.vocab_size)
        job = TokeniseJob(source.documents, tokenizer, dtype, threshold, folder, chat=source.template is not None)
        tokenise_shards(job, source.name, config.data.workers, check)

    check = partial(_check_loss, config, source)
    once(folder / "manifest.json", prepare, verified=True)
    runs, content, tally, counts = read_manifest(folder)
    check(sum(counts.values(), TextCount()))
    _check_damaged(config, source, tally)
    rows = {
        "rows cannot be read and are left out": tally.damaged,
        "rows hold an empty text and are left out": tally.empty,
        "lines end in CRLF, of which the carriage return is kept": tally.crlf,
    }
    notes = [source.unread] if source.unread else []
    notes += [f"{source.setting}: {count} of {tally.rows} {what}" for what, count in rows.items() if count]
    if unread := tally.unread:
        names = ", ".join(
            f"{', '.join(name for name in unread if unread[name] == count)} ({count} rows)"
            for count in {*unread.values()}
        )
        notes.append(f"{source.setting}: columns not read: {names}")
    if source.template and source.template.prints_date:
        notes.append(f"{source.setting}: the chat template asks for the date of today, and gets {FIXED_DATE:%d %b %Y}")
    sides = [_packed(config, source, tokenizer, runs[split]) for split in SPLITS]
    if cut := sum(side.cut for side in sides):
        notes.append(
            f"{source.setting}: {cut} conversations are longer than batch.sequence_length="
            f"{config.batch.sequence_length}, and end there"
        )
    return OpenedSource(*sides, content, tally, tuple(notes), counts)


def _lossy_tokenizer(config: Config) -> str | None:
    """The setting that names the tokenizer; None for those that are made here, which have a token for every byte and
    lose nothing of text of which they make few tokens."""
    name, folder = config.data.tokenizer, config.model.from_hf
    if name == "bpe" and folder:
        return f"the tokenizer of model.from_hf={folder}"
    return None if name in ("bytes", "bpe") else f"data.tokenizer={name}"


def _check_loss(config: Config, source: DocumentSource, count: TextCount) -> None:
    """Raises `ConfigError` where the tokenizer makes nothing of the text of a source."""
    if named := _lossy_tokenizer(config):
        check_count(count, source.setting, named)


def _check_damaged(config: Config, source: DocumentSource, tally: RowTally) -> None:
    """Raises `ConfigError` unless so many rows may be left out."""
    most, found = config.data.max_damaged, f"{source.setting}: {tally.damaged} of {tally.rows} rows cannot be read"
    too_many = tally.damaged > most * tally.rows
    if tally.damaged and not source.skip:
        share = f" and data.max_damaged above {most:g}" if too_many else ""
        raise ConfigError(
            f"{found}; set data.on_error=skip{share} to leave them out, or mend them; what is tokenised is kept. The "
            f"first: {tally.first}"
        )
    if too_many:
        raise ConfigError(
            f"{found}, more than data.max_damaged={most:g} allows; mend them, leave out the file, or raise it. The "
            f"first: {tally.first}"
        )


def _open_stream(
    config: Config, source: DocumentSource, tokenizer: Tokenizer, fraction: float, once: MakeCached
) -> OpenedSource:
    documents, length = source.documents, config.batch.sequence_length
    threshold = held_out_threshold(documents, fraction)
    stream = (
        documents
        if isinstance(documents, HubStream)
        else LocalStream(source.setting, documents, config.data.max_damaged)
    )
    content = [source.identity, tokenizer.digest, threshold, stream.lanes, stream.circle]
    wanted = config.eval.sequences * length + 1 if config.eval.every else 0
    folder = _cache(config) / "tokens" / f"{source.name}-{_key([*content, wanted])}"

    def prepare() -> None:
        if _lossy_tokenizer(config):
            texts = list(source.sample_texts(SAMPLED))
            _check_loss(config, source, count_tokens(tokenizer, texts, tokenizer.encode_batch(texts)))
        folder.mkdir(parents=True, exist_ok=True)
        writer = TokenWriter(str(folder / "eval.bin"), token_dtype(tokenizer.vocab_size))
        try:
            hold_out(stream, tokenizer, threshold, wanted, writer)
            write_manifest(folder, writer.dtype, {"train": [], "eval": [writer.finish()] if writer.count else []})
        finally:
            writer.discard()

    once(folder / "manifest.json", prepare, verified=True)
    train = StreamedSequences(source.name, stream, tokenizer, threshold, length)
    held = _packed(config, source, tokenizer, read_manifest(folder)[0]["eval"])
    return OpenedSource(train, held, content, notes=(source.unread,) if source.unread else ())


def _token_files(
    config: Config, source: DocumentSource, tokenizer: Tokenizer, fraction: float, once: MakeCached
) -> OpenedSource:
    """A source of ready-made token files, all of whose tokens are checked once."""
    if source.config.limit:
        raise ConfigError(
            f"{source.setting}.limit={source.config.limit} counts documents, and token files are not read "
            "by documents; leave it at 0"
        )
    runs = [open_token_file(source.setting, source.config, path, tokenizer.vocab_size) for path in source.paths]
    key = _key([[[asdict(run), file_states(run.path)] for run in runs], tokenizer.end_id])
    folder = _cache(config) / "checked" / f"{source.name}-{key}"

    def starts_file(number: int) -> str:
        return str(folder / f"{number:05d}.starts")

    def check() -> None:
        if source.unread:
            print_notice(source.unread)
        width, whole, done = np.dtype(runs[0].dtype).itemsize, sum(run.length for run in runs), 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            report(width * done, done, width * whole)

        with start_progress(f"checking the tokens of {source.name}", 0) as report:
            found = check_token_files(source.setting, runs, tokenizer.end_id, starts_file, advance)
        write_atomic(folder / "checked.json", json.dumps([asdict(one) for one in found]))

    once(folder / "checked.json", check)
    try:
        checks = [TokenCheck(**one) for one in read_json(folder / "checked.json", [CHECKED], f"delete {folder}")]
        sizes = [one.documents and os.path.getsize(starts_file(n)) for n, one in enumerate(checks)]
        whole = sizes == [one.documents and 8 * one.documents for one in checks] and len(checks) == len(runs)
    except (OSError, TypeError):
        whole = False
    if not whole:
        raise ConfigError(f"data.cache: {folder} is damaged; delete it, and the token files are checked again")
    notes = _check_ids(config, source, tokenizer, runs, checks)
    runs = [replace(run, starts=starts_file(n) if checks[n].documents else None) for n, run in enumerate(runs)]
    parts = [run.cut(0) if fraction == 1 else hold_out_tail(run, fraction, tokenizer.end_id) for run in runs]
    content = [
        [file_digest(run), part[0].length, *([check.starts] if check.starts else [])]
        for run, part, check in zip(runs, parts, checks)
    ]
    sides = [_packed(config, source, tokenizer, [part[side] for part in parts]) for side in range(len(SPLITS))]
    return OpenedSource(*sides, content, notes=tuple(notes))


def _check_ids(
    config: Config, source: DocumentSource, tokenizer: Tokenizer, runs: list[TokenRun], checks: list[TokenCheck]
) -> list[str]:
    """What is to be said of token files. Raises `ConfigError` for ids beyond the vocabulary, and for documents that
    are to be masked and cannot be told apart."""
    wrong = [
        f"{source.setting}.path: {run.path} holds token {check.smallest if check.smallest < 0 else check.largest}, "
        f"beyond the tokenizer's {tokenizer.vocab_size}; data.tokenizer is not the one the file was made with, or "
        f"its tokens are no {np.dtype(run.dtype).name} in little-endian order"
        for run, check in zip(runs, checks)
        if check.smallest < 0 or check.largest >= tokenizer.vocab_size
    ]
    if wrong:
        raise ConfigError(wrong[:3])
    notes = [source.unread] if source.unread else []
    unmarked = sum(run.length > 0 and not (check.ends or check.documents) for run, check in zip(runs, checks))
    if config.data.mask_documents and unmarked:
        told = (
            f"{source.setting}.path={source.config.path}: {unmarked} of {len(runs)} token files hold neither the end "
            f"mark of data.tokenizer={config.data.tokenizer} (token {tokenizer.end_id}) nor an index of documents"
        )
        if unmarked == sum(run.length > 0 for run in runs):
            raise ConfigError(
                f"{told}, so that data.mask_documents=true masks nothing; name the tokenizer that they were made with, "
                "write end marks, or set data.mask_documents=false"
            )
        notes.append(f"{told}; each of them is masked as one document")
    return notes


def _packed(config: Config, source: DocumentSource, tokenizer: Tokenizer, runs: list[TokenRun]) -> PackedSequences:
    runs, kind = [run for run in runs if run.length], PackedConversations if source.template else PackedSequences
    return kind(source.name, runs, tokenizer.end_id, tokenizer.vocab_size, config.batch.sequence_length)


def _check_sizes(config: Config, train: CorpusSide, held: CorpusSide, sets: dict[str, CorpusSide]) -> None:
    length = config.batch.sequence_length
    named = [(f"data.sources.{source.name}", " to train on", source) for source in train.sources]
    named += [(f"eval.sets.{name}", "", samples.sources[0]) for name, samples in sets.items()]
    problems = [
        f"{name} holds {source.tokens} tokens{use}, and one sequence of batch.sequence_length={length} needs "
        f"{length + 1}; shorten it, or add text"
        for name, use, source in named
        if source.length == 0
    ]
    if config.eval.every and all(source.share == 0 for source in held.sources if source.length):
        named += [(f"data.sources.{source.name}: of what is held out", "", source) for source in held.sources]
    problems += [
        f"{name}: no token would be learned; batch.sequence_length={length} cuts off all answers, or there are none; "
        "lengthen the sequence, or look at the messages of the assistant"
        for name, _, source in named
        if source.length and source.share == 0
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

        return spec_from_hf(config.model.from_hf, None, config.model.code, config.model.code_unproven).vocab_size
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
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if "RANK" not in os.environ:  # ranks of one run wait for each other at every start
                    print_notice(f"another process prepares {target.parent}; waiting for it")
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
