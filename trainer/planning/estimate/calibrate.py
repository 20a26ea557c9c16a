"""A machine as data, from what was measured of it: the constants of `HardwareConfig` with which the time model of
`rates.py` and `timing.py` gives the measured times."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log, sqrt

from trainer.config import Config, ConfigError
from trainer.config.hardware import AchievedConfig, HardwareConfig, LinkConfig
from trainer.config.model import runs_foreign_code
from trainer.config.schema import ActivationConfig, BatchConfig, ParallelConfig
from trainer.parallel.context.plan import KERNELS
from trainer.planning.estimate.timing import time_units
from trainer.planning.hardware import peak_flops, product_type
from trainer.planning.resolve import Layout, resolve_layout
from trainer.planning.states import ELEMENT_BYTES

LEAST_BAND = 0.05
"""Parts of a step that are predicted exactly do not make the whole exact."""

LARGE = 2**20
"""Bytes of a transfer that counts in the band: small ones take little of a step."""

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "point to point")


@dataclass(frozen=True)
class MeasuredGEMM:
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
class MeasuredPass:
    """Seconds of a forward and a backward pass of `sequences` sequences of `length` tokens through the model, cut to
    `depth` layers."""

    depth: int
    length: int
    sequences: int
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class MeasuredWork:
    """An amount of work (FLOPs or bytes) and the seconds that it took."""

    amount: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds


@dataclass(frozen=True)
class MeasuredCollective:
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
class DeviceMeasurements:
    """What was measured. memory, fixed: bytes; devices: processes of a node, or GPUs that it has; products: of the
    model's own matrices, sweep: square ones; attention: forward and backward, by kernel; passes: of one shape, through
    few layers and, if the model has them, through more; stream, update, copy: bytes of kernels that only move them, of
    the optimizer's update, of casts into and out of flat buffers; kernel, launch: seconds; hidden: as in
    `AchievedConfig`, None without other ranks; signal: seconds of a call by copies beside its bytes, None where none
    was measured; float8: a large product in fp8, None without any."""

    device: str
    memory: float
    fixed: float
    devices: int
    products: Sequence[MeasuredGEMM]
    sweep: Sequence[MeasuredGEMM]
    attention: Mapping[str, MeasuredWork]
    passes: Sequence[MeasuredPass]
    stream: MeasuredWork
    update: MeasuredWork
    copy: MeasuredWork
    kernel: float
    launch: float
    hidden: float | None = None
    signal: float | None = None
    sent: Sequence[MeasuredCollective] = ()
    float8: MeasuredWork | None = None


Error = tuple[str, float, float]
"""What was measured, its seconds, and those predicted."""


@dataclass(frozen=True)
class Calibration:
    """hardware: the constants. kept: settings that are those of another file. errors: of everything that is in the
    band."""

    hardware: HardwareConfig
    kept: tuple[str, ...]
    errors: tuple[Error, ...]


def calibrate_hardware(measured: DeviceMeasurements, config: Config, base: HardwareConfig) -> Calibration:
    """The constants that give the measured times. base: published figures, if it is a file of this kind of device;
    otherwise only what was not measured is taken from it, and peaks are the best that was reached."""
    published = base.device == measured.device != "CPU"
    found = copy.deepcopy(base)
    found.device, found.memory, found.fixed = measured.device, measured.memory / 2**30, measured.fixed / 2**30
    found.devices = measured.devices
    found.kernel, found.launch = measured.kernel * 1e6, measured.launch * 1e6
    found.achieved.hidden = base.achieved.hidden if measured.hidden is None else measured.hidden
    errors = _fit_device(found, measured, config, published)
    if measured.signal is not None:
        found.signal = measured.signal * 1e6
    taken = {"bandwidth": published, "achieved.hidden": measured.hidden is None}
    taken |= {f"achieved.{name}": name not in measured.attention for name in KERNELS[1:]}
    kept = [name for name, known in (taken | {"signal": measured.signal is None}).items() if known]
    for place, link in (("node", found.node), ("network", found.network)):
        if sent := [one for one in measured.sent if one.place == place]:
            errors += _fill_link(link, sent, published)
        else:
            kept.append(place)
    if measured.float8 is None:
        kept.append("achieved.float8")
    else:
        _fit_float8(found, measured.float8.rate, published)
    squares = [(predicted / seconds - 1) ** 2 for _, seconds, predicted in errors]
    found.band = min(0.95, max(LEAST_BAND, sqrt(sum(squares) / len(squares))))
    return Calibration(found, tuple(kept), tuple(errors))


def _fit_float8(found: HardwareConfig, rate: float, published: bool) -> None:
    """Sets the share that products in fp8 reach, or the peak of a device whose own is not known."""
    reached = found.achieved
    peak = (found.peak.get("fp8", 0.0) * 1e12 or peak_flops(found.device, "fp8")) if published else None
    if peak is None:
        peak = rate / reached.product
        found.peak = found.peak | {"fp8": peak / 1e12}
    reached.float8 = achieved_share(rate, peak * reached.product)


def _fit_device(found: HardwareConfig, measured: DeviceMeasurements, config: Config, published: bool) -> list[Error]:
    """Sets the peaks of a device and the shares of them; returns how far the measured passes are off."""
    kind, element = product_type(config.precision), ELEMENT_BYTES[config.precision.compute]
    peak = (found.peak.get(kind, 0.0) * 1e12 or peak_flops(measured.device, kind)) if published else None
    if peak is None:
        peak = max(one.flops / one.seconds for one in (*measured.products, *measured.sweep))
        found.peak = {kind: peak / 1e12}
    rates = [measured.stream.rate, measured.update.rate, measured.copy.rate]
    # Without a published one, the bandwidth is the best rate, which only the fit tells: caches may hold small passes.
    bandwidth = found.bandwidth * 1e9 if published else 100 * max(rates)
    found.bandwidth, reached = bandwidth / 1e9, found.achieved
    reached.memory, reached.optimizer, reached.copy = (achieved_share(rate, bandwidth) for rate in rates)
    cuts = [truncate_model(config, one.depth, one.length, one.sequences) for one in measured.passes]
    depth = config.model.depth

    def products(part: float) -> float:
        reached.product = part
        seconds = (
            hypot(one.flops / (part * peak), element * one.elements / (reached.memory * bandwidth)) + measured.kernel
            for one in measured.products
        )
        return sum(one.count * took for one, took in zip(measured.products, seconds))

    def passes(part: float) -> float:
        reached.memory = part
        return scale_to_depth(
            measured.passes, [sum(pass_seconds(small, layout, found)) for small, layout in cuts], depth
        )

    for _ in range(4):  # each depends on the other a little
        solve_share(products, sum(one.count * one.seconds for one in measured.products))
        _fit_attention(reached, measured, peak)
        solve_share(passes, scale_to_depth(measured.passes, [one.seconds for one in measured.passes], depth))
    if not published:
        most = max(reached.memory, *(achieved_share(rate, bandwidth) for rate in rates))
        found.bandwidth *= most
        reached.memory, reached.optimizer, reached.copy = (
            min(1.0, part / most) for part in (reached.memory, reached.optimizer, reached.copy)
        )
    errors = []
    for one_pass, (small, layout) in zip(measured.passes, cuts):
        forward, backward = pass_seconds(small, layout, found)
        what = f"pass of {one_pass.depth} layers"
        errors += [(f"forward {what}", one_pass.forward, forward), (f"backward {what}", one_pass.backward, backward)]
    return errors


def _fit_attention(reached: AchievedConfig, measured: DeviceMeasurements, peak: float) -> None:
    """Sets the share of the peak that attention of whole sequences reaches, and those of it that other kernels do."""
    rates = {
        name: one.amount / max(one.seconds - 2 * measured.kernel, 0.1 * one.seconds)
        for name, one in measured.attention.items()
    }
    reached.attention = achieved_share(rates["attention"], peak) if "attention" in rates else reached.product
    for name in KERNELS[1:]:
        if name in rates:
            setattr(reached, name, max(1e-6, rates[name] / (peak * reached.attention)))


def _fill_link(link: LinkConfig, sent: Sequence[MeasuredCollective], published: bool) -> list[Error]:
    """Sets what was measured of a link: a share of its published bandwidth, or that bandwidth itself. Returns how far
    large transfers are off."""
    latency, bandwidth = fit_link(sent)
    link.latency = latency * 1e6
    if published and bandwidth <= link.bandwidth * 1e9:
        link.achieved = bandwidth / (link.bandwidth * 1e9)
    else:
        link.bandwidth, link.achieved = bandwidth / 1e9, 1.0
    return [
        (f"{one.axis}: {one.kind} of {one.size >> 20} MiB", one.seconds, one.steps * latency + one.through / bandwidth)
        for one in sent
        if one.size >= LARGE
    ]


def scale_to_depth(passes: Sequence[MeasuredPass], seconds: Sequence[float], depth: int) -> float:
    """Of a pass through all layers, from those of `passes` through some: what a layer takes counts as often as it does
    in a step."""
    if len(seconds) == 1:
        return seconds[0]
    few, many = (one.depth for one in passes)
    return seconds[0] + (depth - few) * max(0.0, seconds[1] - seconds[0]) / (many - few)


def truncate_model(config: Config, depth: int, length: int, sequences: int) -> tuple[Config, Layout]:
    """The recipe's model cut to its first layers, on one process and with nothing computed twice: what a pass
    measures. Raises `ConfigError` for a model that runs by transformers' code, which cannot be cut so."""
    if runs_foreign_code(config.model):
        raise ConfigError(
            f"model.from_hf: model_type={config.model.family} runs by transformers' own code, of which no part can be "
            "timed; give a model of this project, such as model=llama3_8b"
        )
    small = replace(
        config,
        model=replace(config.model, depth=depth, overrides={}),
        parallel=ParallelConfig(),
        batch=BatchConfig(sequence_length=length, micro_size=sequences, accumulation=1),
        activation=ActivationConfig(tile=0, offload=False),
        data=replace(config.data, mask_documents=False),
        loss=replace(config.loss, tile=config.loss.tile or 0),
    )
    return small, resolve_layout(small, 1, small.model, 1)


def pass_seconds(config: Config, layout: Layout, hardware: HardwareConfig) -> tuple[float, float]:
    """What the time model says of a forward and of a backward pass."""
    units = time_units(config, layout, hardware).units
    forward = sum(sum(unit.forward.values()) for unit in units)
    return forward, sum(sum(unit.input.values()) + sum(unit.weight.values()) for unit in units)


def achieved_share(rate: float, peak: float) -> float:
    return min(1.0, max(1e-6, rate / peak))


def solve_share(seconds: Callable[[float], float], target: float) -> None:
    """Calls falling `seconds` last with the share at which they are `target`, or an end of what is legal."""
    low, high = log(1e-6), 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(exp(middle)) > target else (low, middle)
    seconds(exp(high))


def fit_link(sent: Iterable[MeasuredCollective]) -> tuple[float, float]:
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
    if slope <= 0:  # every size takes the same time: the bandwidth is far above what they show
        latency, slope = a / aa, 0.05 * min(1 / one[1] for one in rows if one[1] > 0)
    return latency, 1 / slope
