"""torch.compile with a graph for each shape, and an error where torch would otherwise go on without one; work on a GPU
as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

GRAPHS = 64
"""Of one function. Shapes, types, masks, windows and recompute make one each, and evaluation again."""


def compile_function(function: Callable) -> Callable:
    """The function compiled anew for each shape. Out of graphs, torch would leave it uncompiled without a word:
    FlexAttention then has a matrix of all scores in memory, and no backward pass under selective recompute."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False)


def capture_graph(
    work: Callable[[], Result], stream: torch.cuda.Stream, pool: tuple[int, int] | None = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The kernels that `work` starts, as a graph that has not run yet, and what it returns, which every replay fills
    anew. pool: of memory, shared with other graphs; without it, its own. Raises `RuntimeError` where `work` waits for
    the device. Other threads may."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, "thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    return graph, result
