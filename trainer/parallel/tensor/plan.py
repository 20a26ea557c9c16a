"""Tensor parallelism as it is planned: which models can be cut over which ranks."""

from __future__ import annotations

from trainer.config import Config, ParallelConfig
from trainer.config.fields import list_divisors
from trainer.config.model import ModelSpec
from trainer.planning.layer import registered_blocks
from trainer.planning.parameters import layer_specs
from trainer.planning.plan import Feature, Plan


def check_tensor(parallel: ParallelConfig, spec: ModelSpec | None, world: int, node: int) -> list[str]:
    """What keeps the model from being cut into parallel.tp parts, or those from staying inside a node of `node`
    processes."""
    tp, problems = parallel.tp, []
    if spec is not None and tp > 1:
        shapes = [(layer.attention.heads, layer.attention.kv_heads) for layer in layer_specs(spec)]
        wrong = next(((heads, keys) for heads, keys in shapes if not divides_heads(heads, keys, tp)), None)
        if wrong is not None:
            legal = [n for n in list_divisors(wrong[0]) if all(divides_heads(heads, keys, n) for heads, keys in shapes)]
            problems.append(
                f"parallel.tp={tp} does not divide model.attention.heads={wrong[0]} with kv_heads={wrong[1]}; legal: "
                f"{', '.join(map(str, legal))}"
            )
        blocks = [layer.feed_forward for layer in layer_specs(spec)]  # experts are whole on each rank
        widths = {
            "model.feed_forward.width": [block.width for block in blocks if not block.experts.count],
            "model.feed_forward.experts.shared_width": [
                block.experts.shared_width for block in blocks if block.experts.count and block.experts.shared_width
            ],
        }
        sizes = {"model.vocab_size": spec.vocab_size} | {name: min(some) for name, some in widths.items() if some}
        problems += [
            f"parallel.tp={tp}: the {kinds.kind} '{entry.name}' ({entry.home}) does not say that its parameters can be "
            "cut; register it with tensor_parallel=True if they can, or set parallel.tp=1"
            for kinds, entry in registered_blocks(spec)
            if not entry.facts["tensor_parallel"]
        ]
        problems += [
            f"parallel.tp={tp} leaves ranks without a part of {name}={size}; legal: up to "
            f"{max(n for n in range(1, min(tp, world + 1)) if fills_all_ranks(size, n))}"
            for name, size in sizes.items()
            if not fills_all_ranks(size, tp)
        ]
    if node < world and node % tp and not parallel.tp_across_nodes:
        problems.append(
            f"parallel.tp={tp} spans nodes of {node} processes, and tensor parallelism is slow over their links; set "
            f"parallel.tp={max(n for n in list_divisors(node) if n <= tp)} and use parallel.pp, or force it with "
            "parallel.tp_across_nodes=true"
        )
    return problems + check_overlap(parallel)


def check_overlap(parallel: ParallelConfig) -> list[str]:
    """What `parallel.tp_overlap` cannot go with."""
    if parallel.tp_overlap != "off" and parallel.tp == 1:
        return [
            f"parallel.tp_overlap={parallel.tp_overlap} is for the collectives of tensor-parallel ranks, and "
            "parallel.tp=1 has none; set parallel.tp_overlap=off, or parallel.tp=2 or more"
        ]
    if parallel.tp_overlap != "off" and parallel.tp_across_nodes:
        return [
            f"parallel.tp_overlap={parallel.tp_overlap} needs ranks that share memory, and "
            "parallel.tp_across_nodes=true allows groups over several nodes; leave that out, or set "
            "parallel.tp_overlap=off"
        ]
    return []


def divides_heads(heads: int, kv_heads: int, tp: int) -> bool:
    """Whether each of `tp` ranks gets as many heads, with the key-value heads that they look at."""
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def fills_all_ranks(size: int, tp: int) -> bool:
    """Whether each of `tp` ranks has a part when `size` is cut into equal parts, the last ones smaller."""
    return -(-size // tp) * (tp - 1) < size


def describe_tensor(config: Config, spec: ModelSpec, plan: Plan) -> list[tuple[str, str]]:
    """What the tensor-parallel linear layers communicate by."""
    return [("tensor products", f"parallel.tp_overlap={config.parallel.tp_overlap}")] * (plan.tp > 1)


FEATURE = Feature("tensor", check_model=check_tensor, describe=describe_tensor)
