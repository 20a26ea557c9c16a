"""Kinds of machines: files of `configs/hardware/` and of one's own, and what is known of devices by their name."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import ConfigError, PrecisionConfig
from trainer.config.fields import CONFIGS, suggest_nearest
from trainer.config.hardware import HardwareConfig, build_hardware
from trainer.util.reading import Malformed, read_yaml, shorten_foreign

# Peak arithmetic of known devices, the denominator of model FLOP utilisation (MFU). Only exact names are known: a
# device that is not listed, a MIG slice or a variant with another clock gets None, so that a utilisation is either
# right or absent, never a guess.


DTYPES = ("bf16", "fp16", "fp8", "tf32", "fp32")

# Dense peaks in TFLOP/s, from the vendors' data sheets (their sparse figures halved where only those are given), with
# fp32 accumulation, which training uses: on GeForce cards this is half the fp16-accumulation figure. `tf32` is fp32
# data through the tensor cores (precision.matmul=high); `fp32` is true single precision outside them, except on AMD
# Instinct, where it is the fp32 matrix cores. None: not executed by the matrix units at all. Names are those of
# torch.cuda.get_device_name() without the leading "NVIDIA ", which old drivers leave out.
#          bf16    fp16    fp8     tf32    fp32
_PEAKS = [
    ((2250.0, 2250.0, 4500.0, 1125.0, 75.0), ["B300 SXM6 AC"]),
    ((2500.0, 2500.0, 5000.0, 1250.0, 80.0), ["GB200", "GB300"]),
    ((2250.0, 2250.0, 4500.0, 1100.0, 75.0), ["B200"]),
    ((1750.0, 1750.0, 3500.0, 900.0, 60.0), ["B100"]),
    (
        (989.4, 989.4, 1978.9, 494.7, 66.9),
        ["H200", "H100 80GB HBM3", "H800", "GH200 120GB", "GH200 480GB", "GH200 144G HBM3e"],
    ),
    ((835.5, 835.5, 1671.0, 417.5, 60.0), ["H200 NVL", "H100 NVL"]),
    ((756.0, 756.0, 1513.0, 378.0, 51.2), ["H100 PCIe", "H800 PCIe"]),
    ((148.0, 148.0, 296.0, 74.0, 44.0), ["H20", "H20-3e"]),
    (
        (312.0, 312.0, None, 156.0, 19.5),
        ["A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe", "A800-SXM4-80GB", "A800 80GB PCIe"],
    ),
    ((165.0, 165.0, None, 82.0, 10.3), ["A30"]),
    ((149.7, 149.7, None, 74.8, 37.4), ["A40"]),
    ((125.0, 125.0, None, 62.5, 31.2), ["A10"]),
    ((70.0, 70.0, None, 35.0, 35.0), ["A10G"]),
    ((362.0, 362.0, 733.0, 183.0, 91.6), ["L40S"]),
    ((181.0, 181.0, 362.0, 90.5, 90.5), ["L40"]),
    ((121.0, 121.0, 242.5, 60.0, 30.3), ["L4"]),
    ((None, 125.0, None, None, 15.7), ["Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"]),
    ((None, 112.0, None, None, 14.0), ["Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"]),
    ((None, 65.0, None, None, 8.1), ["Tesla T4"]),
    ((209.5, 209.5, 419.0, 104.8, 104.8), ["GeForce RTX 5090"]),
    ((165.2, 165.2, 330.3, 82.6, 82.6), ["GeForce RTX 4090"]),
    ((71.2, 71.2, None, 35.6, 35.6), ["GeForce RTX 3090"]),
    ((364.2, 364.2, 728.5, 182.1, 91.1), ["RTX 6000 Ada Generation"]),
    ((154.8, 154.8, None, 77.4, 38.7), ["RTX A6000"]),
    # One torch device of an MI250X or MI250 is one of its two dies.
    ((191.5, 191.5, None, None, 47.9), ["AMD Instinct MI250X"]),
    ((181.0, 181.0, None, None, 45.3), ["AMD Instinct MI250", "AMD Instinct MI210"]),
    ((980.6, 980.6, 1961.2, 490.3, 122.6), ["AMD Instinct MI300A"]),
    ((1307.4, 1307.4, 2614.9, 653.7, 163.4), ["AMD Instinct MI300X", "AMD Instinct MI300X VF", "AMD Instinct MI325X"]),
    ((2306.9, 2306.9, 4613.7, None, 144.2), ["AMD Instinct MI350X"]),
    ((2516.6, 2516.6, 5033.2, None, 157.3), ["AMD Instinct MI355X"]),
]
_BY_NAME = {name: dict(zip(DTYPES, peaks)) for peaks, names in _PEAKS for name in names}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device, in FLOP/s; None where the device or its speed in this type is not known.

    `device_name` is what `torch.cuda.get_device_name()` says; `dtype` is one of `DTYPES`, the type that matrix products
    read their operands in. Raises `ValueError` for another type.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} has no peak; legal: {', '.join(DTYPES)}")
    peak = _BY_NAME.get(device_name.strip().removeprefix("NVIDIA "), {}).get(dtype)
    return None if peak is None else peak * 1e12


def product_type(precision: PrecisionConfig) -> str:
    """The type that matrix products read their operands in: one of `DTYPES`."""
    return "tf32" if precision.compute == "fp32" and precision.matmul == "high" else precision.compute


# Files that describe machines.


MAX_PROBLEMS = 20
"""The most problems of a file that a message names."""


def load_hardware(
    name: str, changes: Sequence[str] = (), config_dir: str | os.PathLike | None = None
) -> HardwareConfig:
    """The hardware of the file `hardware/NAME.yaml` of the user's folder or of the shipped one, or of a path.

    changes: `node.bandwidth=300` and the like. Raises `ConfigError` with everything that is wrong.
    """
    folders = hardware_folders(config_dir)
    places = [*(folder / f"{name}.yaml" for folder in folders), Path(name)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        known = sorted(hardware_names(config_dir))
        raise ConfigError(f"hardware={name}: there is no such file; {suggest_nearest(name, known)}")
    try:
        values = read_yaml(path)
        if not isinstance(values, dict):
            raise ConfigError(f"hardware={name}: {path} holds {shorten_foreign(values)} instead of settings; mend it")
        if values and not values.keys() & {field.name for field in fields(HardwareConfig)}:
            raise ConfigError(f"hardware={name}: {path} holds no settings of hardware; name a file of it")
        merged = OmegaConf.to_container(OmegaConf.merge(values, OmegaConf.from_dotlist(list(changes))))
    except Malformed as error:
        raise ConfigError(f"hardware={name}: {error}") from None
    except (OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"hardware={name}: cannot read {path} ({shorten_foreign(error)}); mend it") from None
    assert isinstance(merged, dict)
    try:
        return build_hardware({str(key): value for key, value in merged.items()})
    except ConfigError as error:
        named = f"hardware={name}: " if path == places[-1] else ""
        raise ConfigError([named + problem for problem in error.problems[:MAX_PROBLEMS]]) from None


def hardware_folders(config_dir: str | os.PathLike | None) -> list[Path]:
    """Where files of hardware are looked for: the user's own folder, then the shipped one."""
    own = [] if config_dir is None else [Path(config_dir).expanduser() / "hardware"]
    return [*own, CONFIGS / "hardware"]


def hardware_names(config_dir: str | os.PathLike | None = None) -> list[str]:
    """The names of all of them, one's own first."""
    found = (file.stem for folder in hardware_folders(config_dir) for file in sorted(folder.glob("*.yaml")))
    return [*dict.fromkeys(found)]


def shipped_for(device: str) -> str:
    """The shipped file of a kind of device; for a GPU that has none, one whose GPUs have no link of their own."""
    names = {load_hardware(name).device: name for name in hardware_names()}
    return names.get(device, "l40s")


def hardware_text(hardware: HardwareConfig, comments: Sequence[str]) -> str:
    """The file of a machine: paragraphs of comments, then every value that is not a default, with four digits."""
    lines = [line for comment in comments for line in textwrap.wrap(comment, 118, subsequent_indent="  ")]
    values = {name: value for name, value in round_value(asdict(hardware)).items() if value != {}}
    settings = [
        f"{name}: {yaml.safe_dump(value, default_flow_style=True, sort_keys=False)}"
        if isinstance(value, dict)
        else yaml.safe_dump({name: value})
        for name, value in values.items()
    ]
    return "".join([*(f"# {line}\n" for line in lines), *settings])


def round_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: round_value(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
