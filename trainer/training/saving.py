"""What a checkpoint of a run holds, how a run resumes from one, and what the model writes while it is trained."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.checkpointing.base import BASE, describe_base
from trainer.checkpointing.loading import load_tensors
from trainer.checkpointing.memory import MemoryNodes, fetch_files, find_in_memory
from trainer.checkpointing.remote import FetchNeeded, StoreAtStart
from trainer.checkpointing.resume import data_identity, find_start, fitting_manifest
from trainer.checkpointing.retention import OtherPlace, list_everywhere
from trainer.config import CheckpointConfig, Config, ConfigError, GenerateConfig
from trainer.data.mixture import Mixture, MixturePhase
from trainer.data.tokenizer import Tokenizer
from trainer.data.tokens import Points
from trainer.distributed.mesh import World
from trainer.distributed.tensors import Fragment, local_values
from trainer.optim.optimizer import PREFIX
from trainer.planning.plan import BatchPlan
from trainer.planning.resolve import Layout
from trainer.precision.products import DTYPES
from trainer.training.session import list_launchers
from trainer.training.state import TrainState
from trainer.util.lines import STARTS, read_status
from trainer.util.objects import is_url

if TYPE_CHECKING:
    from trainer.data.corpus import Corpus, CorpusSide
    from trainer.generate.sharded_model import ShardedModel

DROPPED = "what quantisation had left out of the gradients belongs to the checkpoint's plan, and is dropped"


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come, besides its state. samples: position in the data, in samples. tokens: trained on.
    skipped: steps without an update. callbacks: what callbacks store, by name. points: where streams stand."""

    samples: int = 0
    tokens: int = 0
    skipped: int = 0
    callbacks: dict[str, Any] = field(default_factory=dict)
    points: Points = field(default_factory=dict)


@dataclass(frozen=True)
class RunStart:
    """Where a run begins, the same on all ranks.

    path: the checkpoint that it resumes from, None for a new run. manifest: of that checkpoint. launchers: who started
    the run. data: what its position in the data depends on. generation: the model's generation configuration. The three
    are for the checkpoints that it writes. mixture: what its samples are drawn by. samples: its position in the data.
    notes: messages for the log, such as checkpoints that were passed over. nodes: the ranks by the host memory that
    they share. in_memory: whether `path` is an in-memory checkpoint of this run; its folder is that of this rank's
    node. base: the frozen parameters that adapters belong to (`describe_base`).
    """

    path: Path | None
    manifest: dict[str, Any]
    launchers: list[str]
    data: dict[str, Any]
    mixture: Mixture
    samples: int
    notes: list[str]
    nodes: MemoryNodes
    in_memory: bool = False
    generation: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] | None = None

    @property
    def step(self) -> int:
        """The number of steps that the run has made."""
        return self.manifest["step"] if self.path else 0

    @property
    def tokens(self) -> int:
        """The number of tokens that the checkpoint was trained on."""
        return self.manifest["tokens"] if self.path else 0

    @classmethod
    def find(cls, config: Config, layout: Layout, corpus: Corpus, world: World) -> RunStart:
        """Finds the start that `checkpoint.resume` asks for. All ranks call it together. Raises `ConfigError` on all of
        them where the checkpoint is of another model or of other data."""
        data, mine = data_identity(corpus, config.run.seed, layout.batch), list_launchers(world)
        run = Path(config.run.dir)
        folder, nodes = run / "checkpoints", MemoryNodes.find(config.checkpoint, run, world)
        # Rank 0 reads the folder for all: on a shared file system, ranks may see different versions of it.
        identity, proven = world.agree(lambda: (read_identity(run), read_proven(run)))
        any_launch = config.checkpoint.resume == "auto"
        in_memory = find_in_memory(nodes, identity, mine, any_launch, world)
        known = None if in_memory is None else in_memory[0]
        base = world.agree(lambda: describe_base(config, layout.spec, world.device))
        search = StartSearch(config.checkpoint, folder, mine, proven, known)
        while True:
            try:
                path, warnings = world.agree(search.look)
                break
            except FetchNeeded as need:  # on all ranks
                search.note(need, need.fetch_together(world))
        # `find_newer` returns no path where the in-memory checkpoint is at least as good.
        newer = in_memory is not None and path is None
        path = in_memory[1] if newer else path
        manifest: dict[str, Any] = {}
        if path:
            manifest = world.agree(lambda: fitting_manifest(path, config, layout.spec, layout.batch, data, base))
        mixture = corpus.train.plan_mixture()
        start = cls(path, manifest, mine, data, mixture, 0, warnings, nodes, newer, base=base)
        return start.continue_data(config, corpus.train) if path else start

    def continue_data(self, config: Config, samples: CorpusSide) -> RunStart:
        """The start with the position and the mixture of its checkpoint, and messages on what changes."""
        if config.checkpoint.data == "restart":
            own = self.is_own(Path(config.run.dir)) and self.manifest.get("data_restarted") is True
            if not own or self.manifest["data"] != self.data:
                note = "checkpoint.data=restart: the data begin at their first sample"
                return replace(self, notes=[*self.notes, note])
        position, saved = self.manifest["samples"], self.manifest["mixture"]
        history = Mixture.parse(saved) if saved else self.mixture
        mixture, notes = samples.plan_mixture(history, position), []
        if config.checkpoint.data == "restart":
            notes = [f"checkpoint.data=restart took effect before: the data continue at sample {position}"]
        notes += [describe_change(samples, mixture, phase) for phase in mixture.phases if phase.start == position > 0]
        return replace(self, mixture=mixture, samples=position, notes=[*self.notes, *notes])

    def is_own(self, run: Path) -> bool:
        """Whether the run in the folder `run` wrote the checkpoint that it resumes from."""
        own = run / "checkpoints"
        return self.in_memory or self.path is not None and self.path.resolve().parent == own.resolve()

    def resume(self, state: TrainState) -> tuple[RunProgress, list[str]]:
        """Fills a new `state` from the checkpoint, if there is one. Returns how far the run has come, and messages for
        the log. All ranks call it together."""
        if self.path is None:
            return RunProgress(), self.notes
        manifest = self.manifest
        scaler = manifest["scaler"]
        averaged = any(name.startswith(PREFIX) for name in manifest["tensors"])
        if self.in_memory:
            # A node has only its own ranks' files in memory. What this rank needs of others is sent to it first.
            fetch_files(self.nodes, self.path, state.tensors() | state.compression.tensors(), state.world)
        restore_state(state, self.path, manifest["step"], scaler, averaged)
        complete = resume_error_feedback(state, self.path, manifest)
        messages = [*self.notes, *([] if complete else [DROPPED]), f"resumed from {self.path} at step {state.step}"]
        decay = state.config.optimizer.ema.decay
        if decay and not averaged:
            messages.append(f"the checkpoint has no average of the weights: it begins with those of step {state.step}")
        if averaged and not decay:
            messages.append("the checkpoint's average of the weights is left out, as optimizer.ema.decay=0")
        if state.scaler.enabled and not scaler:
            first = state.config.precision.loss_scale
            messages.append(f"the checkpoint has no loss scale: it begins at precision.loss_scale={first:g}")
        points = manifest["streams"] if self.samples else {}
        return RunProgress(
            self.samples, manifest["tokens"], manifest["skipped"], manifest["callbacks"], points
        ), messages


def describe_change(samples: CorpusSide, mixture: Mixture, phase: MixturePhase) -> str:
    """What is to be said where a phase of the mixture begins at the position where a run goes on."""
    epochs = samples.count_epochs(mixture, phase.start)
    ends = ", ".join(f"{name} after {epochs[name]:.3g} epochs" for name in phase.shares if name in epochs)
    return f"the mixture changes at sample {phase.start} to {phase.describe()}; sources go on where they stood ({ends})"


class StartSearch:
    """`find_newer` on rank 0, with the checkpoints of the object stores that the settings name. The arguments are those
    of `find_newer`."""

    def __init__(
        self, setting: CheckpointConfig, folder: Path, launchers: list[str], proven: int | None, in_memory: int | None
    ):
        self.arguments = setting, folder, launchers, proven, in_memory
        self.store: StoreAtStart | None = None

    def look(self) -> tuple[Path | None, list[str]]:
        """The checkpoint to start from, with messages. Raises `FetchNeeded`."""
        setting, folder = self.arguments[:2]
        if self.store is None and (setting.upload or is_url(setting.resume)):
            self.store = StoreAtStart(setting, folder)
        path, warnings = find_newer(*self.arguments, self.store)
        return path, [*warnings, *(self.store.notes if self.store is not None else [])]

    def note(self, need: FetchNeeded, damage: str | None) -> None:
        """Notes that a checkpoint has been fetched, or what is wrong with it."""
        if self.store is not None:
            self.store.note(need, damage)


def find_newer(
    setting: CheckpointConfig,
    folder: Path,
    launchers: list[str],
    proven: int | None,
    in_memory: int | None,
    store: OtherPlace | None = None,
) -> tuple[Path | None, list[str]]:
    """The checkpoint on disk that a run starts from, with warnings. None if it starts from the in-memory checkpoint of
    step `in_memory` instead, or from its first step. folder, launchers, proven, store: as in `find_start`.

    Verifying a checkpoint on disk reads all of it. This happens only if it may be better than the one in memory.
    """

    def rank_step(step: int) -> tuple[bool, int]:
        # A checkpoint of steps that are known to be good is better than any later one.
        return proven is None or step <= proven, step

    steps = {path: step for step, path in list_everywhere(folder, store).items()}
    if in_memory is not None and all(rank_step(in_memory) >= rank_step(step) for step in steps.values()):
        return None, []
    try:
        path, warnings = find_start(setting, folder, launchers, proven, store)
    except ConfigError as error:
        if in_memory is None:
            raise
        return None, error.problems
    if in_memory is not None and (path not in steps or rank_step(steps[path]) <= rank_step(in_memory)):
        return None, warnings
    return path, warnings


def read_identity(run: Path) -> str | None:
    """Distinguishes the run in the folder `run` from another one that was there before: a digest of the first line of
    its record of starts. None where there is no record."""
    try:
        with open(run / STARTS, "rb") as file:
            line = file.readline()
    except OSError:
        return None
    return hashlib.sha256(line).hexdigest() if line else None


def read_proven(run: Path) -> int | None:
    """The last step whose checkpoint is known to be good, after the run in the folder `run` ended with steps that were
    not finite: it was followed by a finite step. None if the run did not end in this way."""
    known = read_status(run, non_finite=(int, type(None)))
    first = known.get("non_finite")
    return first - 2 if first is not None and known["status"] == "failed" else None


def find_non_finite(tensors: dict[str, Tensor | Fragment], world: World) -> list[str]:
    """Names of the tensors of a state that hold a value that is not finite on some rank. All ranks call it together.
    The host waits for the device."""
    values = {name: local_values(tensor).detach() for name, tensor in tensors.items() if tensor.dtype.is_floating_point}
    values = {name: value for name, value in values.items() if value.numel()}
    # A tensor is finite if its minimum and maximum are. `isfinite` would allocate a bool for each element.
    finite = [torch.stack(torch.aminmax(value)).isfinite().all().to(world.device) for value in values.values()]
    bad = torch.stack(finite).logical_not().cpu() if finite else torch.zeros(0, dtype=torch.bool)
    # A CPU tensor, so this goes over gloo: if a rank has died, it fails at once, while a collective of NCCL would not
    # return.
    if not world.sum_all(bad.sum()).item():
        return []
    mine = [name for name, wrong in zip(values, bad.tolist()) if wrong]
    return sorted(set().union(*world.gather(mine)))


def restore_state(state: TrainState, path: Path, step: int, scaler: dict[str, Any], averaged: bool = True) -> None:
    """Fills `state` from the checkpoint `path` of step `step`, written under any plan. scaler: state of the loss scale.
    averaged: whether the checkpoint has an average of the weights, if the state wants one."""
    tensors = state.tensors()
    load_tensors(path, {name: value for name, value in tensors.items() if averaged or not name.startswith(PREFIX)})
    # Copies of tied embeddings are not in the checkpoint.
    state.after_load()
    # The average was created from the initial weights. It has to start from the loaded ones.
    if state.average is not None and not averaged:
        state.average.begin()
    state.step = step
    state.scaler.load_state_dict(scaler)


def resume_error_feedback(state: TrainState, path: Path, manifest: dict[str, Any]) -> bool:
    """Restores the error feedback of quantised gradients, where settings and plan are those of the checkpoint. Returns
    False where the checkpoint has error feedback that could not be used."""
    if not state.compression.resume(manifest.get("compression")):
        return not any(name.startswith("compression.") for name in manifest["tensors"])
    load_tensors(path, state.compression.tensors())
    return True


def describe_checkpoint(
    state: TrainState, batch: BatchPlan, progress: RunProgress, start: RunStart, scaler: dict[str, Any]
) -> tuple[dict[str, Tensor | Fragment], dict[str, Any]]:
    """The content of a checkpoint of a run: tensors by plan-independent name, and its part of the manifest. scaler:
    state of the loss scale. All ranks call it together."""
    compression = state.compression
    manifest = {
        "compression": compression.identity(),
        "spec": state.spec.to_dict(),
        "plan": state.plan.to_dict(),
        "batch": dataclasses.asdict(batch),
        "launchers": start.launchers,
        "tokens": progress.tokens,
        "samples": progress.samples,
        "streams": progress.points,
        "skipped": progress.skipped,
        "callbacks": progress.callbacks,
        "scaler": scaler,
        "data": start.data,
        "mixture": start.mixture.to_json(),
        "generation": start.generation,
        BASE: start.base,
        "data_restarted": state.config.checkpoint.data == "restart",
        "began_from": state.config.checkpoint.resume,
    }
    return state.tensors() | compression.tensors(), manifest


# Text that the model writes while it is trained (`eval.generate`).


TEMPERATURE, TOP_K = 0.8, 50
"""Samples during a run are chosen among so many most likely tokens, as `trainer sample` does by default."""


def sharded_model(state: TrainState) -> ShardedModel:
    """The model in training, under its plan."""
    from trainer.generate.sharded_model import ShardedModel  # few runs write samples

    return ShardedModel(
        state.spec,
        state.runtime.stages,
        state.world.device,
        DTYPES[state.config.precision.compute],
        state.plan.tp,
        state.pipeline.schedule.placement,
        state.channels,
        state.world,
    )


def draw_samples(
    state: TrainState, settings: GenerateConfig, tokenizer: Tokenizer, stop_ids: Collection[int]
) -> list[tuple[str, str]]:
    """Each prompt and its continuation, which ends before any of `stop_ids`.

    All ranks call it together, between steps, and none of what they train on changes: weights, gradients, and the state
    of random numbers. No backward pass follows that would drop the gathered parameters, so they are dropped here."""
    from trainer.generate.sampling import SamplingOptions
    from trainer.generate.text import continue_prompts

    sampling = SamplingOptions(TEMPERATURE, TOP_K)
    prompts = [tokenizer.encode_prompt(prompt) for prompt in settings.prompts]
    texts = continue_prompts(sharded_model(state), tokenizer, prompts, settings.tokens, sampling, stop_ids=stop_ids)
    for stage in state.stages:
        state.runtime.sharding.reshard(stage)
    return list(zip(settings.prompts, texts))
