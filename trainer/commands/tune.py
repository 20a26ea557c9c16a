"""The fastest plan of a recipe, by few measured trials: `trainer tune +config=RECIPE [budget=8]`."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.commands.grammar import Command, RecipeOptions
from trainer.config.fields import option


@dataclass
class TuneOptions(RecipeOptions):
    budget: int = option(8, "trials that are measured at most", range="[1, inf)")
    hardware: str = option("", "as for estimate; '': the file whose device this machine has")
    steps: int = option(10, "optimizer steps of a trial; the median of all but the first counts", range="[3, inf)")
    allow: list[str] = option([], "settings that may change the numbers of training: those that have several values")
    pool: int = option(200, "how many of the plans that are predicted to be fastest are looked at", range="[1, inf)")


def run(options: TuneOptions) -> int:
    """The exit code: 0 where a plan was measured, 1 where no trial was, 75 after a stop."""
    from trainer.tuning.search import search_plans

    changes = options.take_changes("hardware.")
    own = {name: getattr(options, name) for name in main.keys}
    return search_plans(**own, changes=changes, words=options.overrides, config_dir=options.config_dir)


main = Command(
    "tune",
    "Finds the fastest plan of a recipe by a few measured trials; several values of a setting are tried.",
    "trainer tune +config=llama3_8b budget=6 hardware=h100 activation=none,full",
    TuneOptions,
    run,
    bare=False,
)
