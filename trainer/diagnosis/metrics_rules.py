"""What metrics alone say of a run whose steps were not profiled: its waiting for data, its stragglers, its bubble, its
memory."""

from __future__ import annotations

import statistics
from collections import Counter

from trainer.diagnosis.evidence import RunEvidence
from trainer.diagnosis.limits import THRESHOLDS
from trainer.diagnosis.rules import BUBBLES, HARDWARE, PLAN, RUNTIME, RunCost, memory_remark, order_costs
from trainer.diagnosis.slow_ranks import throttle_reason
from trainer.util.tables import format_duration, format_percent

RECENT = 200
"""Lines of metrics that are looked at, the newest."""


def costs_of_metrics(evidence: RunEvidence, seconds: float) -> list[RunCost]:
    """The costs that metrics show, first what bounds the run. seconds: of an ordinary step."""
    found = [
        _data(evidence, seconds),
        _straggler(evidence, seconds),
        _bubble(evidence, seconds),
        _pause(evidence, "checkpoint", "saving checkpoints", THRESHOLDS.checkpoint),
        _pause(evidence, "evaluation", "evaluating", THRESHOLDS.evaluation),
        _memory(evidence, seconds),
    ]
    return order_costs([cost for cost in found if cost is not None])


def _recent(evidence: RunEvidence, key: str) -> list[float]:
    return evidence.values(key)[1:][-RECENT:]  # the first step of a start waits for more


def _data(evidence: RunEvidence, seconds: float) -> RunCost | None:
    waits = _recent(evidence, "data_seconds")
    if not waits:
        return None
    wait = min(seconds, statistics.median(waits))
    share = wait / seconds if seconds > 0 else 0.0
    said = (f"of {format_duration(seconds)} a step waits {format_duration(wait)} for its batch on the slowest rank",)
    return RunCost(
        "data", "", RUNTIME, "waiting for data", share, seconds - wait, share, share >= THRESHOLDS.data, said
    )


def _straggler(evidence: RunEvidence, seconds: float) -> RunCost | None:
    """A rank that is named in most lines."""
    lines = [record for record in evidence.records if record.get("straggler") is not None][-RECENT:]
    if len(lines) < 2:
        return None
    rank, count = Counter(int(record["straggler_rank"] or 0) for record in lines).most_common(1)[0]
    ratio = statistics.median(float(record["straggler"]) for record in lines if record["straggler_rank"] == rank)
    steadily = count / len(lines)
    without = seconds / max(1.0, ratio)
    bounds = (
        ratio >= THRESHOLDS.slower and steadily >= THRESHOLDS.steadily and 1 - without / seconds >= THRESHOLDS.straggler
    )
    said = [
        f"rank {rank} is the slowest in {steadily:.0%} of {len(lines)} logged steps; its forward passes take "
        f"{ratio:.2f} times its peers' median (straggler), which the rest of its step is taken to do as well"
    ] + throttle_reason(evidence, rank)
    layer = HARDWARE if len(said) > 1 else RUNTIME
    title = f"{evidence.machine.named(rank)} is slow, and the others wait for it"
    share = 1 - without / seconds if bounds else 0.0
    return RunCost("straggler", f"rank {rank}", layer, title, share, without, share, bounds, tuple(said))


def _bubble(evidence: RunEvidence, seconds: float) -> RunCost | None:
    """What ranks wait for each other, by the replay of the step whose actions were timed."""
    shares = _recent(evidence, "bubble")
    if not shares:
        return None
    share, part = statistics.median(shares), ""
    said = [f"pipeline ranks wait {format_percent(share)} of the step for each other (bubble)"]
    title, lost = "the pipeline's bubble", share
    if idle := evidence.idle:
        total = sum(one.measured for one in idle)
        imbalance = share * sum(max(0.0, one.measured - one.own) for one in idle) / total if total else 0.0
        part = "imbalance" if imbalance > share - imbalance else "schedule"
        title, lost = BUBBLES[part], imbalance if part == "imbalance" else share - imbalance
        said.append(
            f"by a replay of the schedule (schedule/measured.json), {format_percent(share - imbalance)} is its own, "
            f"{format_percent(imbalance)} follows from stages of unequal cost"
        )
    return RunCost(
        "bubble", part, PLAN, title, share, seconds * (1 - lost), share, share >= THRESHOLDS.bubble, tuple(said)
    )


def _pause(evidence: RunEvidence, kind: str, title: str, limit: float) -> RunCost | None:
    """What training stands still for between steps, of all time since the first logged one."""
    lines = evidence.records[-RECENT:]
    weighed = [(line["step"] - last["step"], line) for last, line in zip(lines, lines[1:])]
    spent = sum(steps * (line.get(f"{kind}_seconds") or 0.0) for steps, line in weighed if steps > 0)
    if not spent:
        return None
    count = sum(steps for steps, _ in weighed if steps > 0)
    seconds = sum(steps * line["step_seconds"] for steps, line in weighed if steps > 0) / count
    spent /= count
    share = spent / (seconds + spent)
    said = (
        f"training stands still for {format_duration(spent)} a step on average, where a step takes "
        f"{format_duration(seconds)}",
    )
    return RunCost(kind, "", RUNTIME, title, share, seconds, share, share >= limit, said)


def _memory(evidence: RunEvidence, seconds: float) -> RunCost | None:
    said, full = memory_remark(evidence)
    title = "the device's memory is full"
    return RunCost("memory capacity", "full", HARDWARE, title, 0.0, seconds, 0.0, full, tuple(said)) if said else None
