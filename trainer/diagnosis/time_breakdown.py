"""The account of a step: where all of its time went on one rank."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from statistics import median
from typing import Any

from trainer.config import ConfigError
from trainer.util.lines import read_lines
from trainer.util.reading import Malformed, find_mismatch, parse_json, shorten_foreign
from trainer.util.run_folder import ACCOUNTS

TERMS = {
    "products": "matrix products",
    "attention": "attention",
    "memory_bound": "kernels that are bound by memory: norms, activations, casts, losses, copies on the device",
    "recompute": "forward passes that backward repeats, whatever they consist of",
    "optimizer": "norm of the gradient and update",
    "communication/AXIS/transfer": "communication that nothing hides, as long as the fastest rank took for it",
    "communication/AXIS/waiting": "the rest of it: a peer came later",
    "copies": "copies between host and device that nothing hides",
    "bubble/schedule": "waiting that the pipeline's schedule has with stages of equal costs",
    "bubble/imbalance": "waiting for pipeline ranks beyond that",
    "host/launch": "the device had nothing to do, and the host had not launched the next kernel; on CPUs, what is not "
    "within operators",
    "host/synchronisation": "the same behind a synchronisation of host and device",
    "host/collector": "Python's garbage collector, while the device had nothing to do",
    "data": "waiting for the batch",
    "checkpoint": "saving, as far as training stood still, a step on average since the account before",
    "evaluation": "evaluations, a step on average since the account before",
    "other": "what none of these explains",
}
"""What the time of a step is spent on; each term has what those before it leave, except that waiting in pipelines is
bubble."""

AXES = {
    "tensor": "among the ranks that share matrices",
    "context": "among the ranks that share sequences",
    "pipeline": "between neighbours in the pipeline",
    "data": "among data-parallel ranks: parameters and gradients",
    "all": "among all ranks, or without an axis of its own: sums of scalars",
}
"""Communication by what it is between; stands for AXIS."""

KINDS = ("products", "attention", "memory_bound", "optimizer", "communication", "copies")
"""Classes of kernels."""

LONGEST_STEP = 1e9
"""Seconds of a step are below."""

LARGEST = 1e30
"""Numbers of an account are below: no step has as many operations or bytes."""

MODEL, PLAN, RUNTIME, COMPILER, HARDWARE = LAYERS = (
    "model definition",
    "parallelisation",
    "runtime orchestration",
    "compilation",
    "hardware",
)
"""The five layers of a training system, in which what bounds it is to be mended."""


@dataclass(frozen=True)
class KernelTotal:
    """A kernel, or on CPUs an operator, over all its calls in a step.

    kind: one of `KINDS`. seconds: of all calls together, recomputed and hidden ones too. flops, bytes: of all calls
    together; None where the trace has no shapes that tell."""

    name: str
    kind: str
    calls: int
    seconds: float
    flops: float | None = None
    bytes: float | None = None


@dataclass(frozen=True)
class TimeBreakdown:
    """Where the time of a step went on a rank. Times in seconds.

    place: the rank's coordinates in the mesh, by dimension (`Plan.mesh`). device: its name, `cpu` for CPUs. seconds: of
    the step. terms: names as in `TERMS`, an axis of `AXES` for AXIS; they add up to `seconds`. hidden: communication
    behind computation, by axis. last: by axis, how many collectives this rank was the last to join, and how many
    could be compared. launches: kernels that were launched; launch_delay: from the launch of a kernel to its start, the
    median; kernel_seconds: the median of kernels; None on CPUs. synchronisations: of host and device. kernels: those
    that took most, the longest first."""

    rank: int
    step: int
    place: dict[str, int]
    device: str
    seconds: float
    terms: dict[str, float]
    hidden: dict[str, float] = field(default_factory=dict)
    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    launches: int = 0
    launch_delay: float | None = None
    kernel_seconds: float | None = None
    synchronisations: int = 0
    kernels: tuple[KernelTotal, ...] = ()

    def __post_init__(self) -> None:
        """Raises `ValueError` for terms that nobody knows, or that are not the whole step."""
        if unknown := [name for name in (*self.terms, *self.hidden, *self.last) if not is_term(name)]:
            raise ValueError(f"an account has no term {shorten_foreign(unknown[0])}")
        numbers = {**self.hidden, **self.terms, "step": self.seconds}
        if odd := [name for name, seconds in numbers.items() if not 0 <= seconds < LONGEST_STEP]:
            raise ValueError(f"{odd[0]} takes {shorten_foreign(numbers[odd[0]])} seconds in an account")
        total = math.fsum(self.terms.values())
        if not math.isclose(total, self.seconds, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(f"terms of {total} seconds in an account of {self.seconds}")

    def term(self, name: str) -> float:
        """Seconds of a term alone."""
        return self.terms.get(name, 0.0)

    def spent(self, term: str) -> float:
        """Seconds of a term, or of all below it: `bubble` has `bubble/schedule` and `bubble/imbalance`."""
        return math.fsum(seconds for name, seconds in self.terms.items() if name == term or name.startswith(f"{term}/"))

    def share(self, term: str) -> float:
        """The same as a share of the step, 0 to 1."""
        return self.spent(term) / self.seconds if self.seconds else 0.0

    @property
    def waiting(self) -> float:
        """Seconds of waiting for peers in communication, over all axes."""
        return math.fsum(seconds for name, seconds in self.terms.items() if name.endswith("/waiting"))

    def dumps(self) -> str:
        """The account as a line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @staticmethod
    def loads(text: str | bytes) -> TimeBreakdown:
        """Reads what `dumps` wrote. Raises `ValueError` for anything else."""
        value = parse_json(text)
        if wrong := find_mismatch(value, _SHAPE):
            raise ValueError(f"it is no account: {wrong}")
        if not _bounded(value):
            raise ValueError("it is no account: one of its numbers is none that a step has")
        given: dict[str, Any] = {entry.name: value.get(entry.name) for entry in dataclasses.fields(TimeBreakdown)}
        given["last"] = {axis: (last, compared) for axis, (last, compared) in value["last"].items()}
        given["kernels"] = tuple(
            KernelTotal(**{entry.name: kernel.get(entry.name) for entry in dataclasses.fields(KernelTotal)})
            for kernel in value["kernels"]
        )
        return TimeBreakdown(**given)


_NUMBER = (int, float)
_SHAPE = {
    "rank": int,
    "step": int,
    "place": {str: int},
    "device": str,
    "seconds": _NUMBER,
    "terms": {str: _NUMBER},
    "hidden": {str: _NUMBER},
    "last": {str: [int]},
    "launches": int,
    "launch_delay": (int, float, type(None)),
    "kernel_seconds": (int, float, type(None)),
    "synchronisations": int,
    "kernels": [
        {
            "name": str,
            "kind": str,
            "calls": int,
            "seconds": _NUMBER,
            "flops": (int, float, type(None)),
            "bytes": (int, float, type(None)),
        }
    ],
}


def _bounded(value: Any) -> bool:
    """Whether all numbers in a value can be added up and divided."""
    if isinstance(value, (dict, list)):
        return all(map(_bounded, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, (int, float)) or abs(value) < LARGEST


def is_term(name: str) -> bool:
    """Whether `name` is a term of accounts, or an axis."""
    first, _, rest = name.partition("/")
    if first == "communication":
        axis, _, part = rest.partition("/")
        return axis in AXES and part in ("transfer", "waiting")
    return name in TERMS or name in AXES


def read_breakdowns(run: str | Path) -> list[TimeBreakdown]:
    """All accounts of a run, oldest first; none where no step has been profiled yet. Raises `Malformed` for a damaged
    file, and `ConfigError` where it cannot be read. A last line without a line end is skipped: a run in progress leaves
    one."""
    path, accounts = Path(run) / ACCOUNTS, list[TimeBreakdown]()
    try:
        for number, text in enumerate(read_lines(path), 1):
            try:
                accounts.append(TimeBreakdown.loads(text))
            except ValueError as error:
                raise Malformed(
                    f"{path}, line {number}: {shorten_foreign(error)}; the file is damaged, take it away"
                ) from None
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{run}: cannot read {path} ({error.strerror}); give a run folder like runs/NAME") from None
    return accounts


def newest_breakdowns(accounts: Sequence[TimeBreakdown]) -> list[TimeBreakdown]:
    """Those of the step that was profiled last, in order of rank."""
    last = {account.rank: account for account in accounts if account.step == accounts[-1].step}
    return [last[rank] for rank in sorted(last)]


def cost_share(accounts: Sequence[TimeBreakdown], cost: Callable[[TimeBreakdown], float]) -> float:
    """What a cost is of the step, 0 to 1: its seconds on all ranks over those that the step took on all of them. The
    one definition for findings, tables and metrics."""
    whole = math.fsum(account.seconds for account in accounts)
    return math.fsum(map(cost, accounts)) / whole if whole else 0.0


def breakdown_metrics(accounts: Sequence[TimeBreakdown]) -> dict[str, float]:
    """What a line of metrics says of a step's accounts (`observe/metrics.py`)."""
    delays = [account.launch_delay for account in accounts if account.launch_delay is not None]
    axes = [axis for axis in AXES if any(account.spent(f"communication/{axis}") for account in accounts)]
    shares = {f"exposed/{axis}": f"communication/{axis}" for axis in axes}
    shares |= {"host": "host", "bubble_imbalance": "bubble/imbalance"}
    found = {name: cost_share(accounts, methodcaller("spent", term)) for name, term in shares.items()}
    return {"profiled_step": accounts[0].step, **found, **({"launch_delay": median(delays)} if delays else {})}
