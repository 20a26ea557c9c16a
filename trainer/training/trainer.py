"""The training loop, and its steps as one CUDA graph."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.manifest import step_folder
from trainer.checkpointing.memory import MemoryCheckpointer
from trainer.checkpointing.remote import CheckpointUploader
from trainer.config import Config, ConfigError
from trainer.data.batches import BatchLoader, MicroBatch, eval_batches
from trainer.data.corpus import Corpus, CorpusSide
from trainer.data.tokens import Points, merge_points
from trainer.distributed.mesh import World
from trainer.distributed.tensors import Fragment
from trainer.model.initial import Weights, name_seed
from trainer.model.stage import capture_graph
from trainer.observe.deferred import Ready
from trainer.observe.report import start_report
from trainer.observe.sinks import reason_of
from trainer.observe.slowdown import PauseTimes
from trainer.observe.watchdog import DATA, ENDING, EVALUATING, SAVING, SCHEDULE, STEP, Watchdog
from trainer.planning.decide import persistent_bytes
from trainer.planning.plan import node_size
from trainer.planning.resolve import Layout
from trainer.training import history
from trainer.training.auto import Adaptation, write_schedule
from trainer.training.hooks import Hooks
from trainer.training.metrics_tracker import MetricsTracker, NonFiniteError
from trainer.training.profiling import StepProfiler
from trainer.training.replicas import ReplicaComparison, StepRepeats, TakenStep
from trainer.training.saving import RunProgress, RunStart, describe_checkpoint, find_non_finite, read_identity
from trainer.training.session import RunClock, StopRequest, memory_of
from trainer.training.state import TrainState
from trainer.training.step import ControlFlag, evaluate, flag_vector, train_step
from trainer.util import tables
from trainer.util.exit_codes import DONE, FAILED, STOPPED
from trainer.util.reading import explain_errors

# Training steps as one CUDA graph: a small model's kernels are shorter than the host takes to start them.
# `train_step` reads nothing back and keeps its state in place, so that a process can record it as it is, with its
# collectives over NCCL. What it allocates lies in memory of the graph's own.


WARM = 2
"""Steps that run as they come: they compile, measure kernels, and leave tables on the device."""


class CUDAGraphStep:
    """`train_step` of a state: the first `WARM` steps as they come, the next is recorded, and replayed like all that
    follow. All ranks call it together. Raises `ConfigError` on all of them where one cannot record its step."""

    def __init__(self, state: TrainState):
        self.state = state
        self.before = WARM
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batches: list[MicroBatch] = []
        self.requested = flag_vector(0, state.world.device)
        self.scalars: dict[str, Tensor] = {}

    def __call__(self, batches: list[MicroBatch], asked: int) -> dict[str, Tensor]:
        if self.before:
            self.before -= 1
            return train_step(self.state, batches, asked)
        if self.graph is None:
            self.record(batches)
        else:
            for mine, batch in zip(self.batches, batches, strict=True):
                mine.copy_(batch)
            self.state.step += 1
        self.requested.copy_(flag_vector(asked, self.requested.device))
        self.graph.replay()
        return {name: value.clone() for name, value in self.scalars.items()}  # the next replay overwrites its own

    def record(self, batches: list[MicroBatch]) -> None:
        device = self.state.world.device
        self.batches = [batch.clone() for batch in batches]
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()  # what steps took so far, the graph will take
        self.graph, self.scalars = self.state.world.together(self.capture)

    def capture(self) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
        step = partial(train_step, self.state, self.batches, self.requested)
        try:
            return capture_graph(step, torch.cuda.Stream(self.state.world.device))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"run.cuda_graphs=true: a step of this run cannot be recorded ({str(error).splitlines()[0]}); set "
                "run.cuda_graphs=false"
            ) from error

    def close(self) -> None:
        """Frees the graph. NCCL closes a communicator only when no graph uses it any more."""
        if self.graph is not None:
            self.graph.reset()


def check_recording(config: Config, device: torch.device) -> None:
    """Raises `ConfigError` where the device has no CUDA graphs."""
    if config.run.cuda_graphs and device.type != "cuda":
        raise ConfigError(
            "run.cuda_graphs=true: this process runs on the CPU, which has none; set run.cuda_graphs=false"
        )


# The training loop.


T = TypeVar("T")


class Trainer:
    """A run in progress: what is trained (`state`), on which data (`loader`), and the training loop. All ranks call its
    methods together.

    opening: the report that rank 0 prints at the start. tokens: number of tokens trained on so far. stop: whether this
    process was requested to end the run; the next step tells all ranks.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        weights: Weights | None,
        corpus: Corpus,
        world: World,
        watchdog: Watchdog,
        start: RunStart,
        clock: RunClock,
        stop: StopRequest,
    ):
        self.config, self.corpus, self.world, self.watchdog = config, corpus, world, watchdog
        self.batch, self.folder, self.stop, self.start = layout.batch, Path(config.run.dir), stop, start
        self.clock, self.hooks = clock, Hooks(config, world)
        if world.rank == 0:
            states, memory = persistent_bytes(config, layout, node_size(world.size)), memory_of(world.device)
            self.opening = start_report(config, layout, states, memory, corpus, world, self.start)
            if config.logging.console != "none":
                self.opening.print()
        self.state = TrainState.build(config, layout.spec, layout.plan, layout.pipeline, world, weights)
        progress, messages = self.start.resume(self.state)
        self.tokens, self.loader = progress.tokens, self.load_from(progress.samples, progress.points)
        # The checkpointer comes before `open_folder`: it removes leftovers of killed saves before checkpoints of an
        # earlier run are set aside. See `remove_leftovers`.
        saved = self.folder / "checkpoints", config.checkpoint
        self.uploader = self.open_on_all_ranks(lambda: CheckpointUploader(*saved)) if config.checkpoint.upload else None
        self.checkpointer = self.open_on_all_ranks(lambda: Checkpointer(*saved, self.uploader))
        messages = [*corpus.notes, *messages, *self.open_folder()]
        if self.uploader is not None:
            self.uploader.begin_run(start.step if start.is_own(self.folder) else -1)
        self.memory = self.open_memory()
        self.pauses, self.save_waits = PauseTimes(), False
        self.profiling = StepProfiler(config, world, self.state.step, self.pauses)
        known = progress.skipped, corpus, self.profiling.metrics, self.pauses
        self.ledger = self.open_on_all_ranks(lambda: MetricsTracker(self.state, self.batch, *known))
        self.adaptation = Adaptation(self.state, self.batch, self.ledger)
        self.replicas, self.repeats = ReplicaComparison(self.state, self.checkpointer), StepRepeats(self.state)
        for text in messages:
            self.ledger.log.event(text)
        self.recorded = CUDAGraphStep(self.state) if config.run.cuda_graphs else None
        self.hooks.load(progress.callbacks)
        self.hooks.run.begin(self.state, self.tokens, self.ledger.latest, self.ledger.log)

    def train(self) -> int:
        """Runs the training loop to the end of the run. Returns the exit code."""
        steps, first, status, code, reason = self.config.run.steps, self.state.step, "failed", FAILED, None
        try:
            gc.collect()
            gc.freeze()  # objects of the setup live to the end; without this each full collection would scan them
            self.hooks.call("start")
            if self.config.eval.at_start and self.state.step == 0:
                self.evaluate()
            while self.state.step < steps and not self.ledger.stop:
                # If this step is profiled, the slowest rank known so far is among the profiled ones.
                slow = self.ledger.latest.get("straggler_rank")
                with self.profiling.step(self.state.step + 1, self.state.runtime, slow):
                    # The host queues this step on the device first and reads the numbers of the previous one
                    # afterwards, so that the device is never idle while the host waits.
                    self.one_step()
                    self.read_back()
                    self.hooks.call("step")
                self.adapt()
                self.evaluate_if_due()
                self.sample_if_due()
                self.copy_to_memory_if_due()
                self.save_if_due()
                self.report_saves()
            # On a GPU the numbers of the last steps have not been read yet. They decide what is saved and with which
            # exit code the run ends.
            self.read_back(everything=True)
            self.watchdog.enter(ENDING, self.state.step)
            if self.ledger.finished or not self.ledger.stop:
                self.ledger.check_updates(first, self.state.step)
            if self.save_at_end():
                self.finish_uploads()
                self.hooks.call("end")
                code = DONE if self.state.step >= steps or self.ledger.finished else STOPPED
                status = "stopped" if code == STOPPED else "done"
                ended = f"run.hours={self.config.run.hours:g}" if self.clock.over else self.stop.asked_by or "a signal"
                reason = self.uploader.failure if self.uploader is not None else None
                summary = self.ledger.summary(first, self.state.step, code, ended)
                self.ledger.log.event(f"{summary}; not uploaded: {reason}" if reason else summary)
            if self.state.plan.pp > 1:
                try:
                    write_schedule(self.folder, self.state, self.batch)
                except OSError as error:  # on rank 0 alone; raising would leave the others waiting in `close`
                    self.ledger.log.event(f"the schedule was not written: {reason_of(error)}")
            # The order matters: background saves and a recorded step use process groups, so they end before the state
            # closes its communicators.
            self.checkpointer.close()
            if self.memory is not None:
                self.memory.close(remove=code != FAILED)
            if self.recorded is not None:
                self.recorded.close()
            self.state.close()
        except BaseException as error:
            reason = reason_of(error)
            self.watchdog.enter(ENDING, self.state.step)
            if isinstance(error, NonFiniteError):  # on all ranks; a save in the background is of an earlier step
                self.checkpointer.wait()
                self.report_saves()
            raise
        finally:
            gc.unfreeze()
            self.profiling.close()
            self.loader.close()
            self.ledger.close(status, reason)
            if self.config.logging.report and self.world.rank == 0:
                history.write_report(self.folder)
        return code

    def one_step(self) -> None:
        """Fetches the next batch and trains on it."""
        number = self.state.step + 1
        self.clock.next_pass()
        self.ledger.begin_step()
        self.watchdog.enter(DATA, number)
        with record_function(tables.DATA):
            batches = next(self.loader)
        # One rank's request is enough: the step sums the flags over ranks, so all ranks act on it after the same step.
        requested = self.hooks.run.take_asked() | (
            ControlFlag.STOP if self.stop.asked_by or self.time_is_up() else ControlFlag(0)
        )
        tokens = self.tokens + self.batch.tokens
        self.take_step(TakenStep(number, batches, requested, self.loader.position, tokens))

    def take_step(self, taken: TakenStep) -> None:
        """Trains on a batch, for the first time or again, and queues its numbers for reading back."""
        state, batches, number = self.state, taken.batches, taken.step
        self.watchdog.enter(STEP, number)
        self.repeats.note(taken)
        self.tokens, self.loader.position = taken.tokens, taken.position
        # Seeding by (seed, step, data rank) makes random numbers independent of earlier steps: no generator state is
        # saved, and a resumed or repeated step draws the same ones.
        torch.manual_seed(name_seed(self.config.run.seed, f"step {state.step} rank {self.world.data.get_local_rank()}"))
        # `scalars` stay on the device. Nothing here may call `.item()` on them.
        scalars = self.recorded(batches, taken.asked) if self.recorded else train_step(state, batches, taken.asked)
        self.hooks.run.advance(state, scalars, self.tokens)
        if self.ledger.due(number):
            scalars |= self.hooks.measure()
        if self.replicas.due(number):
            scalars |= self.replicas.compare(self.counters())
        self.ledger.add(state, scalars, batches, self.tokens, self.loader)

    def read_back(self, everything: bool = False) -> None:
        """Logs the steps whose numbers have arrived on the host. everything: waits for those of all steps."""
        # A step that was not finite is run again before it is logged. Its repetition may be suspicious in a later step,
        # hence the loop.
        while suspicious := self.repeats.suspicious(self.ledger.deferred.peek(everything)):
            self.run_again(suspicious)
        ready = self.ledger.deferred.peek(everything)
        self.ledger.read_back(everything)
        for step, numbers, _ in ready:
            self.replicas.judge(step, numbers, self.counters())

    def run_again(self, first: Ready) -> None:
        """Repeats a step that was not finite, from the state before it, and then the steps that were queued behind it.
        The gate on the device has kept all of them from changing the state. All ranks call it together.

        first: the numbers of the step's first execution.
        """
        suspect, *behind = self.repeats.rewind(first[0])
        # The queued numbers belong to discarded executions. The steps below produce new ones.
        self.ledger.deferred.discard()
        self.ledger.begin_step()
        overflow = self.ledger.note_overflow(first[1])
        with self.state.exact_dispatch(overflow > 0):
            self.take_step(suspect)
        [second] = self.ledger.deferred.peek(block=True)
        explanation, failed_again = self.repeats.settle(first, second, overflow)
        self.ledger.repeated += 1
        self.ledger.log.event(explanation)
        # A result that is not finite twice may come from replicas that have drifted apart.
        if failed_again:
            self.replicas.check(self.counters())
        for taken in behind:
            self.take_step(taken)

    def adapt(self) -> None:
        """Switches to another pipeline schedule as soon as `schedule=auto` has measured enough steps."""
        if self.adaptation.schedule_due() and self.state.step < self.config.run.steps and not self.ledger.stop:
            self.read_back(everything=True)
            # A new split of layers goes through a checkpoint, and a skipped step is not saved.
            if self.ledger.first_skipped is not None:
                return
            self.watchdog.enter(SCHEDULE, self.state.step)
            before = self.batch
            self.state, self.batch = self.adaptation.change_schedule(
                self.state, before, self.save_now, self.checkpointer
            )
            self.replicas = ReplicaComparison(self.state, self.checkpointer)
            self.repeats.watch(self.state)
            if self.batch != before:
                self.loader.close()
                position = self.loader.position
                self.loader = self.load_from(position, self.loader.points_at(position))

    def evaluate_if_due(self) -> None:
        """Evaluates every `eval.every` steps, after the last step, and where a callback requests it."""
        step, every = self.state.step, self.config.eval.every
        due = every and (step % every == 0 or step >= self.config.run.steps)
        if not (self.ledger.take(ControlFlag.EVALUATE) or due) or self.ledger.stop:
            return
        if not len(self.corpus.eval) and not self.corpus.sets:
            self.ledger.log.event("an evaluation was requested, but no documents are held out: set data.eval_fraction")
            return
        # This waits for the device. Otherwise the rest of the step would be counted as a part of the pause.
        self.read_back(everything=True)
        with self.pauses.spent("evaluation"):
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluates the mean loss on the held-out sequences, by source where there are several, and on every set of
        `eval.sets`. The sequences are the same each time and under every plan."""
        self.read_back(everything=True)
        self.watchdog.enter(EVALUATING, self.state.step)
        record: dict[str, float | None] = {"step": self.state.step, "tokens": self.tokens, "eval_loss": None}
        held_out, sources = self.corpus.eval, self.ledger.sources
        if len(held_out):
            record["eval_loss"], *losses = self.losses_on(held_out, sources)
            record |= {f"eval_loss/{name}": loss for name, loss in zip(sources, losses)}
        for name, samples in self.corpus.sets.items():
            (record[f"eval_loss/{name}"],) = self.losses_on(samples)
        self.ledger.evaluated(record)
        self.hooks.call("evaluation")

    def sample_if_due(self) -> None:
        """Lets the model continue the prompts every `eval.generate.every` steps and after the last."""
        step, settings = self.state.step, self.config.eval.generate
        due = settings.every and (step % settings.every == 0 or step >= self.config.run.steps)
        if not due or self.ledger.stop:
            return
        self.read_back(everything=True)
        self.watchdog.enter(EVALUATING, step)
        with self.pauses.spent("evaluation"), self.weights_to_evaluate():
            from trainer.training.saving import draw_samples

            samples = draw_samples(self.state, settings, self.corpus.tokenizer, self.start.generation["eos_token_id"])
        self.ledger.log.samples(step, samples)

    def weights_to_evaluate(self) -> AbstractContextManager[None]:
        """Context in which the model holds the weights to evaluate: the trained ones, or their average with
        `eval.ema`."""
        return self.state.averaged() if self.config.eval.ema else nullcontext()

    def losses_on(self, samples: CorpusSide, sources: Sequence[str] = ()) -> list[float]:
        """Mean loss per token on `samples`, which are not trained on, followed by the mean loss of each of
        `sources`."""
        batches = eval_batches(
            samples,
            self.config.eval.sequences,
            self.batch.micro_size,
            self.world.data.get_local_rank(),
            self.state.plan.dp,
            mask_documents=self.config.data.mask_documents,
            device=self.world.device,
        )
        with self.weights_to_evaluate():
            return evaluate(self.state, batches, sources).tolist()

    def save_if_due(self) -> None:
        """Saves every `checkpoint.every` steps and where a callback requests it. The last step is saved by
        `save_at_end`. After a skipped step the save waits for the next step that is not skipped."""
        step, every = self.state.step, self.config.checkpoint.every
        if step < self.config.run.steps and not self.ledger.stop:
            if self.ledger.take(ControlFlag.SAVE) or every and step % every == 0 or self.save_waits:
                self.read_back(everything=True)
                if self.ledger.first_skipped is not None:
                    if not self.save_waits:
                        self.ledger.log.event(f"step {step} was skipped: its save waits for a step that is not skipped")
                    self.save_waits = True
                    return
                with self.pauses.spent("checkpoint"):
                    self.save()

    def copy_to_memory_if_due(self) -> None:
        """Copies the state into host memory every `checkpoint.peer_every` steps, but not after a skipped step."""
        step, every = self.state.step, self.config.checkpoint.peer_every
        if self.memory is not None and step % every == 0 and step < self.config.run.steps and not self.ledger.stop:
            self.read_back(everything=True)
            if self.ledger.first_skipped is None:
                self.check_state()
                with self.pauses.spent("checkpoint"):
                    self.watchdog.enter(SAVING, step)
                    self.replicas.check(self.counters())
                    self.memory.save(step, *self.checkpoint_contents())

    def check_state(self) -> None:
        """Raises `NonFiniteError` on all ranks if the state holds values that are not finite. Such a state must not
        become a checkpoint, since no later step makes it finite again."""
        if bad := find_non_finite(self.state.tensors(), self.world):
            step, more = self.state.step, ", ..." if len(bad) > 3 else ""
            self.ledger.log.note_non_finite(self.ledger.first_skipped or step + 1)
            raise NonFiniteError(
                f"step {step} is not saved: {len(bad)} tensors of the state hold values that are not finite "
                f"({', '.join(bad[:3])}{more}). An update overflowed; lower lr.peak or set optimizer.clip_norm. Older "
                f"checkpoints stay: {history.way_on(self.config)}"
            )

    @property
    def failing(self) -> int:
        """The number of steps, up to the present one, that made no update and cannot be explained by fp16's loss scale.
        0 while the loss scale may still be the reason."""
        first = self.ledger.first_skipped
        return self.state.step + 1 - first if first is not None and self.ledger.skipped_in_row else 0

    def checkpoint_contents(self) -> tuple[dict[str, Tensor | Fragment], dict[str, Any]]:
        """The tensors of a checkpoint and its part of the manifest. Within failing steps this is the checkpoint of the
        step before them: failing steps leave the tensors unchanged, so only counters and loss scale have to be set
        back."""
        failing, scaler = self.failing, self.state.scaler.state_dict()
        if failing and scaler:
            scaler |= {"scale": self.ledger.scale_before, "_growth_tracker": 0}
        position = self.loader.position - failing * self.batch.global_size
        streams = self.corpus.train.endless
        progress = RunProgress(
            position,
            self.tokens - failing * self.batch.tokens,
            self.ledger.skipped - failing,
            self.hooks.states(),
            merge_points(self.world.gather(self.loader.points_at(position))) if streams else {},
        )
        return describe_checkpoint(self.state, self.batch, progress, self.start, scaler)

    def save(self, wait: bool = False) -> None:
        """Hands the state to the checkpointer, which copies it and writes while training goes on. wait: returns only
        when the checkpoint is complete. Within failing steps, the step before them is saved. Within skipped steps, no
        older checkpoint is removed. Raises `NonFiniteError` on all ranks if the state is not finite."""
        self.read_back(everything=True)
        self.watchdog.enter(SAVING, self.state.step)
        # Replicas are written by one rank each. If they had drifted apart, the checkpoint would mix their values.
        self.replicas.check(self.counters())
        self.check_state()
        self.save_waits, skipping = False, self.ledger.first_skipped is not None
        step = self.state.step - self.failing
        self.checkpointer.save(step, *self.checkpoint_contents(), wait=wait, keep_older=skipping)
        self.hooks.run.checkpoint = step_folder(self.checkpointer.folder, step)
        self.hooks.call("save")

    def counters(self) -> dict[str, int]:
        """The host's counters, on which all ranks have to agree."""
        return {"step": self.state.step, "samples": self.loader.position, "tokens": self.tokens}

    def save_now(self) -> bool:
        """Saves the present step, or the step before failing ones, and waits. Nothing is done if that step has been
        saved already or is the one that this start resumed from. Returns whether its checkpoint exists."""
        self.checkpointer.wait()
        self.read_back(everything=True)
        step = self.state.step - self.failing
        exists = self.checkpointer.saved_step == step or step == self.start.step and not self.start.in_memory
        if self.failing:
            self.ledger.log.event(
                f"the last {self.failing} steps made no update: "
                + (f"step {step} before them is what is saved" if step else "there is nothing to save")
            )
        if not exists:
            self.save(wait=True)
        self.report_saves()
        return exists or self.checkpointer.saved_step == step

    def save_at_end(self) -> bool:
        """Writes the last checkpoint where one is wanted or due. Returns False where that failed."""
        ledger, every = self.ledger, self.config.checkpoint.every
        wanted = self.config.checkpoint.at_end or ledger.stop and not ledger.finished or ledger.take(ControlFlag.SAVE)
        wanted = wanted or every and self.state.step % every == 0
        if not (wanted or self.save_waits) or self.save_now():
            return True
        text = f"{self.folder}: the last checkpoint, of step {self.state.step - self.failing}, could not be written"
        print(text, file=sys.stderr, flush=True)
        return False

    def finish_uploads(self) -> None:
        """Waits for the last upload. A failure is told, and changes nothing else: the checkpoint is on disk."""
        if self.uploader is not None:
            self.uploader.finish(lambda: self.watchdog.enter(ENDING, self.state.step))
            self.report_saves()

    def report_saves(self) -> None:
        """Logs the results of saves in the background."""
        for text in [*self.checkpointer.poll(), *(self.memory.poll() if self.memory is not None else [])]:
            self.ledger.log.event(text)

    def time_is_up(self) -> bool:
        """Whether `run.hours` end the run. Only rank 0's clock decides: clocks of several ranks could disagree. The
        request reaches the others with the next step."""
        return self.world.rank == 0 and self.clock.up(self.checkpointer.longest)

    def load_from(self, position: int, points: Points) -> BatchLoader:
        """A loader of the training data from sample number `position` on. points: where streams stand there."""
        return BatchLoader(
            self.corpus.train,
            self.batch,
            self.world.data.get_local_rank(),
            self.state.plan.dp,
            seed=self.config.run.seed,
            position=position,
            mask_documents=self.config.data.mask_documents,
            prefetch=self.config.data.prefetch,
            device=self.world.device,
            mixture=self.start.mixture,
            points=points,
        )

    def open_memory(self) -> MemoryCheckpointer | None:
        """The checkpointer that copies the state into host memory, if `checkpoint.peer_every` is set, else None.
        Removes in-memory checkpoints of earlier starts of this run, except the one that this start resumes from."""
        nodes, settings = self.start.nodes, self.config.checkpoint
        nodes.remove_checkpoints(self.start.path if self.start.in_memory else None)
        if not settings.peer_every:
            return None
        identity = self.world.agree(lambda: read_identity(self.folder))
        memory = MemoryCheckpointer(nodes, settings, identity)
        memory.check_memory(self.state.tensors(), self.world)
        return memory

    def open_folder(self) -> list[str]:
        """Prepares the run folder for this start: sets an earlier run aside and records the settings and the ranks of
        this one. Returns messages for the log."""
        places, start = self.world.gather(history.describe_place(self.world)), self.start
        # Only after the `gather`, when all ranks are built: until then a signal ends its process at once, and the
        # others fail with it. From here on it is deferred to a step.
        self.stop.defer(self.folder, lambda: self.state.step, self.config.run.steps)
        known = self.config, start.step, start.path, places
        return self.world.agree(  # `opening` is known to rank 0 alone
            lambda: history.begin_start(*known, self.opening, self.corpus.tokenizer, start.in_memory)
        )

    def open_on_all_ranks(self, open_resource: Callable[[], T]) -> T:
        """Opens on every rank something that writes to the run folder. If that fails on one rank, it is refused on
        every rank, so that none waits for another."""

        def open_with_context() -> T:
            with history.report_errors(self.config, self.start.step), explain_errors(self.folder):
                return open_resource()

        return self.world.together(open_with_context)
