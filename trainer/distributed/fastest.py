"""Products of tensor-parallel ranks by whichever way is the fastest for their shapes (`parallel.fusion=auto`).

The first call of a shape runs every way a few times, on all ranks of the group in lock-step, and all take what was the
fastest on the slowest rank. What was found is kept in a file by machine and versions, so that the next run takes the
same. To autograd, recompute and the compiler a call is an operator, whichever way it goes.

The products of a layer's backward pass are one call, unless weight gradients are put off.

A way over shared memory that fails on a rank is left out by all: that rank gives up, so that no other waits for it,
and says so at the next point at which all ranks agree, which is the end of the way or where its memory grows."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ConfigError
from trainer.distributed.boxes import held
from trainer.distributed.c10d_internals import groups
from trainer.distributed.chunks import Chunks, outputs
from trainer.distributed.collectives import GROUPS, Started, TensorGroup
from trainer.distributed.copied import Copied
from trainer.distributed.elapsed import elapsed
from trainer.distributed.fused import Fused
from trainer.distributed.symmetric_memory import agree, first_line
from trainer.precision.products import MULTIPLIERS, Multiply, Role, matmul
from trainer.util.files import write_atomic
from trainer.util.reading import Malformed, read_json

CHUNKS = 2
WARM, BATCHES, RUNS = 3, 3, 5
GAIN = 0.02
"""Of the time of `off`, which another way must save."""


class Table:
    """What a group has measured: milliseconds by call and way. near: whether the ranks are on one node; file: where it
    is kept, '' for nowhere; looks: at a flag, before an error."""

    def __init__(self, group: dist.ProcessGroup, near: bool, file: str, looks: int):
        self.group, self.file = group, file
        place = group.group_name, dist.get_rank(group), dist.get_world_size(group)
        self.ways: dict[str, TensorGroup] = {"off": TensorGroup(*place), "chunks": Chunks(*place, chunks=CHUNKS)}
        if near:
            self.ways["copy_engine"] = Copied(*place, looks=looks)
        if near and importlib.util.find_spec("triton") is not None:
            self.ways["triton"] = Fused(*place, looks=looks)
        self.times: dict[str, dict[str, float]] = {}
        self.notes: list[str] = []

    def fastest(self, call: Call, run: Callable[[TensorGroup], object]) -> TensorGroup:
        """The way for a call, by which `run` makes it. All ranks ask alike."""
        if call.text not in self.times:
            found = self.known(call)
            times = self.measure(call, run) if found is None else found
            self.times[call.text] = times
            if found is None:
                self.keep(call)
                self.free()
            self.notes.append(f"parallel.fusion=auto, {call.text}: {said(times)}")
        return self.ways[chosen(self.times[call.text])]

    def measure(self, call: Call, run: Callable[[TensorGroup], object]) -> dict[str, float]:
        """Milliseconds of the slowest rank by way, of those that run here on all ranks."""
        times = {}
        for name, way in self.ways.items():
            if name == "triton" and (call.device.type != "cuda" or call.multiply is not matmul):
                continue
            try:
                times[name] = clocked(run, way, call.device, self.group)
            except ConfigError as error:
                self.notes.append(f"parallel.fusion=auto, {call.text}: {name} is left out, {error.problems[0]}")
                release(way, self.group)
        slowest = torch.tensor(list(times.values()), device=call.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, self.group)
        return dict(zip(times, slowest.tolist()))

    def free(self) -> None:
        """Gives back the memory of ways that no call has taken so far."""
        taken = {chosen(times) for times in self.times.values()}
        for name, way in self.ways.items():
            if name not in taken:
                release(way, self.group)

    def known(self, call: Call) -> dict[str, float] | None:
        """What the file of the group's first rank says of a call."""
        found: list[Any] = [None]
        if dist.get_rank(self.group) == 0:
            times = measured(self.file).get(machine(call.device), {}).get(call.text, {})
            found = [times if "off" in times and times.keys() <= self.ways.keys() else None]
        dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def keep(self, call: Call) -> None:
        """Notes a call in the file."""
        if self.file and dist.get_rank(self.group) == 0:
            content = measured(self.file)
            content.setdefault(machine(call.device), {})[call.text] = self.times[call.text]
            Path(self.file).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.file, json.dumps(content, indent=1))


def measured(file: str) -> dict[str, Any]:
    """What a file has, by machine, call and way; nothing of one that cannot be read."""
    try:
        return read_json(file, {str: {str: {str: float}}}, "remove it") if file else {}
    except (OSError, Malformed):
        return {}


def clocked(
    run: Callable[[TensorGroup], object], way: TensorGroup, device: torch.device, group: dist.ProcessGroup
) -> float:
    """Milliseconds of a call on this rank. Raises `ConfigError` on all ranks where one cannot go this way.

    What fails in a collective, or without any memory that ranks share, ends the run, as under `off`."""
    try:
        found = median(timed(run, way, device))
    except RuntimeError as error:
        if way.boxes is None:
            raise
        for boxes in held(way.boxes, group):
            boxes.give_up()
        agree(group, first_line(error))  # raises
    if way.boxes is not None:
        agree(group)
    return found


def timed(run: Callable[[TensorGroup], object], way: TensorGroup, device: torch.device) -> list[float]:
    """Milliseconds of a call, a few times over."""
    for _ in range(WARM):
        run(way)
    return [elapsed(lambda: run(way), device.type == "cuda", RUNS) for _ in range(BATCHES)]


def release(way: TensorGroup, group: dist.ProcessGroup) -> None:
    """Gives back the memory that the ranks of a group share for a way, on all of them together."""
    for boxes in held(way.boxes, group) if way.boxes is not None else ():
        boxes.free()


def chosen(times: Mapping[str, float]) -> str:
    """The fastest way; `off` unless another saves at least `GAIN`."""
    best = min(times, key=lambda name: times[name])
    return best if times[best] < (1 - GAIN) * times["off"] else "off"


def said(times: Mapping[str, float]) -> str:
    others = ", ".join(f"{name} {value:.3f}" for name, value in times.items() if name != chosen(times))
    return f"{chosen(times)} {times[chosen(times)]:.3f} ms ({others})"


def machine(device: torch.device) -> str:
    """What times depend on beside the call: the device, and versions of what runs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {"torch": torch.__version__, "ways": code()}
    if importlib.util.find_spec("triton") is not None:
        import triton

        versions["triton"] = triton.__version__
    return ", ".join([name, *(f"{what} {version}" for what, version in versions.items())])


@cache
def code() -> str:
    """A digest of the source that the ways consist of, since a version of the project lasts longer than that."""
    package = Path(__file__).parents[1]
    files = sorted(file for room in ("distributed", "kernels", "precision") for file in (package / room).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@cache
def table(group: dist.ProcessGroup, near: bool, file: str, looks: int) -> Table:
    return Table(group, near, file, looks)


class Call(NamedTuple):
    """A call in words, the same on all ranks; where it is made, and how it multiplies."""

    text: str
    device: torch.device
    multiply: Multiply


def described(
    kind: str, x: Tensor, weights: Sequence[Tensor], role: str, multiply: Multiply, size: int, keep: bool = False
) -> Call:
    """Numbers of tokens up to the same power of two count as one, so that not every length of generated texts is
    measured."""
    tokens = 1 << (len(x) * (1 if kind == "reduced product" else size) - 1).bit_length()
    widths = " + ".join(f"{weight.shape[0]} x {weight.shape[1]}" for weight in weights)
    words = role.lower().replace("_", " "), "kept" * keep, "" if multiply is matmul else multiply.key
    more = "".join(f", {word}" for word in words if word)
    text = f"{kind} of up to {tokens} tokens over {size} ranks with {widths} ({str(x.dtype)[6:]}{more})"
    return Call(text, x.device, multiply)


@torch.library.custom_op("trainer::fastest_gather_matmul", mutates_args=())
def fastest_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    role: str,
    multiply: str,
    keep: bool,
    group: str,
) -> list[Tensor]:
    """The products of all ranks' x with each weight; and with `keep` all ranks' x."""
    how, fastest = MULTIPLIERS[multiply], GROUPS[group]

    def run(way: TensorGroup) -> list[Tensor]:
        products, whole = way.gather_matmul(x, weights, Role[role], biases, keep, how)
        return [*products] if whole is None else [*products, whole]

    return run(fastest.way(described("gathered product", x, weights, role, how, fastest.size, keep), run))


@fastest_gather_matmul.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    role: str,
    multiply: str,
    keep: bool,
    group: str,
) -> list[Tensor]:
    widths = [outputs(weight, Role[role]) for weight in weights] + [x.shape[1]] * keep
    return [x.new_empty(GROUPS[group].size * len(x), width) for width in widths]


@torch.library.custom_op("trainer::fastest_matmul_scatter", mutates_args=())
def fastest_matmul_scatter(
    operands: Sequence[Tensor], weights: Sequence[Tensor], role: str, multiply: str, group: str
) -> Tensor:
    """This rank's tokens of the sum over ranks and operands of their products with the weights."""
    how, fastest = MULTIPLIERS[multiply], GROUPS[group]

    def run(way: TensorGroup) -> Tensor:
        return way.wait(way.matmul_scatter_sum(operands, weights, Role[role], how))

    return run(fastest.way(described("reduced product", operands[0], weights, role, how, fastest.size), run))


@fastest_matmul_scatter.register_fake
def _(operands: Sequence[Tensor], weights: Sequence[Tensor], role: str, multiply: str, group: str) -> Tensor:
    return operands[0].new_empty(len(operands[0]) // GROUPS[group].size, outputs(weights[0], Role[role]))


@dataclass(frozen=True)
class Fastest(TensorGroup):
    """`TensorGroup` by the fastest way for each call. near, file, looks: see `Table`."""

    reductions: ClassVar[tuple[Any, ...]] = (*TensorGroup.reductions, torch.ops.trainer.fastest_matmul_scatter.default)
    fuses: ClassVar[bool] = True

    near: bool = True
    file: str = ""
    looks: int = 0

    def gather_matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        role: Role,
        biases: Sequence[Tensor | None] | None = None,
        keep: bool = False,
        multiply: Multiply = matmul,
    ) -> tuple[list[Tensor], Tensor | None]:
        added = list(biases or [None] * len(weights))
        results = fastest_gather_matmul(x, list(weights), added, role.name, multiply.key, keep, self.key)
        return results[: len(weights)], results[-1] if keep else None

    def matmul_scatter_sum(
        self, operands: Sequence[Tensor], weights: Sequence[Tensor], role: Role, multiply: Multiply = matmul
    ) -> Started:
        return [fastest_matmul_scatter(list(operands), list(weights), role.name, multiply.key, self.key)]

    def columns_gradients(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], x: Tensor, multiply: Multiply = matmul
    ) -> list[Tensor]:
        def run(way: TensorGroup) -> list[Tensor]:
            return way.columns_gradients(gradients, weights, x, multiply)

        call = described("gradients of a gathered product", x, weights, "", multiply, self.size)
        return run(self.way(call, run))

    def rows_gradients(self, gradient: Tensor, weight: Tensor, x: Tensor, multiply: Multiply = matmul) -> list[Tensor]:
        def run(way: TensorGroup) -> list[Tensor]:
            return way.rows_gradients(gradient, weight, x, multiply)

        call = described("gradients of a reduced product", gradient, [weight], "", multiply, self.size)
        return run(self.way(call, run))

    def way(self, call: Call, run: Callable[[TensorGroup], object]) -> TensorGroup:
        """The fastest for a call, by which `run` makes it."""
        return self.table.fastest(call, run)

    @property
    def table(self) -> Table:
        return table(groups()[self.name], self.near, self.file, self.looks)

    def wait(self, x: Started) -> Tensor:
        return super().wait(x) if isinstance(x, Tensor) else x[0]

    def decided(self) -> list[str]:
        """What has been decided since the last time that this was asked, in words."""
        said = self.table.notes
        new, said[:] = list(said), []
        return new
