"""What tensor parallelism keeps for backward, sends, overlaps and holds: the model's own parts on four processes, in
groups of 1, 2 and 4 ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from support.generation import generate_tokens
from support.launch import CAN_COMPILE, fork, leave
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.checkpointing.loading import SavedModel
from trainer.config import ActivationConfig, Config
from trainer.config.model import ModelSpec, assign_fields
from trainer.distributed.c10d_internals import list_groups
from trainer.distributed.collectives import TensorGroup
from trainer.distributed.copy_engine import CopyEngineGroup
from trainer.distributed.mesh import World, join_world
from trainer.distributed.symmetric_memory import buffers_of
from trainer.distributed.tensors import local_values
from trainer.generate.sampling import SamplingOptions
from trainer.generate.sharded_model import ShardedModel, place_saved
from trainer.model.initial import initialize_model
from trainer.model.layers import Linear
from trainer.model.linear import DeferredGrads
from trainer.model.transformer import Transformer
from trainer.parallel.pipeline.plan import layer_costs, resolve_pipeline
from trainer.parallel.recompute import apply_recompute, recompute_all
from trainer.parallel.tensor.apply import shard_model
from trainer.planning.features import resolve_plan
from trainer.planning.plan import resolve_batch
from trainer.planning.states import symmetric_buffer_bytes
from trainer.precision.products import GEMMRole, Multiply, matmul, matmul_sum
from trainer.training.state import TrainState

GROUPS = (1, 2, 4)
BATCH, LENGTH = 2, 16
TOKENS = BATCH * LENGTH
CPU = torch.device("cpu")

LLAMA = {"attention": {"heads": 8, "kv_heads": 4}, "feed_forward": {"width": 96}}
GPT2 = {
    "attention": {"heads": 8, "bias": True, "output_bias": True, "positions": "none"},
    "norm": {"kind": "layer"},
    "feed_forward": {"kind": "plain", "width": 128, "activation": "gelu_tanh", "bias": True},
}
KINDS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    # Without what keeps more in eager mode on a CPU: RMSNorm in several operations, the copies of shared key-value
    # heads, and the one of attention's output, whose layout follows that of rotated queries.
    "gated": {"attention": {"heads": 8, "positions": "none"}, "norm": {"kind": "layer"}, "feed_forward": {"width": 96}},
    "qk_norm head": {**LLAMA, "attention": {**LLAMA["attention"], "qk_norm": "head"}},
    "qk_norm full": {**LLAMA, "attention": {**LLAMA["attention"], "qk_norm": "full"}},
}
UNEVEN = {
    "vocab_size": 61,
    "attention": {"heads": 8, "kv_heads": 2, "bias": True, "qk_norm": "full"},
    "feed_forward": {"width": 38},
}


def spec_of(**changes: Any) -> ModelSpec:
    spec = ModelSpec(vocab_size=1021, width=64, depth=1, max_length=LENGTH)
    assign_fields(spec, changes, "model")
    return spec


def settings(tp: int, stage: int = 0) -> Config:
    config = Config()
    config.parallel.tp, config.parallel.zero.stage = tp, stage
    config.batch.sequence_length, config.batch.global_size = LENGTH, 4
    return config


def enter(tp: int) -> World:
    """All four processes, in groups of `tp`."""
    return join_world(resolve_plan(settings(tp).parallel, 4), CPU)


def model_of(
    spec: ModelSpec, world: World, dtype: torch.dtype = torch.float32, backend: type[TensorGroup] = TensorGroup
) -> Transformer:
    """A model split over the tensor-parallel group, without data parallelism."""
    with torch.device("meta"):
        model = Transformer(spec)
    shard_model(model, world.mesh["tp"], backend)
    model.to_empty(device=CPU)
    initialize_model(model, spec, 0, CPU)
    return model.to(dtype)


class Watch(TorchDispatchMode):
    """Notes the operations of a pass in their order, with the shapes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        self.seen.append(
            (function._opname, [local_values(leaf).shape for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        )
        return result

    def collectives(self) -> list[list]:
        """Kind and elements of the result of each, sorted."""
        kinds = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "all_reduce": "sum"}
        return sorted([kinds[name], shapes[0].numel()] for name, shapes in self.seen if name in kinds)

    def widest(self) -> int:
        """The largest dimension of any tensor that an operation returned."""
        return max(max(shape, default=0) for _, shapes in self.seen for shape in shapes)


class Steps:
    """What is started, waited for and multiplied within a context, in order; also inside of the project's own
    operators."""

    names = {
        "_c10d_functional::all_gather_into_tensor": "gather",
        "_c10d_functional::reduce_scatter_tensor": "scatter",
        "_c10d_functional::all_reduce": "sum",
        "_c10d_functional::wait_tensor": "wait",
        "aten::mm": "product",
        "aten::addmm": "product",
        "aten::bmm": "product",
        "aten::baddbmm": "product",
    }

    def __enter__(self) -> Steps:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profiler.__exit__(*error)
        events = sorted(self.profiler.events(), key=lambda event: event.time_range.start)
        self.seen = [self.names[event.name] for event in events if event.name in self.names]


def random_part(world: World, rows: int, columns: int) -> Tensor:
    """This rank's rows of a matrix that all ranks agree on."""
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return whole.tensor_split(world.mesh["tp"].size())[world.place("tp")].clone().requires_grad_()


def saved_bytes(run: Callable[[], Tensor], model: Transformer) -> tuple[int, Tensor]:
    """Bytes that autograd keeps, less parameters and the cosines and sines that all layers share; and the result of
    `run`."""
    kept: dict[int, int] = {}
    shared = {local_values(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.dim() == 4 and tensor.shape[0] == tensor.shape[2] == 1:
            shared.add(storage.data_ptr())
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return sum(size for place, size in kept.items() if place not in shared), result


def measure_layer(changes: dict, world: World) -> dict:
    """One layer's saved bytes beside what the cost model plans with, and its collectives."""
    spec, tp = spec_of(**changes), world.mesh["tp"].size()
    model, x = model_of(spec, world), random_part(world, TOKENS, spec.width)
    rotation = next((rotary(torch.arange(LENGTH), LENGTH) for rotary in model.rotaries), None)
    with Watch() as forward:
        saved, y = saved_bytes(lambda: model.layers["0"](x, (BATCH, LENGTH), rotation, None), model)
    with Watch() as backward:
        y.sum().backward()
    planned = layer_costs(spec, LENGTH, BATCH, tp, element_bytes=4).activation[1]
    return {"saved": saved, "planned": planned, "forward": forward.collectives(), "backward": backward.collectives()}


def measure_head(world: World) -> dict:
    """The largest dimension that anything in head and loss has, forward, kept and backward, and the order of its
    backward."""
    spec = spec_of(**LLAMA)
    model, x = model_of(spec, world), random_part(world, TOKENS, spec.width)
    targets = torch.randint(0, spec.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with Watch() as forward:
        saved, (objective, _) = saved_bytes(lambda: model.head(x, targets), model)
    with Watch() as backward:
        objective.backward(retain_graph=True)
    with Steps() as steps:
        objective.backward()
    return {
        "widest": max(forward.widest(), backward.widest()),
        "part": local_values(model.head.weight).shape[0],
        "saved": saved,
        "forward": forward.collectives(),
        "backward": steps.seen,
    }


def measure_overlap(world: World) -> dict:
    """The order of operations in backward passes of products, and of weight gradients that were put off."""
    spec = spec_of(**LLAMA)
    seen, x = {}, random_part(world, TOKENS, spec.width)
    hidden = torch.randn(TOKENS, spec.feed_forward.width // world.mesh["tp"].size(), requires_grad=True)
    for name in ("column", "row", "both"):
        block = model_of(spec, world).layers["0"].feed_forward
        module, inputs = {"column": (block.gate, x), "row": (block.down, hidden), "both": (block, x)}[name]
        for kind in ("B", "B beside I and W", "I"):
            deferred = DeferredGrads()
            for linear in module.modules():
                if isinstance(linear, Linear) and kind != "B":
                    linear.defer(deferred)
            with Steps() as seen[f"{name}: F"]:
                y = module(inputs)
            deferred.active = kind == "I"
            with Steps() as seen[f"{name}: {kind}"]:
                y.backward(torch.ones_like(y))
            if kind == "I":
                with Steps() as seen[f"{name}: W"]:
                    deferred.take()()
    return {name: steps.seen for name, steps in seen.items()}


def compiled_operators(world: World) -> list[str]:
    """The project's own and collective operators of the backward graph of a compiled feed-forward."""
    graphs: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Callable:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    spec = spec_of(**LLAMA)
    block = model_of(spec, world).layers["0"].feed_forward
    compiled = torch.compile(block, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    compiled(random_part(world, TOKENS, spec.width)).sum().backward()
    return [name for name in graphs[1] if name.startswith(("trainer", "_c10d"))]


def compiled_keeps(world: World) -> list[float]:
    """Bytes in bf16 that a compiled layer keeps under selective recompute where ranks copy, and those that are planned.
    Named is k, whose product comes with those of q and v."""
    config, spec = ActivationConfig(mode="selective", save=["attention", "attention.k"]), spec_of(**LLAMA)
    model = model_of(spec, world, torch.bfloat16, CopyEngineGroup)
    apply_recompute(model, config, CopyEngineGroup)
    layer, rotation = model.layers["0"], model.rotaries[0](torch.arange(LENGTH), LENGTH)
    layer.run = torch.compile(layer.run_body, backend=PASSES, dynamic=False)
    x = random_part(world, TOKENS, spec.width).bfloat16()
    saved, y = saved_bytes(lambda: layer(x, (BATCH, LENGTH), rotation, None), model)
    y.float().sum().backward()
    costs = layer_costs(spec, LENGTH, BATCH, 2, recompute=config, tp_overlap="copy_engine")
    return [saved, costs.activation[1]]


def recomputed_keeps(world: World) -> float:
    """Bytes that a compiled feed-forward keeps where all of it is recomputed, over those of its input."""
    spec = spec_of(**LLAMA)
    model, x = model_of(spec, world), random_part(world, TOKENS, spec.width)
    run = torch.compile(partial(recompute_all, model.layers["0"].feed_forward), backend=PASSES, dynamic=False)
    saved, y = saved_bytes(lambda: run(x), model)
    y.sum().backward()
    return saved / x.nbytes


def boxed(graph: torch.fx.GraphModule, _: Any) -> Callable:
    return make_boxed_func(graph.forward)


PASSES = aot_autograd(fw_compiler=boxed, partition_fn=min_cut_rematerialization_partition)
"""Graphs are cut as by default, and run eagerly."""


class Pieces(TensorGroup):
    """Another backend: gathers in two pieces, and reduces by another operator."""

    reductions = (torch.ops._c10d_functional.all_reduce.default,)

    def gather_matmul(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        role: GEMMRole,
        biases: Sequence[Tensor | None] | None = None,
        keep: bool = False,
        multiply: Multiply = matmul,
    ) -> tuple[list[Tensor], Tensor | None]:
        pieces = [self.gather(piece) for piece in x.chunk(2, 1)]
        whole = torch.cat([self.wait(piece) for piece in pieces], 1)
        biases = biases or [None] * len(weights)
        return [multiply(whole, *pair) for pair in zip(weights, repeat(role), biases)], whole if keep else None

    def matmul_scatter_sum(
        self, operands: Sequence[Tensor], weights: Sequence[Tensor], role: GEMMRole, multiply: Multiply = matmul
    ) -> Tensor:
        return self.own(self.wait(self.sum(matmul_sum(operands, weights, role, multiply)))).contiguous()


def other_backend(world: World) -> dict:
    """A whole model's loss and gradients by other backends, with put-off weight gradients and recompute, against those
    by the usual one; and the collectives of a layer that selective recompute repeats in backward."""
    spec, selective = spec_of(**UNEVEN), ActivationConfig(mode="selective", save=["attention"])
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(0, spec.vocab_size, (BATCH, LENGTH), generator=generator) for _ in range(2))
    seen, repeated, boxes = [], {}, []
    for backend in (TensorGroup, Pieces, CopyEngineGroup):
        model, deferred = model_of(spec, world, torch.float64, backend), DeferredGrads()
        model.defer(deferred)
        apply_recompute(model, selective, backend)
        objective, _ = model(tokens, targets)
        deferred.active = True
        objective.backward()
        deferred.active = False
        deferred.take()()
        seen.append([objective.detach(), *(local_values(parameter.grad) for parameter in model.parameters())])
        if backend is CopyEngineGroup:
            types = {"gather": torch.uint8, "scatter": torch.float64}
            boxes = [buffers_of(kind, list_groups()[model.group.name], dtype).bytes for kind, dtype in types.items()]
            boxes = [sum(boxes), symmetric_buffer_bytes("copy_engine", 8 * TOKENS * spec.width)]
        for keeps in (TensorGroup, Pieces) if backend in (TensorGroup, Pieces) else ():
            layer, x = model_of(spec_of(**GPT2), world, backend=backend), random_part(world, TOKENS, spec.width)
            apply_recompute(layer, selective, keeps)
            y = layer.layers["0"](x, (BATCH, LENGTH), None, None)
            with Watch() as backward:
                y.sum().backward()
            kinds = [kind for kind, _ in backward.collectives()]
            repeated[f"{backend.__name__} keeping {keeps.__name__}"] = kinds.count("scatter") + kinds.count("sum")
    worst = max(
        ((one - other).norm() / one.norm()).item() for one, *more in zip(*seen) if one.numel() for other in more
    )
    return {"worst": worst, "reductions": repeated, "boxes": boxes}


def defer(world: World) -> dict:
    """Gradients of a whole model from full backwards and from I, then W: the parameters whose gradient waits for W, and
    the worst difference."""
    spec = spec_of(**UNEVEN)
    model = model_of(spec, world, torch.float64)
    generator = torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(0, spec.vocab_size, (BATCH, LENGTH), generator=generator) for _ in range(2))
    deferred, gradients, late = DeferredGrads(), [], []
    for kind in ("B", "B beside I and W", "I"):
        for module in model.modules():
            if isinstance(module, Linear) and kind != "B":
                module.defer(deferred)
        model.zero_grad()
        for _ in range(2):  # micro-batches, whose gradients add up
            objective, _ = model(tokens, targets)
            deferred.active = kind == "I"
            objective.backward()
            deferred.active = False
            late = late or [name for name, parameter in model.named_parameters() if parameter.grad is None]
            deferred.take()()
        gradients.append({name: local_values(parameter.grad).clone() for name, parameter in model.named_parameters()})
    worst = max(
        (other[name] - gradients[0][name]).abs().max().item() / gradients[0][name].abs().max().item()
        for other in gradients[1:]
        for name in other
    )
    linears = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear)]
    return {"late": late, "expected": linears, "worst": worst}


def layout(world: World) -> dict:
    """Of each parameter: whether it is a DTensor, and the shape that this rank holds."""
    model = model_of(spec_of(**UNEVEN), world)
    return {
        name: [isinstance(parameter, DTensor), list(local_values(parameter).shape)]
        for name, parameter in model.named_parameters()
    }


def differing_weights(tp: int, stage: int) -> list[str]:
    """Parameters of a run's initial state that are not, bit by bit, those of the unsplit model."""
    config, spec = settings(tp, stage), spec_of(**UNEVEN)
    plan = resolve_plan(config.parallel, 4, spec)
    batch = resolve_batch(config.batch, plan.dp, plan.tp)
    state = TrainState.build(config, spec, plan, resolve_pipeline(config, spec, plan, batch), join_world(plan, CPU))
    model = Transformer(spec)
    initialize_model(model, spec, config.run.seed, CPU)
    assert state.parameters.keys() == dict(model.named_parameters()).keys()
    return [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(state.parameters[name].full_tensor(), parameter)
    ]


class Noting(SamplingOptions):
    """Keeps the logits that tokens are chosen from."""

    seen: list[Tensor] = []

    def choose(self, logits: Tensor, draw: Tensor) -> Tensor:
        self.seen.append(logits.clone())
        return super().choose(logits, draw)


GENERATED: dict[str, tuple[list, Tensor]] = {}
"""What `generate_twice` has returned for the unsplit model, which is the same in groups of any size."""


def generate(tp: int) -> dict:
    """Of a model from a checkpoint over all processes, of which `tp` share layers: whether tokens are those of one
    process, likeliest and drawn; the largest difference of a logit; what this rank holds of the dense layer's
    parameters, in bytes of bf16 each. The other layer has experts."""
    spec = spec_of(**UNEVEN, depth=2, max_length=90, init={"std": 0.3})
    experts = {"count": 5, "top_k": 2, "bias_rate": 0.1}
    spec.overrides = {"1": {"feed_forward": {"kind": "gated", "bias": False, "width": 24, "experts": experts}}}
    model = Transformer(spec)
    initialize_model(model, spec, 0, CPU)
    biases = model.layers["1"].feed_forward.router.balance.copy_(torch.eye(5)[3])
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole["layers.1.feed_forward.router.balance"] = biases
    saved = SavedModel(Path(), spec, whole.__getitem__, None, None)
    if "of one process" not in GENERATED:
        GENERATED["of one process"] = generate_twice(place_saved(saved, CPU, "fp32"))
    tokens, logits = GENERATED["of one process"]
    found = generate_twice(place_saved(saved, CPU, "fp32", tp, 4))
    in_bf16 = place_saved(saved, CPU, "bf16", tp, 4)
    layers = in_bf16.stages[0].layers
    assert layers["1"].feed_forward.router.weight.dtype == torch.float32
    generate_tokens(in_bf16, [[1, 2, 3]], 1, SamplingOptions())
    held = sum(local_values(parameter).nbytes for parameter in layers["0"].parameters())
    return {
        "same": found[0] == tokens,
        "worst": ((found[1] - logits).abs().max() / found[1].abs().max()).item(),
        "held": held / sum(2 * parameter.numel() for parameter in model.layers["0"].parameters()),
    }


def generate_twice(model: ShardedModel) -> tuple[list, Tensor]:
    """Tokens, the likeliest and drawn ones, and all logits that they were chosen by."""
    Noting.seen = []
    ways = Noting(), Noting(1.0, top_k=20)
    return [generate_tokens(model, [[1, 2, 3], [4] * 61, [5]], 6, way) for way in ways], torch.stack(Noting.seen)


def main(out: str) -> None:
    mine: dict[str, dict] = {}
    for tp in GROUPS:
        world = enter(tp)
        mine[str(tp)] = {
            "layers": {kind: measure_layer(changes, world) for kind, changes in KINDS.items()},
            "head": measure_head(world),
            "overlap": measure_overlap(world) if tp > 1 else {},
            "compiled": compiled_operators(world) if tp == 2 else [],
            "compiled keeps": compiled_keeps(world) if tp == 2 and CAN_COMPILE else [],
            "recomputed keeps": recomputed_keeps(world) if tp == 2 else 1.0,  # the graph is that of any size
            "other backend": other_backend(world) if tp > 1 else {},
            "deferred": defer(world),
            "layout": layout(world),
            "weights": {stage: differing_weights(tp, stage) for stage in (0, 3)},
            "generated": generate(tp),
        }
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(everyone))


if __name__ == "__main__":
    fork(compiles=True)
    main(sys.argv[1])
    leave()
