"""What may bound a run, and how each is told: the table of rules, and their thresholds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.fields import option
from trainer.diagnosis.evidence import RunEvidence
from trainer.diagnosis.time_breakdown import (
    AXES,
    COMPILER,
    HARDWARE,
    LONGEST_STEP,
    MODEL,
    PLAN,
    RUNTIME,
    STEADILY,
    StepProfile,
    TimeBreakdown,
    busy_seconds,
    compute_seconds,
    find_straggler,
    logged_ratios,
    peer_ratios,
    transfer_seconds,
)
from trainer.planning.decide import SHARE
from trainer.planning.layer import UNFUSED
from trainer.util.tables import format_duration, format_number, format_percent

# The numbers of the rules by which a diagnosis is made, in one place.


@dataclass(frozen=True)
class Thresholds:
    """From which share of the step on a cost is said to bound the run, and other numbers of the rules."""

    data: float = option(0.05, "waiting for the batch, of the step")
    straggler: float = option(0.05, "what the step would win if the slow rank were as fast as its peers")
    slower: float = option(1.10, "a slow rank's own work, as a multiple of the lower median of ranks with equal work")
    steadily: float = option(STEADILY, "share of the profiled steps in which that rank is the slowest of its peers")
    turns: float = option(0.20, "waiting that even the rank has which waits least: ranks are late in turns")
    host: float = option(0.10, "a device without work because of its host, of the step")
    host_on_cpus: float = option(0.25, "the same of CPUs, which have no queue: all between two operators is the host's")
    communication: float = option(0.15, "transfers that nothing hides, without waiting for peers, of the step")
    bubble: float = option(0.10, "waiting of pipeline ranks for each other, of the step")
    checkpoint: float = option(0.05, "saving, of the step on average")
    evaluation: float = option(0.10, "evaluating, of the step on average")
    full: float = option(SHARE, "memory at the peak, of a device's or of a machine's")
    recompute: float = option(0.15, "recompute and copies to host memory, of the computation")
    memory_bound: float = option(0.35, "kernels that the memory's bandwidth bounds, of the computation")
    compute: float = option(0.60, "matrix products and attention, of the step")
    spoken_of: float = option(0.01, "any cost, of the step: what is below is not spoken of")


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class RunCost:
    """What a run pays. kind: of `RULES`; detail: which axis, part or rank; layer: of `LAYERS`; title: for people.
    share: of the step; without: seconds of the step if it were not there; avoidable: share of the step that another
    setting or machine could win; bounds: whether it is above its limit."""

    kind: str
    detail: str
    layer: str
    title: str
    share: float
    without: float
    avoidable: float
    bounds: bool
    evidence: tuple[str, ...] = ()


Rule = Callable[[StepProfile, RunEvidence], RunCost | None]


def find_costs(profile: StepProfile, evidence: RunEvidence, rules: Sequence[Rule]) -> list[RunCost]:
    """Everything that the rules find in a profile: first what bounds the run, then what takes most of the step.

    Of what is above its limit, that comes first of which most can be won; where nothing can, memory that is full, then
    what the computation is bound by. Costs that are not worth a word are left out."""
    found = [cost for rule in rules if (cost := rule(profile, evidence)) is not None]

    def rank(cost: RunCost) -> tuple[float, int]:
        return -cost.avoidable, LAST.index(cost.kind) if cost.kind in LAST else -1

    bounding = [cost for cost in found if cost.bounds]
    computing = [cost for cost in found if cost.kind in LAST[1:]]
    first = min(bounding, key=rank) if bounding else max(computing, key=lambda cost: cost.share, default=None)
    rest = [cost for cost in found if cost is not first and (cost.bounds or cost.share >= THRESHOLDS.spoken_of)]
    return [*([first] if first else []), *sorted(rest, key=lambda cost: -cost.share)]


COMPUTATION = ("products", "attention", "memory_bound", "recompute", "optimizer")
"""Terms in which a rank computes, whatever it is."""

LAST = ("memory capacity", "memory bandwidth", "compute")
"""Kinds of which little can be won, in the order in which they bound a run where no overhead does."""


def data_costs(profile: StepProfile, evidence: RunEvidence) -> RunCost | None:
    share, most = profile.share("data"), max(profile.ranks, key=lambda account: account.spent("data"))
    where = f"rank {most.rank}" if profile.single else "the slowest rank"
    said = [f"a step waits {format_duration(most.spent('data'))} for its batch on {where}"]
    if share and most.spent("data") > 2 * statistics.median(account.spent("data") for account in profile.ranks):
        said.append(f"mostly rank {most.rank}: look at its machine's file system")
    title = "waiting for data"
    return _cost("data", "", RUNTIME, title, profile, profile.without("data"), THRESHOLDS.data, said, share)


def straggler_costs(profile: StepProfile, evidence: RunEvidence) -> RunCost | None:
    """A rank whose own work takes longer than that of its peers, in most steps; or ranks that are late in turns."""

    def lost(account: TimeBreakdown) -> float:
        return max(0.0, compute_seconds(account) - statistics.median_low(map(compute_seconds, profile.peers(account))))

    steps = [
        peer_ratios(
            {one.rank: compute_seconds(one) for one in accounts}, {one.rank: one.place.get("pp") for one in accounts}
        )
        for accounts in profile.single.values()
    ] or logged_ratios(evidence.records[-RECENT:])
    slow = find_straggler(steps)
    if slow is not None and slow.is_slow(THRESHOLDS.slower):
        often = f"the slowest in {slow.steadily:.0%} of {len(steps)}"
        if profile.single:
            without, joined = profile.without(lost), next(one.last for one in profile.ranks if one.rank == slow.rank)
            said = [
                f"rank {slow.rank} computes {slow.ratio:.2f} times as long as its peers' median, and is {often} "
                "profiled steps"
            ]
            said += [
                f"it is the last to join {last} of {compared} collectives ({axis})"
                for axis, (last, compared) in joined.items()
                if compared and last / compared >= THRESHOLDS.steadily
            ]
        else:
            without = profile.seconds / slow.ratio
            said = [
                f"rank {slow.rank} is {often} logged steps; its forward passes take {slow.ratio:.2f} times its peers' "
                "median (straggler), which the rest of its step is taken to do as well"
            ]
        clocks, share = throttle_reason(evidence, slow.rank), 1 - without / profile.seconds
        title = f"{evidence.machine.named(slow.rank)} is slow, and the others wait for it"
        layer, bounds = HARDWARE if clocks else RUNTIME, share >= THRESHOLDS.straggler
        detail = f"rank {slow.rank}"
        return RunCost("straggler", detail, layer, title, share, without, share, bounds, (*said, *clocks))
    least = min(account.waiting for account in profile.ranks)
    said = [f"every rank waits at least {format_duration(least)} for others in a step, and none is always the last"]
    title = "ranks are late in turns"
    return _cost("straggler", "in turns", RUNTIME, title, profile, profile.seconds - least, THRESHOLDS.turns, said)


CLOCK, CLOCK_RANK = "hardware/clock_mhz", "hardware/clock_rank"
"""Metrics: the least clock of all ranks, and whose it is."""


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


def host_costs(profile: StepProfile, evidence: RunEvidence) -> RunCost | None:
    """What the host costs all ranks; what it costs one alone is a straggler's."""

    def common(account: TimeBreakdown) -> float:
        peers = [peer.spent("host") for peer in profile.peers(account)]
        return min(account.spent("host"), statistics.median_low(peers))

    parts = {part: profile.share(f"host/{part}") for part in ("launch", "synchronisation", "collector")}
    part = max(parts, key=lambda name: parts[name])
    first = profile.ranks[0]
    said = [
        "the device has nothing to do: "
        + ", ".join(f"{format_percent(share)} {WORDS[name]}" for name, share in parts.items() if share >= 0.001)
    ]
    if first.launches:
        shortest = f" of {1e6 * first.kernel_seconds:.0f} us (median)" if first.kernel_seconds else ""
        said.append(f"{format_number(first.launches, 'kernel')}{shortest} a step")
    if first.synchronisations:
        said.append(f"{format_number(first.synchronisations, 'synchronisation')} of host and device a step")
    if (busy := evidence.values("hardware/host_cpu")) and (most := statistics.median(busy[-20:])) >= BUSY:
        said.append(f"{most:.0%} of a machine's processors are busy: look for other programs there")
    layer = COMPILER if part == "launch" else RUNTIME
    limit = THRESHOLDS.host_on_cpus if evidence.machine.device == "CPU" else THRESHOLDS.host
    title = {"launch": "the host is too slow for the device", "synchronisation": "the host waits for the device"}
    text = title.get(part, "Python's garbage collector")
    return _cost("host", part, layer, text, profile, profile.without(common), limit, said, profile.share(common))


BUSY = 0.9
"""Share of a machine's processors in use from which on the host's slowness may be due to other programs."""

WORDS = {
    "launch": "before a launch",
    "synchronisation": "behind a synchronisation",
    "collector": "in Python's garbage collector",
}


def communication_costs(profile: StepProfile, evidence: RunEvidence) -> RunCost | None:
    shares = {axis: profile.share(f"communication/{axis}/transfer") for axis in AXES}
    axis, hidden = (
        max(shares, key=lambda name: shares[name]),
        profile.mean(lambda account: sum(account.hidden.values())),
    )
    parts = [f"{name} {format_percent(share)}" for name, share in shares.items() if share >= 0.001]
    said = [f"transfers that nothing hides: {', '.join(parts)} of the step; {format_duration(hidden)} are hidden"]
    waiting = profile.share(lambda account: account.waiting)
    said.append(f"waiting for peers is apart from it: {format_percent(waiting)}")

    title = f"communication of the {axis} axis ({AXES[axis]})"
    without = profile.without(transfer_seconds)
    share = profile.share(transfer_seconds)
    return _cost("communication", axis, PLAN, title, profile, without, THRESHOLDS.communication, said, share)


def bubble_costs(profile: StepProfile, evidence: RunEvidence) -> RunCost | None:
    """A pipeline's waiting, by whether other stages would mend it, or another schedule."""
    schedule, imbalance = profile.share("bubble/schedule"), profile.share("bubble/imbalance")
    share, part = schedule + imbalance, "imbalance" if imbalance > schedule else "schedule"
    said = [
        f"{format_percent(schedule)} is the schedule's own, {format_percent(imbalance)} follows from stages of "
        "unequal cost"
    ]
    if not profile.single:
        told = "by a replay of the schedule (schedule/measured.json), " + said[0]
        said, part = [f"pipeline ranks wait {format_percent(share)} of the step for each other (bubble)"], ""
        if evidence.idle:
            said, part = [*said, told], "imbalance" if imbalance > schedule else "schedule"
    elif part == "imbalance":
        by_stage: dict[int, list[float]] = {}
        for account in profile.ranks:
            by_stage.setdefault(account.place.get("pp", 0), []).append(busy_seconds(account))
        times = ", ".join(
            f"{format_duration(statistics.fmean(values))} in pipeline rank {stage}"
            for stage, values in by_stage.items()
        )
        said.append(f"a step's work takes {times}")
    elif evidence.layout is not None:
        pipeline, batch = evidence.layout.pipeline, evidence.layout.batch
        said.append(
            f"{pipeline.schedule.name} with {format_number(batch.accumulation, 'micro-batch', 'es')} over "
            f"{evidence.layout.plan.pp} ranks"
        )
    without = profile.seconds * (1 - (imbalance if part == "imbalance" else schedule))
    return RunCost("bubble", part, PLAN, BUBBLES[part], share, without, share, share >= THRESHOLDS.bubble, tuple(said))


BUBBLES = {
    "": "the pipeline's bubble",
    "imbalance": "the pipeline's stages are unequal",
    "schedule": "the pipeline's schedule leaves a bubble",
}
"""Titles, by part."""


def pause_costs(term: str, title: str, said: str, limit: float) -> Rule:
    """The rule for a pause of training between steps. said: what takes the time, with its verb."""

    def find_pause(profile: StepProfile, evidence: RunEvidence) -> RunCost | None:
        told = [f"{said} {format_duration(profile.mean(term))} a step on average"]
        return _cost(term, "", RUNTIME, title, profile, profile.without(term), limit, told, profile.share(term))

    return find_pause


checkpoint_costs = pause_costs("checkpoint", "saving checkpoints", "saves stop training for", THRESHOLDS.checkpoint)
evaluation_costs = pause_costs("evaluation", "evaluating", "evaluations take", THRESHOLDS.evaluation)


def memory_capacity(profile: StepProfile, evidence: RunEvidence) -> RunCost | None:
    """Memory that is all but full, or recompute and copies to host memory that lack of it costs."""
    said, full = memory_remark(evidence)
    again, kernels = profile.share("recompute", "copies"), profile.share(*COMPUTATION)
    if again and kernels:
        said.append(f"recompute and copies to host memory take {format_percent(again)} of the step")
    bounds = full or bool(kernels) and again / kernels >= THRESHOLDS.recompute
    if not said:
        return None
    without = profile.without("recompute", "copies")
    detail, title = "recompute", "recompute, and copies to host memory"
    if full:
        detail, title = "full", "the device's memory is full"
    return RunCost("memory capacity", detail, HARDWARE, title, again, without, 0.0, bounds, tuple(said))


def memory_bandwidth(profile: StepProfile, evidence: RunEvidence) -> RunCost | None:
    """Kernels that wait for memory: norms, activations, losses, and the update. Compiled, they would move a fraction of
    the bytes; of compiled ones, what is more than usual is the model's own choice."""
    kernels, update = profile.share(*COMPUTATION), profile.share("optimizer")
    moved = update + profile.share("memory_bound")
    part, title = "kernels", "element-wise kernels, which move bytes"
    if update > moved / 2:
        part, title = "optimizer", "the update of the weights"
    said = [
        f"kernels that the memory bounds take {format_percent(moved)} of the step ({format_percent(update)} of "
        "it the update), all "
        f"kernels {format_percent(kernels)}"
    ]
    without = profile.without("memory_bound", "optimizer")
    compiled = evidence.config is not None and evidence.config.compile
    layer = MODEL if compiled else COMPILER
    bounds = bool(kernels) and moved / kernels >= THRESHOLDS.memory_bound
    saved = moved - THRESHOLDS.memory_bound * kernels if compiled else (1 - 1 / UNFUSED) * (moved - update)
    return RunCost("memory bandwidth", part, layer, title, moved, without, max(0.0, saved), bounds, tuple(said))


def compute_costs(profile: StepProfile, evidence: RunEvidence) -> RunCost | None:
    """Products and attention: what a run is for. It bounds where nothing else does."""
    share = profile.share("products", "attention")
    said = [
        f"matrix products take {format_percent(profile.share('products'))} of the step, attention "
        f"{format_percent(profile.share('attention'))}"
    ]
    if mfu := evidence.values("mfu"):
        said.append(f"MFU is {format_percent(statistics.median(mfu[-20:]))}")
    without = profile.without("products", "attention")
    title, bounds = "matrix products and attention", share >= THRESHOLDS.compute
    return RunCost("compute", "", MODEL, title, share, without, 0.0, bounds, tuple(said))


RULES: tuple[Rule, ...] = (
    data_costs,
    straggler_costs,
    host_costs,
    communication_costs,
    bubble_costs,
    checkpoint_costs,
    evaluation_costs,
    memory_capacity,
    memory_bandwidth,
    compute_costs,
)
"""Each is one kind of cost. Of two that cost the same the first counts."""


def memory_remark(evidence: RunEvidence) -> tuple[list[str], bool]:
    """What is to be said of the memory that is used at the peak, and whether it is nearly all."""
    said, full, hardware = [], False, evidence.hardware
    if (used := evidence.values("memory_gib")) and hardware is not None:
        peak = max(used)
        said.append(f"the fullest rank has used {peak:.3g} of {hardware.memory:.3g} GiB ({peak / hardware.memory:.0%})")
        full |= peak >= THRESHOLDS.full * hardware.memory
    if (shares := evidence.values("hardware/host_memory")) and max(shares) >= THRESHOLDS.full:
        said.append(f"{max(shares):.0%} of a machine's memory was in use")
        full = True
    if (retries := evidence.values("hardware/alloc_retries")) and retries[-1] > retries[0]:
        said.append(f"the allocator gave its cache back {retries[-1] - retries[0]:.0f} times to find memory")
        full = True
    return said, full


def ran_out(evidence: RunEvidence) -> RunCost:
    """Memory that ended the run."""
    said = [evidence.lacked, *(evidence.shortage.facts if evidence.shortage else []), *memory_remark(evidence)[0]]
    return RunCost("memory capacity", "full", HARDWARE, "memory ran out", 0.0, 0.0, 0.0, True, tuple(said))


def _cost(
    kind: str,
    detail: str,
    layer: str,
    title: str,
    profile: StepProfile,
    without: float,
    limit: float,
    said: list[str],
    share: float | None = None,
) -> RunCost:
    """A cost that bounds the run from a share of the step on. share: what it is of the step; None takes what would be
    won."""
    won = 1 - without / profile.seconds
    share = won if share is None else share
    return RunCost(kind, detail, layer, title, share, without, won, won >= limit, tuple(said))


# The memory of a run over its steps, from its metrics.


POINTS = 200
"""Of a timeline, at most."""


@dataclass(frozen=True)
class MemoryUse:
    """GiB of the fullest rank. timeline: (step, peak so far as the run notes it); peak: the highest; grown: by what
    share of it the peak rose in the second half of the run; capacity: of a device, None where it is not known;
    planned: predicted for the plan, None where it is not."""

    timeline: tuple[tuple[int, float], ...]
    peak: float
    grown: float
    capacity: float | None
    planned: float | None

    @property
    def used(self) -> float | None:
        """Share of the device's memory."""
        return self.peak / self.capacity if self.capacity else None


def summarise_memory(evidence: RunEvidence, planned: float | None) -> MemoryUse | None:
    """None where nothing is known of it. planned: predicted peak in GiB."""
    points = [
        (int(record["step"]), float(record["memory_gib"]))
        for record in evidence.records
        if record.get("memory_gib") is not None
    ]
    if not points:
        return None
    peak = max(used for _, used in points)
    half = [used for _, used in points[: max(1, len(points) // 2)]]
    grown = (peak - max(half)) / peak if peak > 0 and len(points) > 1 else 0.0
    stride = -(-len(points) // POINTS)
    capacity = evidence.hardware.memory if evidence.hardware else None
    return MemoryUse(tuple(points[::stride]), peak, grown, capacity, planned)


# A run whose steps were not profiled: its metrics tell of data, stragglers, the bubble, pauses and memory.


RECENT = 200
"""Lines of metrics that are looked at, the newest."""

METRIC_RULES = data_costs, straggler_costs, bubble_costs, checkpoint_costs, evaluation_costs, memory_capacity
"""Those that metrics are enough for."""


def costs_of_metrics(evidence: RunEvidence, seconds: float) -> list[RunCost]:
    """The costs that metrics show, first what bounds the run. seconds: of an ordinary step."""
    if seconds <= 0:
        return []
    profile = profile_from_metrics(evidence, min(seconds, LONGEST_STEP / 4))
    return find_costs(profile, evidence, METRIC_RULES)


def profile_from_metrics(evidence: RunEvidence, seconds: float) -> StepProfile:
    """The step of one rank that stands for all, as far as metrics tell its terms."""

    def typical(name: str) -> float:
        values = evidence.values(name)[1:][-RECENT:]  # the first step of a start waits for more
        return statistics.median(values) if values else 0.0

    bubble = seconds * min(1.0, max(0.0, typical("bubble")))
    measured = sum(one.measured for one in evidence.idle)
    unequal = sum(max(0.0, one.measured - one.own) for one in evidence.idle) / measured if measured else 0.0
    data = min(seconds - bubble, max(0.0, typical("data_seconds")))
    terms = {"data": data, "bubble/schedule": (1 - unequal) * bubble, "bubble/imbalance": unequal * bubble}
    terms |= {name: min(seconds, _mean_pause(evidence, f"{name}_seconds")) for name in ("checkpoint", "evaluation")}
    terms["other"] = seconds - bubble - data
    account = TimeBreakdown(0, 0, {}, evidence.machine.device, sum(terms.values()), terms)
    return StepProfile((account,), (), (), {}, frozenset())


def _mean_pause(evidence: RunEvidence, name: str) -> float:
    """Seconds a step for which training stands still between steps."""
    lines = evidence.records[-RECENT:]
    weighed = [(line["step"] - last["step"], line.get(name) or 0.0) for last, line in zip(lines, lines[1:])]
    steps = sum(count for count, _ in weighed if count > 0)
    return max(0.0, sum(count * pause for count, pause in weighed if count > 0) / steps) if steps else 0.0
