"""The training run, from a configuration to a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainer.checkpointing.checkpointer import Checkpointer, load
from trainer.checkpointing.manifest import read_manifest, step_folder
from trainer.checkpointing.resume import check_manifest, data_identity, find_start
from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec
from trainer.config.typed import to_yaml
from trainer.data.batches import Loader, eval_batches
from trainer.data.corpus import Corpus, open_corpus
from trainer.data.tokens import DataError
from trainer.distributed.channels import PeerError
from trainer.distributed.world import World, join, local_device
from trainer.model.initial import Weights, name_seed
from trainer.observe import flight, metrics
from trainer.observe.deferred import DeferredScalars
from trainer.observe.report import peak_memory_gib, print_start, step_meter
from trainer.observe.sinks import Logger, reason_of, write_status
from trainer.observe.stragglers import Stragglers, slowest
from trainer.observe.watchdog import DATA, ENDING, EVALUATING, SAVING, SCHEDULE, STEP, Watchdog
from trainer.parallel.compress.trial import Trial
from trainer.parallel.engine import check_engine
from trainer.parallel.parallelize import check_compiler, check_model
from trainer.parallel.pipeline.timing import StepTimes
from trainer.planning.batch import BatchPlan, resolve_batch
from trainer.planning.cost.memory import fullest_rank
from trainer.planning.gradient_comm import check_grad_comm
from trainer.planning.pipeline import Pipeline, resolve_pipeline
from trainer.planning.plan import Plan, node_size, resolve_plan
from trainer.planning.schedules.search import Choice
from trainer.planning.schedules.simulate import Simulation
from trainer.training.auto_schedule import CHOSEN, Auto, save_choice, saved_choice, write_schedule
from trainer.training.out_of_memory import advice, missing_memory
from trainer.training.session import (
    claimed,
    compare_ranks,
    host_threads,
    launchers,
    numeric_mode,
    warn_of_stale_store,
    watching,
)
from trainer.training.state import TrainState
from trainer.training.step import evaluate, train_step
from trainer.util.exit_codes import DONE, FAILED, STOPPED

DROPPED = "what quantisation had left out of the gradients belongs to the checkpoint's plan, and is dropped"


class NonFinite(RuntimeError):
    """Training cannot go on: too many steps in a row had a non-finite loss or gradient."""


@dataclass
class Result:
    """What a run leaves: its folder, and how it ended (exit code of the command line)."""

    folder: Path
    code: int

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl, oldest first."""
        return metrics.read(self.folder)


def run(config: Config) -> Result:
    """Trains as configured, resuming where the run folder has a checkpoint. Raises `ConfigError` before any step."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    spec, weights = starting_point(config)
    plan = resolve_plan(config.parallel, world_size, spec, node_size(world_size))
    if problems := check_grad_comm(config.parallel.grad_comm, config.precision.types, plan, node_size(world_size)):
        raise ConfigError(problems)
    batch = resolve_batch(config.batch, plan.dp, plan.tp, plan.pp)
    pipeline, batch = saved_choice(Path(config.run.dir), config, spec, plan, batch) or (
        resolve_pipeline(config, spec, plan, batch),
        batch,
    )
    device = local_device(config.run)
    check_compiler(config, device)
    check_engine(config, device)
    check_model(config, spec)
    corpus = open_corpus(config)
    joined_before, folder = dist.is_initialized(), Path(config.run.dir)
    warn_of_stale_store()
    if config.guard.stall_factor:
        flight.enable(folder / "flight")
    world = join(plan.mesh, device, max(1200.0, 2 * config.guard.stall_allowance))
    with numeric_mode(config), host_threads(plan, device), claimed(folder, world), watching(config, world) as watchdog:
        try:
            training = Training(config, spec, weights, plan, pipeline, batch, corpus, world, watchdog)
        except Exception as error:
            if world.rank == 0 and missing_memory(error):  # before there was a log: a model too big for its plan
                write_status(folder, "failed", 0, config.run.steps, reason_of(error))
            raise
        code = training.train()
    if not joined_before:  # not after a failure: other ranks may still wait in a collective
        dist.destroy_process_group()
    return Result(folder, code)


def main(config: Config) -> int:
    """The command line's run: returns the exit code."""
    try:
        return run(config).code
    except (NonFinite, DataError, PeerError) as error:
        print(f"training stopped: {error}", file=sys.stderr, flush=True)
        return FAILED
    except Exception as error:
        if (missing := missing_memory(error)) is None:
            raise
        get_error_handler().record_exception(error)  # for torchrun's report, which names the first rank that failed
        print(
            f"out of memory on rank {os.environ.get('RANK', 0)}: {missing}. To need less, set {advice(config)}",
            file=sys.stderr,
            flush=True,
        )
        return FAILED


def starting_point(config: Config) -> tuple[ModelSpec, Weights | None]:
    """The spec that the run trains and, from a transformers folder if one is named, its weights; nothing big is read
    yet."""
    if not config.model.from_hf:
        return ModelSpec.from_dict({f.name: getattr(config.model, f.name) for f in dataclasses.fields(ModelSpec)}), None
    from trainer.hf import HFWeights, spec_from_hf

    spec = spec_from_hf(config.model.from_hf)
    if spec.learned_positions and config.batch.sequence_length > spec.max_length:
        raise ConfigError(
            f"batch.sequence_length={config.batch.sequence_length} exceeds the {spec.max_length} learned positions of "
            f"model.from_hf={config.model.from_hf}"
        )
    return spec, HFWeights(config.model.from_hf, spec)


class Training:
    """A run in progress: the state, the position in the data, and everything that is told about each step."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        weights: Weights | None,
        plan: Plan,
        pipeline: Pipeline,
        batch: BatchPlan,
        corpus: Corpus,
        world: World,
        watchdog: Watchdog,
    ):
        self.config, self.spec, self.batch, self.corpus, self.world, self.watchdog = (
            config,
            spec,
            batch,
            corpus,
            world,
            watchdog,
        )
        self.folder = Path(config.run.dir)
        self.tokens, self.skipped, self.skipped_in_row = 0, 0, 0
        self.stop_wanted, self.stop = False, False
        compare_ranks(config, spec, corpus.fingerprint, pipeline, world)
        self.data = data_identity(corpus.fingerprint, config.run.seed, batch)
        self.launchers = launchers(world)
        resume, warnings = world.agree(
            lambda: find_start(config.checkpoint, self.folder / "checkpoints", self.launchers)
        )
        manifest = (
            world.agree(lambda: check_manifest(read_manifest(resume), config, spec, batch, self.data)) if resume else {}
        )

        self.state = TrainState.build(config, spec, plan, pipeline, world, weights)
        position = 0
        if resume:
            load(resume, self.state.tensors())
            self.state.after_load()
            self.state.step, self.tokens, self.skipped = manifest["step"], manifest["tokens"], manifest["skipped"]
            self.state.scaler.load_state_dict(manifest["scaler"])
            position = manifest["samples"] if config.checkpoint.data == "continue" else 0
            warnings = warnings + self.load_errors(resume, manifest)

        self.loader = self.load_from(position)
        # A schedule that was chosen earlier in this run has a name of its own; see `auto.saved_choice`.
        wanted = config.parallel.pipeline.schedule == "auto" and plan.pp > 1 and pipeline.schedule.name != CHOSEN
        self.auto = Auto(self.state, batch) if wanted else None
        self.trial = (
            None if wanted else self.codec_trial()
        )  # one measurement after the other: they would change each other's steps
        self.predicted: tuple[Simulation, int] | None = None  # and the step from which its measurement counts
        self.checkpointer = Checkpointer(self.folder / "checkpoints", config.checkpoint)
        self.deferred = DeferredScalars(world.device)
        self.losses: list[float] = []  # first and latest
        self.stragglers = Stragglers(config.guard)
        self.meter = step_meter(config, spec, world, self.batch.sequence_length)
        compression = self.state.compression
        states = fullest_rank(
            config,
            spec,
            plan,
            pipeline,
            batch,
            compression.once,
            max(world.gather(compression.feedback_bytes)),
        )
        if world.rank == 0:
            if config.logging.console != "none":
                print_start(config, spec, plan, pipeline, batch, states, corpus, world)
            corpus.tokenizer.save(self.folder / "tokenizer")
            (self.folder / "config.yaml").write_text(to_yaml(config))
        self.log = Logger(
            self.folder, config.logging, config.run, self.state.step, dataclasses.asdict(config), world.rank == 0
        )
        for text in [*warnings, *([f"resumed from {resume} at step {self.state.step}"] if resume else [])]:
            self.log.event(text)

    def load_errors(self, path: Path, manifest: dict[str, Any]) -> list[str]:
        """Goes on with what quantisation had left out and with what codec=auto had chosen, where settings and plan are
        those of the checkpoint; under others it is measured again. Returns what is to be said."""
        compression = self.state.compression
        if compression.resume(manifest.get("compression")):
            self.state.use_schedule(self.state.pipeline.schedule)
            load(path, compression.tensors())
            return []
        return [DROPPED] * any(name.startswith("compression.") for name in manifest["tensors"])

    def codec_trial(self) -> Trial | None:
        """The measurement for codec=auto, unless the run has made it before."""
        compression = self.state.compression
        return None if compression.decided else Trial(compression, self.state.step)

    def load_from(self, position: int) -> Loader:
        """The training data from sample `position` on."""
        config, world = self.config, self.world
        return Loader(
            self.corpus.train,
            self.batch,
            world.data.get_local_rank(),
            self.state.plan.dp,
            seed=config.run.seed,
            position=position,
            mask_documents=config.data.mask_documents,
            prefetch=config.data.prefetch,
            device=world.device,
        )

    def train(self) -> int:
        """The loop. Returns the exit code."""
        config, first, status, code, reason = self.config, self.state.step, "failed", FAILED, None
        try:
            with self.signals():
                gc.collect()
                gc.freeze()  # what exists now lives to the end: the collector need not look at it again
                while self.state.step < config.run.steps and not self.stop:
                    self.one_step()
                    self.read_back()
                    last = self.state.step == config.run.steps
                    if self.auto is not None and self.auto.ready() and not last and not self.stop:
                        self.reschedule()
                        self.trial = self.codec_trial()
                    elif self.trial is not None and self.trial.due(self.state.step):
                        self.try_codecs()
                    if config.eval.every and (self.state.step % config.eval.every == 0 or last) and not self.stop:
                        self.evaluate()
                    if (
                        config.checkpoint.every
                        and self.state.step % config.checkpoint.every == 0
                        and not last
                        and not self.stop
                    ):
                        self.save()
                    self.tell()
                self.read_back(everything=True)
                self.watchdog.enter(ENDING, self.state.step)
                if self.state.step > first and (self.stop or config.checkpoint.at_end) and not self.save_last():
                    print(
                        f"{self.folder}: the last checkpoint, of step {self.state.step}, could not be written",
                        file=sys.stderr,
                        flush=True,
                    )
                else:
                    code = DONE if self.state.step >= config.run.steps else STOPPED
                    status = "stopped" if code == STOPPED else "done"
                    self.log.event(self.farewell(first, code))
                if self.state.step > first and self.state.plan.pp > 1:
                    self.draw_schedule()
            self.checkpointer.close()
            self.state.close()
        except BaseException as error:
            reason = reason_of(error)
            raise
        finally:
            gc.unfreeze()
            self.loader.close()
            self.log.close(status, reason)
        return code

    def save_last(self) -> bool:
        """Saves what no save holds yet, and says whether the newest checkpoint is this step's."""
        self.checkpointer.wait()
        if self.checkpointer.saved_step != self.state.step:
            self.save(wait=True)
        self.tell()
        return self.checkpointer.saved_step == self.state.step

    def tell(self) -> None:
        """Prints what became of saves."""
        for text in self.checkpointer.poll():
            self.log.event(text)

    def farewell(self, first: int, code: int) -> str:
        """How the run ended, for people."""
        step, steps = self.state.step, self.config.run.steps
        if step == first:
            return (
                f"{self.folder} is done: step {step} of {steps}. Raise run.steps to train on, or set another run.name"
            )
        fell = f"loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}" if self.losses else "no step was logged"
        if code == STOPPED:
            return f"stopped by a signal after step {step} of {steps} ({fell}); the same command resumes {self.folder}"
        return f"done: {fell} in steps {first + 1} to {step}; everything is in {self.folder}"

    def one_step(self) -> None:
        """Fetches the batch, trains on it, and queues what is to be known of the step."""
        state = self.state
        self.deferred.begin()
        self.watchdog.enter(DATA, state.step + 1)
        batches = next(self.loader)
        self.watchdog.enter(STEP, state.step + 1)
        torch.manual_seed(name_seed(self.config.run.seed, f"step {state.step} rank {self.world.data.get_local_rank()}"))
        with self.trace():
            scalars = train_step(state, batches, self.stop_wanted)
        self.tokens += self.batch.tokens
        sent = state.compression.sent
        most = {"memory_gib": peak_memory_gib(self.world.device)} | {
            f"comm/bytes_{kind}": count for kind, count in sent.items()
        }
        values = torch.tensor([*most.values()], dtype=torch.float64, device=self.world.device)
        if self.world.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        self.deferred.push(
            state.step,
            scalars | dict(zip(most, values)),
            {
                "tokens": self.tokens,
                "epoch": self.loader.epoch,
                "data_seconds": self.loader.wait_seconds,
                "ids": [batch.ids for batch in batches],
                "times": state.runtime.times,
            },
        )

    def read_back(self, everything: bool = False) -> None:
        """Logs the steps whose numbers have arrived, and acts on them; every rank sees a step at the same point."""
        for step, numbers, host in self.deferred.pop_ready(block=everything):
            self.meter.finished(step, numbers["seconds"], host["data_seconds"], self.batch.tokens)
            if self.trial is not None:
                self.trial.measured(step, numbers["seconds"])
            bad = numbers["found_inf"] > 0
            self.losses = [*self.losses[:1], numbers["loss"]]
            self.skipped += bad
            # An fp16 overflow is the scaler's business until the scale has nowhere left to go.
            strike = bad and not (self.state.scaler.enabled and numbers["loss_scale"] > 1)
            self.skipped_in_row = self.skipped_in_row + 1 if strike else 0
            self.stop = self.stop or numbers["stop"] > 0
            if step % self.config.logging.every == 0 or step == self.config.run.steps or bad or self.stop:
                measured, makespan = self.measure_ranks(host["times"])
                sent = {
                    name: int(numbers[name]) for name in ("comm/bytes_inner", "comm/bytes_outer") if name in numbers
                }
                self.log.step(
                    {
                        "step": step,
                        "tokens": host["tokens"],
                        "epoch": host["epoch"],
                        "skipped": self.skipped,
                        **measured,
                        **sent,
                        **{name: numbers[name] for name in ("loss", "grad_norm", "lr", "loss_scale", "memory_gib")},
                        **self.meter.read(),
                    }
                )
                if self.predicted is not None and step >= self.predicted[1]:
                    expected, self.predicted = self.predicted[0], None
                    self.log.event(
                        f"pipeline: predicted {expected.makespan:.4g} s a step with a bubble of {expected.bubble:.1%}, "
                        f"measured {makespan:.4g} s and {measured['bubble']:.1%} in step {step}"
                    )
                if self.stragglers.add(measured["straggler"], measured["straggler_rank"]):
                    self.name_straggler(**measured)
            if bad:
                self.log.event(f"step {step}: no update, {self.describe_non_finite(numbers)}")
            if self.skipped_in_row >= self.config.guard.max_skipped:
                self.give_up(step, numbers, host["ids"])

    def measure_ranks(self, times: StepTimes) -> tuple[dict[str, Any], float | None]:
        """What the ranks' times in one step tell: `bubble`, the share of its computation time in which pipeline ranks
        had nothing to do, and the slowest rank; besides, the seconds from its start to its last action on any rank.
        None where it does not apply.

        Ranks are compared by their forward passes: in the backward passes that reduce gradients, they wait for each
        other."""
        measured: dict[str, Any] = {"bubble": None, "straggler": None, "straggler_rank": None}
        if self.world.size == 1:
            return measured, None
        mine = torch.tensor(
            [times.busy(), times.finish(), times.busy(("F",)), self.world.place("pp")], dtype=torch.float64
        )
        everyone = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(everyone, mine)  # on gloo: these are the host's numbers
        busy, finish, forward, stage = torch.stack(everyone).unbind(1)
        measured["straggler"], measured["straggler_rank"] = slowest(forward.tolist(), stage.tolist())
        if self.state.plan.pp > 1:
            measured["bubble"] = 1 - (busy.sum() / (self.world.size * finish.max())).item()
        return measured, finish.max().item()

    def name_straggler(self, straggler: float, straggler_rank: int, **_: Any) -> None:
        """Tells of a rank that stays slow, with its node. All ranks call it together."""
        node = [socket.gethostname()]
        dist.broadcast_object_list(node, src=straggler_rank)
        self.log.event(
            f"rank {straggler_rank} on {node[0]} has been slow for {self.config.guard.straggler_lines} logged steps, "
            "in this one "
            f"{straggler:.2f} times its peers' median; look at its clocks and temperature (nvidia-smi -q -d "
            "CLOCK,PERFORMANCE,TEMPERATURE), and at what else runs there"
        )

    def reschedule(self) -> None:
        """Ends the measurement for schedule=auto and goes on with what it found best."""
        self.watchdog.enter(SCHEDULE, self.state.step)
        self.read_back(everything=True)
        auto, self.auto, before = self.auto, None, self.state.pipeline
        try:
            choice = auto.choose()
        except ConfigError as error:
            self.log.event(f"schedule auto keeps {before.describe()}: {error}")
            return
        if self.world.rank == 0:
            save_choice(self.folder, choice, self.config, self.spec, self.state.plan)
        after = Pipeline(choice.schedule, choice.split)
        if (after.split, after.schedule.placement, choice.microbatches) == (
            before.split,
            before.schedule.placement,
            self.batch.accumulation,
        ):
            self.state.use_schedule(choice.schedule)
        elif not self.rebuild(after, choice):
            return
        self.predicted = choice.predicted, self.state.step + 2
        self.log.event(f"schedule auto chose {after.describe()} of {len(choice.table)} candidates")

    def try_codecs(self) -> None:
        """Goes on to the next candidate for codec=auto, or to the best."""
        self.read_back(everything=True)
        decided = self.trial.advance(self.state.step)
        self.state.use_schedule(self.state.pipeline.schedule)
        if decided is not None:
            self.trial = None
            self.log.event(decided)

    def rebuild(self, pipeline: Pipeline, choice: Choice) -> bool:
        """Cuts the model anew: through a checkpoint, the way any other plan would resume this run."""
        if not self.save_last():
            self.log.event(
                "schedule auto keeps the present stages: the checkpoint to cut them anew from could not be written"
            )
            return False
        old, position = self.state, self.loader.position
        if old.compression.feedback_bytes:
            self.log.event(DROPPED)
        self.loader.close()
        self.batch = dataclasses.replace(self.batch, micro_size=choice.micro_size, accumulation=choice.microbatches)
        gc.unfreeze()
        old.free()
        self.state = TrainState.build(self.config, self.spec, old.plan, pipeline, self.world)
        saved = step_folder(self.folder / "checkpoints", old.step)
        load(saved, self.state.tensors())
        if (
            not self.config.checkpoint.every and not self.config.checkpoint.at_end
        ):  # a run that is to leave no checkpoint
            dist.barrier()
            self.checkpointer.forget(saved)
        self.state.after_load()
        self.state.step = old.step
        self.state.scaler.load_state_dict(old.scaler.state_dict())
        self.loader = self.load_from(position)
        gc.freeze()
        return True

    def draw_schedule(self) -> None:
        """Leaves the schedule of the run, as planned and as the last step ran, in its folder."""
        everyone = self.world.gather(self.state.runtime.timeline)
        if self.world.rank == 0:
            write_schedule(self.folder, self.state, self.batch, [everyone[rank] for rank in self.world.pipeline])

    def evaluate(self) -> None:
        """Mean loss on the held-out sequences, the same ones every time and under every plan."""
        self.read_back(everything=True)
        self.watchdog.enter(EVALUATING, self.state.step)
        batches = eval_batches(
            self.corpus.eval,
            self.config.eval.sequences,
            self.batch.micro_size,
            self.world.data.get_local_rank(),
            self.state.plan.dp,
            mask_documents=self.config.data.mask_documents,
            device=self.world.device,
        )
        loss = evaluate(self.state, batches).item()
        self.log.evaluation({"step": self.state.step, "tokens": self.tokens, "eval_loss": loss})

    def save(self, wait: bool = False) -> None:
        """Hands the state to the checkpointer, which writes while training goes on."""
        self.read_back(everything=True)
        self.watchdog.enter(SAVING, self.state.step)
        plan = self.state.plan.to_dict()
        compression = self.state.compression
        self.checkpointer.save(
            self.state.step,
            self.state.tensors() | (compression.tensors() if compression.decided else {}),
            {
                "compression": compression.identity() if compression.decided else None,
                "spec": self.spec.to_dict(),
                "plan": plan,
                "batch": dataclasses.asdict(self.batch),
                "launchers": self.launchers,
                "tokens": self.tokens,
                "samples": self.loader.position,
                "skipped": self.skipped,
                "scaler": self.state.scaler.state_dict(),
                "data": self.data,
            },
            wait=wait,
        )

    def describe_non_finite(self, numbers: dict[str, Any]) -> str:
        """What was not finite in a step: the loss, or the gradients of which parameters."""
        bad = [name for name, square in zip(self.state.names, numbers["squares"]) if not np.isfinite(square)]
        what = [f"loss {numbers['loss']}"] if not np.isfinite(numbers["loss"]) else []
        what += (
            [f"non-finite gradients in {len(bad)} parameters: {', '.join(bad[:5])}{', ...' if len(bad) > 5 else ''}"]
            if bad
            else []
        )
        return "; ".join(what) + (f" (loss scale {numbers['loss_scale']:g})" if self.state.scaler.enabled else "")

    def give_up(self, step: int, numbers: dict[str, Any], ids: list[list]) -> None:
        """Ends the run with what was seen; every rank gets here at the same step."""
        mine = [sample for samples, loss in zip(ids, numbers["losses"]) if not np.isfinite(loss) for sample in samples]
        everyone = self.world.gather(mine)
        samples = list(
            dict.fromkeys(str(sample) for some in everyone for sample in some)
        )  # tensor-parallel ranks share them
        raise NonFinite(
            f"{self.skipped_in_row} steps in a row without an update "
            f"(guard.max_skipped={self.config.guard.max_skipped}), "
            f"the last at step {step}: {self.describe_non_finite(numbers)}; samples with a non-finite loss: "
            f"{', '.join(samples[:20]) or 'none'}. Look at these samples, lower lr.peak, or raise guard.max_skipped"
        )

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and SIGUSR1 (a scheduler's warning) end the run after the current step, with a checkpoint."""
        if threading.current_thread() is not threading.main_thread():  # a notebook's worker: signals are not ours
            yield
            return

        def wish(*_: Any) -> None:
            self.stop_wanted = True

        before = {number: signal.signal(number, wish) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def trace(self) -> Iterator[None]:
        """Profiles the steps that logging.trace names, on rank 0, into a file for chrome://tracing or Perfetto."""
        if self.world.rank != 0 or self.state.step + 1 not in self.config.logging.trace:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self.world.device.type == "cuda" else []
        with torch.profiler.profile(activities=activities) as profiler:
            yield
            if self.world.device.type == "cuda":
                torch.cuda.synchronize()
        path = self.folder / "traces" / f"step-{self.state.step:08d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
