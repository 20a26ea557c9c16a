"""Which curves are drawn together, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trainer.observe.metrics import METRICS, stands_for_many


@dataclass(frozen=True)
class CurvePanel:
    """A picture of curves. group: the heading that it stands under, if any. names: of metrics; one that ends in /NAME
    stands for all of its family. zero: whether the picture begins at zero."""

    group: str
    title: str
    unit: str
    names: tuple[str, ...]
    zero: bool = True


PANELS = (
    CurvePanel("", "loss", "nats per token", ("loss", "eval_loss"), False),
    CurvePanel("", "loss by source", "nats per token", ("loss/NAME",), False),
    CurvePanel("", "evaluation loss by set", "nats per token", ("eval_loss/NAME",), False),
    CurvePanel("", "terms of the loss", "mean per token", ("term/NAME",), False),
    CurvePanel("", "gradient norm", "before clipping", ("grad_norm",)),
    CurvePanel("", "learning rate", "", ("lr",)),
    CurvePanel("", "throughput", "tokens per second, all ranks", ("tokens_per_second",)),
    CurvePanel("", "step time", "seconds", ("step_seconds", "step_seconds_p50", "step_seconds_p95")),
    CurvePanel("", "model FLOP utilisation", "share of the peak", ("mfu", "mfu_full")),
    CurvePanel("", "waiting for data", "seconds a step", ("data_seconds",)),
    CurvePanel("", "evaluating and saving", "seconds a step", ("evaluation_seconds", "checkpoint_seconds")),
    CurvePanel("", "bubble", "share of the step", ("bubble", "bubble_imbalance")),
    CurvePanel("", "exposed communication", "share of a profiled step", ("exposed/NAME",)),
    CurvePanel("", "late host", "share of a profiled step", ("host",)),
    CurvePanel("", "launch delay", "seconds", ("launch_delay",)),
    CurvePanel("", "slowest rank", "multiple of the median", ("straggler",)),
    CurvePanel("", "memory", "GiB, fullest rank", ("memory_gib",)),
    CurvePanel("", "gradient traffic", "bytes a rank and step", ("comm/bytes_inner", "comm/bytes_outer")),
    CurvePanel("", "loss scale", "", ("loss_scale",), False),
    CurvePanel("", "steps without an update", "so far", ("skipped",)),
    CurvePanel("", "steps run again", "so far", ("repeated",)),
    CurvePanel("", "damaged rows", "left out so far", ("damaged",)),
    CurvePanel("hardware", "utilisation", "share", ("hardware/sm", "hardware/tensor", "hardware/dram")),
    CurvePanel("hardware", "links", "GB/s a GPU", ("hardware/nvlink_gb_s", "hardware/pcie_gb_s")),
    CurvePanel("hardware", "power", "watts a GPU", ("hardware/power_watts",)),
    CurvePanel("hardware", "clock", "MHz of the slowest GPU", ("hardware/clock_mhz",)),
    CurvePanel("hardware", "temperature", "degrees Celsius of the hottest GPU", ("hardware/temperature",)),
    CurvePanel(
        "hardware",
        "throttle",
        "reasons: 4 power, 32 and 64 heat, 8 and 128 hardware",
        ("hardware/throttle", "hardware/throttle_of_rank"),
    ),
    CurvePanel("hardware", "ranks whose clocks are held down", "number", ("hardware/throttle_ranks",)),
    CurvePanel("hardware", "emptied caches", "of the allocator, so far", ("hardware/alloc_retries",)),
    CurvePanel("hardware", "machine", "share in use", ("hardware/host_cpu", "hardware/host_memory")),
    CurvePanel("hardware", "free disk", "GiB", ("hardware/disk_free_gib",)),
)
"""Other metrics, such as registered ones, have a panel each, behind these."""

OF_ONE_VALUE = (
    *("loss_scale", "skipped", "repeated", "damaged", "hardware/alloc_retries"),
    *("hardware/throttle", "hardware/throttle_of_rank", "hardware/throttle_ranks"),
)
"""Metrics that say nothing as long as they stay what they were."""

NOT_DRAWN = {
    *("step", "time", "tokens", "epoch", "eta_seconds"),
    *("straggler_rank", "profiled_step", "hardware/clock_rank", "hardware/throttle_rank"),
}


def drawn_as(names: Iterable[str], panel: CurvePanel) -> list[str]:
    """Those of `names` that belong into a panel."""
    families = tuple(name.removesuffix("NAME") for name in panel.names if stands_for_many(name))
    return [name for name in names if name in panel.names or families and name.startswith(families)]


def arrange_panels(names: Iterable[str]) -> list[CurvePanel]:
    """The panels of the metrics `names`, with the names that they show; empty ones are left out."""
    left = [name for name in dict.fromkeys(names) if name not in NOT_DRAWN and not name.startswith("targets/")]
    found = []
    for panel in PANELS:
        if shown := drawn_as(left, panel):
            order = {name: place for place, name in enumerate(panel.names)}
            found.append(replace(panel, names=tuple(sorted(shown, key=lambda name: order.get(name, 0)))))
            left = [name for name in left if name not in shown]
    return found + [
        CurvePanel(group_of(name), name.partition("/")[2] or name, metric_meaning(name), (name,), False)
        for name in left
    ]


def group_of(name: str) -> str:
    """The heading over a metric of no panel: the first part of its name."""
    first, slash, _ = name.partition("/")
    return {"user": "registered metrics"}.get(first, first) if slash else "others"


def metric_meaning(name: str) -> str:
    """What METRICS says of a metric, where it knows it."""
    family = f"{name.partition('/')[0]}/NAME"
    return METRICS.get(name, "" if name.startswith("user/") else METRICS.get(family, ""))
