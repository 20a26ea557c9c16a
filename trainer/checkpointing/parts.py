"""What a rank holds of each tensor, which rank writes what of it, and a rank's file."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpointing.chunks import DTYPES, Chunk, StoredTensor, tensor_bytes
from trainer.checkpointing.files import HashingFile
from trainer.distributed.tensors import Fragment, local_regions


class TensorPart:
    """This rank's part of a tensor of `shape`.

    local: its values. boxes: the same values as rectangles of the whole tensor, by the offset at which each begins.
    """

    def __init__(self, tensor: Tensor | Fragment, local: Tensor):
        self.tensor, self.local, self.shape = tensor, local, tensor.shape
        whole = tensor.of(local) if isinstance(tensor, Fragment) else tensor
        self.boxes = {
            offset: values if isinstance(tensor, Fragment) else local for offset, values in local_regions(whole)
        }

    @classmethod
    def of(cls, tensor: Tensor | Fragment) -> TensorPart | None:
        """The part of `tensor` that this rank holds, not copied; None where it holds nothing of it."""
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            return None
        local = (tensor.to_local() if isinstance(tensor, (DTensor, Fragment)) else tensor).detach()
        return cls(tensor, local) if local.numel() or not tensor.shape.numel() else None

    def copied(self, local: Tensor) -> TensorPart:
        """The same part, with its values in the tensor `local`."""
        return TensorPart(self.tensor, local)


def write_parts(path: Path, parts: dict[str, TensorPart]) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Writes the values of `parts` one after the other into the new file `path`. Returns its size and SHA-256 as they
    are meant to be, and where each part lies."""
    stored = {}
    if unknown := [name for name, part in parts.items() if part.local.dtype not in DTYPES.values()]:
        raise TypeError(f"{unknown[0]} is {parts[unknown[0]].local.dtype}; checkpoints hold {', '.join(DTYPES)}")
    with HashingFile(path) as file:
        for name, part in parts.items():
            chunks = []
            for offset, values in part.boxes.items():
                start = file.size
                file.write(tensor_bytes(values.cpu().contiguous()))
                if values.numel():
                    chunks.append(Chunk(tuple(offset), tuple(values.shape), path.name, start, file.size - start))
            stored[name] = StoredTensor(part.shape, part.local.dtype, tuple(chunks))
    return {"bytes": file.size, "sha256": file.sha256.hexdigest()}, stored


def join_parts(ranks: list[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """All tensors, from what each rank has written of them. ValueError where that is not exactly the whole."""
    found: dict[str, list[StoredTensor]] = {}
    for written in ranks:
        for name, tensor in written.items():
            found.setdefault(name, []).append(tensor)
    joined = {}
    for name, tensors in sorted(found.items()):
        shape, dtype = tensors[0].shape, tensors[0].dtype
        if any((tensor.shape, tensor.dtype) != (shape, dtype) for tensor in tensors):
            raise ValueError(f"{name} is of another shape or dtype on another rank")
        joined[name] = StoredTensor(shape, dtype, tuple(chunk for tensor in tensors for chunk in tensor.chunks))
        try:
            joined[name].pieces((0,) * len(shape), shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return joined


def assign_writers(layouts: list[dict[Hashable, int]]) -> list[set[Hashable]]:
    """Assigns each part to one of the ranks that hold it, so that all ranks write about the same number of bytes.

    `layouts[rank]` maps the parts that the rank holds to their bytes; equal keys are replicas. Parts that one rank
    holds are assigned first; then each replicated one, the largest first, goes to the holder with the fewest bytes.
    """
    holders: dict[Hashable, list[int]] = {}
    for rank, layout in enumerate(layouts):
        for part in layout:
            holders.setdefault(part, []).append(rank)
    load = [0] * len(layouts)
    assigned: list[set[Hashable]] = [set() for _ in layouts]
    for part, ranks in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -layouts[item[1][0]][item[0]])):
        rank = min(ranks, key=lambda rank: load[rank])
        load[rank] += layouts[rank][part]
        assigned[rank].add(part)
    return assigned
