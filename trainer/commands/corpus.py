"""The corpus of a run before the run: `trainer prepare` tokenises it, and `trainer show` prints what is trained on.

Neither needs a GPU, a process group or a model."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from trainer.commands.grammar import Command, RecipeOptions, print_once
from trainer.config import Config
from trainer.config.fields import option
from trainer.util.exit_codes import FAILED, STOPPED
from trainer.util.tables import format_number, format_percent

GREEN, DIM = 32, 2
"""Colours of a terminal, for tokens that are learned and those that are not."""

if TYPE_CHECKING:
    from trainer.data.batches import MicroBatch
    from trainer.data.corpus import Corpus, OpenedSource
    from trainer.data.tokenizer import Tokenizer
    from trainer.data.tokens import PackedSequences


def use_corpus(options: RecipeOptions, use: Callable[[Config, Corpus], str]) -> int:
    """Opens the corpus of a recipe, and prints what `use` makes of it. Returns the exit code. Raises `ConfigError`.

    The settings are checked for any number of processes: the run may need more of them than this machine has. Ctrl-C
    and SIGTERM end the preparation, of which the finished shards stay in the cache."""
    from trainer.config.compose import gather_values
    from trainer.data.corpus import open_corpus
    from trainer.data.tokens import DataError
    from trainer.planning.resolve import check_values

    config = check_values(*gather_values(options.overrides, options.config_dir), None)
    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main_thread else None
    try:
        return print_once(use(config, open_corpus(config, begin=_find_begin(config))))
    except KeyboardInterrupt:
        text = f"stopped; what is tokenised is kept in data.cache={config.data.cache}, and the same command goes on"
        print_once(text, sys.stderr)
        return STOPPED
    except DataError as error:
        print(f"the corpus is not ready: {error}", file=sys.stderr, flush=True)
        return FAILED
    finally:
        if main_thread:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


# trainer prepare


def _find_begin(config: Config) -> list[int] | None:
    """With what documents begin in a run that would be resumed; see `resume.find_begin`. Most runs are new, and need
    no torch here."""
    checkpoints = Path(config.run.dir) / "checkpoints"
    if config.checkpoint.resume in ("auto", "none") and not checkpoints.is_dir():
        return None
    from trainer.checkpointing.resume import find_begin

    return find_begin(config.checkpoint, checkpoints)


def prepare_corpus(options: RecipeOptions) -> int:
    return use_corpus(options, summarise_corpus)


def summarise_corpus(config: Config, corpus: Corpus) -> str:
    """What was prepared of each source, and how often the run will read it."""
    entries = {**config.eval.sets, **config.data.sources}
    lines = []
    for name, opened in corpus.opened.items():
        trained = name in corpus.train.names
        facts = dict(describe_source(opened, entries[name].kind))
        if trained:
            share = corpus.train.weights[corpus.train.names.index(name)] / sum(corpus.train.weights)
            facts["epochs"] = describe_epochs(config, opened.train.length, share)
        lines += [
            name if trained else f"{name} (evaluated)",
            *(f"  {label:<17}{text}" for label, text in facts.items()),
        ]
    return "\n".join(
        [*lines, *corpus.notes, f"ready in data.cache={config.data.cache}: trainer train starts from there"]
    )


def describe_source(opened: OpenedSource, kind: str) -> Iterator[tuple[str, str]]:
    """What is known of a source: labels and texts."""
    train, out = (opened.counts[split] for split in ("train", "eval"))
    tally, held, length, counted = opened.tally, opened.held.tokens, opened.train.length, train + out
    if length is None:
        yield "tokens", f"read while training; {held:,} held out"
        return
    tokens = cast("PackedSequences", opened.train).tokens + held
    if counted.documents:
        yield "documents", f"{counted.documents:,}, of which {out.documents:,} are held out"
    yield "tokens", f"{tokens:,}, of which {held:,} are held out"
    yield "sequences", f"{length:,} to train on, {opened.held.length:,} held out"
    if counted.text_tokens:
        yield "bytes per token", f"{counted.text_bytes / counted.text_tokens:.2f}"
        if counted.unknown:
            yield "unknown tokens", f"{counted.unknown:,} ({100 * counted.unknown / counted.text_tokens:.1f}%)"
    if tally.rows:
        lines = kind in ("stdlib", "text")
        rest = f", {tally.empty:,} without text" if tally.empty else ""
        yield "lines" if lines else "rows", f"{tally.rows:,}, of which {tally.damaged:,} are damaged{rest}"


def describe_epochs(config: Config, length: int | None, share: float) -> str:
    """How often the run reads a source of `length` sequences that gets `share` of its samples."""
    from trainer.planning.plan import resolve_batch

    if not length:
        return "-"
    batch, run, each = config.batch, config.run, ""
    if run.tokens is not None:
        samples = run.tokens / batch.sequence_length
    elif size := batch.global_size or (batch.global_tokens or 0) // batch.sequence_length:
        samples = run.steps * size
    else:
        samples = run.steps * resolve_batch(batch, 1, pp=config.parallel.pp).global_size
        each = ", times the number of data-parallel ranks"
    return f"{samples * share / length:.3g} in the run{each}"


prepare = Command(
    "prepare",
    "Tokenises the corpus of a run into the cache, without a GPU, and says what is in it.",
    "trainer prepare +config=debug data.workers=8",
    RecipeOptions,
    prepare_corpus,
    bare=False,
)


# trainer show


@dataclass
class ShowOptions(RecipeOptions):
    count: int = option(2, "sequences to print, from the first of the run on", range="[1, 1000]")
    ids: bool = option(False, "prints the ids of the tokens below their text")


def show_sequences(options: ShowOptions) -> int:
    return use_corpus(options, lambda config, corpus: format_sequences(config, corpus, options.count, options.ids))


def format_sequences(config: Config, corpus: Corpus, count: int, ids: bool) -> str:
    """The first sequences that a run trains on, as its first step draws them."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    masked = config.data.mask_documents
    batches = draw_batches(config, corpus, count, masked)
    parted = batches if masked else draw_batches(config, corpus, count, True)
    borders = "attention ends at" if masked else "attention crosses"
    lines = [
        f"+ learned, - not learned; {borders} the borders of documents (data.mask_documents={str(masked).lower()})"
    ]
    for number, (batch, divided) in enumerate(zip(batches, parted), 1):
        sequence = LabelledSequence.of(batch, divided)
        lines += ["", f"sequence {number} of {count}: {batch.ids[0]}, {sequence.describe()}"]
        lines += sequence.format(corpus.tokenizer, ids, coloured)
    return "\n".join(lines)


def draw_batches(config: Config, corpus: Corpus, count: int, mask_documents: bool) -> list[MicroBatch]:
    """The first samples of the run in their order, each a micro-batch of one sequence."""
    from trainer.data.batches import BatchLoader
    from trainer.planning.plan import BatchPlan

    plan = BatchPlan(config.batch.sequence_length, count, 1, count)
    loader = BatchLoader(corpus.train, plan, 0, 1, seed=config.run.seed, mask_documents=mask_documents, prefetch=0)
    try:
        return next(loader)
    finally:
        loader.close()


class LabelledSequence(NamedTuple):
    """The tokens of a sequence, the document of each by number, and whether it is learned, as the target of the token
    before. The last token of a sequence is a target only, and is left out where it is not learned.

    share: of the targets that are learned."""

    tokens: list[int]
    documents: list[int]
    learned: list[bool]
    share: float

    @classmethod
    def of(cls, batch: MicroBatch, divided: MicroBatch) -> LabelledSequence:
        """A micro-batch of one sequence. divided: the same sequence with its documents masked."""
        from trainer.model.loss import IGNORE

        assert divided.documents is not None
        targets, documents = batch.targets[0].tolist(), divided.documents[0].tolist()
        learned = [False, *(target != IGNORE for target in targets)]
        # Where documents are masked, a target that begins another document is left out.
        documents.append(documents[-1] + (divided.targets[0, -1].item() == IGNORE))
        end = len(learned) if learned[-1] else len(targets)
        tokens = [*batch.tokens[0].tolist(), targets[-1]]
        return cls(tokens[:end], documents[:end], learned[:end], sum(learned) / len(targets))

    def describe(self) -> str:
        return f"{format_number(len(set(self.documents)), 'document')}, {format_percent(self.share)} learned"

    def rows(self, ends_line: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
        """First and last position (not included) of each run of tokens of one document that are learned, or are not,
        and that one line of text holds. ends_line: whether a token ends a line of text."""
        kinds, start = [*zip(self.documents, self.learned)], 0
        for place in range(1, len(kinds) + 1):
            if place == len(kinds) or kinds[place] != kinds[start] or ends_line(self.tokens[place - 1]):
                yield start, place
                start = place

    def format(self, tokenizer: Tokenizer, ids: bool, coloured: bool) -> Iterator[str]:
        """A line for each of its rows: position, mark, text."""

        def decode(tokens: list[int]) -> str:
            return tokenizer.backend.decode(tokens, skip_special_tokens=False)

        def decode_behind(before: list[int], tokens: list[int]) -> str:
            """The text of tokens, of whose first some tokenizers leave out the blank at the start of a text."""
            known, text = decode(before), decode(before + tokens)
            return text[len(known) :] if text.startswith(known) else decode(tokens)

        for start, end in self.rows(cache(lambda token: "\n" in decode([token]))):
            if start == 0 or self.documents[start] != self.documents[start - 1]:
                yield f"--- document {self.documents[start] + 1}, from position {start}"
            row = self.tokens[start:end]
            filler = len(row) > 4 and len(set(row)) == 1
            text = escape_text(decode_behind(self.tokens[max(0, start - 1) : start], row[:1] if filler else row))
            if coloured:
                text = f"\x1b[{GREEN if self.learned[start] else DIM}m{text}\x1b[0m"
            yield f"{start:>6} {'-+'[self.learned[start]]} {text}" + f"  ({len(row)} times)" * filler
            if ids:
                yield f"{'':>9}{' '.join(map(str, row))}"


def escape_text(text: str) -> str:
    """A text on one line, in which control characters and all that a terminal might obey are escaped as in Python."""
    return "".join(
        letter if letter.isprintable() and letter != "\\" else letter.encode("unicode_escape").decode()
        for letter in text
    )


show = Command(
    "show",
    "Prints the first sequences of a run as they are trained: text, what of it is learned, documents, positions.",
    "trainer show +config=debug count=2",
    ShowOptions,
    show_sequences,
    bare=False,
)
