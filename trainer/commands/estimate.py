"""Memory and time of plans before a device is touched: `trainer estimate +config=RECIPE [hardware=h200]`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.grammar import Command, RecipeOptions, missing_folder
from trainer.config import Config, ConfigError
from trainer.config.fields import option
from trainer.config.typed import changed_settings
from trainer.util.reading import write_atomic

if TYPE_CHECKING:
    from trainer.config.hardware import HardwareConfig
    from trainer.planning.estimate.step import StepEstimate


@dataclass
class EstimateOptions(RecipeOptions):
    hardware: str = option("h200", "a file of configs/hardware (of --config-dir too), or its path; hardware.NAME=VALUE")
    nodes: int = option(0, "machines; 0: as few as hold the processes, or one", range="[0, inf)")
    processes: int = option(
        0, "processes in all, as many on each node; 0: one for each device of the nodes", range="[0, inf)"
    )
    plans: str = option(
        "", "all, or [PLAN, ...], each a file of the group parallel, settings, or both; '': the recipe's"
    )
    top: int | None = option(None, "plans=all: how many of the fastest to show, 10 by default", range="[1, inf)")
    tokens: float = option(0.0, "a budget of tokens: days and device hours that it takes", range="[0, inf)")
    out: str = option("", "writes the settings of the fastest plan that fits for sure there, as a recipe")
    json: str = option("", "writes all numbers there")

    def list_problems(self) -> Iterator[str]:
        if self.top and self.plans != "all":
            yield f"top={self.top} is how many of all plans are shown; set plans=all, or leave it out"
        for name in ("out", "json"):
            yield from missing_folder(name, getattr(self, name))


def run(options: EstimateOptions) -> None:
    from trainer.data.lengths import with_lengths
    from trainer.hf import with_known_model
    from trainer.planning.estimate import report
    from trainer.planning.estimate.plans import given_settings, rank_plans
    from trainer.planning.estimate.step import estimate_step
    from trainer.planning.hardware import load_hardware
    from trainer.planning.neighbours import compose_variant, global_size, plan_list
    from trainer.planning.resolve import check_config, config_problems, resolve_layout

    changes, overrides, config_dir = options.take_changes("hardware."), options.overrides, options.config_dir
    hardware, world = read_machines(options, load_hardware(options.hardware, changes, config_dir))
    node, base = min(world, hardware.devices), compose_variant(overrides, config_dir, world, corpus=False)
    base = with_lengths(with_known_model(base))
    if options.plans == "all":
        if wrong := config_problems(base):
            raise ConfigError(wrong)
        size = global_size(base.batch, world)
        kept = given_settings(overrides)
        ranking = rank_plans(base, hardware, world, size, options.top or 10, kept, sure=True)
        found, title = list(ranking.best), report.ranking_title(ranking, world)
    else:
        texts = plan_list(options.plans) if options.plans else []
        configs = [estimate_plan(text, base, overrides, config_dir, world, node) for text in texts] or [base]
        if wrong := [problem for config in configs for problem in check_config(config, world, node)]:
            raise ConfigError(list(dict.fromkeys(wrong)))
        found = [
            estimate_step(config, resolve_layout(config, world, config.model, node), hardware) for config in configs
        ]
        found.sort(key=lambda one: one.seconds)
        title = f"{len(found)} plans on {world} devices"
    print_estimates(found, title, options, base)


def read_machines(options: EstimateOptions, hardware: HardwareConfig) -> tuple[HardwareConfig, int]:
    """The hardware, with as many devices a node as there are processes on it, and all processes."""
    nodes, world = options.nodes, options.processes
    if not (nodes and world):
        return hardware, world or max(1, nodes) * hardware.devices
    if world % nodes or world > nodes * hardware.devices:
        raise ConfigError(
            f"processes={world} are not as many on each of nodes={nodes}, of {hardware.devices} devices each; set a "
            f"multiple of {nodes} up to {nodes * hardware.devices}, or leave nodes or processes out"
        )
    return replace(hardware, devices=world // nodes), world


def print_estimates(found: list[StepEstimate], title: str, options: EstimateOptions, base: Config) -> None:
    """Prints the plans, fastest first, and writes the files that are wanted."""
    from trainer.planning.estimate import report
    from trainer.planning.estimate.step import most_certain

    chosen = most_certain(found)
    if options.plans:
        report.show_plans(found, f"{title}\n{report.describe_choice(found, chosen)}", options.tokens)
    report.print_estimate(chosen, options.tokens, suggest_smaller(chosen))
    if options.json:
        plans = [report.to_json(one, options.tokens) | {"chosen": one is chosen} for one in found]
        write_atomic(Path(options.json), json.dumps(plans, indent=1))
    if options.out:
        settings = changed_settings(chosen.config, base)
        write_atomic(Path(options.out), report.format_recipe(settings, report.format_prediction(chosen)))


def suggest_smaller(one: StepEstimate) -> list[str]:
    """What makes a plan fit that does not: overrides with what they are predicted to take, in lines."""
    from trainer.diagnosis.evidence import RunEvidence, RunMachine
    from trainer.diagnosis.suggestions import FREED, Suggestions

    if one.fits != "no":
        return []
    machine = RunMachine(one.layout.plan.world, min(one.layout.plan.world, one.hardware.devices), one.hardware.device)
    lacked = {"status": "failed", "reason": "OutOfMemoryError: CUDA out of memory"}
    evidence = RunEvidence(
        Path(), config=one.config, layout=one.layout, machine=machine, hardware=one.hardware, status=lacked
    )
    found = Suggestions(evidence, one.seconds).against(*FREED)
    lines = [f"{override.text}  ({override.told})" if override.told else override.text for override in found]
    return lines or ["no change of this plan alone: plans=all searches the others, or add nodes"]


def estimate_plan(
    text: str, base: Config, overrides: list[str], config_dir: str | None, world: int, node: int
) -> Config:
    """The configuration of a plan given as text, its micro-batches fitted to the recipe's global batch."""
    from trainer.planning.features import resolve_plan
    from trainer.planning.neighbours import build_variant, fit_batch, global_size

    try:
        config, named = build_variant(text, base, overrides, config_dir, world, corpus=False)
    except ConfigError as error:
        raise ConfigError([f"plans={text}: {problem}" for problem in error.problems]) from None
    config.model, config.data = base.model, base.data
    fit_batch(config, resolve_plan(config.parallel, world, base.model, node), global_size(base.batch, world), named)
    return config


main = Command(
    "estimate",
    "Predicts memory and time of a recipe's plans before a device is touched.",
    "trainer estimate +config=llama3_8b nodes=4 plans=all",
    EstimateOptions,
    run,
)
