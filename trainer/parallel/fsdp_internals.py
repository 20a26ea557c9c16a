"""Every private name of FSDP2 that the project uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def fill_missing(group: Any, last: bool) -> None:
    """Zeros where a reduction finds no gradient because an earlier one took those of two input-gradient passes at once:
    partial sums are of whole groups, and FSDP ends them in the last reduction only if there is something to reduce."""
    missing = [
        parameter
        for parameter in group.fsdp_params
        if parameter.unsharded_accumulated_grad is None and parameter.unsharded_param.grad is None
    ]
    for parameter in missing if last or len(missing) < len(group.fsdp_params) else ():
        whole = parameter.unsharded_param
        parameter.unsharded_accumulated_grad = torch.zeros_like(
            whole, dtype=parameter.reduce_dtype or whole.dtype, requires_grad=False
        )


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters FSDP gathers and reduces together."""
    return [
        module for module in model.modules() if isinstance(module, FSDPModule) and parameter_group(module) is not None
    ]


def parameter_group(unit: FSDPModule) -> Any:
    """FSDP's own group of a unit's parameters. Private, and needed because FSDP reduces gradients in backward only
    (torch's own pipeline does the same)."""
    return unit._get_fsdp_state()._fsdp_param_group


def parameter_groups(model: nn.Module) -> list:
    return [parameter_group(unit) for unit in fsdp_units(model)]


def drop_gathered(model: nn.Module) -> None:
    """Frees gathered parameters; the next forward pass gathers again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
