"""The grammar of all commands: a dataclass of documented options, and a function that takes one.

    trainer WORD [--name VALUE | --name=VALUE | name=VALUE ...] [+config=RECIPE] [SETTING=VALUE ...]

Imports neither torch nor Hydra: completion, `--help` and most refusals need none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import itertools
import logging
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.commands import load_command
from trainer.config.fields import ConfigError, describe_outside, option, suggest_nearest
from trainer.config.schema import Config
from trainer.config.synonyms import find_synonym
from trainer.util.exit_codes import DONE, REFUSED, process_rank, refuse_config

DTYPES = ("fp32", "bf16", "fp16")
"""Names of `precision.dtypes.DTYPES`, which needs torch."""

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list[str]: "a list [a,b]",
    list[float]: "a list of numbers [1,2]",
}
"""Type of an option -> what a value must be."""

ITEMS = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^,]*?))\s*(?:,|$)""")
"""The items of a list: in quotes of either kind, or up to the next comma."""

SHORT = {"config_dir": ["-cd"], "multirun": ["-m"]}
"""Shorter spellings of flags."""

OPTIONAL_VALUE = ("help", "schema")
"""Flags whose value may be left out."""


@dataclass
class RecipeOptions:
    """Options of a command that reads a recipe. overrides: the words that are no options of the command."""

    config_dir: str | None = option(
        None, "folder of your own groups and recipes (DIR/config/NAME.yaml); they win over the shipped ones"
    )
    overrides: list[str] = option([], "")

    def take_changes(self, prefix: str) -> list[str]:
        """Removes the overrides that begin with a prefix. Returns them without it."""
        taken = [word.removeprefix(prefix) for word in self.overrides if word.startswith(prefix)]
        self.overrides = [word for word in self.overrides if not word.startswith(prefix)]
        return taken


@dataclass
class LaunchOptions:
    """Options of a command that can start several processes of itself."""

    gpus: int | None = option(None, "starts N processes on this machine, each with a GPU of its own", range="[1, inf)")
    processes: int | None = option(None, "starts N processes on this machine", range="[1, inf)")

    def count(self) -> int:
        """How many processes are to run. Raises `ConfigError`."""
        given = [f"--{name} {n}" for name, n in (("gpus", self.gpus), ("processes", self.processes)) if n]
        if len(given) > 1:
            raise ConfigError(f"{given[0]} is not allowed with {given[1]}; leave one out")
        if given and {"RANK", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
            raise ConfigError("--gpus and --processes start processes, and torchrun has done so; leave them out")
        return self.gpus or self.processes or 1


@dataclass
class ModelOptions:
    """Options of a command that reads a trained model."""

    checkpoint: str = option(
        None, "run folder (its newest checkpoint is taken), checkpoint folder, or transformers folder"
    )
    weights: str = option(
        "trained", "the weights as trained, or their average (optimizer.ema.decay)", ("trained", "ema")
    )


class ArgumentParser(argparse.ArgumentParser):
    """Wrong arguments are a `ConfigError`."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


@dataclass(frozen=True)
class Command:
    """A word of the command line. A call with the arguments behind the word returns the exit code.

    purpose: one sentence; example: a command line.
    options: a dataclass. An option whose default is None has to be given, unless its type includes None. Its method
    `list_problems`, if it has one, yields what is wrong with options together; values may be out of their ranges.
    run: takes an instance, and returns the exit code, or None for 0.
    words: options that arguments without a name stand for, in this order; the first takes several if it is a list.
    bare: whether the command line may be empty. device: an override for processes that --gpus starts.
    check: called before processes are started, with their number; raises `ConfigError`.
    foreign: the arguments are for another program, and `run` takes them as they are.
    """

    word: str
    purpose: str
    example: str
    options: type
    run: Callable[..., int | None]
    words: tuple[str, ...] = ()
    bare: bool = True
    device: str = ""
    check: Callable[[Any, int], None] = lambda options, processes: None
    foreign: bool = False

    def __call__(self, arguments: Sequence[str], **more: Any) -> int:
        """Runs the command line. The exit code is 2 after one message about what is wrong with it. more: for `run`."""
        escape_unprintable()
        if not (self.bare or arguments):
            print_once(f"{self.parser.format_usage()}\n{self.purpose} --help has more.", sys.stderr)
            return REFUSED
        try:
            if self.foreign and arguments[0] not in ("-h", "--help"):
                return self.run(arguments) or DONE
            given, problems = self.read(arguments)
            if "help" in given:
                return self.show_help(given)
            options = self.convert(given, problems)
            if isinstance(options, LaunchOptions):
                if options.gpus:
                    arguments = [self.device, *arguments]
                    options = self.parse(arguments)
                if (count := options.count()) > 1:
                    self.check(options, count)
                    if options.gpus:
                        check_gpus(count)
                    return self.start(count, arguments)
            return self.run(options, **more) or DONE
        except ConfigError as error:
            return refuse_config(error)

    def show_help(self, given: dict[str, Any]) -> int:
        """Prints the page of the command; behind `--help WORD`, and for a run, that of `trainer help`."""
        topic, overrides = given["help"], given.get("overrides", [])
        if "=" in topic:  # an override behind the option, and no word
            topic, overrides = "", [topic, *overrides]
        if self.word != "train" and not topic:
            return print_once(self.parser.format_help().rstrip())
        page = load_command("help")
        return page.run(page.options(config_dir=given.get("config_dir"), overrides=overrides, topic=topic)) or DONE

    def start(self, processes: int, arguments: Sequence[str]) -> int:
        """Runs the same command line on several processes. Returns the exit code of the one that failed first."""
        launch = ArgumentParser(add_help=False, allow_abbrev=False)
        for field in dataclasses.fields(LaunchOptions):
            launch.add_argument(f"--{field.name}")
        _, rest = launch.parse_known_args(arguments)
        module = ["-m", "trainer", *([] if self.word == "train" else [self.word])]
        if self.word == "train":
            print(f"starting {processes} processes; Ctrl-C saves and stops them", flush=True)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets with a warning
        logging.disable(logging.CRITICAL)  # torchrun's own lines: the processes have said what there is to say
        return load_command("torchrun").run(
            ["--standalone", "--nproc-per-node", str(processes), *module, *rest], brief=True
        )

    @cached_property
    def inherited(self) -> set[str]:
        """Options of every command that reads a recipe, or starts processes."""
        kinds = [kind for kind in (RecipeOptions, LaunchOptions) if issubclass(self.options, kind)]
        return {field.name for kind in kinds for field in dataclasses.fields(kind)}

    @cached_property
    def fields(self) -> dict[str, dataclasses.Field]:
        """Its options by name, its own first."""
        fields = sorted(dataclasses.fields(self.options), key=lambda field: field.name in self.inherited)
        return {field.name: field for field in fields if field.name != "overrides"}

    @cached_property
    def hints(self) -> dict[str, Any]:
        """Type of each option, without None."""
        hints = typing.get_type_hints(self.options).items()
        return {name: hint.__args__[0] if isinstance(hint, types.UnionType) else hint for name, hint in hints}

    @cached_property
    def required(self) -> list[str]:
        """Options that have to be given."""
        hints = typing.get_type_hints(self.options)
        return [name for name in self.fields if self.fields[name].default is None and hints[name] == self.hints[name]]

    @cached_property
    def keys(self) -> list[str]:
        """Options that may be spelled `name=VALUE`: others have names that settings have, or may come to have."""
        return [] if self.word == "train" else [name for name in self.fields if name not in self.inherited]

    def is_list(self, name: str) -> bool:
        return typing.get_origin(self.hints[name]) is list

    @cached_property
    def parser(self) -> argparse.ArgumentParser:
        takes = [name.upper() + " ..." * self.is_list(name) for name in self.words]
        takes = [word if name in self.required else f"[{word}]" for name, word in zip(self.words, takes)]
        takes += ["[+config=RECIPE] [SETTING=VALUE ...]"] * issubclass(self.options, RecipeOptions)
        takes += [f"{name}=..." for name in self.required if name not in self.words]
        parser = ArgumentParser(
            prog=f"trainer {self.word}",
            usage=" ".join(["trainer", self.word, *takes, "[options]"]),
            description=f"{self.purpose}\n\nexample:\n  {self.example}",
            epilog=f"also as name=VALUE: {', '.join(self.keys)}" if self.keys else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
        for name, field in self.fields.items():
            how: dict[str, Any] = {}
            if self.hints[name] is bool:
                how = {"action": "store_const", "const": "true"}
            elif self.is_list(name):
                how = {"nargs": "+"}
            elif name in OPTIONAL_VALUE:
                how = {"nargs": "?", "const": ""}
            spelled = [spell_flag(name), *SHORT.get(name, ())]
            parser.add_argument(*spelled, dest=name, help=describe_option(name, field, self.required), **how)
        parser.add_argument(
            "--help", "-h", nargs="?", const="", metavar="WORD", help="this page, or the settings that WORD is about"
        )
        return parser

    def parse(self, arguments: Sequence[str]) -> Any:
        """An instance of `options`. Raises `ConfigError` with everything that is wrong."""
        return self.convert(*self.read(arguments))

    def read(self, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """The options that are given, as texts and lists of texts, and what is wrong with the other arguments. Raises
        `ConfigError` where an option lacks its value."""
        spelled, switches = [], {}
        for word in arguments:
            name, equals, value = word.partition("=")
            if equals and name in self.keys and self.hints[name] is bool:  # as an option, it takes no value
                switches[name] = value
                continue
            name = spell_flag(name) if equals and name in self.keys else name.replace("_", "-")
            spelled.append(name + equals + value if name.startswith("--") else word)
        parsed, unknown = self.parser.parse_known_intermixed_args(spelled)
        given = vars(parsed) | switches
        words = given.pop("arguments", [])
        # A word behind an unknown option is its value.
        problems = [
            self._unknown(word)
            for before, word in itertools.pairwise(["", *unknown])
            if word.startswith("-") or not before.startswith("-")
        ]
        if issubclass(self.options, RecipeOptions):
            settings = [field.name for field in dataclasses.fields(Config)]
            for name, equals, _ in (word.partition("=") for word in words):
                if equals and name not in settings and difflib.get_close_matches(name, self.keys, 1, 0.8):
                    problems.append(self._unknown(name))
            plain = [word for word in words if "=" not in word] if self.words else []
            given["overrides"] = [word for word in words if word not in plain]
        else:
            plain = [word for word in words if not re.match(r"\w+=", word)]
            problems += [self._unknown(word) for word in words if word not in plain]
        self._place(plain, given, problems)
        return given, problems

    def _unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        legal = [*map(spell_flag, self.fields)] if name.startswith("-") else self.keys
        known = find_synonym(name.lstrip("-")) if issubclass(self.options, RecipeOptions) else None
        return f"{name} is no option of {self.parser.prog}; {known or suggest_nearest(name, legal)}"

    def _place(self, plain: list[str], given: dict[str, Any], problems: list[str]) -> None:
        """Gives arguments without a name to the options that they stand for."""
        free = [name for name in self.words if name not in given]
        for index, name in enumerate(free):
            others = len(free) - index - 1
            count = max(1, len(plain) - others) if self.is_list(name) else 1
            if taken := plain[:count]:
                given[name] = tuple(taken) if self.is_list(name) else taken[0]
            plain = plain[count:]
        if plain:
            stand = f"{' '.join(self.words)} can stand without a name" if self.words else "write options as name=VALUE"
            problems.append(f"'{plain[0]}' is one word too many; {stand}")

    def convert(self, given: dict[str, Any], problems: list[str]) -> Any:
        """The options with their types. Raises `ConfigError` with everything that is wrong, `problems` first."""
        values = {name: given[name] for name in ("overrides",) if name in given}
        outside: list[str | None] = []
        for name, field in self.fields.items():
            if name not in given:
                problems += [f"{name}=... is needed: {field.metadata['doc']}"] * (name in self.required)
                continue
            kind, text, choices = self.hints[name], given[name], field.metadata["choices"]
            joined = text if isinstance(text, str) else ",".join(text)
            shown = f"{name}={joined}" if name in self.keys else f"{spell_flag(name)} {joined}"
            try:
                value = values[name] = convert_text(kind, text)
            except ValueError:
                problems.append(f"{shown} must be {KINDS[kind]}")
                continue
            if choices and value not in choices:
                problems.append(f"{shown} is not legal; {suggest_nearest(joined, list(choices))}")
            if interval := field.metadata["range"]:
                outside.append(describe_outside(name, value, interval))
        options = None if problems else self.options(**values)
        if problems := [*problems, *filter(None, outside), *getattr(options, "list_problems", list)()]:
            raise ConfigError(problems)
        return options


def missing_folder(name: str, path: str) -> list[str]:
    """What is wrong with an option that names a file to write."""
    place = Path(path)
    if path and place.is_dir():
        return [f"{name}={path} is a folder; name a file in it"]
    lacks = path and not place.absolute().parent.is_dir()
    return [f"{name}={path}: there is no folder {place.parent}; make it, or name another"] if lacks else []


def spell_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def convert_text(kind: Any, text: str | list[str] | tuple[str, ...]) -> Any:
    """A value as its type. Texts are taken literally, spaces and all. The items of a list are several arguments, or
    stand in brackets, between commas, and may be quoted; those of a tuple had no name and are taken as they are. Raises
    `ValueError`."""
    if kind is bool and text not in ("true", "false"):
        raise ValueError
    if isinstance(text, str):
        return text == "true" if kind is bool else kind(text)
    (item,) = typing.get_args(kind)
    if isinstance(text, tuple) or len(text) > 1:
        return [item(part) for part in text]
    listed = re.fullmatch(r"\[(.*)\]|[^,]*", text[0], re.DOTALL)
    if not listed:
        raise ValueError
    if listed[1] is None:
        return [item(text[0])]
    parts = (match.groups() for match in ITEMS.finditer(listed[1]))
    return [item(next(part for part in some if part is not None)) for some in parts if some != (None, None, "")]


def describe_option(name: str, field: dataclasses.Field, required: list[str]) -> str:
    """The line of an option on the page of `--help`."""
    notes = [", ".join(filter(None, field.metadata["choices"] or ()))]
    if name in required:
        notes.append("needed")
    elif field.default not in (None, "", False, dataclasses.MISSING):
        notes.append(f"default: {field.default}")
    noted = "; ".join(filter(None, notes))
    return (field.metadata["doc"] + f" ({noted})" * bool(noted)).replace("%", "%%")


def check_gpus(count: int) -> None:
    """Raises `ConfigError` where this machine has fewer GPUs."""
    import torch

    if (present := torch.cuda.device_count()) < count:
        way = f"--gpus {present}" if present else f"--processes {count} to use the CPU"
        raise ConfigError(f"--gpus {count}: this machine has {present or 'no'} GPUs that torch can use; set {way}")


def print_once(text: str, stream: typing.TextIO | None = None) -> int:
    """Prints on the first rank alone, and is quiet where nobody reads on (`--help | head`). Returns the exit code."""
    if process_rank() == 0:
        with contextlib.suppress(BrokenPipeError):
            print(text, file=stream or sys.stdout, flush=True)
    return DONE


def escape_unprintable() -> None:
    """Makes the standard output write what its encoding lacks as escapes, as the standard error does, where it would
    raise: what commands print may come from anybody's files."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
