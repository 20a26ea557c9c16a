"""A search: the plans that it chooses from, which one is measured next, and its folder. A trial is that of a sweep, and
runs alone."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, hypot, log
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy

from trainer.config import Config, ConfigError
from trainer.config.compose import quote_value
from trainer.config.hardware import HardwareConfig
from trainer.config.typed import changed_settings, flatten_values
from trainer.pages import page
from trainer.planning.decide import describe_measures
from trainer.planning.estimate.plans import DEGREES, PIPELINE, rank_plans
from trainer.planning.estimate.report import format_recipe
from trainer.planning.estimate.step import GIB, StepEstimate
from trainer.planning.neighbours import FREE, NUMBERS, global_size
from trainer.sweep import run_trials, to_run
from trainer.sweep.plan import SweepConfig, make_trial
from trainer.sweep.results import SweepResults, TrialResult
from trainer.util import tables
from trainer.util.lines import BEST, REPORT, SEARCH, TRIALS
from trainer.util.reading import make_printable, on_one_line, read_json, shorten_foreign, write_atomic

# What measurements say about predictions: how much longer than predicted a plan takes, by its degrees and modes.


Axes = Mapping[str, float | str]

COMMON, DOUBLING, MODE, OWN = 1.0, 0.25, 0.5, 0.35
"""Standard deviations of log(measured / predicted) over the band of the predictions, before anything is measured: of
what all plans share (the machine), of each doubling of a degree, of each mode, and of a plan by itself."""


class TimeCorrection:
    """Ridge regression of log(measured / predicted) on the axes of plans.

    Numbers (degrees, sizes) enter by their logarithm, words (modes) one by one, and a constant. Each weight is drawn
    towards zero by its own prior deviation, so a single measurement already says something, and the posterior says how
    uncertain the rest is (Bishop, Pattern Recognition and Machine Learning, 3.3). Axes in which no two plans differ are
    left out.

    known: axes of all plans; measured: axes and measured over predicted seconds; band: relative error that predictions
    are known to have."""

    def __init__(self, known: Sequence[Axes], measured: Sequence[tuple[Axes, float]], band: float):
        band = max(band, 1e-3)
        self.columns = _columns(known)
        self.own = OWN * band
        prior = numpy.array([COMMON, *(DOUBLING if word is None else MODE for _, word, _ in self.columns)]) * band
        self.mean, self.covariance = numpy.zeros(len(prior)), numpy.diag(prior**2)
        if measured:
            rows = numpy.array([self._row(axes) for axes, _ in measured])
            ratios = numpy.log([ratio for _, ratio in measured])
            spread = self.covariance @ rows.T
            gain = spread @ numpy.linalg.inv(rows @ spread + self.own**2 * numpy.eye(len(rows)))
            self.mean, self.covariance = gain @ ratios, self.covariance - gain @ spread.T

    def __call__(self, axes: Axes) -> tuple[float, float]:
        """The expected log(measured / predicted) of a plan, and its standard deviation."""
        row = self._row(axes)
        shared = float(row @ self.covariance @ row)
        return float(row @ self.mean), hypot(max(0.0, shared) ** 0.5, self.own)

    def _row(self, axes: Axes) -> numpy.ndarray:
        values = [
            (float(axes.get(name) == word) if word is not None else numpy.log2(float(axes.get(name, 1)))) - centre
            for name, word, centre in self.columns
        ]
        return numpy.array([1.0, *values])


def _columns(known: Sequence[Axes]) -> list[tuple[str, str | None, float]]:
    """Of each column but the constant: its axis, the word that it is 1 for, or None for a number, and what is taken off
    so that it has a mean of zero over all plans."""
    found: list[tuple[str, str | None, float]] = []
    for name in {name: None for axes in known for name in axes}:
        values = [axes.get(name, 1) for axes in known]
        if len(set(values)) == 1:
            continue
        if any(isinstance(value, str) for value in values):
            found += [(name, word, values.count(word) / len(values)) for word in sorted(set(map(str, values)))]
        else:
            found.append((name, None, float(numpy.mean(numpy.log2(values)))))
    return found


# Which plan is measured next. Pure: what has been measured goes in, a plan comes out, or that none can win any more.
# The choice is a function of all plans and of what has been measured. It keeps nothing from one call to the next, so
# that a search that was interrupted goes on as if it had not been.


RISKY = 1.05
"""Plans whose predicted memory is above so many times the device's are not tried. Those just below are: the fastest
plans are the ones that nearly fill it."""

DEVIATIONS = 2.0
"""Below a plan's expected time, how many standard deviations it is given the benefit of the doubt."""


@dataclass(frozen=True)
class PlanOption:
    """A plan that can be tried. axes: its degrees and modes by name; seconds: predicted of a step; memory: predicted,
    as a share of what a device has."""

    name: str
    axes: Mapping[str, float | str]
    seconds: float
    memory: float = 0.0


@dataclass(frozen=True)
class TrialOutcome:
    """What became of a trial. seconds: measured of a step, None where there was none."""

    option: PlanOption
    seconds: float | None = None
    out_of_memory: bool = False


def untried_plans(options: Sequence[PlanOption], outcomes: Sequence[TrialOutcome]) -> list[PlanOption]:
    """The plans that have no outcome and may fit into memory."""
    tried, factor = {outcome.option.name for outcome in outcomes}, memory_factor(outcomes)
    return [one for one in options if one.name not in tried and one.memory * factor <= RISKY]


def memory_factor(outcomes: Sequence[TrialOutcome]) -> float:
    """How many times the predicted memory plans need: at least what a lack of memory shows, at most what plans that ran
    do."""
    least = [1 / one.option.memory for one in outcomes if one.out_of_memory and one.option.memory]
    most = [1 / one.option.memory for one in outcomes if one.seconds is not None and one.option.memory]
    return max(1.0, min([max(least, default=1.0), *most]))


def fastest_outcome(outcomes: Sequence[TrialOutcome]) -> TrialOutcome | None:
    return min((one for one in outcomes if one.seconds is not None), key=lambda one: one.seconds or 0.0, default=None)


def choose_next(options: Sequence[PlanOption], outcomes: Sequence[TrialOutcome], band: float) -> PlanOption | None:
    """First the plan that is predicted to be the fastest; then the one whose expected improvement on the fastest
    measured one is the largest (Jones et al., Efficient Global Optimization, 1998), by the predictions as corrected by
    what has been measured; None where none is likely to be faster. band: the relative error of the predictions."""
    left, best = untried_plans(options, outcomes), fastest_outcome(outcomes)
    if best is None or best.seconds is None or not left:
        return min(left, key=lambda one: one.seconds, default=None)
    correction, limit = correct_predictions(options, outcomes, band), log(best.seconds)
    times = {}
    for one in left:
        mean, spread = correction(one.axes)
        times[one.name] = NormalDist(log(one.seconds) + mean, spread)
    if all(time.mean - DEVIATIONS * time.stdev >= limit for time in times.values()):
        return None
    return max(left, key=lambda one: expected_improvement(times[one.name], limit))


def expected_improvement(time: NormalDist, limit: float) -> float:
    """The mean of what a time lies below a limit, counted as zero where it does not."""
    return (limit - time.mean) * time.cdf(limit) + time.variance * time.pdf(limit)


def correct_predictions(options: Sequence[PlanOption], outcomes: Sequence[TrialOutcome], band: float) -> TimeCorrection:
    """The correction of the predictions by all that has been measured."""
    return TimeCorrection(
        [one.axes for one in options],
        [(one.option.axes, one.seconds / one.option.seconds) for one in outcomes if one.seconds is not None],
        band,
    )


def expected_seconds(
    options: Sequence[PlanOption], outcomes: Sequence[TrialOutcome], band: float, option: PlanOption
) -> float:
    """Seconds that a plan is expected to take, by all that has been measured."""
    return option.seconds * exp(correct_predictions(options, outcomes, band)(option.axes)[0])


# The plans that a search chooses from: the ones of `trainer.planning.estimate.plans` that are predicted to be
# fastest, for each combination of the values that the command line tries besides.


@dataclass(frozen=True)
class SearchPlan:
    """A plan of the search. changes: its settings beside the recipe's; scale: tokens of the recipe's step over those of
    its own, by which times of steps are compared."""

    option: PlanOption
    found: StepEstimate
    changes: dict[str, Any]
    scale: float


def frozen_differences(base: Config, tried: Sequence[Config], allowed: Collection[str]) -> list[str]:
    """Settings that combinations of values differ in, that change the numbers of training, and are not allowed to."""
    names = {
        name
        for config in tried
        for name in changed_settings(config, base)
        if not name.startswith(FREE) or name.startswith(NUMBERS)
    }
    return sorted(name for name in names if not any(f"{name}.".startswith(f"{one}.") for one in allowed))


def list_plans(
    base: Config, tried: Sequence[Config], hardware: HardwareConfig, world: int, most: int, kept: Collection[str]
) -> list[SearchPlan]:
    """At most `most` plans, those that are predicted to be fastest, in this order.

    base: the recipe's own configuration; tried: those of all combinations of values; kept: see `rank_plans`. Raises
    `ConfigError` where nothing can be run."""
    tokens = global_size(base.batch, world) * base.batch.sequence_length
    own = {"compile", *DEGREES, *PIPELINE}
    besides = sorted({name for config in tried for name in changed_settings(config, tried[0])} - own)
    found: dict[tuple, SearchPlan] = {}
    problems: list[str] = []
    for config in tried:
        try:
            ranking = rank_plans(config, hardware, world, global_size(config.batch, world), most, kept)
        except ConfigError as error:
            problems += error.problems
            continue
        for one in ranking.best:
            scale = tokens / one.layout.batch.tokens
            axes, values = axes_of(one), flatten_values(asdict(one.config))
            share = one.memory / (hardware.memory * GIB)
            same = one.seconds, one.memory, *axes.items()  # but for a value that this plan has no use for
            axes |= {name: str(values[name]) for name in besides}
            option = PlanOption(name_of(axes), axes, scale * one.seconds, share)
            found.setdefault(same, SearchPlan(option, one, changed_settings(one.config, base), scale))
    if not found:
        raise ConfigError(list(dict.fromkeys(problems)))
    return sorted(found.values(), key=lambda plan: plan.option.seconds)[:most]


def axes_of(found: StepEstimate) -> dict[str, float | str]:
    """Degrees and modes of a plan by name."""
    plan, pipeline = found.layout.plan, found.layout.pipeline.schedule
    return {
        **plan.degrees,
        "zero": str(plan.stage),
        "shard": plan.shard,
        "micro": found.layout.batch.micro_size,
        "tp_overlap": found.config.parallel.tp_overlap if plan.tp > 1 else "",
        "collectives": found.config.parallel.zero.collectives if plan.shard > 1 else "",
        "recompute": found.config.activation.mode,
        "schedule": pipeline.name if plan.pp > 1 else "",
        "chunks": pipeline.chunks,
        "blocks": "compiled" if found.config.compile else "eager",
        "long": "-".join(describe_measures(found.config).split()),
    }


def name_of(axes: Mapping[str, float | str]) -> str:
    """A name for the folder of a plan's trial, from its axes alone. What goes without saying is left out."""
    said = dict(axes)
    for name in axes.keys() - {"dp", "shard", "micro"}:
        if said[name] == 1:
            del said[name]
    if said["zero"] == "0" or said["shard"] == axes["dp"]:
        del said["shard"]
    for name, usual in {"tp_overlap": ("", "off"), "collectives": ("", "nccl")}.items():
        if said[name] in usual:
            del said[name]
    words = ("recompute", "schedule", "blocks", "long")
    parts = (str(value) if name in words else f"{name.rpartition('.')[-1]}{value}" for name, value in said.items())
    return re.sub(r"[^\w.+-]+", "-", "_".join(filter(None, parts)))


# The folder of a search.


ENDED = ("done", "out_of_memory", "failed", "timeout")
"""Statuses of trials that count: whatever became of them is a result."""

PREDICTED = ("predicted_seconds", "expected_seconds", "predicted_memory_gib")
"""What a line of trials.jsonl has besides: a step's seconds by the estimate, and as it was corrected when the plan was
chosen; memory of the fullest device."""

BEGUN = "settings.json"
"""What a folder was begun with."""

FLAT = 1e-9
"""Learning rate of trials, which have no warm-up."""


def measuring_overrides(base: Config, steps: int) -> list[str]:
    """Overrides of a run that is only to be measured: short, and it neither evaluates nor saves."""
    return [
        *(f"run.steps={steps}", "run.tokens=null", "run.hours=null"),
        *("logging.every=1", "logging.profile=0", "logging.trace=[]"),
        *("logging.wandb.enabled=false", "logging.tensorboard=false"),
        *("checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.resume=none", "checkpoint.upload=null"),
        *("eval.every=0", "eval.at_start=false", "eval.ema=false", *(f"~eval.sets.{name}" for name in base.eval.sets)),
        *("lr.schedule=constant", "lr.warmup=0", f"lr.peak={FLAT}"),
    ]


class TuningStudy:
    """The trials of a search in their folder.

    settings: what all trials share and predictions are made from. Raises `ConfigError` with the names of what has
    changed where the folder was begun with other settings."""

    def __init__(self, folder: Path, plans: Sequence[SearchPlan], settings: dict[str, Any]):
        self.folder, self.plans = folder, {plan.option.name: plan for plan in plans}
        self.results = SweepResults(folder, TRIALS, PREDICTED)
        self.illegal: set[str] = set()
        path, way_out = folder / BEGUN, f"set another sweep.name, or remove {folder}"
        now = json.loads(json.dumps(settings))
        try:
            before, after = flatten_values(read_json(path, dict, way_out)), flatten_values(now)
        except FileNotFoundError:
            write_atomic(path, json.dumps(now) + "\n")
            return
        except RecursionError:
            raise ConfigError(f"{path} is nested too deeply; {way_out}") from None
        if changed := [
            f"{on_one_line(name)}={shorten_foreign(after.get(name))}, then {shorten_foreign(before.get(name))}"
            for name in {**after, **before}
            if before.get(name) != after.get(name)
        ]:
            raise ConfigError(f"{folder} holds trials with other settings ({'; '.join(changed[:3])}); {way_out}")

    @property
    def options(self) -> list[PlanOption]:
        return [plan.option for plan in self.plans.values() if plan.option.name not in self.illegal]

    @property
    def outcomes(self) -> list[TrialOutcome]:
        """What the trials have shown so far, in their order. Times are of a step of the recipe's tokens."""
        return [
            TrialOutcome(plan.option, seconds_of(line, plan), line["status"] == "out_of_memory")
            for name, line in self.results.lines.items()
            if line["status"] in ENDED and (plan := self.plans.get(name))
        ]

    @property
    def best(self) -> SearchPlan | None:
        found = fastest_outcome(self.outcomes)
        return None if found is None else self.plans[found.option.name]

    def measure(
        self,
        option: PlanOption,
        expected: float,
        sweep: SweepConfig,
        common: list[str],
        base: Config,
        steps: int,
        config_dir: str | None,
        gpus: list[str],
    ) -> str:
        """Runs the trial of a plan, which is expected to take so many seconds a step, and returns its status. Raises
        `ConfigError` where an override means nothing."""
        plan = self.plans[option.name]
        words = [*common, *measuring_overrides(base, steps)]
        trial, wrong = make_trial(sweep, option.name, words, plan_overrides(plan), config_dir, len(gpus))
        if wrong:
            raise ConfigError(list(wrong.values()))
        memory = plan.found.memory / GIB
        trial.more = dict(zip(PREDICTED, (plan.found.seconds, expected / plan.scale, memory)))
        run_trials(to_run([trial], self.results), sweep, config_dir, gpus, self.results)
        status = self.results.lines[option.name]["status"]
        if status == "refused":
            self.illegal.add(option.name)
        return status

    def write_best(self, plan: SearchPlan) -> None:
        """best.yaml: the fastest plan as a recipe to put behind the own one."""
        layout, seconds = plan.found.layout, self.results.lines[plan.option.name]["step_seconds_p50"]
        measured = f"step {seconds:.4g} s, {layout.batch.tokens / seconds:.4g} tokens/s"
        place = f"{layout.plan.world} x {plan.found.hardware.device}"
        path = self.folder / BEST
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, format_recipe(plan.changes, f"Measured on {place}: {measured}; {plan.option.name}."))


def plan_overrides(plan: SearchPlan) -> list[str]:
    """What makes a recipe's run one of a plan."""
    return [f"{name}={format_hydra_value(value)}" for name, value in plan.changes.items()]


def seconds_of(line: TrialResult, plan: SearchPlan) -> float | None:
    """What a step of the recipe's tokens took; None where no step was measured."""
    seconds = line["step_seconds_p50"] if line["status"] == "done" else None
    return plan.scale * seconds if seconds else None


def format_hydra_value(value: Any) -> str:
    """A value of a setting as Hydra's grammar reads it."""
    if isinstance(value, str):
        return quote_value(value)
    if isinstance(value, list):
        return f"[{','.join(map(format_hydra_value, value))}]"
    return json.dumps(value)


# A search for people: a table of its trials, and a page.


def print_study(study: TuningStudy) -> None:
    """Prints the trials, the fastest first; those without a time last."""
    lines = [(line, study.plans[name]) for name, line in study.results.lines.items() if name in study.plans]
    timed = [(seconds_of(line, plan), line, plan) for line, plan in lines]
    timed.sort(key=lambda row: (row[0] is None, row[0] or 0.0))
    rows = [
        {
            "trial": line["trial"],
            "status": line["status"].replace("_", " "),
            "step": tables.format_duration(line["step_seconds_p50"]),
            "expected": tables.format_duration(line["expected_seconds"]),
            "predicted": tables.format_duration(line["predicted_seconds"]),
            "tokens/s": tables.format_count(
                plan.found.layout.batch.tokens / line["step_seconds_p50"] if seconds else None
            ),
            "memory": tables.format_bytes(line["memory_gib"] and line["memory_gib"] * GIB),
            "predicted ": tables.format_bytes(plan.found.memory),
            "reason": make_printable(line["reason"] or ""),
        }
        for seconds, line, plan in timed
    ]
    tables.print_rows(f"{len(rows)} trials of {len(study.plans)} plans", rows)


def write_page(study: TuningStudy, band: float, about: dict[str, Any]) -> str:
    """Writes search.json and the page of the search; says where, or why not: a search goes on without. band: of the
    predictions; about: what search.json says besides."""
    path = study.folder / REPORT
    try:
        write_atomic(study.folder / SEARCH, json.dumps(about | {"foretold": predicted_times(study, band)}) + "\n")
        page.write_page([study.folder], path)
    except Exception as error:  # whatever is wrong with the page
        return f"{path} was not written: {shorten_foreign(error)}; trainer report {study.folder} tries again"
    return f"page: {path}"


def predicted_times(study: TuningStudy, band: float) -> list[dict[str, Any]]:
    """What was foretold of every plan: of one that was tried by what was measured before, of others by all of it."""
    tried = [outcome.option.name for outcome in study.outcomes]
    found = []
    for name, plan in study.plans.items():
        before = study.outcomes[: tried.index(name) if name in tried else None]
        correction, deviation = correct_predictions(study.options, before, band)(plan.option.axes)
        expected = study.results.lines.get(name, {}).get("expected_seconds") or plan.found.seconds * exp(correction)
        found.append(
            {
                "plan": name,
                "predicted": plan.found.seconds,
                "expected": expected,
                "low": expected * exp(-DEVIATIONS * deviation),
                "high": expected * exp(DEVIATIONS * deviation),
                "memory_gib": plan.found.memory / GIB,
                "tokens": plan.found.layout.batch.tokens,
            }
        )
    return found
