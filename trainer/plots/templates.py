"""Pictures of pipeline schedules without a run: templates, the greedy schedule, and files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trainer.config import ConfigError
from trainer.planning.schedules import ir
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.lower import validate_schedule
from trainer.planning.schedules.simulate import Timeline, simulate_schedule
from trainer.planning.schedules.templates import TEMPLATES, build_greedy, build_schedule, place_stages
from trainer.plots.runs import save_figure, write_trace
from trainer.plots.schedule import draw_schedule

SETTINGS = {
    "parallel.pipeline.schedule": "--schedule",
    "parallel.pipeline.chunks": "--chunks",
    "parallel.pp": "--ranks",
    "batch.accumulation": "--microbatches",
}
"""Settings of a run -> the options of this command line that stand for them."""
MOST = 1 << 13
"""Forwards of a schedule that is drawn: a picture shows some hundred, and drawing a bar takes about a millisecond."""


def schedule_of(
    given: str, ranks: int | None, microbatches: int | None, chunks: int | None, costs: Sequence[float] = (1, 1, 1)
) -> ir.Schedule:
    """A template by its name, the greedy schedule for ranks of these `costs`, or the schedule in a CSV file. Raises
    `ConfigError` that names this command's options."""
    if given in (*TEMPLATES, "greedy"):
        if ranks is None or microbatches is None:
            raise ConfigError(
                f"--schedule {given} needs --ranks and --microbatches, for instance --ranks 4 --microbatches 8"
            )
        if ranks * microbatches * (chunks or 1) > MOST:
            raise ConfigError(
                f"--ranks {ranks} x --microbatches {microbatches}{f' x --chunks {chunks}' if chunks else ''} are more "
                f"than a picture can show; legal: up to {MOST} in all"
            )
        try:
            if given == "greedy":
                placement = place_stages(ranks, chunks or 1, "v")
                return build_greedy(
                    uniform_costs(len(placement), chunks or 1, costs), placement, microbatches, cap=ranks
                )
            return build_schedule(given, ranks, microbatches, chunks)
        except ConfigError as error:
            raise ConfigError([_option_names(problem) for problem in error.problems]) from None
    if not given.endswith(".csv"):
        raise ConfigError(
            f"--schedule {given}: no such template; legal: {', '.join(TEMPLATES)}, greedy, or the name of a file that "
            "ends in .csv"
        )
    try:
        schedule = ir.load_schedule(Path(given), name=given)
    except OSError as error:
        raise ConfigError(f"--schedule {given}: cannot read ({error.strerror})") from None
    problems = validate_schedule(schedule)
    if problems:
        raise ConfigError([f"{given}: {problem}" for problem in problems])
    return schedule


def _option_names(text: str) -> str:
    for setting, option in SETTINGS.items():
        text = text.replace(setting, option)
    return text


def uniform_costs(stages: int, chunks: int, costs: Sequence[float]) -> StageCosts:
    """Stages of ranks that need `costs` (F, I, W) for a micro-batch, shared equally by their chunks. Activations are
    counted in micro-batches of a rank."""
    return StageCosts.uniform(stages, *(cost / chunks for cost in costs), activation=1 / chunks)


def simulate_timeline(schedule: ir.Schedule, costs: Sequence[float]) -> Timeline:
    """The timeline of a schedule whose ranks need `costs` (F, I, W) for a micro-batch."""
    return simulate_schedule(schedule, uniform_costs(schedule.stages, schedule.chunks, costs)).spans


def parse_costs(text: str) -> tuple[float, ...]:
    """Three durations from 'F,I,W'."""
    try:
        costs = tuple(map(float, text.split(",")))
    except ValueError:
        costs = ()
    if len(costs) != 3 or not all(0 < cost < math.inf for cost in costs):
        raise ConfigError(f"--costs {text}: give three positive numbers F,I,W, for instance 1,1.7,0.5")
    return costs


def draw_templates(
    schedules: list[str],
    ranks: int | None,
    microbatches: int | None,
    chunks: int | None,
    costs: str,
    out: Path | None,
    trace: Path | None,
) -> list[Path]:
    """Draws what --schedule names, one panel each; returns the files written."""
    degrees = {"--ranks": ranks, "--microbatches": microbatches, "--chunks": chunks}
    named = [option for option, degree in degrees.items() if degree is not None]
    if named and all(name.endswith(".csv") for name in schedules):
        raise ConfigError(f"{', '.join(named)}: said by the file {schedules[0]}; leave it out")
    durations = parse_costs(costs or "1,1,1")
    timelines = {}
    for name in schedules:
        schedule = schedule_of(name, ranks, microbatches, chunks, durations)
        noted = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
        timelines[f"{name}: {schedule.ranks} ranks{noted}, {schedule.microbatches} micro-batches"] = simulate_timeline(
            schedule, durations
        )
    out = out or Path("schedule.png")
    save_figure(draw_schedule(timelines, seconds=False), out)
    return [out, *write_trace(timelines, trace)]
