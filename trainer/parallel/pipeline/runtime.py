"""Runs a schedule: the micro-batches of one optimizer step, forward and backward, on the stages that this rank holds.

Every training step goes through here, also that of a rank without a pipeline (one stage; F, B, F, B ...).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from trainer.config import ConfigError
from trainer.distributed.p2p import PeerError, PendingTensor, PipelineChannels, PipelineError, TransferError
from trainer.model.stage import BlockReport, Stage, split_report
from trainer.parallel.pipeline.timing import LayerProbe, StepTimes
from trainer.planning.schedules.ir import COMPUTE, Action, Schedule
from trainer.planning.schedules.lower import lower_schedule
from trainer.planning.schedules.simulate import ActionSpan
from trainer.planning.schedules.templates import forward_only
from trainer.util.trace_labels import WAIT

if TYPE_CHECKING:
    from trainer.data.batches import MicroBatch

PATIENCE = 1.0
"""Seconds that a rank waits for an explanation in the store after a transfer broke; then it reports that its peer has
died without a word. A broken collective does not tell which connection failed, so after one a rank waits five times as
long for another rank's explanation."""

STEPS_TIMED = 3
"""Steps whose times are kept: on CUDA the newest are still running when they are asked for."""

EVALUATED_TOGETHER = 8
"""Micro-batches per rank that an evaluation has on their way: no backward pass holds back the first ranks there."""


class StageSharding(Protocol):
    """What happens to a stage's parameters and gradients around its computation (ZeRO)."""

    def begin(self, stage: int) -> None:
        """A step starts: no reduction until one is asked for."""

    def unshard(self, stage: int) -> None:
        """The stage is needed soon: starts to gather its parameters."""

    def reshard(self, stage: int) -> None:
        """The stage is not needed for a while: gathered parameters may go."""

    def accumulate(self, stage: int) -> None:
        """Weight gradients were computed outside of a backward pass (W)."""

    def begin_reducing_backward(self, stage: int) -> None:
        """The next backward pass (B) reduces the stage's gradients itself, overlapped; no `reduce_now` follows."""

    def end_reducing_backward(self, stage: int) -> None:
        """That backward pass has run."""

    def reduce_now(self, stage: int) -> None:
        """Reduces the gradients accumulated on the stage."""

    def end(self, stage: int) -> None:
        """The step's last action has run."""


class DeferredGrads(Protocol):
    """Where linear layers leave the work of their weight gradients."""

    active: bool
    """While it is set, a backward pass leaves that work instead of doing it."""

    def take(self) -> Callable[[], None]:
        """Everything left since the last call, as one function that computes and accumulates it."""


class RankAction(NamedTuple):
    """An action of this rank; `reduces`: a backward pass that also does the reduction after it."""

    action: Action
    reduces: bool = False


def join_reductions(actions: tuple[Action, ...]) -> tuple[RankAction, ...]:
    """A lowered program, each reduction joined to the action before it on its stage where that is a full backward."""
    program: list[RankAction] = []
    latest: dict[int, int] = {}  # by stage, where its last compute action stands in the program
    for action in actions:
        if action.kind == "REDUCE_GRAD" and program[place := latest[action.stage]].action.kind == "B":
            program[place] = RankAction(program[place].action, reduces=True)
            continue
        if action.kind in COMPUTE:
            latest[action.stage] = len(program)
        program.append(RankAction(action))
    return tuple(program)


class PipelineRuntime:
    """Executes `schedule` on this rank.

    stages: by stage, the module that this rank holds, called as a `Stage`: `hidden` is None on the first stage,
    `targets` on all but the last. What is differentiated is the objective that the last returns, and those that any
    reports. channels: the edges of the pipeline; None on a rank without one. hidden: shape and dtype of the activation
    between any two stages, for a micro-batch. reduce, ahead: how `lower_schedule` places reductions ("last" or "every"
    backward) and how many stages it gathers ahead.

    Memory is bounded by the schedule: the buffer of a receive exists from its posting, the input of a micro-batch until
    its backward (I or B) is done, its output only until it is sent.

    An error in an action is raised as `PipelineError` on every rank of the pipeline, naming the rank and action where
    it happened; without channels it is raised as it is. After it the channels are closed."""

    def __init__(
        self,
        schedule: Schedule,
        stages: dict[int, Stage],
        channels: PipelineChannels | None,
        sharding: StageSharding,
        deferred: DeferredGrads,
        hidden: Callable[[MicroBatch], tuple[torch.Size, torch.dtype]],
        device: torch.device,
        reduce: str = "last",
        ahead: int = 1,
    ):
        self.schedule, self.stages, self.channels, self.device = schedule, stages, channels, torch.device(device)
        self.sharding, self.deferred, self.hidden, self.ahead = sharding, deferred, hidden, ahead
        self.rank = 0 if channels is None else channels.rank
        held = {stage for stage, rank in enumerate(schedule.placement) if rank == self.rank}
        if held != set(stages):
            raise ValueError(
                f"schedule {schedule.name} places stages {sorted(held)} on rank {self.rank}, which has {sorted(stages)}"
            )
        self._program = join_reductions(lower_schedule(schedule, self.rank, reduce=reduce, ahead=ahead))
        self._evaluations: dict[int, tuple[RankAction, ...]] = {}
        self._times: deque[StepTimes] = deque(maxlen=STEPS_TIMED)
        self.probe: LayerProbe | None = None
        self.statistics: dict[str, Tensor] = {}
        """What the stages of this rank reported in the latest step: vectors in fp64, summed over its micro-batches."""

    def train(self, batches: list[MicroBatch], scale: Tensor) -> Tensor:
        """Forward and backward of one step's micro-batches; gradients are added to those that the parameters have.

        scale: scalar that multiplies the objective in the backward pass (loss scale / valid tokens).
        Returns the entropies [micro-batches, sequences of one] in fp64; zeros on ranks without the last stage.
        """
        if len(batches) != self.schedule.microbatches:
            raise ValueError(
                f"{len(batches)} micro-batches for schedule {self.schedule.name} of {self.schedule.microbatches}"
            )
        times = None
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # a graph's events have no time
            times = self._times.popleft() if len(self._times) == STEPS_TIMED else StepTimes(self.device)
            times.restart()
            self._times.append(times)
        for stage in self.stages:
            self.sharding.begin(stage)
        flight = _Flight(batches, scale, times, self.probe)
        self._run(self._program, flight)
        for stage in self.stages:
            self.sharding.end(stage)
        self.statistics = flight.statistics
        return flight.losses(self.device)

    @torch.no_grad()
    def evaluate(self, batches: list[MicroBatch]) -> Tensor:
        """The entropies [batches, sequences of one] in fp64 without backward passes; zeros on ranks without the last
        stage.

        Every rank of the pipeline passes as many batches, at least one. Gradients, also half accumulated ones, stay as
        they are."""
        modes = {stage: module.training for stage, module in self.stages.items()}
        for module in self.stages.values():
            module.eval()
        together = len(batches) if self.channels is None else EVALUATED_TOGETHER * self.schedule.ranks
        losses = []
        for start in range(0, len(batches), together):
            flight = _Flight(batches[start : start + together])
            self._run(self._forward_only(len(flight.batches)), flight)
            losses.append(flight.losses(self.device))
        for stage, module in self.stages.items():
            module.train(modes[stage])
        return torch.cat(losses)

    @property
    def times(self) -> StepTimes:
        """Of the latest step, which may still run on the device; kept until `STEPS_TIMED` more are started."""
        return self._times[-1]

    @property
    def timeline(self) -> tuple[ActionSpan, ...]:
        """When each compute action of the latest finished step ran."""
        return self._finished().spans()

    def busy(self) -> float:
        """Seconds of computation in the latest finished step."""
        return self._finished().busy()

    def finish(self) -> float:
        """Seconds from the start of the latest finished step to the end of its last action."""
        return self._finished().finish()

    def _finished(self) -> StepTimes:
        return next((times for times in reversed(self._times) if times.finished()), self._times[0])

    def _forward_only(self, count: int) -> tuple[RankAction, ...]:
        if count not in self._evaluations:
            self._evaluations[count] = join_reductions(
                lower_schedule(forward_only(self.schedule.placement, count), self.rank, ahead=self.ahead)
            )
        return self._evaluations[count]

    def _run(self, program: tuple[RankAction, ...], flight: _Flight) -> None:
        named = _named if torch.autograd._profiler_enabled() else _unnamed
        instruction = None
        try:
            for instruction in program:
                with named(instruction.action):
                    self._perform(instruction, flight)
            instruction = None
            if self.channels is not None:
                with record_function(WAIT):
                    self.channels.flush()
        except Exception as error:
            self._fail(error, instruction and instruction.action)
        finally:
            self.deferred.active = False

    def _perform(self, instruction: RankAction, flight: _Flight) -> None:
        action = instruction.action
        stage, key, placement = action.stage, (action.stage, action.microbatch), self.schedule.placement
        match action.kind:
            case "F":
                self._forward(stage, action, flight)
            case "B" | "I":
                self._backward(stage, action, flight, instruction.reduces)
            case "W":
                with flight.timed(action):
                    flight.weights.pop(key)()
                    self.sharding.accumulate(stage)
            case "SEND_F":
                self.channels.send(flight.outputs.pop(key), placement[stage + 1])
            case "SEND_B":
                self.channels.send(flight.input_gradients.pop(key), placement[stage - 1])
            case "RECV_F":
                flight.inputs[key] = self.channels.recv(
                    *self.hidden(flight.batches[action.microbatch]), placement[stage - 1]
                )
            case "RECV_B":
                like = self.hidden(flight.batches[action.microbatch])
                flight.output_gradients[key] = self.channels.recv(*like, placement[stage + 1])
            case "UNSHARD":
                self.sharding.unshard(stage)
            case "RESHARD":
                self.sharding.reshard(stage)
            case "REDUCE_GRAD":
                self.sharding.reduce_now(stage)
            case kind:
                raise ValueError(f"no rank can perform {kind}")

    def _forward(self, stage: int, action: Action, flight: _Flight) -> None:
        number, last = action.microbatch, stage == self.schedule.stages - 1
        batch, hidden = flight.batches[number], None
        if stage > 0:
            hidden = _arrived(flight.inputs.pop((stage, number)))
            hidden.requires_grad_(flight.training)
        with flight.timed(action):
            output = self.stages[stage](batch.tokens, batch.targets if last else None, batch.documents, hidden)
        output, report = split_report(output)
        if last:
            output, entropy = output
            flight.entropies[number] = entropy.detach()
        elif self.schedule.placement[stage + 1] == self.rank:
            flight.inputs[stage + 1, number] = output.detach()
        else:
            flight.outputs[stage, number] = output.detach()
        if flight.training:
            # The place in the graph from which backward starts, and not the output: its memory goes when it is sent.
            flight.graphs[stage, number] = hidden, get_gradient_edge(output) if output.requires_grad else None
            if last:
                flight.output_gradients[stage, number] = flight.scale.to(output.dtype)
            if report is not None:
                flight.take((stage, number), report)

    def _backward(self, stage: int, action: Action, flight: _Flight, reduces: bool) -> None:
        key = stage, action.microbatch
        gradient = _arrived(flight.output_gradients.pop(key))
        hidden, output = flight.graphs.pop(key)
        if reduces:
            self.sharding.begin_reducing_backward(stage)
        with flight.timed(action):
            self.deferred.active = action.kind == "I"
            ends = flight.objectives.pop(key, ())
            if output is not None:  # nothing to do below the first stage that has something to train
                ends = ((output, gradient), *ends)
            if ends:
                torch.autograd.backward(*zip(*ends))
            self.deferred.active = False
            if action.kind == "I":
                flight.weights[key] = self.deferred.take()
        if reduces:
            self.sharding.end_reducing_backward(stage)
        if hidden is None:
            return
        gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
        if self.schedule.placement[stage - 1] == self.rank:
            flight.output_gradients[stage - 1, action.microbatch] = gradient
        else:
            flight.input_gradients[key] = gradient

    def _fail(self, error: Exception, action: Action | None) -> NoReturn:
        """Raises what is to be known about an error on this or another rank, after telling it to the others.

        Closing the channels makes their transfers break, so that they look for what was told."""
        if self.channels is None:
            raise error
        channels, me = self.channels, self.channels.ranks[self.rank]
        where = "the end of the step" if action is None else f"{action} ({_describe(action)})"
        told = channels.failures.told(
            PATIENCE if isinstance(error, TransferError) else 5 * PATIENCE if _broke(error) else 0.0
        )
        if told is None and isinstance(error, TransferError):
            told = channels.failures.tell(
                f"rank {error.peer} was lost: it ended, or its connection broke, without a word of why; rank {me} "
                f"noticed at {where}, {error}"
            )
        mine = f"rank {me} failed in {where}: {type(error).__name__}: {error}"
        told = told or channels.failures.tell(mine)
        channels.close(abort=True)
        channels.failures.keep_for_others(5 * PATIENCE)
        if told == mine:
            raise error if isinstance(error, ConfigError) else PipelineError(mine) from error
        raise PeerError(f"{told} [seen by rank {me} at {where}]") from error


@dataclass
class _Flight:
    """The micro-batches of one run of a program, and what of them is in memory on this rank; keys are (stage,
    micro-batch)."""

    batches: list[MicroBatch]
    scale: Tensor | None = None
    times: StepTimes | None = None
    probe: LayerProbe | None = None
    inputs: dict[tuple[int, int], Tensor | PendingTensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """To be sent."""
    output_gradients: dict[tuple[int, int], Tensor | PendingTensor] = field(default_factory=dict)
    input_gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """To be sent."""
    graphs: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = field(default_factory=dict)
    """From forward to backward: the input and where the graph of the output begins."""
    weights: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    """From I to W."""
    objectives: dict[tuple[int, int], tuple[tuple[GradientEdge, Tensor]]] = field(default_factory=dict)
    """From forward to backward: where the graph of what a stage adds to the loss begins, and its gradient."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    entropies: dict[int, Tensor] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        return self.scale is not None

    def take(self, key: tuple[int, int], report: BlockReport) -> None:
        """What a stage reports of a micro-batch."""
        objective = report.objective
        if objective is not None and objective.requires_grad:
            self.objectives[key] = ((get_gradient_edge(objective), self.scale.to(objective.dtype)),)
        for name, values in report.statistics.items():
            self.statistics[name] = self.statistics.get(name, 0.0) + values.double()

    def timed(self, action: Action) -> AbstractContextManager[Any]:
        if self.times is None:
            return nullcontext()
        return self.times.timed(action) if self.probe is None else self.probe.timed(action, self.times)

    def losses(self, device: torch.device) -> Tensor:
        if not self.entropies:
            shape = len(self.batches), len(self.batches[0].targets)
            return torch.zeros(shape, dtype=torch.float64, device=device)
        return torch.stack([self.entropies[number] for number in range(len(self.batches))]).double()


def _arrived(tensor: Tensor | PendingTensor) -> Tensor:
    if not isinstance(tensor, PendingTensor):
        return tensor
    with record_function(WAIT):
        return tensor.wait()


def _broke(error: Exception) -> bool:
    """Whether a collective failed, most often because a rank of its group has gone."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _named(action: Action) -> AbstractContextManager[Any]:
    return record_function(f"PP:{action}")


def _unnamed(action: Action) -> AbstractContextManager[Any]:
    return nullcontext()


def _describe(action: Action) -> str:
    kinds = {
        "F": "forward",
        "B": "backward",
        "I": "gradient of the input",
        "W": "gradient of the weights",
        "SEND_F": "sending the hidden state",
        "RECV_F": "receiving the hidden state",
        "SEND_B": "sending the gradient",
        "RECV_B": "receiving the gradient",
        "UNSHARD": "gathering parameters",
        "RESHARD": "dropping gathered parameters",
        "REDUCE_GRAD": "reducing gradients",
    }
    of = "" if action.microbatch is None else f", micro-batch {action.microbatch}"
    return f"{kinds[action.kind]}, stage {action.stage}{of}"
