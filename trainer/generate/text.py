"""Prompts of text and their continuations, as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.config import ConfigError
from trainer.data.tokenizer import Tokenizer
from trainer.generate.sampling import SamplingOptions, TokenGenerator
from trainer.generate.sharded_model import ShardedModel
from trainer.util.exit_codes import process_rank
from trainer.util.reading import read_bytes

HALF = "\ufffd"
"""What a character shows as whose last bytes are tokens to come."""


class TextStream:
    """The text of tokens that come one by one, up to the first of `stops` that is complete.

    Held back is what later tokens may change: half a character, and what a stop may begin with."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int], stops: Sequence[str]):
        """before: the tokens of the prompt, whose last ones tell how the first new one is written."""
        self.decode, self.stops, self.stopped = decode, stops, False
        self.tokens, self.start = list(before), max(0, len(before) - 8)
        self.read, self.held = len(before), ""

    def add(self, token: int) -> str:
        """The text that is certain with another token; `stopped` then says whether a stop has been found."""
        self.tokens.append(token)
        old, new = self.decode(self.tokens[self.start : self.read]), self.decode(self.tokens[self.start :])
        if new.endswith(HALF):
            return ""
        self.start, self.read = self.read, len(self.tokens)
        return self.release(new[len(old) :])

    def release(self, text: str) -> str:
        self.held += text
        found = [(place + len(stop), place) for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            certain, self.held = self.held[: min(found)[1]], ""
            return certain
        begun = max((partial_stop_length(self.held, stop) for stop in self.stops), default=0)
        certain, self.held = self.held[: len(self.held) - begun], self.held[len(self.held) - begun :]
        return certain

    def end(self) -> str:
        """What was held back, once no token comes any more."""
        if self.stopped:
            return ""
        old, new = self.decode(self.tokens[self.start : self.read]), self.decode(self.tokens[self.start :])
        self.start = self.read = len(self.tokens)
        text = self.release(new[len(old) :])
        return text + ("" if self.stopped else self.held)


def partial_stop_length(text: str, stop: str) -> int:
    """The most characters at the end of `text` with which `stop`, which is not in it, begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class TextPiece(NamedTuple):
    """More of the text that follows a prompt. row: number of the prompt; last: whether no more comes."""

    row: int
    text: str
    last: bool


def generate_text(
    model: ShardedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: SamplingOptions,
    stops: Sequence[str] = (),
    stop_ids: Collection[int] | None = None,
) -> Iterator[TextPiece]:
    """What follows each of `prompts`, piece by piece as it is computed, of all prompts at a time.

    prompts: token ids, as `Tokenizer.encode_prompt` makes them. Ends after `count` tokens, before one of `stop_ids`
    (None: the end mark), or before the first of `stops`. All ranks call it together and take all of it, within
    `model.inference()`."""
    stop_ids = {tokenizer.end_id} if stop_ids is None else stop_ids
    generation = TokenGenerator(model, prompts, count, sampling, stop_ids)
    streams = {row: TextStream(tokenizer.decode, prompt, stops) for row, prompt in enumerate(prompts)}
    for found in generation:
        for row, stream in list(streams.items()):
            token = found[row]
            text = stream.end() if token is None else stream.add(token)
            if stream.stopped:
                generation.stop(row)
            if last := token is None or stream.stopped:
                del streams[row]
            if text or last:
                yield TextPiece(row, text, last)
    for row, stream in streams.items():
        yield TextPiece(row, stream.end(), True)


def in_order(pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
    """The pieces of one prompt behind those of another, each as soon as those before it have come."""
    waiting: dict[int, list[TextPiece]] = {}
    row = 0
    for piece in pieces:
        waiting.setdefault(piece.row, []).append(piece)
        while ready := waiting.pop(row, []):
            yield from ready
            row += ready[-1].last


def continue_prompts(
    model: ShardedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: SamplingOptions,
    stops: Sequence[str] = (),
    stop_ids: Collection[int] | None = None,
) -> list[str]:
    """The same, whole: what follows each of `prompts`."""
    texts = [""] * len(prompts)
    with model.inference():
        for row, text, _ in generate_text(model, tokenizer, prompts, count, sampling, stops, stop_ids):
            texts[row] += text
    return texts


# Prompts that a command is given, and how a terminal shows what becomes of them.


LARGEST = 1 << 24
"""Bytes of a file of prompts."""


def read_prompts(file: str) -> list[str]:
    """The prompts of a file, one in each line. Raises `ConfigError`."""
    try:
        lines = read_bytes(Path(file).expanduser(), LARGEST).splitlines()
        prompts = [new_lines(line.decode("utf-8-sig")) for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompts={file} cannot be read ({error}); give a text file with a prompt in each line"
        ) from None
    if not prompts:
        raise ConfigError(f"prompts={file} is empty; write a prompt into each line, or use prompt=TEXT")
    return prompts


def new_lines(text: str) -> str:
    return text.replace("\\n", "\n")


def print_continuations(
    model: ShardedModel,
    tokenizer: Tokenizer,
    prompts: list[str],
    tokens: int,
    sampling: SamplingOptions,
    stops: list[str],
    stop_ids: Collection[int],
    numbered: bool,
    chat: bool,
) -> None:
    """Prints each prompt and what follows it, as it comes; of several prompts, which are computed together, one behind
    the other. numbered: with a line before each. chat: each prompt is a user's message, which the chat template
    writes."""
    from trainer.observe.sinks import escape_controls

    def say(text: str) -> None:
        if process_rank() == 0:
            print(escape_controls(text) if sys.stdout.isatty() else text, end="", flush=True)

    def begin(row: int) -> None:
        say(f"--- {row + 1}\n" * numbered + (texts[row] if chat else tokenizer.decode(tokenizer.encode(texts[row]))))

    texts = [tokenizer.render_prompt(prompt) for prompt in prompts] if chat else prompts
    encoded = [tokenizer.encode_prompt(text, chat) for text in texts]
    if process_rank() == 0:
        print(*tokenizer.notes, sep="\n", end="\n" * bool(tokenizer.notes), file=sys.stderr, flush=True)
        warn_of_length(model.spec.max_length, tokens, [len(ids) for ids in encoded])
    begin(0)
    with model.inference():
        pieces = generate_text(model, tokenizer, encoded, tokens, sampling, list(map(new_lines, stops)), stop_ids)
        for row, text, last in in_order(pieces):
            say(text + "\n" * last)
            if last and row + 1 < len(prompts):
                begin(row + 1)


def warn_of_length(longest: int, tokens: int, lengths: list[int]) -> None:
    """Says where a prompt is longer than the model sees, or becomes so by so many tokens. lengths: tokens of each
    prompt."""
    if max(lengths) > longest:
        row = lengths.index(max(lengths))
        what = f"prompt {row + 1} has {lengths[row]:,} tokens"
    elif max(lengths) + tokens > longest:
        what = f"a prompt of {max(lengths):,} tokens and tokens={tokens} can grow longer"
    else:
        return
    print(
        f"the model sees {longest:,} tokens (model.max_length), and {what}: it then continues the last {longest:,}, "
        "all computed anew for each token",
        file=sys.stderr,
        flush=True,
    )
