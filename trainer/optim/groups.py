"""Parameter groups: which optimizer settings each parameter gets, by its role and name (`precision.types`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trainer.config import OptimizerConfig, ParameterTypes
from trainer.planning.cost.parameters import ParameterInfo
from trainer.planning.cost.updates import UpdateSettings
from trainer.precision.dtypes import DTYPES


@dataclass(frozen=True)
class ParameterPolicy:
    """Optimizer settings of one parameter; parameters with equal policies form a parameter group."""

    optimizer: str
    state_dtype: torch.dtype
    weight_decay: float
    lr_scale: float
    quantise: bool = field(default=True, compare=False)


def parameter_policies(
    infos: dict[str, ParameterInfo], types: ParameterTypes, optimizer: OptimizerConfig
) -> dict[str, ParameterPolicy]:
    """Global name -> policy; see `UpdateSettings.policies`."""
    found = {}
    for name, chosen in UpdateSettings(optimizer, types).policies(infos).items():
        assert chosen.optimizer is not None and chosen.weight_decay is not None  # nothing is left open
        dtype, scale = DTYPES[chosen.state_dtype], float(chosen.lr_scale)
        found[name] = ParameterPolicy(chosen.optimizer, dtype, chosen.weight_decay, scale, bool(chosen.quantise))
    return found
