"""What a checkpoint of a run holds, and how a run goes on from one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpointing.loading import load_tensors
from trainer.checkpointing.resume import data_identity, find_start, fitting_manifest
from trainer.config import Config
from trainer.distributed.tensors import Fragment
from trainer.distributed.world import World
from trainer.optim.average import PREFIX
from trainer.planning.batch import BatchPlan
from trainer.planning.resolve import Layout
from trainer.training.session import launchers
from trainer.training.state import TrainState

DROPPED = "what quantisation had left out of the gradients belongs to the checkpoint's plan, and is dropped"


@dataclass(frozen=True)
class Progress:
    """How far a run has come, beside its state. samples: position in the data; tokens: trained on; skipped: steps
    without an update; callbacks: what callbacks keep, by name."""

    samples: int = 0
    tokens: int = 0
    skipped: int = 0
    callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """Where a run begins, the same on all ranks.

    path: the checkpoint that it goes on from, None at its first step; manifest: of that. launchers: who started the
    run, and data: what its position in the data depends on, for the checkpoints that it writes. notes: what is to be
    said of it, such as checkpoints that were passed over.
    """

    path: Path | None
    manifest: dict[str, Any]
    launchers: list[str]
    data: dict[str, Any]
    notes: list[str]

    @property
    def step(self) -> int:
        """After which the run goes on."""
        return self.manifest["step"] if self.path else 0

    @property
    def tokens(self) -> int:
        """That the checkpoint was trained on."""
        return self.manifest["tokens"] if self.path else 0

    @classmethod
    def find(cls, config: Config, layout: Layout, fingerprint: str, world: World) -> Start:
        """The start that `checkpoint.resume` asks for; fingerprint: of the corpus. All ranks call it together. Raises
        `ConfigError` on all of them where the checkpoint is of another model or of other data."""
        data, mine = data_identity(fingerprint, config.run.seed, layout.batch), launchers(world)
        folder = Path(config.run.dir) / "checkpoints"
        path, warnings = world.agree(lambda: find_start(config.checkpoint, folder, mine))
        manifest: dict[str, Any] = {}
        if path:
            manifest = world.agree(lambda: fitting_manifest(path, config, layout.spec, layout.batch, data))
        return cls(path, manifest, mine, data, warnings)

    def resume(self, state: TrainState) -> tuple[Progress, list[str]]:
        """Fills a new `state` from the checkpoint, if there is one. Returns how far the run has come, and what is to be
        said. All ranks call it together."""
        if self.path is None:
            return Progress(), self.notes
        manifest = self.manifest
        scaler = saved_scale(manifest)
        averaged = any(name.startswith(PREFIX) for name in manifest["tensors"])
        restore(state, self.path, manifest["step"], scaler, averaged)
        kept = resume_error_feedback(state, self.path, manifest)
        samples = manifest["samples"] if state.config.checkpoint.data == "continue" else 0
        messages = [*self.notes, *([] if kept else [DROPPED]), f"resumed from {self.path} at step {state.step}"]
        decay = state.config.optimizer.ema.decay
        if decay and not averaged:
            messages.append(f"the checkpoint has no average of the weights: it begins with those of step {state.step}")
        if averaged and not decay:
            messages.append("the checkpoint's average of the weights is left out, as optimizer.ema.decay=0")
        if state.scaler.enabled and not scaler:
            first = state.config.precision.loss_scale
            messages.append(f"the checkpoint has no loss scale: it begins at precision.loss_scale={first:g}")
        return Progress(samples, manifest["tokens"], manifest["skipped"], manifest["callbacks"]), messages


def saved_scale(manifest: dict[str, Any]) -> dict[str, Any]:
    """The state of the loss scale in a checkpoint, empty if its run had none. In format 1 such runs saved a scale of
    one."""
    scaler = manifest["scaler"]
    idle = manifest["format"] == 1 and (scaler.get("scale"), scaler.get("_growth_tracker")) == (1.0, 0)
    return {} if idle else scaler


def restore(state: TrainState, path: Path, step: int, scaler: dict[str, Any], averaged: bool = True) -> None:
    """Fills `state` from the checkpoint `path` of `step`, written under any plan; `scaler`: the loss scale's state;
    averaged: whether the checkpoint has an average of the weights, if the state wants one."""
    tensors = state.tensors()
    load_tensors(path, {name: value for name, value in tensors.items() if averaged or not name.startswith(PREFIX)})
    state.after_load()
    if state.average is not None and not averaged:
        state.average.begin()
    state.step = step
    state.scaler.load_state_dict(scaler)


def resume_error_feedback(state: TrainState, path: Path, manifest: dict[str, Any]) -> bool:
    """Goes on with what quantisation had left out of earlier gradients, where settings and plan are those of the
    checkpoint. Returns whether nothing was lost."""
    if not state.compression.resume(manifest.get("compression")):
        return not any(name.startswith("compression.") for name in manifest["tensors"])
    load_tensors(path, state.compression.tensors())
    return True


def contents(
    state: TrainState, batch: BatchPlan, progress: Progress, start: Start
) -> tuple[dict[str, Tensor | Fragment], dict[str, Any]]:
    """What a checkpoint of a run holds: tensors by plan-independent name, and its part of the manifest. All ranks call
    it together."""
    compression = state.compression
    manifest = {
        "compression": compression.identity(),
        "spec": state.spec.to_dict(),
        "plan": state.plan.to_dict(),
        "batch": dataclasses.asdict(batch),
        "launchers": start.launchers,
        "tokens": progress.tokens,
        "samples": progress.samples,
        "skipped": progress.skipped,
        "callbacks": progress.callbacks,
        "scaler": state.scaler.state_dict(),
        "data": start.data,
    }
    return state.tensors() | compression.tensors(), manifest
