"""Whether plans give the numbers of one process: `trainer parity --gpus 4 +config=NAME 'plans=[...]'`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from trainer.commands.grammar import Command, LaunchOptions, RecipeOptions, missing_folder
from trainer.config.fields import option


@dataclass
class ParityOptions(LaunchOptions, RecipeOptions):
    plans: str = option(
        "",
        'each a file of the group parallel (zero3), settings ("parallel.tp=2 precision=bf16"), or both; quote those '
        "that hold a comma or a bracket; '': every way to lay the model over the processes",
    )
    steps: int = option(3, "optimizer steps", range="[1, inf)")
    json: str = option("", "writes the results there")

    def list_problems(self) -> list[str]:
        return missing_folder("json", self.json)


def run(options: ParityOptions) -> int:
    """The exit code: 0 all plans pass, 1 one fails."""
    from trainer.planning.neighbours import compose_variant, plan_list

    plans = plan_list(options.plans) if options.plans else []
    base = compose_variant(options.overrides, options.config_dir, int(os.environ.get("WORLD_SIZE", 1)))
    from trainer.parity import compare_plans  # torch, which no refusal above needs

    return compare_plans(base, options.overrides, plans, options.steps, options.json, options.config_dir)


main = Command(
    "parity",
    "Trains a recipe under every plan and in one plain process, and compares losses, gradients and weights; the "
    "global batch is the recipe's under every plan.",
    "trainer parity --processes 4 +config=debug 'plans=[zero3, tp2_pp2]'",
    ParityOptions,
    run,
    device="run.device=cuda",
)
