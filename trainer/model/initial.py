"""The parameters that modules declare, and their initial weights as a function of (seed, global name) alone.

Each parameter is drawn whole from its own generator and then sliced to what the rank holds, so every plan and world
size starts from the same bits (on the same kind of device)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config.model import AdapterSpec, ModelSpec
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.tensors import local_extent
from trainer.planning.parameters import DOWN, ParameterInfo, freeze_parameter
from trainer.precision.products import E4M3, encode_rows, round_rows

# Logical axes: what each dimension of a parameter means. Every parameter is declared with a name for each of its
# dimensions (`embed`, `heads`, `kv_heads`, `mlp`, `vocab`, ...) and a role. Layouts (tensor parallelism, sharding),
# optimizer groups and initial weights follow from these declarations; no other part of the project knows
# architectures.


class DeclaredModule(nn.Module):
    """A module whose parameters are declared with their axes.

    Tensor parallelism sets `group`, where a parameter's axis is split over ranks, and `part`, the rows that this rank
    uses of parameters that it holds whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.declared: dict[str, ParameterInfo] = {}
        self.group: TensorGroup | None = None
        self.part: slice | None = None

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        role: str,
        residual: bool = False,
        units: int = 0,
        active: float = 1.0,
    ) -> None:
        self.add_parameter(name, ParameterInfo(tuple(shape), axes, role, residual, units, active))

    def add_parameter(self, name: str, info: ParameterInfo) -> None:
        """Registers a parameter that is declared by `info`."""
        self.declared[name] = info
        self.register_parameter(name, nn.Parameter(torch.empty(info.shape), requires_grad=info.trained))

    def freeze(self, name: str, adapter: AdapterSpec) -> None:
        """From now on the parameter gets no gradient. adapter: says in which type it is held."""
        self.declared[name] = freeze_parameter(self.declared[name], name, adapter)
        getattr(self, name).requires_grad_(False)

    def local(self, name: str) -> Tensor:
        """What this rank computes with of a parameter; gradients find their way back."""
        parameter = getattr(self, name)
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        # The matrix A of an adapter has no rows of heads.
        whole = self.part is None or self.declared[name].axes[0] != "kv_heads"
        return parameter if whole else ParameterPart.apply(parameter, self.part)

    def local_rows(self, name: str) -> slice:
        """The rows of a parameter that this rank computes with."""
        info = self.declared[name]
        if self.group is None or info.cut != 0:
            return slice(None)
        size = -(-info.shape[0] // self.group.size)
        return self.part or slice(self.group.rank * size, (self.group.rank + 1) * size)


class ParameterPart(torch.autograd.Function):
    """Some rows of a parameter; unlike indexing, differentiable inside of an operator's own implementation too."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: slice) -> Tensor:
        ctx.rows, ctx.shape = rows, whole.shape
        return whole[rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        whole = gradient.new_zeros(ctx.shape)
        whole[ctx.rows] = gradient
        return whole, None


def parameter_infos(model: nn.Module) -> dict[str, ParameterInfo]:
    """Global name -> declaration, in the order of `model.named_parameters()`; a tied parameter appears once."""
    declared = {
        f"{prefix}.{name}": info
        for prefix, module in model.named_modules()
        if isinstance(module, DeclaredModule)
        for name, info in module.declared.items()
    }
    return {name: declared[name] for name, _ in model.named_parameters()}


# Initial weights.


Weights = Callable[[str, ParameterInfo], Tensor]
"""Global name and declaration of a parameter -> its whole value. May have a method `experts` (`InitialWeights`), and
biases of routers: `balances`, whose keys are their names, and `tensor` (`HFWeights`)."""


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed of a global seed and a name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def initial_std(spec: ModelSpec, info: ParameterInfo) -> float:
    """Standard deviation of a drawn parameter by the spec's scheme."""
    std = spec.init.std or (2 / (5 * spec.width)) ** 0.5
    if info.role == "embedding":
        return spec.init.embedding_std or std
    if info.residual and spec.init.residual == "depth":
        return std / (2 * spec.depth) ** 0.5
    if info.residual and spec.init.residual == "wang":
        return 2 / (spec.depth * spec.width**0.5)
    return std


def initial_value(
    spec: ModelSpec, seed: int, name: str, info: ParameterInfo, device: torch.device, first: int = 0
) -> Tensor:
    """The whole fp32 parameter `name`, [info.shape]. first: of a stack of experts, the number of the first one."""
    value = torch.empty(info.shape, dtype=torch.float32, device=device)
    # Each expert is drawn by itself, so that a rank can draw the experts that it holds without the others.
    drawn = {f"{name}/{number}": part for number, part in enumerate(value, first)} if info.stacked else {name: value}
    if info.adapter:
        # As in PEFT: uniform within 1 / sqrt(inputs), and zeros in B, so that training starts from the model itself.
        limit = info.shape[-1] ** -0.5 * name.endswith(DOWN)
        for place, part in drawn.items():
            part.uniform_(-limit, limit, generator=torch.Generator(device).manual_seed(name_seed(seed, place)))
        return value
    if info.role in ("norm", "bias"):
        return value.fill_(1 - spec.norm.offset if info.role == "norm" and name.endswith("weight") else 0)
    std = initial_std(spec, info)
    limit = spec.init.truncate * std
    for place, part in drawn.items():
        generator = torch.Generator(device).manual_seed(name_seed(seed, place))
        if limit:
            nn.init.trunc_normal_(part, 0.0, std, -limit, limit, generator=generator)
        else:
            part.normal_(0.0, std, generator=generator)
    return value


@torch.no_grad()
def fill_parameters(model: nn.Module, value: Weights, trained: bool = True) -> None:
    """Sets every parameter, sharded or not, from whole tensors; also fills the buffers. Every rank passes the same
    values. trained: whether trained parameters too, or frozen ones alone."""
    infos = parameter_infos(model)
    for name, parameter in model.named_parameters():
        info, some = infos[name], getattr(value, "experts", None)
        if info.trained and not trained:
            continue
        if parameter.dtype is E4M3:
            fill_codes(model.get_submodule(name.rpartition(".")[0]), parameter, value(name, info))
            continue
        if not isinstance(parameter, DTensor):
            parameter.copy_(value(name, info).to(parameter.device))
            continue
        shape, offsets = local_extent(parameter)
        if info.stacked and some is not None:  # all experts of a layer may be more than fits
            whole, offsets = some(name, info, range(offsets[0], offsets[0] + shape[0])), torch.Size((0, *offsets[1:]))
        else:
            whole = value(name, info)
        part = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape))]
        parameter.to_local().copy_(part.to(parameter.device))  # each rank slices its own copy, nothing is sent
    fill_buffers(model, value)


def fill_codes(module: Any, parameter: nn.Parameter, whole: Tensor) -> None:
    """Rounds a frozen matrix, the `weight` of a linear layer, to fp8. Ranks that hold parts of rows round whole rows
    too, so the values are the same under every plan."""
    codes, scale = encode_rows(whole.to(module.row_scale.device))
    module.row_scale = scale[module.local_rows("weight")].contiguous()
    if isinstance(parameter, DTensor):
        shape, offsets = local_extent(parameter)
        codes = codes[tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape))]
        parameter = parameter.to_local()
    parameter.copy_(codes)


def fill_buffers(model: nn.Module, value: Weights) -> None:
    """Fills all buffers. They depend on the spec alone, but for biases of routers that come with weights."""
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()
    stored = getattr(value, "balances", {})
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(value.tensor(name))


def initialize_model(
    model: nn.Module, spec: ModelSpec, seed: int, device: torch.device, weights: Weights | None = None
) -> None:
    """Sets all weights of a (sharded, materialised) model: the given ones, or freshly drawn."""
    fill_parameters(model, weights or InitialWeights(spec, seed, device))


class AdaptedWeights:
    """The weights of a model with adapters from two places. base: gives those of the model itself; adapters: those of
    the adapters, and of the parameters `trained`."""

    def __init__(self, base: Weights, adapters: Weights, trained: Container[str] = ()):
        self.base, self.adapters, self.trained = base, adapters, trained

    def __call__(self, name: str, info: ParameterInfo) -> Tensor:
        return self.source(name, info)(name, info)

    def source(self, name: str, info: ParameterInfo) -> Weights:
        return self.adapters if info.adapter or name in self.trained else self.base

    def experts(self, name: str, info: ParameterInfo, numbers: range) -> Tensor:
        """Some of a stack of experts, without the others where the source can leave them out."""
        source = self.source(name, info)
        if hasattr(source, "experts"):
            return source.experts(name, info, numbers)
        return source(name, info)[numbers.start : numbers.stop]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)  # what else weights may have


class RoundedWeights:
    """The weights of `base` with the values that frozen matrices in fp8 have (`ParameterInfo.float8`)."""

    def __init__(self, base: Weights):
        self.base = base

    def __call__(self, name: str, info: ParameterInfo) -> Tensor:
        value = self.base(name, info)
        return round_rows(value) if info.float8 else value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


class InitialWeights:
    """Freshly drawn weights, by name."""

    def __init__(self, spec: ModelSpec, seed: int, device: torch.device):
        self.draw = partial(initial_value, spec, seed, device=device)

    def __call__(self, name: str, info: ParameterInfo) -> Tensor:
        return self.draw(name, info)

    def experts(self, name: str, info: ParameterInfo, numbers: range) -> Tensor:
        """Some of a stack of experts, without the others: [len(numbers), ...]."""
        return self.draw(name, replace(info, shape=(len(numbers), *info.shape[1:])), first=numbers.start)
