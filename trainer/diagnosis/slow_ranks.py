"""Ranks that are slower than those with equal work, told from the noise of single steps."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from math import inf, log, sqrt

from trainer.diagnosis.evidence import RunEvidence
from trainer.diagnosis.step_profile import StepProfile, compute_seconds
from trainer.diagnosis.time_breakdown import TimeBreakdown
from trainer.util.tables import format_number

STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The 97.5% quantile of Student's t for 1, 2, ... degrees of freedom; `MANY` for more."""
MANY = 2.1

CLOCK, CLOCK_RANK = "hardware/clock_mhz", "hardware/clock_rank"
"""Metrics: the least clock of all ranks, and whose it is."""


@dataclass(frozen=True)
class SlowRank:
    """The rank that is slowest among its peers. ratio: of its own work to their lower median; certain: whether the
    difference is more than that among steps; steadily: share of the profiled steps in which it is the slowest."""

    account: TimeBreakdown
    ratio: float
    certain: bool
    steadily: float


def find_slowest(profile: StepProfile) -> SlowRank | None:
    """None where no rank has peers."""
    ratios = [(peer_ratio(profile, account), account) for account in profile.ranks if len(profile.peers(account)) > 1]
    if not ratios:
        return None
    most, account = max(ratios, key=lambda pair: pair[0])
    stage = account.place.get("pp")
    logs, steps = [], 0
    for accounts in profile.single.values():
        own = {one.rank: compute_seconds(one) for one in accounts if one.place.get("pp") == stage}
        mine, typical = own[account.rank], statistics.median_low(own.values())
        logs.append(log(mine / typical) if mine > 0 < typical else 0.0)  # what slows a step down slows all of it
        steps += own[account.rank] == max(own.values())
    return SlowRank(account, most, significance_ratio(logs) > 1, steps / len(profile.single))


def significance_ratio(differences: list[float]) -> float:
    """The mean of differences over what it has to be to differ from zero with 97.5% certainty; one alone tells
    nothing."""
    if len(differences) < 2:
        return 0.0
    needed = STUDENT[len(differences) - 2] if len(differences) - 2 < len(STUDENT) else MANY
    error = needed * statistics.stdev(differences) / sqrt(len(differences))
    mean = statistics.fmean(differences)
    return mean / error if error > 0 else inf if mean > 0 else 0.0


def peer_ratio(profile: StepProfile, account: TimeBreakdown) -> float:
    """A rank's own work over the lower median of its peers'."""
    typical = peers_median(profile, account)
    return compute_seconds(account) / typical if typical > 0 else 1.0


def peers_median(profile: StepProfile, account: TimeBreakdown) -> float:
    """The lower median, so that of two ranks the slower one is compared with the other."""
    return statistics.median_low(compute_seconds(peer) for peer in profile.peers(account))


def throttle_reason(evidence: RunEvidence, rank: int) -> list[str]:
    """What the run's hardware metrics say of a rank's clock, where it is the lowest of all, or is held down."""
    held = evidence.held
    why = f"held down by {held.why}" if held and held.rank == rank else ""
    named = Counter(int(value) for value in evidence.values(CLOCK_RANK)[-20:])
    clocks = evidence.values(CLOCK)[-20:]
    if not clocks or not named or named.most_common(1)[0][0] != rank:
        return [f"its clocks are {why}"] if why else []
    if not held and evidence.throttle:  # of metrics that do not say whose
        why = f"held down, of this or another rank: {evidence.throttle}"
    because = f"; clocks are {why}" if why else ""
    return [f"its clock is the lowest of all ranks, {statistics.median(clocks):.0f} MHz{because}"]


def throttle_costs(evidence: RunEvidence, told: str) -> list[str]:
    """That a rank's clocks are held down, where no cost has said so of it. told: what the costs say."""
    held = evidence.held
    if held is None or f"held down by {held.why}" in told:
        return []
    more = f", and those of {format_number(held.ranks - 1, 'other rank')} too" if held.ranks > 1 else ""
    return [f"clocks of {evidence.machine.named(held.rank)} are held down by {held.why}{more}"]
