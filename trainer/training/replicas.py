"""Compares what several ranks hold of the same tensors, which has to be equal to the bit.

A fault of memory or of a processor on one rank leaves no trace in the loss at first. The parts that ranks hold of named
tensors say which of them are replicas, whatever the plan: two ranks hold the same rectangles of the same tensor. That
is all under plain data parallelism; the shards of other replicas under HSDP; norms, and what else is not split, under
tensor parallelism; a tied embedding on the first and the last pipeline stage; the number of updates everywhere. Between
steps, ZeRO keeps nothing but shards: gathered parameters are dropped and gathered anew.

Not compared is what belongs to a rank alone: the error feedback of quantised gradients, the states of callbacks (rank
0's are saved), random numbers (seeded from `run.seed`, the step and the rank before each step), copies of which
DeepSpeed gives ranks runs of elements with different ends, and states that DeepSpeed keeps on a disk.

A comparison reads each replicated byte once and reduces two integers for each set of ranks that hold the same parts.

A step whose loss or gradient is not finite is compared with itself: `StepRepeats` runs it again."""

from __future__ import annotations

import math
import socket
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.chunks import TensorPart
from trainer.checkpointing.manifest import list_checkpoints
from trainer.config import Config
from trainer.data.batches import MicroBatch
from trainer.distributed.overlap import copy_to_device
from trainer.distributed.tensors import Fragment, digest_rows, elements_of_rows, local_values, row_sums, tensor_words
from trainer.model.initial import name_seed
from trainer.observe.deferred import Ready
from trainer.training.history import way_on
from trainer.training.state import COPY, TrainState

Seat = tuple[int, int]
"""A holder of parts: its rank, and 0, or 1 for the copies that a rank holds beside the originals."""

DIFFERENT = "replicas that differ"
"""Among the numbers of a step."""

MAX_COMPARED = 16
"""Tensors whose values are compared for the message."""
ROWS = 256
"""Rows of a tensor whose values are compared, of 32 KiB each."""
WITNESSES = 4
"""Holders of a tensor whose values are compared."""
IMPLAUSIBLE = 100.0
"""A value is implausible if it is this many times the largest one that all holders agree on."""


class ReplicaMismatch(RuntimeError):
    """Ranks hold different values where they have to be equal: one of them is faulty."""


class ReplicaComparison:
    """The replicas of a state, and their comparison. All ranks call its methods together.

    keys: by seat of this rank, the numbers of the tensors that it holds together with other seats, by name. sets: the
    seats that hold the same parts, each set once, the same on all ranks; place_of: key -> the number of its set."""

    def __init__(self, state: TrainState, checkpointer: Checkpointer):
        """checkpointer: of the run, which may still be saving when a difference is found."""
        self.state, self.world, self.checkpointer = state, state.world, checkpointer
        self.every = state.config.guard.compare_every if state.world.size > 1 else 0
        if not self.every:
            return
        parts = [{name: TensorPart.of(tensor) for name, tensor in tensors.items()} for tensors in self.held()]
        keys = [{name: key_of(name, part) for name, part in some.items() if part is not None} for some in parts]
        holders: dict[int, list[Seat]] = {}
        for rank, everything in enumerate(self.world.gather([[*some.values()] for some in keys])):
            for place, theirs in enumerate(everything):
                for key in theirs:
                    holders.setdefault(key, []).append((rank, place))
        shared = {key: tuple(seats) for key, seats in holders.items() if len(seats) > 1}
        self.keys = [{name: key for name, key in some.items() if key in shared} for some in keys]
        self.sets = sorted(set(shared.values()))
        places = {seats: number for number, seats in enumerate(self.sets)}
        self.place_of = {key: places[seats] for key, seats in shared.items()}

    def held(self) -> list[dict[str, Tensor | Fragment]]:
        """What this rank holds, by seat and name, sorted by name; but for what lies on a disk."""
        state = self.state
        tensors: dict[str, Tensor | Fragment] = {"loss scale": state.scaler.value}
        if state.plan.nvme:
            tensors["optimizer.updates"] = state.optimizer.updates
        else:
            tensors |= {f"model.{name}": parameter for name, parameter in state.optimizer.parameters.items()}
            tensors |= state.optimizer.tensors()
        tensors |= state.router_buffers
        if state.average is not None and not state.plan.nvme:
            tensors |= state.average.tensors()
        seats: list[dict[str, Tensor | Fragment]] = [{}, {}]
        for name, tensor in sorted(tensors.items()):
            seats[name.endswith(COPY)][name.removesuffix(COPY)] = tensor
        return seats

    def shared(self) -> Iterator[tuple[Seat, int, Tensor]]:
        """Seat, key and values of what this rank holds together with others, in an order that holders share."""
        for place, (keys, tensors) in enumerate(zip(self.keys, self.held())):
            for name, key in keys.items():
                yield (self.world.rank, place), key, local_values(tensors[name])

    def due(self, step: int) -> bool:
        """Whether replicas are compared after a step."""
        return self.every > 0 and step % self.every == 0

    def check(self, counters: Mapping[str, int]) -> None:
        """Compares and waits for the result: before a save. Raises `ReplicaMismatch` on all ranks."""
        if self.every:
            numbers = {name: value.item() for name, value in self.compare(counters, on_host=True).items()}
            self.judge(self.state.step, numbers, counters)

    def judge(self, step: int, numbers: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        """Takes the numbers of a step, read back. Raises `ReplicaMismatch` on all ranks if replicas differed then."""
        if numbers.get(DIFFERENT):
            explained = self.explain(counters)
            self.checkpointer.wait()  # what is being saved was compared before
            raise ReplicaMismatch(format_mismatch(self.state.config, explained, step, self.checkpointer.folder))

    @torch.no_grad()
    def compare(self, counters: Mapping[str, int], on_host: bool = False) -> dict[str, Tensor]:
        """In how many sets of ranks the holders differ: a scalar on the device, the same on all ranks, by the name that
        `judge` knows. Nothing is waited for, unless states are in host memory, or `on_host`: then ranks reduce over
        gloo, which fails at once if one has died. counters: numbers of the host on which all ranks have to agree."""
        device = self.world.device
        sums: dict[tuple[int, Seat], list[Tensor]] = {}
        for seat, key, values in self.shared():
            sums.setdefault((self.place_of[key], seat), []).append(row_sums(values))
        found = torch.full((2, len(self.sets) + 1), torch.iinfo(torch.int64).min, dtype=torch.int64)
        found[0, -1] = name_seed(0, str(sorted(counters.items())))
        found[1, -1] = ~found[0, -1]
        found = copy_to_device(found, device)
        for (place, _), rows in sums.items():
            value = digest_rows(rows, device)
            both = torch.stack([value, ~value])  # of both the maximum: the largest and, inverted, the smallest
            found[:, place] = torch.maximum(found[:, place], both)
        found = found.cpu() if on_host else found
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return {DIFFERENT: (found[0] != ~found[1]).sum()}

    @torch.no_grad()
    def explain(self, counters: Mapping[str, int]) -> str:
        """What differs and on which ranks, for people: the same text on all ranks."""
        digests = {
            (seat, key): digest_rows([row_sums(values)], values.device).item() for seat, key, values in self.shared()
        }
        names = {key: name for keys in self.keys for name, key in keys.items()}
        everyone = self.world.gather((socket.gethostname(), dict(counters), digests, names))
        nodes = {number: node for number, (node, *_) in enumerate(everyone)}
        names = {key: name for *_, theirs in everyone for key, name in theirs.items()}
        by_key: dict[int, dict[Seat, int]] = {}
        for _, _, theirs, _ in everyone:
            for (seat, key), value in theirs.items():
                by_key.setdefault(key, {})[seat] = value
        differing = sorted(
            (key for key, values in by_key.items() if len(set(values.values())) > 1), key=lambda key: names[key]
        )
        verdicts = [ReplicaVerdict.of(by_key[key]) for key in differing]
        self._compare_values(dict(zip(differing[:MAX_COMPARED], verdicts)))
        said = [f"{names[key]}: {verdict.describe()}" for key, verdict in zip(differing[:MAX_COMPARED], verdicts)]
        if len(differing) > MAX_COMPARED:
            said.append(f"and {len(differing) - MAX_COMPARED} more tensors")
        for name in counters:
            values = [theirs[name] for _, theirs, _, _ in everyone]
            if len(set(values)) > 1:
                verdicts.append(ReplicaVerdict.of({(number, 0): value for number, value in enumerate(values)}))
                said.append(f"{name}: {', '.join(f'{value} on rank {n}' for n, value in enumerate(values))}")
        return "\n  ".join([f"{blame_ranks(verdicts, nodes)}", *said])

    def _compare_values(self, verdicts: dict[int, ReplicaVerdict]) -> None:
        """Adds to each verdict how many elements differ, and the values of the first that do. Few ranks send values,
        and of large tensors the rows that differ."""
        mine = {
            (key, seat): values
            for seat, key, values in self.shared()
            if key in verdicts and seat in verdicts[key].witnesses
        }
        rows = self._exchange({place: row_sums(values).cpu() for place, values in mine.items()})
        wanted = {
            key: torch.stack([rows[key, seat] for seat in verdict.witnesses]) for key, verdict in verdicts.items()
        }
        wanted = {key: (sums != sums[0]).any(0).nonzero().flatten().tolist() for key, sums in wanted.items()}
        sent = {place: elements_of_rows(values, wanted[place[0]][:ROWS]) for place, values in mine.items()}
        elements, sizes = self._exchange(sent), self._exchange({place: len(v.view(-1)) for place, v in mine.items()})
        for key, verdict in verdicts.items():
            verdict.size, verdict.sampled = sizes[key, verdict.witnesses[0]], len(wanted[key]) > ROWS
            verdict.look_at([elements[key, seat] for seat in verdict.witnesses])

    def _exchange(self, mine: dict[Any, Any]) -> dict[Any, Any]:
        return {place: value for theirs in self.world.gather(mine) for place, value in theirs.items()}


def key_of(name: str, part: TensorPart) -> int:
    """A number for a part of a tensor: equal on two ranks where they hold the same part."""
    boxes = [(tuple(offset), tuple(values.shape)) for offset, values in part.boxes.items()]
    return name_seed(0, f"{name} {part.local.dtype} {boxes}")


@dataclass
class ReplicaVerdict:
    """What is known of a tensor whose holders differ.

    holders: all of them; wrong: those that are outvoted, empty where there is no majority. witnesses: a few whose
    values are compared, the first as the reference. size: elements of the part; differing: how many differ among the
    rows that were looked at, all of them unless `sampled`; first: place and values, by witness, of the first."""

    holders: tuple[Seat, ...]
    wrong: tuple[Seat, ...]
    witnesses: tuple[Seat, ...]
    size: int = 0
    differing: int = 0
    sampled: bool = False
    first: tuple[int, list[float]] | None = None
    implausible: tuple[Seat, ...] = ()

    @classmethod
    def of(cls, digests: Mapping[Seat, int]) -> ReplicaVerdict:
        """By the digests of all holders."""
        votes = Counter(digests.values())
        most, count = votes.most_common(1)[0]
        wrong = tuple(seat for seat, value in digests.items() if value != most) if 2 * count > len(digests) else ()
        firsts = {value: seat for seat, value in reversed(digests.items())}
        others = [firsts[value] for value in votes if value != most]
        return cls(tuple(digests), wrong, (firsts[most], *others)[:WITNESSES])

    def look_at(self, elements: list[dict[int, Tensor]]) -> None:
        """elements: of each witness, the values of the rows that differ, by their place."""
        values = [torch.cat([*parts.values()]) for parts in elements]
        places = torch.cat([torch.arange(first, first + len(part)) for first, part in elements[0].items()])
        raw = [torch.cat(tensor_words(part)) for part in values]
        unequal = torch.stack([part != raw[0] for part in raw]).any(0)
        self.differing = int(unequal.sum())
        wide = torch.stack([part.double() for part in values])
        at = int(unequal.nonzero()[0])
        self.first = int(places[at]), wide[:, at].tolist()
        largest = wide[0, ~unequal].abs().max().item() if not unequal.all() else math.inf
        odd = ~(wide[:, unequal].abs() <= IMPLAUSIBLE * largest).all(1)  # or not finite
        if 0 < odd.sum() < len(odd):
            self.implausible = tuple(seat for seat, bad in zip(self.witnesses, odd) if bad)

    def describe(self) -> str:
        number = f"{'at least ' if self.sampled else ''}{self.differing:,}"
        place, values = self.first or (0, [])
        told = ", ".join(f"{value:.9g} on {format_holders([seat])}" for seat, value in zip(self.witnesses, values))
        return f"{number} of {self.size:,} elements differ, the first at {place} ({told})"


def format_holders(of: Iterable[Seat], nodes: Mapping[int, str] | None = None) -> str:
    """Holders in words."""

    def name(seat: Seat) -> str:
        node = f" on {nodes[seat[0]]}" if nodes else ""
        return f"rank {seat[0]}{' (its copy)' if seat[1] else ''}{node}"

    return ", ".join(map(name, sorted(set(of))))


def blame_ranks(verdicts: list[ReplicaVerdict], nodes: Mapping[int, str]) -> str:
    """Which ranks are to be looked at, by what is known of all tensors and counters that differ."""
    outvoted = {seat for verdict in verdicts for seat in verdict.wrong}
    if outvoted:
        return f"{format_holders(outvoted, nodes)} differs from the majority of those that hold the same"
    odd = {seat for verdict in verdicts for seat in verdict.implausible}
    if odd:
        return f"{format_holders(odd, nodes)} holds implausible values, and the others that hold the same do not"
    every = {seat for verdict in verdicts for seat in verdict.holders}
    if not every:
        return "what differed is equal again one step later"
    if len({rank for rank, _ in every}) == 1:
        return f"{format_holders(every, nodes)} are two copies of one tensor and hold different values"
    return f"one of {format_holders(every, nodes)} is wrong, and their values do not tell which"


def format_mismatch(config: Config, explained: str, step: int, checkpoints: Path) -> str:
    """What is said when a run ends because replicas differ after `step`."""
    newest = next(iter(list_checkpoints(checkpoints).values()), None)
    saved = f"{newest} is the last checkpoint, whose replicas were equal; {way_on(config)}"
    last = saved if newest else "nothing had been saved"
    return (
        f"replicas differ after step {step}: {explained}\n"
        "Equal arithmetic gave different results: memory or a processor of that machine is faulty. Take it out of "
        "service, or look at its memory errors (dmesg; nvidia-smi -q -d ECC,ROW_REMAPPER) and its preflight. "
        f"The difference was not saved: {last}. If code of your own or "
        "processors of different kinds let replicas differ, set guard.compare_every=0"
    )


# Runs a step again, in place, whose loss or gradient was not finite: the same again points to the data or to the
# optimisation, another result to the hardware. A step that is not finite changes nothing, so the state from which it
# ran is still there, if no later step has changed it. On a GPU the host knows the numbers of a step when the next one
# is already under way. The gate therefore keeps every step behind a suspicious one from changing anything, by a
# scalar on the device: no host waits for it, and the numbers of ordinary steps are the same with and without it. When
# the host reads that a step was suspicious, it runs that step again on the batch, which it has kept, with the same
# random numbers; then the steps behind it. An fp16 step whose gradient alone overflows is ordinary: the loss scale
# explains it. DeepSpeed moves the loss scale itself, so its fp16 steps are not run again. A loss that is finite and
# merely high is not suspicious: its update has been made by the time that it is known, and clipping bounds it.


TOLERANCE = 1e-3
"""Relative difference of two losses of the same sequence that kernels without a fixed order of additions explain."""


@dataclass(frozen=True)
class TakenStep:
    """A step that was taken: its number, what it was taken on, and the counters of the host behind it."""

    step: int
    batches: list[MicroBatch]
    asked: int
    position: int
    tokens: int


class StepRepeats:
    """The newest steps of a run, and what became of those that were run again. All ranks keep it together."""

    def __init__(self, state: TrainState):
        self.steps: deque[TakenStep] = deque()
        self.looked_at = 0
        self.watch(state)

    def watch(self, state: TrainState) -> None:
        """Takes over a new state, between two steps."""
        self.state, self.world = state, state.world
        state.gate.active = state.scaler.can_hold

    def note(self, taken: TakenStep) -> None:
        """A step is about to be taken, for the first time or again."""
        if not self.steps or self.steps[-1].step < taken.step:
            self.steps.append(taken)

    def suspicious(self, ready: Sequence[Ready]) -> Ready | None:
        """The first of the steps that have been read back that has to be run again. The others are forgotten."""
        for one in ready:
            if one[0] > self.looked_at and self.state.gate.suspects(one[1]):
                return one
            while self.steps and self.steps[0].step <= one[0]:
                self.steps.popleft()
        return None

    def rewind(self, step: int) -> list[TakenStep]:
        """Goes back to before a suspicious step. Returns it, and the steps behind it, which have changed nothing."""
        self.looked_at, self.state.step = step, step - 1
        self.state.gate.open()
        return [taken for taken in self.steps if taken.step >= step]

    def settle(self, first: Ready, second: Ready, overflow: float) -> tuple[str, bool]:
        """Compares both executions of a step. Returns what they tell, for people, and whether the second result is not
        finite either. overflow: the share of the choices of experts for which the first execution had no room."""
        step, numbers, host = first
        again = self.state.gate.suspects(second[1])
        self.state.gate.open()
        if again:  # which the gate has kept from the loss scale
            self.state.scaler.update(torch.ones_like(self.state.gate.shut))
        if overflow:
            capacity = self.state.config.parallel.ep_capacity
            text = (
                f"a rank had no room for {overflow:.2g} of all choices of experts, and the step was run again with "
                f"room for all{', which gave no finite result' * again}; if this is frequent, raise "
                f"parallel.ep_capacity={capacity:g}"
            )
            return f"step {step}: {text}", again
        reports = self.world.gather(self._report(numbers, second[1], host["ids"], again))
        same = not self.state.config.run.deterministic or np.array_equal(
            numbers["squares"], second[1]["squares"], equal_nan=True
        )
        text = explain_repeat(reports, numbers, second[1], again, same)
        return f"step {step} was run again on the same batch: {text}", again

    def _report(self, first: Mapping[str, Any], second: Mapping[str, Any], ids: list[str], again: bool) -> RepeatReport:
        """What this rank has seen of both executions."""
        one, two = first["losses"], second["losses"]
        if self.state.config.run.deterministic:
            same = (one == two) | (np.isnan(one) & np.isnan(two))
        else:
            same = np.isclose(one, two, rtol=TOLERANCE, atol=0, equal_nan=True)
        broken = [
            name
            for name, parameter in (self.state.parameters.items() if again else ())
            if not torch.isfinite(local_values(parameter)).all()
        ]
        return RepeatReport(
            socket.gethostname(),
            self.world.data.get_local_rank(),
            [sample for sample, bad in zip(ids, ~np.isfinite(two)) if bad],
            [sample for sample, equal in zip(ids, same) if not equal],
            broken,
        )


@dataclass(frozen=True)
class RepeatReport:
    """What a rank has seen of a step that was run twice.

    data: its place among the ranks that see different data. samples: whose loss was not finite the second time;
    differing: whose loss was another. broken: its weights that are not finite."""

    node: str
    data: int
    samples: list[str]
    differing: list[str]
    broken: list[str]


def explain_repeat(
    reports: Sequence[RepeatReport], first: Mapping[str, Any], second: Mapping[str, Any], again: bool, same: bool
) -> str:
    """What both executions of a step tell. reports: by rank; again: whether the second is not finite either; same:
    whether both have the same gradient norms, as far as that can be expected."""
    differing = list(dict.fromkeys(sample for report in reports for sample in report.differing))
    places = {report.data for report in reports if report.differing}
    suspects = [f"rank {rank} on {report.node}" for rank, report in enumerate(reports) if report.data in places]
    result = f"loss {first['loss']:g} and gradient norm {first['grad_norm']:g} at first, {second['loss']:g} and "
    result += f"{second['grad_norm']:g} then"
    if not again or differing or not same:
        more = f" or {len(suspects) - 8} more" if len(suspects) > 8 else ""
        where = (
            f"of {' or '.join(suspects[:8])}{more}, which computed other losses for {', '.join(differing[:5])}"
            if suspects
            else "in a backward pass or a reduction of gradients; the losses are equal, and do not tell the rank"
        )
        end = "neither result is finite, and nothing is updated" if again else "the second result is taken"
        return f"{result}. Equal arithmetic gave different results: a hardware fault {where}; {end}"
    broken = [f"{report.broken[0]} on rank {rank}" for rank, report in enumerate(reports) if report.broken]
    samples = list(dict.fromkeys(sample for report in reports for sample in report.samples))
    if broken:
        cause = f"weights are not finite: {', '.join(broken[:5])}; an update diverged, or memory there is faulty"
    else:
        of = f", by its samples {', '.join(samples[:5])}" if samples else ""
        cause = f"the data or the optimisation is the cause{of}"
    return f"{result}. The result is reproducible: {cause}"
