"""The names of all metrics, and the meter of speed, utilisation and remaining time."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from trainer.config import ConfigError
from trainer.util.lines import METRICS_FILE, read_lines
from trainer.util.reading import parse_json

# One line of metrics.jsonl is one object with these keys: a step line has those of STEP, an evaluation line those of
# EVALUATION. What is unknown, does not apply or is not finite is null. A key that ends in /NAME stands for any number
# of keys.
METRICS: dict[str, str] = {
    "step": "optimizer steps done, this one included",
    "time": "when the line was written, in seconds since 1970",
    "tokens": "tokens trained on since the first step, over all ranks",
    "epoch": "passes over the training data, fractional",
    "epochs/NAME": "the same over one source, where data.sources holds several",
    "loss": "mean loss per valid token of this step's global batch, in nats",
    "loss/NAME": "the same over the tokens of one source, where data.sources holds several",
    "targets/NAME": "valid tokens of that source in this step's global batch",
    "learned": "share of the tokens of this step's global batch that are learned, 0 to 1; the others are prompts, "
    "padding, or begin a masked document",
    "grad_norm": "global L2 norm of the gradient before clipping",
    "lr": "learning rate of this step",
    "tokens_per_second": "tokens per second over all ranks, since the last logged step",
    "mfu": "model FLOP utilisation, 0 to 1: FLOPs with causal attention against the devices' dense peak",
    "mfu_full": "the same counting attention over the full square, as torchtitan does",
    "memory_gib": "peak memory of one rank, the largest over ranks, in GiB: allocated on a GPU, resident on a CPU",
    "step_seconds": "mean time of a step since the last logged one, in seconds",
    "step_seconds_p50": "median time of recent steps without the first after start or resume, in seconds",
    "step_seconds_p95": "95th percentile of the same, in seconds",
    "data_seconds": "mean time that a step waited for its batch since the last logged one, the longest of any rank, in "
    "seconds",
    "evaluation_seconds": "time that training stood still for evaluations and samples, a step on average since the "
    "last logged one, in seconds",
    "checkpoint_seconds": "the same for saves; what is written in the background does not count",
    "eta_seconds": "time left for the remaining steps at the mean pace of recent ones, in seconds",
    "bubble": "share of the schedule's time in which pipeline ranks run no action, 0 to 1: they wait for each other or "
    "for transfers",
    "profiled_step": "the newest step of which there are accounts (logging.profile); the next are means over the ranks "
    "that were profiled",
    "exposed/NAME": "share of that step in communication along an axis that nothing hides, waiting for peers included",
    "host": "share of that step in which a device had nothing to do because of its host",
    "bubble_imbalance": "share of that step in waiting for pipeline ranks beyond what the schedule has with equal "
    "stages",
    "launch_delay": "time from the launch of a kernel to its start in that step, the median, in seconds; null on CPUs",
    "straggler": "time in forward passes of the slowest rank, as a multiple of the median of the ranks with the same "
    "stages",
    "straggler_rank": "that rank",
    "hardware/power_watts": "power of a GPU, mean over ranks",
    "hardware/clock_mhz": "clock of the slowest GPU's multiprocessors",
    "hardware/clock_rank": "the rank of that GPU",
    "hardware/temperature": "of the hottest GPU, in degrees Celsius",
    "hardware/throttle": "why any GPU's clocks are held down: the sum of 4 (power cap), 8 (hardware slowdown), 32 and "
    "64 (heat, seen by software and hardware), 128 (power brake); 0 for none of them",
    "hardware/throttle_rank": "the rank whose clocks are held down; of several one with another reason than the power "
    "cap, and of these the slowest",
    "hardware/throttle_of_rank": "the reasons of that rank",
    "hardware/throttle_ranks": "how many ranks' clocks are held down",
    "hardware/alloc_retries": "how often since the start a GPU's allocator gave its cache back to find memory, the "
    "most of any rank",
    "hardware/host_cpu": "share of a machine's processors that were busy, 0 to 1, the busiest machine's",
    "hardware/host_memory": "share of a machine's memory, or its container's, in use, the fullest machine's",
    "hardware/disk_free_gib": "space left where run.dir lies, in GiB, the least of any machine",
    "comm/bytes_inner": "bytes of gradients that a rank sends in a step within its shard group on a node, the most of "
    "any rank; null without parallel.grad_comm",
    "comm/bytes_outer": "the same between replicas and between nodes",
    "loss_scale": "fp16 loss scale of this step",
    "skipped": "steps so far whose update was skipped: the loss or a gradient was not finite, or no token was learned",
    "repeated": "steps since this start that were not finite and were run again, to tell a hardware fault from data",
    "damaged": "rows of the training data that were left out as damaged; null without data.on_error=skip, and with a "
    "stream",
    "term/NAME": "mean per valid token of a registered term of the loss (loss.terms), which `loss` does not contain",
    "experts/overflow": "share of the choices of experts for which a rank had no room (parallel.ep_capacity), before "
    "the step was run again",
    "experts/fullest": "tokens of a layer's fullest expert as a multiple of the mean of its experts, the largest of "
    "any layer",
    "experts/fullest_rank": "rows that a rank's experts receive as a multiple of the mean of its parallel.ep group, "
    "the largest of any layer and rank; null without parallel.ep",
    "experts/idle": "share of a layer's experts without any token in this step, the largest of any layer",
    "experts/entropy": "entropy of the load of a layer's experts over that of equal load, 0 to 1, the smallest of any "
    "layer",
    "experts/balance": "mean per valid token of the balance losses of all layers with their factors, which `loss` does "
    "not contain",
    "experts/z_loss": "the same of the routers' z-losses",
    "experts/bias": "largest less smallest bias of a layer's experts in this step, the largest of any layer",
    "user/NAME": "a registered metric (logging.metrics)",
    "eval_loss": "mean loss per valid token on held-out data, in nats",
    "eval_loss/NAME": "the same on one set of eval.sets, or on what is held out of one source, where there are several",
}
EVALUATION = ("step", "time", "tokens", "eval_loss", "eval_loss/NAME")
STEP = tuple(name for name in METRICS if not name.startswith("eval_loss"))


LARGEST = 1e300
"""Numbers of a metric are below, so that they can be drawn and added."""


class SpeedMeter:
    """Turns finished steps into speed, utilisation, percentiles and remaining time; one per process start.

    `flops_per_token` and `flops_per_token_full` are training FLOPs (forward and backward) with causal and with full
    attention; `peak` is one device's dense FLOP/s or None; `world` the number of devices; percentiles and remaining
    time look at the last `recent` steps. Nothing here touches a device.
    """

    def __init__(
        self,
        total_steps: int,
        flops_per_token: float,
        flops_per_token_full: float,
        peak: float | None,
        world: int,
        recent: int = 200,
    ):
        self.total_steps = total_steps
        self.flops = {"mfu": flops_per_token, "mfu_full": flops_per_token_full}
        self.peak = peak * world if peak else None
        self.step: int | None = None
        self.recent: deque[float] = deque(maxlen=recent)
        self._start_window()

    def _start_window(self) -> None:
        self.steps, self.seconds, self.data_seconds, self.tokens = 0, 0.0, 0.0, 0

    def finished(self, step: int, seconds: float, data_seconds: float, tokens: int) -> None:
        """Counts one finished step: its number, its duration, its wait for data (within the duration), its tokens over
        all ranks."""
        if self.step is not None:  # the first step compiles and allocates, so its time is no measure
            self.recent.append(seconds)
        self.step = step
        self.steps += 1
        self.seconds += seconds
        self.data_seconds += data_seconds
        self.tokens += tokens

    def read(self) -> dict[str, float | None]:
        """The metrics of the steps since the last call; counting then starts anew. Needs at least one finished step."""
        speed = self.tokens / self.seconds if self.seconds > 0 else None
        utilisation = {
            name: flops * speed / self.peak if self.peak and speed is not None else None
            for name, flops in self.flops.items()
        }
        p50, p95 = numpy.percentile(self.recent, [50, 95]).tolist() if self.recent else (None, None)
        pace = sum(self.recent) / len(self.recent) if self.recent else None
        values = {
            "tokens_per_second": speed,
            **utilisation,
            "step_seconds": self.seconds / self.steps,
            "step_seconds_p50": p50,
            "step_seconds_p95": p95,
            "data_seconds": self.data_seconds / self.steps,
            "eta_seconds": None if pace is None else pace * max(self.total_steps - self.step, 0),
        }
        self._start_window()
        return values


def format_line(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """`values` as one line of metrics: every name of `names`, in order; absent and non-finite values are None. What
    belongs to a name that ends in /NAME stands in its place.

    Raises `ValueError` for a name that is not in `names`, or without a step.
    """
    families = {
        name: [key for key in values if key.startswith(name[: -len("NAME")])] for name in names if stands_for_many(name)
    }
    keys = [key for name in names for key in families.get(name, [name])]
    unknown = [name for name in values if name not in keys]
    if unknown or values.get("step") is None:
        raise ValueError(
            f"metrics {unknown} are not in the table of trainer/observe/metrics.py"
            if unknown
            else "a line of metrics needs its step"
        )
    return {name: _plain(values.get(name)) for name in keys}


def stands_for_many(name: str) -> bool:
    """Whether a name of `METRICS` stands for many."""
    return name.endswith("/NAME")


def of_names(record: dict[str, Any], kind: str) -> dict[str, Any]:
    """The values of a line by source or set, of the keys `kind`/NAME."""
    return {key.removeprefix(f"{kind}/"): value for key, value in record.items() if key.startswith(f"{kind}/")}


def _plain(value: Any) -> int | float | None:
    if value is None or isinstance(value, (bool, int)):
        return value
    value = float(value)  # Python floats, NumPy scalars, 0-d tensors
    return value if math.isfinite(value) else None


def parse_line(text: str | bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl as a dictionary; None when it is cut off or is no line of metrics."""
    try:
        record = parse_json(text)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record if all(map(is_number, record.values())) else None


def is_number(value: Any) -> bool:
    """Whether a value may stand in a line: None, or a number that can be drawn."""
    return value is None or isinstance(value, (int, float)) and abs(value) < LARGEST


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """All lines of a run, oldest first; `run` is a run folder or a metrics.jsonl. Raises the errors of
    `iterate_metrics`."""
    return [*iterate_metrics(run)]


def iterate_metrics(run: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a run, oldest first, of which one is held at a time; `run` is a run folder or a metrics.jsonl.

    A last line without a line end is skipped: a crash, or a run in progress, leaves one. Raises `ConfigError` when
    there is no file, no line, or a damaged line elsewhere."""
    path, number = Path(run) / METRICS_FILE if Path(run).is_dir() else Path(run), 0
    try:
        for number, text in enumerate(read_lines(path), 1):
            if (record := parse_line(text)) is None:
                raise ConfigError(f"{path}, line {number}: not a line of metrics; the file is damaged")
            yield {sys.intern(name): value for name, value in record.items()}  # lines that are kept share their names
    except OSError as error:
        raise ConfigError(f"{run}: cannot read {path} ({error.strerror}); give a run folder like runs/NAME") from None
    if not number:
        raise ConfigError(f"{path}: no step has been logged yet")
