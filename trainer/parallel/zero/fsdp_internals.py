"""Every private name of FSDP2 that the project uses. torch's own pipeline uses the same ones, because FSDP's public
interface reduces gradients in backward only.

A unit is a module whose parameters FSDP gathers and reduces together. Its parameter group (`FSDPParamGroup`) keeps
their shards and, within a step, their gathered copies and the gradients accumulated so far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.tensor import DTensor

from trainer.distributed.overlap import wait_for_event
from trainer.model.layers import AdaptableLinear
from trainer.model.linear import DeferredGrads
from trainer.model.stage import Stage, compile_function
from trainer.model.transformer import Head
from trainer.parallel.zero.copy_engine import CopyEngineShards, copy_together
from trainer.precision.products import E4M3, Float8Multiply, add_weight_gradient, cast_weight, matmul, scale_of


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """The units of a model: the modules whose parameters FSDP gathers and reduces together."""
    return [
        module for module in model.modules() if isinstance(module, FSDPModule) and parameter_group(module) is not None
    ]


def parameter_group(unit: FSDPModule) -> Any:
    """FSDP's own group of a unit's parameters, None where the unit has no parameters of its own."""
    return unit._get_fsdp_state()._fsdp_param_group


def sharded_sizes(unit: FSDPModule) -> list[tuple[nn.Parameter, int]]:
    """The unit's parameters as the model has them, each with the number of elements, padding included, that it takes in
    one rank's row of the unit's reduce-scatter."""
    return [
        (parameter.sharded_param, parameter.padded_sharded_param_size.numel())
        for parameter in parameter_group(unit).fsdp_params
    ]


def keep_wide(units: list[FSDPModule], wide: Collection[nn.Parameter]) -> None:
    """Makes FSDP gather some parameters of units in the type in which they are kept, beside others in the compute type.
    All gradients of a unit are reduced in one message, so that those of `wide` get the type of the others first."""
    for unit in units:
        group = parameter_group(unit)
        chosen = [parameter for parameter in group.fsdp_params if parameter.sharded_param in wide]
        for parameter in chosen:
            parameter.init_dtype_attrs = partial(init_wide, parameter, parameter.init_dtype_attrs)
        trained = [parameter for parameter in chosen if parameter.sharded_param.requires_grad]
        if trained:
            group.post_backward = partial(narrow_gradients, group, trained, group.post_backward)


def init_wide(parameter: Any, init: Callable[[Any], None], policy: Any) -> None:
    """Replaces a parameter's `init_dtype_attrs`, which decides on its types before the first forward pass."""
    init(policy)
    parameter.param_dtype = None


def narrow_gradients(group: Any, wide: list[Any], reduce: Callable[..., None], *unused: Any) -> None:
    """Replaces a group's `post_backward`."""
    if group.reduce_grads:
        others = (whole_gradient(parameter) for parameter in group.fsdp_params if parameter not in wide)
        dtype = next((gradient.dtype for gradient in others if gradient is not None), None)
        for parameter in wide if dtype is not None else ():
            gradient = whole_gradient(parameter)
            if gradient is not None and gradient.dtype != dtype:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.unsharded_accumulated_grad = whole_gradient(parameter).to(dtype)
                parameter._unsharded_param.grad = None
    reduce(*unused)


def whole_gradient(parameter: Any) -> Tensor | None:
    """What a parameter's gradient is added to before it is reduced, None without one."""
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    whole = getattr(parameter, "_unsharded_param", None)
    return None if whole is None else whole.grad


def is_set_up(model: FSDPModule) -> bool:
    """Whether FSDP has found its root module, which it does in the first forward pass. Before that it gathers
    nothing."""
    return bool(model._get_fsdp_state()._is_root)


def accumulate_gradients(units: list[FSDPModule]) -> None:
    """Takes over gradients that were computed outside of backward, in the type in which they are reduced."""
    for unit in units:
        for parameter in parameter_group(unit).fsdp_params:
            # FSDP creates this attribute when it first gathers the parameter.
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is None or whole.grad is None:
                continue
            # FSDP accumulates in backward hooks, which no W triggers. Left in `.grad`, a second W would accumulate in
            # the compute type, and its rounding would add up over micro-batches.
            gradient, whole.grad = whole.grad, None
            if parameter.unsharded_accumulated_grad is None:
                parameter.unsharded_accumulated_grad = gradient.to(parameter.reduce_dtype or gradient.dtype)
            else:
                add_gradient(parameter.unsharded_accumulated_grad, gradient)


def add_gradient(total: Tensor, gradient: Tensor) -> None:
    """Adds the gradient of a micro-batch to the sum of earlier ones."""
    if isinstance(total, DTensor) and isinstance(gradient, DTensor) and total.placements == gradient.placements:
        total, gradient = total.to_local(), gradient.to_local()
    by_torch = total.dtype == gradient.dtype or not (total.is_contiguous() and gradient.is_contiguous())
    if not total.is_cuda or by_torch or isinstance(total, DTensor):
        total += gradient
        return
    from trainer.kernels import multi_tensor  # Triton, which is needed on a GPU only

    multi_tensor.add_in_place(total, gradient)


def accumulate_in_one_pass(units: list[FSDPModule]) -> None:
    """Makes FSDP add gradients of micro-batches by `add_gradient`."""
    for unit in units:
        for parameter in parameter_group(unit).fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed = partial(accumulate_unsharded, parameter)


def accumulate_unsharded(parameter: Any) -> None:
    """Replaces a parameter's `accumulate_unsharded_grad_if_needed`."""
    if (total := parameter.unsharded_accumulated_grad) is not None and parameter.unsharded_param.grad is not None:
        add_gradient(total, parameter.unsharded_param.grad)
        parameter.unsharded_param.grad = None


class UnshardedSum:
    """Where FSDP accumulates the gradient of a parameter until it reduces it, as a `GradientSum`. rows: those of the
    parameter that this rank multiplies with, None for all."""

    def __init__(self, parameter: Any, rows: slice | None):
        self.parameter, self.rows = parameter, rows

    def add(self, gradient: Tensor, x: Tensor) -> Tensor:
        """See `add_weight_gradient`. The first micro-batch of a step creates the sum."""
        parameter, new = self.parameter, self.parameter.unsharded_accumulated_grad is None
        if new:
            whole, create = parameter.unsharded_param, torch.zeros_like if self.rows else torch.empty_like
            parameter.unsharded_accumulated_grad = create(
                whole, dtype=parameter.reduce_dtype or whole.dtype, requires_grad=False
            )
        total = parameter.unsharded_accumulated_grad
        total = total.to_local() if isinstance(total, DTensor) else total
        if self.rows:
            return add_weight_gradient(total[self.rows], gradient, x, False)
        return add_weight_gradient(total, gradient, x, new)


def sum_in_gemms(model: Stage) -> None:
    """Makes the GEMMs of linear layers and of the head add weight gradients to where FSDP accumulates them.

    Autograd accumulates all other gradients: of the embedding, experts, matrices that multiply in fp8, layers and heads
    that are computed in tiles and sum over these themselves, and heads with a bias, which are copied."""
    deferred = DeferredGrads()
    chosen: set[AdaptableLinear | Head] = {
        module for module in model.children() if isinstance(module, Head) and not module.biased
    }
    for layer in model.layers.values():
        for module in layer.modules() if not layer.tile else ():
            if isinstance(module, AdaptableLinear) and module.multiply is matmul:
                chosen.add(module)
                if module.number is None:
                    module.defer(deferred)
    for unit in fsdp_units(model):
        group = parameter_group(unit)
        for parameter in group.fsdp_params:
            owners = parameter._module_info
            for module in chosen.intersection((owners.module, *owners.shared_modules)):
                if owners.param_name == "weight":
                    module.gradient_sum = UnshardedSum(parameter, module.part)
        group.post_backward = partial(widen_gradients, group, group.post_backward)


def widen_gradients(group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    """Replaces a group's `post_backward`. FSDP reduces gradients of one type only. In a step of one micro-batch, those
    of autograd are in the compute type and the sums in fp32."""
    for parameter in group.fsdp_params if group.reduce_grads else ():
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
    reduce(*unused)


def hold_operands(model: Stage, compiling: bool) -> None:
    """Makes a layer that multiplies in fp8 cast its weight when it has been gathered, for all products until FSDP frees
    it. The gathered copy keeps its memory: whatever reads the weight itself finds it.

    compiling: whether casts are compiled."""
    cast = compile_function(cast_weight) if compiling else cast_weight
    for unit in fsdp_units(model):
        for parameter in parameter_group(unit).fsdp_params:
            owner = parameter._module_info
            if owner.param_name == "weight" and isinstance(getattr(owner.module, "multiply", None), Float8Multiply):
                parameter._setattr_on_modules = partial(put_weight, parameter, cast, parameter._setattr_on_modules)


@torch.no_grad()
def put_weight(parameter: Any, cast: Callable, put: Callable, weight: Any) -> None:
    """Replaces `_setattr_on_modules` of a parameter, by which its gathered copy and its shard take turns as the weight
    of the layer. Operands change with the weight, so they are never of another one."""
    put(weight)
    linear = parameter._module_info.module
    linear.held = () if weight is parameter.sharded_param else cast(linear.local("weight"), linear.multiply)


def reduce_accumulated(units: list[FSDPModule], partial_sums: Mapping[FSDPModule, bool], last: bool) -> None:
    """Reduces accumulated gradients as the end of a backward pass would. partial_sums: whether FSDP may keep the
    results of a unit's earlier reductions on the device. last: whether this is the step's last reduction, which
    completes them."""
    # Backward's order, the same on all ranks: each unit's reduction is a collective.
    for unit in reversed(units):
        group = parameter_group(unit)
        if partial_sums[unit]:
            fill_missing(group, last)
        group.post_backward()


def fill_missing(group: Any, last: bool) -> None:
    """Gives zeros to parameters of a group that have no gradient in this reduction. last: whether this is the step's
    last reduction.

    Gradients are missing where two input-gradient passes (I) ran before one reduction, which then took the gradients of
    both. FSDP keeps partial sums for whole groups only, and sums over replicas only in a reduction that has gradients.
    """
    missing = [
        parameter
        for parameter in group.fsdp_params
        if parameter.sharded_param.requires_grad
        and parameter.unsharded_accumulated_grad is None
        and parameter.unsharded_param.grad is None
    ]
    # A group without any gradient may skip a reduction, but not the last: its partial sums would never be summed over
    # the replicas.
    for parameter in missing if last or len(missing) < len(group.fsdp_params) else ():
        whole = parameter.unsharded_param
        parameter.unsharded_accumulated_grad = torch.zeros_like(
            whole, dtype=parameter.reduce_dtype or whole.dtype, requires_grad=False
        )


class UnitTensors(NamedTuple):
    """Tensors that units have in memory; some are views of the same memory. messages: buffers that FSDP sends and
    receives."""

    gradients: list[Tensor]
    gathered: list[Tensor]
    messages: list[Tensor]


def unit_tensors(units: list[FSDPModule]) -> UnitTensors:
    """What units hold in memory besides their shards at this moment, also in the middle of a step. Nothing is
    allocated."""
    gradients: list[Tensor | None] = []
    gathered: list[Tensor | None] = []
    messages: list[Any] = []
    for unit in units:
        group = parameter_group(unit)
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            gathered += [*parameter.all_gather_outputs, whole, *getattr(parameter._module_info.module, "held", ())]
            gradients += [parameter.unsharded_accumulated_grad, None if whole is None else whole.grad]
        gradients.append(group._partial_reduce_output)
        context = group.comm_ctx  # one object, shared by all units of a root
        # FSDP keeps the last all-gather result alive until the next copy-out has been queued.
        previous = getattr(context.all_gather_state, "all_gather_result", None)
        messages += [getattr(result, "all_gather_output", None) for result in (group._all_gather_result, previous)]
        messages += [state.reduce_scatter_input for state in pending_reductions(context)]
        messages.append(getattr(group._all_reduce_state, "all_reduce_input", None))
    return UnitTensors(*([tensor for tensor in some if tensor is not None] for some in (gradients, gathered, messages)))


def pending_reductions(context: Any) -> list[Any]:
    """The reductions, of all units of a root, whose input buffers FSDP still keeps."""
    if hasattr(context, "reduce_scatter_states"):
        return context.reduce_scatter_states
    one = getattr(context, "reduce_scatter_state", None)  # torch 2.11 keeps at most one
    return [] if one is None else [one]


def end_reductions_in_forward(model: Stage) -> None:
    """Makes the last layer of a forward pass free the reduction buffers that the backward pass before it left.

    FSDP frees a reduction's input buffer when it creates the next one. The buffer of embedding, norm and head would
    then live until the next micro-batch's first layer has run backward, when memory is fullest. Its reduction was over
    long before.
    """
    last = list(model.layers.values())[-1]
    if parameter_group(last) is None:  # the unit has nothing that FSDP manages
        return

    def end(*_: object) -> None:
        context = parameter_group(last).comm_ctx  # one object, shared by all units of a root
        # The buffers are the current stream's memory, so it has to wait for the reductions before it may reuse them.
        # They have long ended: no time is lost.
        for state in pending_reductions(context):
            if state.event is not None:
                state.event.wait()
        if hasattr(context, "reduce_scatter_states"):
            context.reduce_scatter_states.clear()
        else:
            context.reduce_scatter_state = None

    last.register_forward_pre_hook(end)


class PassStates:
    """FSDP keeps in which pass each unit is. Two passes that run in turns need a value each.

    Otherwise FSDP would take a forward pass for recompute from the layer on where it meets the backward pass. It would
    then reduce the gradients of these layers after the next backward pass, all at once, instead of behind it."""

    def __init__(self, units: Sequence[FSDPModule]):
        states = [unit._get_fsdp_state() for unit in units]
        holders = [*states, *map(parameter_group, units)]
        roots = {id(state._state_ctx): state._state_ctx for state in states}
        self.places = [(one, "_training_state") for one in holders] + [
            (one, "iter_forward_root") for one in roots.values()
        ]
        self.other = [type(states[0]._training_state).IDLE] * len(holders) + [None] * len(roots)

    def change(self) -> None:
        """Puts back what the other pass has left, and keeps the values of this one."""
        mine = [getattr(*place) for place in self.places]
        for place, value in zip(self.places, self.other):
            setattr(*place, value)
        self.other = mine


def end_backward(model: FSDPModule) -> None:
    """What FSDP does after a root's last backward pass: makes the current stream wait for all reductions."""
    model._get_fsdp_state()._root_post_backward_final_callback()


class CopyEngineCollectives:
    """FSDP's custom all-gather and reduce-scatter by copies between GPUs (`parallel/zero/copy_engine.py`).

    FSDP calls `allocate` for a message, then for its result, and then this object with both. The message here is an
    empty tensor that carries references to the gradients: they travel from where they are, without a flat copy. The
    result of a later micro-batch is the memory of the earlier ones' gradients, to which it is added as it is summed.

    group: of the unit.
    """

    def __init__(self, shards: CopyEngineShards, group: Any):
        self.shards, self.group = shards, group
        self.message: Tensor | None = None
        self.adds = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # The second call of a pair: the result, which is real memory.
        if self.message is not None:
            earlier = earlier_gradients(self.group, size[0], dtype)
            self.adds = earlier is not None
            return torch.empty(size, dtype=dtype, device=device) if earlier is None else earlier
        self.message = torch.empty(0, dtype=dtype, device=device)
        # FSDP keeps the message until the current stream has waited for its reduction, and with it the gradients in
        # this list. They must not be freed while copy engines read them.
        self.message.gradients = []
        return self.message

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        self.message = None
        for parameter in self.group.fsdp_params if self.adds else ():
            parameter.sharded_param.grad = None  # FSDP would add the result, whose memory it is, to it
        wait_for_event(self.shards.sum(input_tensor.gradients, output_tensor, self.adds))


def earlier_gradients(group: Any, length: int, dtype: torch.dtype) -> Tensor | None:
    """The flat tensor of `length` elements that holds the gradients of all parameters of a unit, as an earlier
    reduction has left them. None without one, and where sums over replicas come in between."""
    gradients = [parameter.sharded_param.grad for parameter in group.fsdp_params]
    if group._is_hsdp or any(one is None or one.dtype is not dtype for one in gradients):
        return None
    parts = [one.to_local() for one in gradients]
    memory = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in parts}
    return parts[0].as_strided((length,), (1,), 0) if [*memory.values()] == [length * dtype.itemsize] else None


class WholeShardReduce:
    """FSDP's custom reduce-scatter of a rank whose shards are whole parameters. FSDP calls `allocate` for a message and
    then for its result, on a stream of its own, and copies one to the other. Both calls return the same tensor, so that
    copy is onto itself, where parameters keep the result as their gradients. FSDP does not call the object itself: one
    rank needs no collective.

    group: of the unit.
    """

    def __init__(self, group: Any):
        self.group = group
        self.message: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        result, self.message = self.message, None
        if result is None:
            result = self.message = torch.empty(size, dtype=dtype, device=device)
        elif result.is_cuda and not self.becomes_gradient(dtype):
            result = torch.empty_like(result)
        return result

    def becomes_gradient(self, dtype: torch.dtype) -> bool:
        """Whether parameters keep a result of this type as their gradients. FSDP casts any other result, or adds it to
        gradients that are there already, and frees it before its stream has done so: such a result needs memory of that
        stream, and the message has memory of the current one."""
        earlier = [one.sharded_param.grad for one in self.group.fsdp_params]
        return dtype is self.group._orig_dtype and all(one is None for one in earlier)


def copy_shards(units: list[FSDPModule], group: dist.ProcessGroup) -> None:
    """Makes FSDP gather and reduce units by copies between GPUs. Each unit is gathered while the one before it
    computes."""
    patch_collectives()
    shards = CopyEngineShards(group)
    for unit, following in zip(units, [*units[1:], None]):
        comm = CopyEngineCollectives(shards, parameter_group(unit))
        unit.set_custom_all_gather(comm)
        unit.set_custom_reduce_scatter(comm)
        if following is not None:
            # Copies begin with the work that the current stream has queued so far. So the next gather has to be
            # requested before this unit's kernels are queued.
            unit.set_modules_to_forward_prefetch([following])


def cast_shards(units: Collection[FSDPModule]) -> None:
    """For units whose shards are whole parameters: makes FSDP cast parameters directly to where they are used, and
    gradients directly to where they stay. FSDP's own code copies through a flat buffer each time."""
    for unit in units:
        patch_collectives()
        group = parameter_group(unit)
        unit.set_custom_reduce_scatter(WholeShardReduce(group))
        # An attribute of the instance hides the method of the class for this group alone.
        group.wait_for_unshard = partial(cast_parameters, group)


@cache
def patch_collectives() -> None:
    """Replaces FSDP's copies into and out of flat buffers for the units of `CopyEngineCollectives` and
    `WholeShardReduce`. Other units keep FSDP's own functions. Called once per process."""
    group, collectives = _fsdp_param_group, _fsdp_collectives
    group.foreach_all_gather = fall_back_on(group.foreach_all_gather, gather_parameters)
    group.foreach_all_gather_copy_out = fall_back_on(group.foreach_all_gather_copy_out, end_gather)
    collectives.foreach_reduce_scatter_copy_in = fall_back_on(
        collectives.foreach_reduce_scatter_copy_in, take_gradients
    )


def fall_back_on(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `ours`, and FSDP's own function `theirs` where `ours` returns NotImplemented."""

    @wraps(theirs)
    def either(*arguments: Any) -> Any:
        done = ours(*arguments)
        return theirs(*arguments) if done is NotImplemented else done

    return either


@torch.no_grad()
def gather_parameters(parameters: list[Any], group: dist.ProcessGroup, *more: Any) -> Any:
    """Starts to gather a unit's parameters into the memory where they are used.

    That memory is allocated on the current stream, and the copies wait for what this stream has queued by now. They do
    not wait for the layer before, whose kernels are queued afterwards, and so overlap with it.
    """
    *_, device, comm = more
    if not isinstance(comm, CopyEngineCollectives):
        return NotImplemented
    shards, wholes = shard_places(parameters, group.size(), device)
    # The copies write to tensors that autograd may have saved. Their values are the same as before, so autograd must
    # not see a modification.
    with torch.autograd._unsafe_preserve_version_counter(tuple(wholes)):
        ended = comm.shards.gather(shards, [whole.view(group.size(), -1) for whole in wholes])
    return SimpleNamespace(all_gather_event=ended, all_gather_work=None)


def shard_places(parameters: list[Any], ranks: int, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's shards of a unit's parameters, and newly allocated memory for the whole parameters, both flat: lists
    of [n] and [ranks x n]."""
    for parameter in parameters:
        dtype = parameter.param_dtype or parameter.orig_dtype
        parameter.init_all_gather_outputs([parameter._sharded_param_data.numel()], [dtype], ranks, device)
        parameter.alloc_all_gather_outputs()
    return (
        [parameter._sharded_param_data for parameter in parameters],
        [parameter.all_gather_outputs[0] for parameter in parameters],
    )


def cast_parameters(group: Any) -> None:
    """Replaces a group's `wait_for_unshard` on one rank: like FSDP's own, with the cast and the copy of each parameter
    in one operation."""
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
    """Makes the current stream wait until the gathered parameters have arrived."""
    if not isinstance(gathered, SimpleNamespace):
        return NotImplemented
    wait_for_event(gathered.all_gather_event)
    return None


def take_gradients(gradients: list[Tensor], message: Tensor, ranks: int) -> Any:
    """Attaches gradients to the message, which FSDP would drop, until they have been sent.

    Of whole shards it casts them into the message instead. FSDP's own kernel reads a table with an entry for each 2 KiB
    of gradients, which the host fills each time: 4 ms for the experts of a layer. The table no longer exists when a
    CUDA graph is replayed.
    """
    if ranks == 1 and message.is_cuda:
        parts = message.split([gradient.numel() for gradient in gradients])
        copy_together(parts, [gradient.reshape(-1) for gradient in gradients])
        return None
    if not hasattr(message, "gradients"):
        return NotImplemented
    message.gradients += [gradient.contiguous() for gradient in gradients]
    return None


# Parameters on their way through ZeRO's all-gather in fp8 (`precision.float8.gather`). A matrix that multiplies in
# fp8 with one scale is rounded to fp8 at every use: nothing is lost if it is rounded before it travels, with the
# scale of the whole matrix, for which ranks agree on its largest element first. What arrives is cast back to the
# compute type. bf16 rounds by far less than half of fp8's steps, and the largest element is what it was: the product
# that rounds again finds the same scale and the same fp8 numbers. (torchao's float8 all-gather keeps parameters in
# fp8 instead; here they stay tensors as any other.)


class Float8AllGather:
    """FSDP's custom all-gather of a unit: a flat buffer of every rank's shards, one parameter behind the other. It is
    one of bytes where parameters have several types.

    narrow: whether each parameter travels in fp8; lengths: bytes of its shard, with padding; dtype: of those that do;
    compiling: whether casts are compiled."""

    def __init__(self, lengths: Sequence[int], narrow: Sequence[bool], dtype: torch.dtype, compiling: bool):
        self.lengths, self.narrow, self.dtype = list(lengths), list(narrow), dtype
        self.encode: Callable = compile_function(encode_shards) if compiling else encode_shards
        self.decode: Callable = compile_function(decode_shards) if compiling else decode_shards

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        lengths = [length // input_tensor.element_size() for length in self.lengths]
        parts = input_tensor.split(lengths)
        narrow = [part.view(self.dtype) for part, chosen in zip(parts, self.narrow) if chosen]
        plain = [part for part, chosen in zip(parts, self.narrow) if not chosen]
        largest = torch.stack([part.abs().amax() if len(part) else part.new_zeros(()) for part in narrow]).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        sent = self.encode(plain, narrow, largest)
        received = sent.new_empty(group.size() * len(sent))
        dist.all_gather_into_tensor(received, sent, group)
        whole, codes = output_tensor.view(group.size(), -1), received.view(group.size(), -1)
        places = whole.split(lengths, 1)
        ordered = [place for place, chosen in zip(places, self.narrow) if not chosen]
        ordered += [place.view(self.dtype) for place, chosen in zip(places, self.narrow) if chosen]
        self.decode(codes, ordered, largest)


def encode_shards(plain: list[Tensor], narrow: list[Tensor], largest: Tensor) -> Tensor:
    """A rank's bytes: the parameters that travel as they are, which begin at whole elements, then the others in fp8,
    and a byte that fills up the last element."""
    scales, bytes_ = scale_of(largest, E4M3), [part.view(torch.uint8) for part in plain]
    bytes_ += [(part.float() * scale).to(E4M3).view(torch.uint8) for part, scale in zip(narrow, scales.unbind())]
    missing = -sum(map(len, narrow)) % narrow[0].element_size()
    return torch.cat([*bytes_, bytes_[-1].new_zeros(missing)])


def decode_shards(codes: Tensor, targets: list[Tensor], largest: Tensor) -> None:
    """Every rank's bytes [ranks, bytes] -> parameters [ranks, elements], in the order in which they travelled."""
    back, first = scale_of(largest, E4M3).double().reciprocal().float(), 0
    for number, target in enumerate(targets, len(largest) - len(targets)):
        width = target.shape[1] * (target.element_size() if number < 0 else 1)
        part = codes[:, first : first + width]
        target.copy_(part.view(target.dtype) if number < 0 else part.view(E4M3).float() * back[number])
        first += width


def gather_in_float8(model: nn.Module, dtype: torch.dtype, wide: Collection[nn.Parameter], compiling: bool) -> None:
    """Has FSDP gather in fp8 what the model's linear layers multiply so, with one scale for a matrix. dtype: in which
    it gathers the other parameters, but for those that are `wide`."""
    narrow = {
        module.weight
        for module in model.modules()
        if isinstance(multiply := getattr(module, "multiply", None), Float8Multiply)
        and not (multiply.rowwise or module.weight.dtype is E4M3)
    }
    for unit in fsdp_units(model):
        sizes = sharded_sizes(unit)
        lengths = [size * (parameter if parameter in wide else dtype).itemsize for parameter, size in sizes]
        chosen = [parameter in narrow for parameter, _ in sizes]
        if any(chosen):
            unit.set_custom_all_gather(Float8AllGather(lengths, chosen, dtype, compiling))
