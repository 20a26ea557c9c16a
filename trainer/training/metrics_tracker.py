"""What is known of each step: its numbers, read back from the device when they have arrived, compared over ranks,
logged, and judged."""

from __future__ import annotations

import dataclasses
import math
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.batches import BatchLoader, MicroBatch, source_of
from trainer.data.corpus import Corpus
from trainer.diagnosis.time_breakdown import peer_ratios
from trainer.distributed.overlap import copy_to_device
from trainer.observe.deferred import DeferredScalars
from trainer.observe.hardware import HardwareSampler, Reading, over_ranks
from trainer.observe.report import peak_memory_gib, step_meter
from trainer.observe.sinks import Logger
from trainer.observe.slowdown import PauseTimes, SlowdownAlert
from trainer.parallel.pipeline.timing import StepTimes
from trainer.planning.plan import BatchPlan
from trainer.planning.schedules.simulate import Simulation
from trainer.training.history import way_on
from trainer.training.state import TrainState
from trainer.training.step import ControlFlag
from trainer.util.exit_codes import STOPPED

BYTES = ("comm/bytes_inner", "comm/bytes_outer")


class NonFiniteError(RuntimeError):
    """Training cannot go on: too many steps in a row had a non-finite loss or gradient, or the state is not finite. Or
    it has ended without any update of the weights."""


class MetricsTracker:
    """The record of a run's steps. All ranks keep it together, and see a step at the same point.

    corpus: what is trained on; the losses of its sources are told apart where they are several. profiled: metrics of
    the newest step that was profiled. pauses: of training between steps. losses: the first and the latest; skipped:
    steps of the run without an update, skipped_before: those of earlier starts; why_skipped: the reason for the newest
    of them; moved: whether a step of this start has updated the weights, with a learning rate above 0; repeated: steps
    of this start that were run again; stop: whether a rank asks to end the run, and finished: as done; latest: the
    newest known number of each name; log: where the steps go, and notices.
    """

    def __init__(
        self,
        state: TrainState,
        batch: BatchPlan,
        skipped: int,
        corpus: Corpus,
        profiled: Mapping[str, float],
        pauses: PauseTimes,
    ):
        config, world = state.config, state.world
        self.config, self.world, self.names, self.tokens_a_step = config, world, state.names, batch.tokens
        names, self.damaged = corpus.train.names, corpus.damaged
        self.sources = names if len(names) > 1 else []
        self.reports, self.profiled = state.reports, profiled
        self.mixtures = [name.removesuffix(".load") for name in self.reports if name.endswith(".load")]
        self.scaled, self.pipelined = state.scaler.enabled, state.plan.pp > 1
        self.deferred = DeferredScalars(world.device)
        self.meter = step_meter(config, state.spec, world, batch.sequence_length)
        self.slowdown = SlowdownAlert(config.guard, config.run.dir, world.gather(socket.gethostname()))
        self.pauses, self.logged = pauses, state.step
        self.losses: list[float] = []
        self.skipped, self.skipped_in_row, self.stop, self.finished = skipped, 0, False, False
        self.skipped_before, self.why_skipped, self.moved = skipped, "", False
        self.first_skipped: int | None = None  # of the streak of skipped steps that the last step belongs to
        self.scale_before = 1.0  # the loss scale with which that streak began
        self.asked, self.latest, self.repeated = ControlFlag(0), dict[str, Any](), 0
        self.overflow = 0.0  # of the step that is being run again
        self.predicted: tuple[Simulation, int] | None = None  # and the step from which its measurement counts
        self.log = Logger(
            Path(config.run.dir), config.logging, config.run, state.step, dataclasses.asdict(config), world.rank == 0
        )
        first = int(os.environ.get("LOCAL_RANK", 0)) == 0
        self.hardware = HardwareSampler(world.device, Path(config.run.dir), config.logging.hardware, first)

    def close(self, status: str, reason: str | None) -> None:
        """Ends the record of a run that has ended in this way; see `Logger.close`."""
        self.hardware.close()
        self.log.close(status, reason)

    def begin_step(self) -> None:
        """Before a step's batch is fetched."""
        self.deferred.begin()

    def add(
        self, state: TrainState, scalars: dict[str, Tensor], batches: list[MicroBatch], tokens: int, loader: BatchLoader
    ) -> None:
        """Queues what is to be known of the step that `state` has just taken on `batches`; nothing is waited for.
        scalars: what `train_step` returned; tokens: trained on so far."""
        peaks = {"memory_gib": peak_memory_gib(self.world.device)} | {
            f"comm/bytes_{kind}": count for kind, count in state.compression.sent.items()
        }
        values = copy_to_device(torch.tensor([*peaks.values()], dtype=torch.float64), self.world.device)
        if (fullest := scalars.get("fullest_rank")) is not None:
            peaks["fullest_rank"], values = 0.0, torch.cat([values, fullest[None]])
        if self.world.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        self.deferred.push(
            state.step,
            scalars | dict(zip(peaks, values)),
            {
                "tokens": tokens,
                "epoch": loader.epoch,
                "epochs": loader.epochs if len(self.sources) > 1 else {},
                "data_seconds": loader.wait_seconds,
                "ids": [sample for batch in batches for sample in batch.ids],
                "times": state.runtime.times,
            },
        )

    def read_back(self, everything: bool = False) -> None:
        """Logs the steps whose numbers have arrived (`everything`: waits for all), and acts on them. Raises
        `NonFiniteError` on all ranks."""
        for step, numbers, host in self.deferred.pop_ready(block=everything):
            self.meter.finished(step, numbers["seconds"], host["data_seconds"], self.tokens_a_step)
            bad, empty = numbers["found_inf"] > 0, numbers["valid"] == 0
            self.skipped += bad
            self.moved |= bool(not bad and numbers["lr"] > 0)
            if bad:
                self.why_skipped = "no token of it is learned" if empty else self.describe_non_finite(numbers)
            if empty:  # not a fault, so it neither belongs to a streak of skipped steps nor ends one
                numbers["loss"] = math.nan
            else:
                self.losses = [*self.losses[:1], numbers["loss"]]
                if bad and self.first_skipped is None:
                    self.scale_before = numbers["loss_scale"]
                self.first_skipped = None if not bad else self.first_skipped or step
                # An fp16 overflow is the scaler's business until the scale has nowhere left to go.
                strike = bad and not (self.scaled and numbers["loss_scale"] > 1)
                self.skipped_in_row = self.skipped_in_row + 1 if strike else 0
            self.asked |= ControlFlag(sum(ask for ask, ranks in zip(ControlFlag, numbers["asked"]) if ranks))
            self.finished = ControlFlag.FINISH in self.asked
            self.stop = self.finished or ControlFlag.STOP in self.asked
            if self.due(step) or bad or self.stop:
                self.log_step(step, numbers, host)
            if bad:
                self.log.event(f"step {step}: no update, {self.why_skipped}")
            if self.skipped_in_row >= self.config.guard.max_skipped:
                self.give_up(step, numbers, host["ids"])

    def log_step(self, step: int, numbers: dict[str, Any], host: dict[str, Any]) -> None:
        """Writes a step's line of metrics, and says what it shows of predictions and of slow ranks."""
        pace, readings = self.meter.read(), self.hardware.take()
        stood = {
            f"{name}_seconds": seconds / (step - self.logged) for name, seconds in self.pauses.since("log").items()
        }
        self.logged = step
        sums = self.sum_by_source(numbers, host["ids"])
        measured, makespan, sums = self.compare_ranks(host["times"], pace["data_seconds"], readings, sums)
        record = {
            "step": step,
            "tokens": host["tokens"],
            "epoch": host["epoch"],
            **{f"epochs/{name}": value for name, value in host["epochs"].items()},
            "skipped": self.skipped,
            "repeated": self.repeated,
            "damaged": self.damaged,
            **{name: int(numbers[name]) for name in BYTES if name in numbers},
            **{name: numbers[name] for name in ("loss", "grad_norm", "lr", "loss_scale", "memory_gib")},
            "learned": numbers["valid"] / self.tokens_a_step,
            **losses_by_source(self.sources, sums),
            **{name: value for name, value in numbers.items() if name.startswith("user/")},
            **self.reported(numbers),
            **pace,
            **stood,
            **self.profiled,
            **measured,
        }
        self.latest.update(record)
        self.log.step(record)
        if self.predicted is not None and step >= self.predicted[1]:
            predicted, self.predicted = self.predicted[0], None
            self.log.event(
                f"pipeline: predicted {predicted.makespan:.4g} s a step with a bubble of {predicted.bubble:.1%}, "
                f"measured {makespan:.4g} s and {measured['bubble']:.1%} in step {step}"
            )
        for told in self.slowdown.add(record):
            self.log.event(told)

    def statistics_of(self, numbers: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """What layers have reported in a step, by name."""
        return dict(zip(self.reports, np.split(numbers["statistics"], np.cumsum([*self.reports.values()])[:-1])))

    def note_overflow(self, numbers: Mapping[str, Any]) -> float:
        """The share of the choices of experts for which ranks had no room in a step that will be run again."""
        statistics = self.statistics_of(numbers)
        missing, choices = (
            sum(statistics[f"{name}.{key}"].sum() for name in self.mixtures) for key in ("overflow", "load")
        )
        self.overflow = float(missing / choices) if missing else 0.0
        return self.overflow

    def reported(self, numbers: dict[str, Any]) -> dict[str, float]:
        """The mean over valid tokens of each registered term of the loss, and what the routers of experts report."""
        statistics = self.statistics_of(numbers)
        valid = max(numbers["valid"], 1)
        terms = {f"term/{name}": statistics[f"head.{name}"].item() / valid for name in self.config.loss.terms}
        loads = load_metrics(statistics, self.mixtures, valid)
        if "fullest_rank" in numbers:
            loads["fullest_rank"] = numbers["fullest_rank"]
        if self.config.parallel.ep_capacity:
            loads["overflow"], self.overflow = self.overflow, 0.0
        return terms | {f"experts/{name}": value for name, value in loads.items()}

    def evaluated(self, record: dict[str, Any]) -> None:
        """Writes an evaluation's line of metrics."""
        self.latest.update(record)
        self.log.evaluation(record)

    def due(self, step: int) -> bool:
        """Whether a step will be logged if nothing is wrong with it."""
        return step % self.config.logging.every == 0 or step == self.config.run.steps

    def take(self, ask: ControlFlag) -> bool:
        """Whether a rank has asked for something since the last call."""
        taken = ask in self.asked
        self.asked &= ~ask
        return taken

    def expect(self, predicted: Simulation, step: int) -> None:
        """Holds a predicted step against the first that is logged from `step` on."""
        self.predicted = predicted, step

    def sum_by_source(self, numbers: dict[str, Any], ids: list[str]) -> np.ndarray:
        """Of each source the summed loss and the number of targets in this rank's part of a step: [2, sources]."""
        found = np.array([source_of(sample) for sample in ids])
        whose = [found == name for name in self.sources]
        return np.array([[numbers[kind][mine].sum() for mine in whose] for kind in ("losses", "targets")])

    def compare_ranks(
        self, times: StepTimes, waited: float, readings: Reading, sums: np.ndarray
    ) -> tuple[dict[str, Any], float | None, np.ndarray]:
        """What the ranks' times in one step tell: `bubble`, the share of its computation time in which pipeline ranks
        had nothing to do, and the slowest rank; besides, the seconds from its start to its last action on any rank.
        None where it does not apply. And of all ranks the longest wait for data, what became of the `readings` of
        their hardware, and `sums` added up.

        Ranks are compared by their forward passes: in the backward passes that reduce gradients, they wait for each
        other."""
        measured: dict[str, Any] = {"bubble": None, "straggler": None, "straggler_rank": None, "data_seconds": waited}
        if self.world.size == 1:
            return measured | over_ranks([readings]), None, sums
        own = [times.busy(), times.finish(), times.busy(("F",)), self.world.place("pp"), waited]
        read = [math.nan if value is None else value for value in readings.values()]
        mine = torch.tensor([*own, *read, *sums.flat], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(everyone, mine)  # on gloo: these are the host's numbers
        times_of, read_of, sums_of = torch.stack(everyone).split([len(own), len(read), sums.size], 1)
        busy, finish, forward, stage, waits = times_of.unbind(1)
        ratios = peer_ratios(dict(enumerate(forward.tolist())), dict(enumerate(stage.tolist())))
        measured["straggler_rank"] = max(ratios, key=ratios.__getitem__, default=None)
        measured["straggler"] = ratios.get(measured["straggler_rank"])
        measured["data_seconds"] = waits.max().item()
        if self.pipelined:
            measured["bubble"] = 1 - (busy.sum() / (self.world.size * finish.max())).item()
        measured |= over_ranks(
            [
                {name: None if math.isnan(value) else value for name, value in zip(readings, row)}
                for row in read_of.tolist()
            ]
        )
        return measured, finish.max().item(), sums_of.sum(0).numpy().reshape(sums.shape)

    def describe_non_finite(self, numbers: dict[str, Any]) -> str:
        """What was not finite in a step: the loss, or the gradients of which parameters."""
        bad = [name for name, square in zip(self.names, numbers["squares"]) if not np.isfinite(square)]
        what = [f"loss {numbers['loss']}"] if not np.isfinite(numbers["loss"]) else []
        if bad:
            more = ", ..." if len(bad) > 5 else ""
            what.append(f"non-finite gradients in {len(bad)} parameters: {', '.join(bad[:5])}{more}")
        return "; ".join(what) + (f" (loss scale {numbers['loss_scale']:g})" if self.scaled else "")

    def give_up(self, step: int, numbers: dict[str, Any], ids: list[str]) -> None:
        """Ends the run with what was seen; every rank gets here at the same step."""
        mine = [sample for sample, loss in zip(ids, numbers["losses"]) if not np.isfinite(loss)]
        # Context-parallel ranks share samples.
        samples = list(dict.fromkeys(sample for some in self.world.gather(mine) for sample in some))
        self.log.note_non_finite(self.first_skipped or step)
        raise NonFiniteError(
            f"{self.skipped_in_row} steps in a row without an update "
            f"(guard.max_skipped={self.config.guard.max_skipped}), the last at step {step}: "
            f"{self.describe_non_finite(numbers)}; samples with a non-finite loss: "
            f"{', '.join(samples[:20]) or 'none'}. Look at these samples, lower lr.peak, or raise guard.max_skipped"
        )

    def check_updates(self, first: int, step: int) -> None:
        """Raises `NonFiniteError` on all ranks where no step after step `first` has updated the weights, unless few
        steps follow an earlier start that did."""
        made, skipped = step - first, self.skipped - self.skipped_before
        few = first > self.skipped_before and made < self.config.guard.max_skipped
        if self.moved or not made or few:
            return
        why = f"{skipped} of {made} steps were skipped, the last of them: {self.why_skipped}" if skipped else ""
        if skipped < made:
            why = f"the learning rate was 0 in all steps that were not skipped{why and f'; {why}'}"
            advice = "look at lr.schedule, lr.final and lr.warmup"
        elif self.scaled and self.first_skipped is not None:
            advice = f"lower precision.loss_scale={self.config.precision.loss_scale:g}, which halves at each overflow"
        else:
            advice = "look at the samples of these steps and their learned tokens, or raise batch.sequence_length"
        raise NonFiniteError(f"no step updated the weights: {why}. Nothing is saved at the end; {advice}")

    def summary(self, first: int, step: int, code: int, ended: str) -> str:
        """How a run that began after step `first` ended after `step` with an exit code, for people; by what, if it was
        stopped."""
        folder, steps = Path(self.config.run.dir), self.config.run.steps
        fell = f"loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}" if self.losses else "no step was logged"
        made, skipped = step - first, self.skipped - self.skipped_before
        updated = f", {made - skipped} of which updated the weights" if skipped else ""
        partly = f" in {made} steps{updated}" if skipped else ""
        if self.finished and step < steps:
            return f"finished by a callback after step {step} of {steps} ({fell}{partly}); everything is in {folder}"
        if code == STOPPED:
            return f"stopped by {ended} after step {step} of {steps} ({fell}{partly}); {way_on(self.config)}"
        left_out = f"; {self.damaged} damaged rows were left out" if self.damaged else ""
        return f"done: {fell} in steps {first + 1} to {step}{updated}{left_out}; everything is in {folder}"


def load_metrics(statistics: Mapping[str, np.ndarray], mixtures: Sequence[str], valid: float) -> dict[str, float]:
    """The metrics of how evenly tokens are spread over experts. statistics: of a whole step, see `Router.report`;
    mixtures: names of the blocks with experts; valid: the number of valid tokens."""
    if not mixtures:
        return {}
    loads = [statistics[f"{name}.load"] for name in mixtures]
    shares = [load / load.sum() for load in loads]
    metrics = {
        "fullest": max(share.max() * len(share) for share in shares),
        "idle": max((load == 0).mean() for load in loads),
        "entropy": min(entropy_of(share) for share in shares),
    }
    for kind in ("balance", "z_loss"):
        if found := [statistics[key] for name in mixtures if (key := f"{name}.{kind}") in statistics]:
            metrics[kind] = np.sum(found) / valid
    ranges = [
        statistics[key] / load.sum() for name, load in zip(mixtures, loads) if (key := f"{name}.bias") in statistics
    ]
    if ranges:
        metrics["bias"] = max(ranges).item()
    return {name: float(value) for name, value in metrics.items()}


def entropy_of(shares: np.ndarray) -> float:
    """The entropy of shares that add up to 1 as a share of the largest possible one."""
    present = shares[shares > 0]
    return -(present * np.log(present)).sum() / math.log(len(shares)) if len(shares) > 1 else 1.0


def losses_by_source(names: Sequence[str], sums: np.ndarray) -> dict[str, float | None]:
    """The metrics of each source, from summed losses and numbers of targets [2, sources]."""
    metrics: dict[str, float | None] = {}
    for name, loss, targets in zip(names, *sums.tolist()):
        metrics[f"loss/{name}"] = loss / targets if targets else None
        metrics[f"targets/{name}"] = int(targets)
    return metrics
