"""Muon: momentum whose matrices are orthogonalised (Jordan et al., kellerjordan.github.io/posts/muon; at scale: Liu et
al., arXiv 2502.16982).

The iteration needs whole matrices, of which ranks hold parts. So each matrix has one rank that puts it together,
orthogonalises it, and sends every rank its part of the result; the matrices are dealt out in rounds, the costliest
first, so that in a round all ranks multiply matrices of about one size. What travels is in the type of the iteration,
which rounds every element by itself: the result has the bits of one process. Momentum stays sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.config.schema import MuonConfig
from trainer.distributed.mesh import World
from trainer.distributed.tensors import local_extent, local_values
from trainer.planning.parameters import NEWTON_SCHULZ_STEPS, orthogonalisation_flops
from trainer.precision.products import DTYPES

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial that every step applies to the singular values: steep at zero, near one at one."""

MOMENTUM = 0.95
"""Decay of the momentum, which is Nesterov's."""

SMALLEST = 1e-7
"""The least norm that a matrix is divided by."""

ROUND = 2**25
"""Elements of whole matrices that a rank puts together at a time, unless one matrix has more."""


def orthogonalise_matrix(matrix: Tensor) -> Tensor:
    """The matrix with all singular values near one, by Newton-Schulz iteration in its own type: [rows, columns], or
    each matrix of a stack [experts, rows, columns]."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST)
    multiply = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def lr_factor(shape: Sequence[int]) -> float:
    """What the learning rate is multiplied with for matrices [..., rows, columns], whose orthogonalised update has
    elements of about 1 / sqrt(max(rows, columns)): steps are 0.2 a unit of learning rate, as AdamW's (arXiv 2502.16982,
    section 2.2)."""
    return 0.2 * math.sqrt(max(shape[-2:]))


def assign_matrices(shapes: dict[str, Sequence[int]], ranks: int) -> list[list[tuple[str, int]]]:
    """Rounds of (name, rank that orthogonalises it).

    Of the matrices in falling order of cost, each rank takes one of every `ranks` neighbours. So the dearest ones of
    all rounds together cost no more than the dearest of all and an equal share of the whole."""
    order = sorted(shapes, key=lambda name: -orthogonalisation_flops(shapes[name], 1))
    rounds: list[list[tuple[str, int]]] = []
    held = ROUND
    for first in range(0, len(order), ranks):
        some = order[first : first + ranks]
        size = max(math.prod(shapes[name]) for name in some)
        if held + size > ROUND:
            rounds.append([])
            held = 0
        rounds[-1] += [(name, rank) for rank, name in enumerate(some)]
        held += size
    return rounds


EXPERT_DIMENSIONS = ("expert_replicate", "expert_shard", "ep")
"""The dimensions of the mesh of experts (`Plan.expert_mesh`) among which a pipeline stage's ranks have a place."""


@dataclass(frozen=True)
class ShardedMatrix:
    """A matrix and who holds what of it.

    owner: the rank that orthogonalises it. boxes: by rank, what it holds of the whole. sources: ranks whose parts the
    owner puts together, one for each part, where several hold the same: those at the owner's own place in every
    dimension of the mesh that does not cut the matrix."""

    name: str
    shape: torch.Size
    owner: int
    boxes: list[tuple[slice, ...]]
    sources: list[int]

    @classmethod
    def of(cls, name: str, parameter: Tensor, owner: int, places: list[dict[str, int]]) -> ShardedMatrix:
        """places: of all ranks in the mesh, by dimension."""
        whole, cut = tuple(slice(0, size) for size in parameter.shape), set()
        view = {name for name in places[owner] if name not in EXPERT_DIMENSIONS}
        if isinstance(parameter, DTensor):
            names, placements = parameter.device_mesh.mesh_dim_names, parameter.placements
            cut = {name for name, placement in zip(names, placements) if not placement.is_replicate()}
            view = {*EXPERT_DIMENSIONS} if "ep" in names else view
            boxes = [
                tuple(slice(first, first + size) for size, first in zip(*local_extent(parameter, place)))
                for place in places
            ]
        else:
            boxes = [whole] * len(places)
        sources = [
            rank
            for rank, place in enumerate(places)
            if all(place[name] == places[owner][name] for name in view if name not in cut)
        ]
        return cls(name, parameter.shape, owner, boxes, sources)

    def part(self, rank: int) -> torch.Size:
        """Shape of what a rank holds."""
        return torch.Size(box.stop - box.start for box in self.boxes[rank])


class Orthogonaliser:
    """Orthogonalises the matrices of which the ranks of a pipeline stage hold parts.

    matrices: name -> parameter, the same ones in the same order on all ranks that hold the same stages. world: None
    for a process by itself."""

    def __init__(self, matrices: dict[str, Tensor], config: MuonConfig, world: World | None):
        self.dtype = DTYPES[config.compute]
        self.device = world.device if world else local_values(next(iter(matrices.values()))).device
        self.group = world.peers if world else None
        places = world.peer_places if world else [{}]
        self.ranks, self.rank = len(places), dist.get_rank(self.group) if world else 0
        self.rounds = [
            [ShardedMatrix.of(name, matrices[name], owner, places) for name, owner in some]
            for some in assign_matrices({name: matrix.shape for name, matrix in matrices.items()}, self.ranks)
        ]

    def run(self, direction: Callable[[str], Tensor], apply: Callable[[str, Tensor], None]) -> None:
        """Calls `apply` with this rank's part of every orthogonalised matrix. direction: name -> this rank's part of
        the matrix, asked for once each. All ranks call it together.

        Parts travel while the matrices of another round are multiplied."""
        if not self.rounds:
            return
        arriving = self._gather(self.rounds[0], direction)
        leaving: list[Callable[[], None]] = []
        for number, some in enumerate(self.rounds):
            wholes = arriving()
            if number + 1 < len(self.rounds):
                arriving = self._gather(self.rounds[number + 1], direction)
            done = [orthogonalise_matrix(whole) for whole in wholes]
            for finish in leaving:
                finish()
            leaving = [self._scatter(some, done, apply)]
        for finish in leaving:
            finish()

    def _own(self, some: list[ShardedMatrix]) -> list[ShardedMatrix]:
        return [matrix for matrix in some if matrix.owner == self.rank]

    def _gather(self, some: list[ShardedMatrix], direction: Callable[[str], Tensor]) -> Callable[[], list[Tensor]]:
        """Starts to put together the matrices of a round; what it returns waits for those that this rank owns."""
        parts: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for matrix in some:
            part = direction(matrix.name).to(self.device, self.dtype)
            if self.rank in matrix.sources:
                parts[matrix.owner].append(part)
        own = self._own(some)
        shapes = [[matrix.part(rank) for matrix in own if rank in matrix.sources] for rank in range(self.ranks)]
        arriving = self._exchange(parts, shapes)

        def finish() -> list[Tensor]:
            received = [iter(some) for some in arriving()]
            wholes = [torch.empty(matrix.shape, dtype=self.dtype, device=self.device) for matrix in own]
            for matrix, whole in zip(own, wholes):
                for rank in matrix.sources:
                    whole[matrix.boxes[rank]] = next(received[rank])
            return wholes

        return finish

    def _scatter(
        self, some: list[ShardedMatrix], done: list[Tensor], apply: Callable[[str, Tensor], None]
    ) -> Callable[[], None]:
        """Starts to send every rank its part of what this one has orthogonalised; what it returns waits for this
        rank's own parts of the round, and applies them."""
        own = self._own(some)
        parts = [[whole[matrix.boxes[rank]] for matrix, whole in zip(own, done)] for rank in range(self.ranks)]
        theirs = [[matrix for matrix in some if matrix.owner == rank] for rank in range(self.ranks)]
        arriving = self._exchange(parts, [[matrix.part(self.rank) for matrix in matrices] for matrices in theirs])

        def finish() -> None:
            for matrices, received in zip(theirs, arriving()):
                for matrix, part in zip(matrices, received):
                    apply(matrix.name, part)

        return finish

    def _exchange(self, parts: list[list[Tensor]], shapes: list[list[torch.Size]]) -> Callable[[], list[list[Tensor]]]:
        """Starts to send `parts[rank]` to each rank; what it returns waits for what comes from each, of
        `shapes[rank]`."""
        if self.ranks == 1:
            return lambda: parts
        sent = torch.cat([part.flatten() for some in parts for part in some] or [self._empty(0)])
        sizes = [[shape.numel() for shape in some] for some in shapes]
        received = self._empty(sum(map(sum, sizes)))
        width = self.dtype.itemsize
        # As bytes, since not every backend knows every type.
        transfer = dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [width * sum(some) for some in sizes],
            [width * sum(part.numel() for part in some) for some in parts],
            group=self.group,
            async_op=True,
        )

        def finish() -> list[list[Tensor]]:
            transfer.wait()
            runs = iter(received.split([size for some in sizes for size in some]))
            return [[next(runs).view(shape) for shape in some] for some in shapes]

        return finish

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)
