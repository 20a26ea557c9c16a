"""Floating-point operations of a model, and the counts of parameters that they follow from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType

from trainer.config.model import AttentionSpec, ModelSpec
from trainer.config.registry import ATTENTION
from trainer.planning.cost.parameters import (
    ROLES,
    ParameterInfo,
    by_value,
    declare_parameters,
    head_matrix,
    layer_specs,
    layer_tables,
)
from trainer.planning.cost.updates import UpdateSettings


@by_value
def parameter_counts(spec: ModelSpec) -> Mapping[str, int]:
    """Numbers of parameters: `total`; `embedding` (token and position tables); `matmul`, those that a token is
    multiplied with. A tied head is counted once in `total`, and in `matmul` as well as in `embedding`."""
    sizes = dict.fromkeys(ROLES, 0)
    for info in declare_parameters(spec).values():
        sizes[info.role] += info.size
    matmul = round(sum(info.active * info.size for info in matmul_parameters(spec)))
    return MappingProxyType({"total": sum(sizes.values()), "embedding": sizes["embedding"], "matmul": matmul})


@by_value
def flops_per_token(spec: ModelSpec, length: int, causal: bool) -> float:
    """Floating-point operations of one training step per token of a sequence of `length`: the forward pass and twice as
    much for the backward pass, matrix products only, recompute not counted (PaLM, arXiv 2204.02311, appendix B).

    causal: whether attention counts the keys that a token sees, averaged over the positions and within the window, or
    all `length` keys (as published MFU figures often do).
    """
    forward = sum(map(gemm_flops, matmul_parameters(spec)))
    for layer in layer_specs(spec):
        forward += attention_flops(layer.attention, seen_keys(length, layer.attention.window) if causal else length)
    return 3.0 * forward


def matmul_parameters(spec: ModelSpec) -> Iterator[ParameterInfo]:
    """Every matrix that a token's hidden state is multiplied with; a tied head too."""
    for table in layer_tables(spec):
        yield from (info for info in table.values() if info.role == "matrix")
    yield head_matrix(spec)


def gemm_flops(matrix: ParameterInfo, ranks: int = 1) -> float:
    """Forward FLOPs of one token in the product with a matrix, on one of `ranks` tensor-parallel ranks."""
    return 2.0 * matrix.active * prod(matrix.multiplied(ranks))


def attention_flops(a: AttentionSpec, keys: float, ranks: int = 1) -> float:
    """Forward FLOPs of one token that sees `keys` keys, on one of `ranks` tensor-parallel ranks: scores, and their
    product with the values."""
    if entry := ATTENTION.registered.get(a.kind):
        return entry.facts["flops"](entry.chosen(a.settings), a, keys) / ranks
    return 4.0 * (a.heads * a.head_dim / ranks) * keys


def seen_keys(length: int, window: int = 0) -> float:
    """Keys that a token sees under causal attention, on average over the positions of a sequence."""
    window = min(window or length, length)
    # The first `window` positions see 1, 2, ... window keys; the others see `window`.
    return window * (length - (window - 1) / 2) / length


NEWTON_SCHULZ_STEPS = 5
"""Of Muon's iteration, as published (Jordan et al. 2024)."""


def orthogonalisation_flops(shape: Sequence[int], steps: int) -> int:
    """FLOPs of Muon's Newton-Schulz iteration for a matrix: in each step, three products with its smaller Gram
    matrix."""
    small, large = sorted(shape)
    return 2 * steps * small**2 * (2 * large + small)


@by_value
def muon_flops(spec: ModelSpec, updates: UpdateSettings) -> tuple[int, ...]:
    """FLOPs of an update's orthogonalisations in each layer."""
    found = []
    for index, table in enumerate(layer_tables(spec)):
        infos = {f"layers.{index}.{name}": info for name, info in table.items()}
        policies = updates.policies(infos)
        found.append(
            sum(
                orthogonalisation_flops(info.shape, NEWTON_SCHULZ_STEPS)
                for name, info in infos.items()
                if policies[name].optimizer == "muon"
            )
        )
    return tuple(found)
