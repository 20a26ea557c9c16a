"""A search from its settings to an exit code: what is tried, trial after trial, and what is left of it."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import Config, ConfigError, typed
from trainer.config.hardware import HardwareConfig
from trainer.data.lengths import with_lengths
from trainer.hf import with_known_model
from trainer.planning.estimate.plans import given_settings
from trainer.planning.hardware import hardware_names, load_hardware
from trainer.planning.neighbours import compose_variant, override_key
from trainer.sweep import print_line
from trainer.sweep.local import stop_signals, visible_gpus
from trainer.sweep.plan import SweepConfig, expand_sweep
from trainer.tuning.study import (
    SearchPlan,
    TuningStudy,
    choose_next,
    expected_seconds,
    frozen_differences,
    list_plans,
    plan_overrides,
    print_study,
    write_page,
)
from trainer.util.exit_codes import DONE, FAILED, STOPPED
from trainer.util.lines import BEST
from trainer.util.reading import lock_folder
from trainer.util.tables import format_duration

MINUTES = 10.0
"""Time limit of a trial on this machine, where `sweep.time_minutes` sets none."""


def search_plans(
    budget: int,
    hardware: str,
    steps: int,
    allow: Sequence[str],
    pool: int,
    changes: Sequence[str],
    words: Sequence[str],
    config_dir: str | None,
) -> int:
    """Looks for the fastest plan; the options are those of `trainer tune`, words its overrides. Returns the exit code.
    Raises `ConfigError` before anything is started where something is wrong."""
    sweep, common, swept = expand_sweep(words, config_dir)
    base = compose_variant(common, config_dir, 1)
    gpus = visible_gpus() if base.run.device != "cpu" else []
    machine = machine_of(hardware, changes, config_dir, sweep, gpus)
    sweep.processes = processes_of(sweep, machine, gpus)
    sweep.name = sweep.name or f"{base.run.name}-tune"
    sweep.dir = sweep.dir or f"runs/{sweep.name}"
    restrict_sweep(sweep)
    given = [word for some in (common, *swept) for word in some]
    if "compile" not in map(override_key, given) and machine.device != "CPU":
        swept = [[*values, f"compile={one}"] for values, one in itertools.product(swept, ("true", "false"))]
    base = with_known_model(compose_variant(common, config_dir, sweep.processes))
    tried = [
        with_known_model(compose_variant([*common, *more], config_dir, sweep.processes)) if more else base
        for more in swept
    ]
    check_allowed(base, tried, allow)
    measured = [with_lengths(one) for one in tried]
    found = list_plans(with_lengths(base), measured, machine, sweep.processes, pool, given_settings(given))
    settings = {
        "settings": typed.to_plain(base),
        "tried": "; ".join(map(" ".join, swept)),
        "hardware": typed.to_plain(machine),
        "sweep.processes": sweep.processes,
        "steps": steps,
    }
    descriptor = lock_folder("sweep.dir", Path(sweep.dir), "search", "sweep.name")
    try:
        study = TuningStudy(Path(sweep.dir), found, settings)
        return PlanSearch(study, sweep, machine, common, base, steps, config_dir, gpus, budget).run()
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class PlanSearch:
    """Trials of a study until there are `budget` of them, or none that could be faster.

    machine: that plans are predicted for; common: overrides that all trials have; base: the configuration that they
    make; the rest as for `TuningStudy.measure`."""

    study: TuningStudy
    sweep: SweepConfig
    machine: HardwareConfig
    common: list[str]
    base: Config
    steps: int
    config_dir: str | None
    gpus: list[str]
    budget: int

    def run(self) -> int:
        """Returns the exit code."""
        study, band = self.study, self.machine.band
        print_line(
            f"{self.sweep.name}: {len(study.plans)} plans, {len(study.outcomes)} of {self.budget} trials; in "
            f"{study.results.path}"
        )
        why, interrupted = None, False
        with stop_signals() as signals:
            while not interrupted and (why := describe_end(study, self.budget)) is None:
                self.note(None)
                chosen = choose_next(study.options, study.outcomes, band)
                if chosen is None:
                    why = "no other plan is likely to be faster"
                    break
                seconds = expected_seconds(study.options, study.outcomes, band, chosen)
                print_line(
                    f"trial {len(study.outcomes) + 1} of {self.budget}: a step of {format_duration(seconds)} is "
                    "expected"
                )
                status = study.measure(
                    chosen, seconds, self.sweep, self.common, self.base, self.steps, self.config_dir, self.gpus
                )
                interrupted = bool(signals) or status in ("stopped", "not_started")
        print_line(told := "stopped; the same command goes on" if interrupted else f"ended: {why}")
        print_study(study)
        written = self.note(told)
        if study.best is not None:
            print_line(f"best: {study.best.option.name}, {study.folder / BEST}")
        print_line(written)
        return STOPPED if interrupted else DONE if study.best is not None else FAILED

    def note(self, told: str | None) -> str:
        """Writes what is known so far: the best plan as a recipe, and the page. Says where the page is. told: how the
        search has ended."""
        best = self.study.best
        if best:
            self.study.write_best(best)
        about = {
            "name": self.sweep.name,
            "machine": f"{self.sweep.processes} x {self.machine.device}",
            "plans": len(self.study.plans),
            "budget": self.budget,
            "ended": told,
            "best": best and best.option.name,
            "command": best and self.command(best),
        }
        return write_page(self.study, self.machine.band, about)

    def command(self, plan: SearchPlan) -> str:
        """What starts a run of a plan, in the way in which its trial was started."""
        start = ["trainer", "train", "--gpus" if self.gpus else "--processes", str(self.sweep.processes or 1)]
        words = ["--config-dir", self.config_dir] if self.config_dir else []
        return shlex.join([*start, *words, *self.common, *plan_overrides(plan)])


def describe_end(study: TuningStudy, budget: int) -> str | None:
    """Why a search is over that has made its trials."""
    if len(study.outcomes) >= budget:
        return f"budget={budget} trials are measured"
    return None if len(study.outcomes) < len(study.options) else "every plan is measured"


def machine_of(
    name: str, changes: Sequence[str], config_dir: str | None, sweep: SweepConfig, gpus: list[str]
) -> HardwareConfig:
    """The kind of machine: by its name, or the one that this is. Its nodes have as many devices as the trials use of
    them. Raises `ConfigError`."""
    machine = load_hardware(name or (kind_of_gpu(config_dir) if gpus else "cpu"), changes, config_dir)
    machine.devices = processes_of(sweep, machine, gpus)
    return machine


def kind_of_gpu(config_dir: str | None) -> str:
    """The name of the hardware file for the first GPU of this machine. Raises `ConfigError` where none fits."""
    try:
        shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    for name in hardware_names(config_dir):
        if load_hardware(name, (), config_dir).device in shown:
            return name
    first = (shown.splitlines() or ["nvidia-smi says nothing"])[0]
    raise ConfigError(f"no file of configs/hardware is of this machine's GPUs ({first}); set hardware=...")


def processes_of(sweep: SweepConfig, machine: HardwareConfig, gpus: list[str]) -> int:
    return sweep.processes or len(gpus) or machine.devices


def restrict_sweep(sweep: SweepConfig) -> None:
    """Trials run one after the other, and save nothing. Raises `ConfigError` where the sweep's settings want it
    otherwise."""
    if sweep.parallel > 1:
        raise ConfigError(
            f"sweep.parallel={sweep.parallel}: trials that run beside others are slowed down; leave it out"
        )
    sweep.saving_seconds = 0.0
    sweep.time_minutes = sweep.time_minutes or MINUTES


def check_allowed(base: Config, tried: Sequence[Config], allow: Sequence[str]) -> None:
    """Raises `ConfigError` where values that are tried change the numbers of training, unless they are allowed."""
    problems = [
        f"{name} has several values, and changes the numbers of training; give it one, or allow=[{name}]"
        for name in frozen_differences(base, tried, allow)
    ]
    problems += [
        f"allow=[{name}] allows nothing: give the setting several values, such as precision.compute=bf16,fp16"
        for name in allow
        if not frozen_differences(base, tried, [one for one in allow if one != name])
    ]
    if problems:
        raise ConfigError(problems)
