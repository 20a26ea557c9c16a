"""From overrides with several values to checked trials. Needs no torch and starts nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from trainer.config import Config, ConfigError, typed
from trainer.config.compose import gather_values, hydra_over, quote_value, read_override, to_config
from trainer.config.fields import option
from trainer.planning.resolve import check_config

SORTS = ("tokens_per_second", "mfu", "loss", "eval_loss", "memory_gib", "step_seconds_p50")

MOST = 10_000  # trials of a sweep: more is a slip of the pen


@dataclass
class SweepConfig:
    """Settings of a sweep; a trial does not see them."""

    name: str | None = option(None, "name of the sweep; null means that of the run and -sweep")
    dir: str | None = option(None, "folder of the results, with one of each trial; null means runs/NAME")
    processes: int | None = option(
        None,
        "processes of each trial; null means those that its plan names (parallel.dp is set), else the machine's GPUs "
        "over sweep.parallel, or the fewest that the plan can have on CPUs",
        range="[1, inf)",
    )
    parallel: int = option(1, "trials that run at a time, each on GPUs of its own", range="[1, inf)")
    time_minutes: float | None = option(
        None, "a trial that takes longer saves and ends; null means no limit", unit="minutes", range="(0, inf)"
    )
    saving_seconds: float = option(
        300.0, "time that a stopped trial has to save, before it is killed", unit="seconds", range="[0, inf)"
    )
    sort: str = option("tokens_per_second", "what the table is sorted by, best first", SORTS)


@dataclass
class Trial:
    """One run of a sweep.

    overrides: all that it is started with. swept: those in which it differs from other trials. settings: as the run
    will see them. refusal: why it cannot run, empty if it can. more: what else stands in the line of its results."""

    name: str
    folder: Path
    swept: list[str]
    overrides: list[str]
    processes: int
    settings: dict[str, Any]
    refusal: list[str] = field(default_factory=list)
    more: dict[str, float | None] = field(default_factory=dict)

    @property
    def on_gpus(self) -> bool:
        return self.settings["run"]["device"] != "cpu"

    def words(self, config_dir: str | None) -> list[str]:
        """What stands behind `python -m trainer` for this trial."""
        return [*(["--config-dir", config_dir] if config_dir else []), *self.overrides]


def expand_sweep(
    arguments: Sequence[str], config_dir: str | os.PathLike | None = None
) -> tuple[SweepConfig, list[str], list[list[str]]]:
    """The settings of the sweep, the overrides that all trials have, and those of each trial: the last override's
    values change fastest, as with Hydra's own sweeper.

    Raises `ConfigError` with everything that is wrong about the sweep itself; the rest is for the composition to find.
    """
    own, common, swept, problems = (OmegaConf.create({}), OmegaConf.create({})), [], [], {}
    with hydra_over(config_dir) as loader:
        parser = OverridesParser.create()
        for text in arguments:
            try:
                parser.parse_override(text)
            except HydraException:
                common.append(text)
                continue
            override, written = read_override(text)
            key = override.key_or_group
            if key == "sweep" or key.startswith("sweep."):
                if override.is_delete():
                    problems[text] = f"{text}: the settings of a sweep cannot be removed; leave it out"
                elif override.is_sweep_override():
                    problems[text] = f"{text}: the settings of a sweep have one value; for a list write {key}=[...]"
                elif key == "sweep" and not isinstance(override.value(), dict):
                    problems[text] = f"{text}: the settings of a sweep are a mapping; one of them is sweep.parallel=2"
                else:
                    for settings, read in zip(own, (override, written)):
                        OmegaConf.update(settings, key, read.value(), merge=True)
            elif key == "run.dir" or key == "run.name" and override.is_sweep_override():
                problems[text] = (
                    f"{text}: each trial has a name and a folder of its own in sweep.dir; set sweep.name or sweep.dir"
                )
            elif override.is_sweep_override():
                swept.append(override if typed.holds_number(key) else written)
                swept[-1].config_loader = loader
            else:
                common.append(text)
        problems |= _problems_of_values(swept)
        values = (
            []
            if problems
            else [
                [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
                for override in swept
            ]
        )
        trials = [list(trial) for trial in itertools.product(*values)]
    readings = [OmegaConf.to_container(settings).get("sweep", {}) for settings in own]
    chosen = typed.choose_written(SweepConfig, *readings, problems, "sweep")
    sweep = typed.build_typed(chosen, problems, SweepConfig, "sweep")
    problems |= {text: text for text in typed.out_of_range(sweep, "sweep")}
    if problems:
        raise ConfigError(list(problems.values()))
    return sweep, common, trials


def _problems_of_values(swept: list[Override]) -> dict[str, str]:
    problems, trials = {}, 1
    keys = [override.key_or_group for override in swept]
    for override in swept:
        text, key = override.input_line, override.key_or_group
        if not override.is_discrete_sweep():
            problems[text] = (
                f"{text}: an interval has no values to be tried one by one; name them as in {key}=1,2 or range(1,3)"
            )
        elif keys.count(key) > 1:
            problems[key] = f"{key} has several values twice; put them into one override"
        elif not (number := _values(override)):
            problems[text] = f"{text} fits nothing; a glob is for the options of a group, such as parallel=glob(zero*)"
        else:
            trials *= number
    if trials > MOST:
        asked = " ".join(override.input_line for override in swept)
        problems["trials"] = f"{asked}: more than {MOST} trials, or without end; leave values out, or split the sweep"
    return problems


def _values(override: Override) -> float:
    """How many values an override has; a range is not multiplied out for it."""
    if not override.is_range_sweep():
        return len(list(override.sweep_string_iterator()))
    found = override.value()
    start, stop, step = map(float, (found.start, found.stop, found.step))
    if step == 0 or not math.isfinite(stop - start):
        return math.inf
    return max(0, math.ceil((stop - start) / step))


def make_trials(
    sweep: SweepConfig, common: list[str], swept: list[list[str]], config_dir: str | os.PathLike | None, gpus: int
) -> list[Trial]:
    """The trials, composed and checked, on a machine with so many GPUs; sets the sweep's name and folder where it has
    none.

    Raises `ConfigError` for an override that means nothing, and where no trial is legal.
    """
    first = to_config(*gather_values([*common, *swept[0]], config_dir))
    sweep.name = sweep.name or f"{first.run.name}-sweep"
    sweep.dir = sweep.dir or f"runs/{sweep.name}"
    trials, problems = [], {}
    for values, name in zip(swept, name_trials(swept)):
        trial, wrong = make_trial(sweep, name, common, values, config_dir, gpus)
        trials.append(trial)
        problems |= wrong
    for url, number in Counter(trial.settings["checkpoint"]["upload"] for trial in trials).items():
        if url is not None and number > 1:
            problems["checkpoint.upload"] = (
                f"checkpoint.upload={url} is that of {number} trials, which would resume from each other; set "
                f"'checkpoint.upload={url}/${{run.name}}'"
            )
    if problems:
        raise ConfigError(list(problems.values()))
    if all(trial.refusal for trial in trials):
        shared = [reason for reason in trials[0].refusal if all(reason in trial.refusal for trial in trials)]
        raise ConfigError(
            shared
            + [f"trial {trial.name}: {reason}" for trial in trials for reason in trial.refusal if reason not in shared]
        )
    return trials


def make_trial(
    sweep: SweepConfig, name: str, common: list[str], values: list[str], config_dir: str | os.PathLike | None, gpus: int
) -> tuple[Trial, typed.Problems]:
    """A trial of a sweep with a name and a folder, composed and checked; and what in its overrides means nothing."""
    folder = Path(str(sweep.dir)) / name
    overrides = [
        *common,
        *values,
        f"run.name={quote_value(f'{sweep.name}/{name}')}",
        f"run.dir={quote_value(str(folder))}",
    ]
    plain, wrong = gather_values(overrides, config_dir)
    processes = sweep.processes or _processes(to_config(plain, wrong), sweep, gpus)
    config = to_config(plain, wrong, processes)
    refusal = [] if wrong else check_on(config, processes, gpus)
    settings = json.loads(json.dumps(typed.to_plain(config)))
    return Trial(name, folder, values, overrides, processes, settings, refusal), wrong


def check_on(config: Config, processes: int, gpus: int) -> list[str]:
    """Why a trial cannot run on so many processes, of a machine with so many GPUs."""
    if gpus and config.run.device != "cpu" and processes > gpus:
        return [
            f"{processes} processes need as many GPUs, and there are {gpus}; set sweep.processes, or run.device=cpu"
        ]
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)  # what the plan's check takes for the size of a node
    try:
        return check_config(config, processes)
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE")
        os.environ |= {"LOCAL_WORLD_SIZE": before} if before else {}


def _processes(config: Config, sweep: SweepConfig, gpus: int) -> int:
    """How many processes a trial has where the sweep does not say."""
    parallel = config.parallel
    fewest = parallel.tp * parallel.pp * max(max(parallel.dp, 1) * parallel.cp, parallel.shard)
    if parallel.dp > 0:
        return fewest
    return gpus // sweep.parallel if config.run.device != "cpu" and gpus >= sweep.parallel else fewest


def setting_of(override: str) -> tuple[str, str]:
    """The setting and the value of an override."""
    name, _, value = override.lstrip("+~").partition("=")
    return name, value


def name_trials(swept: list[list[str]]) -> list[str]:
    """A readable name for each trial, fit for a folder: `parallel-zero1_peak-0.001`; of a setting, as much as tells it
    from others.

    A name depends on the trial's own values, so that trials added to a sweep leave those of others.
    """
    keys = [setting_of(text)[0] for text in swept[0]]
    short = [
        next(
            tail
            for n in range(1, len(parts) + 1)
            if (tail := ".".join(parts[-n:])) and [other for other in keys if f".{other}".endswith(f".{tail}")] == [key]
        )
        for key in keys
        for parts in [key.split(".")]
    ]
    found: list[str] = []
    for values in swept:
        tried = [re.sub(r"[^\w.+-]+", "-", setting_of(text)[1]).strip("-") for text in values]
        name = "_".join(f"{name}-{value}" for name, value in zip(short, tried)) or "single"
        if name in found or len(name) > 120:
            name = f"{name[:100]}-{hashlib.blake2b(' '.join(values).encode(), digest_size=4).hexdigest()}"
        found.append(name)
    return found
