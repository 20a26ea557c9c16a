"""What a run leaves that memory ran out of: what was planned, what was taken, and what to override."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer.util.lines import SHORTAGE
from trainer.util.reading import MAYBE_NUMBER, NUMBER, Malformed, make_printable, pick_fields, read_json, write_atomic
from trainer.util.tables import format_bytes

FORMAT = 2
"""Of out_of_memory.json."""

TRANSIENT = ("activations", "logits and loss", "backward of a layer")
"""Planned categories that nothing tells apart once they are taken."""

REST, POOLS, OUTSIDE = LAST = (
    "activations and all else",
    "allocator's pools",
    "outside of the allocator, other programs included",
)
"""Of what is taken: what is none of the states; what the allocator has reserved and not given out, gaps included; what
it does not know of."""

NOTHING = "start more processes, or take a smaller model"
"""Where no override helps."""


@dataclass(frozen=True)
class MemoryOverride:
    """text: what to put behind the run's command line, for this model and plan. seconds: of the step, predicted; None
    where nothing predicts it. note: what else it changes. memory: GiB of the fullest rank, predicted; relative: the
    step as a multiple of what it takes now, predicted."""

    text: str
    seconds: float | None = None
    note: str = ""
    memory: float | None = None
    relative: float | None = None

    @property
    def told(self) -> str:
        """What it is predicted to need and to take, and its note."""
        parts = [
            f"{format_bytes(self.memory * 2**30)} a rank" if self.memory is not None else "",
            f"step x {self.relative:.2f}" if self.relative is not None else "",
            self.note,
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class OOMReport:
    """Memory that ran out. Sizes in bytes.

    rank: on which; step: optimizer steps that were done; error: what it said. capacity: of the device, or of the
    machine for each process. actual: what was taken on this rank when the error was told, by category: of a GPU all of
    it, on CPUs by the process. counted: sizes beside these. unknown: categories that are part of `REST`, because
    nothing tells them apart. planned: of the fullest rank at its fullest moment (`where`), by category; empty where it
    is not known, and `problem` says why. explained: whether the plan is predicted to need about what there is, or
    more."""

    rank: int
    step: int
    error: str
    device: str
    capacity: float
    actual: Mapping[str, float]
    counted: Mapping[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    planned: Mapping[str, float] = field(default_factory=dict)
    where: str = ""
    explained: bool = True
    overrides: tuple[MemoryOverride, ...] = ()
    problem: str = ""

    @property
    def facts(self) -> list[str]:
        """What is to be said of the memory that was lacking."""
        taken = f"taken on rank {self.rank} after the error"
        if self.planned:
            said = [f"planned on the fullest rank, at {self.where}; {taken}:"]
        else:
            said = [f"nothing is predicted of it: {self.problem}; {taken}:"]
        for name, (plan, actual) in self.compared.items():
            known = format_bytes(actual) if name not in self.unknown else "unknown"
            parts = [f"planned {format_bytes(plan)}"] * (plan is not None)
            parts += [f"taken {known}"] * (actual is not None or name in self.unknown)
            said.append(f"  {name}: {', '.join(parts)}")
        sums = [f"planned {format_bytes(sum(self.planned.values()))}"] * bool(self.planned)
        said.append(
            f"  sum: {', '.join([*sums, f'taken {format_bytes(sum(self.actual.values()))}'])} of "
            f"{format_bytes(self.capacity)}"
        )
        if self.unknown:
            said.append(f"what of {REST} are {' and '.join(self.unknown)} is not known")
        if self.counted:
            said.append(
                "besides: " + ", ".join(f"{name} {format_bytes(value)}" for name, value in self.counted.items())
            )
        if not self.explained:
            said.append(
                "the plan alone is predicted to fit: look at what else takes memory (other programs, a loss term or a "
                "callback of one's own), or leave it more"
            )
        return said

    @property
    def compared(self) -> dict[str, tuple[float | None, float | None]]:
        """By category what was planned and what was taken, those of less than a byte left out."""
        planned = {name: value for name, value in self.planned.items() if name not in TRANSIENT}
        if self.planned:
            planned[REST] = sum(self.planned.get(name, 0.0) for name in TRANSIENT)
        order = [*(name for name in planned if name not in LAST), *self.actual, *LAST]
        pairs = {name: (planned.get(name), self.actual.get(name)) for name in order}
        return {name: pair for name, pair in pairs.items() if max(value or 0.0 for value in pair) >= 1}

    @property
    def ways(self) -> list[str]:
        """What to override, a line each."""
        if not self.overrides:
            return [f"no override is known that needs less and fits: {NOTHING}"]
        predicted = "predicted to fit" if self.planned and self.explained else "needs less"
        return [f"{predicted}: {one.text}" + f"  ({one.told})" * bool(one.told) for one in self.overrides]

    def write(self, folder: Path) -> None:
        """Leaves it in the run's folder. Raises `OSError`."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        write_atomic(folder / SHORTAGE, json.dumps(content, indent=1, allow_nan=False) + "\n")


_SHAPE = {
    "rank": int,
    "step": int,
    "error": str,
    "device": str,
    "capacity": NUMBER,
    "actual": {str: NUMBER},
    "counted": {str: NUMBER},
    "unknown": [str],
    "planned": {str: NUMBER},
    "where": str,
    "explained": bool,
    "overrides": [
        {"text": str, "seconds": MAYBE_NUMBER, "note": str, "memory": MAYBE_NUMBER, "relative": MAYBE_NUMBER}
    ],
    "problem": str,
}


def read_oom_report(folder: Path) -> OOMReport | None:
    """What the last start of a run that lacked memory has left; None where there is none, or something else."""
    with contextlib.suppress(OSError, Malformed):
        content = read_json(folder / SHORTAGE, _SHAPE, "")
        given = pick_fields(OOMReport, content)
        given["unknown"] = tuple(map(make_printable, content["unknown"][:10]))
        given["overrides"] = tuple(
            MemoryOverride(
                **pick_fields(MemoryOverride, one) | {name: make_printable(one[name]) for name in ("text", "note")}
            )
            for one in content["overrides"][:10]
        )
        return OOMReport(**given)
    return None
