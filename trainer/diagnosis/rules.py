"""What may bound a run, and how each is told: the table of rules, and their thresholds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from trainer.config.hardware import HardwareConfig
from trainer.diagnosis.account import AXES, Account
from trainer.diagnosis.evidence import Evidence
from trainer.diagnosis.limits import LIMITS
from trainer.diagnosis.slow_ranks import peers_median, slowest, throttled
from trainer.diagnosis.typical import Typical, computed, transfers, work
from trainer.util.tables import duration, number, percent

MODEL, PLAN, RUNTIME, COMPILER, HARDWARE = LAYERS = (
    "model definition",
    "parallelisation",
    "runtime orchestration",
    "compilation",
    "hardware",
)
"""The five layers of a training system, in which what bounds it is to be mended."""


@dataclass(frozen=True)
class Cost:
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


def costs(profile: Typical, evidence: Evidence) -> list[Cost]:
    """Everything that the rules find in a profile: first what bounds the run, then what costs most."""
    return ordered([cost for rule in RULES if (cost := rule(profile, evidence)) is not None])


def ordered(found: list[Cost]) -> list[Cost]:
    """What bounds the run comes first: of what is above its limit, that of which most can be won; where nothing can,
    memory that is full, then what the computation is bound by. Costs that are not worth a word are left out."""

    def rank(cost: Cost) -> tuple[float, int]:
        return -cost.avoidable, LAST.index(cost.kind) if cost.kind in LAST else -1

    bounding = [cost for cost in found if cost.bounds]
    computing = [cost for cost in found if cost.kind in LAST[1:]]
    first = min(bounding, key=rank) if bounding else max(computing, key=lambda cost: cost.share, default=None)
    rest = [cost for cost in found if cost is not first and (cost.bounds or cost.share >= LIMITS.spoken_of)]
    return [*([first] if first else []), *sorted(rest, key=lambda cost: cost.without)]


LAST = ("memory capacity", "memory bandwidth", "compute")
"""Kinds of which little can be won, in the order in which they bound a run where no overhead does."""

Rule = Callable[[Typical, Evidence], Cost | None]


def data(profile: Typical, evidence: Evidence) -> Cost | None:
    share, most = profile.share("data"), max(profile.ranks, key=lambda account: account.spent("data"))
    said = [f"a step waits {duration(most.spent('data'))} for its batch on rank {most.rank}"]
    if share and most.spent("data") > 2 * statistics.median(account.spent("data") for account in profile.ranks):
        said.append(f"mostly rank {most.rank}: look at its machine's file system")
    without = profile.without(lambda account: account.spent("data"))
    return _cost("data", "", RUNTIME, "waiting for data", profile, without, LIMITS.data, said, share)


def straggler(profile: Typical, evidence: Evidence) -> Cost | None:
    """A rank whose own work takes longer than that of its peers, in most steps; or ranks that are late in turns."""
    slow = slowest(profile)
    if slow is not None and slow.certain and slow.ratio >= LIMITS.slower and slow.steadily >= LIMITS.steadily:
        without = profile.without(lambda account: max(0.0, computed(account) - peers_median(profile, account)))
        said = [
            f"rank {slow.account.rank} computes {slow.ratio:.2f} times as long as its peers' median, and is the "
            f"slowest in {slow.steadily:.0%} of the profiled steps"
        ]
        said += [
            f"it is the last to join {last} of {compared} collectives ({axis})"
            for axis, (last, compared) in slow.account.last.items()
            if compared and last / compared >= LIMITS.steadily
        ]
        clocks = throttled(evidence, slow.account.rank)
        said, layer = said + clocks, HARDWARE if clocks else RUNTIME
        title = f"{evidence.machine.named(slow.account.rank)} is slow, and the others wait for it"
        return _cost("straggler", f"rank {slow.account.rank}", layer, title, profile, without, LIMITS.straggler, said)
    least = min(account.waiting for account in profile.ranks)
    said = [f"every rank waits at least {duration(least)} for others in a step, and none is always the last"]
    title = "ranks are late in turns"
    return _cost("straggler", "in turns", RUNTIME, title, profile, profile.seconds - least, LIMITS.turns, said)


def host(profile: Typical, evidence: Evidence) -> Cost | None:
    """What the host costs all ranks; what it costs one alone is a straggler's."""

    def common(account: Account) -> float:
        peers = [peer.spent("host") for peer in profile.peers(account)]
        return min(account.spent("host"), statistics.median_low(peers))

    parts = {part: profile.share(f"host/{part}") for part in ("launch", "synchronisation", "collector")}
    part = max(parts, key=lambda name: parts[name])
    first = profile.ranks[0]
    said = [
        "the device has nothing to do: "
        + ", ".join(f"{percent(share)} {WORDS[name]}" for name, share in parts.items() if share >= 0.001)
    ]
    if first.launches:
        shortest = f" of {1e6 * first.kernel_seconds:.0f} us (median)" if first.kernel_seconds else ""
        said.append(f"{number(first.launches, 'kernel')}{shortest} a step")
    if first.synchronisations:
        said.append(f"{number(first.synchronisations, 'synchronisation')} of host and device a step")
    layer = COMPILER if part == "launch" else RUNTIME
    limit = LIMITS.host_on_cpus if evidence.machine.device == "CPU" else LIMITS.host
    title = {"launch": "the host is too slow for the device", "synchronisation": "the host waits for the device"}
    text = title.get(part, "Python's garbage collector")
    return _cost("host", part, layer, text, profile, profile.without(common), limit, said, profile.share(common))


WORDS = {
    "launch": "before a launch",
    "synchronisation": "behind a synchronisation",
    "collector": "in Python's garbage collector",
}


def communication(profile: Typical, evidence: Evidence) -> Cost | None:
    shares = {axis: profile.share(f"communication/{axis}/transfer") for axis in AXES}
    axis, hidden = (
        max(shares, key=lambda name: shares[name]),
        profile.mean(lambda account: sum(account.hidden.values())),
    )
    parts = [f"{name} {percent(share)}" for name, share in shares.items() if share >= 0.001]
    said = [f"transfers that nothing hides: {', '.join(parts)} of the step; {duration(hidden)} are hidden"]
    waiting = profile.share(lambda account: account.waiting)
    said.append(f"waiting for peers is apart from it: {percent(waiting)}")

    title = f"communication of the {axis} axis ({AXES[axis]})"
    without = profile.without(transfers)
    share = profile.share(transfers)
    return _cost("communication", axis, PLAN, title, profile, without, LIMITS.communication, said, share)


def bubble(profile: Typical, evidence: Evidence) -> Cost | None:
    """A pipeline's waiting, by whether other stages would mend it, or another schedule."""
    schedule, imbalance = profile.share("bubble/schedule"), profile.share("bubble/imbalance")
    share, part = schedule + imbalance, "imbalance" if imbalance > schedule else "schedule"
    said = [f"{percent(schedule)} is the schedule's own, {percent(imbalance)} follows from stages of unequal cost"]
    if part == "imbalance":
        by_stage: dict[int, list[float]] = {}
        for account in profile.ranks:
            by_stage.setdefault(account.place.get("pp", 0), []).append(work(account))
        times = ", ".join(
            f"{duration(statistics.fmean(values))} in pipeline rank {stage}" for stage, values in by_stage.items()
        )
        said.append(f"a step's work takes {times}")
    elif evidence.layout is not None:
        pipeline, batch = evidence.layout.pipeline, evidence.layout.batch
        said.append(
            f"{pipeline.schedule.name} with {number(batch.accumulation, 'micro-batch', 'es')} over "
            f"{evidence.layout.plan.pp} ranks"
        )
    without = profile.seconds * (1 - (imbalance if part == "imbalance" else schedule))
    return Cost("bubble", part, PLAN, BUBBLES[part], share, without, share, share >= LIMITS.bubble, tuple(said))


BUBBLES = {"imbalance": "the pipeline's stages are unequal", "schedule": "the pipeline's schedule leaves a bubble"}
"""Titles, by part."""


def checkpoint(profile: Typical, evidence: Evidence) -> Cost | None:
    without = profile.without(lambda account: account.spent("checkpoint"))
    said = [f"saves stop training for {duration(profile.mean(lambda a: a.spent('checkpoint')))} a step on average"]
    share = profile.share("checkpoint")
    return _cost("checkpoint", "", RUNTIME, "saving checkpoints", profile, without, LIMITS.checkpoint, said, share)


def evaluation(profile: Typical, evidence: Evidence) -> Cost | None:
    without = profile.without(lambda account: account.spent("evaluation"))
    said = [f"evaluations take {duration(profile.mean(lambda a: a.spent('evaluation')))} a step on average"]
    share = profile.share("evaluation")
    return _cost("evaluation", "", RUNTIME, "evaluating", profile, without, LIMITS.evaluation, said, share)


def memory_capacity(profile: Typical, evidence: Evidence) -> Cost | None:
    """Memory that is all but full, or recompute and copies to host memory that lack of it costs."""
    said, full = fullness(evidence)
    again, kernels = profile.share("recompute") + profile.share("copies"), profile.share(_kernels)
    if again and kernels:
        said.append(f"recompute and copies to host memory take {percent(again)} of the step")
    bounds = full or bool(kernels) and again / kernels >= LIMITS.recompute
    if not said:
        return None
    without = profile.without(lambda account: account.spent("recompute") + account.spent("copies"))
    detail = "recompute" if not full else "full"
    title = "the device's memory is full" if full else "recompute, and copies to host memory"
    return Cost("memory capacity", detail, HARDWARE, title, again, without, 0.0, bounds, tuple(said))


def memory_bandwidth(profile: Typical, evidence: Evidence) -> Cost | None:
    """Kernels that wait for memory: norms, activations, losses, and the update. Compiled, they would move a fraction of
    the bytes; of compiled ones, what is more than usual is the model's own choice."""
    kernels, update = profile.share(_kernels), profile.share("optimizer")
    moved = update + profile.share("memory_bound")
    part = "optimizer" if update > moved / 2 else "kernels"
    said = [
        f"kernels that the memory bounds take {percent(moved)} of the step ({percent(update)} of it the update), all "
        f"kernels {percent(kernels)}"
    ]
    if (dram := evidence.values("hardware/dram")) and (tensor := evidence.values("hardware/tensor")):
        said.append(f"device memory is {percent(dram[-1])} busy, tensor cores {percent(tensor[-1])}")
    without = profile.without(lambda account: account.spent("memory_bound") + account.spent("optimizer"))
    compiled = evidence.config is not None and evidence.config.compile
    title = {"optimizer": "the update of the weights", "kernels": "element-wise kernels, which move bytes"}[part]
    layer = MODEL if compiled else COMPILER
    bounds = bool(kernels) and moved / kernels >= LIMITS.memory_bound
    eager = (evidence.hardware or HardwareConfig).eager
    saved = moved - LIMITS.memory_bound * kernels if compiled else (1 - 1 / eager) * (moved - update)
    return Cost("memory bandwidth", part, layer, title, moved, without, max(0.0, saved), bounds, tuple(said))


def compute(profile: Typical, evidence: Evidence) -> Cost | None:
    """Products and attention: what a run is for. It bounds where nothing else does."""
    share = profile.share("products") + profile.share("attention")
    said = [
        f"matrix products take {percent(profile.share('products'))} of the step, attention "
        f"{percent(profile.share('attention'))}"
    ]
    if mfu := evidence.values("mfu"):
        said.append(f"MFU is {percent(statistics.median(mfu[-20:]))}")
    without = profile.without(lambda account: account.spent("products") + account.spent("attention"))
    title, bounds = "matrix products and attention", share >= LIMITS.compute
    return Cost("compute", "", MODEL, title, share, without, 0.0, bounds, tuple(said))


RULES: tuple[Rule, ...] = (
    data,
    straggler,
    host,
    communication,
    bubble,
    checkpoint,
    evaluation,
    memory_capacity,
    memory_bandwidth,
    compute,
)
"""Each is one kind of cost. Of two that cost the same the first counts."""


def _kernels(account: Account) -> float:
    """Seconds in which a rank computes, whatever it is."""
    return sum(account.spent(term) for term in ("products", "attention", "memory_bound", "recompute", "optimizer"))


def fullness(evidence: Evidence) -> tuple[list[str], bool]:
    """What is to be said of the memory that is used at the peak, and whether it is nearly all."""
    said, full, hardware = [], False, evidence.hardware
    if (used := evidence.values("memory_gib")) and hardware is not None:
        peak = max(used)
        said.append(f"the fullest rank has used {peak:.3g} of {hardware.memory:.3g} GiB ({peak / hardware.memory:.0%})")
        full |= peak >= LIMITS.full * hardware.memory
    if (shares := evidence.values("hardware/host_memory")) and max(shares) >= LIMITS.full:
        said.append(f"{max(shares):.0%} of a machine's memory was in use")
        full = True
    if (retries := evidence.values("hardware/alloc_retries")) and retries[-1] > retries[0]:
        said.append(f"the allocator gave its cache back {retries[-1] - retries[0]:.0f} times to find memory")
        full = True
    return said, full


def ran_out(evidence: Evidence) -> Cost:
    """Memory that ended the run."""
    said = [evidence.lacked, *(evidence.shortage.facts if evidence.shortage else []), *fullness(evidence)[0]]
    return Cost("memory capacity", "full", HARDWARE, "memory ran out", 0.0, 0.0, 0.0, True, tuple(said))


def _cost(
    kind: str,
    detail: str,
    layer: str,
    title: str,
    profile: Typical,
    without: float,
    limit: float,
    said: list[str],
    share: float | None = None,
) -> Cost:
    """A cost that bounds the run from a share of the step on. share: what it is of the step; None takes what would be
    won."""
    won = 1 - without / profile.seconds
    share = won if share is None else share
    return Cost(kind, detail, layer, title, share, without, won, won >= limit, tuple(said))
