"""Products by copies over shared memory beside the usual ones: ranks late in turn, memory full of NaN
at first; and with a part of the protocol left out, when numbers have to be others, or an error has to say which part.

    copied.py OUT.json
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.shared import Without, error_of, error_of_late_ranks, late, late_first, one_half, poisoned
from tensor_parallel import LLAMA, model_of, spec_of
from torch import Tensor

from trainer.config import Float8Config, PrecisionConfig, RunConfig
from trainer.distributed import symmetric_memory
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.copy_engine import CopyEngineGroup, CopyStream
from trainer.distributed.mesh import World, join_world, local_device
from trainer.distributed.symmetric_memory import SymmetricBuffers
from trainer.distributed.tensors import local_values
from trainer.model.linear import DeferredGrads
from trainer.parallel.parallelize import multiply_in_float8
from trainer.planning.plan import Plan
from trainer.precision.products import Float8Multiply, GEMMRole, Multiply, matmul

EPOCHS = 40
KINDS = 4
"""Of calls: each seed is of the kind that it is by this number."""
LOOKS = 1000
"""Of 0.1 ms or so each."""
NUMBERS = {
    "float32": (torch.float32, matmul),
    "bfloat16": (torch.bfloat16, matmul),
    "tensorwise": (torch.bfloat16, Float8Multiply("tensorwise")),
    "rowwise": (torch.bfloat16, Float8Multiply("rowwise")),
}


def call(group: TensorGroup, seed: int, numbers: str) -> list[Tensor]:
    """What a call gives: with several weights, biases and what is kept."""
    generator = torch.Generator().manual_seed(seed * group.size + group.rank)
    (dtype, multiply), kind, tokens = NUMBERS[numbers], seed % KINDS, random.Random(seed).randrange(1, 9)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weights, biases = [draw(6, 4), draw(3, 4)], [draw(6), None]
    if kind == 0:
        gradients = [draw(group.size * tokens, 6), draw(group.size * tokens, 3)]
        return group.columns_gradients(gradients, weights, draw(tokens, 4), multiply)
    if kind == 1:
        return group.rows_gradients(draw(tokens, 6), weights[0], draw(group.size * tokens, 4), multiply)
    if kind == 2:
        keep = seed % 8 == 2
        products, kept = group.gather_matmul(draw(tokens, 4), weights, GEMMRole.OUTPUT, biases, keep, multiply)
        return products + [kept] * keep
    operands = [draw(group.size * tokens, 6), draw(group.size * tokens, 3)]
    return [group.wait(group.matmul_scatter_sum(operands, weights, GEMMRole.INPUT_GRADIENT, multiply))]


class Calls:
    """Beside the usual ones, which are made before."""

    def __init__(self, name: str, rank: int, size: int):
        self.place = name, rank, size
        self.usual = {
            (seed, numbers): call(TensorGroup(*self.place), seed, numbers)
            for seed in range(EPOCHS)
            for numbers in NUMBERS
        }

    def worst(self, group: TensorGroup, numbers: str, seeds: Iterable[int], parts: Iterable[Without] = ()) -> float:
        """The largest relative error, with nothing that waits between calls. parts: of the protocol, that note for
        which calls they were asked."""
        errors = [0.0]
        for seed in seeds:
            for part in parts:
                part.now = numbers, seed % KINDS
            for one, other in zip(call(group, seed, numbers), self.usual[seed, numbers]):
                errors.append(((one.double() - other.double()).norm() / other.double().norm()).item())
        largest = torch.tensor(errors).nan_to_num(nan=1e9).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.item()


def gradients(world: World, backend: type[TensorGroup], recipe: str) -> dict[str, Tensor]:
    """Of all parameters of a model in bf16 with products in fp8, over a pass whose weight gradients are put off and one
    whose are not."""
    spec = spec_of(**LLAMA, depth=1)
    model, deferred = model_of(spec, world, torch.bfloat16, backend), DeferredGrads()
    model.defer(deferred)
    multiply_in_float8(model, spec, PrecisionConfig(float8=Float8Config(recipe, ends=0)))
    generator = torch.Generator().manual_seed(3)
    for put_off in (True, False):
        tokens, targets = (torch.randint(0, spec.vocab_size, (2, 16), generator=generator) for _ in range(2))
        objective, _ = model(tokens, targets)
        deferred.active = put_off
        objective.backward()
        deferred.active = False
        deferred.take()()
    return {name: local_values(parameter.grad) for name, parameter in model.named_parameters()}


def others_than_off(world: World) -> dict[str, list[str]]:
    """Of each fp8 recipe: the parameters whose gradients have other bits on a rank than under `off`."""
    found = {}
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        expected, seen = (gradients(world, backend, recipe) for backend in (TensorGroup, CopyEngineGroup))
        names: list = [None] * world.size
        dist.all_gather_object(names, [one for one in seen if not torch.equal(seen[one], expected[one])])
        found[recipe] = sum(names, [])
    return found


def main(out: str) -> None:
    size = int(os.environ["WORLD_SIZE"])
    world = join_world(Plan(tp=size), local_device(RunConfig(device="cpu")))
    rank = world.place("tp")
    place = world.dimensions["tp"].get_group().group_name, rank, size
    calls, copied, seeds = Calls(*place), CopyEngineGroup(*place), range(EPOCHS)
    found: dict = {"gradients": others_than_off(world) if size == 2 else {}}
    with patch.object(symmetric_memory, "allocate_symmetric", poisoned):
        wait, signal = Without(SymmetricBuffers.wait), Without(SymmetricBuffers.signal)
        with patch.object(Multiply, "into", late(Multiply.into, rank)):
            with patch.object(SymmetricBuffers, "wait", wait), patch.object(SymmetricBuffers, "signal", signal):
                found["copied"] = {name: calls.worst(copied, name, seeds, (wait, signal)) for name in NUMBERS}
            symmetric_memory.ALL_BUFFERS.clear()
            with patch.object(SymmetricBuffers, "buffer", one_half(SymmetricBuffers.buffer)):
                found["without"] = {"halves": calls.worst(copied, "float32", seeds)}
        for left_out, (numbers, kind) in wait.seen.items():
            without = Without(SymmetricBuffers.wait, left_out)

            def measure(seconds: float) -> float:
                symmetric_memory.ALL_BUFFERS.clear()
                late_send = late_first(CopyStream.send, rank, seconds)
                with patch.object(CopyStream, "send", late_send), patch.object(SymmetricBuffers, "wait", without):  # noqa: B023
                    return calls.worst(copied, numbers, range(kind, 20, KINDS))  # noqa: B023

            found["without"][left_out] = error_of_late_ranks(measure)
        found["errors"] = {}
        for left_out, (numbers, kind) in signal.seen.items():
            symmetric_memory.ALL_BUFFERS.clear()
            with (
                patch.object(SymmetricBuffers, "signal", Without(SymmetricBuffers.signal, left_out)),
                patch.object(symmetric_memory, "MAX_POLLS", LOOKS),
            ):
                found["errors"][left_out] = error_of(lambda: call(copied, kind, numbers))  # noqa: B023
            dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    fork()
    main(*sys.argv[1:])
    leave()
