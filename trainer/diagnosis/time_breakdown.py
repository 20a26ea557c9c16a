"""The account of a step: where all of its time went on one rank."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, inf, isclose, log, prod, sqrt
from operator import methodcaller
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from trainer.config import ConfigError
from trainer.util.lines import ACCOUNTS, read_lines
from trainer.util.reading import (
    MAYBE_NUMBER,
    NUMBER,
    Malformed,
    find_mismatch,
    parse_json,
    pick_fields,
    shorten_foreign,
)

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
    "experts": "among the ranks that share experts: tokens and their results",
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
        total = fsum(self.terms.values())
        if not isclose(total, self.seconds, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(f"terms of {total} seconds in an account of {self.seconds}")

    def spent(self, *terms: str) -> float:
        """Seconds of terms, each with all below it: `bubble` has `bubble/schedule` and `bubble/imbalance`."""
        return fsum(
            seconds for name, seconds in self.terms.items() for term in terms if f"{name}/".startswith(f"{term}/")
        )

    def share(self, term: str) -> float:
        """The same as a share of the step, 0 to 1."""
        return self.spent(term) / self.seconds if self.seconds else 0.0

    @property
    def waiting(self) -> float:
        """Seconds of waiting for peers in communication, over all axes."""
        return fsum(seconds for name, seconds in self.terms.items() if name.endswith("/waiting"))

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
        given = pick_fields(TimeBreakdown, value)
        given["last"] = {axis: (last, compared) for axis, (last, compared) in value["last"].items()}
        given["kernels"] = tuple(KernelTotal(**pick_fields(KernelTotal, kernel)) for kernel in value["kernels"])
        return TimeBreakdown(**given)


_SHAPE = {
    "rank": int,
    "step": int,
    "place": {str: int},
    "device": str,
    "seconds": NUMBER,
    "terms": {str: NUMBER},
    "hidden": {str: NUMBER},
    "last": {str: [int]},
    "launches": int,
    "launch_delay": MAYBE_NUMBER,
    "kernel_seconds": MAYBE_NUMBER,
    "synchronisations": int,
    "kernels": [
        {"name": str, "kind": str, "calls": int, "seconds": NUMBER, "flops": MAYBE_NUMBER, "bytes": MAYBE_NUMBER}
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


Cost = Callable[[TimeBreakdown], float]
"""Seconds of a rank's step."""


def cost_of(*cost: str | Cost) -> Cost:
    """A cost that is given as terms, or as itself."""
    return cost[0] if callable(cost[0]) else methodcaller("spent", *cost)


def cost_share(accounts: Sequence[TimeBreakdown], *cost: str | Cost) -> float:
    """What a cost is of the step, 0 to 1: its seconds on all ranks over those that the step took on all of them. The
    one definition for findings, tables and metrics."""
    whole = fsum(account.seconds for account in accounts)
    return fsum(map(cost_of(*cost), accounts)) / whole if whole else 0.0


def breakdown_metrics(accounts: Sequence[TimeBreakdown]) -> dict[str, float]:
    """What a line of metrics says of a step's accounts (`observe/metrics.py`)."""
    delays = [account.launch_delay for account in accounts if account.launch_delay is not None]
    axes = [axis for axis in AXES if any(account.spent(f"communication/{axis}") for account in accounts)]
    shares = {f"exposed/{axis}": f"communication/{axis}" for axis in axes}
    shares |= {"host": "host", "bubble_imbalance": "bubble/imbalance"}
    found = {name: cost_share(accounts, term) for name, term in shares.items()}
    return {"profiled_step": accounts[0].step, **found, **({"launch_delay": median(delays)} if delays else {})}


# The typical step of a run: the mean account of each rank, and how long the step would take without a cost.


RECENT = 20
"""Profiled steps that are looked at, the newest."""

UNUSUAL = 1.5
"""A profiled step that took so many times the median is left out: it stalled, compiled, or was disturbed."""

SLOWED = 1.02
"""A profiled step that takes so many times an ordinary one is slowed down by the profiler; less is noise."""

LAUNCH = "host/launch"
"""The term of a device that has nothing to do because nothing was launched."""


@dataclass(frozen=True)
class StepProfile:
    """ranks: the mean account of each, in order of rank, over `steps`; unusual: steps that were left out; single: all
    accounts of `steps`, by step; profiled: all steps that have accounts."""

    ranks: tuple[TimeBreakdown, ...]
    steps: tuple[int, ...]
    unusual: tuple[int, ...]
    single: Mapping[int, tuple[TimeBreakdown, ...]]
    profiled: frozenset[int]

    @property
    def seconds(self) -> float:
        """Of the step, on the rank that took longest."""
        return max(account.seconds for account in self.ranks)

    def mean(self, *cost: str | Cost) -> float:
        """Seconds of a cost, or of terms, as the mean over ranks."""
        return fsum(map(cost_of(*cost), self.ranks)) / len(self.ranks)

    def share(self, *cost: str | Cost) -> float:
        """Of a cost, or of terms with all below them, as a share of the step."""
        return cost_share(self.ranks, *cost)

    def peers(self, account: TimeBreakdown) -> list[TimeBreakdown]:
        """The ranks with the same layers, itself included: they have equal work."""
        return [other for other in self.ranks if other.place.get("pp") == account.place.get("pp")]

    def without(self, *cost: str | Cost) -> float:
        """Seconds of the step if no rank had this cost, which is work of its own: replayed with the cost at zero.

        The rank that then has most work sets the pace. A pipeline's own bubble shrinks with the work; what the slowest
        rank waits today, it goes on waiting."""
        slowest = max(self.ranks, key=busy_seconds)
        left = max(busy_seconds(account) - cost_of(*cost)(account) for account in self.ranks)
        scale = left / busy_seconds(slowest) if busy_seconds(slowest) else 0.0
        return max(0.0, left + slowest.spent("bubble/schedule") * scale + wait_seconds(slowest))


def busy_seconds(account: TimeBreakdown) -> float:
    """Seconds in which a rank does not wait for others."""
    return account.seconds - account.waiting - account.spent("bubble")


def wait_seconds(account: TimeBreakdown) -> float:
    """Seconds in which a rank waits for peers that have more work."""
    return account.waiting + account.spent("bubble/imbalance")


def compute_seconds(account: TimeBreakdown) -> float:
    """Seconds of a rank's own work beside communication and data: equal among peers, unless one is slow."""
    others = account.spent("data", "checkpoint", "evaluation")
    return busy_seconds(account) - transfer_seconds(account) - others


def transfer_seconds(account: TimeBreakdown) -> float:
    """Seconds of communication that nothing hides, without waiting for peers."""
    return account.spent("communication") - account.waiting


def build_profile(accounts: Iterable[TimeBreakdown]) -> StepProfile | None:
    """The typical step of the newest profiled ones; None without any."""
    by_step: dict[int, dict[int, TimeBreakdown]] = {}
    for account in accounts:  # a step that was trained again counts by its last account
        if account.seconds > 0:
            by_step.setdefault(account.step, {})[account.rank] = account
    newest = sorted(by_step)[-RECENT:]
    if not newest:
        return None
    whole = max(len(by_step[step]) for step in newest)
    newest = [step for step in newest if len(by_step[step]) == whole]  # not one that is being written
    seconds = {step: max(account.seconds for account in by_step[step].values()) for step in newest}
    limit = UNUSUAL * statistics.median_low(seconds.values())
    steps = [step for step in newest if seconds[step] <= limit]
    single = {step: tuple(by_step[step][rank] for rank in sorted(by_step[step])) for step in steps}
    ranks = sorted({account.rank for accounts in single.values() for account in accounts})
    means = (
        mean_breakdown([account for some in single.values() for account in some if account.rank == rank])
        for rank in ranks
    )
    unusual = tuple(step for step in newest if step not in steps)
    return StepProfile(tuple(means), tuple(steps), unusual, single, frozenset(by_step))


def ordinary_seconds(steps: Iterable[tuple[int, float]], profile: StepProfile | None) -> float | None:
    """Seconds of an ordinary step: the median of what was logged, given as steps with their seconds. The first of a
    start, which compiles and allocates, is left out where there are others, and so are those that a profiler takes
    longer: it records the step before too, and then writes."""
    logged = list(steps)
    logged = logged[1:] or logged
    disturbed = {step + near for step in profile.profiled for near in (-1, 0, 1)} if profile else set()
    calm = [seconds for step, seconds in logged if step not in disturbed] or [seconds for _, seconds in logged]
    return statistics.median(calm) if calm else None


def scale_profile(profile: StepProfile, seconds: float | None) -> StepProfile:
    """The typical step in a run whose other steps take `seconds`; itself where they take as long, or are not known. A
    profiler slows down the host, and not what a device computes, so that what profiled steps take longer is taken from
    the host's time before launches. On CPUs, where the host computes, all is left as it is."""
    if seconds is None or profile.seconds < SLOWED * seconds:
        return profile
    ranks = []
    for account in profile.ranks:
        launch = account.spent(LAUNCH) if account.device != "cpu" else 0.0
        less = min(launch, max(0.0, account.seconds - seconds))
        terms = {**account.terms, LAUNCH: launch - less}
        ranks.append(replace(account, terms=terms, seconds=fsum(terms.values())) if less else account)
    return replace(profile, ranks=tuple(ranks)) if ranks != list(profile.ranks) else profile


def mean_breakdown(accounts: list[TimeBreakdown]) -> TimeBreakdown:
    """The mean account of a rank. Kernels are those of its last account; counts of collectives are added up."""
    last, count, terms = accounts[-1], len(accounts), mean_terms(accounts)
    hidden = {axis for account in accounts for axis in account.hidden}
    joined = {axis for account in accounts for axis in account.last}
    return TimeBreakdown(
        rank=last.rank,
        step=last.step,
        place=last.place,
        device=last.device,
        seconds=fsum(terms.values()),
        terms=terms,
        hidden={axis: fsum(account.hidden.get(axis, 0.0) for account in accounts) / count for axis in sorted(hidden)},
        last={
            axis: (
                sum(account.last.get(axis, (0, 0))[0] for account in accounts),
                sum(account.last.get(axis, (0, 0))[1] for account in accounts),
            )
            for axis in sorted(joined)
        },
        launches=round(sum(account.launches for account in accounts) / count),
        launch_delay=_median(account.launch_delay for account in accounts),
        kernel_seconds=_median(account.kernel_seconds for account in accounts),
        synchronisations=round(sum(account.synchronisations for account in accounts) / count),
        kernels=last.kernels,
    )


def mean_terms(accounts: Sequence[TimeBreakdown]) -> dict[str, float]:
    """Seconds of each term, the mean over accounts."""
    names = dict.fromkeys(name for account in accounts for name in account.terms)
    return {name: fsum(account.terms.get(name, 0.0) for account in accounts) / len(accounts) for name in names}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# Ranks of a run: which are profiled, where their traces lie, what their process groups are for, and which is slow.


TRACES = "traces"
"""In the folder of a run."""

EVERYONE = 8
"""The most ranks that are all profiled."""

DESCRIBED = {"mesh_cp": "context", "mesh_ep": "experts", "mesh_expert_shard": "data", "mesh_expert_replicate": "data"}
"""Description of groups -> what they communicate for. Their ranks may be those of another group too."""

DATA = ("replicate", "shard")


def trace_of(run: Path, step: int, rank: int) -> Path:
    """The file with the trace of a step on a rank."""
    return run / TRACES / f"step-{step:08d}-rank-{rank:05d}.json"


def rank_coordinates(mesh: Mapping[str, int]) -> list[dict[str, int]]:
    """The coordinates of every rank. mesh: sizes of its dimensions, the fastest last (`Plan.mesh`)."""
    return [dict(zip(mesh, place)) for place in itertools.product(*map(range, mesh.values()))]


def choose_ranks(mesh: Mapping[str, int], slow: int | None = None) -> list[int]:
    """The ranks of which a step is profiled: all of a small world; else the pipelines of two data-parallel ranks, the
    first and that of the rank that has been `slow`, or the last; of the ranks that share matrices, the first and that
    of the slow one."""
    if prod(mesh.values()) <= EVERYONE:
        return list(range(prod(mesh.values())))
    everyone = rank_coordinates(mesh)
    second = everyone[-1 if slow is None else slow]
    data = [tuple(place[name] for name in DATA) for place in (everyone[0], second)]
    others = [name for name in mesh if name not in (*DATA, "pp")]
    inner = [tuple(place[name] for name in others) for place in (everyone[0], second)]
    return [
        rank
        for rank, place in enumerate(everyone)
        if tuple(place[name] for name in DATA) in data and tuple(place[name] for name in others) in inner
    ]


def axis_of(ranks: Sequence[int], mesh: Mapping[str, int], description: str) -> str:
    """What a process group communicates for (`account.AXES`), by the dimensions of the mesh that its ranks differ in.

    Pipelines have communicators of their own, so a group along one only serves sums over all ranks."""
    if description in DESCRIBED:
        return DESCRIBED[description]
    everyone = rank_coordinates(mesh)
    differ = {name for name in mesh if len({everyone[rank][name] for rank in ranks}) > 1}
    if differ == {"tp"}:
        return "tensor"
    return "data" if differ and differ <= set(DATA) else "all"


STEADILY = 0.60
"""Share of the steps in which a straggler is the slowest of its peers."""

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The 97.5% quantile of Student's t for 1, 2, ... degrees of freedom; `MANY` for more."""
MANY = 2.1


class Straggler(NamedTuple):
    """A rank that is the slowest in most steps. ratio: of its time to the lower median of its peers', the median over
    steps; steadily: share of the steps in which it is the slowest; certain: whether the difference is more than that
    among steps."""

    rank: int
    ratio: float
    steadily: float
    certain: bool

    def is_slow(self, factor: float) -> bool:
        """Whether the rank holds up the others: by this factor, steadily, and beyond noise."""
        return self.certain and self.ratio >= factor and self.steadily >= STEADILY


def peer_ratios(seconds: Mapping[int, float], roles: Mapping[int, Hashable]) -> dict[int, float]:
    """The time of each rank in a step over the lower median of the ranks with its role; ranks without a peer are left
    out. Of two ranks the slower one is thereby compared with the other."""
    peers: dict[Hashable, list[float]] = {}
    for rank, time in seconds.items():
        peers.setdefault(roles[rank], []).append(time)
    medians = {role: statistics.median_low(times) for role, times in peers.items() if len(times) > 1}
    return {rank: time / typical for rank, time in seconds.items() if (typical := medians.get(roles[rank], 0.0)) > 0}


def logged_ratios(lines: Iterable[Mapping[str, Any]]) -> list[dict[int, float]]:
    """The ratio of the slowest rank in each line of metrics that names one."""
    return [
        {int(line["straggler_rank"]): float(line["straggler"])}
        for line in lines
        if line.get("straggler") is not None and line.get("straggler_rank") is not None
    ]


def find_straggler(steps: Sequence[Mapping[int, float]]) -> Straggler | None:
    """The rank that is the slowest in most steps; None where no rank has peers. steps: `peer_ratios` of each, at least
    that of the slowest rank."""
    slowest = [max(ratios, key=ratios.__getitem__) for ratios in steps if ratios]
    if not slowest:
        return None
    rank = statistics.mode(slowest)
    ratios = [ratio for step in steps if (ratio := step.get(rank, 0.0)) > 0]
    certain = significance_ratio([log(ratio) for ratio in ratios]) > 1  # logs: what slows a step down slows all of it
    return Straggler(rank, statistics.median(ratios or [0.0]), slowest.count(rank) / len(slowest), certain)


def significance_ratio(differences: Sequence[float]) -> float:
    """The mean of differences over what it has to be to differ from zero with 97.5% certainty; one alone tells
    nothing."""
    if len(differences) < 2:
        return 0.0
    needed = STUDENT[len(differences) - 2] if len(differences) - 2 < len(STUDENT) else MANY
    error = needed * statistics.stdev(differences) / sqrt(len(differences))
    mean = statistics.fmean(differences)
    return mean / error if error > 0 else inf if mean > 0 else 0.0
