"""A measured machine as a hardware file: what is measured in which order, and what the file says of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from trainer.cluster.device import DeviceProbe, Stopwatch
from trainer.config import Config, ConfigError
from trainer.config.hardware import HardwareConfig
from trainer.distributed.copy_engine import CopyEngineGroup, copy_stream
from trainer.distributed.copy_engine import PendingGather as Gathered
from trainer.distributed.mesh import World, join_world, local_device, own_group
from trainer.distributed.symmetric_memory import buffers_of
from trainer.observe.report import device_name
from trainer.parallel.compress.reduction import all_gather, reduce_scatter
from trainer.parallel.parallelize import check_compiler
from trainer.planning.estimate.calibrate import (
    COLLECTIVES,
    Calibration,
    DeviceMeasurements,
    MeasuredCollective,
    MeasuredGEMM,
    calibrate_hardware,
    fit_link,
)
from trainer.planning.estimate.rates import DeviceRates
from trainer.planning.hardware import hardware_text, load_hardware, product_type, shipped_for
from trainer.planning.parameters import float8_settings, without_float8
from trainer.planning.plan import Plan, node_size
from trainer.planning.resolve import Layout
from trainer.precision.products import GEMMRole, check_device, matmul
from trainer.util.machine import host_memory, resident_memory
from trainer.util.tables import format_number

# What collectives reach: by axis of a plan and by size, within a node and between nodes.


SIZES = {"cuda": (2**12, 2**16, 2**20, 2**24, 2**28), "cpu": (2**12, 2**16, 2**20, 2**22)}
"""Bytes of the whole tensor of a collective."""

CALLS, AHEAD = 8, 5e-3
"""Calls by copies that are timed together, and seconds of work before them, in which the host launches them."""


@dataclass(frozen=True)
class LinkAxis:
    """Ranks that send to each other. name: of the axes of the plan that have these groups; place: the link between
    them, empty where it is not one alone; groups: of all ranks; group: this rank's."""

    name: str
    place: str
    groups: list[list[int]]
    group: Any


def list_axes(plan: Plan, world: World, node: int) -> list[LinkAxis]:
    """The ranks of a node; those with the same place on every node; and every axis of the plan with other groups."""
    nodes = world.size // node
    found: dict[str, list[list[int]]] = {
        "node": [[first + place for place in range(node)] for first in range(0, world.size, node)],
        "network": [[place + first for first in range(0, world.size, node)] for place in range(node)],
    }
    found |= {name: plan.groups(name) for name in ("tp", "cp", "shard", "replicate", "pp")}
    names: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, groups in found.items():
        if len(groups[0]) > 1:
            names.setdefault(tuple(sorted(map(tuple, groups))), []).append(name)
    result = []
    for groups, who in names.items():
        spans = {len({rank // node for rank in group}) for group in groups}
        place = "node" if spans == {1} else "network" if spans == {len(groups[0])} and nodes > 1 else ""
        lists = [list(group) for group in groups]
        result.append(LinkAxis(", ".join(who), place, lists, own_group(lists, world.timeout, f"probe {who[0]}")))
    return result


class LinkProbe:
    """Measures collectives. seconds: to measure in, about. All ranks call its methods together."""

    def __init__(self, world: World, axes: Sequence[LinkAxis], seconds: float):
        self.world, self.axes, self.watch = world, axes, Stopwatch(world)
        self.sizes = SIZES[world.device.type]
        self.limit = seconds / max(1, len(axes) * len(COLLECTIVES) * len(self.sizes))

    def measure(self) -> list[MeasuredCollective]:
        """Every collective of every axis by size."""
        return [
            MeasuredCollective(axis.name, axis.place, kind, len(axis.groups[0]), size, self._seconds(axis, kind, size))
            for axis in self.axes
            for kind in COLLECTIVES
            for size in self.sizes
        ]

    def _seconds(self, axis: LinkAxis, kind: str, size: int) -> float:
        return self.watch.seconds(self._collective(axis, kind, size), self.limit)

    def _collective(self, axis: LinkAxis, kind: str, size: int, later: bool = False) -> Callable[[], Any]:
        """A call of a collective whose whole tensor has `size` bytes. later: it returns what is to be waited for."""
        ranks, group = len(axis.groups[0]), axis.group
        part = torch.ones(max(1, size // ranks // 4), device=self.world.device)
        whole = torch.ones(part.numel() * ranks, device=self.world.device)
        if kind == "point to point":
            return self._transfer(axis, whole)
        return {
            "all-gather": lambda: all_gather(whole, part, group=group, async_op=later),
            "reduce-scatter": lambda: reduce_scatter(part, whole, group=group, async_op=later),
            "all-reduce": lambda: dist.all_reduce(whole, group=group, async_op=later),
            "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group, async_op=later),
        }[kind]

    def _transfer(self, axis: LinkAxis, tensor: torch.Tensor) -> Callable[[], Any]:
        """From the first rank of each pair of neighbours to the second; a last one without a neighbour has nothing to
        do."""
        ranks = next(group for group in axis.groups if self.world.rank in group)
        place = ranks.index(self.world.rank)
        if place == len(ranks) - 1 and place % 2 == 0:
            return lambda: None
        if place % 2:
            return lambda: dist.recv(tensor, ranks[place - 1], group=axis.group)
        return lambda: dist.send(tensor, ranks[place + 1], group=axis.group)

    def signal(self, work: Callable[[], Any], seconds: float) -> float | None:
        """Seconds of a call by copies between the processes of a node, beside its bytes: a gather of next to nothing.
        None where a node has one process, or they cannot share memory. work: a computation that takes so many
        `seconds`, behind which a GPU's host can be ahead of its device."""
        axis = next((axis for axis in self.axes if axis.place == "node"), None)
        if axis is None:
            return None
        group, device = axis.group, self.world.device
        everyone = CopyEngineGroup(group.group_name, dist.get_rank(group), dist.get_world_size(group))
        tiny, ahead = torch.ones(64, device=device), max(1, math.ceil(AHEAD / seconds)) * (device.type == "cuda")

        def computing(calls: int) -> None:
            for _ in range(ahead):
                work()
            for _ in range(calls):
                for _ in Gathered("probe", [tiny], everyone).receive_parts():
                    pass
                copy_stream(device).end()

        try:
            both = self.watch.seconds(lambda: computing(CALLS), 10 * self.limit)
        except (ConfigError, RuntimeError):  # of all ranks alike: see `symmetric_memory.run_on_all`
            return None
        buffers_of("probe", group, torch.uint8).free()
        alone = self.watch.seconds(lambda: computing(0), 10 * self.limit) if ahead else 0.0
        return max(0.0, both - alone) / CALLS

    def hidden(self, sent: Sequence[MeasuredCollective], work: Callable[[], Any], seconds: float) -> float:
        """Which share of an all-gather behind computation does not slow it down. work: a computation that takes so many
        `seconds`; both are made about equally long."""
        axis = self.axes[0]
        latency, bandwidth = fit_link([one for one in sent if one.axis == axis.name and one.kind == "all-gather"])
        most = max(self.sizes)
        size = round(min(most, max(2**16, bandwidth * max(seconds, 20 * latency))))
        gather = self._collective(axis, "all-gather", size, later=True)
        limit = 10 * self.limit
        alone = self.watch.seconds(lambda: gather().wait(), limit)
        times = max(1, round(alone / seconds))

        def compute() -> None:
            for _ in range(times):
                work()

        def both() -> None:
            handle = gather()
            compute()
            handle.wait()

        computed, together = self.watch.seconds(compute, limit), self.watch.seconds(both, limit)
        return min(1.0, max(0.0, (computed + alone - together) / min(computed, alone)))


SECONDS = {"cuda": 60.0, "cpu": 15.0}
"""Time to measure in where none is given. What is compiled, and the start of processes, come on top."""


def probe_machine(
    config: Config, layout: Layout, known: HardwareConfig | None, seconds: float, command: str
) -> tuple[str, bool]:
    """Measures the processes' machines at the shapes of a recipe. Returns the text of the hardware file, and whether
    this is the process that is to write it. known: of what is not measured, None for the shipped file of the device;
    seconds: to measure in, 0 for `SECONDS`; command: to be named in the file. All processes call it together. Raises
    `ConfigError` before it measures."""
    device = local_device(config.run)
    check_compiler(config, device)
    check_device(config.precision, device)
    # Of a recipe in fp8 one product is measured; all else is measured without.
    recipe = next(iter(float8_settings(config.precision).values()), "none")
    config = replace(config, precision=without_float8(config.precision))
    known = known or load_hardware(shipped_for(device_name(device)))
    joined = dist.is_initialized()
    world = join_world(layout.plan, device, 600.0)
    torch.set_float32_matmul_precision(config.precision.matmul)
    measured = measure_recipe(config, layout, world, seconds or SECONDS[device.type], recipe)
    found = calibrate_hardware(measured, config, known)
    text = hardware_text(
        found.hardware, list(describe_measurement(measured, found, config, layout, command, known.device))
    )
    if not joined:
        dist.destroy_process_group()
    return text, world.rank == 0


def measure_recipe(config: Config, layout: Layout, world: World, seconds: float, float8: str) -> DeviceMeasurements:
    """Everything that is measured, the shapes of products first. float8: recipe of products in fp8."""
    node, device = node_size(world.size), world.device
    before = resident_memory()
    memory = host_memory() / node
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    one = DeviceProbe(config, layout, world, (0.6 if world.size > 1 else 1.0) * seconds, memory)
    sweep = one.sweep()
    rate = max(product.flops / product.seconds for product in sweep)
    products, kernel = one.products(rate), one.kernel()
    attention, passes = one.attention(rate), one.passes(rate)
    stream, update, copy = one.stream(), one.update(), one.copy()
    launch, hidden, signal, sent = one.launch(kernel), None, None, list[MeasuredCollective]()
    if world.size > 1:
        links = LinkProbe(world, list_axes(layout.plan, world, node), 0.35 * seconds)
        sent = links.measure()
        a, b = one.random(sweep[-1].tokens, sweep[-1].tokens), one.random(sweep[-1].tokens, sweep[-1].tokens)
        hidden = links.hidden(sent, lambda: matmul(a, b, GEMMRole.OUTPUT), sweep[-1].seconds)
        signal = links.signal(lambda: matmul(a, b, GEMMRole.OUTPUT), sweep[-1].seconds)
    return DeviceMeasurements(
        device=device_name(device),
        memory=memory,
        fixed=foreign_bytes(device) if device.type == "cuda" else before,
        devices=torch.cuda.device_count() if device.type == "cuda" else node,
        products=products,
        sweep=sweep,
        attention=attention,
        passes=passes,
        stream=stream,
        update=update,
        copy=copy,
        kernel=kernel,
        launch=launch,
        hidden=hidden,
        signal=signal,
        sent=sent,
        float8=None if float8 == "none" else one.float8(float8, sweep[-1].tokens),
    )


def foreign_bytes(device: torch.device) -> float:
    """Bytes of a GPU's memory that are in use and that torch's allocator does not have."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def describe_measurement(
    measured: DeviceMeasurements, found: Calibration, config: Config, layout: Layout, command: str, base: str
) -> Iterator[str]:
    """What was measured, when and how, a paragraph each."""
    world, peak = layout.plan.world, DeviceRates.of(found.hardware, config.precision).peak

    def shares(products: Sequence[MeasuredGEMM]) -> str:
        reached = ((one, one.flops / one.seconds / peak) for one in products)
        return ", ".join(f"{one.name} {one.outputs} x {one.inputs} {part:.0%}" for one, part in reached)

    yield (
        f"{format_number(world, 'process', 'es')} on {format_number(-(-world // node_size(world)), 'node')}, "
        f"{time.strftime('%Y-%m-%d %H:%M')}, torch {torch.__version__}: trainer probe {command}"
    )
    tokens = max(one.tokens for one in measured.products)
    yield (
        f"Products in {product_type(config.precision)} with up to {tokens} tokens, as shares of "
        f"{peak / 1e12:.4g} TFLOP/s: {shares(measured.products)}"
    )
    yield f"Square products: {shares(measured.sweep)}"
    attended = ", ".join(
        f"{name} {one.rate / 1e12:.4g} TFLOP/s ({format_milliseconds(one.seconds)})"
        for name, one in measured.attention.items()
    )
    yield f"Attention, forward and backward, by kernel: {attended or 'none of the shipped ones'}"
    if measured.signal is not None:
        yield f"A call by copies beside its bytes: {measured.signal * 1e6:.3g} us"
    yield "Measured, and how far the prediction with this file is off: " + "; ".join(
        f"{what} {format_milliseconds(seconds)} {said / seconds - 1:+.0%}"
        for what, seconds, said in found.errors[: 2 * len(measured.passes)]
    )
    for (axis, kind), sent in by_collective(measured.sent).items():
        latency, bandwidth = fit_link(sent)
        times = ", ".join(f"{one.size >> 10} KiB {format_milliseconds(one.seconds)}" for one in sent)
        yield (
            f"{axis}: {kind} over {sent[0].ranks} ranks, {latency * 1e6:.3g} us a step and {bandwidth / 1e9:.3g} GB/s "
            f"({times})"
        )
    if found.kept:
        yield f"Not measured but taken from the figures of {base}: {', '.join(found.kept)}"


def by_collective(sent: Sequence[MeasuredCollective]) -> dict[tuple[str, str], list[MeasuredCollective]]:
    """By axis and kind, in the order in which they were measured."""
    found: dict[tuple[str, str], list[MeasuredCollective]] = {}
    for one in sent:
        found.setdefault((one.axis, one.kind), []).append(one)
    return found


def format_milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
