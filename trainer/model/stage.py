"""The interface between a model and everything that runs it: what a plan may require of a model, and what a model
returns. Parallelism, recompute, schedules and the step know a model by this interface only. And how its functions are
compiled.

`Transformer` implements it. Code that is not ours implements it by an adapter with these members; nothing else has to
change. Parameters belong to modules that are `DeclaredModule`s, under names that do not depend on how the model is
split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch._dynamo import error_on_graph_break
from torch._dynamo.exc import Unsupported

from trainer.config.model import ModelSpec
from trainer.distributed.collectives import TensorGroup
from trainer.model.linear import DeferredGrads


class BlockReport(NamedTuple):
    """What a block reports of a micro-batch besides its result. Each rank reports its part of a sum over all ranks and
    micro-batches: that of its own tokens, heads or hidden units.

    objective: scalar that is added to the loss for its gradient (auxiliary loss), or None. Like the loss it is a sum
    over tokens, which the step divides by their number. statistics: vectors by name, without a graph, of the sizes in
    the block's `reports`.
    """

    objective: Tensor | None
    statistics: dict[str, Tensor]


class ReportedOutput(NamedTuple):
    """A result with a report: what a block, layer or stage returns instead of a plain result if it has a report.

    The report is returned, and not stored in the module, so that recompute does not count it twice and the compiler
    sees it.
    """

    result: Any
    report: BlockReport


def split_report(output: Any) -> tuple[Any, BlockReport | None]:
    """Splits an output into result and report. The report is None for a plain result."""
    return output if isinstance(output, ReportedOutput) else (output, None)


def join_reports(result: Any, reports: Mapping[str, BlockReport | None]) -> Any:
    """`result` with the sum of the reports' objectives and with all their statistics, named `REPORTER.STATISTIC`; or
    the plain result where there is no report."""
    present = {name: report for name, report in reports.items() if report is not None}
    if not present:
        return result
    objectives = [report.objective for report in present.values() if report.objective is not None]
    return ReportedOutput(
        result,
        BlockReport(
            sum(objectives[1:], objectives[0]) if objectives else None,
            {f"{name}.{key}": value for name, report in present.items() for key, value in report.statistics.items()},
        ),
    )


class StageLayer(Protocol):
    """A layer: an `nn.Module`, called with the hidden state as its first argument. It returns the next hidden state,
    possibly as `ReportedOutput`.

    A call runs `run(...)`, which calls the layer's body, by `recompute(body, ...)` where that is set. With a `tile`
    above 0, `run` leaves out what treats tokens alone, and `run_tile` computes that for so many tokens at a time (see
    `model/layers.py`). Both are called inside of `keep(x, part)`, the context in which autograd keeps their input `x`
    for backward; part is 0 for `run` and 1 for `run_tile`.
    """

    recompute: Callable | None
    run: Callable
    tile: int
    run_tile: Callable
    keep: Callable[..., AbstractContextManager]


@runtime_checkable
class Stage(Protocol):
    """A model, or the part of one that is a pipeline stage: an `nn.Module` with more members.

    It is created on the meta device. Then the plan sets loss, deferred weight gradients, recompute and compilation of
    its layers, splits it over tensor-parallel ranks (`group`), shards its layers and then the rest as units, and gives
    it storage. Last, every module with `reset_buffers()` fills its buffers, which stay on the computing device in fp32,
    also where parameters do not.

    layers: by their number in the whole model, in order; a child of the model. depth: number of layers of the whole
    model. first, last: whether the stage has the model's first and last end. group: the tensor-parallel ranks, None
    without any. context: the ranks that share sequences (`ContextGroup`), None without any; with them the model
    computes its own tokens of each sequence, `context.own(length)`. reports: name of each statistic that layers
    report in training -> number of its values.
    """

    layers: Mapping[str, nn.Module]
    depth: int
    first: bool
    last: bool
    group: TensorGroup | None
    context: Any
    reports: dict[str, int]

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Any:
        """tokens: int [batch, length]. documents: int [batch, length]; tokens with different numbers do not see each
        other, and positions restart. hidden: [tokens / t, width], what the stage before returned, None on the first
        stage. Where ranks share sequences, each of them is given whole sequences, and `tokens` in shapes of results
        means the rank's own part.

        Returns hidden states [tokens / t, width] before the last stage. The last stage returns logits [batch, length,
        vocab], or with targets a pair, both summed over the valid targets: the objective (scalar), and the
        cross-entropy of each sequence [batch]. Any of these is a `ReportedOutput` where a layer reports.
        """

    def set_loss(
        self,
        z_loss: float,
        chunk: int,
        compiled: bool,
        tile: int = 0,
        terms: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None = None,
    ) -> None:
        """Sets how the loss is computed, on the stage that has the head; see `LossSettings`."""

    def defer(self, deferred: DeferredGrads) -> None:
        """From now on the weight gradients of linear layers may be deferred, to `deferred`."""

    def tie(self) -> None:
        """To be called after parameters have been replaced: makes tied parameters one object again."""

    # Members of nn.Module, declared because a protocol cannot inherit from a class.
    training: bool

    def modules(self) -> Iterator[nn.Module]: ...
    def children(self) -> Iterator[nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...
    def train(self, mode: bool) -> Any: ...
    def eval(self) -> Any: ...
    def to(self, target: torch.dtype) -> Any: ...
    def to_empty(self, *, device: torch.device | str) -> Any: ...


def keep_here(x: Tensor, part: int = 0) -> AbstractContextManager:
    """The `keep` of a layer whose inputs stay on the device: does nothing."""
    return nullcontext()


Make = Callable[[ModelSpec, range | None], Stage]
"""Creates the modules of a stage from the spec and the range of its layers (None: all)."""


# torch.compile with a graph for each shape, and an error where torch would otherwise go on without one; work on a GPU
# as a CUDA graph.


Result = TypeVar("Result")

GRAPHS = 64
"""Of one function. Shapes, types, masks, windows and recompute make one each, and evaluation again."""


def compile_function(function: Callable) -> Callable:
    """The function compiled anew for each shape. Out of graphs, torch would leave it uncompiled without a word:
    FlexAttention then has a matrix of all scores in memory, and no backward pass under selective recompute."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # The rows that experts receive have a size that the data decide. Under recompute, torch 2.11 cannot compile the
    # check that it is not negative.
    torch._dynamo.config.capture_dynamic_output_shape_ops = torch._dynamo.config.do_not_emit_runtime_asserts = True
    return torch.compile(function, dynamic=False)


GraphBreak = Unsupported


def run_as_one_graph(function: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a function, which is compiled as a whole if it is compiled. Raises `GraphBreak` where that cannot
    be done, before anything is computed."""
    with error_on_graph_break(True):
        return function(*arguments)


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
