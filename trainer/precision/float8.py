"""Matrix products in fp8 with dynamic scaling: another implementation of `products.matmul`, for linear layers.

Each operand is scaled so that its largest element is the largest number of its type, rounded to eight bits, and
multiplied by tensor cores that add up in fp32; the result is scaled back (Micikevicius et al., arXiv 2209.05433). The
scales follow from the operands alone and stay on the device. Nothing saturates: an infinity or a NaN in an operand is
one in every result that it has a part in, and the step is skipped as any other with a gradient that is not finite.

| recipe | a scale for | activations, weights | gradients | weight gradients |
|---|---|---|---|---|
| tensorwise | each operand | e4m3 | e5m2 | fp8 |
| rowwise | each row of an operand, a power of two | e4m3 | e4m3 | fp8 |
| rowwise_with_gw_hp | the same | e4m3 | e4m3 | in the compute type |

A row is what one element of the result is summed over, so an operand has other rows in another role. These are the
recipes of torchao. Its linear layer is a module with an autograd function and collectives of its own; here the product
alone is replaced, and weight gradients that are put off, operators of tensor parallelism and sharding stay what they
are.

What is kept for backward is in the compute type, as without fp8: in another role the same numbers are scaled
differently. Each rank of a tensor-parallel group scales what it multiplies by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import ConfigError, PrecisionConfig
from trainer.planning.float8_settings import float8_setting
from trainer.precision.products import MULTIPLIERS, GEMMOperand, GEMMRole, Multiply

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

SMALLEST = 2.0**-100
"""What the largest element counts as at least: scales of zeros are finite, and their inverses normal numbers."""

EXPONENT = 0x7F800000
"""The bits of an fp32 number that are left of it in a power of two."""

CAPABILITY = (8, 9)
"""The oldest NVIDIA GPUs whose tensor cores multiply fp8."""

Quantise = Callable[[Tensor, int, torch.dtype, bool, Tensor | None], tuple[Tensor, Tensor]]


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """What numbers of which these are the largest are multiplied with, fp32: in fp64, since compiled divisions in fp32
    round otherwise than eager ones."""
    return (torch.finfo(dtype).max / largest.double().clamp(min=SMALLEST)).float()


def quantise_operand(
    x: Tensor, summed: int, dtype: torch.dtype, rowwise: bool, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """An operand in fp8, with the dimension that is summed over last, and the factors that scale it back.

    x: [rows, n], or [n, rows] with summed=0; largest: element of all of the operand, if x is a part of it. Returns
    [rows, n], row-major, and in fp32 [rows, 1], or a scalar for all rows."""
    if rowwise or largest is None:
        largest = x.abs().amax(summed, keepdim=True) if rowwise else x.abs().amax()
    scale = scale_of(largest, dtype)
    if rowwise:
        # A NaN has the exponent of an infinity, of which kernels differ in what they cast it to.
        scale = torch.where(scale.isnan(), scale, (scale.view(torch.int32) & EXPONENT).view(torch.float32))
    if summed == 0:
        x, scale = x.t(), scale.t()
    return (x.float() * scale).to(dtype).contiguous(), scale.double().reciprocal().float()


def emulate_product(left: Tensor, right: Tensor, back: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """What `scaled_product` computes, on any device: exact products of fp8 numbers, added up in fp32."""
    product = left.float() @ right.float().t() * back[0] * back[1].t()
    # torch 2.11's compiler gives zeros for gradients of a forward pass that ends in a cast without effect.
    return product if product.dtype is dtype else product.to(dtype)


def scaled_product(
    left: Tensor, right: Tensor, back: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool, out: Tensor | None = None
) -> Tensor:
    """[m, n] and [k, n] in fp8, row-major, with what scales each back -> [m, k] in `dtype`, into `out` if given.

    fast: partial sums may stay in the tensor cores' own registers, of fewer bits. On GPUs n and k are multiples of
    16."""
    if not left.is_cuda:
        product = emulate_product(left, right, back, dtype)
        return product if out is None else out.copy_(product)
    operands, options = (left, right.t(), back[0], back[1].t()), {"out_dtype": dtype, "use_fast_accum": fast}
    return torch._scaled_mm(*operands, **options, **({} if out is None else {"out": out}))


@dataclass(frozen=True)
class Float8Multiply(Multiply):
    """Multiplies in fp8. recipe: of `precision.float8`; quantise: the function above, or its compiled form, for
    products outside of what is compiled. Not differentiable: a layer calls it in its own backward pass."""

    recipe: str
    quantise: Quantise = quantise_operand

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.recipe}{' compiled' * (self.quantise is not quantise_operand)}")
        MULTIPLIERS[self.key] = self

    def __call__(self, a: Tensor, b: Tensor, role: GEMMRole, add: Tensor | None = None) -> Tensor:
        return self.product(self.left(a, role), self.right(b, role), role, a.dtype, add)

    @property
    def rowwise(self) -> bool:
        return self.recipe != "tensorwise"

    def left_type(self, role: GEMMRole) -> torch.dtype | None:
        """None: not in fp8."""
        if role is GEMMRole.WEIGHT_GRADIENT and self.recipe == "rowwise_with_gw_hp":
            return None
        return E4M3 if role is GEMMRole.OUTPUT or self.rowwise else E5M2

    def largest(self, a: Tensor, role: GEMMRole) -> Tensor | None:
        return None if self.rowwise else a.abs().amax()

    def left(self, a: Tensor, role: GEMMRole, largest: Tensor | None = None) -> GEMMOperand:
        if (dtype := self.left_type(role)) is None:
            return GEMMOperand(a)
        return GEMMOperand(
            *self.quantise(a, 0 if role is GEMMRole.WEIGHT_GRADIENT else 1, dtype, self.rowwise, largest)
        )

    def right(self, b: Tensor, role: GEMMRole) -> GEMMOperand:
        if self.left_type(role) is None:
            return GEMMOperand(b)
        # Transposed before all else, so that the compiler does not keep the cast of forward, of all weights, for it.
        b = b.t() if role is GEMMRole.INPUT_GRADIENT else b
        return GEMMOperand(*self.quantise(b, 0 if role is GEMMRole.WEIGHT_GRADIENT else 1, E4M3, self.rowwise, None))

    def product(
        self, left: GEMMOperand, right: GEMMOperand, role: GEMMRole, dtype: torch.dtype, add: Tensor | None = None
    ) -> Tensor:
        if left.back is None or right.back is None:
            return super().product(left, right, role, dtype, add)
        # As torchao: gradients are added up exactly.
        fast = role is GEMMRole.OUTPUT
        product = scaled_product(left.values, right.values, (left.back, right.back), dtype, fast)
        return product if add is None else product + add

    def into(
        self, out: Tensor, left: GEMMOperand, right: GEMMOperand, role: GEMMRole, add: Tensor | None = None
    ) -> None:
        if add is not None:
            torch.add(self.product(left, right, role, out.dtype), add, out=out)
        else:
            scaled_product(left.values, right.values, (left.back, right.back), out.dtype, role is GEMMRole.OUTPUT, out)


def check_device(precision: PrecisionConfig, device: torch.device) -> None:
    """Raises `ConfigError` where the device cannot multiply fp8. CPUs emulate it, slowly and with the same numbers."""
    narrow, plain = float8_setting(precision)
    if not narrow or device.type == "cpu":
        return
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip or capability < CAPABILITY:
        raise ConfigError(
            f"{narrow}: {name} has no products in fp8, which begin with NVIDIA's compute capability 8.9 (L40S, H100); "
            f"set {plain}"
        )
