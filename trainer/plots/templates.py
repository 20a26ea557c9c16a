"""Pictures of pipeline schedules without a run: templates, the greedy schedule, and files."""

from __future__ import annotations

from pathlib import Path

from trainer.config import ConfigError
from trainer.planning.schedules import ir
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.lower import validate_schedule
from trainer.planning.schedules.simulate import simulate_schedule
from trainer.planning.schedules.templates import TEMPLATES, build_greedy, build_schedule, place_stages
from trainer.plots.runs import save_figure
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


def schedule_of(given: str, ranks: int | None, microbatches: int | None, chunks: int | None) -> ir.Schedule:
    """A template by its name, the greedy schedule for equal costs, or the schedule in a CSV file. Raises
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
                return build_greedy(uniform_costs(len(placement), chunks or 1), placement, microbatches, cap=ranks)
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


def uniform_costs(stages: int, chunks: int) -> StageCosts:
    """Stages of ranks that need one unit of time for a micro-batch's forward, input gradient and weight gradient each,
    shared equally by their chunks. Activations are counted in micro-batches of a rank."""
    return StageCosts.uniform(stages, *[1 / chunks] * 3, activation=1 / chunks)


def draw_templates(
    schedules: list[str], ranks: int | None, microbatches: int | None, chunks: int | None, out: Path | None
) -> Path:
    """Draws what --schedule names, one panel each; returns the file written."""
    degrees = {"--ranks": ranks, "--microbatches": microbatches, "--chunks": chunks}
    named = [option for option, degree in degrees.items() if degree is not None]
    if named and all(name.endswith(".csv") for name in schedules):
        raise ConfigError(f"{', '.join(named)}: said by the file {schedules[0]}; leave it out")
    timelines = {}
    for name in schedules:
        schedule = schedule_of(name, ranks, microbatches, chunks)
        noted = f" x {schedule.chunks} chunks" if schedule.chunks > 1 else ""
        timelines[f"{name}: {schedule.ranks} ranks{noted}, {schedule.microbatches} micro-batches"] = simulate_schedule(
            schedule, uniform_costs(schedule.stages, schedule.chunks)
        ).spans
    out = out or Path("schedule.png")
    save_figure(draw_schedule(timelines, seconds=False), out)
    return out
