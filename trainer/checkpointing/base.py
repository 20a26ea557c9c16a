"""The frozen parameters of a run with adapters: its checkpoints hold what is trained, and name what they belong to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec
from trainer.planning.parameters import declare_parameters
from trainer.util.reading import Malformed, find_mismatch, on_one_line

BASE = "base"
"""The entry of a checkpoint's manifest; null where all parameters are trained."""

FOLDER = {"from_hf": str, "sha256": str}
"""What it says of a base that was read: its folder, and the digest of its weights."""

DRAWN = {"seed": int, "device": str}
"""What it says of a base that was drawn at the start of the run: the seed, and the kind of device it was drawn on."""


def is_base(value: Any, spec: ModelSpec) -> bool:
    """Whether the entry of a manifest is what a run of the model writes."""
    if not spec.adapter.rank:
        return value is None
    return any(find_mismatch(value, shape) is None for shape in (FOLDER, DRAWN))


def describe_base(config: Config, spec: ModelSpec, device: torch.device) -> dict[str, Any] | None:
    """The frozen parameters of a run, for the manifests of its checkpoints. Reads all weights that `model.from_hf`
    names, to hash them."""
    if not spec.adapter.rank:
        return None
    if config.model.from_hf is None:
        return {"seed": config.run.seed, "device": device.type}
    from trainer.hf.adapters import find_base

    folder = find_base(config.model.from_hf)
    return {"from_hf": str(folder.resolve()), "sha256": hash_weights(folder)}


def hash_weights(folder: Path) -> str:
    """SHA-256 of the weight files of a transformers folder, in the order of their names. Several are read at a time."""

    def digest(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        lines = [f"{path.name} {found}\n" for path, found in zip(paths, pool.map(digest, paths))]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def find_base_problems(saved: Any, mine: dict[str, Any] | None) -> list[str]:
    """Why a run whose frozen parameters are `mine` cannot go on from a checkpoint whose manifest says `saved`."""
    keys = ("sha256", "seed", "device")
    if not isinstance(mine, dict) or not isinstance(saved, dict):
        return []  # one trains all parameters, which is another model: said where specs are compared
    if all(saved.get(key) == mine.get(key) for key in keys):
        return []

    def name(base: dict[str, Any]) -> str:
        return f"model.from_hf={on_one_line(str(base['from_hf']))}" if "from_hf" in base else "weights that it drew"

    same = "from_hf" in mine and saved.get("from_hf") == mine["from_hf"]
    return [
        f"the adapters of the checkpoint belong to {name(saved)}, "
        + (f"whose weights have changed since (SHA-256 {mine['sha256'][:12]})" if same else f"not to {name(mine)}")
        + ": restore these weights, or set another run.name to train new adapters"
    ]


def open_base(saved: Any, spec: ModelSpec) -> tuple[Callable[[str], Tensor], Path | None]:
    """Reads frozen parameters by global name, as a checkpoint's manifest names them, and their folder if they have one.
    Raises `ConfigError` where they are gone or others."""
    if not is_base(saved, spec):
        raise Malformed("its manifest does not name the model that its adapters belong to")
    if "from_hf" not in saved:
        from trainer.model.initial import InitialWeights

        if saved["device"] not in ("cpu", "cuda") or saved["device"] == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "the adapters belong to weights that a run drew on a GPU, and this machine has none; give checkpoints "
                "of a run with model.from_hf, or use a machine with a GPU"
            )
        infos, drawn = declare_parameters(spec), InitialWeights(spec, saved["seed"], torch.device(saved["device"]))
        return lambda name: drawn(name, infos[name]).cpu(), None
    from trainer.hf.adapters import stored_weights

    folder = Path(saved["from_hf"])
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"the adapters belong to the model in {on_one_line(str(folder))}, which is gone; put it there again"
        )
    if hash_weights(folder) != saved["sha256"]:
        raise ConfigError(
            f"the adapters belong to the model in {on_one_line(str(folder))}, whose weights have changed since; "
            "restore them"
        )
    return stored_weights(folder, spec).tensor, folder
