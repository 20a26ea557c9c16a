"""The matrix products of linear layers: the one place where they multiply.

A layer y = x W^T + b has three: its output, and in backward the gradients of its input and of its weight. The role of a
product says what its operands are. Numbers that are narrower than the compute type are another implementation of
`matmul` (`Float8Multiply`): it knows by the role which range an operand needs and along which dimension it is summed
over. A layer hands its own to whatever multiplies for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from trainer.config import ConfigError, PrecisionConfig
from trainer.planning.float8 import BLOCK, BLOCKS
from trainer.planning.parameters import float8_setting, float8_settings


class GEMMRole(Enum):
    """Which of a layer's products, as the kinds of its two operands."""

    OUTPUT = ("activation", "weight")
    INPUT_GRADIENT = ("gradient", "weight")
    WEIGHT_GRADIENT = ("gradient", "activation")


@dataclass(frozen=True)
class GEMMOperand:
    """One side of a product, as it is multiplied. values: as `Multiply` takes them, or [rows, n] in fewer bits; back:
    what these are scaled back with, fp32: a scalar or a factor for each block, which a right operand may have for
    several rows (`quantise_operand`)."""

    values: Tensor
    back: Tensor | None = None

    def per_row(self, change: Callable[[Tensor], Tensor]) -> GEMMOperand:
        """The same of some rows, or in another shape of them."""
        return self.like([change(one) for one in self.of_rows()])

    def of_rows(self) -> list[Tensor]:
        """What has a row for each row of the operand."""
        return [self.values, *([] if self.back is None or not self.back.dim() else [self.back])]

    def like(self, of_rows: Sequence[Tensor]) -> GEMMOperand:
        """The same with others in the place of these."""
        return GEMMOperand(of_rows[0], of_rows[1] if len(of_rows) > 1 else self.back)


class Multiply:
    """One product, of operands as they lie in memory; `add` is added to it.

    | role | a | b | result | add |
    |---|---|---|---|---|
    | OUTPUT | x [tokens, inputs] | W [outputs, inputs] | x W^T [tokens, outputs] | the bias [outputs] |
    | INPUT_GRADIENT | dy [tokens, outputs] | W [outputs, inputs] | dy W [tokens, inputs] | other terms of it |
    | WEIGHT_GRADIENT | dy [tokens, outputs] | x [tokens, inputs] | dy^T x [outputs, inputs] | none |

    Differentiable here, in the type of the operands, except a sum of input gradients, which may overwrite `add`.
    Whoever uses an operand twice, or sends it, makes it himself (`left`, `right`)."""

    key = "matmul"
    """By which `MULTIPLIERS` knows it."""

    def __call__(self, a: Tensor, b: Tensor, role: GEMMRole, add: Tensor | None = None) -> Tensor:
        if role is GEMMRole.OUTPUT:
            return F.linear(a, b, add)
        if role is GEMMRole.INPUT_GRADIENT:
            # torch would copy `add` to the result first. The compiler gives each result memory of its own.
            return a @ b if add is None else torch.addmm(add, a, b, out=None if torch.compiler.is_compiling() else add)
        return a.t() @ b

    def largest(self, a: Tensor, role: GEMMRole) -> Tensor | None:
        """What of a whole left operand has to be known before a part of it is made: a scalar, of which that of the
        whole is the largest of its parts'; or None."""
        return None

    def left(self, a: Tensor, role: GEMMRole, largest: Tensor | None = None) -> GEMMOperand:
        """largest: of the whole, if `a` is a part; a row of the operand is a row of `a`, but for weight gradients."""
        return GEMMOperand(a)

    def right(self, b: Tensor, role: GEMMRole) -> GEMMOperand:
        return GEMMOperand(b)

    def product(
        self, left: GEMMOperand, right: GEMMOperand, role: GEMMRole, dtype: torch.dtype, add: Tensor | None = None
    ) -> Tensor:
        """In `dtype`, which is that of what the operands were made of."""
        return matmul(left.values, right.values, role, add)

    def into(
        self, out: Tensor, left: GEMMOperand, right: GEMMOperand, role: GEMMRole, add: Tensor | None = None
    ) -> None:
        """`product`, but of a weight's gradient, into `out`, which may be what is added. Not differentiable."""
        matmul_into(out, left.values, right.values, role, add)


matmul = Multiply()

MULTIPLIERS: dict[str, Multiply] = {matmul.key: matmul}
"""The implementations that there are, for operators, which take no objects."""


class GradientSum(Protocol):
    """Where the gradient of a weight is summed over micro-batches."""

    def add(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Adds gradient^T x, of operands as those of a `WEIGHT_GRADIENT`. Returns the sum so far."""


class SummedMultiply(Multiply):
    """`matmul`, but that each weight gradient is added to the next of `sums`; the result is the sum so far. It serves
    one backward pass of a layer. Operators that look it up by its key find `matmul`, for the other products."""

    def __init__(self, sums: Iterable[GradientSum]):
        self.sums = iter(sums)

    def __call__(self, a: Tensor, b: Tensor, role: GEMMRole, add: Tensor | None = None) -> Tensor:
        if role is GEMMRole.WEIGHT_GRADIENT:
            return next(self.sums).add(a, b)
        return super().__call__(a, b, role, add)

    def product(
        self, left: GEMMOperand, right: GEMMOperand, role: GEMMRole, dtype: torch.dtype, add: Tensor | None = None
    ) -> Tensor:
        return self(left.values, right.values, role, add)


def add_weight_gradient(total: Tensor, gradient: Tensor, x: Tensor, new: bool) -> Tensor:
    """total += gradient^T x in one GEMM, as Megatron-LM's fused gradient accumulation does, and returns `total`.

    total: [outputs, inputs], read and written in its own type, which is fp32 for operands in 16 bits. gradient:
    [tokens, outputs]; x: [tokens, inputs], both of one type. new: the values of `total` are undefined, and it is
    overwritten."""
    if x.is_cuda and x.dtype is not total.dtype:
        aten, operands = torch.ops.aten, (gradient.t(), x, total.dtype)
        if new:
            return aten.mm.dtype_out(*operands, out=total)
        return aten.addmm.dtype_out(total, *operands, out=total)
    # On CPUs products have the type of their operands.
    left, right = gradient.t().to(total.dtype), x.to(total.dtype)
    return torch.mm(left, right, out=total) if new else total.addmm_(left, right)


def output_width(weight: Tensor, role: GEMMRole) -> int:
    """The width of a product with a weight [outputs, inputs]."""
    return weight.shape[0 if role is GEMMRole.OUTPUT else 1]


def matmul_into(out: Tensor, a: Tensor, b: Tensor, role: GEMMRole, add: Tensor | None = None) -> None:
    """For `Multiply.into`."""
    b = b.t() if role is GEMMRole.OUTPUT else b
    if add is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(add, a, b, out=out)


def matmul_sum(
    operands: Sequence[Tensor], weights: Sequence[Tensor], role: GEMMRole, multiply: Multiply = matmul
) -> Tensor:
    """The sum of the products of each operand with its weight, or with its operand (`join_operands`)."""
    weights = join_operands(weights, len(operands), role)
    total = multiply(operands[0], weights[0], role)
    for operand, weight in zip(operands[1:], weights[1:]):
        total = multiply(operand, weight, role, total)
    return total


def matmul_all(
    a: Tensor, weights: Sequence[Tensor], role: GEMMRole, biases: Iterable[Tensor | None], multiply: Multiply = matmul
) -> list[Tensor]:
    """The products of one operand with each weight."""
    if multiply is matmul:  # there is nothing to make once
        return [matmul(a, weight, role, bias) for weight, bias in zip(weights, biases)]
    left = multiply.left(a, role)
    return [
        multiply.product(left, multiply.right(weight, role), role, a.dtype, bias)
        for weight, bias in zip(weights, biases)
    ]


def weight_gradients(gradients: Sequence[Tensor], x: Tensor, multiply: Multiply = matmul) -> list[Tensor]:
    """Of the matrices that share the input x."""
    role = GEMMRole.WEIGHT_GRADIENT
    if multiply is matmul:
        return [matmul(gradient, x, role) for gradient in gradients]
    right = multiply.right(x, role)
    return [multiply.product(multiply.left(gradient, role), right, role, x.dtype) for gradient in gradients]


# Numeric types by the names that settings give them.


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# GEMMs in fp8 with dynamic scaling: another implementation of `matmul` for linear layers. Each operand is scaled so
# that its largest element becomes the largest number of its type, rounded to eight bits, and multiplied by tensor cores
# that accumulate in fp32. The result is scaled back (Micikevicius et al., arXiv 2209.05433). The scales are computed
# from the operands and stay on the device. Nothing saturates: an infinity or a NaN in an operand gives one in every
# result that it contributes to, and the step is skipped like any other step whose gradient is not finite.
#
# | recipe             | a scale for    | activations, weights | gradients | weight gradients    |
# |--------------------|----------------|----------------------|-----------|---------------------|
# | tensorwise         | each operand   | e4m3                 | e5m2      | fp8                 |
# | rowwise            | each row       | e4m3                 | e4m3      | fp8                 |
# | rowwise_with_gw_hp | each row       | e4m3                 | e4m3      | in the compute type |
# | blockwise          | each block     | e4m3                 | e4m3      | fp8                 |
#
# A row is what one element of the result is summed over, so an operand has different rows in different roles. A block
# is 128 elements of a row; of weights, the same elements of 128 rows (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
# Scales of rows and blocks are powers of two, as in Transformer Engine's recipe for blocks: scaling then rounds
# nothing, and both passes see the same weights. The other recipes are those of torchao. Its linear layer is a module
# with its own autograd function and collectives. Here only the GEMM is replaced, so deferred weight gradients, tensor
# parallelism and sharding stay as they are. Backward keeps activations in the compute type, as without fp8: in another
# role the same numbers are scaled differently. Each rank of a tensor-parallel group scales its operands by itself.


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

SMALLEST = 2.0**-100
"""Lower bound of the largest element. It keeps the scale of an operand of zeros finite, and the inverses of scales
normal numbers."""

EXPONENT = 0x7F800000
"""Mask of the exponent bits of an fp32 number. Without mantissa and sign it is a power of two."""

CAPABILITY = (8, 9)
"""Compute capability of the oldest NVIDIA GPUs whose tensor cores multiply fp8."""

Block = tuple[int, int] | None
"""Rows and elements of each row that share a scale. 0 elements are the whole row, None is the whole operand."""

Quantise = Callable[[Tensor, int, torch.dtype, Block, Tensor | None], tuple[Tensor, Tensor]]


def make_once(x: Tensor) -> Tensor:
    """`x` itself. For this view the compiler stores `x`. It would compute it again in each kernel that reads it: the
    fp64 division of a scale for each element of an operand."""
    return x.as_strided(x.shape, x.stride())


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The fp32 factor that maps the largest element `largest` to the largest number of `dtype`. Divided in fp64,
    because compiled divisions in fp32 round differently from eager ones."""
    return make_once((torch.finfo(dtype).max / largest.double().clamp(min=SMALLEST)).float())


def quantise_operand(
    x: Tensor, summed: int, dtype: torch.dtype, block: Block, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """An operand in fp8 with the dimension that is summed over last, and the factors that scale the product back.

    x: [rows, n], or [n, rows] with summed=0, where rows fill blocks. largest: the largest element of the whole operand,
    if x is a part of it. Returns [rows, n], row-major, with zeros behind n that fill the last block, and factors in
    fp32: a scalar, or a matrix with one for each block.
    """
    if block is None:  # one largest element serves both ways of x
        scale = scale_of(x.abs().amax() if largest is None else largest, dtype)
        values = (x.t() if summed == 0 else x).float() * scale
    else:
        x = x.t() if summed == 0 else x
        width = block[1] or x.shape[1]
        x = F.pad(x, (0, -x.shape[1] % width)) if x.shape[1] % width else x
        blocks = x.unflatten(1, (-1, width)).unflatten(0, (-1, block[0]))
        scale = scale_of(blocks.abs().amax((1, 3)), dtype)
        # Clearing the mantissa would turn a NaN into an infinity, which kernels cast to fp8 in different ways.
        scale = torch.where(scale.isnan(), scale, (scale.view(torch.int32) & EXPONENT).view(torch.float32))
        values = (blocks.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return make_once(values.to(dtype).contiguous()), scale.double().reciprocal().float()


# Weights that are cast once for several products. Functions of autograd and operators take tensors only, so an operand
# travels as two: its values, and its factor.


def cast_weight(weight: Tensor, multiply: Multiply) -> list[Any]:
    """The operands that the products of the output and of the input's gradient read: four tensors."""
    operands = [multiply.right(weight, role) for role in (GEMMRole.OUTPUT, GEMMRole.INPUT_GRADIENT)]
    return [part for one in operands for part in (one.values, one.back)]


def join_operands(parts: Sequence[Tensor], count: int, role: GEMMRole) -> Sequence[Any]:
    """What the products of `count` weights read: `parts` itself, or operands, if these are four tensors for each."""
    first = 2 * (role is GEMMRole.INPUT_GRADIENT)
    return parts if len(parts) == count else [*map(GEMMOperand, parts[first::4], parts[first + 1 :: 4])]


# Frozen matrices in fp8 (`model.adapter.weights`): e4m3 with a scale for each row, as the recipe `rowwise` rounds them.
# The scales are powers of two, so the values are exact in bf16 and fp32, and rounding them again changes nothing.


def encode_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [rows, n] in fp8, and the factors that scale its rows back, fp32 [rows, 1]."""
    return quantise_operand(weight, 1, E4M3, (1, 0))


def decode_rows(codes: Tensor, scale: Tensor | None, dtype: torch.dtype, backward: bool = False) -> Tensor:
    """The matrix in `dtype` that `encode_rows` rounded; `codes` itself where it is no such matrix and `scale` is None.

    backward: for the second use. It is written in another way, because the compiler would otherwise find that both
    passes compute the same, and keep the result in memory for all layers until backward."""
    if scale is None:
        return codes
    if backward:
        return (codes.t().to(dtype) * scale.t().to(dtype)).t()
    return codes.to(dtype) * scale.to(dtype)


def round_rows(weight: Tensor) -> Tensor:
    """The values in fp32 that a matrix has in fp8."""
    return decode_rows(*encode_rows(weight), torch.float32)


def in_blocks(right: Tensor, back: tuple[Tensor, Tensor]) -> bool:
    """Whether some row has several factors, or several rows of the right operand have one."""
    return back[1].dim() > 0 and (back[1].shape[1] > 1 or len(back[1]) < len(right))


def scale_blocks(values: Tensor, back: Tensor) -> Tensor:
    """The numbers in fp32 that an operand has, exactly, as factors are powers of two."""
    rows, columns = len(values) // len(back), values.shape[1] // back.shape[1]
    return values.float() * back.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def emulate_product(left: Tensor, right: Tensor, back: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """`scaled_product` on any device: exact products of fp8 numbers, accumulated in fp32."""
    if in_blocks(right, back):
        product = scale_blocks(left, back[0]) @ scale_blocks(right, back[1]).t()
    else:
        product = left.float() @ right.float().t() * back[0] * back[1].t()
    # A cast without effect at the end of forward makes torch 2.11's compiler return zero gradients.
    return product if product.dtype is dtype else product.to(dtype)


def multiply_blocks(
    left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, of_blocks: bool, dtype: torch.dtype
) -> Tensor:
    """`scaled_product` by cuBLAS, of operands with factors for blocks. right: column-major, [n, k]; of_blocks: whether
    its factors are for several rows each."""
    count, spare = len(left), -len(left) % 4
    if spare:  # as in generation; cuBLAS takes multiples of four
        left = F.pad(left.view(torch.uint8), (0, 0, 0, spare)).view(E4M3)
        of_left = F.pad(of_left, (0, 0, 0, spare))
    # Factors of rows are read column-major; those of several rows row-major, padded to a multiple of four.
    lefts, rights = (factors.t().contiguous().t() for factors in (of_left, of_right))
    rows = blocks = ScalingType.BlockWise1x128
    if of_blocks:
        blocks, rights = ScalingType.BlockWise128x128, F.pad(of_right, (0, -of_right.shape[1] % 4)).t()
    return F.scaled_mm(left, right, lefts, rows, rights, blocks, output_dtype=dtype)[:count]


# An operator, because torch 2.11 cannot compile `scaled_mm`.
torch.library.custom_op("trainer::multiply_blocks", multiply_blocks, mutates_args=())


@torch.library.register_fake("trainer::multiply_blocks")
def _(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, of_blocks: bool, dtype: torch.dtype) -> Tensor:
    return left.new_empty(len(left), right.shape[1], dtype=dtype)


def scaled_product(
    left: Tensor, right: Tensor, back: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool, out: Tensor | None = None
) -> Tensor:
    """[m, n] and [k, n] in fp8, row-major -> their product [m, k] in `dtype`, into `out` if given. back: the factors
    that scale each operand back.

    fast: partial sums may stay in the tensor cores' registers, which have fewer bits than fp32; those of blocks never
    do. On GPUs n and k are multiples of 16.
    """
    if left.is_cuda and not in_blocks(right, back):
        # `_scaled_mm` takes its right operand column-major, which is what the transposed view of a row-major tensor is.
        operands, options = (left, right.t(), back[0], back[1].t()), {"out_dtype": dtype, "use_fast_accum": fast}
        return torch._scaled_mm(*operands, **options, **({} if out is None else {"out": out}))
    if left.is_cuda:
        product = torch.ops.trainer.multiply_blocks(left, right.t(), *back, len(back[1]) < len(right), dtype)
    else:
        product = emulate_product(left, right, back, dtype)
    return product if out is None else out.copy_(product)


@dataclass(frozen=True)
class Float8Multiply(Multiply):
    """Multiplies in fp8. recipe: of `precision.float8`. quantise: `quantise_operand`, or its compiled form for products
    that run outside of compiled code. Not differentiable: a layer calls it in its own backward pass."""

    recipe: str
    quantise: Quantise = quantise_operand

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.recipe}{' compiled' * (self.quantise is not quantise_operand)}")
        MULTIPLIERS[self.key] = self

    def __call__(self, a: Tensor, b: Tensor, role: GEMMRole, add: Tensor | None = None) -> Tensor:
        left = self.left(a, role)
        return self.product(left, self.right(b, role, left.back), role, a.dtype, add)

    @property
    def rowwise(self) -> bool:
        return self.recipe != "tensorwise"

    def block(self, rows: int) -> Block:
        """rows: of a block, where the recipe has blocks."""
        return (rows, BLOCK) if self.recipe == BLOCKS else (1, 0) if self.rowwise else None

    def left_type(self, role: GEMMRole) -> torch.dtype | None:
        """The fp8 type of the left operand, None where the product is not in fp8."""
        if role is GEMMRole.WEIGHT_GRADIENT and self.recipe == "rowwise_with_gw_hp":
            return None
        return E4M3 if role is GEMMRole.OUTPUT or self.rowwise else E5M2

    def largest(self, a: Tensor, role: GEMMRole) -> Tensor | None:
        return None if self.rowwise else a.abs().amax()

    def left(self, a: Tensor, role: GEMMRole, largest: Tensor | None = None) -> GEMMOperand:
        if (dtype := self.left_type(role)) is None:
            return GEMMOperand(a)
        summed = 0 if role is GEMMRole.WEIGHT_GRADIENT else 1
        return GEMMOperand(*self.quantise(a, summed, dtype, self.block(1), largest))

    def right(self, b: Tensor | GEMMOperand, role: GEMMRole, after: Tensor | None = None) -> GEMMOperand:
        """b: or the operand that was made of it. after: `back` of the left operand."""
        if isinstance(b, GEMMOperand):
            return b
        if self.left_type(role) is None:
            return GEMMOperand(b)
        if role is GEMMRole.WEIGHT_GRADIENT:
            return GEMMOperand(*self.quantise(b, 0, E4M3, self.block(1), None))
        largest = None
        if role is GEMMRole.INPUT_GRADIENT:
            if after is not None and not self.rowwise:
                # What forward has found: nothing is below zero. The compiler has to wait for the gradient; otherwise it
                # would cast in forward, and keep all weights in fp8 until backward.
                largest = torch.maximum(b.abs().amax(), -after)
            b = b.t()
        return GEMMOperand(*self.quantise(b, 1, E4M3, self.block(BLOCK), largest))

    def product(
        self, left: GEMMOperand, right: GEMMOperand, role: GEMMRole, dtype: torch.dtype, add: Tensor | None = None
    ) -> Tensor:
        if left.back is None or right.back is None:
            return super().product(left, right, role, dtype, add)
        # As in torchao: only outputs use fast accumulation, gradients accumulate in fp32.
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


def check_device(precision: PrecisionConfig, device: torch.device, compiled_codes: bool = False) -> None:
    """Raises `ConfigError` where the device cannot multiply fp8. CPUs emulate it, slowly and with the same numbers.

    compiled_codes: whether compiled code reads frozen matrices in fp8."""
    narrow, plain = float8_setting(precision)
    decoded = "model.adapter.weights=fp8" * compiled_codes
    if not (narrow or decoded) or device.type == "cpu":
        return
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if not torch.version.hip and capability >= CAPABILITY:
        blocks = [f"{setting}={recipe}" for setting, recipe in float8_settings(precision).items() if recipe == BLOCKS]
        cuda = tuple(map(int, (torch.version.cuda or "0").split(".")))
        if blocks and (capability[0] != 9 or cuda < (12, 9)):
            raise ConfigError(
                f"{blocks[0]}: {name} with CUDA {torch.version.cuda} has no GEMM for blocks, which cuBLAS has on "
                f"compute capability 9.0 (H100, H200) from CUDA 12.9 on; set {blocks[0].split('=')[0]}=rowwise"
            )
        return
    since = "which NVIDIA GPUs can from compute capability 8.9 on (L40S, H100)"
    if narrow:
        raise ConfigError(f"{narrow}: {name} cannot multiply in fp8, {since}; set {plain}")
    raise ConfigError(
        f"{decoded}: compiled code on {name} cannot read fp8, {since}; set compile=false, or "
        "model.adapter.weights=compute"
    )
