"""What to override against a bound: settings that are legal for the run's model, plan and batch, and what the estimator
predicts of them."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterable
from functools import cached_property
from math import inf
from typing import Any

from trainer.config import Config, ConfigError, typed
from trainer.diagnosis.evidence import RunEvidence
from trainer.diagnosis.oom_report import MemoryOverride
from trainer.planning.decide import (
    GIB,
    SHARE,
    MachineMemory,
    MemoryLimit,
    decide,
    find_missing_memory,
    persistent_bytes,
)
from trainer.planning.estimate.memory import can_replay
from trainer.planning.estimate.report import left_out
from trainer.planning.estimate.step import StepEstimate, estimate_within
from trainer.planning.features import resolve_plan
from trainer.planning.neighbours import NUMBERS, Changes, change_settings, fit_batch, generate_neighbours
from trainer.planning.resolve import Layout, check_config, resolve_layout

FREED = "memory capacity", "full"
"""The bound against which less memory helps, and not a faster step."""

MAX_SUGGESTIONS = 2
"""Overrides that are offered against a bound."""

TRIED = 200
"""Overrides of several settings that are tried, at most, where none of one setting frees enough memory."""

COARSE = 0.3
"""Hardware whose predictions have a wider band predicts nothing here."""

ON_GPUS = {
    "precision.compute",
    "precision.matmul",
    "run.cuda_graphs",
    "activation.offload",
    "parallel.zero.offload",
    "parallel.zero.collectives",
}
"""Settings that do nothing on CPUs, are refused there, or were never measured to be faster."""

UNFORESEEN = ("data.", "checkpoint.", "eval.", "logging.", "run.cuda_graphs")
"""Settings of which the estimator knows nothing."""


class Suggestions:
    """Tries overrides on the settings of a run. seconds: of its step, as measured; None where none was, and only ratios
    are predicted. host: bytes of the machine's memory, where they are known.

    A run that lacked memory is taken to need more than there is, whatever was predicted of it, and every override to be
    as far from its prediction."""

    def __init__(self, evidence: RunEvidence, seconds: float | None, host: float | None = None):
        assert evidence.config is not None and evidence.layout is not None
        self.config, self.layout, self.machine = evidence.config, evidence.layout, evidence.machine
        self.hardware, self.seconds, self.lacked = evidence.hardware, seconds, bool(evidence.lacked)
        self.host, self.wrong = host, set(self._check(self.config))
        self.coarse = self.hardware is None or self.hardware.band > COARSE

    def against(self, kind: str, detail: str) -> list[MemoryOverride]:
        """At most `MAX_SUGGESTIONS` overrides against a bound of this kind, the fastest first where they are predicted.
        Where memory ran out, those of the fewest settings that are predicted to fit.

        kind: of `rules.KINDS`; detail: which axis, or which part of it."""
        ways = self.alternatives(kind, detail)
        if self.lacked and (kind, detail) == FREED:
            return self._freeing(ways)
        found = [one for changes in ways if (one := self.offer(changes, kind, detail))]
        found.sort(key=lambda one: 1.0 if one.relative is None else one.relative)
        return found[:MAX_SUGGESTIONS]

    def alternatives(self, kind: str, detail: str) -> list[Changes]:
        """What is tried against a bound."""
        moves = MOVES.get((kind, detail)) or MOVES.get((kind, ""), ())
        if detail == "imbalance" and self.config.parallel.pipeline.split == "balanced":
            moves += BUBBLE  # before, other schedules would hide what the split costs
        if (kind, detail) != FREED and self.config.activation.mode == "none":  # nothing could be recomputed less
            moves = tuple(move for move in moves if move not in LIGHTER)
        return list(generate_neighbours(self.config, self.layout, moves))

    def _freeing(self, ways: list[Changes]) -> list[MemoryOverride]:
        if self.limit == 0:
            return []
        if self.limit is not None:
            may = {"activation.memory": float(f"{0.995 * self.limit / GIB:.3g}")}  # below the limit, however rounded
            ways = [way | may if way.get("activation.mode") == "auto" else way for way in ways]
        for many in (1, 2, 3):
            several = (some for some in itertools.combinations(ways, many) if _separately(some))
            offers = (self.offer(_joined(some), *FREED) for some in itertools.islice(several, TRIED))
            found = [one for one in offers if one]
            if found or self.limit is None:
                found.sort(key=lambda one: 1.0 if one.relative is None else one.relative)
                first: dict[tuple[str, ...], MemoryOverride] = {}
                for one in found:  # of a setting's values one is enough
                    first.setdefault(tuple(part.partition("=")[0] for part in one.text.split()), one)
                return list(first.values())[: MAX_SUGGESTIONS + 1]
        return []

    def offer(self, changes: Changes, kind: str, detail: str) -> MemoryOverride | None:
        """The override of these changes, with what keeps the batch as it is; None where it is illegal, changes nothing,
        does not fit, or is predicted to make the step slower (where memory is full: to need no less)."""
        changed = self._changed(changes)
        if changed is None or self.machine.device == "CPU" and not ON_GPUS.isdisjoint(changes):
            return None
        config, layout = changed
        named = typed.changed_settings(config, self.config)
        if not named or not self._held(config, layout):
            return None
        notes = ["changes the numbers of training"] if any(name.startswith(NUMBERS) for name in changes) else []
        text = " ".join(map(format_override, named.items()))
        if self.predicted is None or not any(map(is_modelled, named.items())):
            return MemoryOverride(text, note=", ".join(notes))
        found = self._estimate(config, layout)
        if found is None or found.fits == "no" and self.predicted.fits != "no":
            return None
        relative = found.seconds / self.predicted.seconds
        if not (self._frees(found) if (kind, detail) == FREED else relative < 1):
            return None
        seconds = None if self.coarse or self.seconds is None else self.seconds * relative
        notes += [
            f"not in the time: {missing}" for missing in left_out(found) if missing not in left_out(self.predicted)
        ]
        return MemoryOverride(text, seconds, ", ".join(notes), found.memory / GIB, relative)

    def _frees(self, found: StepEstimate) -> bool:
        """Whether a plan needs less memory, or where memory ran out: so much less that it fits."""
        assert self.predicted is not None
        if self.limit is None:
            return found.memory < self.predicted.memory
        return found.fullest.reserved <= self.limit

    def _held(self, config: Config, layout: Layout) -> bool:
        """Whether the host holds what a plan keeps there, as far as that is known."""
        if self.host is None:
            return True
        memory = MachineMemory(None if self.machine.device == "CPU" else round(1024 * self.host), round(self.host))
        return (
            find_missing_memory(persistent_bytes(config, layout, self.machine.node), self.machine.node, memory) is None
        )

    @cached_property
    def limit(self) -> float | None:
        """Bytes that the allocator may be predicted to reserve for a plan to fit where memory ran out; None where
        nothing is predicted, or it did not."""
        if not self.lacked or self.predicted is None:
            return None
        hardware, reserved = self.predicted.hardware, self.predicted.fullest.reserved
        room, usable = (max(0.0, share * hardware.memory - hardware.fixed) * GIB for share in (1.0, SHARE))
        return usable * min(1.0, reserved / room) if room else 0.0

    @cached_property
    def predicted(self) -> StepEstimate | None:
        """The run's own plan, where its machine is known well enough to compare others with it. Where memory ran out,
        memory alone is compared, of which every kind of machine is known well enough, but not every engine."""
        if self.hardware is None or self.coarse and not self.lacked or self.lacked and not can_replay(self.layout.plan):
            return None
        return self._estimate(self.config, self.layout)

    def _estimate(self, config: Config, layout: Layout) -> StepEstimate | None:
        assert self.hardware is not None
        try:
            if config.activation.mode == "auto":
                room = MemoryLimit(self.hardware.memory * GIB, inf)
                config, layout, *_ = decide(config, layout, room, self.machine.node, self.hardware)
            return estimate_within(inf, config, layout, self.hardware, lowered=False)
        except (ConfigError, ValueError, ArithmeticError):
            return None

    def _changed(self, changes: Changes) -> tuple[Config, Layout] | None:
        """The settings with these changes, first alone, then with a batch that is fitted to them."""
        for fitted in (False, True):
            config = change_settings(self.config, changes)
            try:
                if fitted:
                    plan = resolve_plan(config.parallel, self.machine.processes, self.layout.spec, self.machine.node)
                    config.batch.micro_size = config.batch.micro_size or self.layout.batch.micro_size
                    fit_batch(config, plan, self.layout.batch.global_size, set(changes))
                layout = resolve_layout(config, self.machine.processes, self.layout.spec, self.machine.node)
            except ConfigError:
                continue
            if layout.batch.global_size == self.layout.batch.global_size and self.wrong >= set(self._check(config)):
                return config, layout
        return None

    def _check(self, config: Config) -> list[str]:
        return check_config(config, self.machine.processes, self.machine.node)


def _separately(changes: Iterable[Changes]) -> bool:
    """Whether no setting is changed twice."""
    names = [name for some in changes for name in some]
    return len(names) == len(set(names))


def _joined(changes: Iterable[Changes]) -> Changes:
    return {name: value for some in changes for name, value in some.items()}


def is_modelled(setting: tuple[str, Any]) -> bool:
    """Whether the estimator knows what a setting does; what `auto` will choose it does not."""
    name, value = setting
    return not name.startswith(UNFORESEEN) and (value != "auto" or name == "activation.mode")


def format_override(setting: tuple[str, Any]) -> str:
    """`NAME=VALUE` as a shell and the command line take it."""
    name, value = setting
    return shlex.quote(f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}")


LIGHTER = "automatic recompute", "less recompute"
LARGER = "larger micro-batches"
TO_HOST = "inputs in host memory", "states in host memory", "states on a disk"
DATA = (
    *("shards by copies", "fewer reductions", "less sharding", "smaller shards"),
    *("reductions in 16 bits", "quantised gradients"),
)
BUBBLE = "smaller micro-batches", "other schedules", "less pp"

MOVES: dict[tuple[str, str], tuple[str, ...]] = {
    ("data", ""): ("prefetch",),
    ("host", ""): ("compile", "cuda graphs", LARGER),
    ("communication", "tensor"): ("overlap by copies", "less tp"),
    ("communication", "context"): ("less cp",),
    ("communication", "experts"): ("overlapped passes", "less ep"),
    ("communication", "pipeline"): ("less pp", "plain schedule"),
    ("communication", "data"): DATA,
    ("communication", "all"): DATA,
    ("bubble", ""): BUBBLE,
    ("bubble", "imbalance"): ("measured schedule", "balanced split"),
    ("checkpoint", ""): ("fewer saves",),
    ("evaluation", ""): ("fewer evaluations",),
    ("memory capacity", "full"): (
        *("automatic recompute", "smaller micro-batches", "more recompute", "tiles"),
        *("more sharding", "more ranks a model", *TO_HOST),
    ),
    ("memory capacity", "recompute"): (*LIGHTER, "smaller micro-batches", "more sharding", "more ranks a model"),
    ("memory bandwidth", ""): ("compile", LARGER, "16 bits"),
    ("memory bandwidth", "optimizer"): ("sharded optimizer", "compile", LARGER, "16 bits"),
    ("compute", ""): (*LIGHTER, "16 bits", "tf32", LARGER),
}
"""By kind of bound and its detail ('' for all others), the moves of `generate_neighbours` that are tried. Where nothing
predicts them, the first ones are offered. No setting helps against a slow rank."""
