"""Low-rank adapters as PEFT saves them, in and out: a folder with adapter_config.json and adapter_model.safetensors.

PEFT names modules as transformers does. Where one of its modules holds several of ours, as the fused projections of
Phi-3 do, its adapter holds those of all of them: A has the rows of each, and B is block-diagonal. That is exact, with a
rank that is so many times as large.

The matrices of all experts are one parameter, which `target_parameters` names. Its adapter is two matrices as well, A
[experts x rank, inputs] and B [outputs, rank x experts]."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.config import ConfigError
from trainer.config.model import AdapterSpec, CodeSpec, ModelSpec
from trainer.hf.weights import CheckpointEntry, HFWeights, format_names, list_entries
from trainer.model.initial import AdaptedWeights, Weights
from trainer.planning.parameters import DOWN, UP, ParameterInfo, adapt_table, can_adapt, declare_parameters
from trainer.util.reading import check_links, on_one_line, path_inside, read_json, shorten_foreign

if TYPE_CHECKING:
    from trainer.hf.code_weights import CodeWeights

ADAPTER, TENSORS = "adapter_config.json", "adapter_model.safetensors"

PREFIX = "base_model.model."
"""What PEFT puts in front of the names of modules."""

ANY_MODULE = r".*\."
"""What PEFT puts in front of the names of parameters in the patterns that it makes for experts."""

SAVE = "save the adapter with PEFT's save_pretrained"

READ = {
    *(
        "base_model_name_or_path",
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "bias",
        "init_lora_weights",
    ),
    *("rank_pattern", "alpha_pattern", "lora_dropout", "fan_in_fan_out", "target_parameters"),
}
"""Options of adapter_config.json that are read here."""

IMPLIED = {"target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"}
"""Options that say which modules there are adapters of, as the tensors do too."""

OF_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")
"""Ends of modules that PEFT takes for experts in the `target_modules` of a mixture, be they of a dense layer or of a
shared block. As `target_parameters` their weights are what they are."""

OF_PEFT = {
    *("auto_mapping", "revision", "inference_mode", "peft_version", "megatron_core", "runtime_config"),
    *("qalora_group_size", "ensure_weight_tying"),
}
"""Options that say nothing of what is computed, or are read beside others that are refused."""


def holds_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter, and not a model."""
    return (Path(folder).expanduser() / ADAPTER).is_file()


def find_base(folder: str | Path) -> Path:
    """The folder of the model that the adapter in `folder` was trained on; `folder` itself where it holds a model.

    Raises `ConfigError` where that is no folder of this machine."""
    folder = Path(folder).expanduser()
    if not holds_adapter(folder):
        return folder
    if (folder / "config.json").is_file() and list(folder.glob("model*.safetensors")):
        raise ConfigError(
            f"model.from_hf={folder} holds the weights of a model and {ADAPTER}; remove {ADAPTER} where the weights "
            "have the adapter already, or the weights"
        )
    name = read_options(folder)["base_model_name_or_path"]
    base = Path(name).expanduser()
    if not (base / "config.json").is_file() or holds_adapter(base):
        raise ConfigError(
            f"model.from_hf={folder}: {ADAPTER} is for the model {on_one_line(name)}, which is no folder with a model "
            "here; download it (hf download NAME --local-dir DIR) and write DIR as base_model_name_or_path"
        )
    return base


def read_options(folder: Path) -> dict[str, Any]:
    """adapter_config.json with defaults. Raises `ConfigError`, which names the option that is not supported."""
    numbers, mapping, names = (int, float), (dict, type(None)), (list, type(None))
    shape = {"base_model_name_or_path": str, "r": int, "lora_alpha": numbers, "peft_type": str}
    shape |= {"rank_pattern": mapping, "alpha_pattern": mapping, "target_parameters": names}
    try:
        check_links(folder)
        options = read_json(folder / ADAPTER, shape, SAVE)
    except (OSError, ConfigError) as error:
        raise ConfigError(f"model.from_hf={folder}: {ADAPTER} cannot be read: {shorten_foreign(error)}") from error
    problems = list(find_unsupported(options))
    if problems:
        raise ConfigError([f"model.from_hf={folder}: {ADAPTER}: {problem}" for problem in problems])
    return {"use_rslora": False, "lora_dropout": 0.0, **options}


def find_unsupported(options: Mapping[str, Any]) -> Iterator[str]:
    """The options with which an adapter computes something else than an adapter does here."""
    needed: dict[str, tuple[Any, ...]] = {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "bias": ("none", None),
    }
    needed |= {"init_lora_weights": (True, False, "gaussian", None), "use_rslora": (True, False, None)}
    for name, values in needed.items():
        if options.get(name) not in values:
            yield f"{name}={shorten_foreign(options[name])} is not supported; supported: {values[0]}"
    for name, value in options.items():
        # An option of a later version, or another kind of adapter. PEFT writes its default where it is not used.
        if name not in READ | IMPLIED | OF_PEFT and value not in (None, False, "", [], {}):
            yield f"{on_one_line(name)}={shorten_foreign(value)} is not supported; supported: leaving it out"
    for name in options.get("alpha_pattern") or ():
        # A pattern of ranks that is not matched as in PEFT contradicts the shapes of tensors.
        if re.search(r"[^\w.]", name.lstrip("^").removeprefix(ANY_MODULE)):
            yield f"alpha_pattern has {shorten_foreign(name)}; supported: names of modules, and what they end in"
    if not 1 <= options["r"] <= 1 << 16:
        yield f"r={options['r']} is no rank; supported: from 1 on"


def match_module(patterns: Mapping[str, Any] | None, module: str, default: float) -> float:
    """The number that `rank_pattern` or `alpha_pattern` has for a module. Names are compared as text: what PEFT takes
    for a regular expression is a name, or the end of one, in what it writes itself."""
    for name, value in (patterns or {}).items():
        if f".{module}".endswith(f".{name.lstrip('^').removeprefix(ANY_MODULE)}") and type(value) in (int, float):
            return value
    return default


def list_modules(spec: ModelSpec, infos: Mapping[str, ParameterInfo]) -> list[CheckpointEntry]:
    """The parameters of a model, without adapters, by the names that PEFT has for them."""
    if not isinstance(spec, CodeSpec):
        return list_entries(spec, infos, stacked=True)
    from trainer.hf.code_weights import list_code_entries

    return list_code_entries(spec, infos)


def find_places(entries: Iterable[CheckpointEntry], adapted: Callable[[CheckpointEntry], bool]) -> dict[str, str]:
    """Name of a parameter -> module in which PEFT keeps its adapter. PEFT wraps a module for each of its parameters
    that has an adapter, in their order, and calls what it wraps `base_layer`."""
    places, wrapped = dict[str, str](), Counter[str]()
    for entry in reversed([*entries]):
        if adapted(entry):
            module = entry.theirs.rpartition(".")[0]
            places[entry.theirs] = module + ".base_layer" * wrapped[module]
            wrapped[module] += 1
    return places


class PeftWeights:
    """The tensors of an adapter by the names of this project, and the `AdapterSpec` that they belong to.

    spec: of the model without the adapter. Construction reads all tensors, which are small. Raises `ConfigError` for
    tensors that are missing, that no module of the model has, or whose ranks or scales differ."""

    def __init__(self, folder: str | Path, spec: ModelSpec):
        self.folder, self.options = Path(folder).expanduser(), read_options(Path(folder).expanduser())
        self.infos = declare_parameters(replace(spec, adapter=AdapterSpec()))
        self.values: dict[str, Tensor] = {}
        self.notes: list[str] = []
        stored = self.read_tensors()
        self.settings: dict[str, tuple[int, float]] = {}
        trained: list[str] = []
        entries = list_modules(spec, self.infos)
        places = find_places(entries, self.is_target)
        for entry in entries:
            module = entry.theirs.removesuffix(".weight")
            place = places.get(entry.theirs, module)
            pair = [stored.pop(f"{PREFIX}{place}.lora_{letter}.weight", None) for letter in "AB"]
            whole = stored.pop(PREFIX + entry.theirs, None)
            down, up = pair
            if down is not None and up is not None:
                self.take_pair(entry, module, down, up)
            elif down is not None or up is not None:
                raise self.error(f"{on_one_line(module)} has one of lora_A and lora_B; {SAVE}")
            if whole is not None:
                if tuple(whole.shape) != entry.shape(self.infos):
                    raise self.error(f"{entry.theirs} has shape {list(whole.shape)}, the model's is another")
                self.values |= {name: entry.take(whole, name, self.infos).float() for name in entry.ours}
                trained += entry.ours
        if spec.tied and "embedding.weight" in trained:
            raise self.error(
                "it has an embedding of its own, which PEFT parts from the head that the model ties to it; merge the "
                "adapter with PEFT (merge_and_unload), and name the merged model"
            )
        if stored:
            raise self.error(f"{format_names(list(stored))}: the model has no such modules, or no adapters for them")
        if not self.settings:
            raise self.error("there is no lora_A and lora_B")
        if len(found := set(self.settings.values())) > 1:
            (one, first), (other, second) = list({value: key for key, value in self.settings.items()}.items())[:2]
            raise self.error(
                f"{first} has rank {one[0]} and scale {one[1]:g}, {second} rank {other[0]} and scale {other[1]:g}; "
                "supported: one rank and one scale for all"
            )
        [(rank, factor)] = found
        root = bool(self.options["use_rslora"])
        alpha = float(f"{factor * (rank**0.5 if root else rank):.12g}")
        self.adapter = AdapterSpec(rank, alpha, "root" if root else "rank", self.name_targets(), trained)
        if dropout := self.options["lora_dropout"]:
            self.notes.append(f"{self.folder / ADAPTER}: lora_dropout={dropout} is left out: adapters have no dropout")

    def is_target(self, entry: CheckpointEntry) -> bool:
        """Whether a parameter may have an adapter: a stack of matrices only where `target_parameters` names it."""
        if not entry.joined:
            return entry.theirs.endswith(".weight")
        targets = self.options.get("target_parameters") or []
        return any(f".{entry.theirs}".endswith(f".{name}") for name in targets)

    def read_tensors(self) -> dict[str, Tensor]:
        try:
            path = path_inside(self.folder, TENSORS)
            if not path.is_file():  # a pipe would be waited for
                raise ValueError("it is missing")
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError, ValueError) as error:
            raise self.error(f"{TENSORS} cannot be read: {shorten_foreign(error)}; {SAVE}") from error

    def take_pair(self, entry: CheckpointEntry, module: str, down: Tensor, up: Tensor) -> None:
        """Notes the adapter of one of their modules."""
        parts = entry.ours
        *stack, _, inputs = self.infos[parts[0]].shape
        outputs, experts = sum(self.infos[part].shape[-2] for part in parts), stack[0] if stack else 1
        rank = match_module(self.options.get("rank_pattern"), module, self.options["r"])
        if not all(can_adapt(self.infos[part]) for part in parts):
            raise self.error(f"{on_one_line(module)}: adapters of routers are not read")
        wanted = [rank * experts, inputs], [outputs, rank * experts]
        if (list(down.shape), list(up.shape)) != wanted:
            raise self.error(
                f"{on_one_line(module)} has lora_A {list(down.shape)} and lora_B {list(up.shape)}, rank {rank:g} and "
                f"the model want {wanted[0]} and {wanted[1]}"
            )
        if stack:
            down, up = down.unflatten(0, (experts, -1)), up.unflatten(1, (-1, experts)).permute(2, 0, 1)
        alpha = match_module(self.options.get("alpha_pattern"), module, self.options["lora_alpha"])
        # The ranks of fused modules are others, and so is the last bit of the factor.
        factor = float(f"{alpha / (rank**0.5 if self.options['use_rslora'] else rank):.12g}")
        plain, count = replace(entry, transposed=False), up.shape[-1]
        rows = {part: plain.take_rows(up, part, self.infos) for part in parts}
        used = [part for part in parts if rows[part].any()] or list(parts)
        block = count // len(used)
        blocks = {part: slice(place * block, (place + 1) * block) for place, part in enumerate(used)}
        diagonal = count == len(used) * self.options["r"] and all(
            torch.count_nonzero(rows[part]) == torch.count_nonzero(rows[part][..., place])
            for part, place in blocks.items()
        )
        for part in used:
            place = blocks[part] if diagonal else slice(None)
            name = part.removesuffix(".weight")
            self.values[f"{name}.{DOWN}"] = down[..., place, :].float()
            self.values[f"{name}.{UP}"] = rows[part][..., place].float()
            self.settings[name] = block if diagonal else count, factor

    def name_targets(self) -> list[str]:
        """Patterns for the modules that have adapters: by block where all layers have one there."""
        everywhere: dict[str, set[str]] = {}
        for name, info in self.infos.items():
            if can_adapt(info):
                module = name.removesuffix(".weight")
                everywhere.setdefault(module.split(".", 2)[2], set()).add(module)
        found: dict[str, None] = {}
        for module in self.settings:
            end = module.split(".", 2)[2]
            found[f"layers.*.{end}" if everywhere[end] <= self.settings.keys() else module] = None
        return list(found)

    def __call__(self, name: str, info: ParameterInfo) -> Tensor:
        return self.values[name]

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"model.from_hf={self.folder}: {problem}")


def join_adapters(spec: ModelSpec, given: AdapterSpec) -> AdapterSpec:
    """The adapters of a model that is read, of which a folder may hold some (`spec.adapter`) and settings may ask for
    some (`given`). Raises `ConfigError` where they are others."""
    stored = spec.adapter
    if not stored.rank:
        return given
    if not given.rank:
        for name in ("alpha", "scale", "targets", "trained"):
            if getattr(given, name) != getattr(AdapterSpec(), name):
                raise ConfigError(
                    f"model.adapter.{name}={getattr(given, name)} has no effect with model.adapter.rank=0, where the "
                    f"adapter stays as the folder has it; set model.adapter.rank={stored.rank}, or leave it out"
                )
        return replace(stored, weights=given.weights)
    plain = declare_parameters(replace(spec, adapter=AdapterSpec()))
    tables = [adapt_table(replace(one, trained=["*"]), plain) for one in (stored, given)]
    if tables[0] != tables[1] or abs(stored.factor - given.factor) > 1e-9 * stored.factor:
        raise ConfigError(
            f"model.adapter.rank={given.rank} alpha={given.alpha:g} scale={given.scale} targets={given.targets} "
            f"are not those of the adapter that model.from_hf names (rank={stored.rank} alpha={stored.alpha:g} "
            f"scale={stored.scale} targets={stored.targets}); leave them out"
        )
    return replace(given, trained=[*dict.fromkeys([*stored.trained, *given.trained])])


def stored_weights(folder: str | Path, spec: ModelSpec) -> HFWeights | CodeWeights:
    """The weights in a transformers folder for the model that `spec_from_hf` has found in it. Raises `ConfigError`."""
    if isinstance(spec, CodeSpec):
        from trainer.hf.code_weights import CodeWeights

        return CodeWeights(folder, spec)
    return HFWeights(folder, spec)


def open_weights(folder: str | Path, spec: ModelSpec, drawn: Weights | None = None) -> tuple[Weights, list[str]]:
    """The weights of a transformers folder, or of a folder with an adapter and of the model it was trained on; and
    notes on them. drawn: gives the adapters that no folder holds, for a model that is to get some."""
    weights = stored_weights(find_base(folder), spec)
    if holds_adapter(folder):
        adapter = PeftWeights(folder, spec)
        return AdaptedWeights(weights, adapter, adapter.values), [*weights.notes, *adapter.notes]
    return weights if drawn is None else AdaptedWeights(weights, drawn), weights.notes


# Adapters as a folder that PEFT opens.


def write_adapter(
    folder: Path, spec: ModelSpec, read: Any, base: str | Path, dtype: torch.dtype = torch.float32
) -> list[str]:
    """Writes the adapters of a model, and the parameters that are trained beside them, into `folder`. read: whole
    parameters by global name; base: the folder of the model. Returns messages. Raises `ConfigError` where PEFT cannot
    hold them."""
    adapter, infos = spec.adapter, declare_parameters(spec)
    tensors: dict[str, Tensor] = {}
    ranks, alphas = dict[str, int](), dict[str, float]()
    adapted, others, saved = list[str](), list[str](), list[str]()
    parameters, weights, transposed = dict[bool, list[str]]({True: [], False: []}), list[str](), set[bool]()
    mixture = any(info.stacked for info in infos.values())

    def store(name: str, value: Tensor) -> None:
        tensors[PREFIX + name] = value.detach().cpu().to(dtype).contiguous()

    def choose(entry: CheckpointEntry) -> list[str]:
        """The modules of ours in a parameter that have adapters."""
        return [part for name in entry.ours if f"{(part := name.removesuffix('.weight'))}.{DOWN}" in infos]

    entries = list_modules(spec, infos)
    places = find_places(entries, lambda entry: bool(choose(entry)))
    for entry in entries:
        module, _, kind = entry.theirs.rpartition(".")
        parts, stacked = [name.removesuffix(".weight") for name in entry.ours], infos[entry.ours[0]].stacked
        chosen = choose(entry)
        if trained := [name for name in entry.ours if infos[name].trained]:
            # PEFT saves a module whole: of experts, all their parameters.
            owners = tuple(name.rsplit(".", 1 + stacked)[0] + "." for name in entry.ours)
            if any(info.adapter and name.startswith(owners) for name, info in infos.items()):
                raise ConfigError(
                    f"form=adapter: {trained[0]} is trained and has an adapter, which a PEFT folder cannot hold; set "
                    "form=merged"
                )
            if spec.tied and trained[0] == "embedding.weight":
                raise ConfigError(
                    "form=adapter: embedding.weight is trained and tied to the head, which a PEFT folder would part; "
                    "set form=merged"
                )
            store(entry.theirs, entry.join([read(name) for name in entry.ours]))
            saved.append(module)
        if stacked and can_adapt(infos[entry.ours[0]]):
            parameters[bool(chosen)].append(entry.theirs)
        if chosen:
            down = torch.cat([read(f"{part}.{DOWN}") for part in chosen], -2)
            up = replace(entry, transposed=False).join(list(spread_blocks(parts, chosen, infos, read)))
            if stacked:
                down, up = down.flatten(0, 1), up.permute(1, 2, 0).flatten(1)
            elif mixture and module.endswith(OF_EXPERTS):
                weights.append(entry.theirs)
            else:
                adapted.append(module)
                transposed.add(entry.transposed)
            store(f"{places[entry.theirs]}.lora_A.weight", down)
            store(f"{places[entry.theirs]}.lora_B.weight", up)
            if (count := len(chosen)) > 1:
                name = entry.theirs.removesuffix(".weight")
                ranks[name] = count * adapter.rank
                alphas[name] = adapter.alpha * (count if adapter.scale == "rank" else count**0.5)
        elif kind == "weight":
            others.append(module)
    options = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        "use_rslora": adapter.scale == "root",
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": True in transposed,
        "target_modules": shorten_modules(adapted, others),
        "target_parameters": [*shorten_modules(parameters[True], parameters[False]), *weights] or None,
        "modules_to_save": list(dict.fromkeys(saved)) or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "inference_mode": True,
    }
    save_file(tensors, folder / TENSORS, {"format": "pt"})
    (folder / ADAPTER).write_text(json.dumps(options, indent=2) + "\n")
    if not saved:
        return []
    return [f"{format_names(saved)} are saved whole (modules_to_save), which servers of adapters may not load"]


def spread_blocks(
    parts: list[str], chosen: list[str], infos: Mapping[str, ParameterInfo], read: Any
) -> Iterator[Tensor]:
    """The rows of B of each part of a fused module: its own B in the columns of its own A, zeros elsewhere."""
    for part in parts:
        if part not in chosen:
            *rows, _ = infos[f"{part}.weight"].shape
            yield torch.zeros(*rows, infos[f"{chosen[0]}.{UP}"].shape[-1] * len(chosen))
            continue
        up = read(f"{part}.{UP}").float()
        place = chosen.index(part)
        left, right = place * up.shape[-1], (len(chosen) - 1 - place) * up.shape[-1]
        yield torch.nn.functional.pad(up, (left, right))


def shorten_modules(adapted: list[str], others: Collection[str]) -> list[str]:
    """Names by which PEFT finds the modules that have adapters: the last part of each, as servers want it, where no
    other module has the same."""
    ends = {name.rpartition(".")[2] for name in others}
    short = [name.rpartition(".")[2] for name in adapted]
    return list(dict.fromkeys(name if end in ends else end for name, end in zip(adapted, short)))
