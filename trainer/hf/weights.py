"""Safetensors of a transformers folder <-> parameters by global name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.config import ConfigError
from trainer.config.model import ModelSpec
from trainer.hf.families import FAMILIES, ModuleRule
from trainer.planning.parameters import ParameterInfo, declare_parameters, router_shapes
from trainer.util.reading import check_links, on_one_line, path_inside, read_json, shorten_foreign

# Buffers that older versions of transformers saved among the weights.
BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)$")

STORED = ("F32", "BF16", "F16", "F64")
"""Types of tensors that are weights as they stand."""

PACKED = ("_blocks", "_scales")
"""What the names of the two tensors of a tensor in MXFP4 end with."""

MXFP4_BLOCK = 32
"""Numbers that share a scale."""

E2M1 = torch.tensor([sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
"""The value of each code of 4 bits: a sign, two bits of exponent, one of mantissa."""

E2M1_PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], 1)
"""The two values of each byte, of its lower half and of its upper half: [256, 2]."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of a model's weights, and the file that names several."""

WEIGHTS = ".safetensors .bin .pt .pth .ckpt .gguf .h5 .msgpack .npz .onnx .index.json".split()
"""Endings of files that may hold weights, or name such files."""

HANDLES = 16
"""Weight files that are open at a time, each mapped whole; a model may have hundreds."""

SAVE = "save the model with transformers' save_pretrained, which writes safetensors"


@dataclass(frozen=True)
class CheckpointEntry:
    """One tensor of a transformers checkpoint (`theirs`), and the parameters that it holds (`ours`).

    joined: the dimension along which the parameters are joined: 1 where they are stacks of experts.
    groups: 1 where the parameters follow one another; the number of heads where their rows alternate head by head, or
    of rows where they alternate row by row. expert: the one whose matrix it is, where the parameters hold those of all.
    """

    theirs: str
    ours: tuple[str, ...]
    groups: int = 1
    transposed: bool = False
    joined: int = 0
    expert: int | None = None

    def join(self, parts: list[Tensor]) -> Tensor:
        """Parameters -> checkpoint tensor."""
        if self.expert is not None:
            parts = [part[self.expert] for part in parts]
        row = self.joined
        whole = torch.cat([part.unflatten(row, (self.groups, -1)) for part in parts], row + 1).flatten(row, row + 1)
        return whole.mT.contiguous() if self.transposed else whole

    def take(self, whole: Tensor, name: str, infos: Mapping[str, ParameterInfo]) -> Tensor:
        """Checkpoint tensor -> the parameter `name`, or the matrix of one expert of it."""
        return self.take_rows(whole.mT if self.transposed else whole, name, infos)

    def take_rows(self, whole: Tensor, name: str, infos: Mapping[str, ParameterInfo]) -> Tensor:
        """The rows of the parameter `name` of a tensor that is not transposed."""
        row = self.joined
        rows = [self.part(infos[part])[row] // self.groups for part in self.ours]
        return whole.unflatten(row, (self.groups, -1)).split(rows, row + 1)[self.ours.index(name)].flatten(row, row + 1)

    def part(self, info: ParameterInfo) -> tuple[int, ...]:
        """Shape of what it holds of a parameter."""
        return info.shape if self.expert is None else info.shape[1:]

    def shape(self, infos: Mapping[str, ParameterInfo]) -> tuple[int, ...]:
        """Shape of the checkpoint tensor."""
        parts = [self.part(infos[name]) for name in self.ours]
        shape = list(parts[0])
        shape[self.joined] = sum(part[self.joined] for part in parts)
        if self.transposed:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)


def list_entries(spec: ModelSpec, infos: Mapping[str, ParameterInfo], stacked: bool = False) -> list[CheckpointEntry]:
    """Every tensor of the model's checkpoint, in the order of the layers; a tied head has no tensor of its own.

    stacked: whether a tensor holds the matrices of all experts, as in the memory of transformers 5.
    """
    family = FAMILIES[spec.family]
    rules = [(rule.theirs, rule.ours, rule) for rule in family.rules]
    rules += [
        (f"{family.layers}{index}.{rule.theirs}", tuple(f"layers.{index}.{name}" for name in rule.ours), rule)
        for index in range(spec.depth)
        for rule in (stacked and family.stacked_rules or family.layer_rules)
    ]
    return [
        entry
        for theirs, ours, rule in rules
        for kind in ("weight", "bias")
        if f"{ours[0]}.{kind}" in infos
        for entry in find_entries(spec, theirs, tuple(f"{name}.{kind}" for name in ours), rule, kind, infos)
    ]


def find_entries(
    spec: ModelSpec, theirs: str, ours: tuple[str, ...], rule: ModuleRule, kind: str, infos: Mapping[str, ParameterInfo]
) -> list[CheckpointEntry]:
    """The tensors of a rule in one place: one, or one for each expert."""
    if "*" in theirs:
        experts = range(infos[ours[0]].shape[0])
        return [
            CheckpointEntry(f"{theirs.replace('*', str(number))}.{kind}", ours, expert=number) for number in experts
        ]
    joined = int(infos[ours[0]].stacked)
    groups = infos[ours[0]].shape[joined] if rule.interleaved else spec.attention.heads if rule.per_head else 1
    name = theirs + {"weight": "", "bias": "_bias"}[kind] if rule.bare else f"{theirs}.{kind}"
    return [CheckpointEntry(name, ours, groups, rule.transposed and kind == "weight", joined)]


def list_balances(spec: ModelSpec, infos: Mapping[str, ParameterInfo]) -> dict[str, str]:
    """The biases of the choice of experts in a checkpoint: name there -> name of ours, the buffer of a router."""
    family = FAMILIES[spec.family]
    return {
        f"{family.layers}{index}.{family.balance}": f"layers.{index}.feed_forward.router.balance"
        for index in range(spec.depth)
        if family.balance and f"layers.{index}.feed_forward.router.weight" in infos
    }


class StoredTensors:
    """The tensors in the files of a transformers folder that transformers reads: `model.safetensors`, or without it the
    files that `model.safetensors.index.json` names. Files are memory-mapped.

    files: tensor name -> name of the file that holds it. notes: sentences on files and tensors that are not read, and
    on an index that contradicts its files. Raises `ConfigError`, which names the file.
    """

    def __init__(self, folder: str | Path, spec: ModelSpec):
        self.folder, self.tied = Path(folder).expanduser(), spec.tied
        # A type without a table has the usual outer names.
        self.family = FAMILIES.get(spec.family, FAMILIES["llama"])
        names = {rule.ours[0]: f"{rule.theirs}.weight" for rule in self.family.rules}
        self.embedding, self.head = names["embedding"], names["head"]
        self.handles: dict[str, Any] = {}
        self.notes: list[str] = []
        self.files = self.find_files()

    def find_files(self) -> dict[str, str]:
        try:
            check_links(self.folder)
        except (OSError, ConfigError) as error:
            raise self.error(str(error)) from error
        index = self.folder / INDEX
        listed: dict[str, str] = {}
        if (self.folder / SINGLE).is_file():
            read = [SINGLE]
        elif index.is_file():
            try:
                listed = read_json(index, {"weight_map": {str: str}}, SAVE)["weight_map"]
            except (OSError, ConfigError) as error:
                raise self.error(f"{INDEX} is not an index of safetensors files ({shorten_foreign(error)})") from error
            read = sorted(set(listed.values()))
        else:
            others = sorted(path.name for path in self.folder.glob("*.bin"))
            pickled = f" ({format_names(others)} may hold weights, but as a pickle, which can run code and is not read)"
            raise self.error(f"there is neither {SINGLE} nor {INDEX}{pickled if others else ''}; {SAVE}")
        found: dict[str, str] = {}
        for file in read:
            for name in self.open(file).keys():
                if name in found:
                    raise self.error(f"{on_one_line(name)} is in {found[name]} and in {file}; {SAVE}")
                found[name] = file
        self.note_unread({*read, INDEX} if listed else {*read})
        # Like transformers, trusts the files and not the index.
        if astray := [name for name in {**listed, **found} if listed and listed.get(name) != found.get(name)]:
            self.note(
                f"{INDEX} does not name the file that holds {format_names(astray)}; each tensor is read from the file "
                "that holds it"
            )
        return found

    def note_unread(self, read: set[str]) -> None:
        """Notes the files in the folder, and in the folders inside, that may hold weights and are not read."""
        paths = sorted({*self.folder.glob("*"), *self.folder.glob("*/*")})
        names = [path.relative_to(self.folder).as_posix() for path in paths if path.is_file()]
        unread = [name for name in names if name.endswith(tuple(WEIGHTS)) and name not in read]
        if unread:
            found = INDEX if INDEX in read else SINGLE
            self.note(f"the weights are those of {found}; not read: {format_names(unread)}")

    def has_own_head(self) -> bool:
        """Whether the head is stored beside the embedding with other values. transformers then keeps both, also where
        config.json says that they are one."""
        both = [self.stored_name(name) for name in (self.embedding, self.head)]
        if not all(name in self.files for name in both):
            return False
        slices = [self.stored_slice(name) for name in both]
        shape, other = (part.get_shape() for part in slices)
        if shape != other or not shape:
            return True  # `HFWeights` refuses the shape
        try:
            # By blocks of rows, because a whole vocabulary in fp32 takes gigabytes.
            rows = (slice(first, first + 4096) for first in range(0, shape[0], 4096))
            return not all(torch.equal(*(part[block].float() for part in slices)) for block in rows)
        except (SafetensorError, OSError) as error:
            raise self.error(f"{format_names(both)} cannot be read: {error}") from error

    def stored_slice(self, name: str) -> Any:
        """A stored tensor, not read yet."""
        try:
            return self.open(self.files[name]).get_slice(name)
        except SafetensorError as error:
            raise self.error(f"{self.files[name]}: {name} cannot be read: {error}") from error

    def open(self, file: str) -> Any:
        if file not in self.handles:
            if len(self.handles) >= HANDLES:
                del self.handles[next(iter(self.handles))]
            try:
                path = path_inside(self.folder, file)
                if not path.is_file():
                    raise ValueError("it is missing")
                self.handles[file] = safe_open(path, "pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise self.error(f"{on_one_line(file)} cannot be read: {shorten_foreign(error)}") from error
        return self.handles[file]

    def stored_name(self, name: str) -> str:
        """The name in the files: checkpoints of a bare base model (the published GPT-2) leave the prefix out. A tied
        embedding may be stored as the head alone."""
        short = name.removeprefix(self.family.base)
        if self.tied and name == self.embedding and not {name, short} & self.files.keys():
            return self.head
        return name if name in self.files else short

    def note(self, text: str) -> None:
        self.notes.append(self.message(text))

    def message(self, problem: str) -> str:
        return f"model.from_hf={self.folder}: {problem}"

    def error(self, problem: str) -> ConfigError:
        return ConfigError(self.message(problem))


class HFWeights(StoredTensors):
    """The weights of a transformers folder, each read when it is needed: `initial.fill_parameters(model,
    HFWeights(...))`.

    Construction checks that every tensor is there with its shape, and that the files hold no others; so errors come
    before any memory is allocated. Raises `ConfigError` naming the file and the tensors.
    """

    def __init__(self, folder: str | Path, spec: ModelSpec):
        super().__init__(folder, spec)
        self.spec = spec
        self.infos = declare_parameters(spec)
        self.balances = {ours: theirs for theirs, ours in list_balances(spec, self.infos).items()}
        names = [rule.theirs for rule in self.family.stacked_rules if rule.bare]
        stacked = any(name.endswith(tuple(names)) for name in self.files) if names else False
        self.entries: dict[str, list[CheckpointEntry]] = {}
        for entry in list_entries(spec, self.infos, stacked):
            for name in entry.ours:
                self.entries.setdefault(name, []).append(entry)
        self.check()

    def __call__(self, name: str, info: ParameterInfo) -> Tensor:
        """The whole fp32 parameter `name`."""
        name = "embedding.weight" if self.tied and name == "head.weight" else name
        parts = [self.read_part(entry, name) for entry in self.entries[name]]
        return parts[0] if self.entries[name][0].expert is None else torch.stack(parts)

    def experts(self, name: str, info: ParameterInfo, numbers: range) -> Tensor:
        """Some of a stack of experts; where files hold them one by one, the others are not read."""
        entries = self.entries[name]
        if entries[0].expert is None or not numbers:
            return self(name, info)[numbers.start : numbers.stop]
        return torch.stack([self.read_part(entries[number], name) for number in numbers])

    def tensor(self, name: str) -> Tensor:
        """A parameter, or what the router of experts keeps besides."""
        if name in self.balances:
            return self.read(self.balances[name]).float()
        return self(name, self.infos[name])

    def read_part(self, entry: CheckpointEntry, name: str) -> Tensor:
        """What a checkpoint tensor holds of a parameter, in fp32."""
        if not self.is_packed(entry):
            return entry.take(self.read(entry.theirs), name, self.infos).float()
        # By experts: indices of the values take several times the memory of the packed ones.
        packed = [entry.take_rows(self.read(entry.theirs + part), name, self.infos) for part in PACKED]
        return torch.stack([dequantise_mxfp4(blocks, scales) for blocks, scales in zip(*packed)])

    def is_packed(self, entry: CheckpointEntry) -> bool:
        """Whether a tensor is stored in MXFP4, as two tensors."""
        return bool(self.family.quantised) and self.stored_name(entry.theirs + PACKED[0]) in self.files

    def stored_shapes(self, entry: CheckpointEntry) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Name -> shape and possible types of the stored tensors that a tensor of the model is made of."""
        shape = entry.shape(self.infos)
        if not self.is_packed(entry):
            return {entry.theirs: (shape, STORED)}
        *rows, inputs, outputs = shape
        if inputs % MXFP4_BLOCK:
            raise self.error(
                f"{entry.theirs + PACKED[0]} holds blocks of {MXFP4_BLOCK} numbers, but config.json asks for rows of "
                f"{inputs}; {SAVE}"
            )
        scales = (*rows, outputs, inputs // MXFP4_BLOCK)
        return {
            entry.theirs + name: (size, ("U8",)) for name, size in zip(PACKED, ((*scales, MXFP4_BLOCK // 2), scales))
        }

    def read(self, name: str) -> Tensor:
        stored = self.stored_name(name)
        try:
            return self.open(self.files[stored]).get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise self.error(f"{self.files[stored]}: {stored} cannot be read: {error}") from error

    def check(self) -> None:
        shapes = {
            name: facts
            for entries in self.entries.values()
            for entry in entries
            for name, facts in self.stored_shapes(entry).items()
        }
        allowed = {self.head} if self.tied else set()
        problems = []
        if buffers := [name for name in self.files if BUFFERS.search(name)]:
            self.note(f"{format_names(buffers)} not read, as config.json says what they hold")
        sizes = router_shapes(self.spec)
        shapes |= {theirs: (sizes[ours], STORED) for ours, theirs in self.balances.items()}
        if predicting := self.list_predicting():
            self.note(
                f"{format_names(predicting)} not read: the layers behind the {self.spec.depth} of the model predict "
                "further tokens"
            )
        stored = {self.stored_name(name) for name in shapes}
        if missing := [name for name in shapes if self.stored_name(name) not in self.files]:
            problems.append(f"{format_names(missing)} missing from the weights")
        if extra := [name for name in self.files if name not in stored | allowed | {*buffers, *predicting}]:
            problems.append(
                f"{format_names(extra)} in the weights, but not part of the model that config.json describes"
            )
        for name, facts in shapes.items():
            name = self.stored_name(name)
            if name in self.files:
                problems += self.differences(name, *facts)
        if problems:
            raise ConfigError([self.message(problem) for problem in problems[:5]])

    def list_predicting(self) -> list[str]:
        """The tensors of layers behind the last one that predict further tokens."""
        if not self.family.predicts:
            return []
        layers: dict[str, list[str]] = {}
        for name in self.files:
            where, number, *_ = f"{name.removeprefix(self.family.base)}..".split(".")
            if where == "layers" and number.isdecimal() and int(number) >= self.spec.depth:
                layers.setdefault(number, []).append(name)
        # Each has this projection, of a hidden state beside an embedding. A layer without it is one that config.json
        # does not count.
        return [name for names in layers.values() if any("eh_proj" in name for name in names) for name in names]

    def differences(self, name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> Iterator[str]:
        stored = self.stored_slice(name)
        if (found := tuple(stored.get_shape())) != shape:
            yield f"{self.files[name]}: {name} has shape {list(found)}, but config.json asks for {list(shape)}"
        if (kind := stored.get_dtype()) not in types:
            yield f"{self.files[name]}: {name} holds {kind}; supported: {', '.join(types)}"


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The fp32 values of MXFP4 (OCP Microscaling Formats 1.0): each block of 32 numbers in e2m1 has a power of two.

    blocks: uint8 [..., blocks, 16], two numbers in a byte, the first one in its lower half. scales: uint8 [...,
    blocks], exponents plus 127. Result: [..., 32 blocks]."""
    return torch.ldexp(E2M1_PAIRS[blocks.int()].flatten(-2), scales[..., None].int() - 127).flatten(-2)


def format_names(names: list[str]) -> str:
    """The first names of a list, and how many there are."""
    return ", ".join(map(on_one_line, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def write_weights(
    folder: Path,
    spec: ModelSpec,
    read: Callable[[str], Tensor],
    dtype: torch.dtype = torch.float32,
    shard_size: int | str = "5GB",
) -> None:
    """Writes the safetensors of a model into `folder`. read: whole parameters by global name; at most one file's
    tensors are in memory at a time."""
    infos = declare_parameters(spec)
    content = {e.theirs: e for e in list_entries(spec, infos)}
    balances, sizes = list_balances(spec, infos), router_shapes(spec)
    shapes = {name: torch.empty(e.shape(infos), dtype=dtype, device="meta") for name, e in content.items()}
    shapes |= {name: torch.empty(sizes[ours], device="meta") for name, ours in balances.items()}
    read_once = lru_cache(1)(lambda name: read(name).detach().cpu().to(dtype))  # the experts of a matrix come in turn

    def value(name: str) -> Tensor:
        if name in balances:
            return read(balances[name]).detach().cpu().float()
        return content[name].join([read_once(part) for part in content[name].ours])

    write_files(folder, shapes, value, shard_size)


def write_files(
    folder: Path, shapes: Mapping[str, Tensor], value: Callable[[str], Tensor], shard_size: int | str
) -> None:
    """Writes tensors as safetensors, in several files with an index where one would be larger than `shard_size`.
    shapes: name -> a tensor on the meta device. value: the tensor of a name."""
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(dict(shapes), max_shard_size=shard_size)
    for file, names in split.filename_to_tensors.items():
        save_file({name: value(name) for name in names}, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
