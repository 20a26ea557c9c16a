"""torch.compile with a graph for each shape, and an error where torch would otherwise go on without one."""

from __future__ import annotations

from collections.abc import Callable

import torch

GRAPHS = 64
"""Of one function. Shapes, types, masks, windows and recompute make one each, and evaluation again."""


def compiled(function: Callable) -> Callable:
    """The function compiled anew for each shape. Out of graphs, torch would leave it uncompiled without a word:
    FlexAttention then has a matrix of all scores in memory, and no backward pass under selective recompute."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False)
