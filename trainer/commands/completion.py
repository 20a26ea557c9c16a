"""Completion of command lines in a shell: `trainer completion bash` prints a script that asks this file for words.

Imports neither torch nor Hydra: a key press should be answered at once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trainer.commands import WORDS, load_command
from trainer.commands.grammar import Command, RecipeOptions, spell_flag
from trainer.config.fields import CONFIGS, ConfigError, option

BASH = """\
# eval "$(trainer completion bash)", for instance in ~/.bashrc
_trainer() {
  local line=${COMP_LINE:0:COMP_POINT}
  local word=${line##*[[:space:]]}
  mapfile -t COMPREPLY < <(TRAINER_LINE=$line "${COMP_WORDS[0]}" completion words 2>/dev/null)
  # bash splits a word at the characters of COMP_WORDBREAKS, and replaces the last part.
  [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o default -F _trainer trainer
"""

ZSH = """\
# eval "$(trainer completion zsh)", for instance in ~/.zshrc behind compinit
_trainer() {
  local -a replies
  replies=("${(@f)$(TRAINER_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" "${words[1]}" completion words 2>/dev/null)}")
  replies=(${replies:#})
  (( $#replies )) || { _files; return }
  compadd -- ${replies:#*[=.]}
  compadd -S '' -- ${(M)replies:#*[=.]}
}
compdef _trainer trainer
"""


@dataclass
class CompletionOptions:
    shell: str = option(
        None, "the shell; words: what may follow $TRAINER_LINE, a word a line", ("bash", "zsh", "words")
    )


def run(options: CompletionOptions) -> None:
    if options.shell == "words":
        print("".join(f"{word}\n" for word in complete_line(os.environ.get("TRAINER_LINE", ""))), end="")
    else:
        print({"bash": BASH, "zsh": ZSH}[options.shell], end="")


main = Command(
    "completion",
    "Prints a script with which a shell completes commands, options, recipes, settings and their values.",
    'eval "$(trainer completion bash)"',
    CompletionOptions,
    run,
    words=("shell",),
)


def list_groups(config_dir: str | None = None) -> dict[str, list[str]]:
    """The names of recipes (group `config`) and of the options of each group, those of a folder of the user's too.
    Raises `ConfigError` where there is no such folder."""
    own = [] if config_dir is None else [Path(config_dir).expanduser()]
    if own and not own[0].is_dir():
        raise ConfigError(f"--config-dir {config_dir}: there is no folder {own[0].resolve()}")
    found: dict[str, set[str]] = {}
    for file in (file for folder in (*own, CONFIGS) for file in folder.glob("*/*.yaml")):
        found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(found[group]) for group in sorted(found)}


def complete_line(line: str) -> list[str]:
    """What the last word of a command line may become. line: from the program on; the last word may be empty."""
    *before, current = re.split(r"\s+", line.lstrip())
    if len(before) < 2 and not re.search("[-+=.]", current):
        return [word for word in (*WORDS, "--help", "--version") if word.startswith(current)]
    words = before[1:]
    command = load_command(words[0] if words and words[0] in WORDS else "train")
    assert isinstance(command, Command)
    folder = words[words.index("--config-dir") + 1] if "--config-dir" in words[:-1] else None
    groups = list_groups(folder if folder and Path(folder).expanduser().is_dir() else None)
    name, equals, _ = current.partition("=")
    flag = words[-1] if words else ""
    if flag.startswith("--") and command.hints.get(option_name(flag), bool) is not bool:  # whose value this is
        replies = list_values(command, flag, groups)
    elif equals:
        head = current[: max(current.rfind(mark) for mark in "=[,") + 1]
        replies = [head + value for value in list_values(command, name, groups)]
    elif current.startswith("-"):
        replies = [*map(spell_flag, command.fields), "--help"]
    else:
        replies = [f"{key}=" for key in command.keys]
        replies += [value for word in command.words for value in list_values(command, word, groups)]
        if issubclass(command.options, RecipeOptions):
            groups.pop("hardware")
            replies += ["+config=", *(f"{group}=" for group in groups if group != "config")]
            replies += [next_part(path, current) for path, *_ in list_choices()]
    return [reply for reply in dict.fromkeys(replies) if reply.startswith(current)]


def option_name(spelled: str) -> str:
    return spelled.removeprefix("--").replace("-", "_")


def list_values(command: Command, name: str, groups: dict[str, list[str]]) -> list[str]:
    """What may stand behind the name of an option, a group or a setting, as far as that is a choice."""
    if (field := command.fields.get(option_name(name))) is not None:
        return groups["hardware"] if field.name == "hardware" else [*(field.metadata["choices"] or ())]
    if not issubclass(command.options, RecipeOptions):
        return []
    name = name.lstrip("+")
    return groups.get(name) or dict(list_choices()).get(name, [])


def list_choices() -> list[tuple[str, list[str]]]:
    """Every setting, with its values as far as they are a choice."""
    from trainer.config import typed

    return [
        (one.path, ["true", "false"] if isinstance(one.default, bool) else [*map(str, one.choices or ())])
        for one in typed.list_settings()
    ]


def next_part(path: str, current: str) -> str:
    """The name of a setting up to the section behind what is typed, such as `lr.`; `name=` where it has no more."""
    end = path.find(".", len(current)) if path.startswith(current) else -1
    return f"{path}=" if end < 0 else path[: end + 1]
