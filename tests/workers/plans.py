"""Every plan of a generated matrix against the one-process reference: losses, norms and per-parameter gradients."""
from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import trainer.state

from distributed import CAN_COMPILE
from reference import Trajectory, random_batch, reference, tiny_spec
from trainer.batch import BatchPlan
from trainer.config import Config
from trainer.optim.optimizer import Optimizer
from trainer.parallel.mesh import join, local_device
from trainer.parallel.pipeline.layout import resolve_pipeline
from trainer.parallel.plan import resolve_plan
from trainer.state import COPY, TrainState
from trainer.step import train_step

STEPS, SEQUENCES, LENGTH = 3, 8, 16


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Recorder(Optimizer):
    """Keeps the whole, unscaled gradients of each step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen: list[dict[str, torch.Tensor]] = []
        self.scale = 1.0

    def step(self, rate, grad_scale, found_inf):
        missing = [name for name, p in self.parameters.items() if p.grad is None]
        assert not missing, f"no gradient for {missing}"
        self.seen.append({name: whole(p.grad).cpu().clone() / self.scale for name, p in self.parameters.items()})
        super().step(rate, grad_scale, found_inf)


def settings(world: int, **changes) -> Config:
    config = Config()
    config.run.steps, config.lr.warmup, config.lr.peak, config.optimizer.clip_norm = 10, 2, 1e-3, 0.5
    for path, value in changes.items():
        target = config
        *parents, last = path.split("__")
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)
    return config


def run(config: Config, spec, world, plan, accumulation: int, documents: bool) -> Trajectory:
    micro = SEQUENCES // plan.dp // accumulation
    pipeline = resolve_pipeline(config, spec, plan, BatchPlan(LENGTH, SEQUENCES, micro, accumulation))
    trainer.state.Optimizer = Recorder
    state = TrainState.build(config, spec, plan, pipeline, world)
    optimizer, seen = state.optimizer, Trajectory()
    for step in range(STEPS):
        batch = random_batch(step, SEQUENCES, LENGTH, spec.vocab_size, documents, str(world.device))
        start = world.data.get_local_rank() * micro * accumulation
        rows = [slice(start + i * micro, start + (i + 1) * micro) for i in range(accumulation)]
        optimizer.scale = state.scaler.value.item()
        scalars = train_step(state, [SimpleNamespace(tokens=batch.tokens[r], targets=batch.targets[r],
                                                     documents=None if batch.documents is None else batch.documents[r]) for r in rows], False)
        assert scalars["found_inf"] == 0
        seen.losses.append(scalars["loss"].item())
        seen.norms.append(scalars["grad_norm"].item())
    seen.gradients = [gathered(gradients) for gradients in optimizer.seen]
    seen.parameters = gathered({name: whole(p.detach()).cpu().clone() for name, p in state.parameters.items()})
    return seen


def gathered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of all pipeline ranks; those that several have must be equal."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensors)
    merged: dict[str, torch.Tensor] = {}
    for some in everyone:
        for name, value in some.items():
            name = name.removesuffix(COPY)
            assert name not in merged or torch.equal(merged[name], value), f"{name} differs between ranks"
            merged[name] = value
    return merged


def error(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Worst error over parameters, relative to the parameter's own norm (or a hundredth of the global one), and where."""
    assert a.keys() == b.keys()
    floor = 1e-2 * torch.stack([value.norm() for value in b.values()]).norm()
    return max((((a[name] - b[name]).norm() / torch.maximum(b[name].norm(), floor)).item(), name) for name in b)


def cases(world: int):
    """stage x shard size x accumulation in fp32, then each of the other features under every stage."""
    for stage, shard, accumulation in itertools.product((0, 1, 2, 3), (-1, 2), (1, 2)):
        if (stage == 0 or world <= 2) and shard == 2:
            continue
        yield dict(parallel__zero__stage=stage, parallel__shard=shard), accumulation, {}
    features = [
        (dict(activation__mode="full"), {}), (dict(activation__mode="full", activation__every=2), {}),
        (dict(activation__mode="selective"), {}), (dict(activation__mode="selective", activation__modules=["*.feed_forward"]), {}),
        (dict(precision__compute="bf16"), {}), (dict(precision__compute="fp16"), {}), (dict(loss__chunk=5), {}),
        ({}, dict(tied=True)), ({}, dict(documents=True)),
        ({}, dict(attention={"window": 5, "soft_cap": 2.0}, pattern=[{}, {"attention": {"window": 0}}], documents=True)), (dict(precision__compute="bf16", activation__mode="full"), {})]
    for stage, (changes, extra) in itertools.product((0, 1, 2, 3), features):
        yield dict(parallel__zero__stage=stage, **changes), 2, extra
    yield dict(parallel__zero__stage=3, parallel__zero__offload=True), 2, {}
    yield dict(parallel__zero__stage=2, precision__reduce="bf16", precision__compute="bf16"), 1, {}
    if world == 2 and CAN_COMPILE:
        for changes, extra in [(dict(activation__mode="full"), {}), (dict(activation__mode="selective"), dict(documents=True)),
                               (dict(activation__mode="selective", activation__modules=["*.feed_forward"]), {}),
                               (dict(activation__mode="budget", parallel__zero__offload=True), {}), (dict(precision__compute="fp16"), dict(tied=True))]:
            yield dict(parallel__zero__stage=3, compile=True, **changes), 2, extra
        yield dict(parallel__zero__stage=0, compile=True), 2, {}


def main(out: str) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    results, references, bases, device = [], {}, {}, local_device(Config().run)
    for changes, accumulation, extra in cases(world_size):
        config = settings(world_size, **changes)
        documents, extra = extra.get("documents", False), {name: value for name, value in extra.items() if name != "documents"}
        # FlexAttention on a GPU wants heads of a power of two.
        spec = tiny_spec(**extra, **({"width": 64} if device.type == "cuda" else {}))
        plan = resolve_plan(config.parallel, world_size)
        world = join(plan, device)
        key = f"{extra} documents={documents}"
        if key not in references:
            references[key] = reference(settings(world_size), spec, STEPS, SEQUENCES, LENGTH, documents, str(device))
        expected, seen = references[key], run(config, spec, world, plan, accumulation, documents)
        worst, where = max(error(a, b) for a, b in zip(seen.gradients, expected.gradients))
        base = bases.setdefault((changes["parallel__zero__stage"], plan.shard, accumulation, key), seen)
        results.append({"case": f"{changes} accumulation {accumulation} {key}", "compute": config.precision.compute,
                        "loss": max(abs(a - b) / b for a, b in zip(seen.losses, expected.losses)),
                        "norm": max(abs(a - b) / b for a, b in zip(seen.norms, expected.norms)), "gradient": worst, "where": where,
                        "parameters": error(seen.parameters, expected.parameters)[0],
                        "recompute": "none" if config.compile else config.activation.mode,
                        "bitwise": all(torch.equal(a[n], b[n]) for a, b in zip(seen.gradients, base.gradients) for n in b)})
    if world.rank == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)
