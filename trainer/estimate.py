"""Memory and time of plans before a device is touched: `python -m trainer.estimate +config=RECIPE [hardware=h200]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from trainer.config import Config, ConfigError
from trainer.config.fields import option
from trainer.config.options import parse, usage
from trainer.planning.estimate import report
from trainer.planning.estimate.hardware import load_hardware
from trainer.planning.estimate.plans import rank_plans
from trainer.planning.estimate.step import estimate
from trainer.planning.plan import resolve_plan
from trainer.planning.resolve import check, resolve
from trainer.planning.variants import compose, fit_batch, global_size, plan_list, split_words, variant
from trainer.util.exit_codes import DONE, refuse
from trainer.util.files import write_atomic

PROGRAM = "trainer.estimate"


@dataclass
class EstimateOptions:
    hardware: str = option("h200", "a file of configs/hardware (of --config-dir too), or its path; hardware.NAME=VALUE")
    nodes: int = option(1, "machines")
    processes: int = option(0, "processes in all; 0 means one for each device of the nodes")
    plans: str = option(
        "", "all, or [PLAN, ...], each a file of the group parallel, settings, or both; '': the recipe's"
    )
    top: int = option(10, "plans=all: how many of the fastest to show")
    tokens: float = option(0.0, "a budget of tokens: days and device hours that it takes")
    out: str = option("", "writes the fastest plan's settings there, as a recipe to put behind the own one")
    json: str = option("", "writes all numbers there")
    plot: str = option("", "writes pictures there: memory and time, and NAME-schedule of a pipeline")


def run(options: EstimateOptions, changes: list[str], overrides: list[str], config_dir: str | None) -> None:
    check_options(options)
    hardware = load_hardware(options.hardware, changes, config_dir)
    world = options.processes or options.nodes * hardware.devices
    node, base = min(world, hardware.devices), compose(overrides, config_dir, world, corpus=False)
    if base.model.from_hf:
        from trainer.hf import model_from_hf

        base.model = model_from_hf(base.model)
    if options.plans == "all":
        ranking = rank_plans(base, hardware, world, global_size(base.batch, world), options.top)
        found, title = list(ranking.best), report.summary(ranking, world)
    else:
        texts = plan_list(options.plans) if options.plans else []
        configs = [planned(text, base, overrides, config_dir, world, node) for text in texts] or [base]
        if wrong := [problem for config in configs for problem in check(config, world, node)]:
            raise ConfigError(list(dict.fromkeys(wrong)))
        found = [estimate(config, resolve(config, world, config.model, node), hardware) for config in configs]
        found.sort(key=lambda one: one.seconds)
        title = f"{len(found)} plans on {world} devices"
    if options.plans:
        report.show_plans(found, title)
    report.show(found[0], options.tokens)
    if options.json:
        write_atomic(Path(options.json), json.dumps([report.to_json(one) for one in found], indent=1))
    if options.out:
        settings = report.changes(found[0].config, base)
        write_atomic(Path(options.out), report.recipe(settings, report.predicted(found[0])))
    if options.plot:
        from trainer.plots.estimate import draw

        print(*draw(found, Path(options.plot)), sep="\n")


def check_options(options: EstimateOptions) -> None:
    least = {"nodes": 1, "top": 1, "processes": 0, "tokens": 0}
    problems = [
        f"{name}={getattr(options, name)} must be at least {low}"
        for name, low in least.items()
        if not getattr(options, name) >= low
    ]
    problems += [
        f"{name}={path}: there is no folder {Path(path).parent}"
        for name, path in (("out", options.out), ("json", options.json), ("plot", options.plot))
        if path and not Path(path).absolute().parent.is_dir()
    ]
    if problems:
        raise ConfigError(problems)


def planned(text: str, base: Config, overrides: list[str], config_dir: str | None, world: int, node: int) -> Config:
    """The configuration of a plan given as text, its micro-batches fitted to the recipe's global batch."""
    config, named = variant(text, base, overrides, config_dir, world, corpus=False)
    config.model = base.model
    fit_batch(config, resolve_plan(config.parallel, world, base.model, node), global_size(base.batch, world), named)
    return config


def parse_arguments(arguments: Sequence[str]) -> tuple[EstimateOptions, list[str], list[str], str | None]:
    """Splits a command line into options, changes of the hardware, overrides and configuration folder. Raises
    `ConfigError`."""
    own, words, config_dir = split_words(arguments, [field.name for field in fields(EstimateOptions)], PROGRAM)
    changes = [word.removeprefix("hardware.") for word in words if word.startswith("hardware.")]
    overrides = [word for word in words if not word.startswith("hardware.")]
    options = parse(EstimateOptions, [f"{name}={value}" for name, value in own.items()])
    return options, changes, overrides, config_dir


def main(arguments: Sequence[str]) -> int:
    """The command line; the exit code is 0, or 2 after one message about what is wrong."""
    if {"-h", "--help"} & set(arguments):
        page = usage(EstimateOptions, PROGRAM)
        print(page.replace(PROGRAM, f"{PROGRAM} +config=RECIPE [SETTING=VALUE ...]", 1))
        return DONE
    try:
        run(*parse_arguments(arguments))
    except ConfigError as error:
        return refuse(error)
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
