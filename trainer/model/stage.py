"""What a plan may ask of a model, and what a model returns: all that parallelism, recompute, schedules and the step
know of one.

`Transformer` is such a model. Code that is not ours becomes one by an adapter with these members; nothing else has to
change. Parameters belong to modules that are `Declared`, under names that do not depend on how the model is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainer.config.model import ModelSpec
from trainer.distributed.collectives import TensorGroup
from trainer.model.linear import DeferredGrads


class BlockReport(NamedTuple):
    """What a block says of a micro-batch besides its result. Each rank says its part of a sum over all ranks and
    micro-batches: that of its own tokens, heads or hidden units.

    objective: scalar, added to the loss for the gradient's sake; like the loss it is a sum over tokens, which the step
    divides by their number. None: there is none.
    statistics: vectors by name, without a graph, of the sizes that the block's `reports` says.
    """

    objective: Tensor | None
    statistics: dict[str, Tensor]


class ReportedOutput(NamedTuple):
    """A result with a report: what a block, layer or stage returns instead of a plain result if it has one.

    It is returned, and not left somewhere, so that recompute does not count it twice and the compiler sees it."""

    result: Any
    report: BlockReport


def split_report(output: Any) -> tuple[Any, BlockReport | None]:
    """What was returned, as result and report."""
    return output if isinstance(output, ReportedOutput) else (output, None)


def join_reports(result: Any, reports: Mapping[str, BlockReport | None]) -> Any:
    """`result` with the sum of the reports' objectives and all their statistics, under the name of who said them before
    a dot; or the plain result where there is no report."""
    said = {name: report for name, report in reports.items() if report is not None}
    if not said:
        return result
    objectives = [report.objective for report in said.values() if report.objective is not None]
    return ReportedOutput(
        result,
        BlockReport(
            sum(objectives[1:], objectives[0]) if objectives else None,
            {f"{name}.{key}": value for name, report in said.items() for key, value in report.statistics.items()},
        ),
    )


class StageLayer(Protocol):
    """A layer: an `nn.Module`, called with the hidden state as its first argument, which it returns, maybe
    `ReportedOutput`.

    A call is `run(...)`, which calls the layer's body by `recompute` where one is set (as `recompute(body, ...)`).
    With a `tile` above 0, `run` leaves out what treats tokens alone, and `run_tile` computes that of so many tokens at
    a time (see `model/tiles.py`). Both are called inside of `keep(x, part)`, the context in which autograd keeps their
    input `x` for backward; part: 0 and 1."""

    recompute: Callable | None
    run: Callable
    tile: int
    run_tile: Callable
    keep: Callable[..., AbstractContextManager]


@runtime_checkable
class Stage(Protocol):
    """A model, or the part of one that is a pipeline stage: an `nn.Module` with more members.

    It is made on the meta device. The plan then sets loss and put-off weight gradients, recompute and compilation of
    its layers, cuts it (`group`), shards its layers and then the rest as units, and gives it storage; last, every
    module that has `reset_buffers()` is asked to fill its buffers.

    layers: by their number in the whole model, in order; a child of the model. depth: layers of the whole model. first,
    last: whether the stage holds the model's ends. group: the tensor-parallel ranks, where the model is cut. context:
    those that share sequences (`context.ContextGroup`), where there are several; the model then computes its own tokens
    of each, `context.own(length)`. rotaries:
    modules that hold buffers alone, which stay with the computation where parameters do not, and in fp32. reports: by
    name, how many values of each statistic its layers report in training.
    """

    layers: Mapping[str, nn.Module]
    depth: int
    first: bool
    last: bool
    group: TensorGroup | None
    context: Any
    rotaries: Iterable[nn.Module]
    reports: dict[str, int]

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Any:
        """tokens: int [batch, length]; documents: int [batch, length], tokens of different numbers do not see each
        other and positions restart; hidden: [tokens / t, width], what the stage before returned (None on the first).
        Where ranks share sequences, all of them are given the whole ones, and `tokens` in shapes of results is the
        rank's own part.

        Returns hidden states before the last stage; on it logits [batch, length, vocab], or with targets a pair, both
        sums over the valid targets: the objective, and the cross-entropy of each sequence [batch]. Any of them is
        `ReportedOutput` where a layer reports.
        """

    def set_loss(
        self,
        z_loss: float,
        chunk: int,
        compiled: bool,
        tile: int = 0,
        terms: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None = None,
    ) -> None:
        """How the loss is computed, where the stage holds it; see `LossSettings`."""

    def defer(self, deferred: DeferredGrads) -> None:
        """From now on the weight gradients of linear layers may be put off, in `deferred`."""

    def tie(self) -> None:
        """After parameters have been replaced: makes those that are one parameter one again."""

    # Of nn.Module.
    training: bool

    def modules(self) -> Iterator[nn.Module]: ...
    def children(self) -> Iterator[nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def train(self, mode: bool) -> Any: ...
    def eval(self) -> Any: ...
    def to(self, target: torch.dtype) -> Any: ...
    def to_empty(self, *, device: torch.device | str) -> Any: ...


def keep_here(x: Tensor, part: int = 0) -> AbstractContextManager:
    """The `keep` of a layer whose inputs stay where they are."""
    return nullcontext()


Make = Callable[[ModelSpec, range | None], Stage]
"""From the spec and the layers of a stage (None: all) to its modules."""
