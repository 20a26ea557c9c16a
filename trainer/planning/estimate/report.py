"""Estimates for people and programs: tables, JSON, and the settings of a plan as a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from trainer.planning.decide import describe_measures, describe_recompute
from trainer.planning.estimate.step import GIB, ErrorBand, StepEstimate
from trainer.planning.estimate.timing import AXES
from trainer.planning.features import communication_table
from trainer.planning.float8 import numeric_types
from trainer.planning.layer import parameter_counts
from trainer.planning.resolve import collect_warnings
from trainer.util.tables import format_bytes, format_count, format_duration, format_percent, print_rows, print_sections

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.planning.estimate.plans import PlanRanking

DAY = 86400.0

Form = Callable[[float], str]


def print_estimate(found: StepEstimate, tokens: float = 0.0, smaller: Sequence[str] = ()) -> None:
    """Prints one plan. tokens: a budget whose days and device hours are wanted. smaller: what makes a plan fit
    that does not."""
    memory = [*_memory(found), *(("to make it fit" if text == smaller[0] else "or", text) for text in smaller)]
    print_sections({"plan": _plan(found), "memory": memory, "time": _time(found), "result": _result(found, tokens)})


def _plan(found: StepEstimate) -> list[tuple[str, Any]]:
    config, layout, hardware = found.config, found.layout, found.hardware
    batch, plan = layout.batch, layout.plan
    total = format_count(parameter_counts(layout.spec)["total"])
    arithmetic = f"{batch.micro_size} a micro-batch x {batch.accumulation} micro-batches x {plan.dp} ranks"
    return [
        ("model", f"{layout.spec.name}, {total} parameters"),
        ("processes", f"{plan.world} x {hardware.device}, {min(plan.world, hardware.devices)} a node"),
        ("plan", plan.describe()),
        *communication_table(config, layout.spec, plan),
        *([("pipeline", layout.pipeline.describe())] if plan.pp > 1 else []),
        ("batch", f"{batch.global_size} sequences of {batch.sequence_length} tokens: {arithmetic}"),
        ("precision", numeric_types(config.precision) + (", compiled" if config.compile else ", eager")),
        ("recompute", describe_recompute(config.activation)),
        *([("long sequences", long)] if (long := describe_measures(config)) else []),
        *(("note", text) for text in collect_warnings(config, layout, min(plan.world, hardware.devices))),
    ]


def _memory(found: StepEstimate) -> list[tuple[str, Any]]:
    fullest, hardware = found.fullest, found.hardware
    rank = f"pipeline rank {fullest.rank} of {found.layout.plan.pp}" if found.layout.plan.pp > 1 else "every rank"
    least, most = (size / GIB for size in memory_band(found))
    used = f"{least:.1f} to {most:.1f} of {hardware.memory:g} GiB"
    return [
        ("fullest", rank),
        ("at", fullest.where),
        *((label, format_bytes(size)) for label, size in fullest.rows()),
        ("outside of it", format_bytes(hardware.fixed * GIB)),
        *([("in host memory", format_bytes(host))] if (host := max(peak.host for peak in found.ranks)) else []),
        ("fits", f"{found.fits}: {used}"),
    ]


def memory_band(found: StepEstimate) -> tuple[float, float]:
    """Least and most bytes that the fullest device holds."""
    return _even(found.hardware.memory_band).of(found.memory)


def summarise_step(found: StepEstimate) -> list[tuple[str, str]]:
    """The step and what follows from it, in a few rows."""
    return [
        ("counts", f"a step, predicted for {found.hardware.device}"),
        ("step", step_time(found)),
        ("tokens/s", _speed(found.tokens_per_second, found.band)),
        *(("not known", text) for text in found.assumptions),
        *(("not in the time", text) for text in left_out(found)),
    ]


def _time(found: StepEstimate) -> list[tuple[str, Any]]:
    """The terms of the step, that of an axis with what is hidden of its communication; and their sum."""
    least = 1e-6 * found.seconds
    rows, axes = [], {term: axis for axis, term in AXES.items()}
    for name, seconds in found.terms.items():
        hidden = found.hidden[axes[name]] if name in axes else 0.0
        if max(seconds, hidden) > least:
            band = found.band_of(name)
            text = f"{_band(seconds, band, format_duration)}, {format_percent(seconds / found.seconds)}"
            behind = f"; {_band(hidden, band, format_duration)} more hidden" * (hidden > least)
            rows.append((name, text + behind))
    unknown = (("not known", text) for text in found.assumptions)
    return [*rows, ("step", step_time(found)), *unknown]


def step_time(found: StepEstimate) -> str:
    """The step's time with its band."""
    return _band(found.seconds, found.band, format_duration)


def _band(value: float, band: ErrorBand, form: Form, bounds: Callable = ErrorBand.of) -> str:
    """A time with its band."""
    least, most = bounds(band, value)
    return f"{form(value)} ({form(least)} to {form(most)})"


def _speed(value: float, band: ErrorBand, form: Form = format_count) -> str:
    """What is done in a time with that band."""
    return _band(value, band, form, ErrorBand.of_speed)


def _result(found: StepEstimate, tokens: float) -> list[tuple[str, Any]]:
    speed, band, world = found.tokens_per_second, found.band, found.layout.plan.world
    causal, full = (_speed(found.mfu(one), band, format_percent) for one in (True, False))
    rows = [
        ("tokens/s", _speed(speed, band)),
        ("tokens/s a device", _speed(speed / world, band)),
        ("MFU", f"{causal} causal, {full} full attention"),
        ("tokens a day", _speed(speed * DAY, band)),
    ]
    if tokens:
        seconds = tokens / speed
        rows += [
            (f"{format_count(tokens)} tokens", _band(seconds, band, format_duration)),
            ("device hours", _band(seconds * world / 3600, band, format_count)),
        ]
    return rows + [("not in the time", text) for text in left_out(found)]


def left_out(found: StepEstimate) -> list[str]:
    """What the plan has and the predicted time lacks."""
    config, plan = found.config, found.layout.plan
    schedule = config.parallel.pipeline.schedule
    missing = ["copies to host memory and the update there"] * plan.offload
    missing += ["copies of layers' inputs to host memory and back, where computation does not hide them"] * bool(
        config.activation.offload
    )
    missing += ["what DeepSpeed's engine does in another way"] * (plan.engine == "deepspeed")
    missing += [f"what auto will choose: {found.layout.pipeline.schedule.name} is taken"] * (
        schedule == "auto" and plan.pp > 1
    )
    return missing


WIDTH = 120
"""Characters of the widest table."""

DROPPED = ("MFU", "bubble", "exposed", "device hours", "batch")
"""Columns that a table leaves out where it is too wide otherwise, the first first. The page of one plan has them."""


def show_plans(found: Sequence[StepEstimate], title: str, tokens: float) -> None:
    """Prints a table of several plans. tokens: a budget whose days and device hours are wanted."""
    rows = [_row(number, one, tokens) for number, one in enumerate(found, start=1)]
    if all(one.layout.plan.pp == 1 for one in found):
        rows = [_leave_out(_leave_out(row, "schedule"), "bubble") for row in rows]
    for name in DROPPED:
        if _measure_width(rows) > WIDTH:
            rows = [_leave_out(row, name) for row in rows]
    print_rows(f"{title}\n{_describe_bands(found)}", rows)


def _leave_out(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def _measure_width(rows: Sequence[Mapping[str, Any]]) -> int:
    """Characters of a table, with two spaces between its columns."""
    widths = (max(len(name), *(len(str(row[name])) for row in rows)) for name in rows[0])
    return sum(widths) + 2 * (len(rows[0]) - 1)


def _describe_bands(found: Sequence[StepEstimate]) -> str:
    """How far the numbers of a table may be off, at most."""
    widest = ErrorBand(*map(max, zip(*(one.band for one in found))))
    times, speeds = _spread(widest), _spread(widest, of_speed=True)
    return f"step: {times}, tokens/s a device: {speeds}, memory: {_spread(_even(found[0].hardware.memory_band))}"


def _row(number: int, found: StepEstimate, tokens: float) -> dict[str, Any]:
    layout, speed = found.layout, found.tokens_per_second
    pipeline, seconds = layout.pipeline.schedule, tokens / speed
    budget = {"time": format_duration(seconds), "device hours": format_count(seconds * layout.plan.world / 3600)}
    return {
        "": number,
        "plan": name_plan(found),
        "schedule": f"{pipeline.name} x{pipeline.chunks}" if layout.plan.pp > 1 else "-",
        "batch": f"{layout.batch.micro_size} x {layout.batch.accumulation}",
        "recompute": name_recompute(found.config),
        "step": format_duration(found.seconds),
        "tokens/s": format_count(speed / layout.plan.world),
        **(budget if tokens else {}),
        "MFU": format_percent(found.mfu(True)),
        "exposed": format_percent(sum(found.exposed.values()) / found.seconds),
        "bubble": format_percent(found.terms["bubble"] / found.seconds),
        "memory": f"{found.memory / GIB:.1f} GiB",
        "fits": found.fits,
    }


def name_plan(found: StepEstimate) -> str:
    """A plan in a few words: its degrees, its ZeRO stage with the ranks of a shard, and what is not by collectives."""
    plan, config = found.layout.plan, found.config
    parts = [f"{name}{size}" for name, size in plan.degrees.items() if size > 1 or name == "dp"]
    parts += [f"ep{plan.ep}"] * (plan.ep > 1) + [f"ZeRO-{plan.stage}" + f"/{plan.shard}" * (plan.replicate > 1)] * bool(
        plan.stage
    )
    parts += ["offload"] * plan.offload + ["DeepSpeed"] * (plan.engine == "deepspeed")
    copied = ["tp"] * (plan.tp > 1 and config.parallel.tp_overlap != "off")
    copied += ["ZeRO"] * (plan.shard > 1 and config.parallel.zero.collectives == "copy_engine")
    return " ".join([*parts, *["copies:"] * bool(copied), *copied])


def name_recompute(config: Config) -> str:
    """What saves activation memory, in a few words."""
    activation, loss = config.activation, bool(config.loss.tile)
    tiles = ("tiles" if loss else "layer tiles") if activation.tile else "loss tiles" if loss else ""
    return "+".join(part for part in (activation.mode, tiles, "offload" * bool(activation.offload)) if part)


def _even(band: float) -> ErrorBand:
    return ErrorBand(band, band)


def _spread(band: ErrorBand, of_speed: bool = False) -> str:
    """A band in percent: of a time or a size, or of what is done in such a time."""
    least, most = band.of_speed(1.0) if of_speed else band.of(1.0)
    low, high = round(100 * (1 - least)), round(100 * (most - 1))
    return f"±{high}%" if low == high else f"-{low}% +{high}%"


def ranking_title(ranking: PlanRanking, world: int) -> str:
    """The title of the table of all plans."""
    return (
        f"{ranking.fastest} fastest of {ranking.legal} plans on {world} devices, {ranking.fitting} of which may fit "
        "their memory" + ", and the fastest that fits for sure" * (len(ranking.best) > ranking.fastest)
    )


def describe_choice(found: Sequence[StepEstimate], chosen: StepEstimate) -> str:
    """Which of several plans is shown and written, and why."""
    why = {"yes": "the fastest that fits for sure", "perhaps": "none fits for sure", "no": "none fits"}
    return f"taken: {found.index(chosen) + 1}, {why[chosen.fits]}"


def to_json(found: StepEstimate, tokens: float = 0.0) -> dict[str, Any]:
    """All numbers, in seconds and bytes. range: least and most of each by its name, as the bands have them; of terms
    and of communication the step's band holds. tokens: a budget whose seconds and device hours are wanted."""
    speed, world = found.tokens_per_second, found.layout.plan.world
    times: dict[str, float] = {"seconds": found.seconds}
    if tokens:
        times |= {"seconds_of_tokens": tokens / speed, "device_hours": tokens / speed * world / 3600}
    speeds = {"tokens_per_second": speed, "tokens_per_day": speed * DAY}
    speeds |= {"mfu": found.mfu(True), "mfu_full": found.mfu(False)}
    band, even, sizes = found.band, _even(found.hardware.band), {"memory": found.memory}
    moved = {
        axis: {"exposed": found.exposed[axis], "hidden": found.hidden[axis], "range": _range({axis: seconds}, even)}
        for axis, seconds in found.communication.items()
    }
    return {
        "plan": found.layout.plan.to_dict(),
        "pipeline": found.layout.pipeline.describe(),
        "micro_size": found.layout.batch.micro_size,
        "accumulation": found.layout.batch.accumulation,
        "recompute": found.config.activation.mode,
        "save": found.config.activation.save if found.config.activation.mode == "selective" else [],
        **({"tokens": tokens} if tokens else {}),
        **times,
        **speeds,
        **sizes,
        "band": found.hardware.band,
        "not_known": found.assumptions,
        "memory_band": found.hardware.memory_band,
        "range": {
            **_range(times, band),
            **{name: list(band.of_speed(value)) for name, value in speeds.items()},
            **_range(sizes, _even(found.hardware.memory_band)),
            "terms": {name: list(found.band_of(name).of(seconds)) for name, seconds in found.terms.items()},
        },
        "terms": found.terms,
        "communication": moved,
        "fits": found.fits,
        "ranks": [dataclasses.asdict(peak) for peak in found.ranks],
    }


def _range(values: Mapping[str, float], band: ErrorBand) -> dict[str, list[float]]:
    return {name: list(band.of(value)) for name, value in values.items()}


def format_recipe(settings: Mapping[str, Any], head: str) -> str:
    """Settings by name as a recipe to put behind another one, with a line of comment at its head."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *blocks, last = name.split(".")
        target = nested
        for block in blocks:
            target = target.setdefault(block, {})
        target[last] = value
    return f"# @package _global_\n# {head}\n" + yaml.safe_dump(nested, sort_keys=False, default_flow_style=None)


def format_prediction(found: StepEstimate) -> str:
    """What is predicted of a plan, in a line."""
    hardware, layout = found.hardware, found.layout
    longer, larger = _spread(found.band), _spread(_even(hardware.memory_band))
    fits = {"yes": "fits for sure", "perhaps": "perhaps fits, as none does for sure", "no": "does not fit"}
    return (
        f"Predicted on {layout.plan.world} x {hardware.device}: step {found.seconds:.4g} s {longer}, "
        f"{found.tokens_per_second:.4g} tokens/s {_spread(found.band, of_speed=True)}, {found.memory / GIB:.4g} GiB "
        f"{larger} of {hardware.memory:g}, which {fits[found.fits]}."
    )
