"""Parameter groups: which optimizer settings each parameter gets, by its role and name (`precision.types`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from trainer.config import OptimizerConfig, ParameterTypes
from trainer.planning.cost.parameters import ParameterInfo
from trainer.precision.dtypes import DTYPES


@dataclass(frozen=True)
class Policy:
    """Optimizer settings of one parameter; parameters with equal policies form a parameter group."""

    optimizer: str
    state_dtype: torch.dtype
    weight_decay: float
    lr_scale: float
    quantise: bool = field(default=True, compare=False)


def parameter_policies(
    infos: dict[str, ParameterInfo], types: ParameterTypes, optimizer: OptimizerConfig
) -> dict[str, Policy]:
    """Global name -> policy: the settings of its role, changed by every rule whose pattern matches, in order."""
    policies = {}
    for name, info in infos.items():
        chosen = dataclasses.asdict(getattr(types, info.role))
        for pattern, changes in types.rules.items():
            if fnmatchcase(name, pattern):
                chosen.update(changes if isinstance(changes, dict) else dataclasses.asdict(changes))
        decay = chosen["weight_decay"]
        policies[name] = Policy(
            chosen["optimizer"] or optimizer.name,
            DTYPES[chosen["state_dtype"]],
            optimizer.weight_decay if decay is None else float(decay),
            float(chosen["lr_scale"]),
            bool(chosen["quantise"]),
        )
    return policies
