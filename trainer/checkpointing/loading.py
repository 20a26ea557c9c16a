"""Fills tensors from a checkpoint, whatever plan saved it. Each rank reads only the bytes that it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpointing.base import BASE, is_base, open_base
from trainer.checkpointing.chunks import Chunk, ChunkPiece, StoredTensor, TensorPart, tensor_bytes
from trainer.checkpointing.manifest import (
    LARGEST,
    MANIFEST,
    WAY_OUT,
    DamagedCheckpoint,
    format_foreign,
    list_checkpoints,
    open_inside,
    read_manifest,
    verify_checkpoint,
)
from trainer.checkpointing.retention import find_newest
from trainer.config import ConfigError
from trainer.config.model import DEEPEST, AdapterSpec, ModelSpec, spec_class
from trainer.config.typed import InvalidValue, Problems, build_typed
from trainer.data.mixture import Mixture
from trainer.data.tokens import parse_points
from trainer.distributed.mesh import gather_objects
from trainer.distributed.tensors import Fragment
from trainer.optim.optimizer import PREFIX as EMA
from trainer.planning.parameters import ADAPTER_NAMES, DOWN, declare_parameters, router_shapes
from trainer.precision.products import round_rows
from trainer.util.objects import hide_secrets, is_url
from trainer.util.reading import find_mismatch, shorten_foreign

T = TypeVar("T")

READERS = 4
"""Files that a rank reads at a time. A rank writes as many for an in-memory checkpoint."""


class PlannedRead(NamedTuple):
    """Elements of the tensor `name` that have to be read. out: the same elements as a view of the tensor that is
    filled."""

    name: str
    piece: ChunkPiece
    out: Tensor


class CheckpointContents:
    """The tensors in the checkpoint folder `path`: which there are, and their values. Runs no code from the folder.

    All methods raise DamagedCheckpoint where the folder is inconsistent, before memory is allocated.
    """

    def __init__(self, path: Path):
        self.path, self.manifest = path, read_manifest(path)
        self.files, self._entries = self.manifest["files"], self.manifest["tensors"]
        self.names = self._entries.keys()
        self._found: dict[str, StoredTensor] = {}

    def find(self, name: str) -> StoredTensor | None:
        """What the manifest says of the tensor `name`, None if there is no such tensor."""
        if name in self._entries and name not in self._found:
            tensor = self._guard(self._place(name), StoredTensor.parse, self._entries[name])
            if unknown := [chunk.file for chunk in tensor.chunks if chunk.file not in self.files]:
                raise DamagedCheckpoint(
                    f"{self.path / MANIFEST} does not list the file {format_foreign(unknown[0])}, where "
                    f"{format_foreign(name)} lies"
                )
            self._found[name] = tensor
        return self._found.get(name)

    def check_whole(self, tensors: dict[str, StoredTensor]) -> None:
        """Checks that each of `tensors` is complete, and that each has bytes of its own in the files."""
        for name, tensor in tensors.items():
            self._guard(self._place(name), tensor.pieces, (0,) * len(tensor.shape), tensor.shape)
        self._check_files((name, chunk) for name, tensor in tensors.items() for chunk in tensor.chunks)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU, by name."""
        stored = {name: tensor for name in names if (tensor := self.find(name)) is not None}
        self.check_whole(stored)
        tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in stored.items()}
        self.fill(self.plan(tensors))
        return tensors

    def files_of(self, tensors: dict[str, Tensor | Fragment]) -> set[str]:
        """The files that hold this rank's parts of `tensors`. Tensors that the checkpoint lacks are left out."""
        known = {name: tensor for name, tensor in tensors.items() if self.find(name) is not None}
        return {read.piece.chunk.file for read in self._locate(known)}

    def plan(self, tensors: dict[str, Tensor | Fragment]) -> list[PlannedRead]:
        """The reads that fill this rank's parts of `tensors`. The checkpoint has to have all of them, with their shape
        and dtype."""
        reads = self._locate(tensors)
        # A set: several pieces of one chunk are read separately, but its bytes count once.
        self._check_files({(read.name, read.piece.chunk) for read in reads})
        return reads

    def _locate(self, tensors: dict[str, Tensor | Fragment]) -> list[PlannedRead]:
        """For each rectangle of this rank's parts, the pieces of chunks that overlap with it. The saving and the
        loading plan may split differently."""
        reads = []
        for name, tensor in tensors.items():
            stored, part = self.find(name), TensorPart.of(tensor)
            for offset, values in part.boxes.items() if part else ():
                pieces = self._guard(self._place(name), stored.pieces, tuple(offset), tuple(values.shape))
                reads += [PlannedRead(name, piece, values[piece.within(offset)]) for piece in pieces]
        return reads

    def fill(self, reads: list[PlannedRead]) -> None:
        """Reads up to `READERS` files at a time, each in the order of bytes, since sequential reads are the fastest."""
        by_file: dict[str, list[PlannedRead]] = {}
        for read in sorted(reads, key=lambda read: read.piece.chunk.start):
            by_file.setdefault(read.piece.chunk.file, []).append(read)

        def fill_from(name: str) -> None:
            with open_inside(self.path, name) as file:
                for read in by_file[name]:
                    self._guard(name, read_rows, file, read)

        with ThreadPoolExecutor(READERS) as pool:
            for _ in pool.map(fill_from, by_file):  # raises what a thread has raised
                pass

    def _check_files(self, chunks: Iterable[tuple[str, Chunk]]) -> None:
        """Checks that files are as long as the manifest says and long enough for `chunks`. The chunks' lengths may not
        add up to more than the file: a small file must not promise large tensors by chunks that share bytes."""
        needed: dict[str, int] = {}
        for _, chunk in chunks:
            needed[chunk.file] = needed.get(chunk.file, 0) + chunk.length
            if chunk.start + chunk.length > self.files[chunk.file]["bytes"]:
                raise DamagedCheckpoint(f"{self.path / chunk.file} is too short for its tensors")
        for name, length in needed.items():
            # Refuses names that lead out of the folder by links.
            with open_inside(self.path, name) as file:
                size = file.seek(0, 2)
            if size != self.files[name]["bytes"] or length > size:
                raise DamagedCheckpoint(f"{self.path / name} has {size} bytes, which does not fit its tensors")

    def _place(self, name: str) -> str:
        return f"{MANIFEST}: {format_foreign(name)}"

    def _guard(self, where: str, action: Callable[..., T], *arguments: Any) -> T:
        try:
            return action(*arguments)
        except (ValueError, OSError) as error:
            raise DamagedCheckpoint(f"{self.path / where}: {error}") from None


def read_rows(file: BinaryIO, read: PlannedRead) -> None:
    """Reads the rows of a chunk that contain a piece of it: directly into the tensor where that is made of whole rows
    on the CPU, otherwise into a buffer, from which the piece is copied."""
    chunk, out = read.piece.chunk, read.out
    first, *inner = read.piece.within(chunk.offsets) or (slice(0, 1),)
    sizes = chunk.sizes[1:]
    # Then the rows of the file are the rows of `out`, and no second copy is needed.
    whole = out.is_contiguous() and out.device.type == "cpu" and out.shape[1:] == sizes
    rows = out if whole else torch.empty((first.stop - first.start, *sizes), dtype=out.dtype)
    # Only the rows that contain the piece are read. Within a row everything is read, since rows are contiguous in the
    # file.
    file.seek(chunk.start + first.start * prod(sizes) * out.dtype.itemsize)
    if file.readinto(tensor_bytes(rows)) != rows.nbytes:
        raise ValueError("the file ends before its values do")
    if not whole:
        out.copy_(rows[(slice(None), *inner)] if out.dim() else rows[0])


def load_tensors(path: Path, tensors: dict[str, Tensor | Fragment]) -> None:
    """Fills `tensors` in place from the checkpoint folder `path`, whatever plan saved it. All ranks call it together.

    Ranks may name different tensors. Other tensors of the checkpoint are ignored. Raises ConfigError on every rank if
    the checkpoint lacks a tensor of any rank, has it in another shape or dtype, or is damaged.
    """

    def plan() -> tuple[CheckpointContents, list[PlannedRead]]:
        contents = CheckpointContents(path)
        if problems := _mismatches(contents, tensors):
            raise ConfigError(problems)
        return contents, contents.plan(tensors)

    # In two steps: nothing is overwritten unless all ranks have found everything they need.
    contents, reads = run_together(plan)
    run_together(lambda: contents.fill(reads))


class SaveFailed(Exception):
    """What all ranks did for a save failed on at least one. The message names the ranks and the reasons."""


def run_on_ranks(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Runs `action` on every rank of `group` (None: this process is alone). If it fails on any of them, raises
    SaveFailed on all. Returns the results of all ranks, on rank 0 alone."""
    try:
        outcome = (action(), None)
    except Exception as error:
        outcome = (None, str(error) or type(error).__name__)
    outcomes: list[Any] = [outcome]
    first = group is None or dist.get_rank() == 0
    if group is not None:
        outcomes = [None] * dist.get_world_size(group) if first else []
        dist.gather_object(outcome, outcomes or None, dst=0, group=group)
    problems = [[f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem is not None]]
    if group is not None:
        dist.broadcast_object_list(problems, src=0, group=group)
    if problems[0]:
        raise SaveFailed("; ".join(problems[0][:3]))
    return [result for result, _ in outcomes]


def run_together(action: Callable[[], T]) -> T:
    """Runs `action` on every rank and returns its result on this one. A ConfigError or OSError of any rank is raised as
    a ConfigError on all."""
    problems: list[str] = []
    try:
        result = action()
    except OSError as error:
        problems = [f"{error.filename or 'a file'}: {error.strerror}; {WAY_OUT}"]
    except DamagedCheckpoint as damage:
        problems = [f"{damage}; {WAY_OUT}"]
    except ConfigError as error:
        problems = error.problems
    if dist.is_initialized():
        # A collective on every path: a rank with an error comes here too, so no rank waits for it in vain.
        problems = list(dict.fromkeys(problem for rank in gather_objects(problems) for problem in rank))
    if problems:
        raise ConfigError(problems)
    return result


def _mismatches(contents: CheckpointContents, wanted: dict[str, Tensor | Fragment]) -> list[str]:
    stored = {name: tensor for name in wanted if (tensor := contents.find(name)) is not None}
    missing = [name for name in wanted if name not in stored]
    differing = [
        f"{name} ({stored[name].dtype} {list(stored[name].shape)} there, {tensor.dtype} {list(tensor.shape)} here)"
        for name, tensor in wanted.items()
        if name in stored and (stored[name].shape, stored[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    kinds = (missing, "are not in the checkpoint"), (differing, "differ from the checkpoint's")
    return [
        f"checkpoint.resume={contents.path}: {len(names)} of {len(wanted)} tensors {what}: {_first(names)}; resume "
        "with the settings it was saved with, or set checkpoint.resume=none"
        for names, what in kinds
        if names
    ]


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


# What a run saves about itself besides tensors: plain data in the manifest, checked before it is used.


BEGIN = "data.bos"
"""The entry of `data` with the ids with which documents begin; there is none where they begin with their text."""


def read_begin(path: Path, manifest: dict[str, Any]) -> list[int]:
    """The ids with which the documents began that a checkpoint was trained on."""
    data = manifest.get("data")
    begin = data.get(BEGIN, []) if isinstance(data, dict) else []
    _demand(path, BEGIN, is_ids(begin), begin, "a list of token ids")
    return begin


def read_generation(path: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The generation configuration of the model in a checkpoint; None in those of earlier versions."""
    generation = manifest.get("generation")
    fits = generation is None or isinstance(generation, dict) and is_ids(generation.get("eos_token_id"))
    _demand(path, "generation", fits, generation, "a generation configuration")
    return generation


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def read_states(path: Path) -> dict[str, Any]:
    """The manifest of a run's checkpoint, checked to be what `saving.describe_checkpoint` writes. Its `spec` is
    completed with defaults. Raises DamagedCheckpoint, which names the first wrong entry."""
    manifest = {"data": {}, "batch": {}, "callbacks": {}, "streams": {}} | read_manifest(path)
    spec = saved_spec(path, manifest)
    manifest["spec"] = spec.to_dict()
    base = manifest.setdefault(BASE, None)
    _demand(path, BASE, is_base(base, spec), base, "the model that adapters belong to")
    for name in ("data", "batch", "callbacks", "scaler"):
        state = manifest.get(name)
        _demand(path, name, isinstance(state, dict), state, "a mapping")
    counts = {name: (manifest.get(name), LARGEST) for name in ("tokens", "samples", "skipped")}
    if scaler := manifest["scaler"]:  # empty where the run had no loss scale
        scale = scaler.get("scale")
        _demand(path, "scaler.scale", type(scale) in (int, float) and 0 < scale < 2.0**127, scale, "a loss scale")
        counts["scaler._growth_tracker"] = scaler.get("_growth_tracker"), 2**31 - 1
    for name, (value, most) in counts.items():
        _demand(path, name, type(value) is int and 0 <= value <= most, value, "a whole number in its range")
    if manifest.setdefault("mixture", None) is not None:
        try:
            Mixture.parse(manifest["mixture"])
        except ValueError as error:
            raise DamagedCheckpoint(f"{path / MANIFEST}: mixture {error}") from None
    try:
        manifest["streams"] = parse_points(manifest["streams"])
    except ValueError as error:
        raise DamagedCheckpoint(f"{path / MANIFEST}: streams: {shorten_foreign(error)}") from None
    read_begin(path, manifest)
    manifest["generation"] = read_generation(path, manifest)
    compression = manifest.setdefault("compression", None)
    known = compression is None or not find_mismatch(compression, {"chosen": [str]})
    _demand(path, "compression", known, compression, "null or a mapping with what was chosen")
    launchers = manifest.get("launchers", [])
    _demand(path, "launchers", not find_mismatch(launchers, [str]), launchers, "a list of text")
    return manifest


def saved_spec(path: Path, manifest: dict[str, Any]) -> ModelSpec:
    """The spec of the model that a checkpoint is of, by its manifest; its tensors are not checked. Raises
    DamagedCheckpoint where that is not a model."""
    problems: Problems = {}
    try:
        given = manifest.get("spec")
        kind = spec_class(given) if isinstance(given, dict) else ModelSpec
        spec = build_typed(given, problems, kind, "model")
    except (InvalidValue, RecursionError) as error:
        problems[""] = str(error)
    if problems:
        raise DamagedCheckpoint(f"{path / MANIFEST}: spec: {next(iter(problems.values()))}")
    return spec


def _demand(path: Path, name: str, fits: bool, value: Any, kind: str) -> None:
    if not fits:
        raise DamagedCheckpoint(f"{path / MANIFEST}: {name} is {format_foreign(value)}, which is not {kind}")


# A trained model on disk, in a checkpoint of a run or in a transformers folder: for sampling, export and merging.


CONFIG, ADAPTER = "config.json", "adapter_config.json"
"""The files by which transformers folders are recognised: one with a model, and one with adapters."""


@dataclass(frozen=True)
class SavedModel:
    """A model on disk. path: the checkpoint's own folder, or a transformers folder. tensor: reads the whole parameter
    of a given name. tokenizer: the folder of the model's tokenizer, or None. run: the folder of its run, or None.
    generation: the model's generation configuration. begin: the ids with which the documents began that it was trained
    on; None means as its tokenizer says. base: of a model with adapters, the folder of the model that these were
    trained on, or None."""

    path: Path
    spec: ModelSpec
    tensor: Callable[[str], Tensor]
    tokenizer: Path | None
    run: Path | None
    generation: dict[str, Any] = field(default_factory=dict)
    begin: list[int] | None = None
    base: Path | None = None


class MergedWeights:
    """The weights of a model with adapters as one without: W + scale B A, added in fp32, for `SavedModel.tensor`.

    added, lost: squared norms of what the adapters add to the matrices read so far, and of what rounding the sums to
    `dtype` takes from them."""

    def __init__(self, saved: SavedModel, dtype: torch.dtype):
        self.saved, self.dtype, self.infos = saved, dtype, declare_parameters(saved.spec)
        self.added = self.lost = 0.0

    def __call__(self, name: str) -> Tensor:
        value, module = self.saved.tensor(name), name.removesuffix(".weight")
        if f"{module}.{DOWN}" not in self.infos or module == name:
            return value
        down, up = (self.saved.tensor(f"{module}.{end}").float() for end in ADAPTER_NAMES)
        change = (up @ down).mul_(self.saved.spec.adapter.factor)
        value = value.float() + change
        self.added += change.square().sum().item()
        self.lost += (value.to(self.dtype).float() - value).square().sum().item()
        return value

    @property
    def share_lost(self) -> float:
        """What rounding takes, as a share of what the adapters add."""
        return (self.lost / self.added) ** 0.5 if self.added else 0.0


def merge_adapters(saved: SavedModel, dtype: torch.dtype = torch.float32) -> SavedModel:
    """The same model without adapters, if it has any. dtype: in which it is to be written; see `MergedWeights`."""
    if not saved.spec.adapter.rank:
        return saved
    return replace(saved, spec=replace(saved.spec, adapter=AdapterSpec()), tensor=MergedWeights(saved, dtype))


def open_saved(checkpoint: str, weights: str = "trained") -> SavedModel:
    """Opens the model at `checkpoint`: a run's folder, of which the newest complete checkpoint is taken, a checkpoint's
    folder, or a transformers folder. weights: `trained`, or `ema` for their average.

    Checksums are verified. Raises `ConfigError`, which names the folder and what is wrong with it.
    """
    if is_url(checkpoint):
        raise ConfigError(
            f"checkpoint={hide_secrets(checkpoint)} must be on a disk; copy it there first, such as with aws s3 cp "
            "--recursive, or let a run resume from it"
        )
    folder = Path(checkpoint).expanduser()
    if any((folder / name).is_file() for name in (CONFIG, ADAPTER)) and not (folder / MANIFEST).is_file():
        return open_transformers(checkpoint, weights)
    path = find_whole(checkpoint)
    run = path.resolve().parent.parent
    tokenizer = run / "tokenizer"
    try:
        contents = CheckpointContents(path)
        spec = saved_spec(path, contents.manifest)
        prefix = "model."
        if weights == "ema":
            prefix = EMA
            if not any(name.startswith(EMA) for name in contents.names):
                raise ConfigError(
                    f"weights=ema: {path} holds no average of the weights, as its run had optimizer.ema.decay=0; leave "
                    "weights=ema out"
                )
        check_model(contents, spec, prefix)
        infos = declare_parameters(spec)
        read_frozen, base = open_base(contents.manifest.get(BASE), spec) if spec.adapter.rank else (None, None)
        unaveraged = router_shapes(spec)
        generation = read_generation(path, contents.manifest) or {}
        begin = read_begin(path, contents.manifest)
    except DamagedCheckpoint as damage:
        way_out = "" if "imports=" in str(damage) else "; give another checkpoint"
        raise ConfigError(f"checkpoint={checkpoint}: {damage}{way_out}") from None

    def tensor(name: str) -> Tensor:
        if read_frozen is not None and name in infos and not infos[name].trained:
            # The adapters belong to the values that the run has computed with.
            return round_rows(read_frozen(name)) if infos[name].float8 else read_frozen(name)
        # Biases of routers are not averaged, so those of the last step go with the average.
        stored = ("model." if name in unaveraged else prefix) + name
        return contents.read([stored])[stored]

    return SavedModel(path, spec, tensor, tokenizer if tokenizer.is_dir() else None, run, generation, begin, base)


def find_whole(checkpoint: str) -> Path:
    """The verified checkpoint folder that `checkpoint` names."""
    folder = Path(checkpoint).expanduser()
    if (folder / MANIFEST).is_file():
        try:
            verify_checkpoint(folder, checksums=True)
        except DamagedCheckpoint as damage:
            raise ConfigError(
                f"checkpoint={checkpoint}: {damage}; give the run's folder to take its newest whole checkpoint"
            ) from None
        return folder
    remedy = "give a run's folder (runs/NAME), one of its checkpoints (runs/NAME/checkpoints/step-00000100), or a "
    remedy += "transformers folder"
    if not folder.is_dir():
        raise ConfigError(f"checkpoint={checkpoint} is no folder; {remedy}")
    nested = folder / "checkpoints"
    path, warnings = find_newest(nested if list_checkpoints(nested) else folder)
    for warning in warnings:
        print(warning, file=sys.stderr)
    if path is None:
        raise ConfigError(
            f"checkpoint={checkpoint} holds no whole checkpoint, which runs save with checkpoint.every=STEPS or "
            f"checkpoint.at_end=true; {remedy}"
        )
    return path


def open_transformers(folder: str, weights: str) -> SavedModel:
    """Opens the model in a transformers folder."""
    if weights == "ema":
        raise ConfigError(
            f"weights=ema: {folder} is a transformers folder, which holds one set of weights; leave it out"
        )
    path = Path(folder).expanduser()
    # Imported late: checkpoints of runs do not need it.
    from trainer.hf import find_base, open_generation, open_weights, spec_from_hf

    notes: list[str] = []
    spec = spec_from_hf(path, notes)
    generation, left_out = open_generation(path, spec.vocab_size)
    values, more = open_weights(path, spec)
    for note in (*notes, *more, *left_out):
        print(note, file=sys.stderr)
    base, infos = find_base(path), declare_parameters(spec)
    tokenizer = next((one for one in (path, base) if (one / "tokenizer_config.json").is_file()), None)

    def tensor(name: str) -> Tensor:
        return values(name, infos[name]) if name in infos else values.tensor(name)

    return SavedModel(path, spec, tensor, tokenizer, None, generation, base=base if spec.adapter.rank else None)


def check_model(contents: CheckpointContents, spec: ModelSpec, prefix: str) -> None:
    """Raises DamagedCheckpoint unless a checkpoint holds the parameters of `spec`, with names behind `prefix`, and what
    its routers keep besides. Checks before memory is allocated."""
    where = contents.path / MANIFEST
    # A manifest may claim any depth. Declaring the parameters of a billion layers would take all memory.
    if spec.depth > (DEEPEST if spec.adapter.rank else len(contents.names)):
        raise DamagedCheckpoint(
            f"{where}: a model of {format_foreign(spec.depth)} layers, but {len(contents.names)} tensors"
        )
    try:
        wanted = {prefix + name: info.shape for name, info in declare_parameters(spec).items() if info.trained}
        wanted |= {f"model.{name}": shape for name, shape in router_shapes(spec).items()}
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise DamagedCheckpoint(f"{where}: an impossible model: {format_foreign(str(error))}") from None
    stored = {name: tensor for name in wanted if (tensor := contents.find(name)) is not None}
    if differing := [name for name, shape in wanted.items() if name not in stored or stored[name].shape != shape]:
        raise DamagedCheckpoint(
            f"{where}: its model has a parameter {differing[0]}, which the checkpoint lacks or has in another shape"
        )
    contents.check_whole(stored)
    if problems := spec.check():
        raise DamagedCheckpoint(f"{where}: {problems[0]}")
