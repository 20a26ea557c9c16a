"""What to override against a bound: settings that are legal for the run's model, plan and batch, and what the estimator
predicts of them."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from trainer.config import ActivationConfig, Config, ConfigError, ParallelConfig, typed
from trainer.diagnosis.evidence import Evidence
from trainer.planning.estimate.sequence import GIB, Room, settle
from trainer.planning.estimate.step import Estimate, estimate_within
from trainer.planning.plan import resolve_plan
from trainer.planning.resolve import Layout, check, resolve
from trainer.planning.variants import fit_batch

FREED = "memory capacity", "full"
"""The bound against which less memory helps, and not a faster step."""

Changes = dict[str, Any]
"""Values by setting."""

SHOWN = 2
"""Overrides that are offered against a bound."""

COARSE = 0.3
"""Hardware whose predictions have a wider band predicts nothing here."""

NUMBERS = ("precision.", "parallel.grad_comm.")
"""Settings that change the numbers of training."""

ON_GPUS = {"precision.matmul", "run.cuda_graphs", "parallel.zero.transport"}
"""Settings that do nothing on CPUs, are refused there, or were never measured to be faster."""

UNFORESEEN = ("data.", "checkpoint.", "eval.", "logging.", "run.cuda_graphs")
"""Settings of which the estimator knows nothing."""


@dataclass(frozen=True)
class Override:
    """text: what to put behind the run's command line, for this model and plan. seconds: of the step, predicted; None
    where nothing predicts it. note: what else it changes."""

    text: str
    seconds: float | None = None
    note: str = ""


class Workshop:
    """Tries overrides on the settings of a run. seconds: of its step, as measured."""

    def __init__(self, evidence: Evidence, seconds: float):
        assert evidence.config is not None and evidence.layout is not None
        self.config, self.layout, self.machine = evidence.config, evidence.layout, evidence.machine
        self.hardware, self.seconds = evidence.hardware, seconds
        self.wrong = set(self._check(self.config))

    def against(self, kind: str, detail: str) -> list[Override]:
        """At most `SHOWN` overrides against a bound of this kind, the fastest first where they are predicted.

        kind: of `rules.KINDS`; detail: which axis, or which part of it."""
        found = [
            one
            for changes in WAYS[kind](self.config, self.layout, detail)
            if (one := self.offer(changes, kind, detail))
        ]
        found.sort(key=lambda one: self.seconds if one.seconds is None else one.seconds)
        return found[:SHOWN]

    def offer(self, changes: Changes, kind: str, detail: str) -> Override | None:
        """The override of these changes, with what keeps the batch as it is; None where it is illegal, changes nothing,
        does not fit, or is predicted to make the step slower (where memory is full: to need no less)."""
        changed = self._changed(changes)
        if changed is None or self.machine.device == "CPU" and not ON_GPUS.isdisjoint(changes):
            return None
        config, layout = changed
        before, after = (typed.flat(typed.plain(some)) for some in (self.config, config))
        named = {name: value for name, value in after.items() if value != before.get(name)}
        if not named:
            return None
        seconds = None
        if self.predicted is not None and any(map(foreseen, named.items())):
            found = self._estimate(config, layout)
            if found is None or found.fits == "no" and self.predicted.fits != "no":
                return None
            seconds = self.seconds * found.seconds / self.predicted.seconds
            smaller = found.memory < self.predicted.memory
            if not (smaller if (kind, detail) == FREED else seconds < self.seconds):
                return None
        note = "changes the numbers of training" if any(name.startswith(NUMBERS) for name in changes) else ""
        return Override(" ".join(map(words, named.items())), seconds, note)

    @cached_property
    def predicted(self) -> Estimate | None:
        """The run's own plan, where its machine is known well enough to compare others with it."""
        if self.hardware is None or self.hardware.band > COARSE:
            return None
        return self._estimate(self.config, self.layout)

    def _estimate(self, config: Config, layout: Layout) -> Estimate | None:
        assert self.hardware is not None
        try:
            if config.activation.mode == "auto":
                room = Room(self.hardware.memory * GIB, inf)
                config, layout = settle(config, layout, room, self.machine.node, self.hardware)
            return estimate_within(inf, config, layout, self.hardware, lowered=False)
        except (ConfigError, ValueError, ArithmeticError):
            return None

    def _changed(self, changes: Changes) -> tuple[Config, Layout] | None:
        """The settings with these changes, first alone, then with a batch that is fitted to them."""
        for fitted in (False, True):
            config = copy.deepcopy(self.config)
            for name, value in changes.items():
                put(config, name, value)
            try:
                if fitted:
                    plan = resolve_plan(config.parallel, self.machine.processes, config.model, self.machine.node)
                    config.batch.micro_size = config.batch.micro_size or self.layout.batch.micro_size
                    fit_batch(config, plan, self.layout.batch.global_size, set(changes))
                layout = resolve(config, self.machine.processes, config.model, self.machine.node)
            except ConfigError:
                continue
            if layout.batch.global_size == self.layout.batch.global_size and self.wrong >= set(self._check(config)):
                return config, layout
        return None

    def _check(self, config: Config) -> list[str]:
        return check(config, self.machine.processes, self.machine.node)


def put(config: Config, name: str, value: Any) -> None:
    """Sets a setting by its path."""
    target: Any = config
    *sections, leaf = name.split(".")
    for section in sections:
        target = getattr(target, section)
    setattr(target, leaf, value)


def foreseen(setting: tuple[str, Any]) -> bool:
    """Whether the estimator knows what a setting does; what `auto` will choose it does not."""
    name, value = setting
    return not name.startswith(UNFORESEEN) and (value != "auto" or name == "activation.mode")


def words(setting: tuple[str, Any]) -> str:
    """`NAME=VALUE` as a shell and the command line take it."""
    name, value = setting
    return shlex.quote(f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}")


Ways = Callable[[Config, Layout, str], Iterator[Changes]]


def _communication(config: Config, layout: Layout, axis: str) -> Iterator[Changes]:
    plan, zero, hops = layout.plan, config.parallel.zero, config.parallel.grad_comm
    if axis == "tensor":
        if config.parallel.fusion != "copy_engine":
            yield {"parallel.fusion": "copy_engine"} | _unset(config, "fusion_chunks", "fusion_looks")
        alone = {"parallel.fusion": "off"} | _unset(config, "fusion_chunks", "fusion_looks")
        yield from ({"parallel.tp": tp} | (alone if tp == 1 else {}) for tp in _below(plan.tp))
    if axis == "context":
        yield from ({"parallel.cp": cp} for cp in _below(plan.cp))
    if axis == "pipeline":
        yield from ({"parallel.pp": pp} for pp in _below(plan.pp))
        if config.parallel.pipeline.schedule not in ("1f1b", "gpipe"):
            yield {"parallel.pipeline.schedule": "1f1b", "parallel.pipeline.chunks": None}
    if axis in ("data", "all"):
        if plan.shard > 1 and zero.transport == "collectives":
            yield {"parallel.zero.transport": "copy_engine"}
        if zero.stage >= 2:  # reduces, and in stage 3 gathers, for every micro-batch
            yield from _larger(layout)
            yield from ({"parallel.zero.stage": stage} for stage in range(zero.stage - 1, 0, -1))
        if plan.stage and plan.replicate == 1:
            yield from ({"parallel.shard": ranks} for ranks in _below(plan.shard) if ranks > 1)
        if config.precision.compute != "fp32" and config.precision.reduce == "fp32":
            yield {"precision.reduce": "bf16"}
        if plan.replicate > 1 and hops.outer.codec == "none":
            yield {"parallel.grad_comm.outer.codec": "int8"}
        elif plan.shard > 1 and hops.inner.codec == "none":
            yield {"parallel.grad_comm.inner.codec": "int8"}


def _unset(config: Config, *names: str) -> Changes:
    """Settings of `parallel` that have a value, without it: another way of fusion does not read them."""
    given = {name: getattr(ParallelConfig, name) for name in names}
    return {f"parallel.{name}": value for name, value in given.items() if getattr(config.parallel, name) != value}


def _bubble(config: Config, layout: Layout, part: str) -> Iterator[Changes]:
    pipeline, micro = config.parallel.pipeline, layout.batch.micro_size
    if part == "imbalance":
        if pipeline.split != "balanced":
            yield {"parallel.pipeline.split": "balanced"}
        if pipeline.schedule != "auto":
            yield {"parallel.pipeline.schedule": "auto", "parallel.pipeline.split": "balanced"}
    yield from ({"batch.micro_size": size} for size in _below(micro))
    free = {"parallel.pipeline.split": "balanced", "parallel.pipeline.chunks": None}
    for schedule in ("zb_v", "interleaved", "zb_h1", "1f1b"):
        if schedule != pipeline.schedule:
            yield {"parallel.pipeline.schedule": schedule} | ({} if schedule in ("zb_h1", "1f1b") else free)
    yield from ({"parallel.pp": pp} for pp in _below(layout.plan.pp))


def _host(config: Config, layout: Layout, part: str) -> Iterator[Changes]:
    if not config.compile:
        yield {"compile": True}
    yield {"run.cuda_graphs": True, "logging.profile": 0, "logging.trace": []}
    yield from _larger(layout)


def _data(config: Config, layout: Layout, part: str) -> Iterator[Changes]:
    if config.data.prefetch < 8:
        yield {"data.prefetch": max(4, 2 * config.data.prefetch)}


def _memory_bandwidth(config: Config, layout: Layout, part: str) -> Iterator[Changes]:
    if part == "optimizer" and layout.plan.stage == 0:
        yield {"parallel.zero.stage": 1}
    if not config.compile:
        yield {"compile": True}
    yield from _larger(layout)
    if config.precision.compute == "fp32":
        yield {"precision.compute": "bf16"}


def _compute(config: Config, layout: Layout, part: str) -> Iterator[Changes]:
    yield from _lighter(config)
    if config.precision.compute == "fp32":
        yield {"precision.compute": "bf16"}
        if config.precision.matmul == "highest":
            yield {"precision.matmul": "high"}
    if not config.compile:
        yield {"compile": True}
    yield from _larger(layout)


def _memory_capacity(config: Config, layout: Layout, part: str) -> Iterator[Changes]:
    yield from _lighter(config) if part == "recompute" else _chosen()
    yield from ({"batch.micro_size": size} for size in _below(layout.batch.micro_size))
    modes = ["none", "selective", "full"]
    if config.activation.mode in modes:
        yield from ({"activation.mode": mode} for mode in modes[modes.index(config.activation.mode) + 1 :])
    yield from ({"parallel.zero.stage": stage} for stage in range(config.parallel.zero.stage + 1, 4))
    yield from ({f"parallel.{axis}": 2 * getattr(layout.plan, axis)} for axis in ("pp", "tp"))


def _checkpoint(config: Config, layout: Layout, part: str) -> Iterator[Changes]:
    if not config.checkpoint.asynchronous:
        yield {"checkpoint.asynchronous": True}
    if config.checkpoint.every:
        yield {"checkpoint.every": 4 * config.checkpoint.every}


def _evaluation(config: Config, layout: Layout, part: str) -> Iterator[Changes]:
    if config.eval.every:
        yield {"eval.every": 4 * config.eval.every}


def _nothing(config: Config, layout: Layout, part: str) -> Iterator[Changes]:
    """A slow rank is not mended by a setting."""
    yield from ()


WAYS: dict[str, Ways] = {
    "data": _data,
    "straggler": _nothing,
    "host": _host,
    "communication": _communication,
    "bubble": _bubble,
    "checkpoint": _checkpoint,
    "evaluation": _evaluation,
    "memory capacity": _memory_capacity,
    "memory bandwidth": _memory_bandwidth,
    "compute": _compute,
}
"""By kind of bound, what to try, the least costly first where nothing predicts it."""


def _below(degree: int) -> list[int]:
    """Degrees that divide one, from the next smaller."""
    return [size for size in range(degree // 2, 0, -1) if degree % size == 0]


def _larger(layout: Layout) -> Iterator[Changes]:
    """Larger micro-batches, fewer of them."""
    batch = layout.batch
    for factor in (2, 4):
        if batch.accumulation % factor == 0 and batch.accumulation // factor >= layout.plan.pp:
            yield {"batch.micro_size": factor * batch.micro_size}


def _lighter(config: Config) -> Iterator[Changes]:
    """Less recompute."""
    yield from _chosen()
    modes = ["none", "selective", "full"]
    if config.activation.mode in modes:
        yield from ({"activation.mode": mode} for mode in modes[: modes.index(config.activation.mode)])


def _chosen() -> Iterator[Changes]:
    """Recompute as the memory needs it."""
    unset = {f"activation.{name}": getattr(ActivationConfig(), name) for name in ("save", "modules", "every")}
    yield {"activation.mode": "auto"} | unset
