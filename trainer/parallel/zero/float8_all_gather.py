"""Parameters on their way through ZeRO's all-gather in fp8 (`precision.float8.gather`).

A matrix that multiplies in fp8 with one scale is rounded to fp8 at every use: nothing is lost if it is rounded before
it travels, with the scale of the whole matrix, for which ranks agree on its largest element first. What arrives is cast
back to the compute type. bf16 rounds by far less than half of fp8's steps, and the largest element is what it was: the
product that rounds again finds the same scale and the same fp8 numbers. (torchao's float8 all-gather keeps parameters
in fp8 instead; here they stay tensors as any other.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.model.compiled import compile_function
from trainer.model.layers import Linear
from trainer.parallel.zero.fsdp_internals import fsdp_units, sharded_sizes
from trainer.precision.float8 import E4M3, Float8Multiply, scale_of


class Float8AllGather:
    """FSDP's custom all-gather of a unit: a flat buffer of every rank's shards, one parameter behind the other.

    narrow: whether each parameter travels in fp8; lengths: elements of its shard, with padding; compiling: whether
    casts are compiled."""

    def __init__(self, lengths: Sequence[int], narrow: Sequence[bool], compiling: bool):
        self.lengths, self.narrow = list(lengths), list(narrow)
        self.encode: Callable = compile_function(encode_shards) if compiling else encode_shards
        self.decode: Callable = compile_function(decode_shards) if compiling else decode_shards

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        parts = input_tensor.split(self.lengths)
        narrow = [part for part, chosen in zip(parts, self.narrow) if chosen]
        plain = [part for part, chosen in zip(parts, self.narrow) if not chosen]
        largest = torch.stack([part.abs().amax() if len(part) else part.new_zeros(()) for part in narrow]).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        sent = self.encode(plain, narrow, largest)
        received = sent.new_empty(group.size() * len(sent))
        dist.all_gather_into_tensor(received, sent, group)
        whole, codes = output_tensor.view(group.size(), -1), received.view(group.size(), -1)
        places = whole.split(self.lengths, 1)
        ordered = [place for place, chosen in zip(places, self.narrow) if not chosen]
        ordered += [place for place, chosen in zip(places, self.narrow) if chosen]
        self.decode(codes, ordered, largest)


def encode_shards(plain: list[Tensor], narrow: list[Tensor], largest: Tensor) -> Tensor:
    """A rank's bytes: the parameters that travel as they are, which begin at whole elements, then the others in fp8,
    and a byte that fills up the last element."""
    scales, bytes_ = scale_of(largest, E4M3), [part.view(torch.uint8) for part in plain]
    bytes_ += [(part.float() * scale).to(E4M3).view(torch.uint8) for part, scale in zip(narrow, scales.unbind())]
    missing = -sum(map(len, narrow)) % narrow[0].element_size()
    return torch.cat([*bytes_, bytes_[-1].new_zeros(missing)])


def decode_shards(codes: Tensor, targets: list[Tensor], largest: Tensor) -> None:
    """Every rank's bytes [ranks, bytes] -> parameters [ranks, elements], in the order in which they travelled."""
    back, first = scale_of(largest, E4M3).double().reciprocal().float(), 0
    for number, target in enumerate(targets, len(largest) - len(targets)):
        width = target.shape[1] * (target.element_size() if number < 0 else 1)
        part = codes[:, first : first + width]
        target.copy_(part.view(target.dtype) if number < 0 else part.view(E4M3).float() * back[number])
        first += width


def gather_in_float8(model: nn.Module, compiling: bool) -> None:
    """Has FSDP gather in fp8 what the model's linear layers multiply so, with one scale for a matrix."""
    narrow = {
        module.weight
        for module in model.modules()
        if isinstance(module, Linear) and isinstance(module.multiply, Float8Multiply) and not module.multiply.rowwise
    }
    for unit in fsdp_units(model):
        parameters, lengths = zip(*sharded_sizes(unit))
        chosen = [parameter in narrow for parameter in parameters]
        if any(chosen):
            unit.set_custom_all_gather(Float8AllGather(lengths, chosen, compiling))
