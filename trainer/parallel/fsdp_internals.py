"""Every private name of FSDP2 that the project uses. torch's own pipeline reaches for the same ones: in public FSDP
reduces gradients in backward only.

A unit is a module whose parameters FSDP gathers and reduces together; its parameter group keeps their shards, and on
the way through a step their gathered copies and what has been accumulated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters FSDP gathers and reduces together."""
    return [
        module for module in model.modules() if isinstance(module, FSDPModule) and parameter_group(module) is not None
    ]


def parameter_group(unit: FSDPModule) -> Any:
    """FSDP's own group of a unit's parameters; None where it has none of its own."""
    return unit._get_fsdp_state()._fsdp_param_group


def sharded_sizes(unit: FSDPModule) -> list[tuple[nn.Parameter, int]]:
    """The unit's parameters as the model has them, each with the elements that it takes in a rank's row of the unit's
    reduce-scatter, padding included."""
    return [
        (parameter.sharded_param, parameter.padded_sharded_param_size.numel())
        for parameter in parameter_group(unit).fsdp_params
    ]


def is_set_up(model: FSDPModule) -> bool:
    """Whether FSDP has found its root, which it does in the first forward pass; it gathers nothing before."""
    return bool(model._get_fsdp_state()._is_root)


def accumulate_gradients(units: list[FSDPModule]) -> None:
    """Takes over gradients that were computed outside of backward, in the type they are reduced in."""
    for unit in units:
        for parameter in parameter_group(unit).fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is None or whole.grad is None:
                continue
            gradient, whole.grad = whole.grad, None
            if parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = gradient.to(parameter.reduce_dtype or gradient.dtype)
            else:
                parameter.unsharded_accumulated_grad += gradient


def reduce_accumulated(units: list[FSDPModule], partial_sums: bool, last: bool) -> None:
    """Reduces what has been accumulated, as the end of a backward pass would. partial_sums: whether FSDP may keep those
    of earlier reductions; last: whether this is the step's last reduction, which ends them."""
    for unit in reversed(units):
        group = parameter_group(unit)
        if partial_sums:
            fill_missing(group, last)
        group.post_backward()


def fill_missing(group: Any, last: bool) -> None:
    """Gives zeros to parameters that have no gradient in this reduction.

    Gradients are missing where two input-gradient passes came before one reduction, which then took those of both. FSDP
    keeps partial sums for whole groups only, and adds them up over replicas only in a reduction that has gradients.
    last: whether this is the step's last reduction.
    """
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


def end_backward(model: FSDPModule) -> None:
    """What FSDP does after a root's last backward pass: makes the current stream wait for its reductions."""
    model._get_fsdp_state()._root_post_backward_final_callback()
