"""The pages of `--help`: a command's own, the settings of a section, and what a word is about."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.commands import WORDS, load_command
from trainer.commands.completion import list_groups
from trainer.commands.grammar import Command, RecipeOptions, print_once, spell_flag
from trainer.config import ConfigError, synonyms, typed
from trainer.config.fields import option

TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text", list: "list", dict: "mapping"}

PAGE = """\
{train}

`trainer`, `python -m trainer` and `torchrun -m trainer` are the same program; without a word, it trains.

commands (trainer WORD --help)
{commands}

recipes and settings
  +config=[a,b]         several recipes, the later wins; single settings win over every recipe
  ~data.sources.NAME    removes an entry of a mapping
  imports=[MODULE]      imports modules of your own, which add to the project (docs/extending.md), also behind --help
  --help SECTION        the settings of a section (such as lr, or model.attention) with type, default and meaning
  --help WORD           searches names and meanings of settings and commands, and what other programs call them

recipes
{recipes}

groups
{groups}

sections of settings
{sections}"""


@dataclass
class HelpOptions(RecipeOptions):
    topic: str = option("", "a section of settings such as lr, or a word to search for; '': the page of trainer --help")


def run(options: HelpOptions) -> None:
    if options.overrides:  # registers what its imports add
        from trainer.config.compose import gather_values

        gather_values(options.overrides, options.config_dir)
    print_once(find_help(options.topic) if options.topic else format_overview(options.config_dir))


main = Command(
    "help",
    "Prints a section of settings, or the settings and commands that a word is about; also as --help WORD.",
    "trainer help warmup",
    HelpOptions,
    run,
    words=("topic",),
)


def every_setting() -> list[typed.Setting]:
    """All settings, those of entries of mappings and of sweeps too."""
    from trainer.sweep.plan import SweepConfig

    found = []
    for setting in (*typed.list_settings(), *typed.list_settings(SweepConfig(), "sweep")):
        found.append(setting)
        found += typed.entry_settings(setting.path) if setting.path in typed.ENTRIES else []
    return found


def format_overview(config_dir: str | None) -> str:
    """The page of `trainer --help`."""
    groups = list_groups(config_dir)
    groups.pop("hardware")
    recipes = groups.pop("config")
    commands = [load_command(word) for word in sorted(WORDS)]
    return PAGE.format(
        train=load_command("train").parser.format_help().rstrip(),
        commands="\n".join(wrap_text(f"  {one.word:<12}{one.purpose}", 14) for one in commands),
        recipes=wrap_text(f"  +config=      {', '.join(recipes)}", 16),
        groups="\n".join(wrap_text(f"  {group + '=':<14}{', '.join(names)}", 16) for group, names in groups.items()),
        sections=wrap_text("  " + ", ".join(dict.fromkeys(one.path.split(".")[0] for one in every_setting())), 2),
    )


def find_help(word: str) -> str:
    """The settings of a section; else all settings, options and commands whose name or meaning has the word, and what
    became of an old name. Raises `ConfigError` with the nearest names where there are none."""
    # An entry that is named, such as data.sources.stdlib, has the settings of any.
    section = next((path for path in typed.ENTRIES if word.startswith(f"{path}.")), word)
    settings = every_setting()
    if found := [setting for setting in settings if f"{setting.path}.".startswith(f"{section}.")]:
        return "\n".join(map(describe_setting, found))
    elsewhere: dict[str, list[str]] = {}
    for name, path in synonyms.SETTINGS.items():
        elsewhere.setdefault(path, []).append(name)

    def matches(*texts: object) -> bool:
        text = normalize_text(" ".join(map(str, texts)))
        return all(normalize_text(term) in text for term in word.split())

    lines = [f"{word}: {known}"] if (known := synonyms.find_synonym(word)) else []
    lines += [f"{name}: {what}" for name, what in synonyms.REMOVED.items() if matches(name) and name != word]
    hits = [one for one in settings if matches(one.path, one.doc, *(one.choices or ()), *elsewhere.get(one.path, []))]
    lines += map(describe_setting, sorted(hits, key=lambda one: not matches(one.path, *elsewhere.get(one.path, []))))
    lines += [describe_command(*one) for one in list_commands() if matches(*one)]
    if not lines:
        names = [*(one.path for one in settings), *(one.path.rpartition(".")[2] for one in settings)]
        close = difflib.get_close_matches(word, dict.fromkeys([*names, *synonyms.SETTINGS, *WORDS]), 3, 0.5)
        nearest = f"the nearest names are {', '.join(close)}" if close else "trainer --help lists all sections"
        raise ConfigError(f"--help {word}: no section, setting or command has it in its name or meaning; {nearest}")
    return "\n".join(lines)


def normalize_text(text: str) -> str:
    return re.sub("[-_]", " ", text.lower())


def list_commands() -> Iterator[tuple[str, str, str]]:
    """Commands and their options: word, option (none for the command itself), meaning."""
    for word in sorted(WORDS):
        command = load_command(word)
        yield word, "", command.purpose
        yield from ((word, name, field.metadata["doc"]) for name, field in command.fields.items())


def describe_command(word: str, name: str, meaning: str) -> str:
    spelled = f" {spell_flag(name)}" * bool(name)
    return f"trainer {word}{spelled}\n" + wrap_text(f"    {meaning}", 4)


def describe_setting(setting: typed.Setting) -> str:
    extra = [f"in {setting.unit}"] if setting.unit else []
    extra += ["one of " + ", ".join(map(str, setting.choices))] if setting.choices else [describe_type(setting.hint)]
    extra += [f"range {setting.range}"] if setting.range else []
    meaning = "; ".join([setting.doc, *extra])
    return wrap_text(f"{setting.path}={json.dumps(setting.default)}", 2) + "\n" + wrap_text(f"    {meaning}", 4)


def describe_type(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return f"{describe_type(typing.get_args(hint)[0])} or null"
    return TYPES.get(typing.get_origin(hint) or hint, "any value")


def wrap_text(text: str, indent: int) -> str:
    """The text in lines that fit the terminal, all but the first indented."""
    width = max(60, min(120, shutil.get_terminal_size().columns))
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
