"""What one device reaches, at the shapes of a recipe: products, attention, passes of the model, kernels that move
memory, the optimizer's update."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config import Config, OptimizerConfig
from trainer.config.model import AttentionSpec
from trainer.config.registry import ATTENTION
from trainer.distributed.mesh import World
from trainer.model.attention import causal_attention, first_seen, kernel_priority, mask_of
from trainer.model.experts import cast_model
from trainer.model.initial import initialize_model, parameter_infos
from trainer.model.loss import loss_terms
from trainer.model.stage import capture_graph, split_report
from trainer.model.transformer import Transformer
from trainer.observe.deferred import TimePoint
from trainer.optim.optimizer import Optimizer, parameter_policies
from trainer.parallel.context.plan import KERNELS, attention_kernel
from trainer.parallel.parallelize import compile_layers, keep_buffers
from trainer.parallel.tensor.apply import squared_norms
from trainer.planning.documents import DocumentLengths, computed_keys, document_ranges, documents_of
from trainer.planning.estimate.calibrate import MeasuredGEMM, MeasuredPass, MeasuredWork, truncate_model
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.estimate.timing import update_bytes
from trainer.planning.layer import (
    ATTENTION_BACKWARD,
    attention_flops,
    flops_per_token,
    head_program,
    model_programs,
    seen_keys,
)
from trainer.planning.parameters import layer_specs
from trainer.planning.resolve import Layout
from trainer.planning.states import ELEMENT_BYTES, MASTER_BYTES
from trainer.precision.products import DTYPES, Float8Multiply, GEMMRole, matmul

# Times of work on a device, without a wait of the host in between.


LEAST, MOST = 3, 30
"""Repeats."""

SHORT = 1e-3
"""Seconds that a repeat lasts at least: shorter work is done several times in it."""


class Stopwatch:
    """Takes the median of repeats, and of several ranks the slowest's, for which the others would wait. All ranks call
    it together, with the same work."""

    def __init__(self, world: World):
        self.world = world

    def seconds(self, work: Callable[[], Any], limit: float) -> float:
        """Of one call of `work`. limit: seconds to measure in, about; three repeats are made in any case."""
        self.together(*self._run(work, 1, 1))  # compiles, allocates, connects
        trial = self.together(*self._run(work, 1, 1))
        calls = max(1, min(1000, round(SHORT / max(trial, 1e-9))))
        repeats = max(LEAST, min(MOST, int(limit / max(calls * trial, 1e-9))))
        return self.together(median(self._run(work, calls, repeats)))

    def together(self, seconds: float) -> float:
        """The longest of all ranks' times."""
        if self.world.size == 1:
            return seconds
        longest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()

    def _run(self, work: Callable[[], Any], calls: int, repeats: int) -> list[float]:
        moments = [TimePoint(self.world.device)]
        for _ in range(repeats):
            for _ in range(calls):
                work()
            moments.append(TimePoint(self.world.device))
        moments[-1].wait()
        return [before.seconds_to(after) / calls for before, after in itertools.pairwise(moments)]


# What a device is measured with.


SQUARES = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (64, 256, 1024)}
"""Sides of the sweep's matrices."""

STREAM = {"cuda": 2**28, "cpu": 2**24}
"""Bytes of each tensor of the kernel that only moves memory: beyond caches."""

TINY = 100
"""Kernels without work that are timed together."""

ROOM, STATES = 0.7, 0.06
"""Shares of a device's memory that a measured pass may take, and what the optimizer's update is measured on."""

DEEP = 3
"""Layers of the deeper pass: what they take beside the first is theirs, and neither head's nor loss's."""


class DeviceProbe:
    """Measures this rank's device. layout: of the recipe on all ranks; seconds: to measure in, about; memory: bytes of
    the device. All ranks call its methods together."""

    def __init__(self, config: Config, layout: Layout, world: World, seconds: float, memory: float):
        self.config, self.layout, self.world, self.memory = config, layout, world, memory
        self.device, self.dtype = world.device, DTYPES[config.precision.compute]
        self.element = ELEMENT_BYTES[config.precision.compute]
        self.watch, self.budget = Stopwatch(world), seconds
        self.length = layout.batch.sequence_length // layout.plan.cp

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).mul_(0.02).to(self.dtype)

    def sweep(self) -> list[MeasuredGEMM]:
        """Products of square matrices, until one takes too long."""
        found: list[MeasuredGEMM] = []
        limit = 0.1 * self.budget / len(SQUARES[self.device.type])
        for side in SQUARES[self.device.type]:
            if found and 5 * found[-1].seconds * (side / found[-1].tokens) ** 3 > limit:
                break
            a, b = self.random(side, side), self.random(side, side)
            seconds = self.watch.seconds(lambda a=a, b=b: matmul(a, b, GEMMRole.OUTPUT), limit)
            found.append(MeasuredGEMM(str(side), side, side, side, seconds))
        return found

    def products(self, rate: float) -> list[MeasuredGEMM]:
        """The products with the model's matrices, as the plan cuts them: the mean of output and both gradients. rate:
        FLOP/s, by which tokens are left out where all would take too long."""
        spec, tp = self.layout.spec, self.layout.plan.tp
        programs = model_programs(spec, self.layout.batch.sequence_length, tp, self.element)
        gemms = [gemm for one in (*programs, head_program(spec, tp, self.element)) for gemm in one.gemms.values()]
        counts = Counter((gemm.name, *map(round, gemm.shape)) for gemm in gemms)
        shapes: dict[tuple[int, int], tuple[str, int]] = {}
        for (name, rows, columns), count in counts.items():
            first, before = shapes.get((rows, columns), (name, 0))
            shapes[rows, columns] = first, before + count
        limit, found = 0.2 * self.budget / len(shapes), []
        for (rows, columns), (name, count) in shapes.items():
            tokens = self.layout.batch.micro_size * self.length
            while tokens > 64 and 3 * 5 * 2 * tokens * rows * columns / rate > limit:
                tokens //= 2
            x, weight, gradient = self.random(tokens, columns), self.random(rows, columns), self.random(tokens, rows)
            operands = {
                GEMMRole.OUTPUT: (x, weight),
                GEMMRole.INPUT_GRADIENT: (gradient, weight),
                GEMMRole.WEIGHT_GRADIENT: (gradient, x),
            }
            seconds = [
                self.watch.seconds(lambda pair=pair, role=role: matmul(*pair, role), limit / 3)
                for role, pair in operands.items()
            ]
            found.append(MeasuredGEMM(name, tokens, rows, columns, sum(seconds) / 3, count))
        return found

    def float8(self, recipe: str, side: int) -> MeasuredWork:
        """A square product in fp8 without its casts, with the accumulation of gradients."""
        multiply, role = Float8Multiply(recipe), GEMMRole.OUTPUT
        left, right = multiply.left(self.random(side, side), role), multiply.right(self.random(side, side), role)
        role = GEMMRole.INPUT_GRADIENT
        seconds = self.watch.seconds(lambda: multiply.product(left, right, role, self.dtype), 0.02 * self.budget)
        return MeasuredWork(2.0 * side**3, seconds)

    def attention(self, rate: float) -> dict[str, MeasuredWork]:
        """Forward and backward pass of attention by kernel (`parallel/context/plan.py`): of whole sequences, of the
        queries of their second half, and under the mask that the recipe's layers have, or a causal one. Left out:
        registered kinds of attention, whose kernels are their own, and a kernel that the device lacks and the recipe
        does without.
        """
        layers = [layer.attention for layer in layer_specs(self.layout.spec)]
        if layers[0].kind in ATTENTION.registered:
            return {}
        used = self._kernels(layers)
        found: dict[str, MeasuredWork] = {}
        with kernel_priority(self.config.run.deterministic):
            for name in KERNELS:
                try:
                    found[name] = self._attention(name, layers, rate)
                except RuntimeError:
                    if name in used:
                        raise
        return found

    def _kernels(self, layers: Sequence[AttentionSpec]) -> set[str]:
        """Those that the recipe takes."""
        masked, length = self.config.data.mask_documents, self.layout.batch.sequence_length
        return {attention_kernel(one, self.layout.context, length, masked) for one in layers}

    def _attention(self, name: str, layers: Sequence[AttentionSpec], rate: float) -> MeasuredWork:
        """Of the first layer that has a mask, for a masked kernel, or else of the first layer."""
        masked = name == "block_mask"
        spec = next((one for one in layers if masked and (one.window or one.changes_softmax)), layers[0])
        window, cap = (spec.window, spec.soft_cap) if masked else (0, 0.0)
        documents, tp = documents_of(self.config.data) if masked else None, self.layout.plan.tp
        heads, groups = max(1, spec.heads // tp), max(1, spec.kv_heads // tp)
        length, sequences, limit = self.length, self.layout.batch.micro_size, 0.04 * self.budget

        def work(keys: float) -> float:
            queries = length - length // 2 if name == "last_queries" else length
            return (1 + ATTENTION_BACKWARD) * sequences * queries * attention_flops(spec, keys) * heads / spec.heads

        def keys() -> float:
            if name == "last_queries":
                return length // 2 + seen_keys(length - length // 2)
            return computed_keys(length, window, documents, 128) if masked else seen_keys(length)

        while 5 * work(keys()) / (0.3 * rate) > limit and (sequences > 1 or length > 64):
            sequences, length = (sequences // 2, length) if sequences > 1 else (sequences, length // 2)
        query = self.random(sequences, heads, length, spec.head_dim)
        query = (query[:, :, length // 2 :] if name == "last_queries" else query).detach().requires_grad_()
        sizes = (spec.head_dim, spec.value_dim)
        key, value = (self.random(sequences, groups, length, size).requires_grad_() for size in sizes)
        inputs = (query, key, value)
        if masked and spec.sinks:
            inputs += (self.random(heads).requires_grad_(),)
        mask = self._mask(sequences, length, window, documents) if masked else None
        gradient = self.random(*query.shape[:3], spec.value_dim)

        def both() -> Any:
            out = causal_attention(*inputs[:3], mask, spec.scale, cap, *inputs[3:])
            return torch.autograd.grad(out, inputs, gradient)

        return MeasuredWork(work(computed_in(mask, length) if masked else keys()), self.watch.seconds(both, limit))

    def _mask(self, sequences: int, length: int, window: int, documents: DocumentLengths | None) -> Any:
        """Of sequences of documents, or of one each, within a window."""
        places, numbers = torch.arange(length, device=self.device), None
        if documents:
            begins = torch.zeros(sequences, length, dtype=torch.int64)
            row = -1
            for start, _ in document_ranges(documents, length):
                row += start == 0
                if row == sequences:
                    break
                begins[row, start] = 1
            numbers = begins.cumsum(1).to(self.device)
        return mask_of(first_seen(numbers, length, window, self.device), places, length)

    def passes(self, rate: float) -> list[MeasuredPass]:
        """Forward and backward passes of the model cut to one and to three layers, of a micro-batch or as much of it as
        memory and time allow."""
        limit, sequences, length = 0.15 * self.budget, self.layout.batch.micro_size, self.length
        few, many = 1, min(DEEP, self.layout.spec.depth)
        while True:
            config, layout = truncate_model(self.config, many, length, sequences)
            work = flops_per_token(layout.spec, length, causal=True) * length * sequences
            held = max(find_peaks(config, layout), key=lambda peak: peak.reserved)
            fits = held.reserved - held.categories["optimizer"] < ROOM * self.memory
            if fits and 5 * work / (0.5 * rate) <= limit or sequences == 1 and length <= 64:
                break
            sequences, length = (sequences // 2, length) if sequences > 1 else (sequences, length // 2)
        return [self._pass(depth, length, sequences, limit) for depth in dict.fromkeys((few, many))]

    def _pass(self, depth: int, length: int, sequences: int, limit: float) -> MeasuredPass:
        config, layout = truncate_model(self.config, depth, length, sequences)
        model = self._model(config, layout)
        tokens = torch.randint(layout.spec.vocab_size, (sequences, length), device=self.device)
        forward: list[Tensor] = []

        def passing() -> None:
            forward[:] = [split_report(model(tokens, tokens))[0][0]]

        def both() -> None:
            passing()
            model.zero_grad(set_to_none=True)
            forward[0].backward()

        with kernel_priority(config.run.deterministic):
            ahead = self.watch.seconds(passing, limit / 3)
            whole = self.watch.seconds(both, limit)
        return MeasuredPass(depth, length, sequences, ahead, max(whole - ahead, 0.5 * ahead))

    def _model(self, config: Config, layout: Layout) -> Transformer:
        with torch.device("meta"):
            model = Transformer(layout.spec)
        loss = config.loss
        model.set_loss(loss.z_loss, loss.chunk, config.compile, loss.tile or 0, loss_terms(loss))
        if config.compile:
            compile_layers(model, deferring=False)
        model.to_empty(device=self.device)
        initialize_model(model, layout.spec, config.run.seed, self.device)
        cast_model(model, self.dtype)
        keep_buffers(model, self.device)
        return model

    def stream(self) -> MeasuredWork:
        """A kernel that reads two tensors and writes one."""
        count = STREAM[self.device.type] // self.element
        a, b = (torch.ones(count, device=self.device, dtype=self.dtype) for _ in "ab")
        out = torch.empty_like(a)
        return MeasuredWork(
            3 * count * self.element, self.watch.seconds(lambda: torch.add(a, b, out=out), 0.03 * self.budget)
        )

    def update(self) -> MeasuredWork:
        """Gradient norm and AdamW's update of the parameters of many layers: of few the host would be timed."""
        parameters, plain = self._layers(), replace(self.config, optimizer=OptimizerConfig())
        policies = parameter_policies(self.infos, plain.precision.types, plain.optimizer)
        policies = {name: replace(policies[name], optimizer="adamw", state_dtype=torch.float32) for name in parameters}
        optimizer = Optimizer(parameters, policies, plain.optimizer)
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 1e-3)
        rate, one, none = (torch.tensor(value, device=self.device) for value in (1e-4, 1.0, 0.0))

        def step() -> None:
            squared_norms(optimizer.gradients())
            optimizer.step(rate, one, none)

        size = sum(parameter.numel() for parameter in parameters.values())
        return MeasuredWork(update_bytes(plain) * size, self.watch.seconds(step, 0.04 * self.budget))

    def copy(self) -> MeasuredWork:
        """Casts of the same parameters into one flat buffer of the compute type, and back."""
        whole = [parameter.detach().flatten() for parameter in self._layers().values()]
        flat = torch.empty(sum(one.numel() for one in whole), device=self.device, dtype=self.dtype)
        parts = flat.split([one.numel() for one in whole])

        def there_and_back() -> None:
            for part, one in zip(parts, whole):
                part.copy_(one)
            for part, one in zip(parts, whole):
                one.copy_(part)

        moved = 2 * (4 + self.element) * flat.numel()
        work = capture_kernels(there_and_back) if self.device.type == "cuda" else there_and_back
        return MeasuredWork(moved, self.watch.seconds(work, 0.04 * self.budget))

    def _layers(self) -> dict[str, nn.Parameter]:
        """The trained parameters of the first layers, in fp32."""

        def shapes(depth: int) -> dict[str, torch.Size]:
            _, layout = truncate_model(self.config, depth, self.length, 1)
            with torch.device("meta"):
                self.infos = parameter_infos(Transformer(layout.spec))
            inner = {name: info for name, info in self.infos.items() if name.startswith("layers.")}
            return {name: info.shape for name, info in inner.items() if info.trained}

        layer = 4 * MASTER_BYTES * max(1, sum(map(prod, shapes(1).values())))  # with gradients and both moments
        depth = min(self.layout.spec.depth, max(1, int(STATES * self.memory / layer)))
        return {
            name: nn.Parameter(torch.full(shape, 0.02, device=self.device)) for name, shape in shapes(depth).items()
        }

    def kernel(self) -> float:
        """Seconds of a kernel without work, on the device."""
        one = torch.ones(1, device=self.device)

        def tiny() -> None:
            for _ in range(TINY):
                one.add_(1)

        return (
            self.watch.seconds(capture_kernels(tiny) if self.device.type == "cuda" else tiny, 0.02 * self.budget) / TINY
        )

    def launch(self, kernel: float) -> float:
        """Seconds of the host for a kernel. On a CPU that is the kernel itself."""
        if self.device.type != "cuda":
            return kernel
        one, found = torch.ones(1, device=self.device), []
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(TINY):
                one.add_(1)
            found.append((time.perf_counter() - start) / TINY)
        torch.cuda.synchronize()
        return self.watch.together(median(found))


def computed_in(mask: Any, length: int) -> float:
    """Keys that attention computes for a query of sequences of `length` under a mask: those of blocks that are not left
    out, or all."""
    if isinstance(mask, Tensor):
        return float(length)
    blocks = (mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()).item() / len(mask.kv_num_blocks)
    return blocks * prod(mask.BLOCK_SIZE) / length


def capture_kernels(work: Callable[[], None]) -> Callable[[], None]:
    """The kernels of `work` as a CUDA graph, which the host launches at once."""
    beside = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):  # what a first call allocates is not captured
        work()
    beside.synchronize()
    return capture_graph(work, beside)[0].replay
