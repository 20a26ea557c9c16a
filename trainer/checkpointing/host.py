"""Inputs of recomputed layers in host memory, from a layer's forward pass until its backward pass.

A copy out runs behind the computation of the layer whose input it is. It has until the next layer's call, which waits
for it and then gives the device's memory back to its own stream: no more than two inputs are on the device, however far
the host is ahead. A copy back begins with the backward pass of the layer behind. The newest input stays on the device
until another comes, and so need not come back where backward follows at once.

On a CPU both are plain copies within one memory: the same order of things, with nothing won."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

PIECE = 1 << 26
"""Bytes of a block of host memory: torch rounds page-locked blocks up to powers of two, which for whole tensors could
double them. It keeps those that are free for the next ones."""


class HostStore:
    """What the layers of a pipeline stage keep in host memory."""

    def __init__(self) -> None:
        self.newest: HostTensor | None = None
        self.stream: torch.cuda.Stream | None = None  # for copies, once the device is known

    def keep(self, layer: int, x: Tensor, part: int = 0) -> saved_tensors_hooks:
        """The context in which autograd keeps `x`, the input of the part `part` of a layer, in host memory. layer: its
        place among those that do so."""
        return saved_tensors_hooks(partial(self.pack, tensor_identity(x), (layer, part)), unpack_host)

    def pack(self, wanted: tuple, place: tuple[int, int], saved: Tensor) -> Any:
        """wanted: the identity of the input, not the input: autograd keeps this function as long as what it returns."""
        if tensor_identity(saved) != wanted:
            return saved
        newest = self.newest
        if newest is not None and newest.there is not None and newest.there.data_ptr() == saved.data_ptr():
            newest.uses += 1
            return newest
        if saved.is_cuda and self.stream is None:
            self.stream = torch.cuda.Stream(saved.device)
        if newest is not None:
            newest.leave()
        self.newest = HostTensor(saved.detach(), place, newest, self)
        return self.newest


def tensor_identity(x: Tensor) -> tuple:
    """What tells a tensor from all others that are alive."""
    return x.data_ptr(), x.shape, x.dtype


def unpack_host(packed: Any) -> Tensor:
    return packed.take() if isinstance(packed, HostTensor) else packed


class HostTensor:
    """A tensor in host memory; `there`: on the device, as long as it still is or again is. uses: how often it will be
    taken. before: the one that was kept before it in the same forward pass, and is needed after it."""

    def __init__(self, x: Tensor, place: tuple[int, int], newest: HostTensor | None, store: HostStore):
        self.place, self.store, self.uses = place, store, 1
        self.before = newest if newest is not None and newest.place < place else None
        self.there: Tensor | None = x.contiguous()
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.step = PIECE // x.element_size()
        self.pieces = [
            torch.empty(len(part), dtype=x.dtype, pin_memory=x.is_cuda) for part in self.there.view(-1).split(self.step)
        ]
        self.copy(out=True)

    def copy(self, out: bool) -> None:
        """Starts a copy to the host or from it, behind what has been asked of the device."""
        stream = self.store.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for here, there in zip(self.pieces, self.there.view(-1).split(self.step)):
                (here if out else there).copy_(there if out else here, non_blocking=True)
        self.copied = None if stream is None else stream.record_event()

    def wait(self) -> None:
        """What is asked of the device from now on comes behind the copy."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def leave(self) -> None:
        """Gives up the tensor on the device. What takes its memory next comes behind the copy."""
        self.wait()
        self.there = None

    def fetch(self) -> None:
        """Starts to bring the tensor back."""
        if self.there is None:
            self.there = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.copy(out=False)

    def take(self) -> Tensor:
        """The tensor on the device, for the backward pass of its layer; the one that is needed next is fetched behind
        that."""
        self.fetch()
        self.wait()
        x, self.uses = self.there, self.uses - 1
        if self.uses <= 0:
            self.there = None
            if self.store.newest is self:
                self.store.newest = None
        if self.before is not None:
            self.before.fetch()
        return x
