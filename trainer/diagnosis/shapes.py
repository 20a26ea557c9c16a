"""Operations and bytes of an operator, from the shapes that a trace gives of its arguments."""

from __future__ import annotations

import re
from math import prod
from typing import Any

from trainer.diagnosis.traces import TraceEvent

SIZES = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "short": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}
"""Bytes of an element, by the name of its type in traces."""

VIEWS = re.compile(
    r"view|reshape|transpose|permute|expand|slice|select|squeeze|detach|alias|strided|split|chunk|unbind|narrow|empty|::t$"
)
"""Operators that move nothing."""

FACTORS = {"mm": 0, "_scaled_mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Where the first factor of a product is among the arguments of its operator; the second follows."""


Factors = tuple[tuple[int, ...], ...]
"""Of a product: the shapes of both factors, then their strides."""


def work_of(operator: TraceEvent) -> tuple[float | None, float | None]:
    """Floating-point operations and bytes of one call; None where the trace has no shapes, or of an operator whose
    operations do not count.

    Bytes are each argument once; and the result, which traces do not have, as large as it must be for a product, and as
    the largest argument else. Of a Triton kernel, the results are among the arguments."""
    shapes = operator.details.get("Input Dims")
    if not shapes or VIEWS.search(operator.name):
        return None, None
    name = operator.name.partition("::")[2]
    sizes = [
        SIZES.get(kind, 0) * prod(shape)
        for shape, kind in zip(shapes, operator.details.get("Input type", []))
        if _is_shape(shape)
    ]
    if (place := FACTORS.get(name)) is not None and all(map(_is_shape, shapes[place : place + 2])):
        *batch, m, k = shapes[place]
        n = shapes[place + 1][-1]
        element = SIZES.get(operator.details["Input type"][place], 0)
        return 2.0 * prod(batch) * m * k * n, float(sum(sizes) + element * prod(batch) * m * n)
    result = 0 if operator.name.startswith("triton") else max(sizes, default=0)
    return _attention(name, shapes, operator.details), float(sum(sizes) + result)


def gemm_factors(operator: TraceEvent) -> Factors | None:
    """The shapes and strides of the two factors of a product by a matrix of weights; None for anything else, and where
    the trace has none.

    They tell a forward product from those of backward: the gradient of the input has the matrix as it lies in memory
    where forward has it transposed. Factors in fp8 always lie as the kernel needs them, so that those of a square
    matrix tell nothing."""
    name = operator.name.partition("::")[2]
    place = FACTORS.get(name)
    shapes, strides = (operator.details.get(key, ()) for key in ("Input Dims", "Input Strides"))
    if place is None or name.endswith("bmm") or min(len(shapes), len(strides)) < place + 2:
        return None
    found = [list(values[place : place + 2]) for values in (shapes, strides)]
    if not all(_is_shape(one) for pair in found for one in pair):
        return None
    if name == "_scaled_mm" and len(set(found[0][1])) == 1:
        return None
    return tuple(tuple(one) for pair in found for one in pair)


def _attention(name: str, shapes: list[Any], details: dict[str, Any]) -> float | None:
    """Operations of scaled dot-product attention: two products forward and five backward, of which causal attention
    needs half."""
    if "scaled_dot_product" not in name:
        return None
    backward = "backward" in name
    queries, keys = shapes[backward : backward + 2]
    if not (_is_shape(queries) and _is_shape(keys) and len(queries) == len(keys) == 4):
        return None
    causal = "True" in details.get("Concrete Inputs", [])
    batch, heads, length, width = queries
    return (5 if backward else 2) * 2.0 * batch * heads * length * keys[2] * width * (0.5 if causal else 1.0)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(size, int) for size in value)
