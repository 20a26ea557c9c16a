"""A machine as data, from what was measured of it: the constants of `HardwareConfig` with which the time model of
`pace.py` and `timing.py` gives the measured times."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log, sqrt

from trainer.config import Config
from trainer.config.hardware import HardwareConfig, LinkConfig
from trainer.config.schema import ActivationConfig, BatchConfig, ParallelConfig
from trainer.planning.cost.devices import peak_flops, product_type
from trainer.planning.cost.memory import ELEMENT_BYTES
from trainer.planning.estimate.timing import time_units
from trainer.planning.resolve import Layout, resolve

LEAST_BAND = 0.05
"""Parts of a step that are predicted exactly do not make the whole exact."""

LARGE = 2**20
"""Bytes of a transfer that counts in the band: small ones take little of a step."""

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "point to point")


@dataclass(frozen=True)
class Product:
    """A product of [tokens, inputs] with a matrix [outputs, inputs], in seconds; count: how many a step's forward pass
    has of the shape."""

    name: str
    tokens: int
    outputs: int
    inputs: int
    seconds: float
    count: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.outputs * self.inputs

    @property
    def elements(self) -> float:
        """Of both operands and the result."""
        return self.tokens * (self.outputs + self.inputs) + self.outputs * self.inputs


@dataclass(frozen=True)
class Pass:
    """Seconds of a forward and a backward pass of `sequences` sequences of `length` tokens through the model, cut to
    `depth` layers."""

    depth: int
    length: int
    sequences: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Work:
    """An amount of work (FLOPs or bytes) and the seconds that it took."""

    amount: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds


@dataclass(frozen=True)
class Sent:
    """Seconds of a collective over `ranks` ranks whose whole tensor has `size` bytes. axis: whose ranks they are;
    place: the link that it goes over, "node" or "network", and empty where it goes over both."""

    axis: str
    place: str
    kind: str
    ranks: int
    size: int
    seconds: float

    @property
    def steps(self) -> int:
        return {"point to point": 1, "all-reduce": 2 * (self.ranks - 1)}.get(self.kind, self.ranks - 1)

    @property
    def through(self) -> float:
        """Bytes into a device, as a ring sends them."""
        return float(self.size) if self.kind == "point to point" else self.steps * self.size / self.ranks


@dataclass(frozen=True)
class Measurements:
    """What was measured. memory, fixed: bytes; devices: processes of a node, or GPUs that it has; products: of the
    model's own matrices, sweep: square ones; attention: forward and backward; stream, update, copy: bytes of kernels
    that only move them, of the optimizer's update, of casts into and out of flat buffers; kernel, launch: seconds;
    hidden: as in `AchievedConfig`, None without other ranks."""

    device: str
    memory: float
    fixed: float
    devices: int
    products: Sequence[Product]
    sweep: Sequence[Product]
    attention: Work | None
    passes: Sequence[Pass]
    stream: Work
    update: Work
    copy: Work
    kernel: float
    launch: float
    hidden: float | None = None
    sent: Sequence[Sent] = ()


@dataclass(frozen=True)
class Calibration:
    """hardware: the constants. kept: settings that are those of another file. errors: (what, measured seconds,
    predicted seconds) of everything that is in the band."""

    hardware: HardwareConfig
    kept: tuple[str, ...]
    errors: tuple[tuple[str, float, float], ...]


def calibrate(measured: Measurements, config: Config, base: HardwareConfig) -> Calibration:
    """The constants that give the measured times. base: published figures, if it is a file of this kind of device;
    otherwise only what was not measured is taken from it, and peaks are the best that was reached."""
    kind, element = product_type(config.precision), ELEMENT_BYTES[config.precision.compute]
    published = base.device == measured.device != "CPU"
    found = copy.deepcopy(base)
    found.device, found.memory, found.fixed = measured.device, measured.memory / 2**30, measured.fixed / 2**30
    found.devices = measured.devices
    found.kernel, found.launch = measured.kernel * 1e6, measured.launch * 1e6
    kept = ["bandwidth"] if published else []

    best = max(one.flops / one.seconds for one in (*measured.products, *measured.sweep))
    peak = (base.peak.get(kind, 0.0) * 1e12 or peak_flops(measured.device, kind)) if published else None
    if peak is None:
        peak, found.peak = best, {kind: best / 1e12}
    # A rate that no share of the published bandwidth can be is cut to it; without one, the best becomes the bandwidth.
    moved = {"stream": measured.stream.rate, "optimizer": measured.update.rate, "copy": measured.copy.rate}
    found.bandwidth = base.bandwidth if published else 100 * max(moved.values()) / 1e9
    reached = found.achieved
    reached.optimizer, reached.copy = (share(moved[name], found.bandwidth * 1e9) for name in ("optimizer", "copy"))
    reached.memory = share(measured.stream.rate, found.bandwidth * 1e9)
    if measured.hidden is None:
        kept.append("achieved.hidden")
    else:
        reached.hidden = measured.hidden
    layouts = [(one, *cut(config, one.depth, one.length, one.sequences)) for one in measured.passes]

    def products(rate: float) -> float:
        memory = found.bandwidth * 1e9 * reached.memory
        return sum(
            one.count * (hypot(one.flops / (rate * peak), element * one.elements / memory) + measured.kernel)
            for one in measured.products
        )

    def passes(rate: float) -> float:
        reached.memory = rate
        return sum(sum(pass_seconds(*layout, found)) for _, *layout in layouts)

    for _ in range(4):  # each depends on the other a little
        reached.product = solve(products, sum(one.count * one.seconds for one in measured.products))
        if measured.attention is None:
            reached.attention = reached.product
        else:
            seconds = max(measured.attention.seconds - 2 * measured.kernel, 0.1 * measured.attention.seconds)
            reached.attention = share(measured.attention.amount / seconds, peak)
        reached.memory = solve(passes, sum(one.forward + one.backward for one in measured.passes))
    if not published:
        most = max(reached.memory, reached.optimizer, reached.copy, share(moved["stream"], found.bandwidth * 1e9))
        found.bandwidth *= most
        for name in ("memory", "optimizer", "copy"):
            setattr(reached, name, min(1.0, getattr(reached, name) / most))

    errors = []
    for one, *layout in layouts:
        said = pass_seconds(*layout, found)
        for name, seconds, predicted in zip(("forward", "backward"), (one.forward, one.backward), said):
            errors.append((f"{name} pass of {one.depth} layers", seconds, predicted))
    for place, link in (("node", found.node), ("network", found.network)):
        sent = [one for one in measured.sent if one.place == place]
        if not sent:
            kept.append(place)
            continue
        latency, bandwidth = fit_link(sent)
        fill_link(link, latency, bandwidth, published)
        for one in sent:
            if one.size >= LARGE:
                what, predicted = f"{one.axis}: {one.kind} of {one.size >> 20} MiB", one.steps * latency
                errors.append((what, one.seconds, predicted + one.through / bandwidth))
    squares = [(said / seconds - 1) ** 2 for _, seconds, said in errors]
    found.band = min(0.95, max(LEAST_BAND, sqrt(sum(squares) / len(squares))))
    return Calibration(found, tuple(kept), tuple(errors))


def cut(config: Config, depth: int, length: int, sequences: int) -> tuple[Config, Layout]:
    """The recipe's model cut to its first layers, on one process and with nothing computed twice: what a pass
    measures."""
    small = replace(
        config,
        model=replace(config.model, depth=depth, overrides={}),
        parallel=ParallelConfig(),
        batch=BatchConfig(sequence_length=length, micro_size=sequences, accumulation=1),
        activation=ActivationConfig(tile=0, offload=False),
        loss=replace(config.loss, tile=config.loss.tile or 0),
    )
    return small, resolve(small, 1, small.model, 1)


def pass_seconds(config: Config, layout: Layout, hardware: HardwareConfig) -> tuple[float, float]:
    """What the time model says of a forward and of a backward pass."""
    units = time_units(config, layout, hardware).units
    forward = sum(sum(unit.forward.values()) for unit in units)
    return forward, sum(sum(unit.input.values()) + sum(unit.weight.values()) for unit in units)


def share(rate: float, peak: float) -> float:
    return min(1.0, max(1e-6, rate / peak))


def solve(seconds: Callable[[float], float], target: float) -> float:
    """The share at which falling `seconds` are `target`; an end of what is legal where none is."""
    low, high = log(1e-6), 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(exp(middle)) > target else (low, middle)
    seconds(exp(high))
    return exp(high)


def fit_link(sent: Iterable[Sent]) -> tuple[float, float]:
    """Latency in seconds and bytes/s of a link: least squares of the relative errors of steps x latency + bytes /
    bandwidth."""
    rows = [(one.steps / one.seconds, one.through / one.seconds) for one in sent]
    aa, ab, bb = (sum(one[i] * one[j] for one in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(one[0] for one in rows), sum(one[1] for one in rows)
    determinant = aa * bb - ab * ab
    latency = slope = -1.0
    if determinant > 0:
        latency, slope = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency < 0:  # as fast as the largest transfers, whatever the small ones take
        latency, slope = 0.0, b / bb
    if slope <= 0:  # every size takes the same time
        latency, slope = a / aa, min(1 / one[1] for one in rows if one[1] > 0)
    return latency, 1 / slope


def fill_link(link: LinkConfig, latency: float, bandwidth: float, published: bool) -> None:
    """Sets what was measured of a link: a share of its published bandwidth, or that bandwidth itself."""
    link.latency = latency * 1e6
    if published and bandwidth <= link.bandwidth * 1e9:
        link.achieved = bandwidth / (link.bandwidth * 1e9)
    else:
        link.bandwidth, link.achieved = bandwidth / 1e9, 1.0
