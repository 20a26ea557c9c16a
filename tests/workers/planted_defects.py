"""Silent defects that others have published, planted in this project one at a time. Each plan is trained with and
without its defect, and compared with one process as `trainer parity` does.

test_planted_defects.py says where each defect was published.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.launch import fork, leave
from support.matrix import PLAIN, SEQUENCES, Case
from support.reference import settings
from torch import Tensor
from workers.plans import LENGTH, Worlds, batches, config_of, describe, spec_of

from trainer.data.batches import MicroBatch
from trainer.distributed.collectives import AllReduceSum, TensorGroup, c10d
from trainer.distributed.mesh import World
from trainer.model import experts, layers, loss, transformer
from trainer.model.dispatch import GatherTokens
from trainer.model.experts import Router, Routing, Sequences
from trainer.model.initial import Weights
from trainer.model.loss import IGNORE
from trainer.model.stage import BlockReport, Stage
from trainer.parallel import recompute
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.parallel.pipeline.runtime import PipelineRuntime
from trainer.parallel.tensor.apply import SharedParameters
from trainer.parallel.zero import fsdp
from trainer.parity.compare import Trajectory, judge_plan, train_reference
from trainer.parity.watch import train_plan
from trainer.planning.features import resolve_plan
from trainer.planning.plan import BatchPlan
from trainer.training.state import TrainState

CPU, RANKS = torch.device("cpu"), 4
Defect = Callable[[World], AbstractContextManager[Any]]
"""Plants a defect for as long as the context lasts. The world is that of the plan."""


# Loss: sums over the vocabulary, and the number of tokens by which gradients are divided.


def smooth_over_own_vocabulary(world: World) -> AbstractContextManager[Any]:
    """A term of the loss that averages over the vocabulary takes a rank's part of it for the whole: here z-loss, in
    backward."""
    right = loss.to_loss_gradient

    def wrong(
        logits: Tensor, vocabulary: int, index: Tensor, valid: Tensor, normalizer: Tensor, cap: float, z_loss: float
    ) -> None:
        own = loss.loss_statistics(logits, vocabulary, index, cap)[0]
        term = 2 * z_loss * own[:, None] * torch.exp(logits - normalizer[:, None])
        right(logits, vocabulary, index, valid, normalizer, cap, 0.0)
        logits[:, :vocabulary] += torch.where(valid[:, None], term, 0)[:, :vocabulary]

    return patch.object(loss, "to_loss_gradient", wrong)


def gather_logits_before_loss(world: World) -> AbstractContextManager[Any]:
    """Each rank takes the log-normaliser over the whole vocabulary, and the loss joins them as if they were of parts:
    it is too large by the logarithm of the number of ranks."""
    right, ranks = loss.loss_statistics, world.dimensions["tp"]

    def wrong(*arguments: Any) -> Tensor:
        normalizer, score = right(*arguments)
        parts = [torch.empty_like(normalizer) for _ in range(ranks.size())]
        dist.all_gather(parts, normalizer, group=ranks.get_group())
        return torch.stack([torch.stack(parts).logsumexp(0), score])

    return patch.object(loss, "loss_statistics", wrong)


def change_scale(factor: Callable[[PipelineRuntime, list[Tensor]], float]) -> AbstractContextManager[Any]:
    """Multiplies the gradient of a rank's loss by a factor of its targets."""
    right = PipelineRuntime.train

    def wrong(self: PipelineRuntime, micro_batches: list[Any], scale: Tensor) -> Tensor:
        return right(self, micro_batches, scale * factor(self, [batch.targets for batch in micro_batches]))

    return patch.object(PipelineRuntime, "train", wrong)


def count(targets: list[Tensor]) -> int:
    return max(1, sum(int((some != IGNORE).sum()) for some in targets))


def average_over_own_tokens(world: World) -> AbstractContextManager[Any]:
    """Each data-parallel rank divides by its own number of valid tokens, and gradients are averaged over ranks."""

    def factor(_: PipelineRuntime, targets: list[Tensor]) -> float:
        own = torch.tensor(float(count(targets)))
        everyone = own.clone()
        dist.all_reduce(everyone, group=world.data.get_group())
        return (everyone / own / world.data.size()).item()

    return change_scale(factor)


def average_over_own_part(world: World) -> AbstractContextManager[Any]:
    """Each context-parallel rank divides by the number of valid tokens in its part of the sequences, and gradients are
    averaged over ranks."""

    def factor(runtime: PipelineRuntime, targets: list[Tensor]) -> float:
        own = runtime.stages[0].context.own(LENGTH, CPU)
        return count(targets) / count([some[:, own] for some in targets]) / world.context.size()

    return change_scale(factor)


# Tensor parallelism: groups, and gradients of what every rank holds.


def scatter_by_another_layout(world: World) -> AbstractContextManager[Any]:
    """Of the embedded tokens a rank keeps the part of its place in another group, that of its data-parallel rank."""

    class Scatter:
        @staticmethod
        def apply(group: TensorGroup, x: Tensor) -> Tensor:
            return AllReduceSum.apply(group, x).tensor_split(group.size)[world.data.get_local_rank()]

    return patch.object(transformer, "ReduceScatterSum", Scatter)


RECOMPUTING = False
"""Whether a layer is running for backward. See `note_recompute`."""


def note_recompute() -> AbstractContextManager[Any]:
    """Keeps `RECOMPUTING` up to date."""
    right = recompute.checkpoint

    def noted(function: Callable, *arguments: Any, **keywords: Any) -> Any:
        calls = itertools.count()

        def counted(*inner: Any) -> Any:
            global RECOMPUTING
            RECOMPUTING = next(calls) > 0
            try:
                return function(*inner)
            finally:
                RECOMPUTING = False

        return right(counted, *arguments, **keywords)

    return patch.object(recompute, "checkpoint", noted)


@contextmanager
def recompute_in_another_group(world: World) -> Iterator[None]:
    """Backward recomputes a layer with tokens gathered from ranks of another group, the data-parallel one."""
    right, other = TensorGroup.gather, world.data.get_group().group_name

    def wrong(self: TensorGroup, x: Tensor) -> Tensor:
        return c10d.all_gather_into_tensor(x.contiguous(), self.size, other) if RECOMPUTING else right(self, x)

    with note_recompute(), patch.object(TensorGroup, "gather", wrong):
        yield


def leave_out_of_sums(word: str) -> Defect:
    """The gradient of a parameter that every tensor-parallel rank holds is not summed over them."""

    def plant(world: World) -> AbstractContextManager[Any]:
        right = SharedParameters.sum

        def wrong(self: SharedParameters) -> None:
            kept = self.parameters
            self.parameters = {name: parameter for name, parameter in kept.items() if word not in name}
            right(self)
            self.parameters = kept

        return patch.object(SharedParameters, "sum", wrong)

    return plant


def change_counts(change: Callable[[str, bool], bool]) -> AbstractContextManager[Any]:
    """Changes which parameters a rank counts in the gradient norm. change: of a name and whether it is counted."""
    right = SharedParameters.__init__

    def wrong(self: SharedParameters, *arguments: Any) -> None:
        right(self, *arguments)
        self.counted = torch.tensor([change(*pair) for pair in zip(self.parameters, self.counted_here)])

    return patch.object(SharedParameters, "__init__", wrong)


def count_on_first_rank(word: str) -> Defect:
    """The gradient norm takes a parameter of which each tensor-parallel rank holds a part for one that all hold."""
    return lambda world: change_counts(lambda name, counted: counted and (word not in name or world.place("tp") == 0))


def count_both_ends(world: World) -> AbstractContextManager[Any]:
    """The gradient norm counts a tied embedding on the first and on the last pipeline stage."""
    first = world.place("replicate") == 0
    return change_counts(lambda name, counted: counted or (first and name == "embedding.weight"))


def add_bias_on_every_rank(world: World) -> AbstractContextManager[Any]:
    """Each rank adds the bias of a row-parallel layer before the sum over ranks."""
    right = layers.row_parallel

    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup | None, *rest: Any) -> Tensor:
        return right(x, weight, bias if bias is None or group is None else bias * group.size, group, *rest)

    return patch.object(layers, "row_parallel", wrong)


# Pipeline: names.


def number_layers_from_own_stage(world: World) -> AbstractContextManager[Any]:
    """A stage reads weights by the numbers of its layers among its own."""
    right = fsdp.fill_parameters

    def wrong(model: Stage, weights: Weights) -> None:
        first = int(next(iter(model.layers)))

        def renamed(name: str, info: Any) -> Tensor:
            kind, _, rest = name.partition(".")
            number, _, rest = rest.partition(".")
            return weights(f"{kind}.{int(number) - first}.{rest}" if kind == "layers" else name, info)

        right(model, renamed)

    return patch.object(fsdp, "fill_parameters", wrong)


# Experts.


def average_experts_over_fewer_ranks(world: World) -> AbstractContextManager[Any]:
    """Gradients are averaged over the ranks that reduce them. Those of experts are ep times fewer, so the gradients of
    experts are ep times too large."""
    right = fsdp.FSDP.shard

    def wrong(self: fsdp.FSDP, model: Stage) -> None:
        right(self, model)
        for module in model.modules():
            if isinstance(module, fsdp.ExpertUnit):
                module.set_gradient_divide_factor(1 / self.plan.ep)

    return patch.object(fsdp.FSDP, "shard", wrong)


def keep_own_gradient(world: World) -> AbstractContextManager[Any]:
    """What other ranks add to the gradient of gathered tokens is not summed: everything before them loses it."""

    def wrong(ctx: Any, gradient: Tensor) -> tuple:
        return None, ctx.group.own(gradient)

    return patch.object(GatherTokens, "backward", staticmethod(wrong))


def add_bias_of_experts_on_every_rank(world: World) -> AbstractContextManager[Any]:
    """The bias of the experts' outputs counts once for each tensor-parallel rank."""
    right, ranks = experts.GroupedBias, world.dimensions["tp"].size()

    class Bias:
        @staticmethod
        def apply(y: Tensor, bias: Tensor, weights: Tensor | None, ends: Tensor) -> Tensor:
            return right.apply(y, bias, weights if weights is None else ranks * weights, ends)

    return patch.object(experts, "GroupedBias", Bias)


@contextmanager
def choose_otherwise_in_backward(world: World) -> Iterator[None]:
    """In backward, scores have other bits than in forward: here by a few percent, so that a few of many tokens are
    enough."""
    right = experts.choose_experts

    def wrong(scores: Tensor, *arguments: int) -> Tensor:
        noise = RECOMPUTING * torch.arange(scores.numel()).view_as(scores).sin()
        return right(scores * (1 + 0.05 * noise), *arguments)

    with note_recompute(), patch.object(experts, "choose_experts", wrong):
        yield


@contextmanager
def choose_again_in_backward(world: World) -> Iterator[None]:
    """Recompute does not save which experts forward chose."""
    with choose_otherwise_in_backward(world), patch.dict(recompute.ROUTING, clear=True):
        yield


# The balance of experts.


def change_report(change: Callable[[BlockReport], BlockReport]) -> AbstractContextManager[Any]:
    """Changes what a rank's routers report of each micro-batch."""
    right = Router.report
    return patch.object(Router, "report", lambda *arguments: change(right(*arguments)))


def weigh_balance_by_all_tokens(world: World) -> AbstractContextManager[Any]:
    """A rank's balance and z losses are weighted by the number of tokens of all tensor-parallel ranks, not by that of
    its own."""
    ranks = world.dimensions["tp"].size()
    return change_report(lambda report: report._replace(objective=ranks * report.objective))


def balance_last_stage(world: World) -> AbstractContextManager[Any]:
    """Only the last stage's losses of routers are differentiated."""
    last = world.place("pp") == world.dimensions["pp"].size() - 1
    return change_report(lambda report: report if last else report._replace(objective=None))


def balance_micro_batches(world: World) -> AbstractContextManager[Any]:
    """The loss of a sequence takes the whole micro-batch for one sequence: it depends on how many that has."""
    right = Router.report

    def wrong(self: Router, routing: Routing, sequences: Sequences | None) -> BlockReport:
        if sequences is not None:
            sequences = sequences._replace(numbers=torch.zeros_like(sequences.numbers), count=1)
        return right(self, routing, sequences)

    return patch.object(Router, "report", wrong)


def balance_by_own_load(world: World) -> AbstractContextManager[Any]:
    """A rank's biases follow from the load of its own tokens, which is not summed over ranks."""
    right = TrainState.rebalance_experts

    def wrong(self: TrainState, statistics: Tensor, skipped: Tensor) -> None:
        right(self, torch.cat([self.runtime.statistics[name] for name in self.reports]), skipped)

    return patch.object(TrainState, "rebalance_experts", wrong)


@dataclass(frozen=True)
class Planted:
    """A defect, and the plan that shows it. A case is written as in tests/support/matrix.py."""

    defect: Defect
    case: Case


SQUARE = PLAIN | {"dp": 2, "tp": 2}
PIPELINE = PLAIN | {"dp": 2, "pp": 2, "schedule": "1f1b"}
SINKS = SQUARE | {"family": "gpt_oss"}
MIXTURE = PLAIN | {"family": "eight experts"}
FOLDED = MIXTURE | {"dp": 2, "tp": 2, "ep": 4, "stage": 1}
BALANCED = {"family": "balanced experts"}
RECOMPUTED = MIXTURE | {"dp": 4, "recompute": "full"}

DEFECTS = {
    "vocabulary": Planted(smooth_over_own_vocabulary, SQUARE | {"loss": "z_loss"}),
    "gathered logits": Planted(gather_logits_before_loss, SQUARE),
    "tokens of data ranks": Planted(average_over_own_tokens, PLAIN | {"dp": 4}),
    "recompute group": Planted(recompute_in_another_group, SQUARE | {"recompute": "full"}),
    "scatter group": Planted(scatter_by_another_layout, SQUARE),
    "norm of sinks": Planted(count_on_first_rank(".sinks."), SINKS),
    "norm of tied ends": Planted(count_both_ends, PIPELINE | {"tied": True}),
    "tokens of context ranks": Planted(average_over_own_part, PLAIN | {"dp": 2, "cp": 2, "way": "allgather zigzag"}),
    "norm of each head": Planted(leave_out_of_sums(".q_norm."), SQUARE),
    "layer numbers": Planted(number_layers_from_own_stage, PIPELINE),
    "expert gradients": Planted(average_experts_over_fewer_ranks, MIXTURE | {"dp": 4, "ep": 2, "stage": 3}),
    "norm of experts": Planted(count_on_first_rank(".experts."), FOLDED),
    "gradients of tokens": Planted(keep_own_gradient, MIXTURE | {"dp": 4, "ep": 2, "ep_dispatch": "allgather"}),
    "bias of experts": Planted(add_bias_of_experts_on_every_rank, SINKS),
    "bias of rows": Planted(add_bias_on_every_rank, SINKS),
    "shared keys": Planted(keep_own_gradient, SQUARE | {"family": "latent"}),
    "balance by ranks": Planted(weigh_balance_by_all_tokens, SQUARE | BALANCED),
    "balance by micro-batches": Planted(balance_micro_batches, SQUARE | BALANCED),
    "balance by own load": Planted(balance_by_own_load, SQUARE | BALANCED),
    "balance by stages": Planted(balance_last_stage, PIPELINE | BALANCED),
    "chosen again": Planted(choose_again_in_backward, RECOMPUTED),
    "chosen otherwise": Planted(choose_otherwise_in_backward, RECOMPUTED),
}


def first_step(steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """The first step shows every defect, and further steps of plans without one are those of workers/plans.py."""
    return itertools.islice(steps, 1)


def train(case: Case, worlds: Worlds, defect: Defect | None = None) -> Trajectory:
    """What a plan does with random batches."""
    spec, config = spec_of(case, CPU), config_of(case, Path())
    plan = resolve_plan(config.parallel, RANKS, spec)
    batch = BatchPlan(LENGTH, SEQUENCES, SEQUENCES // plan.dp // case["micro_batches"], case["micro_batches"])
    world, pipeline = worlds.of(plan, CPU), resolve_pipeline(config, spec, plan, batch)
    data = first_step(batches(case, spec, CPU, world.data.get_local_rank(), plan.dp, case["micro_batches"]))
    with defect(world) if defect is not None else nullcontext():
        return train_plan(config, spec, plan, pipeline, world, data)


def main(out: str) -> None:
    worlds, seen = Worlds(), {}
    for name, planted in DEFECTS.items():
        if describe(planted.case) not in seen:
            seen[describe(planted.case)] = planted.case, train(planted.case, worlds)
        seen[name] = planted.case, train(planted.case, worlds, planted.defect)
    if dist.get_rank():
        return
    results, references = {}, {}
    for name, (case, trajectory) in seen.items():
        config, spec = config_of(case, Path()), spec_of(case, CPU)
        key = json.dumps([spec.to_dict(), case["loss"]])
        if key not in references:
            plain = settings(loss__z_loss=config.loss.z_loss)
            references[key] = train_reference(plain, spec, first_step(batches(case, spec, CPU)), CPU)
        result = judge_plan(describe(case), [], "fp32", trajectory, references[key])
        results[name] = {"plan": result.plan, "verdict": result.verdict, "reasons": result.reasons}
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    fork()
    main(sys.argv[1])
    leave()
