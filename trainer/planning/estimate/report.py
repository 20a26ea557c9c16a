"""Estimates for people and programs: tables, JSON, and the settings of a plan as a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from trainer.config import Config
from trainer.config.typed import flat
from trainer.planning.cost.flops import parameter_counts
from trainer.planning.estimate.plans import Ranking
from trainer.planning.estimate.sequence import measures, recompute
from trainer.planning.estimate.step import GIB, Estimate
from trainer.planning.float8 import numeric_types
from trainer.planning.ways import short, ways
from trainer.util import tables

DAY = 86400.0


def show(found: Estimate, tokens: float | None = None) -> None:
    """Prints one plan. tokens: a budget whose days and device hours are wanted."""
    tables.sections(
        {"plan": _plan(found), "memory": _memory(found), "time": _time(found), "result": _result(found, tokens)}
    )


def _plan(found: Estimate) -> list[tuple[str, Any]]:
    config, layout, hardware = found.config, found.layout, found.hardware
    batch, plan = layout.batch, layout.plan
    total = tables.count(parameter_counts(layout.spec)["total"])
    arithmetic = f"{batch.micro_size} a micro-batch x {batch.accumulation} micro-batches x {plan.dp} ranks"
    return [
        ("model", f"{layout.spec.name}, {total} parameters"),
        ("processes", f"{plan.world} x {hardware.device}, {min(plan.world, hardware.devices)} a node"),
        ("plan", plan.describe()),
        *ways(config, plan),
        *([("pipeline", layout.pipeline.describe())] if plan.pp > 1 else []),
        ("batch", f"{batch.global_size} sequences of {batch.sequence_length} tokens: {arithmetic}"),
        ("precision", numeric_types(config.precision) + (", compiled" if config.compile else ", eager")),
        ("recompute", recompute(config.activation)),
        *([("long sequences", long)] if (long := measures(config)) else []),
    ]


def _memory(found: Estimate) -> list[tuple[str, Any]]:
    fullest, hardware = found.fullest, found.hardware
    rank = f"pipeline rank {fullest.rank} of {found.layout.plan.pp}" if found.layout.plan.pp > 1 else "every rank"
    used = f"{_size_band(found)} of {hardware.memory:g} GiB"
    return [
        ("fullest", rank),
        ("at", fullest.where),
        *((label, tables.size(size)) for label, size in fullest.rows()),
        ("outside of it", tables.size(hardware.fixed * GIB)),
        *([("in host memory", tables.size(host))] if (host := max(peak.host for peak in found.ranks)) else []),
        ("fits", f"{found.fits}: {used}"),
    ]


def _size_band(found: Estimate) -> str:
    band = found.hardware.memory_band
    return f"{found.memory * (1 - band) / GIB:.1f} to {found.memory * (1 + band) / GIB:.1f}"


def _time(found: Estimate) -> list[tuple[str, Any]]:
    rows = [
        (name, f"{tables.duration(seconds)}, {tables.percent(seconds / found.seconds)}")
        for name, seconds in found.terms.items()
        if seconds > 1e-6 * found.seconds
    ]
    moved = [f"{axis} {tables.duration(seconds)}" for axis, seconds in found.communication.items()]
    hidden = sum(found.communication.values()) - found.exposed
    if moved:
        rows.append(("communication", f"{', '.join(moved)}; {tables.duration(max(0.0, hidden))} of it hidden"))
    return [*rows, ("step", _band(found.seconds, found.hardware.band, tables.duration))]


def _band(value: float, band: float, form: Any) -> str:
    """A time with its band."""
    return f"{form(value)} ({form(value * (1 - band))} to {form(value * (1 + band))})"


def _speed(value: float, band: float) -> str:
    """What is done in a time with that band."""
    return f"{tables.count(value)} ({tables.count(value / (1 + band))} to {tables.count(value / (1 - band))})"


def _result(found: Estimate, tokens: float | None) -> list[tuple[str, Any]]:
    speed, band, world = found.tokens_per_second, found.hardware.band, found.layout.plan.world
    rows = [
        ("tokens/s", _speed(speed, band)),
        ("tokens/s a device", _speed(speed / world, band)),
        ("MFU", f"{tables.percent(found.mfu(True))} causal, {tables.percent(found.mfu(False))} full attention"),
        ("tokens a day", _speed(speed * DAY, band)),
    ]
    if tokens:
        seconds = tokens / speed
        rows += [
            (f"{tables.count(tokens)} tokens", _band(seconds, band, tables.duration)),
            ("device hours", _band(seconds * world / 3600, band, tables.count)),
        ]
    return rows + [("not in the time", text) for text in left_out(found)]


def left_out(found: Estimate) -> list[str]:
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


def show_plans(found: Sequence[Estimate], title: str) -> None:
    """Prints a table of several plans."""
    tables.rows(title, [_row(number, one) for number, one in enumerate(found, start=1)])


def _row(number: int, found: Estimate) -> dict[str, Any]:
    layout, world = found.layout, found.layout.plan.world
    shares = {name: found.terms[name] / found.seconds for name in ("bubble", "recompute")}
    return {
        "": number,
        "plan": layout.plan.describe() + short(found.config, layout.plan),
        "schedule": f"{layout.pipeline.schedule.name} x{layout.pipeline.schedule.chunks}"
        if layout.plan.pp > 1
        else "-",
        "batch": f"{layout.batch.micro_size} x {layout.batch.accumulation}",
        "recompute": found.config.activation.mode,
        "step": tables.duration(found.seconds),
        "tokens/s a device": tables.count(found.tokens_per_second / world),
        "MFU": tables.percent(found.mfu(True)),
        "exposed": tables.percent(found.exposed / found.seconds),
        "bubble": tables.percent(shares["bubble"]),
        "memory": f"{found.memory / GIB:.1f} GiB",
        "fits": found.fits,
    }


def summary(ranking: Ranking, world: int) -> str:
    """The title of the table of all plans."""
    return (
        f"{len(ranking.best)} fastest of {ranking.legal} plans on {world} devices, {ranking.fitting} of which may fit "
        "their memory"
    )


def to_json(found: Estimate) -> dict[str, Any]:
    """All numbers, in seconds and bytes."""
    return {
        "plan": found.layout.plan.to_dict(),
        "pipeline": found.layout.pipeline.describe(),
        "micro_size": found.layout.batch.micro_size,
        "accumulation": found.layout.batch.accumulation,
        "recompute": found.config.activation.mode,
        "save": found.config.activation.save if found.config.activation.mode == "selective" else [],
        "seconds": found.seconds,
        "band": found.hardware.band,
        "terms": found.terms,
        "communication": found.communication,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu(True),
        "mfu_full": found.mfu(False),
        "memory": found.memory,
        "memory_band": found.hardware.memory_band,
        "fits": found.fits,
        "ranks": [
            {
                "rank": peak.rank,
                "where": peak.where,
                "categories": peak.categories,
                "pools": peak.pools,
                "host": peak.host,
            }
            for peak in found.ranks
        ],
    }


def changes(config: Config, base: Config) -> dict[str, Any]:
    """What a configuration sets otherwise than `base`, by the setting's name."""
    before = flat(dataclasses.asdict(base))
    after = flat(dataclasses.asdict(config))
    return {name: value for name, value in after.items() if value != before.get(name)}


def recipe(settings: Mapping[str, Any], head: str) -> str:
    """Settings by name as a recipe to put behind another one, with a line of comment at its head."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *blocks, last = name.split(".")
        target = nested
        for block in blocks:
            target = target.setdefault(block, {})
        target[last] = value
    return f"# @package _global_\n# {head}\n" + yaml.safe_dump(nested, sort_keys=False, default_flow_style=None)


def predicted(found: Estimate) -> str:
    """What is predicted of a plan, in a line."""
    numbers = f"step {found.seconds:.4g} s, {found.tokens_per_second:.4g} tokens/s, {found.memory / GIB:.4g} GiB"
    return f"Predicted on {found.layout.plan.world} x {found.hardware.device}: {numbers}."
