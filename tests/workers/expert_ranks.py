"""Tokens on their way to experts that ranks share: four processes, in groups of 2 and 4 ranks, against one process that
holds all experts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.launch import fork, leave
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config.model import ExpertsSpec
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.mesh import join_world
from trainer.model.experts import Experts
from trainer.parallel.experts.apply import DISPATCH
from trainer.parallel.recompute import recompute_unrouted, selective_contexts
from trainer.planning.plan import Plan

CPU, WIDTH, INNER, EXPERTS, TOKENS = torch.device("cpu"), 8, 16, 8, 6


def routings(top_k: int) -> Iterator[tuple[str, Tensor]]:
    """Choices of the tokens of all ranks, [tokens, top_k], by what is special about them."""
    everyone = 4 * TOKENS
    yield "spread", torch.rand(everyone, EXPERTS).topk(top_k).indices
    yield "first experts", torch.arange(top_k).expand(everyone, top_k)
    yield "last experts", torch.arange(EXPERTS - top_k, EXPERTS).expand(everyone, top_k).flip(1)
    yield "a rank's own", (torch.arange(everyone)[:, None] // TOKENS * 2 + torch.arange(top_k)) % EXPERTS


class CountedOperators(TorchDispatchMode):
    """Counts the operators of ours that route."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "trainer":
            name = function._schema.name.removeprefix("trainer::")
            self.calls[name] = self.calls.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def build(part: slice = slice(None)) -> Experts:
    """Experts with the same weights everywhere, or some of them."""
    experts = Experts(ExpertsSpec(count=EXPERTS), WIDTH, INNER, lambda gate, up: F.silu(gate) * up).double()
    generator = torch.Generator().manual_seed(1)
    for layer in (experts.gate, experts.up, experts.down):
        whole = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64)
        layer.weight = torch.nn.Parameter(whole[part])
    return experts


def passes(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor, again: bool) -> list[Tensor]:
    """How many choices had no room, the result of a forward pass, and the gradients of everything. again: whether
    backward recomputes the result."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()

    def body(x: Tensor) -> Tensor:
        output, missing = experts(x, chosen, weights)
        left_out.append(missing)
        return output

    left_out: list[Tensor] = []
    result = recompute_unrouted(selective_contexts)(body, x) if again else body(x)
    result.backward(torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result))
    parameters = [layer.weight for layer in (experts.gate, experts.up, experts.down)]
    return [left_out[0], result.detach(), *(one.grad for one in (x, weights, *parameters))]


def compare(
    method: str, size: int, top_k: int, routing: str, chosen: Tensor, again: bool, room: bool
) -> dict[str, Any]:
    """room: whether there is a fixed number of rows, enough for all."""
    rank, place = dist.get_rank(), dist.get_rank() % size
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4 * TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.rand(4 * TOKENS, top_k, generator=generator, dtype=torch.float64)
    own = slice(rank * TOKENS, (rank + 1) * TOKENS)
    group = slice((rank - place) * TOKENS, (rank - place + size) * TOKENS)
    held = slice(place * EXPERTS // size, (place + 1) * EXPERTS // size)
    shared = build(held)
    shared.dispatch = DISPATCH[method](TensorGroup(GROUPS[size].group_name, place, size), room * size)
    with CountedOperators() as counted:
        found = passes(shared, x[own], chosen[own], weights[own], again)
    # Each rank passes gradients that depend on the place of a token among its own tokens.
    expected = [passes(build(), x[some], chosen[some], weights[some], False) for some in slices(group)]
    mine = expected[place]
    sums = [sum(parts)[held] for parts in list(zip(*expected))[4:]]
    errors = [float((one - other).abs().max()) for one, other in zip(found, [*mine[:4], *sums])]
    return {
        "case": f"{method} of {size}, top {top_k}, {routing}{', recomputed' * again}{', fixed rows' * room}",
        "error": max(errors),
        "missing": any(one is None for one in found),
        "calls": counted.calls,
    }


def overflow() -> dict[str, Any]:
    """All tokens of four ranks choose the first two experts, which the first rank holds, and there is room for a
    quarter of these rows, but in evaluation, and in a step that is run again, for all."""
    place, chosen = dist.get_rank(), torch.tensor([0, 1]).expand(TOKENS, 2)
    experts = build(slice(2 * place, 2 * place + 2))
    experts.dispatch = DISPATCH["shared_memory"](TensorGroup(GROUPS[4].group_name, place, 4), 1.0)
    arguments = torch.ones(TOKENS, WIDTH, dtype=torch.float64), chosen, torch.ones(TOKENS, 2, dtype=torch.float64)
    missing = [experts(*arguments).missing.item()]
    with torch.no_grad():
        missing.append(experts(*arguments).missing.item())
    experts.dispatch.exact = True
    missing.append(experts(*arguments).missing.item())
    return {"case": "overflow", "missing": missing}


def slices(group: slice) -> list[slice]:
    return [slice(first, first + TOKENS) for first in range(group.start, group.stop, TOKENS)]


def main(out: str) -> None:
    join_world(Plan(replicate=4), CPU)
    for size in (2, 4):
        GROUPS[size] = dist.new_subgroups(size)[0]
    results = []
    for top_k in (1, 2, EXPERTS):
        torch.manual_seed(0)
        for routing, chosen in routings(top_k):
            for method in ("alltoall", "allgather", "shared_memory"):
                for size in GROUPS:
                    for again in (False, True)[: 1 + (top_k == 2)]:  # what is chosen is kept, however many
                        for room in (False, True)[: 1 + (method != "alltoall")]:
                            results.append(compare(method, size, top_k, routing, chosen, again, room))
    results.append(overflow())
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(everyone))


GROUPS: dict[int, Any] = {}

if __name__ == "__main__":
    fork()
    main(*sys.argv[1:])
    leave()
