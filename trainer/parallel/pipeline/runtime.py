"""Runs a schedule: the micro-batches of one optimizer step, forward and backward, on the stages that this rank holds.

Every training step goes through here. A rank without a pipeline has one stage and the order F, B, F, B, and so on. The
actions (F, B, I, W and the transfers between them) are those of `planning/schedules/ir.py`;
`planning/schedules/lower.py` derives this rank's program from the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from trainer.config import ConfigError
from trainer.distributed.overlap import run_in_turns
from trainer.distributed.p2p import PeerError, PendingTensor, PipelineChannels, PipelineError, TransferError
from trainer.model.stage import BlockReport, Stage, split_report
from trainer.parallel.pipeline.timing import LayerProbe, StepTimes
from trainer.planning.schedules.ir import COMPUTE, Action, Schedule
from trainer.planning.schedules.lower import lower_schedule
from trainer.planning.schedules.simulate import ActionSpan
from trainer.planning.schedules.templates import forward_only
from trainer.util.tables import WAIT

if TYPE_CHECKING:
    from trainer.data.batches import MicroBatch

PATIENCE = 1.0
"""Seconds that a rank waits for an explanation in the store after a transfer failed. After that it reports that its
peer died without one. The error of a broken collective does not say which connection failed, so after one a rank waits
five times as long for another rank's explanation."""

STEPS_TIMED = 3
"""Number of steps whose times are kept. On CUDA the newest steps are still running when times are read."""

EVALUATED_TOGETHER = 8
"""Micro-batches per pipeline rank that an evaluation runs before it waits for its transfers. Without backward passes
nothing else would keep the first stages from running ahead, with all their outputs in memory."""


class StageSharding(Protocol):
    """Gathers a stage's parameters and reduces its gradients around its computation (ZeRO). Called by the runtime."""

    def begin(self, stage: int) -> None:
        """At the start of a step: no backward pass reduces until `begin_reducing_backward` or `reduce_now`."""

    def unshard(self, stage: int) -> None:
        """Starts to gather the stage's parameters, which are needed soon."""

    def reshard(self, stage: int) -> None:
        """The stage is not needed for a while: its gathered parameters may be freed."""

    def accumulate(self, stage: int) -> None:
        """After weight gradients were computed outside of a backward pass (W): takes them over."""

    def begin_reducing_backward(self, stage: int) -> None:
        """Before a full backward pass (B) that reduces the stage's gradients itself, overlapped. No `reduce_now`
        follows it."""

    def end_reducing_backward(self, stage: int) -> None:
        """After that backward pass."""

    def reduce_now(self, stage: int) -> None:
        """Reduces the gradients that the stage has accumulated."""

    def end(self, stage: int) -> None:
        """After the step's last action."""

    def change_pass(self) -> None:
        """Called where a forward and a backward pass take turns: the other pass goes on from here."""


class DeferredGrads(Protocol):
    """Where linear layers leave the computation of their weight gradients. See `model.linear.DeferredGrads`."""

    active: bool
    """While it is set, backward passes leave weight gradients for later instead of computing them."""

    def take(self) -> Callable[[], None]:
        """Everything left since the last call, as one function that computes the gradients and accumulates them."""


class RankAction(NamedTuple):
    """An action of this rank. reduces: whether its backward pass also does the reduction that follows it."""

    action: Action
    reduces: bool = False


def join_reductions(actions: tuple[Action, ...]) -> tuple[RankAction, ...]:
    """A lowered program in which each reduction is joined to the action before it on its stage, where that is a full
    backward. FSDP can then reduce each layer's gradients while backward computes the next layer. After a W no backward
    pass runs, so that reduction stays an action of its own."""
    program: list[RankAction] = []
    latest: dict[int, int] = {}  # stage -> index of its last compute action in the program
    for action in actions:
        if action.kind == "REDUCE_GRAD":
            place = latest[action.stage]
            backward = program[place].action.computed[-1]
            if backward.kind == "B" and backward.stage == action.stage:
                program[place] = RankAction(program[place].action, reduces=True)
                continue
        for part in action.computed:
            if part.kind in COMPUTE:
                latest[part.stage] = len(program)
        program.append(RankAction(action))
    return tuple(program)


class PipelineRuntime:
    """Executes `schedule` on this rank.

    stages: stage number -> the module of this rank, called as a `Stage`. `hidden` is None on the first stage; `targets`
    is None on all but the last. What is differentiated is the objective that the last stage returns, and the objectives
    that any stage reports. channels: the edges of the pipeline, None on a rank without one. hidden: shape and dtype of
    the activation between two stages for a given micro-batch. reduce, ahead: how `lower_schedule` places reductions
    ("last" or "every" backward) and how many actions ahead it starts receives and gathers. overlaps: whether the two
    passes of an OVERLAP_F_B run in turns (`distributed/overlap.py`), instead of one after the other.

    Memory is bounded by the schedule. A receive buffer exists from the posting of the receive. The input of a
    micro-batch exists until its backward pass (I or B) is done, its output only until it has been sent.

    An error in an action is raised as `PipelineError` on every rank of the pipeline, naming the rank and the action.
    Without channels it is raised unchanged. Afterwards the channels are closed.
    """

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
        overlaps: bool = False,
    ):
        self.schedule, self.stages, self.channels, self.device = schedule, stages, channels, torch.device(device)
        self.sharding, self.deferred, self.hidden, self.ahead = sharding, deferred, hidden, ahead
        self.rank = 0 if channels is None else channels.rank
        here = {stage for stage, rank in enumerate(schedule.placement) if rank == self.rank}
        if here != set(stages):
            raise ValueError(
                f"schedule {schedule.name} places stages {sorted(here)} on rank {self.rank}, which has {sorted(stages)}"
            )
        self._program = join_reductions(lower_schedule(schedule, self.rank, reduce, ahead, overlaps))
        self._thread = ThreadPoolExecutor(1, "backward")  # for OVERLAP_F_B; the thread starts with its first work
        self._evaluations: dict[int, tuple[RankAction, ...]] = {}
        self._times: deque[StepTimes] = deque(maxlen=STEPS_TIMED)
        self.probe: LayerProbe | None = None
        self.statistics: dict[str, Tensor] = {}
        """Statistics that this rank's stages reported in the latest step: fp64 vectors, summed over its
        micro-batches."""

    def train(self, batches: list[MicroBatch], scale: Tensor) -> Tensor:
        """Forward and backward of one step's micro-batches. Gradients are added to those that the parameters already
        have.

        scale: scalar that multiplies the objective in the backward pass (loss scale / valid tokens). Returns the summed
        cross-entropies [micro-batches, sequences of each] in fp64, zeros on ranks without the last stage.
        """
        if len(batches) != self.schedule.microbatches:
            raise ValueError(
                f"{len(batches)} micro-batches for schedule {self.schedule.name} of {self.schedule.microbatches}"
            )
        times = None
        # Events that a CUDA graph captures cannot be timed, so a captured step has no times.
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            # The oldest step's events are reused: creating CUDA events in each step costs host time.
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
        """The summed cross-entropies [batches, sequences of each] in fp64, without backward passes; zeros on ranks
        without the last stage.

        Every rank of the pipeline passes as many batches, at least one. Gradients, also partly accumulated ones, are
        left alone.
        """
        modes = {stage: module.training for stage, module in self.stages.items()}
        for module in self.stages.values():
            module.eval()
        at_once = len(batches) if self.channels is None else EVALUATED_TOGETHER * self.schedule.ranks
        losses = []
        for start in range(0, len(batches), at_once):
            flight = _Flight(batches[start : start + at_once])
            self._run(self._forward_only(len(flight.batches)), flight)
            losses.append(flight.losses(self.device))
        for stage, module in self.stages.items():
            module.train(modes[stage])
        return torch.cat(losses)

    @property
    def times(self) -> StepTimes:
        """Times of the latest step, which may still be running on the device. Kept until `STEPS_TIMED` more steps are
        started."""
        return self._times[-1]

    @property
    def timeline(self) -> tuple[ActionSpan, ...]:
        """Start and end of each compute action of the latest step that has finished on the device."""
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
        # Labels cost host time for every action, so they exist only while a profile is taken.
        named = _named if torch.autograd._profiler_enabled() else _unnamed
        instruction = None
        try:
            for instruction in program:
                with named(instruction.action):
                    self._perform(instruction, flight)
            instruction = None  # an error from here on belongs to no action
            # Sent tensors have to stay alive and unchanged until they are gone.
            if self.channels is not None:
                with record_function(WAIT):
                    self.channels.flush()
        except Exception as error:
            self._fail(error, instruction and instruction.action)
        finally:
            # An error inside of an I would otherwise leave all linear layers deferring.
            self.deferred.active = False

    def _perform(self, instruction: RankAction, flight: _Flight) -> None:
        action = instruction.action
        stage, key, placement = action.stage, (action.stage, action.microbatch), self.schedule.placement
        match action.kind:
            case "F" | "B" | "I" | "OVERLAP_F_B":
                for part in action.computed:
                    flight.wait_for_input(part)
                passes = [partial(self._pass, part, flight, instruction.reduces) for part in action.computed]
                with flight.timed(action):
                    if action.parts:
                        run_in_turns(*passes, self.sharding.change_pass, self._thread)
                    else:
                        passes[0]()
            case "W":
                with flight.timed(action):
                    flight.weights.pop(key)()
                    self.sharding.accumulate(stage)
            case "SEND_F":
                # `pop` drops the runtime's reference. The channel keeps the tensor until it has been sent.
                self.channels.send(flight.outputs.pop(key), placement[stage + 1])
            case "SEND_B":
                self.channels.send(flight.input_gradients.pop(key), placement[stage - 1])
            case "RECV_F":
                # Only posts the receive. The forward pass that reads the tensor waits for it.
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

    def _pass(self, action: Action, flight: _Flight, reduces: bool) -> None:
        if action.kind == "F":
            self._forward(action, flight)
        else:
            self._backward(action, flight, reduces)

    def _forward(self, action: Action, flight: _Flight) -> None:
        stage, number, last = action.stage, action.microbatch, action.stage == self.schedule.stages - 1
        batch, hidden = flight.batches[number], None
        if stage > 0:
            hidden = flight.inputs.pop((stage, number))
            # The input is a leaf: each stage has an autograd graph of its own, and `hidden.grad` is what the stage
            # before gets.
            hidden.requires_grad_(flight.training)
        output = self.stages[stage](batch.tokens, batch.targets if last else None, batch.documents, hidden)
        output, report = split_report(output)
        if last:
            output, entropy = output
            flight.entropies[number] = entropy.detach()
        elif self.schedule.placement[stage + 1] == self.rank:
            # Both stages are on this rank (V-shaped schedules). They share the tensor without a transfer, but not a
            # graph: the schedule may put their backward passes far apart.
            flight.inputs[stage + 1, number] = output.detach()
        else:
            flight.outputs[stage, number] = output.detach()
        if flight.training:
            # A gradient edge names the node of the graph where backward starts. Keeping it instead of the output lets
            # the output's memory go as soon as it has been sent.
            flight.graphs[stage, number] = hidden, get_gradient_edge(output) if output.requires_grad else None
            if last:
                # The derivative of (scale x objective) by the objective. On other stages this gradient is received.
                flight.output_gradients[stage, number] = flight.scale.to(output.dtype)
            if report is not None:
                flight.take((stage, number), report)

    def _backward(self, action: Action, flight: _Flight, reduces: bool) -> None:
        stage, key = action.stage, (action.stage, action.microbatch)
        gradient = flight.output_gradients.pop(key)
        hidden, output = flight.graphs.pop(key)
        if reduces:
            # This sets FSDP's switches before autograd runs its hooks.
            self.sharding.begin_reducing_backward(stage)
        self.deferred.active = action.kind == "I"
        ends = flight.objectives.pop(key, ())
        if output is not None:  # None on a first stage that has nothing to train
            ends = ((output, gradient), *ends)
        if ends:
            # One call for all ends: the graph is walked, and parameters are reduced, once.
            torch.autograd.backward(*zip(*ends))
        self.deferred.active = False
        if action.kind == "I":
            # I has computed only the input's gradient. The closure is what the W of this micro-batch runs.
            flight.weights[key] = self.deferred.take()
        if reduces:
            self.sharding.end_reducing_backward(stage)
        if hidden is None:
            return
        # The stage before waits for a message, also where no gradient has reached the input.
        gradient = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
        if self.schedule.placement[stage - 1] == self.rank:
            flight.output_gradients[stage - 1, action.microbatch] = gradient
        else:
            flight.input_gradients[key] = gradient

    def _fail(self, error: Exception, action: Action | None) -> NoReturn:
        """Raises what is to be known about an error on this or another rank, after reporting it to the others.

        Only the rank where an action failed knows the cause. Closing its channels breaks the transfers of the others,
        which then look for the cause in the store.
        """
        if self.channels is None:
            raise error
        channels, rank = self.channels, self.channels.ranks[self.rank]
        where = "the end of the step" if action is None else f"{action} ({_describe(action)})"
        # An error of this rank's own needs no waiting. A broken transfer or collective is the effect of a failure
        # elsewhere, whose cause may still be on its way to the store.
        cause = channels.failures.find_first(
            PATIENCE if isinstance(error, TransferError) else 5 * PATIENCE if _is_broken_collective(error) else 0.0
        )
        if cause is None and isinstance(error, TransferError):
            cause = channels.failures.report(
                f"rank {error.peer} was lost: it ended, or its connection broke, without a word of why; rank {rank} "
                f"noticed at {where}, {error}"
            )
        failure = f"rank {rank} failed in {where}: {type(error).__name__}: {error}"
        cause = cause or channels.failures.report(failure)
        channels.close(abort=True)
        # If rank 0's process hosts the store and ended now, the other ranks could no longer read the cause.
        channels.failures.keep_for_others(5 * PATIENCE)
        # The store keeps the first report. If it is this rank's, this is where the failure began.
        if cause == failure:
            raise error if isinstance(error, ConfigError) else PipelineError(failure) from error
        raise PeerError(f"{cause} [seen by rank {rank} at {where}]") from error


@dataclass
class _Flight:
    """The micro-batches of one run of a program and what this rank holds of them at the moment. Keys are (stage,
    micro-batch)."""

    batches: list[MicroBatch]
    scale: Tensor | None = None
    times: StepTimes | None = None
    probe: LayerProbe | None = None
    inputs: dict[tuple[int, int], Tensor | PendingTensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Hidden states to be sent to the next stage."""
    output_gradients: dict[tuple[int, int], Tensor | PendingTensor] = field(default_factory=dict)
    input_gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Gradients to be sent to the stage before."""
    graphs: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = field(default_factory=dict)
    """Kept from forward to backward: the input, and where backward starts in the graph."""
    weights: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    """Kept from I to W: the closures that compute the weight gradients."""
    objectives: dict[tuple[int, int], tuple[tuple[GradientEdge, Tensor]]] = field(default_factory=dict)
    """Kept from forward to backward: graph edge and gradient of what a stage adds to the loss (auxiliary losses)."""
    statistics: dict[str, Tensor] = field(default_factory=dict)
    entropies: dict[int, Tensor] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        return self.scale is not None

    def take(self, key: tuple[int, int], report: BlockReport) -> None:
        """Takes what a stage reports of a micro-batch."""
        objective = report.objective
        if objective is not None and objective.requires_grad:
            self.objectives[key] = ((get_gradient_edge(objective), self.scale.to(objective.dtype)),)
        for name, values in report.statistics.items():
            self.statistics[name] = self.statistics.get(name, 0.0) + values.double()

    def wait_for_input(self, action: Action) -> None:
        """Waits until what a pass reads from another rank has arrived."""
        waiting = self.inputs if action.kind == "F" else self.output_gradients
        key = action.stage, action.microbatch
        if isinstance(pending := waiting.get(key), PendingTensor):
            with record_function(WAIT):
                waiting[key] = pending.wait()

    def timed(self, action: Action) -> AbstractContextManager[Any]:
        if self.times is None:
            return nullcontext()
        return self.times.timed(action) if self.probe is None else self.probe.timed(action, self.times)

    def losses(self, device: torch.device) -> Tensor:
        if not self.entropies:
            shape = len(self.batches), len(self.batches[0].targets)
            return torch.zeros(shape, dtype=torch.float64, device=device)
        return torch.stack([self.entropies[number] for number in range(len(self.batches))]).double()


def _is_broken_collective(error: Exception) -> bool:
    """Whether a collective failed, most often because a rank of its group has died."""
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
    if action.parts:
        return " beside ".join(map(_describe, action.parts))
    return f"{kinds[action.kind]}, stage {action.stage}{of}"
