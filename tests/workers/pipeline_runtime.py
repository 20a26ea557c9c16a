"""The pipeline runtime on small stages: numbers, memory and failures ("numbers"), numbers where ranks wait for every
transfer ("synchronous", on any number of processes), or times against the simulator ("bubbles").

By hand on four GPUs, over NCCL: torchrun --nproc-per-node 4 tests/workers/pipeline_runtime.py numbers OUT
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.priority import go_first
from support.schedules import merge_backward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.config import ConfigError
from trainer.distributed.p2p import PendingTensor, PipelineChannels, PipelineError, stage_edges
from trainer.parallel.pipeline.runtime import PipelineRuntime
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.ir import Schedule
from trainer.planning.schedules.simulate import simulate_schedule
from trainer.planning.schedules.templates import TEMPLATES, build_greedy, build_schedule, place_stages
from trainer.util.tables import WAIT

WIDTH, VOCABULARY, LAYERS = 6, 11, 16
EVALUATED = 40
"""Micro-batches of an evaluation, more than fit at once."""
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")


@dataclass
class Batch:
    tokens: Tensor
    targets: Tensor
    documents: Tensor | None


class Deferred:
    """Where the linear layers below leave their weight gradients."""

    def __init__(self):
        self.active, self.left = False, []

    def take(self) -> Callable[[], None]:
        left, self.left = self.left, []

        @torch.no_grad()
        def run() -> None:
            for weight, gradient, inputs in left:
                update = gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)
                weight.grad = update if weight.grad is None else weight.grad + update
            left.clear()

        return run


class DeferrableLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, deferred: Deferred) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.weight, ctx.deferred = weight, deferred
        return F.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        inputs, weight = ctx.saved_tensors
        if ctx.deferred.active:
            ctx.deferred.left.append((ctx.weight, gradient, inputs))
            return gradient @ weight, None, None
        return gradient @ weight, gradient.flatten(0, -2).t() @ inputs.flatten(0, -2), None


class Layer(nn.Module):
    """gain has a gradient that is never deferred; without `deferred` all is plain autograd, for the reference."""

    def __init__(self, number: int, deferred: Deferred | None):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5)
        self.gain = nn.Parameter(1 + torch.randn(WIDTH, generator=generator, dtype=torch.float64) / 10)
        self.deferred, self.forwards = deferred, 0

    def forward(self, hidden: Tensor, documents: Tensor | None) -> Tensor:
        self.forwards += 1
        scaled = hidden * (self.gain if documents is None else self.gain * (1 + documents[..., None] / 10))
        return hidden + torch.tanh(
            F.linear(scaled, self.weight)
            if self.deferred is None
            else DeferrableLinear.apply(scaled, self.weight, self.deferred)
        )


class Stage(nn.Module):
    def __init__(self, number: int, stages: int, deferred: Deferred | None, recompute: bool = False):
        super().__init__()
        first, last = number * LAYERS // stages, (number + 1) * LAYERS // stages
        self.layers = nn.ModuleDict({str(layer): Layer(layer, deferred) for layer in range(first, last)})
        generator = torch.Generator().manual_seed(100)
        table = torch.randn(2, VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
        if number == 0:
            self.embedding = nn.Parameter(table[0])
        if number == stages - 1:
            self.head = nn.Parameter(table[1])
        self.deferred, self.recompute, self.fault = deferred, recompute, None

    def forward(self, tokens: Tensor, targets: Tensor | None, documents: Tensor | None, hidden: Tensor | None) -> Any:
        assert (hidden is None) == hasattr(self, "embedding") and (targets is not None) == hasattr(self, "head")
        if self.fault is not None:
            self.fault()
        if hidden is None:
            hidden = F.embedding(tokens, self.embedding)
        for layer in self.layers.values():
            hidden = (
                checkpoint(layer, hidden, documents, use_reentrant=False)
                if self.recompute
                else layer(hidden, documents)
            )
        if targets is None:
            return hidden
        logits = (
            F.linear(hidden, self.head)
            if self.deferred is None
            else DeferrableLinear.apply(hidden, self.head, self.deferred)
        )
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).sum(1)
        return entropy.sum() + 1e-2 * logits.square().sum(), entropy


class Kept:
    """Gradients stay where backward puts them."""

    def __init__(self):
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Callable[[int], None]:
        return lambda stage: self.calls.append((name, stage))


class Reduced:
    """Moves gradients out of a stage's parameters when it is told to, as a reduction does; what comes too late stays
    there."""

    def __init__(self, stages: dict[int, nn.Module]):
        self.stages, self.sums, self.gathered = stages, {}, set()
        self.waiting: dict[int, set[str]] = {}
        self.reductions = 0
        for stage, module in stages.items():
            for name, parameter in module.named_parameters():
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, stage, name))

    def begin(self, stage: int) -> None:
        self.reductions = 0
        self.waiting[stage] = set()

    def unshard(self, stage: int) -> None:
        assert stage not in self.gathered
        self.gathered.add(stage)

    def reshard(self, stage: int) -> None:
        self.gathered.remove(stage)

    def accumulate(self, stage: int) -> None:
        assert stage in self.gathered

    def begin_reducing_backward(self, stage: int) -> None:
        self.reductions += 1
        self.waiting[stage] = {name for name, _ in self.stages[stage].named_parameters()}

    def end_reducing_backward(self, stage: int) -> None:
        assert not self.waiting[stage]

    def reduce_now(self, stage: int) -> None:
        self.reductions += 1
        for name, parameter in self.stages[stage].named_parameters():
            if parameter.grad is not None:
                self._move(name, parameter)

    def end(self, stage: int) -> None:
        assert stage not in self.gathered

    def _accumulated(self, stage: int, name: str, parameter: nn.Parameter) -> None:
        if name in self.waiting[stage]:
            self.waiting[stage].remove(name)
            self._move(name, parameter)

    def _move(self, name: str, parameter: nn.Parameter) -> None:
        self.sums[name] = self.sums.get(name, 0) + parameter.grad
        parameter.grad = None


class Counting(PipelineChannels):
    """Counts the receive buffers that are alive, and those that nobody has waited for yet."""

    def __init__(self, *arguments):
        self.buffers: list[weakref.ref] = []
        self.peak = self.unread = 0
        super().__init__(*arguments)

    def recv(self, *arguments):
        pending = super().recv(*arguments)
        self.buffers = [buffer for buffer in self.buffers if buffer() is not None] + [weakref.ref(pending._buffer)]
        self.peak, self.unread = max(self.peak, len(self.buffers)), max(self.unread, len(self._receiving))
        return pending


class Arrived(PendingTensor):
    def wait(self) -> Tensor:
        return self._buffer


class Synchronous(PipelineChannels):
    """Waits for every transfer before the rank does anything else, on a GPU for all of its work too, as a rank does
    where everything makes the host wait for the whole device."""

    def send(self, tensor: Tensor, destination: int) -> None:
        super().send(tensor, destination)
        self.flush()
        self._settle()

    def recv(self, shape: torch.Size, dtype: torch.dtype, source: int) -> PendingTensor:
        buffer = super().recv(shape, dtype, source).wait()
        self._settle()
        return Arrived(self, None, buffer, source)

    def _settle(self) -> None:
        if GPU:
            torch.cuda.synchronize()


def hidden_state(batch: Batch) -> tuple[torch.Size, torch.dtype]:
    return torch.Size([*batch.tokens.shape, WIDTH]), torch.float64


def random_batches(count: int, seed: int, documents: bool) -> list[Batch]:
    """Micro-batches of different lengths."""
    generator, batches = torch.Generator().manual_seed(seed), []
    for number in range(count):
        shape = (2, 3 + (5 * number + seed) % 7)
        tokens, targets, ids = (torch.randint(0, VOCABULARY, shape, generator=generator).to(DEVICE) for _ in range(3))
        targets[0, 0] = -100
        batches.append(Batch(tokens, targets, ids if documents else None))
    return batches


def reference(batches: list[Batch], scale: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients by name and entropies of the whole model in one process."""
    model, entropies = Stage(0, 1, None).to(DEVICE), []
    for batch in batches:
        objective, entropy = model(batch.tokens, batch.targets, batch.documents, None)
        (objective * scale).backward()
        entropies.append(entropy.detach())
    return {name: parameter.grad for name, parameter in model.named_parameters()}, torch.stack(entropies)


@cache
def expectation(count: int, scale: float, documents: bool) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What two steps of `count` micro-batches have to give: gradients and entropies; and those of an evaluation."""
    first, second, held_out = (
        random_batches(size, seed, documents) for seed, size in enumerate((count, count, EVALUATED))
    )
    factor = torch.tensor(scale, dtype=torch.float64, device=DEVICE)
    return *reference(first + second, factor), reference(held_out, factor)[1]


def distance(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max((gradients[name] - expected[name]).norm().item() / expected[name].norm().item() for name in gradients)


def schedules(ranks: int, counts: tuple[int, ...]):
    """Every template with the first of these numbers of micro-batches that it takes, and greedy schedules, merged and
    not."""
    for name in TEMPLATES:
        for chunks in (None, 4) if name == "interleaved" else (None,):
            for count in counts:
                with contextlib.suppress(ConfigError):  # some want certain numbers; which, is tested elsewhere
                    yield build_schedule(name, ranks, count, chunks)
                    break
    for style in ("loop", "v"):
        costs = StageCosts.uniform(2 * ranks, f=1.0, i=1.3, w=0.6)
        schedule = build_greedy(costs, place_stages(ranks, 2, style), counts[0], cap=2.0 * ranks)
        yield schedule
        yield merge_backward(schedule)


def build(
    schedule: Schedule, channels: PipelineChannels | None, sharding: Any = None, recompute: bool = False, **keywords
) -> PipelineRuntime:
    deferred, rank = Deferred(), 0 if channels is None else channels.rank
    stages = {
        stage: Stage(stage, schedule.stages, deferred, recompute).to(DEVICE)
        for stage, where in enumerate(schedule.placement)
        if where == rank
    }
    return PipelineRuntime(
        schedule, stages, channels, sharding(stages) if sharding else Kept(), deferred, hidden_state, DEVICE, **keywords
    )


def gradients(runtime: PipelineRuntime) -> dict[str, Tensor | None]:
    return {name: parameter.grad for module in runtime.stages.values() for name, parameter in module.named_parameters()}


def parity(schedule: Schedule, channels: PipelineChannels | None, number: int) -> dict[str, Any]:
    """Gradients and losses of two steps against the reference: accumulated with an evaluation in between, and
    reduced."""
    count, scale = schedule.microbatches, torch.tensor(0.37, dtype=torch.float64, device=DEVICE)
    sizes = (count, count, 3 + number % 9 if number else EVALUATED)
    first, second, held_out = (random_batches(size, seed, number % 2 == 0) for seed, size in enumerate(sizes))
    expected, entropies, held_out_entropies = expectation(count, scale.item(), number % 2 == 0)
    held_out_entropies = held_out_entropies[: len(held_out)]
    last = schedule.placement[-1] == (0 if channels is None else channels.rank)

    runtime = build(schedule, channels)
    losses = runtime.train(first, scale)
    before = {name: gradient.clone() for name, gradient in gradients(runtime).items()}
    evaluated = runtime.evaluate(held_out)
    untouched = all(torch.equal(before[name], gradient) for name, gradient in gradients(runtime).items())
    losses = torch.cat([losses, runtime.train(second, scale)])
    accumulated = gradients(runtime)
    missing = sum(gradient is None for gradient in accumulated.values())
    spans, times = runtime.times.spans(), runtime.times

    every = number % 3 == 0
    reduced = build(schedule, channels, Reduced, reduce="every" if every else "last", ahead=number % 4)
    for batches in (first, second):
        reduced.train(batches, scale)
    late = sum(gradient is not None for gradient in gradients(reduced).values())
    own = {name: expected[name] for name in accumulated}
    assert reduced.sharding.sums.keys() == own.keys()
    order = [str(part) for action in schedule.orders[runtime.rank] for part in action.parts or [action]]
    return {
        "case": f"{schedule.name} on {schedule.ranks} ranks, {schedule.stages} stages, {count} micro-batches",
        "template": schedule.name,
        "missing": missing,
        "untouched": untouched,
        "late": late,
        "gradients": distance(accumulated, own),
        "reduced": distance(reduced.sharding.sums, own),
        "reductions": reduced.sharding.reductions == len(reduced.stages) * (count if every else 1),
        "losses": distance({"": losses}, {"": entropies}) if last else losses.abs().max().item(),
        "evaluated": distance({"": evaluated}, {"": held_out_entropies}) if last else evaluated.abs().max().item(),
        "timeline": [str(span.action) for span in spans] == order
        and all(0 <= a.start <= a.end <= b.start for a, b in zip(spans, spans[1:]))
        and 0 < times.busy() <= times.finish(),
    }


def numbers(out: Path) -> None:
    rank = dist.get_rank()
    pipelines = {4: PipelineChannels(range(4), stage_edges(place_stages(4, 1, "loop")), DEVICE)}
    pair = [3, 1] if rank % 2 else [0, 2]
    pipelines[2] = PipelineChannels(pair, stage_edges((0, 1)), DEVICE)
    pipelines[4].extend(stage_edges(place_stages(4, 2, "loop")))
    cases = [
        parity(schedule, channels, number)
        for ranks, channels in pipelines.items()
        for number, schedule in enumerate(schedules(ranks, (5, 8) if ranks == 4 else (5,)))
    ]
    cases += [parity(build_schedule("1f1b", 1, 3), None, 0), parity(build_schedule("zb_h1", 1, 3), None, 1)]
    pipelines[2].close()

    memory = {}
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "v_half", "v_min", "dualpipe_v"):
        for count in (8, 16):
            schedule = build_schedule(name, 4, count)
            counting = Counting(range(4), stage_edges(schedule.placement), DEVICE)
            build(schedule, counting).train(random_batches(count, 0, False), torch.ones((), device=DEVICE))
            memory[f"{name} {count}"] = [
                counting.peak,
                counting.unread,
                sum(buffer() is not None for buffer in counting.buffers),
            ]
            counting.close()

    recomputed = {}
    for name in ("1f1b", "zb_h1", "zb_v", "dualpipe_v"):
        schedule = build_schedule(name, 4, 8)
        runtime = build(schedule, pipelines[4], recompute=True)
        batches, scale = random_batches(8, 0, False), torch.tensor(0.5, dtype=torch.float64, device=DEVICE)
        runtime.train(batches, scale)
        layers = [layer for module in runtime.stages.values() for layer in module.layers.values()]
        expected, _ = reference(batches, scale)
        recomputed[name] = [layer.forwards / 8 for layer in layers], distance(gradients(runtime), expected)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        runtime.train(batches, scale)
    ranges = [event.key for event in profile.key_averages() if event.key.startswith("PP:") and event.key != WAIT]

    results = {
        "cases": cases,
        "memory": memory,
        "recomputed": recomputed,
        "ranges": len(ranges),
        "steps": len(runtime._program),
    }
    if GPU:  # NCCL does not notice that a peer has gone
        out.with_suffix(f".{rank}").write_text(json.dumps(results))
        return
    results["raised"] = failure(lambda: broken(raising(ValueError("boom")), at=2))
    results["config"] = failure(lambda: broken(raising(ConfigError("model.width=3 is odd")), at=2))
    if rank != 1:  # torchrun ends the others when one of them dies; they have something to tell first
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    results["vanished"] = failure(lambda: broken(lambda: os._exit(9), at=1))
    out.with_suffix(f".{rank}").write_text(json.dumps(results))


def synchronous(out: Path) -> None:
    """Every schedule, its evaluations too; a circle of ranks would wait until faulthandler says where."""
    ranks, results = dist.get_world_size(), []
    channels = Synchronous(range(ranks), stage_edges(place_stages(ranks, 2, "loop")), DEVICE)
    for number, schedule in enumerate([*schedules(ranks, (1,)), *schedules(ranks, (2 * ranks + 1, 2 * ranks))]):
        faulthandler.dump_traceback_later(60, exit=True)
        results.append(parity(schedule, channels, number))
        if dist.get_rank() == 0:
            print(results[-1]["case"], flush=True)
    faulthandler.cancel_dump_traceback_later()
    errors = [max(case[value] for value in ("gradients", "losses", "evaluated", "reduced")) for case in results]
    assert max(errors) < 1e-12 and not any(case["missing"] or case["late"] for case in results)
    out.with_suffix(f".{dist.get_rank()}").write_text(json.dumps(results))


def raising(error: Exception) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def broken(fault: Callable[[], None], at: int) -> None:
    """A step in which a stage fails in its fourth micro-batch."""
    schedule = build_schedule("1f1b", 4, 8)
    runtime = build(schedule, PipelineChannels(range(4), stage_edges(schedule.placement), DEVICE))
    calls = iter([None, None, None])
    for stage, module in runtime.stages.items():
        module.fault = (lambda: next(calls, fault) and fault()) if stage == at else None
    runtime.train(random_batches(8, 0, False), torch.ones((), device=DEVICE))


def failure(step: Callable[[], None]) -> dict[str, Any]:
    dist.barrier()
    start = time.perf_counter()
    try:
        step()
    except (PipelineError, ConfigError) as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "cause": type(error.__cause__).__name__,
            "seconds": time.perf_counter() - start,
        }
    return {"type": "none"}


class Slept(torch.autograd.Function):
    """Work that takes time and no processor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: dict[str, float], deferred: Deferred) -> Tensor:
        ctx.seconds, ctx.deferred = seconds, deferred
        time.sleep(seconds["F"])
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        time.sleep(ctx.seconds["I" if ctx.deferred.active else "B"])
        if ctx.deferred.active:
            ctx.deferred.left.append(ctx.seconds["W"])
        return gradient, None, None


class SleepDeferred(Deferred):
    def take(self) -> Callable[[], None]:
        left, self.left = self.left, []
        return lambda: time.sleep(sum(left))


class SleepStage(nn.Module):
    def __init__(self, costs: StageCosts, stage: int, deferred: Deferred):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, 8))
        self.seconds = {kind: getattr(costs, kind.lower())[stage] for kind in "FIWB"}
        self.deferred, self.last = deferred, stage == costs.stages - 1

    def forward(self, tokens: Tensor, targets: Tensor | None, documents: Tensor | None, hidden: Tensor | None) -> Any:
        hidden = Slept.apply(self.start if hidden is None else hidden, self.seconds, self.deferred)
        return (hidden.sum(), hidden.detach().sum()[None]) if self.last else hidden


def sleeping(schedule: Schedule, costs: StageCosts, channels: PipelineChannels | None) -> PipelineRuntime:
    deferred, rank = SleepDeferred(), 0 if channels is None else channels.rank
    stages = {
        stage: SleepStage(costs, stage, deferred) for stage, where in enumerate(schedule.placement) if where == rank
    }
    return PipelineRuntime(
        schedule, stages, channels, Kept(), deferred, lambda batch: (torch.Size([1, 8]), torch.float32), DEVICE
    )


def overheads(channels: PipelineChannels) -> tuple[float, float, float]:
    """Seconds that a sleep takes longer than asked, that the host spends on an action, and that a transfer takes.

    Of several runs the fastest counts, as it does of the steps that are compared: other work on the machine adds time.
    """
    asked = 0.004
    runtime = sleeping(build_schedule("1f1b", 1, 32), StageCosts.uniform(1, asked, asked, asked, asked), None)
    runs = []
    for _ in range(6):
        runtime.train([Batch(torch.zeros(1), torch.zeros(1), None)] * 32, torch.ones((), device=DEVICE))
        runs.append((runtime.busy() / 64 - asked, (runtime.finish() - runtime.busy()) / 64))
    sleep, host = map(min, zip(*runs))
    tensor, hops, posting = torch.zeros(1, 8), [], []
    for _ in range(60):
        dist.barrier()
        start = time.perf_counter()
        pending = channels.recv(tensor.shape, tensor.dtype, channels.rank ^ 1)
        if channels.rank % 2:
            pending.wait()
        sent = time.perf_counter()
        channels.send(tensor, channels.rank ^ 1)
        posting.append(time.perf_counter() - sent)
        if channels.rank % 2 == 0:
            pending.wait()
            hops.append((time.perf_counter() - start) / 2)
        channels.flush()
    mine = torch.tensor(
        [sleep, host + statistics.median(posting), statistics.median(hops) if hops else 0.0], dtype=torch.float64
    )
    dist.all_reduce(mine)
    return mine[0].item() / 4, mine[1].item() / 4, mine[2].item() / 2


def bubbles(out: Path) -> None:
    """Balanced stages, a heavy head, and much attention, in seconds of a rank's share of the model."""
    go_first()
    channels = PipelineChannels(range(4), stage_edges(place_stages(4, 2, "loop")), DEVICE)
    channels.extend(stage_edges(place_stages(4, 2, "v")))
    unit, results = 0.012, []
    sleep, host, transfer = overheads(channels)
    for scenario, (f, i, w, head) in {
        "balanced": (1, 1, 1, 0),
        "head": (1, 1, 1, 0.6),
        "attention": (0.9, 1.5, 0.5, 0),
    }.items():
        others = ("zb_h2", "v_half", "dualpipe_v") if scenario == "balanced" else ()
        for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "greedy", *others):

            def costs(stages: int, extra: float = 0.0, **more: float) -> StageCosts:
                def seconds(x: float) -> tuple[float, ...]:
                    return tuple(
                        extra + unit * (x * 4 / stages + (head if stage == stages - 1 else 0))
                        for stage in range(stages)
                    )

                return StageCosts(
                    f=seconds(f), i=seconds(i), w=seconds(w), b=seconds(i + w), activation=(1.0,) * stages, **more
                )

            schedule = (
                build_greedy(costs(8), place_stages(4, 2, "v"), 8, cap=8.0)
                if name == "greedy"
                else build_schedule(name, 4, 8)
            )
            runtime = sleeping(schedule, costs(schedule.stages), channels)
            predicted = simulate_schedule(schedule, costs(schedule.stages, sleep, host=host, transfer=transfer))
            measured: list[tuple[float, float]] = []
            while not measured or (
                len(measured) < 24
                and (  # the machine may be busy
                    min(measured)[0] > 1.05 * predicted.makespan or abs(min(measured)[1] - predicted.bubble) > 0.04
                )
            ):
                dist.barrier()
                begun = time.perf_counter()  # one clock for all; ranks leave the barrier one after the other
                runtime.train([Batch(torch.zeros(1), torch.zeros(1), None)] * 8, torch.ones((), device=DEVICE))
                seen: list[Any] = [None] * 4
                dist.all_gather_object(seen, (begun, runtime.finish(), runtime.busy()))
                makespan = max(begun + finish for begun, finish, _ in seen) - min(begun for begun, _, _ in seen)
                measured.append((makespan, 1 - sum(busy for _, _, busy in seen) / (4 * makespan)))
            results.append(
                {
                    "case": f"{name}, {scenario}",
                    "measured": min(measured)[0],
                    "measured_bubble": min(measured)[1],
                    "predicted": predicted.makespan,
                    "predicted_bubble": predicted.bubble,
                    "ideal": simulate_schedule(schedule, costs(schedule.stages)).makespan,
                }
            )
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"cases": results, "sleep": sleep, "host": host, "transfer": transfer}))


if __name__ == "__main__":
    if GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo", device_id=DEVICE if GPU else None)
    {"numbers": numbers, "synchronous": synchronous, "bubbles": bubbles}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
