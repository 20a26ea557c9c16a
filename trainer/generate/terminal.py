"""Prompts that a command is given, and how a terminal shows what becomes of them. Needs no torch until it shows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import ConfigError
from trainer.util.exit_codes import process_rank
from trainer.util.reading import read_bytes

if TYPE_CHECKING:
    from trainer.data.tokenizer import Tokenizer
    from trainer.generate.placed import ShardedModel
    from trainer.generate.sampling import SamplingOptions

LARGEST = 1 << 24
"""Bytes of a file of prompts."""


def read_prompts(file: str) -> list[str]:
    """The prompts of a file, one in each line. Raises `ConfigError`."""
    try:
        lines = read_bytes(Path(file).expanduser(), LARGEST).splitlines()
        prompts = [new_lines(line.decode()) for line in lines]
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
    numbered: bool,
) -> None:
    """Prints each prompt and what follows it, as it comes; of several prompts, which are computed together, one behind
    the other. numbered: with a line before each."""
    from trainer.generate.text import generate_text, in_order
    from trainer.observe.samples import escape_controls

    def say(text: str) -> None:
        if process_rank() == 0:
            print(escape_controls(text) if sys.stdout.isatty() else text, end="", flush=True)

    def begin(row: int) -> None:
        say(f"--- {row + 1}\n" * numbered + tokenizer.decode(tokenizer.encode(prompts[row])))

    if process_rank() == 0:
        warn_of_length(model.spec.max_length, tokens, [len(tokenizer.encode(prompt)) for prompt in prompts])
    begin(0)
    with model.inference():
        pieces = generate_text(model, tokenizer, prompts, tokens, sampling, list(map(new_lines, stops)))
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
