"""Weights of models that run by transformers' own code: fresh ones by the code's own initialisation, and stored ones.

Files have transformers' names, and often a matrix for each expert where the code has one for all. transformers' own
table of conversions joins and splits them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from trainer.config.model import CodeSpec
from trainer.hf.code import CodeInitializer, build_code
from trainer.hf.weights import BUFFERS, STORED, CheckpointEntry, StoredTensors, format_names, write_files
from trainer.planning.parameters import ParameterInfo, declare_parameters, router_shapes
from trainer.util.reading import shorten_foreign


def code_name(name: str, spec: CodeSpec) -> str:
    """The name that transformers has for a parameter or buffer of ours."""
    paths = spec.transformers["paths"]
    if name in paths:
        return paths[name]
    part = next(part for part in paths if name.startswith(f"{part}."))
    return f"{paths[part]}.{name[len(part) + 1 :]}"


def list_code_entries(spec: CodeSpec, infos: Mapping[str, ParameterInfo]) -> list[CheckpointEntry]:
    """The parameters of a model, without adapters, by the names of the code."""
    return [CheckpointEntry(code_name(name, spec), (name,)) for name, info in infos.items() if not info.adapter]


def number_parts(name: str) -> list[tuple[int, str]]:
    """A key that sorts names by the numbers in them: experts.2 comes before experts.10."""
    return [(int(part) if part.isdecimal() else -1, part) for part in name.split(".")]


class CodeInitialWeights:
    """Fresh weights by the `_init_weights` of transformers' code. Each module is drawn whole by itself, seeded by its
    name, and each expert of a stack by the stack's name and the number of the expert. So they are equal under all
    plans, and a rank draws the experts that it holds without the others."""

    def __init__(self, spec: CodeSpec, seed: int):
        self.spec, self.seed, self.fill = spec, seed, CodeInitializer(spec).fill
        self.draw_module = lru_cache(2)(partial(self.fill, seed=seed))  # the parameters of a module come in turn

    def __call__(self, name: str, info: ParameterInfo) -> Tensor:
        """The whole fp32 parameter `name`, on the CPU."""
        if info.stacked:
            return self.experts(name, info, range(info.shape[0]))
        module, _, key = code_name(name, self.spec).rpartition(".")
        if name == "head.bias":  # files may have another name for it
            module = self.spec.transformers["paths"]["head"]
        return self.draw_module(module)[key]

    def experts(self, name: str, info: ParameterInfo, numbers: range) -> Tensor:
        """Some of a stack of experts, without the others: [len(numbers), ...]."""
        module, _, key = code_name(name, self.spec).rpartition(".")
        shapes = {key: (1, *info.shape[1:])}
        drawn = [self.fill(module, self.seed, f"{module}.{key}/{number}", shapes)[key] for number in numbers]
        return torch.cat([torch.empty(0, *info.shape[1:]), *drawn])  # a rank may hold none


@dataclass
class ConvertedTensors:
    """The stored tensors that make one tensor of the code, or several. converter: None where it is the stored one.
    stored: (name in the files, pattern of the converter that it matched)."""

    converter: WeightConverter | None
    stored: list[tuple[str, str | None]] = field(default_factory=list)

    def make(self, target: str, read: Callable[[str], Tensor], causal: PreTrainedModel) -> dict[str, Tensor]:
        """The tensors of the code by name. read: a stored tensor."""
        if self.converter is None:
            return {target: read(self.stored[0][0])}
        converter = deepcopy(self.converter)
        for name, pattern in self.stored:
            converter.add_tensor(target, name, pattern, read(name))
        made = converter.convert(target, model=causal, config=causal.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def choose_experts(self, numbers: range, count: int) -> ConvertedTensors | None:
        """What makes some of `count` experts, or None where files do not hold them one by one."""
        places, chosen = Counter[str | None](), ConvertedTensors(self.converter)
        for name, pattern in self.stored:  # in the order of the experts
            if places[pattern] in numbers:
                chosen.stored.append((name, pattern))
            places[pattern] += 1
        return chosen if {*places.values()} == {count} else None


class CodeWeights(StoredTensors):
    """The weights of a transformers folder for a model that runs by transformers' code, each read when it is needed.

    Construction compares names and shapes with the model. Raises `ConfigError` naming file and tensors."""

    def __init__(self, folder: str | Path, spec: CodeSpec):
        super().__init__(folder, spec)
        self.spec, self.causal = spec, build_code(spec)
        self.prefix = self.causal.base_model_prefix
        self.embedding, self.head = (code_name(name, self.spec) for name in ("embedding.weight", "head.weight"))
        self.infos, self.balances = declare_parameters(spec), {name: name for name in router_shapes(spec)}
        self.groups: dict[str, ConvertedTensors] = {}
        self.group_of: dict[str, str] = {}
        self.collect()
        self.read_group = lru_cache(2)(self.make)

    def collect(self) -> None:
        """Finds out which stored tensors make which of the code, and checks names and shapes."""
        mapping = get_model_conversion_mapping(self.causal)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        expected = self.causal.state_dict()
        for stored in sorted(self.files, key=number_parts):  # experts are stacked in this order
            target, pattern = rename_source_key(stored, renamings, converters, self.prefix, expected)
            group = self.groups.setdefault(target, ConvertedTensors(by_pattern[pattern] if pattern else None))
            group.stored.append((stored, pattern))
        own = {name: info for name, info in self.infos.items() if not info.adapter}
        shapes = {code_name(name, self.spec): tuple(info.shape) for name, info in own.items()}
        shapes |= {code_name(name, self.spec): shape for name, shape in router_shapes(self.spec).items()}
        found: dict[str, tuple[int, ...]] = {}
        for target, group in self.groups.items():
            try:
                made = group.make(target, self.outline, self.causal)
            except Exception as error:  # of whatever kind transformers raises for what it cannot join
                names = format_names([name for name, _ in group.stored])
                raise self.error(f"{names} cannot be joined to {target}: {shorten_foreign(error)}") from error
            self.group_of |= dict.fromkeys(made, target)
            found |= {name: tuple(value.shape) for name, value in made.items()}
        if self.spec.tied and self.embedding not in found and self.head in found:
            self.group_of[self.embedding], found[self.embedding] = self.head, found[self.head]
        if missing := [name for name in shapes if name not in found]:
            raise self.error(f"{format_names(missing)} missing from the weights")
        extra = [name for name in found if name not in shapes and not (self.spec.tied and name == self.head)]
        known = [name for name in extra if BUFFERS.search(name)]
        if known:
            self.note(f"{format_names(known)} not read, as config.json says what they hold")
        if extra := [name for name in extra if name not in known]:
            raise self.error(f"{format_names(extra)} in the weights, but not part of the model of config.json")
        if wrong := [name for name in shapes if found[name] != shapes[name]]:
            name = wrong[0]
            raise self.error(f"{name} has shape {list(found[name])}, but config.json asks for {list(shapes[name])}")

    def outline(self, name: str) -> Tensor:
        """A stored tensor without values."""
        stored = self.stored_slice(name)
        if (kind := stored.get_dtype()) not in STORED:
            raise self.error(f"{self.files[name]}: {name} holds {kind}; supported: {', '.join(STORED)}")
        return torch.empty(stored.get_shape(), device="meta")

    def __call__(self, name: str, info: ParameterInfo) -> Tensor:
        """The whole fp32 parameter `name`."""
        return self.tensor("embedding.weight" if self.spec.tied and name == "head.weight" else name)

    def experts(self, name: str, info: ParameterInfo, numbers: range) -> Tensor:
        """Some of a stack of experts; where files hold them one by one, the others are not read."""
        target = code_name(name, self.spec)
        group = self.groups[self.group_of[target]]
        chosen = group.choose_experts(numbers, info.shape[0]) if numbers else None
        if chosen is None:
            return self(name, info)[numbers.start : numbers.stop]
        return chosen.make(self.group_of[target], self.read_stored, self.causal)[target].float()

    def tensor(self, name: str) -> Tensor:
        """A parameter, or a buffer that checkpoints hold, in fp32."""
        name = code_name(name, self.spec)
        made = self.read_group(self.group_of[name])
        return made[name if name in made else self.head].float()

    def make(self, target: str) -> dict[str, Tensor]:
        return self.groups[target].make(target, self.read_stored, self.causal)

    def read_stored(self, name: str) -> Tensor:
        return self.open(self.files[name]).get_tensor(name)


def write_code_weights(
    folder: Path, spec: CodeSpec, read: Callable[[str], Tensor], dtype: torch.dtype, shard_size: int | str
) -> None:
    """Writes the safetensors of a model by the names of published checkpoints. read: whole parameters and buffers by
    our names. The tensors of one layer and of one file are in memory at a time."""
    causal = build_code(spec)
    shapes: dict[str, tuple[int, ...]] = {name: info.shape for name, info in declare_parameters(spec).items()}
    kept = router_shapes(spec)
    groups: dict[str, list[str]] = {}
    for name in [*shapes, *kept]:
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)

    def revert(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = {code_name(name, spec): value for name, value in values.items()}
        return revert_weight_conversion(causal, named)

    def typed(name: str) -> torch.dtype:
        return torch.float32 if name in kept else dtype

    written: dict[str, Any] = {}
    group_of: dict[str, str] = {}
    for key, names in groups.items():
        outlines = {n: torch.empty((shapes | kept)[n], dtype=typed(n), device="meta") for n in names}
        made = revert(outlines)
        written |= made
        group_of |= dict.fromkeys(made, key)

    @lru_cache(1)
    def read_group(key: str) -> dict[str, Tensor]:
        return revert({name: read(name).detach().cpu().to(typed(name)) for name in groups[key]})

    write_files(folder, written, lambda name: read_group(group_of[name])[name].contiguous(), shard_size)
