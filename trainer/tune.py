"""The fastest plan of a recipe, by few measured trials: `python -m trainer.tune +config=RECIPE [budget=8]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

from trainer.config import ConfigError
from trainer.config.fields import option
from trainer.config.options import escape_unprintable, format_usage, parse_options
from trainer.planning.plan_overrides import split_words
from trainer.tuning.search import search_plans
from trainer.util.exit_codes import DONE, REFUSED, refuse_config

PROGRAM = "trainer.tune"


@dataclass
class TuneOptions:
    budget: int = option(8, "trials that are measured at most")
    hardware: str = option("", "as for estimate; '': the file whose device this machine has")
    steps: int = option(10, "optimizer steps of a trial; the median of all but the first counts")
    allow: list[str] = option([], "settings that may change the numbers of training: those that have several values")
    pool: int = option(200, "how many of the plans that are predicted to be fastest are looked at")


def parse_arguments(arguments: Sequence[str]) -> tuple[TuneOptions, list[str], list[str], str | None]:
    """Splits a command line into options, changes of the hardware, overrides and configuration folder. Raises
    `ConfigError`."""
    own, words, config_dir = split_words(arguments, [field.name for field in fields(TuneOptions)], PROGRAM)
    changes = [word.removeprefix("hardware.") for word in words if word.startswith("hardware.")]
    overrides = [word for word in words if not word.startswith("hardware.")]
    options = parse_options(TuneOptions, [f"{name}={value}" for name, value in own.items()])
    least = {"budget": 1, "steps": 3, "pool": 1}
    if low := [
        f"{name}={getattr(options, name)} must be at least {n}"
        for name, n in least.items()
        if getattr(options, name) < n
    ]:
        raise ConfigError(low)
    return options, changes, overrides, config_dir


def main(arguments: Sequence[str]) -> int:
    """The command line. The exit code: 0 where a plan was measured, 1 where no trial was, 75 after a stop, 2 after one
    message about what is wrong."""
    escape_unprintable()
    page = format_usage(TuneOptions, PROGRAM).replace(
        PROGRAM, f"{PROGRAM} +config=RECIPE [SETTING=VALUE[,VALUE] ...]", 1
    )
    if {"-h", "--help"} & set(arguments):
        print(page)
        return DONE
    if not arguments:
        print(page, file=sys.stderr)
        return REFUSED
    try:
        options, changes, overrides, config_dir = parse_arguments(arguments)
        return search_plans(**vars(options), changes=changes, words=overrides, config_dir=config_dir)
    except ConfigError as error:
        return refuse_config(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
