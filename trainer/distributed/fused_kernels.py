"""Products of tensor-parallel ranks and their collectives in one kernel each, over memory that the GPUs of a node share
(`kernels/experimental/tensor_parallel.py` has the kernels and their protocol).

To autograd, recompute and the compiler each call is an operator. The calls of a group are those of one stream, in the
order of the program, which is the same on all ranks; their number is the epoch of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ConfigError
from trainer.distributed import symmetric_memory
from trainer.distributed.c10d_internals import list_groups
from trainer.distributed.collectives import GROUPS, Started, TensorGroup
from trainer.distributed.symmetric_memory import SymmetricBuffers, buffers_of
from trainer.precision.products import GEMMRole, Multiply, matmul, output_width

RESERVED = 16
"""Streaming multiprocessors that a waiting kernel leaves to others, such as NCCL's; copiers borrow them, and never
wait."""
PULLED = 64
"""Tokens of a rank up to which readers fetch them: above, each tile of the result would fetch them anew."""


def shape_of(
    device: torch.device, dtype: torch.dtype, tokens: int, widths: Sequence[int], size: int, waits: bool
) -> Any:
    """How products `widths` wide are cut, of `tokens` of each of `size` ranks. waits: whether what multiplies waits for
    others. Tiles of 16-bit and of 32-bit numbers take the same memory."""
    from trainer.kernels.experimental.tiles import TileShape, choose_tiles

    programs, step = torch.cuda.get_device_properties(device).multi_processor_count - RESERVED, 128 // dtype.itemsize
    base = TileShape(step=step, programs=programs, copiers=RESERVED, limit=symmetric_memory.MAX_POLLS)
    return choose_tiles(base, tokens, widths, size, waits)


class KernelBuffers(SymmetricBuffers):
    """Boxes as the kernels take them, which find flags by tile."""

    region: Any = None

    def grow(self, half: int, count: int, device: torch.device) -> None:
        from trainer.kernels.exchange import SymmetricRegion

        super().grow(half, count, device)
        self.tables = [
            torch.tensor([address + offset for address in self.shared.addresses], device=device)
            for offset in (0, self.bytes)
        ]
        self.region = SymmetricRegion(
            self.rank,
            self.size,
            *(table.data_ptr() for table in self.tables),
            half,
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(4, dtype=torch.int32, device=device),
        )

    def list_missing(self) -> list[str]:
        if self.shared is None:
            return []
        return [f"rank {dist.get_rank()} is in epoch {self.epoch} of the kernels' {self.kind}"]


def kernel_buffers(kind: str, group: str, dtype: torch.dtype) -> KernelBuffers:
    return buffers_of(kind, list_groups()[GROUPS[group].name], dtype, KernelBuffers)


@torch.library.custom_op("trainer::fused_gather_matmul", mutates_args=())
def fused_gather_matmul(
    x: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None], role: str, group: str, keep: bool
) -> list[Tensor]:
    """The products of all ranks' x with each weight; and with `keep` all ranks' x."""
    from trainer.kernels.exchange import check_error
    from trainer.kernels.experimental.tensor_parallel import gather_matmul

    x, weights, (tokens, inputs) = x.contiguous(), [weight.contiguous() for weight in weights], x.shape
    size = GROUPS[group].size
    widths = [output_width(weight, GEMMRole[role]) for weight in weights]
    shape = shape_of(x.device, x.dtype, tokens, widths, size, True)
    made = kernel_buffers("gather", group, x.dtype)
    epoch = made.begin(size * tokens * inputs, size * -(-tokens // shape.rows), x.device)
    region, pull = made.region, tokens <= PULLED and not keep
    results = gather_matmul(region, shape, epoch, x, weights, GEMMRole[role] is GEMMRole.OUTPUT, pull)
    for product, bias in zip(results, biases):
        if bias is not None:
            product += bias
    if keep:
        whole = made.buffer(region.rank, (size * tokens, inputs)).clone()
        whole.view(size, tokens, inputs)[region.rank] = x
        results.append(whole)
    if symmetric_memory.MAX_POLLS:
        check_error(region)
    return results


@fused_gather_matmul.register_fake
def _(
    x: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None], role: str, group: str, keep: bool
) -> list[Tensor]:
    widths = [output_width(weight, GEMMRole[role]) for weight in weights] + [x.shape[1]] * keep
    return [x.new_empty(GROUPS[group].size * len(x), width) for width in widths]


@torch.library.custom_op("trainer::fused_matmul_scatter", mutates_args=())
def fused_matmul_scatter(operands: list[Tensor], weights: list[Tensor], role: str, group: str) -> Tensor:
    """Sends the sum of the products to the ranks that have the tokens. Returns what `fused_sum` takes: no memory, but
    the shape of the result."""
    from trainer.kernels.experimental.tensor_parallel import matmul_scatter

    operands, weights = [one.contiguous() for one in operands], [one.contiguous() for one in weights]
    kind, first, size = GEMMRole[role], operands[0], GROUPS[group].size
    tokens, width = len(first) // size, output_width(weights[0], kind)
    shape = shape_of(first.device, first.dtype, tokens, [width], size, False)
    made = kernel_buffers("scatter", group, first.dtype)
    epoch = made.begin(size * tokens * width, shape.flags(tokens, width, size), first.device)
    matmul_scatter(made.region, shape, epoch, operands, weights, kind is GEMMRole.OUTPUT)
    return first.new_empty(1).expand(tokens, width)


@fused_matmul_scatter.register_fake
def _(operands: list[Tensor], weights: list[Tensor], role: str, group: str) -> Tensor:
    return (
        operands[0]
        .new_empty(1)
        .expand(len(operands[0]) // GROUPS[group].size, output_width(weights[0], GEMMRole[role]))
    )


@torch.library.custom_op("trainer::fused_sum", mutates_args=())
def fused_sum(sent: Tensor, group: str) -> Tensor:
    """This rank's tokens of the sum over ranks of what the last `fused_matmul_scatter` sent: [tokens / t, outputs]."""
    from trainer.kernels.exchange import check_error
    from trainer.kernels.experimental.tensor_parallel import sum_received

    made = kernel_buffers("scatter", group, sent.dtype)
    out = sent.new_empty(sent.shape)
    shape = shape_of(sent.device, sent.dtype, len(sent), [sent.shape[1]], made.size, False)
    sum_received(made.region, shape, made.epoch, out)
    if symmetric_memory.MAX_POLLS:
        check_error(made.region)
    return out


@fused_sum.register_fake
def _(sent: Tensor, group: str) -> Tensor:
    return sent.new_empty(sent.shape)


class FusedKernelGroup(TensorGroup):
    """`TensorGroup` by kernels that multiply while they communicate."""

    reductions: ClassVar[tuple[Any, ...]] = (
        *TensorGroup.reductions,
        torch.ops.trainer.fused_matmul_scatter.default,
        torch.ops.trainer.fused_sum.default,
    )
    fuses: ClassVar[bool] = True

    def gather_matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        role: GEMMRole,
        biases: Sequence[Tensor | None] | None = None,
        keep: bool = False,
        multiply: Multiply = matmul,
    ) -> tuple[list[Tensor], Tensor | None]:
        if multiply is not matmul or not fits_kernels([x], weights):
            return super().gather_matmul(x, weights, role, biases, keep, multiply)
        added = list(biases or [None] * len(weights))
        results = fused_gather_matmul(x, list(weights), added, role.name, self.key, keep)
        return results[: len(weights)], results[-1] if keep else None

    def matmul_scatter_sum(
        self, operands: Sequence[Tensor], weights: Sequence[Tensor], role: GEMMRole, multiply: Multiply = matmul
    ) -> Started:
        if multiply is not matmul or not fits_kernels(operands, weights):
            return super().matmul_scatter_sum(operands, weights, role, multiply)
        return [fused_matmul_scatter(list(operands), list(weights), role.name, self.key)]

    def wait(self, x: Started) -> Tensor:
        return super().wait(x) if isinstance(x, Tensor) else fused_sum(x[0], self.key)


def fits_kernels(operands: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Whether the kernels take these: of one type, and rows of whole 16 numbers, so that they are moved 16 bytes at a
    time."""
    sizes = [size for weight in weights for size in weight.shape] + [operand.shape[1] for operand in operands]
    kinds = {one.dtype for one in (*operands, *weights)}
    known = len(kinds) == 1 and kinds <= {torch.bfloat16, torch.float16, torch.float32}
    return known and len(weights) <= 3 and all(size % 16 == 0 for size in sizes)


# Ranks that share the slots of a cache of keys bring their parts of attention together by the log-sum-exp of their
# scores, which is exact (Dao et al., Flash-Decoding, 2023).


OUT_OF_REACH: set[str] = set()
"""Groups whose GPUs cannot share memory."""


class ShardedKVGroup(TensorGroup):
    """Ranks that gather each other's parts."""

    def combine(self, attended: Tensor, logsum: Tensor, dtype: torch.dtype) -> Tensor:
        """Attention to the slots of all ranks [rows, heads, 1, head_dim], the same bits on each. attended: [rows,
        heads, parts, head_dim], of this rank; logsum: [rows, heads, parts]; zeros and -inf of parts that see nothing,
        which are not all parts of all ranks."""
        mine = merge_attention(attended, logsum)
        everyone = self.wait(self.gather(torch.cat(mine, -1)[None]))
        parts = everyone.movedim(0, 2).squeeze(3)
        return merge_attention(parts[..., :-1], parts[..., -1])[0].to(dtype)


class NodeShardedKVGroup(ShardedKVGroup):
    """The GPUs of a node, which write their parts into each other's memory, within the kernel that adds them up; where
    they cannot, they gather."""

    def combine(self, attended: Tensor, logsum: Tensor, dtype: torch.dtype) -> Tensor:
        from trainer.kernels import decode

        rows, heads, _, dim = attended.shape
        made = kernel_buffers(f"slots of {rows * heads}", self.key, torch.float32)  # whose programs count by that
        sizes = decode.buffer_elements(rows, heads, dim, self.size), decode.flag_count(rows, heads, self.size)
        if self.name not in OUT_OF_REACH:
            try:
                epoch = made.begin(*sizes, attended.device)
            except ConfigError:
                OUT_OF_REACH.add(self.name)
        if self.name in OUT_OF_REACH:
            return super().combine(attended, logsum, dtype)
        return decode.combine_parts(attended, logsum, dtype, made.region, epoch)


def merge_attention(attended: Tensor, logsum: Tensor) -> tuple[Tensor, Tensor]:
    """Parts as one: [..., parts, head_dim] and [..., parts] -> [..., 1, head_dim] and [..., 1, 1], the log of the sum
    of all."""
    total = logsum.logsumexp(-1, keepdim=True)
    weights = torch.exp(logsum - torch.where(total == -torch.inf, 0.0, total))
    return (weights[..., None] * attended).sum(-2, keepdim=True), total[..., None]
