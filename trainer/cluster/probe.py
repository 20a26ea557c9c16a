"""A measured machine as a hardware file: what is measured in which order, and what the file says of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from trainer.cluster.device import DeviceProbe
from trainer.cluster.links import LinkProbe, list_axes
from trainer.config import Config
from trainer.config.hardware import HardwareConfig
from trainer.distributed.world import World, join_world, local_device
from trainer.observe.report import device_name
from trainer.parallel.parallelize import check_compiler
from trainer.planning.cost.devices import product_type
from trainer.planning.estimate.calibrate import (
    Calibration,
    DeviceMeasurements,
    MeasuredCollective,
    MeasuredGEMM,
    calibrate_hardware,
    fit_link,
)
from trainer.planning.estimate.hardware import hardware_text, load_hardware, shipped_for
from trainer.planning.estimate.pace import DeviceRates
from trainer.planning.float8_settings import float8_settings, without_float8
from trainer.planning.plan import node_size
from trainer.planning.resolve import Layout
from trainer.precision.float8 import check_device
from trainer.precision.products import GEMMRole, matmul
from trainer.util.machine import host_memory, resident_memory
from trainer.util.tables import format_number

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
    world = join_world(layout.plan.mesh, device, 600.0, layout.plan.cp)
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
    attention, (passes, eager) = one.attention(rate), one.passes(rate)
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
        eager=eager,
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
        f"{time.strftime('%Y-%m-%d %H:%M')}, torch {torch.__version__}: python -m trainer.probe {command}"
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
