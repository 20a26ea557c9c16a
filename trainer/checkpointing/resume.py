"""Which checkpoint a run resumes from, and whether it fits the run's settings. Runs on rank 0 alone."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpointing.base import BASE, find_base_problems
from trainer.checkpointing.loading import BEGIN, read_begin, read_states
from trainer.checkpointing.manifest import WAY_OUT, DamagedCheckpoint, list_checkpoints, read_manifest
from trainer.checkpointing.retention import (
    OtherPlace,
    choose_whole,
    describe_damages,
    find_resume,
    find_whole,
    list_everywhere,
)
from trainer.config import CheckpointConfig, Config, ConfigError
from trainer.config.model import LOSS_OF_EXPERTS, ModelSpec, runs_foreign_code
from trainer.config.typed import flatten_values
from trainer.planning.plan import BatchPlan
from trainer.util.reading import find_mismatch

if TYPE_CHECKING:
    from trainer.data.corpus import Corpus


def find_start(
    setting: CheckpointConfig,
    folder: Path,
    launchers: list[str],
    proven: int | None = None,
    store: OtherPlace | None = None,
) -> tuple[Path | None, list[str]]:
    """The checkpoint to start from, if any, with warnings. folder: the run's checkpoints; launchers:
    `session.list_launchers`; proven, store: as in `find_resume`.

    `checkpoint.resume` says where a launch begins. When torchrun restarts the processes of a launch, they resume from
    the newest checkpoint that this launch has saved, whatever `checkpoint.resume` says. A path acts once: a start with
    the same path goes on from what the run has saved since it began there. Raises `ConfigError` where all checkpoints
    that count are damaged."""
    try:
        os.listdir(folder)  # `glob` would find no checkpoint and say nothing
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(
            f"{folder}, the folder of the run's checkpoints, cannot be read ({error.strerror}); make it readable, or "
            "set another run.dir"
        ) from None
    if setting.resume == "auto":
        return find_resume(setting.resume, folder, proven, store)
    checkpoints, read = list_everywhere(folder, store), store.read_manifest if store else read_manifest
    own = {step: path for step, path in checkpoints.items() if set(launchers) & known_launchers(path, read)}
    newest, warnings = choose_whole(setting.resume, own, proven, store)
    if newest is None and setting.resume != "none":
        good = [path for step, path in checkpoints.items() if proven is None or step <= proven]
        since = itertools.takewhile(lambda path: read_beginning(path, read) in (setting.resume, None), good)
        newest, damages = find_whole(since, store)
        note = f"checkpoint.resume={setting.resume} took effect before: the run goes on from {newest}; to begin there "
        warnings = [*describe_damages(damages), note + "again, set another run.name"]
    return (newest, warnings) if newest is not None else find_resume(setting.resume, folder, store=store)


ReadManifest = Callable[[Path], dict[str, Any]]


def read_beginning(path: Path, read: ReadManifest) -> str | None:
    """`checkpoint.resume` of the start that wrote a checkpoint; None if its manifest is damaged."""
    try:
        return str(read(path).get("began_from", ""))
    except DamagedCheckpoint:
        return None


def known_launchers(path: Path, read: ReadManifest) -> set[str]:
    """The launchers of the run that saved a checkpoint (`session.list_launchers`); empty if its manifest is damaged."""
    try:
        launchers = read(path).get("launchers", [])
    except DamagedCheckpoint:
        return set()
    return set() if find_mismatch(launchers, [str]) else set(launchers)


CORPUS = "corpus (as cut into sequences)"


def data_identity(corpus: Corpus, seed: int, batch: BatchPlan) -> dict[str, Any]:
    """The settings and content without which a position in the data means nothing. The ids with which documents begin
    are noted where there are any; earlier versions, whose documents began with their text, did not note them."""
    return {
        CORPUS: corpus.fingerprint,
        "run.seed": seed,
        "batch.sequence_length": batch.sequence_length,
        "sources": corpus.contents,
        **({BEGIN: corpus.tokenizer.begin} if corpus.tokenizer.begin else {}),
    }


def find_begin(setting: CheckpointConfig, folder: Path) -> list[int] | None:
    """The ids with which the documents began that the checkpoint of `find_start` was trained on; None if a run would
    start from no checkpoint. folder: the run's checkpoints. Of damaged checkpoints, which are not resumed, none
    counts."""
    if setting.resume == "none":
        return None
    paths = [*list_checkpoints(folder).values()]
    if setting.resume != "auto":
        named = Path(setting.resume).expanduser()
        paths = [*list_checkpoints(named / "checkpoints").values(), named]
    for path in paths:
        with contextlib.suppress(DamagedCheckpoint):
            return read_begin(path, read_manifest(path))
    return None


def find_changed_data(saved: dict[str, Any], data: dict[str, Any]) -> list[str]:
    """The settings and sources in which the data of a run differ from those of a checkpoint in such a way that the
    checkpoint's position means nothing. Both are `data_identity`. Other weights, and sources that were not there
    before or are no longer there, are no such difference: every source continues where it stands."""
    changed = [name for name in ("run.seed", "batch.sequence_length", BEGIN) if saved.get(name) != data.get(name)]
    before, now = saved.get("sources"), data["sources"]
    if not isinstance(before, dict):  # a checkpoint from before sources were recorded one by one
        return [*changed, *([CORPUS] if saved.get(CORPUS) != data[CORPUS] else [])]
    changed += [f"data.sources.{name}" for name in now if name in before and before[name] != now[name]]
    gone = {before[name]: name for name in before if name not in now}
    renamed = [(gone[key], name) for name, key in now.items() if name not in before and key in gone]
    return [*changed, *(f"data.sources.{name} (the source {old} under another name)" for old, name in renamed)]


def fitting_manifest(
    path: Path, config: Config, spec: ModelSpec, batch: BatchPlan, data: dict[str, Any], base: dict[str, Any] | None
) -> dict[str, Any]:
    """The manifest of the checkpoint `path`, if the run may resume from it; raises `ConfigError` if not.

    Refused are another model, other data under the old position, another global batch that no setting asks for but
    that follows from another number of ranks, and states that cannot be. data: `data_identity` of this run."""
    try:
        manifest = read_states(path)
    except DamagedCheckpoint as damage:
        raise ConfigError(f"checkpoint.resume={config.checkpoint.resume}: {damage}; {WAY_OUT}") from None
    problems = []
    saved, mine = flatten_values(manifest["spec"]), flatten_values(spec.to_dict())
    for name in mine:
        # The step of the biases may change, but not whether there are biases.
        if name.endswith(LOSS_OF_EXPERTS) or name.endswith("experts.bias_rate") and saved.get(name) and mine[name]:
            saved[name] = mine[name]
    differing = [
        name for name in mine if name.partition(".")[0] not in ("name", "init") and saved.get(name) != mine[name]
    ]
    if runs_foreign_code(spec) != ("transformers" in manifest["spec"]):
        other = "transformers" if "transformers" in manifest["spec"] else "spec"
        problems.append(
            f"the checkpoint's model runs by other code: set model.code={other}, or another run.name to train this one "
            "beside it"
        )
    elif differing:
        problems.append(
            "; ".join(f"model.{name}={mine[name]} but the checkpoint has {saved.get(name)}" for name in differing[:3])
            + ": set another run.name to train it beside the earlier run, or checkpoint.resume=none to train it here, "
            "which sets the earlier run aside"
        )
    problems += find_base_problems(manifest.get(BASE), base)
    if config.checkpoint.data == "continue" and (changed := find_changed_data(manifest["data"], data)):
        problems.append(
            f"the data differ from the checkpoint's in {', '.join(changed)}, so its position means nothing here: set "
            "checkpoint.data=restart to train on from the first sample of the new data, or restore the old settings"
        )
    before, given = manifest.get("batch", {}).get("global_size"), config.batch
    if before not in (None, batch.global_size) and given.global_size is None and given.global_tokens is None:
        dp = batch.global_size // (batch.micro_size * batch.accumulation)
        problems.append(
            f"the checkpoint's steps have {before} sequences, but batch.micro_size={batch.micro_size} x "
            f"batch.accumulation={batch.accumulation} x {dp} data-parallel ranks make {batch.global_size}: set "
            f"batch.global_size={before} batch.accumulation=null, which fits any number of ranks, or "
            f"batch.global_size={batch.global_size} to train on so"
        )
    if problems:
        raise ConfigError(problems)
    return manifest
