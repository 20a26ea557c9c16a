"""The typical step of a run: the mean account of each rank, and how long the step would take without a cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import fsum
from operator import methodcaller

from trainer.diagnosis.time_breakdown import TimeBreakdown, cost_share

RECENT = 20
"""Profiled steps that are looked at, the newest."""

UNUSUAL = 1.5
"""A profiled step that took so many times the median is left out: it stalled, compiled, or was disturbed."""

SLOWED = 1.02
"""A profiled step that takes so many times an ordinary one is slowed down by the profiler; less is noise."""

LAUNCH = "host/launch"
"""The term of a device that has nothing to do because nothing was launched."""

Cost = Callable[[TimeBreakdown], float]
"""Seconds of a rank's step."""


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

    def mean(self, cost: Cost) -> float:
        """Seconds of a cost, as the mean over ranks."""
        return fsum(map(cost, self.ranks)) / len(self.ranks)

    def share(self, cost: str | Cost) -> float:
        """Of a cost, or of a term or all below it, as a share of the step."""
        return cost_share(self.ranks, methodcaller("spent", cost) if isinstance(cost, str) else cost)

    def peers(self, account: TimeBreakdown) -> list[TimeBreakdown]:
        """The ranks with the same layers, itself included: they have equal work."""
        return [other for other in self.ranks if other.place.get("pp") == account.place.get("pp")]

    def without(self, cost: Cost) -> float:
        """Seconds of the step if no rank had this cost, which is work of its own: replayed with the cost at zero.

        The rank that then has most work sets the pace. A pipeline's own bubble shrinks with the work; what the slowest
        rank waits today, it goes on waiting."""
        slowest = max(self.ranks, key=busy_seconds)
        left = max(busy_seconds(account) - cost(account) for account in self.ranks)
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
    others = fsum(account.spent(term) for term in ("data", "checkpoint", "evaluation"))
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
    last, count = accounts[-1], len(accounts)
    terms = {name: fsum(account.terms.get(name, 0.0) for account in accounts) / count for name in _names(accounts)}
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


def _names(accounts: list[TimeBreakdown]) -> list[str]:
    return list(dict.fromkeys(name for account in accounts for name in account.terms))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
