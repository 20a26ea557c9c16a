"""Whole transformers folders: the architecture of one, and a trained model as one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from trainer.config import ConfigError
from trainer.config.extend import extend_spec
from trainer.config.model import CodeSpec, ModelSpec
from trainer.config.schema import ModelConfig
from trainer.hf.adapters import (
    ADAPTER,
    PeftWeights,
    find_base,
    holds_adapter,
    join_adapters,
    open_weights,
    write_adapter,
)
from trainer.hf.agreement import check_export, check_import, usual_config
from trainer.hf.config import check_sizes, config_from_spec, rename_options, spec_from_config
from trainer.hf.families import FAMILIES
from trainer.hf.tokenizer import SUFFIXES, TEMPLATES, named_files, open_tokenizer, rewrite_begin, save_tokenizer
from trainer.hf.weights import StoredTensors, write_weights
from trainer.model.initial import InitialWeights, Weights
from trainer.util.reading import check_links, on_one_line, read_json, shorten_foreign

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")

GENERATION = "generation_config.json"

OF_THE_MACHINE = ("compile_config", "continuous_batching_config", "use_cache", "output_", "return_dict")
"""How the names of options begin that say how to compute, and not what is generated. The first names code: the backend
of a compiler."""


def spec_from_hf(
    folder: str | Path, notes: list[str] | None = None, code: str = "auto", unproven: bool = False
) -> ModelSpec:
    """The architecture in `folder`/config.json, as transformers understands it: a small model of it has computed the
    same there and here. Weights are optional. A head that they store with other values than the embedding is not tied.
    A folder with an adapter is read with that of its model.

    code, unproven: as `model.code` and `model.code_unproven`. With `auto`, a type that is not in `FAMILIES` runs by
    transformers' code. notes: a list that gets a sentence where the weights contradict config.json. Raises
    `ConfigError` for what cannot be read or is not supported."""
    folder = Path(folder).expanduser()
    path = folder / "config.json"
    if holds_adapter(folder):
        base = spec_from_hf(find_base(folder), notes, code, unproven)
        return replace(base, adapter=PeftWeights(folder, base).adapter)
    if not path.is_file():
        raise ConfigError(
            f"model.from_hf={folder}: there is no {path.name} in it; give a folder as transformers saves it (a model "
            "of the hub: hf download NAME --local-dir DIR)"
        )
    try:
        check_links(folder)
        named_files(folder, path.name)
        raw = read_json(path, {"model_type": (str, NoneType)}, "write it anew with transformers' save_pretrained")
        check_sizes(raw)
        if code == "transformers" or (code == "auto" and runs_by_code(raw["model_type"])):
            spec: ModelSpec = read_code_spec(folder, raw, [] if notes is None else notes, unproven)
        else:
            config = complete_config(folder, raw) if raw["model_type"] in FAMILIES else raw
            spec = spec_from_config(config)
            check_import(spec, config)
    except ConfigError as error:
        raise ConfigError([f"model.from_hf={folder}: {path.name}: {problem}" for problem in error.problems]) from error
    except Exception as error:  # every class of error by which transformers refuses a field, or a field is of no use
        raise ConfigError(f"model.from_hf={folder}: {path.name} cannot be read: {shorten_foreign(error)}") from error
    spec.name = folder.resolve().name
    if spec.tied:
        untie_stored_head(folder, spec, [] if notes is None else notes)
        if isinstance(spec, CodeSpec):
            spec.transformers["config"]["tie_word_embeddings"] = spec.tied
    return spec


def read_code_spec(folder: Path, raw: dict[str, Any], notes: list[str], unproven: bool) -> CodeSpec:
    """The spec of a folder whose model runs by transformers' own code. Raises `ConfigError`."""
    check_version()
    from trainer.hf.accepted import code_spec, open_config  # imports transformers' models

    if raw.get("auto_map"):
        notes.append(
            f"model.from_hf={folder}: auto_map names code of the folder, which is not run; transformers' own is"
        )
    if unproven:
        from trainer.hf.proof import prove_code

        return code_spec(open_config(folder), prove=prove_code)
    return code_spec(open_config(folder))


def runs_by_code(model_type: str | None) -> bool:
    """Whether `model.code=auto` means transformers' code for a type."""
    if model_type in FAMILIES or model_type is None:
        return False
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def check_version() -> None:
    """Raises `ConfigError` where the installed transformers is older than what model.code=transformers needs."""
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(
            f"model.code=transformers needs transformers 5 or later, and {transformers.__version__} is installed; "
            "upgrade it, or set model.code=spec where the project has blocks for the model"
        )


def starting_weights(folder: str | Path, spec: ModelSpec, seed: int) -> tuple[Weights, list[str]]:
    """The weights that training starts from, and notes on them: those in a transformers folder, and drawn ones of the
    adapters that it does not hold. A folder with config.json alone gets the fresh weights of a model that runs by
    transformers' code. Raises `ConfigError`."""
    path = Path(folder).expanduser()
    stored = (".safetensors", ".bin", ".pt", ".pth")
    if isinstance(spec, CodeSpec) and not any(one.name.endswith((*stored, ".index.json")) for one in path.iterdir()):
        from trainer.hf.code_weights import CodeInitialWeights

        if spec.adapter.rank:
            raise ConfigError(
                f"model.adapter.rank={spec.adapter.rank}: there are no weights in model.from_hf={folder}, and adapters "
                "stand beside trained ones; give a folder with weights, or set model.adapter.rank=0"
            )
        return CodeInitialWeights(spec, seed), []
    return open_weights(folder, spec, InitialWeights(spec, seed, torch.device("cpu")) if spec.adapter.rank else None)


def untie_stored_head(folder: Path, spec: ModelSpec, notes: list[str]) -> None:
    """Makes `spec` an untied model, and says so in `notes`, where the weights in `folder` have a head of their own."""
    try:
        tensors = StoredTensors(folder, spec)
        spec.tied = not tensors.has_own_head()
    except ConfigError:
        return  # who needs no weights needs no whole files; who reads them meets the same error
    if not spec.tied:
        notes.append(
            tensors.message(
                f"{tensors.head} is stored with other values than {tensors.embedding}, although config.json has "
                "tie_word_embeddings=true; as in transformers, both are kept and the head is not tied"
            )
        )


def model_from_hf(model: ModelConfig) -> ModelConfig | CodeSpec:
    """The model that `model.from_hf` names, extended as `model.extend` says. Raises `ConfigError`."""
    spec = extend_spec(spec_from_hf(str(model.from_hf), None, model.code, model.code_unproven), model.extend)
    adapter = join_adapters(spec, model.adapter)
    if isinstance(spec, CodeSpec):
        return replace(spec, adapter=adapter)
    return ModelConfig(**{**vars(spec), "adapter": adapter})


def complete_config(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration as transformers opens it, with the defaults of its class. Raises `ConfigError` where it takes
    it for another architecture's."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    if config["model_type"] != raw["model_type"]:
        foreign = [key for key in raw if key not in usual_config(raw["model_type"])]
        raise ConfigError(
            f"transformers takes model_type={raw['model_type']!r} for {config['model_type']!r}, not supported, "
            f"because of options that are not its own: {on_one_line(', '.join(foreign))}; supported: leaving them out"
        )
    family, quantised = FAMILIES[config["model_type"]], config.get("quantization_config") or {}
    if family.quantised and quantised.get("quant_method") == family.quantised:
        del config["quantization_config"]  # the weights show which tensors it is about
    return rename_options(config)


def export_model(
    spec: ModelSpec,
    tensors: Callable[[str], Tensor] | Mapping[str, Tensor],
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: str | Path | None = None,
    shard_size: int | str = "5GB",
    generation: Mapping[str, Any] | None = None,
    begin: list[int] | None = None,
) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` opens: config, safetensors, tokenizer.

    Before anything is written, transformers opens the configuration and computes a small model of it.

    tensors: whole parameters, and biases of routers, by global name, read one at a time, so that at most one file's
    tensors are in memory besides. tokenizer: folder to copy it from. generation: a generation configuration; special
    tokens that it does not name are the tokenizer's. begin: the ids with which the exported tokenizer begins every
    text; None leaves it as it is. The folder is written under another name and then renamed, so that it is complete or
    absent. Raises `ConfigError`
    where transformers' model would be another one, naming the field."""
    folder = Path(folder).expanduser()
    outside = {**special_tokens(tokenizer), "torch_dtype": str(dtype).removeprefix("torch.")}
    if isinstance(spec, CodeSpec):
        # Without a tokenizer, the ids are those of the folder that the model was read from.
        given = outside if tokenizer else {"torch_dtype": outside["torch_dtype"]}
        config = {**spec.transformers["config"], **given}
        config.pop("dtype", None)
    else:
        config = {**config_from_spec(spec), **outside}
    check_new(folder)
    if not isinstance(spec, CodeSpec):
        check_export(spec, config)
    read = tensors if callable(tensors) else tensors.__getitem__
    with write_together(folder) as partial:
        if isinstance(spec, CodeSpec):
            from trainer.hf.code_weights import write_code_weights

            write_code_weights(partial, spec, read, dtype, shard_size)
        else:
            write_weights(partial, spec, read, dtype, shard_size)
        if tokenizer:
            copy_tokenizer(Path(tokenizer), partial, config["model_type"])
            if begin is not None:
                rewrite_begin(partial, begin)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        ids = {key: config[key] for key in SPECIAL if config.get(key) is not None}
        kept, _ = select_generation({**ids, **(generation or {})}, spec.vocab_size)
        if len(kept.get("eos_token_id", ())) == 1:
            [kept["eos_token_id"]] = kept["eos_token_id"]
        (partial / GENERATION).write_text(json.dumps(kept, indent=2) + "\n")


def export_adapter(
    spec: ModelSpec,
    tensors: Callable[[str], Tensor],
    folder: str | Path,
    base: str | Path,
    dtype: torch.dtype = torch.float32,
    tokenizer: str | Path | None = None,
    begin: list[int] | None = None,
) -> list[str]:
    """Writes a folder that PEFT opens, with the adapters of a model and its tokenizer. base: the folder of the model.
    The others, and what is written when: as for `export_model`. Returns messages."""
    folder = Path(folder).expanduser()
    with write_together(folder) as partial:
        messages = write_adapter(partial, spec, tensors, base, dtype)
        if tokenizer:
            copy_tokenizer(Path(tokenizer), partial, spec.family)
            if begin is not None:
                rewrite_begin(partial, begin)
    return messages


def check_new(folder: Path) -> None:
    """Raises `ConfigError` where the folder exists and is not empty."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"out={folder} exists and is not empty; give a new folder")


@contextmanager
def write_together(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` at the end of the block: that is complete or absent."""
    check_new(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)


def open_generation(folder: str | Path, vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """The generation configuration of a transformers folder as `select_generation` makes it, and a message for each
    option that is left out. Without generation_config.json, options in config.json count, as in transformers. Raises
    `ConfigError` for a file that cannot be read."""
    path = find_base(folder) / GENERATION
    own = path.exists() or path.is_symlink()
    path = path if own else path.with_name("config.json")
    given = read_json(path, dict, "write it anew with transformers' save_pretrained")
    kept, left = select_generation(given, vocab_size)
    if not own:  # most of config.json describes the model
        left = {name: why for name, why in left.items() if name in SPECIAL}
    return kept, [f"{path}: {on_one_line(name)} is not carried on: {why}" for name, why in left.items()]


def select_generation(given: Mapping[str, Any], vocab_size: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of a generation configuration that transformers' `GenerationConfig` understands and the model can
    follow, and why others are left out, by name. Ids to stop at become a list."""
    from transformers import GenerationConfig

    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    kept, left = dict[str, Any](), dict[str, str]()
    for name, value in given.items():
        if value is None or name in ("_from_model_config", "transformers_version"):
            continue
        if name.startswith(OF_THE_MACHINE):
            left[name] = "it says how to compute, not what"
        elif name not in known:
            left[name] = "transformers' GenerationConfig does not know it"
        elif name.endswith("_token_id"):
            ids = value if isinstance(value, list) else [value]
            tokens = [token for token in ids if type(token) is int and 0 <= token < vocab_size]
            if len(tokens) < len(ids):
                wrong = next(token for token in ids if token not in tokens)
                left[name] = f"{shorten_foreign(wrong)} is none of the model's {vocab_size} tokens"
            if tokens:
                kept[name] = tokens if name == "eos_token_id" else tokens[0]
        else:
            try:
                GenerationConfig(**kept, **{name: value})
                kept[name] = value
            except Exception as error:  # whatever transformers meets in a value that somebody else wrote
                left[name] = shorten_foreign(error)
    return kept, left


def copy_tokenizer(source: Path, folder: Path, model_type: str) -> None:
    """Copies the files of a tokenizer, which may lie beside a model, to those of a model of this type. transformers
    opens the copy with the ids that text has in a run on `source`."""
    model = ("config.json", GENERATION, ADAPTER)
    for path in source.iterdir():
        if path.is_dir() and path.name == TEMPLATES:
            shutil.copytree(path, folder / path.name)
        elif path.suffix in SUFFIXES and path.name not in model and not path.name.endswith(".index.json"):
            shutil.copy(path, folder)
    opened, notes = open_tokenizer(source)
    for note in notes:
        print(f"{source}: {note}", file=sys.stderr, flush=True)
    save_tokenizer(opened, folder, model_type)


def special_tokens(tokenizer: str | Path | None) -> dict[str, int | None]:
    """Ids of the tokens that generation stops at and pads with.

    Without a tokenizer they are null: an id that is left out would take the architecture's default."""
    if tokenizer is None:
        return dict.fromkeys(SPECIAL)
    opened, _ = open_tokenizer(Path(tokenizer))
    return {name: getattr(opened, name) for name in SPECIAL}
