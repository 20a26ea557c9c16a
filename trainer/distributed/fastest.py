"""Products of tensor-parallel ranks by whichever way is the fastest for their shapes (`parallel.fusion=auto`).

The first call of a shape runs every way a few times, on all ranks of the group in lock-step, and all take what was the
fastest on the slowest rank. What was found is kept in a file by machine and versions, so that the next run takes the
same. To autograd, recompute and the compiler a call is an operator, whichever way it goes.

The products of a layer's backward pass are one call. Where weight gradients are put off, what is left of it stays as it
is under `off`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ConfigError
from trainer.distributed.c10d_internals import groups
from trainer.distributed.chunks import Chunks, outputs
from trainer.distributed.collectives import Started, TensorGroup
from trainer.distributed.copied import Copied
from trainer.distributed.fused import Fused
from trainer.precision.products import Multiply, Role, matmul
from trainer.util.files import write_atomic
from trainer.util.reading import Malformed, read_json

CHUNKS = 2
WARM, BATCHES, RUNS = 3, 3, 5
GAIN = 0.02
"""Of the time of `off`, which another way must save."""


class Table:
    """What a group has measured: milliseconds by call and way. near: whether the ranks are on one node; file: where it
    is kept, '' for nowhere."""

    def __init__(self, group: dist.ProcessGroup, near: bool, file: str):
        self.group, self.file = group, file
        place = group.group_name, dist.get_rank(group), dist.get_world_size(group)
        self.ways: dict[str, TensorGroup] = {"off": TensorGroup(*place), "chunks": Chunks(*place, chunks=CHUNKS)}
        if near:
            self.ways["copy_engine"] = Copied(*place)
        if near and importlib.util.find_spec("triton") is not None:
            self.ways["triton"] = Fused(*place)
        self.times: dict[str, dict[str, float]] = {}
        self.notes: list[str] = []

    def fastest(self, call: str, run: Callable[[TensorGroup], object], device: torch.device) -> TensorGroup:
        """The way for a call, by which `run` makes it. All ranks ask alike."""
        if call not in self.times:
            found = self.known(call, device)
            times = self.measure(run, device) if found is None else found
            self.times[call] = times
            if found is None:
                self.keep(call, device)
            self.notes.append(f"parallel.fusion=auto, {call}: {said(times)}")
        return self.ways[chosen(self.times[call])]

    def measure(self, run: Callable[[TensorGroup], object], device: torch.device) -> dict[str, float]:
        """Milliseconds of the slowest rank by way, of those that run here."""
        ways = [name for name in self.ways if name != "triton" or device.type == "cuda"]
        times = torch.tensor([clocked(run, self.ways[name], device) for name in ways], device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX, self.group)
        return {name: value for name, value in zip(ways, times.tolist()) if math.isfinite(value)}

    def known(self, call: str, device: torch.device) -> dict[str, float] | None:
        """What the file of the group's first rank says of a call."""
        found: list[Any] = [None]
        if dist.get_rank(self.group) == 0:
            times = measured(self.file).get(machine(device), {}).get(call, {})
            found = [times if "off" in times and times.keys() <= self.ways.keys() else None]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def keep(self, call: str, device: torch.device) -> None:
        """Notes a call in the file."""
        if self.file and dist.get_rank(self.group) == 0:
            content = measured(self.file)
            content.setdefault(machine(device), {})[call] = self.times[call]
            Path(self.file).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.file, json.dumps(content, indent=1))


def measured(file: str) -> dict[str, Any]:
    """What a file has, by machine, call and way; nothing of one that cannot be read."""
    try:
        return read_json(file, {str: {str: {str: float}}}, "remove it") if file else {}
    except (OSError, Malformed):
        return {}


def clocked(run: Callable[[TensorGroup], object], way: TensorGroup, device: torch.device) -> float:
    """Milliseconds of a call: the median; infinitely many where this machine cannot."""

    def ended() -> float:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    try:
        for _ in range(WARM):
            run(way)
        ends = [ended()]
        for _ in range(BATCHES):
            for _ in range(RUNS):  # the host may run ahead, as in a step
                run(way)
            ends.append(ended())
    except (ConfigError, RuntimeError):
        if type(way) is TensorGroup:
            raise
        return math.inf
    return 1e3 / RUNS * median(end - start for start, end in itertools.pairwise(ends))


def chosen(times: Mapping[str, float]) -> str:
    """The fastest way; `off` unless another saves at least `GAIN`."""
    best = min(times, key=lambda name: times[name])
    return best if times[best] < (1 - GAIN) * times["off"] else "off"


def said(times: Mapping[str, float]) -> str:
    others = ", ".join(f"{name} {value:.3f}" for name, value in times.items() if name != chosen(times))
    return f"{chosen(times)} {times[chosen(times)]:.3f} ms ({others})"


def machine(device: torch.device) -> str:
    """What times depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{name}, torch {torch.__version__}"


@cache
def table(group: dist.ProcessGroup, near: bool, file: str) -> Table:
    return Table(group, near, file)


def described(kind: str, x: Tensor, weights: Sequence[Tensor], role: str, size: int, keep: bool = False) -> str:
    """A call in words, the same on all ranks. Numbers of tokens up to the same power of two count as one, so that not
    every length of generated texts is measured."""
    tokens = 1 << (len(x) * (1 if kind == "reduced product" else size) - 1).bit_length()
    widths = " + ".join(f"{weight.shape[0]} x {weight.shape[1]}" for weight in weights)
    more = "".join(f", {word}" for word in (role.lower().replace("_", " "), "kept" * keep) if word)
    return f"{kind} of up to {tokens} tokens over {size} ranks with {widths} ({str(x.dtype)[6:]}{more})"


@torch.library.custom_op("trainer::fastest_gather_matmul", mutates_args=())
def fastest_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    role: str,
    name: str,
    size: int,
    keep: bool,
    near: bool,
    file: str,
) -> list[Tensor]:
    """The products of all ranks' x with each weight; and with `keep` all ranks' x."""

    def run(way: TensorGroup) -> list[Tensor]:
        products, whole = way.gather_matmul(x, weights, Role[role], biases, keep)
        return [*products] if whole is None else [*products, whole]

    call = described("gathered product", x, weights, role, size, keep)
    return run(table(groups()[name], near, file).fastest(call, run, x.device))


@fastest_gather_matmul.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    role: str,
    name: str,
    size: int,
    keep: bool,
    near: bool,
    file: str,
) -> list[Tensor]:
    widths = [outputs(weight, Role[role]) for weight in weights] + [x.shape[1]] * keep
    return [x.new_empty(size * len(x), width) for width in widths]


@torch.library.custom_op("trainer::fastest_matmul_scatter", mutates_args=())
def fastest_matmul_scatter(
    operand: Tensor, weight: Tensor, role: str, name: str, size: int, near: bool, file: str
) -> Tensor:
    """This rank's tokens of the sum over ranks of their products."""

    def run(way: TensorGroup) -> Tensor:
        return way.wait(way.matmul_scatter_sum([operand], [weight], Role[role]))

    call = described("reduced product", operand, [weight], role, size)
    return run(table(groups()[name], near, file).fastest(call, run, operand.device))


@fastest_matmul_scatter.register_fake
def _(operand: Tensor, weight: Tensor, role: str, name: str, size: int, near: bool, file: str) -> Tensor:
    return operand.new_empty(len(operand) // size, outputs(weight, Role[role]))


@dataclass(frozen=True)
class Fastest(TensorGroup):
    """`TensorGroup` by the fastest way for each call, of the usual products. near, file: see `Table`."""

    reductions: ClassVar[tuple[Any, ...]] = (*TensorGroup.reductions, torch.ops.trainer.fastest_matmul_scatter.default)

    near: bool = True
    file: str = ""

    def gather_matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        role: Role,
        biases: Sequence[Tensor | None] | None = None,
        keep: bool = False,
        multiply: Multiply = matmul,
    ) -> tuple[list[Tensor], Tensor | None]:
        if multiply is not matmul:
            return super().gather_matmul(x, weights, role, biases, keep, multiply)
        place = role.name, self.name, self.size
        added = list(biases or [None] * len(weights))
        results = fastest_gather_matmul(x, list(weights), added, *place, keep, self.near, self.file)
        return results[: len(weights)], results[-1] if keep else None

    def matmul_scatter_sum(
        self, operands: Sequence[Tensor], weights: Sequence[Tensor], role: Role, multiply: Multiply = matmul
    ) -> Started:
        if multiply is not matmul or role is not Role.OUTPUT:
            return super().matmul_scatter_sum(operands, weights, role, multiply)
        place = role.name, self.name, self.size
        return [fastest_matmul_scatter(operands[0], weights[0], *place, self.near, self.file)]

    def columns_gradients(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor, multiply: Multiply = matmul
    ) -> list[Tensor]:
        if multiply is not matmul:
            return super().columns_gradients(gradients, weights, x, multiply)
        return self.backward("gathered", weights, x, lambda way: way.columns_gradients(gradients, weights, x))

    def rows_gradients(self, gradient: Tensor, weight: Tensor, x: Tensor, multiply: Multiply = matmul) -> list[Tensor]:
        if multiply is not matmul:
            return super().rows_gradients(gradient, weight, x, multiply)
        return self.backward("reduced", [weight], gradient, lambda way: way.rows_gradients(gradient, weight, x))

    def backward(
        self, kind: str, weights: Sequence[Tensor], mine: Tensor, run: Callable[[TensorGroup], list[Tensor]]
    ) -> list[Tensor]:
        """mine: what has this rank's tokens."""
        call = described(f"gradients of a {kind} product", mine, weights, "", self.size)
        return run(table(groups()[self.name], self.near, self.file).fastest(call, run, mine.device))

    def wait(self, x: Started) -> Tensor:
        return super().wait(x) if isinstance(x, Tensor) else x[0]

    def decided(self) -> list[str]:
        """What has been decided since the last time that this was asked, in words."""
        said = table(groups()[self.name], self.near, self.file).notes
        new, said[:] = list(said), []
        return new
