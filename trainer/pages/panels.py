"""Which curves are drawn together, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trainer.observe.metrics import METRICS, many


@dataclass(frozen=True)
class Panel:
    """A picture of curves. group: the heading that it stands under, if any. names: of metrics; one that ends in /NAME
    stands for all of its family. zero: whether the picture begins at zero."""

    group: str
    title: str
    unit: str
    names: tuple[str, ...]
    zero: bool = True


PANELS = (
    Panel("", "loss", "nats per token", ("loss", "eval_loss"), False),
    Panel("", "loss by source", "nats per token", ("loss/NAME",), False),
    Panel("", "evaluation loss by set", "nats per token", ("eval_loss/NAME",), False),
    Panel("", "terms of the loss", "mean per token", ("term/NAME",), False),
    Panel("", "gradient norm", "before clipping", ("grad_norm",)),
    Panel("", "learning rate", "", ("lr",)),
    Panel("", "throughput", "tokens per second, all ranks", ("tokens_per_second",)),
    Panel("", "step time", "seconds", ("step_seconds", "step_seconds_p50", "step_seconds_p95")),
    Panel("", "model FLOP utilisation", "share of the peak", ("mfu", "mfu_full")),
    Panel("", "waiting for data", "seconds a step", ("data_seconds",)),
    Panel("", "evaluating and saving", "seconds a step", ("evaluation_seconds", "checkpoint_seconds")),
    Panel("", "bubble", "share of the step", ("bubble", "bubble_imbalance")),
    Panel("", "exposed communication", "share of a profiled step", ("exposed/NAME",)),
    Panel("", "late host", "share of a profiled step", ("host",)),
    Panel("", "launch delay", "seconds", ("launch_delay",)),
    Panel("", "slowest rank", "multiple of the median", ("straggler",)),
    Panel("", "memory", "GiB, fullest rank", ("memory_gib",)),
    Panel("", "gradient traffic", "bytes a rank and step", ("comm/bytes_inner", "comm/bytes_outer")),
    Panel("", "loss scale", "", ("loss_scale",), False),
    Panel("", "steps without an update", "so far", ("skipped",)),
    Panel("", "steps run again", "so far", ("repeated",)),
    Panel("", "damaged rows", "left out so far", ("damaged",)),
    Panel("hardware", "utilisation", "share", ("hardware/sm", "hardware/tensor", "hardware/dram")),
    Panel("hardware", "links", "GB/s a GPU", ("hardware/nvlink_gb_s", "hardware/pcie_gb_s")),
    Panel("hardware", "power", "watts a GPU", ("hardware/power_watts",)),
    Panel("hardware", "clock", "MHz of the slowest GPU", ("hardware/clock_mhz",)),
    Panel("hardware", "temperature", "degrees Celsius of the hottest GPU", ("hardware/temperature",)),
    Panel(
        "hardware",
        "throttle",
        "reasons: 4 power, 32 and 64 heat, 8 and 128 hardware",
        ("hardware/throttle", "hardware/throttle_of_rank"),
    ),
    Panel("hardware", "ranks whose clocks are held down", "number", ("hardware/throttle_ranks",)),
    Panel("hardware", "emptied caches", "of the allocator, so far", ("hardware/alloc_retries",)),
    Panel("hardware", "machine", "share in use", ("hardware/host_cpu", "hardware/host_memory")),
    Panel("hardware", "free disk", "GiB", ("hardware/disk_free_gib",)),
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


def drawn_as(names: Iterable[str], panel: Panel) -> list[str]:
    """Those of `names` that belong into a panel."""
    families = tuple(name.removesuffix("NAME") for name in panel.names if many(name))
    return [name for name in names if name in panel.names or families and name.startswith(families)]


def panels(names: Iterable[str]) -> list[Panel]:
    """The panels of the metrics `names`, with the names that they show; empty ones are left out."""
    left = [name for name in dict.fromkeys(names) if name not in NOT_DRAWN and not name.startswith("targets/")]
    found = []
    for panel in PANELS:
        if shown := drawn_as(left, panel):
            order = {name: place for place, name in enumerate(panel.names)}
            found.append(replace(panel, names=tuple(sorted(shown, key=lambda name: order.get(name, 0)))))
            left = [name for name in left if name not in shown]
    return found + [
        Panel(group_of(name), name.partition("/")[2] or name, meaning(name), (name,), False) for name in left
    ]


def group_of(name: str) -> str:
    """The heading over a metric of no panel: the first part of its name."""
    first, slash, _ = name.partition("/")
    return {"user": "registered metrics"}.get(first, first) if slash else "others"


def meaning(name: str) -> str:
    """What METRICS says of a metric, where it knows it."""
    family = f"{name.partition('/')[0]}/NAME"
    return METRICS.get(name, "" if name.startswith("user/") else METRICS.get(family, ""))
