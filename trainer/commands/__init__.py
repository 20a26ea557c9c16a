"""The command `trainer`: one word for what to do, then what that takes. `python -m trainer` is the same.

What begins with no such word is a run's own process, as torchrun starts them.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from trainer.config.fields import CONFIGS, ConfigError
from trainer.util.exit_codes import refuse_config

WORDS = {word: f"{word}.main" for word in ("train", "estimate", "probe", "tune", "diagnose", "plot", "report")}
WORDS |= {word: f"{word}.main" for word in ("sample", "export", "merge", "parity", "preflight", "torchrun")}
WORDS |= {"sweep": "train.sweep", "eval": "evaluate.main", "completion": "completion.main", "help": "help.main"}
WORDS |= {"prepare": "corpus.prepare", "show": "corpus.show"}
"""Word -> module in this folder, and the `Command` in it."""


REMOVED = {"watch": "trainer report RUN writes the page of a run, also while it goes on"}
"""Commands of earlier versions -> what to use instead."""


def load_command(word: str) -> Any:
    """The `grammar.Command` of a word."""
    module, _, name = WORDS[word].partition(".")
    return getattr(importlib.import_module(f"trainer.commands.{module}"), name)


def main(arguments: Sequence[str] | None = None, own: bool = False) -> int:
    """Runs the command line. The exit code is that of what was run. own: this process ends with it, so that a run may
    handle its signals from here to the end."""
    arguments = [*(sys.argv[1:] if arguments is None else arguments)]
    first = arguments[0] if arguments else ""
    if first in WORDS and first != "train":
        return load_command(first)(arguments[1:])
    if first in REMOVED:
        return refuse_config(ConfigError(f"'{first}' was removed; {REMOVED[first]}"))
    unknown = first.isidentifier() and first not in WORDS and not any(CONFIGS.glob(f"*/{first}.yaml"))
    if unknown and (close := difflib.get_close_matches(first, WORDS, 1)):
        return refuse_config(ConfigError(f"'{first}' is no command; did you mean '{close[0]}'? See trainer --help"))
    return load_command("train")(arguments[first == "train" :], own=own)
