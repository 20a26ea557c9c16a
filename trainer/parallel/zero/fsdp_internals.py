"""Every private name of FSDP2 that the project uses. torch's own pipeline reaches for the same ones: in public FSDP
reduces gradients in backward only.

A unit is a module whose parameters FSDP gathers and reduces together; its parameter group keeps their shards, and on
the way through a step their gathered copies and what has been accumulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from trainer.model.stage import Stage
from trainer.parallel.zero.copy_engine import CopyEngineShards, copy_together, go_on


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


class UnitTensors(NamedTuple):
    """Tensors that units have in memory, some of them views of the same memory. messages: sent and received by FSDP."""

    gradients: list[Tensor]
    gathered: list[Tensor]
    messages: list[Tensor]


def unit_tensors(units: list[FSDPModule]) -> UnitTensors:
    """What units hold beside their shards at this moment, in the middle of a step too. Nothing is allocated."""
    gradients: list[Tensor | None] = []
    gathered: list[Tensor | None] = []
    messages: list[Any] = []
    for unit in units:
        group = parameter_group(unit)
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            gathered += [*parameter.all_gather_outputs, whole]
            gradients += [parameter.unsharded_accumulated_grad, None if whole is None else whole.grad]
        gradients.append(group._partial_reduce_output)
        context = group.comm_ctx  # of all units
        kept = getattr(context.all_gather_state, "all_gather_result", None)
        messages += [getattr(result, "all_gather_output", None) for result in (group._all_gather_result, kept)]
        messages += [state.reduce_scatter_input for state in pending_reductions(context)]
        messages.append(getattr(group._all_reduce_state, "all_reduce_input", None))
    return UnitTensors(*([tensor for tensor in some if tensor is not None] for some in (gradients, gathered, messages)))


def pending_reductions(context: Any) -> list[Any]:
    """Of all units of a root: the reductions whose messages FSDP still has."""
    if hasattr(context, "reduce_scatter_states"):
        return context.reduce_scatter_states
    one = getattr(context, "reduce_scatter_state", None)  # torch 2.11 keeps one at most
    return [] if one is None else [one]


def end_reductions_in_forward(model: Stage) -> None:
    """Has the last layer of a forward pass drop what the backward pass before it sent.

    FSDP drops a message when it makes the next one: that of embedding, norm and head after the next micro-batch's
    first layer of backward, when memory is fullest. It was reduced long before: the current stream, whose memory it is,
    does not wait here."""
    last = list(model.layers.values())[-1]

    def end(*_: object) -> None:
        context = parameter_group(last).comm_ctx  # of all units
        for state in pending_reductions(context):
            if state.event is not None:
                state.event.wait()
        if hasattr(context, "reduce_scatter_states"):
            context.reduce_scatter_states.clear()
        else:
            context.reduce_scatter_state = None

    last.register_forward_pre_hook(end)


def end_backward(model: FSDPModule) -> None:
    """What FSDP does after a root's last backward pass: makes the current stream wait for its reductions."""
    model._get_fsdp_state()._root_post_backward_final_callback()


class CopyEngineCollectives:
    """FSDP's custom all-gather and reduce-scatter by copies between GPUs (`parallel/zero/copy_engine.py`).

    FSDP calls `allocate` for a message and then for its result, and this object with both. It has its own gradients in
    place of a message."""

    def __init__(self, group: dist.ProcessGroup):
        self.shards = CopyEngineShards(group)
        self.message: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.message is not None:
            return torch.empty(size, dtype=dtype, device=device)
        self.message = torch.empty(0, dtype=dtype, device=device)
        self.message.gradients = []  # FSDP keeps the message until the current stream has waited for its reduction
        return self.message

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        self.message = None
        go_on(self.shards.sum(input_tensor.gradients, output_tensor))


class WholeShardReduce:
    """FSDP's custom reduce-scatter of a rank whose shards are whole. FSDP calls `allocate` for a message and then for
    its result, to which it copies it: here they are one."""

    def __init__(self) -> None:
        self.message: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        result, self.message = self.message, None
        if result is None:
            result = self.message = torch.empty(size, dtype=dtype, device=device)
        return result

    def __call__(self, *_: object, **__: object) -> None:
        """FSDP asks for no collective of one rank."""
        raise AssertionError("a collective of whole shards")


def copy_shards(units: list[FSDPModule], group: dist.ProcessGroup) -> None:
    """Has FSDP gather and reduce units by copies between GPUs, each while the one before it computes."""
    patch_collectives()
    comm = CopyEngineCollectives(group)
    for unit, following in zip(units, [*units[1:], None]):
        unit.set_custom_all_gather(comm)
        unit.set_custom_reduce_scatter(comm)
        if following is not None:
            unit.set_modules_to_forward_prefetch([following])


def cast_shards(units: list[FSDPModule]) -> None:
    """Of a rank whose shards are whole: has FSDP cast parameters to where they are used, and gradients to where they
    are added up, where its own goes through a buffer each time."""
    patch_collectives()
    for unit in units:
        unit.set_custom_reduce_scatter(WholeShardReduce())
        if (group := parameter_group(unit)) is not None:
            group.wait_for_unshard = partial(cast_parameters, group)


@cache
def patch_collectives() -> None:
    """Puts what units of `CopyEngineCollectives` and `WholeShardReduce` do in the place of FSDP's copies into and out
    of flat buffers."""
    group, collectives = _fsdp_param_group, _fsdp_collectives
    group.foreach_all_gather = fall_back_on(group.foreach_all_gather, gather_parameters)
    group.foreach_all_gather_copy_out = fall_back_on(group.foreach_all_gather_copy_out, end_gather)
    collectives.foreach_reduce_scatter_copy_in = fall_back_on(
        collectives.foreach_reduce_scatter_copy_in, take_gradients
    )


def fall_back_on(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does what `ours` does; where that is NotImplemented, what FSDP's own does."""

    @wraps(theirs)
    def either(*arguments: Any) -> Any:
        done = ours(*arguments)
        return theirs(*arguments) if done is NotImplemented else done

    return either


@torch.no_grad()
def gather_parameters(parameters: list[Any], group: dist.ProcessGroup, *more: Any) -> Any:
    """Starts gathering a unit's parameters to where they are used. Memory for them is the current stream's, of which
    the other one waits for what is done by now: not for the layer before, whose kernels are yet to be launched."""
    *_, device, comm = more
    if not isinstance(comm, CopyEngineCollectives):
        return NotImplemented
    shards, wholes = shard_places(parameters, group.size(), device)
    with torch.autograd._unsafe_preserve_version_counter(tuple(wholes)):
        ended = comm.shards.gather(shards, [whole.view(group.size(), -1) for whole in wholes])
    return SimpleNamespace(all_gather_event=ended, all_gather_work=None)


def shard_places(parameters: list[Any], ranks: int, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's shards of a unit's parameters, and the memory of the whole ones, which it allocates: flat."""
    for parameter in parameters:
        dtype = parameter.param_dtype or parameter.orig_dtype
        parameter.init_all_gather_outputs([parameter._sharded_param_data.numel()], [dtype], ranks, device)
        parameter.alloc_all_gather_outputs()
    return (
        [parameter._sharded_param_data for parameter in parameters],
        [parameter.all_gather_outputs[0] for parameter in parameters],
    )


def cast_parameters(group: Any) -> None:
    """A group's `wait_for_unshard`: FSDP's own, of one rank, with the cast and the copy of each parameter in one."""
    if group._all_gather_result is None:
        return
    shards, wholes = shard_places(group.fsdp_params, 1, group.device)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(wholes)):
        copy_together(wholes, shards)
    for parameter in group.fsdp_params:
        parameter.init_unsharded_param()
    group._to_unsharded()
    group._all_gather_result = None


def end_gather(gathered: Any, *_: Any) -> Any:
    """The current stream goes on when the parameters are there."""
    if not isinstance(gathered, SimpleNamespace):
        return NotImplemented
    go_on(gathered.all_gather_event)
    return None


def take_gradients(gradients: list[Tensor], message: Tensor, ranks: int) -> Any:
    """Keeps gradients, which FSDP drops, until they have been sent. In a CUDA graph of one rank it casts them: FSDP's
    own kernel reads addresses that are gone when the graph is replayed."""
    if ranks == 1 and message.is_cuda and torch.cuda.is_current_stream_capturing():
        parts = message.split([gradient.numel() for gradient in gradients])
        copy_together(parts, [gradient.reshape(-1) for gradient in gradients])
        return None
    if not hasattr(message, "gradients"):
        return NotImplemented
    message.gradients += [gradient.contiguous() for gradient in gradients]
    return None
