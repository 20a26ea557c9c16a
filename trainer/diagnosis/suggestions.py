"""What to override against a bound: settings that are legal for the run's model, plan and batch, and what the estimator
predicts of them."""

from __future__ import annotations

import copy
import itertools
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from math import inf
from typing import Any

from trainer.config import ActivationConfig, Config, ConfigError, typed
from trainer.diagnosis.evidence import RunEvidence
from trainer.diagnosis.oom_report import MemoryOverride
from trainer.planning.decide import GIB, SHARE, TILE, MemoryLimit, decide
from trainer.planning.estimate.memory import can_replay
from trainer.planning.estimate.report import left_out
from trainer.planning.estimate.step import StepEstimate, estimate_within
from trainer.planning.features import resolve_plan
from trainer.planning.fit import MachineMemory, find_missing_memory, persistent_bytes
from trainer.planning.plan_overrides import fit_batch
from trainer.planning.resolve import Layout, check_config, resolve_layout

FREED = "memory capacity", "full"
"""The bound against which less memory helps, and not a faster step."""

Changes = dict[str, Any]
"""Values by setting."""

MAX_SUGGESTIONS = 2
"""Overrides that are offered against a bound."""

TRIED = 200
"""Overrides of several settings that are tried, at most, where none of one setting frees enough memory."""

LONG = 16384
"""Tokens of a sequence that is worth sharing."""

COARSE = 0.3
"""Hardware whose predictions have a wider band predicts nothing here."""

NUMBERS = ("precision.", "parallel.grad_comm.")
"""Settings that change the numbers of training."""

ON_GPUS = {
    "precision.matmul",
    "run.cuda_graphs",
    "activation.offload",
    "parallel.zero.offload",
    "parallel.zero.sum_on_host",
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
        ways = list(ALTERNATIVES[kind](self.config, self.layout, detail))
        if self.lacked and (kind, detail) == FREED:
            return self._freeing(ways)
        found = [one for changes in ways if (one := self.offer(changes, kind, detail))]
        found.sort(key=lambda one: 1.0 if one.relative is None else one.relative)
        return found[:MAX_SUGGESTIONS]

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
        before, after = (typed.flatten_values(typed.to_plain(some)) for some in (self.config, config))
        named = {name: value for name, value in after.items() if value != before.get(name)}
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
            config = copy.deepcopy(self.config)
            for name, value in changes.items():
                set_setting(config, name, value)
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


def set_setting(config: Config, name: str, value: Any) -> None:
    """Sets a setting by its path."""
    target: Any = config
    *sections, leaf = name.split(".")
    for section in sections:
        target = getattr(target, section)
    setattr(target, leaf, value)


def is_modelled(setting: tuple[str, Any]) -> bool:
    """Whether the estimator knows what a setting does; what `auto` will choose it does not."""
    name, value = setting
    return not name.startswith(UNFORESEEN) and (value != "auto" or name == "activation.mode")


def format_override(setting: tuple[str, Any]) -> str:
    """`NAME=VALUE` as a shell and the command line take it."""
    name, value = setting
    return shlex.quote(f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}")


Alternatives = Callable[[Config, Layout, str], Iterator[Changes]]


def _communication(config: Config, layout: Layout, axis: str) -> Iterator[Changes]:
    plan, zero, hops = layout.plan, config.parallel.zero, config.parallel.grad_comm
    if axis == "tensor":
        if config.parallel.tp_overlap != "copy_engine":
            yield {"parallel.tp_overlap": "copy_engine"}
        yield from ({"parallel.tp": tp} | ({"parallel.tp_overlap": "off"} if tp == 1 else {}) for tp in _below(plan.tp))
    if axis == "context":
        yield from ({"parallel.cp": cp} for cp in _below(plan.cp))
    if axis == "pipeline":
        yield from ({"parallel.pp": pp} for pp in _below(plan.pp))
        if config.parallel.pipeline.schedule not in ("1f1b", "gpipe"):
            yield {"parallel.pipeline.schedule": "1f1b", "parallel.pipeline.chunks": None}
    if axis in ("data", "all"):
        if plan.shard > 1 and zero.collectives == "nccl":
            yield {"parallel.zero.collectives": "copy_engine"}
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


def _bubble(config: Config, layout: Layout, part: str) -> Iterator[Changes]:
    pipeline, micro = config.parallel.pipeline, layout.batch.micro_size
    if part == "imbalance":
        if pipeline.schedule != "auto":
            yield {"parallel.pipeline.schedule": "auto", "parallel.pipeline.split": "balanced"}
        if pipeline.split != "balanced":  # which mends it: other schedules would hide it
            yield {"parallel.pipeline.split": "balanced"}
            return
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
    plan, zero = layout.plan, config.parallel.zero
    if part != "recompute" and config.batch.sequence_length * layout.batch.micro_size / plan.token_ranks > TILE:
        tiles = {"loss.tile": config.loss.tile, "activation.tile": config.activation.tile}
        yield from ({name: TILE} for name, tile in tiles.items() if not tile)
    if plan.dp > 1:
        yield from ({"parallel.zero.stage": stage} for stage in range(zero.stage + 1, 4))
    long = config.batch.sequence_length >= LONG
    axes = ("pp", "tp", "cp") if long else ("pp", "tp")
    yield from ({f"parallel.{axis}": 2 * getattr(plan, axis)} for axis in axes)
    if part != "recompute":
        yield from _to_the_host(config)


def _to_the_host(config: Config) -> Iterator[Changes]:
    """What leaves the device, to host memory or a disk."""
    zero = config.parallel.zero
    if not config.activation.offload:
        yield {"activation.offload": True}
    if not zero.offload and zero.nvme is None:
        yield {"parallel.zero.offload": True} | ({} if zero.stage else {"parallel.zero.stage": 1})
    if zero.offload and not zero.sum_on_host:
        yield {"parallel.zero.sum_on_host": True}
    if zero.nvme is None and zero.engine == "deepspeed":
        yield {"parallel.zero.nvme": "FOLDER"}


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


ALTERNATIVES: dict[str, Alternatives] = {
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
    unset = {f"activation.{name}": getattr(ActivationConfig(), name) for name in ("save", "modules")}
    yield {"activation.mode": "auto"} | unset
