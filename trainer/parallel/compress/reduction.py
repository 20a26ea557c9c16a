"""Reductions of gradients over the data-parallel ranks with quantised hops, in place of FSDP's own reductions.

FSDP passes one flat buffer for each unit (a layer; or embedding, final norm and head together). It has a row for each
rank of the shard group, with that rank's shard of each parameter. `UnitMessage` reduces it by a reduce-scatter within
the shard group and then by an all-reduce over replicas. Each of them takes one link or, where its group spans several
nodes, two: with a flat all-to-all over the ranks of all nodes, every rank of a node would send its own copy over the
network (ZeRO++, Wang et al., arXiv 2306.10209).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config import GradCommConfig, HopConfig
from trainer.distributed.mesh import World, gather_objects
from trainer.model.initial import name_seed
from trainer.optim.optimizer import ParameterPolicy
from trainer.parallel.compress.codec import BlockCodec, BlockLayout, ErrorFeedback, pack_blocks, unpack_blocks
from trainer.parallel.compress.plan import BLOCK, ReductionRoute, enabled_codecs, reduction_routes
from trainer.parallel.zero.fsdp_internals import fsdp_units, sharded_sizes
from trainer.planning.plan import Plan, node_size
from trainer.precision.scaler import LossScale

# One hop of a reduction: ranks that exchange parts of a tensor, encoded by a codec or in the tensor's own type.
# Encoded parts are exchanged by an all-to-all, and added up in fp32 in the order of ranks. So each contribution is
# quantised once, where a ring would quantise partial sums again and again.


# torch 2.13 renames these functions and warns of the old names; 2.11 has the old names only.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class CompressedLink:
    """A group of ranks and how gradients travel between them.

    kind: inner or outer. sent: bytes that this rank has sent since the last reset.
    """

    kind: str
    group: dist.ProcessGroup
    codec: BlockCodec | None
    sent: int = 0

    def __post_init__(self) -> None:
        self.size = self.group.size()

    def scatter(
        self,
        flat: Tensor,
        blocks: BlockLayout,
        target: Tensor,
        places: BlockLayout,
        errors: ErrorFeedback | None = None,
        unit: Tensor | None = None,
    ) -> None:
        """Reduce-scatter. The rows of `blocks` in `flat` go to the ranks in order; each rank sums up the rows it
        receives.

        places: where this rank's sum is written in `target`. errors, unit: see `codec.pack_blocks`."""
        if self.codec is None:
            rows = blocks.gather(flat)
            total = rows.new_empty(places.rows, places.count, places.block)
            self.scatter_plain(rows.view(-1), total.view(-1))
            places.scatter(total, target)
            return
        payload = pack_blocks(self.codec, flat, blocks, errors, unit)
        received = torch.empty_like(payload)
        dist.all_to_all_single(received, payload, group=self.group)
        self.sent += payload.numel() // self.size * (self.size - 1)
        unpack_blocks(self.codec, received.view(self.size, places.rows, -1), places, target)

    def scatter_plain(self, flat: Tensor, total: Tensor) -> None:
        """Reduce-scatter in the tensors' own type."""
        reduce_scatter(total, flat, group=self.group)
        self.sent += total.nbytes * (self.size - 1)

    def gather(self, part: Tensor) -> Tensor:
        """All-gather of bytes or values: [...] -> [ranks x ...]."""
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        all_gather(whole, part.contiguous(), group=self.group)
        self.sent += part.nbytes * (self.size - 1)
        return whole

    def sum_plain(self, flat: Tensor) -> None:
        """All-reduce in the tensor's own type."""
        dist.all_reduce(flat, group=self.group)
        self.sent += 2 * flat.nbytes * (self.size - 1) // self.size


@dataclass
class LinkUse:
    """One use of a link in a reduction.

    blocks: layout of what is sent. places: layout of where the received blocks are written. errors: error feedback,
    i.e. what quantisation left out of earlier steps; None without it.
    """

    link: CompressedLink
    blocks: BlockLayout
    places: BlockLayout
    errors: ErrorFeedback | None


class CodedPath:
    """The reduction of a message's quantised parameters over `links`: a reduce-scatter from the first link to the last
    and, for an all-reduce, an all-gather back from the last link to the first.

    segments: (offset, length) of the parameters in the message, in the order in which their blocks go to the `rows`
    ranks. parts: (offset, length) in a reduce-scatter's result where this rank's share is written; None for an
    all-reduce.
    """

    def __init__(
        self,
        links: list[CompressedLink],
        segments: list[tuple[int, int]],
        rows: int,
        parts: list[tuple[int, int]] | None,
        feedback: dict[str, str],
        device: torch.device,
    ):
        # Links may have codecs with different block sizes. Padding every segment to the largest one gives rows of the
        # same length on all links.
        grain = max(link.codec.block for link in links if link.codec is not None)
        block = [link.codec.block if link.codec is not None else grain for link in links]
        start = [BlockLayout(segments, size, rows, device, grain) for size in block]
        length = start[0].length
        self.length, self.device = length, device
        self.scatter_uses: list[LinkUse] = []
        remaining = rows
        # Each hop divides the number of rows by the size of its group, until the last leaves this rank's share.
        for index, link in enumerate(links):
            blocks = start[0] if index == 0 else BlockLayout.dense(remaining, length, block[index], device)
            remaining //= link.size
            last_of_scatter = parts is not None and index == len(links) - 1
            places = (
                BlockLayout(parts, block[index], 1, device, grain)
                if last_of_scatter
                else BlockLayout.dense(remaining, length, block[index], device)
            )
            self.scatter_uses.append(LinkUse(link, blocks, places, _errors(link, feedback, blocks)))
        self.gather_uses: list[LinkUse] = []
        if parts is None:
            # The first link of the all-gather that has a codec encodes. The links after it pass its bytes on unchanged,
            # so all ranks decode the same bytes and replicas stay equal.
            encoder = next(index for index in reversed(range(len(links))) if links[index].codec is not None)
            for index in reversed(range(len(links))):
                blocks = BlockLayout.dense(remaining, length, block[encoder], device)
                remaining *= links[index].size
                self.gather_uses.append(
                    LinkUse(
                        links[index],
                        blocks,
                        BlockLayout(segments, block[encoder], rows, device, grain),
                        _errors(links[index], feedback, blocks) if index == encoder else None,
                    )
                )

    @property
    def errors(self) -> Iterator[ErrorFeedback]:
        return (use.errors for use in [*self.scatter_uses, *self.gather_uses] if use.errors is not None)

    def scatter(self, flat: Tensor, target: Tensor, unit: Tensor) -> None:
        """Reduce-scatter of `flat` into `target`, which for an all-reduce is this rank's share [length]. unit: the loss
        scale."""
        for use in self.scatter_uses:
            last = use is self.scatter_uses[-1]
            result = target if last else torch.empty(use.places.rows * self.length, device=self.device)
            use.link.scatter(flat, use.blocks, result, use.places, use.errors, unit)
            flat = result

    def reduce(self, flat: Tensor, unit: Tensor) -> None:
        """All-reduce of `flat` in place. All ranks get the same bits."""
        share = torch.empty(self.length, device=self.device)
        self.scatter(flat, share, unit)
        moving, codec = share.view(1, -1), None
        for use in self.gather_uses:
            if codec is None and use.link.codec is not None:
                codec = use.link.codec
                moving = pack_blocks(codec, moving.view(-1), use.blocks, use.errors, unit)
            moving = use.link.gather(moving)
        unpack_blocks(codec, moving.unsqueeze(0), self.gather_uses[-1].places, flat)


def _errors(link: CompressedLink, feedback: dict[str, str], blocks: BlockLayout) -> ErrorFeedback | None:
    return ErrorFeedback(blocks) if link.codec is not None and feedback[link.kind] != "none" else None


class UnitMessage:
    """The gradients of one FSDP unit and how they are reduced.

    The object itself is FSDP's custom reduce-scatter (`set_custom_reduce_scatter`); `reduce` is FSDP's all-reduce hook
    (`set_all_reduce_hook`).
    """

    def __init__(self, owner: Compression, number: int, parameters: dict[str, tuple[int, bool]]):
        """parameters: by name, the number of elements in a row of the buffer, and whether they may be quantised."""
        self.owner, self.number, self.parameters = owner, number, parameters
        self.coded, self.plain, self.chunk = [], [], 0
        for length, quantised in parameters.values():
            (self.coded if quantised else self.plain).append((self.chunk, length))
            self.chunk += length
        self.partial: Tensor | None = None
        self.scatter_path = self.reduce_path = None
        ranks = owner.shards
        if owner.coded(owner.scatter_links) and self._large(self.chunk * ranks):
            local = owner.scatter_links[0].size
            # With two hops, the first sends to the ranks of this node, so its destinations' rows must be contiguous:
            # all rows of local rank 0 on every node, then those of local rank 1. With one hop this is the identity.
            order = [place * local + first for first in range(local) for place in range(ranks // local)]
            segments = [(row * self.chunk + offset, length) for row in order for offset, length in self.coded]
            self.scatter_path = CodedPath(
                owner.scatter_links, segments, ranks, self.coded, owner.feedback, owner.device
            )
        if owner.coded(owner.reduce_links) and self._large(self.chunk):
            self.reduce_path = CodedPath(
                owner.reduce_links, self.coded, owner.replicas, None, owner.feedback, owner.device
            )

    def _large(self, elements: int) -> bool:
        # `min_size` is in bytes of fp32. Small messages cost latency, not bandwidth, so they are not quantised.
        return bool(self.coded) and 4 * elements >= self.owner.settings.min_size

    @property
    def errors(self) -> Iterator[ErrorFeedback]:
        return (errors for path in (self.scatter_path, self.reduce_path) if path is not None for errors in path.errors)

    def allocate(self, size: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message or for its result. FSDP calls this."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter of rows [shards x chunk] into this rank's [chunk]. FSDP calls this on its reduce-scatter
        stream."""
        if self.scatter_path is None:
            self.owner.whole_scatter.scatter_plain(input_tensor, output_tensor)
            return
        self._check(output_tensor)
        # Parameters that may not be quantised (norms, biases) travel in one plain collective beside the encoded ones.
        if self.plain:
            rows = torch.cat(
                [input_tensor.view(-1, self.chunk)[:, offset : offset + length] for offset, length in self.plain], 1
            )
            total = rows.new_empty(rows.shape[1])
            self.owner.whole_scatter.scatter_plain(rows.view(-1), total)
            self._put(total, output_tensor)
        self.scatter_path.scatter(input_tensor, output_tensor, self.owner.unit)

    @torch.no_grad()
    def reduce(self, output: Tensor) -> None:
        """All-reduce of [chunk] over replicas, in place. Before a step's last reduction, `output` is only
        accumulated."""
        # FSDP allocated `output` on another stream, and may free it before this stream has used it.
        if output.is_cuda:
            output.record_stream(torch.cuda.current_stream())
        if self.partial is not None:
            output += self.partial
            self.partial = None
        if not self.owner.last:
            self.partial = output.clone()
            output.zero_()  # FSDP adds it to the gradient; the whole sum follows with the last reduction
            return
        if self.reduce_path is None:
            self.owner.whole_reduce.sum_plain(output)
            return
        self._check(output)
        if self.plain:
            values = torch.cat([output[offset : offset + length] for offset, length in self.plain])
            self.owner.whole_reduce.sum_plain(values)
            self._put(values, output)
        self.reduce_path.reduce(output, self.owner.unit)

    def _put(self, values: Tensor, output: Tensor) -> None:
        for (offset, length), part in zip(self.plain, values.split([length for _, length in self.plain])):
            output[offset : offset + length] = part

    def _check(self, output: Tensor) -> None:
        """FSDP leaves parameters without a gradient out of the buffer, which would shift the offsets of all parameters
        behind them."""
        if output.numel() != self.chunk:
            raise RuntimeError(
                f"a message of {self.chunk} elements was reduced with {output.numel()}: a parameter had no gradient"
            )


def compression_of(settings: GradCommConfig, plan: Plan, world: World) -> Compression | NoCompression:
    """The compression of gradients that `parallel.grad_comm` sets. All ranks call it together."""
    return Compression(settings, plan, world) if enabled_codecs(settings) else NoCompression()


class NoCompression:
    """Stands for `Compression` where no hop has a codec: FSDP's own reductions are used."""

    adds_replicas = once = False
    feedback_bytes, last, partial_sums, errors = 0, True, (), ()

    @property
    def sent(self) -> dict[str, int]:
        return {}

    def attach(self, model: nn.Module, policies: dict[str, ParameterPolicy]) -> None: ...
    def begin_step(self, scaler: LossScale) -> None: ...
    def end_step(self, found_inf: Tensor) -> None: ...
    def identity(self) -> None: ...

    def resume(self, saved: dict[str, Any] | None) -> bool:
        return False

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def close(self) -> None: ...


class Compression:
    """The quantised hops of a plan: their links, and the messages of this rank's stages. All ranks construct it
    together.

    last: whether the next reduction is the stage's last one in the step; set before every reduction. unit: the step's
    loss scale, which the gradients contain.
    """

    adds_replicas = True
    """It also sums over replicas, so FSDP only has to reduce within the shard group."""

    def __init__(self, settings: GradCommConfig, plan: Plan, world: World):
        self.settings, self.device, self.rank = settings, world.device, world.rank
        self.plan, self.shards, self.replicas = plan, plan.shard, plan.replicate
        self.feedback = {kind: getattr(settings, kind).error_feedback for kind in ("inner", "outer")}
        self.messages: list[UnitMessage] = []
        self.unit, self.last = torch.ones((), device=world.device), True
        scattered, reduced = reduction_routes(plan, node_size(world.size))
        self.scatter_links = _links(scattered, world, "shard", settings)
        self.reduce_links = _links(reduced, world, "replicate", settings)
        # Plain links over the whole groups, for what is not quantised. Their traffic counts as that of the last hop.
        self.whole_scatter, self.whole_reduce = (
            CompressedLink(route.hops[-1][0], world.dimensions[name].get_group(), None) if route else None
            for route, name in ((scattered, "shard"), (reduced, "replicate"))
        )

    @staticmethod
    def coded(links: list[CompressedLink]) -> bool:
        return any(link.codec is not None for link in links)

    @property
    def once(self) -> bool:
        """Whether gradients are reduced only once a step under every plan, because each quantised reduction adds an
        error."""
        return self.coded(self.scatter_links)

    def attach(self, model: nn.Module, policies: dict[str, ParameterPolicy]) -> None:
        """Replaces the reductions of a sharded model's units."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for unit in fsdp_units(model):
            parameters = {
                (name := names[id(parameter)]): (size, policies[name].quantise)
                for parameter, size in sharded_sizes(unit)
                if parameter.requires_grad
            }
            message = UnitMessage(self, len(self.messages), parameters)
            self.messages.append(message)
            if self.scatter_links:
                unit.set_custom_reduce_scatter(message)
            if self.reduce_links:
                unit.set_all_reduce_hook(message.reduce)

    def begin_step(self, scaler: LossScale) -> None:
        """Before an optimizer step. scaler: its loss scale."""
        self.unit = scaler.value
        for link in self._all_links():
            link.sent = 0

    def end_step(self, found_inf: Tensor) -> None:
        """After the step. Its errors count only if its update was applied (`found_inf`, a scalar, is zero)."""
        for message in self.messages:
            for errors in message.errors:
                errors.end_step(found_inf)

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that this rank has sent in this step, by kind of hop."""
        return {kind: sum(link.sent for link in self._all_links() if link.kind == kind) for kind in ("inner", "outer")}

    @property
    def feedback_bytes(self) -> int:
        """Bytes of this rank's error feedback, of earlier steps and of the step in progress."""
        return sum(part.nbytes for part in self.errors)

    def identity(self) -> dict[str, Any]:
        """Everything that the meaning of `tensors` depends on, as JSON data. Equal on all ranks, which call it
        together.

        Ranks of a pipeline have different messages, so a hash of all ranks' messages is included.
        """
        everyone = gather_objects(name_seed(0, json.dumps([message.parameters for message in self.messages])))
        return json.loads(
            json.dumps(
                {
                    "chosen": [],  # part of the format
                    "settings": dataclasses.asdict(self.settings),
                    "plan": self.plan.to_dict(),
                    "hops": [[link.kind, link.size] for link in [*self.scatter_links, *self.reduce_links]],
                    "messages": name_seed(0, str(everyone)),
                }
            )
        )

    def resume(self, saved: dict[str, Any] | None) -> bool:
        """Whether settings and plan equal those of a checkpoint, so that `tensors` can be filled from it. saved: the
        checkpoint's `identity`, or None. All ranks call it together."""
        return self.identity() == saved

    @property
    def partial_sums(self) -> list[Tensor]:
        """The accumulated gradients of a step before its last reduction."""
        return [message.partial for message in self.messages if message.partial is not None]

    @property
    def errors(self) -> Iterator[Tensor]:
        """All tensors of error feedback."""
        return (part for message in self.messages for one in message.errors for part in (one.kept, one.pending))

    def tensors(self) -> dict[str, Tensor]:
        """The error feedback of this rank, as a checkpoint holds it."""
        return {
            # Errors belong to a rank, not to a parameter: two ranks quantise different gradients of the same parameter.
            f"compression.{self.rank}.{message.number}.{index}.0": errors.kept
            for message in self.messages
            for index, errors in enumerate(message.errors)
        }

    def close(self) -> None:
        """Destroys the process groups that only this object uses. All ranks call it together."""
        for links in (self.scatter_links, self.reduce_links):
            # A single link uses a group of the mesh, which others need too.
            for link in links if len(links) > 1 else ():
                dist.destroy_process_group(link.group)

    def _all_links(self) -> list[CompressedLink]:
        return [*self.scatter_links, *self.reduce_links, *filter(None, (self.whole_scatter, self.whole_reduce))]


def resolve_codec(hop: HopConfig) -> BlockCodec | None:
    """The codec of a hop, None where it sends gradients as they are."""
    if hop.codec == "none":
        return None
    return BlockCodec(hop.codec, BLOCK[hop.codec])


def _links(route: ReductionRoute | None, world: World, name: str, settings: GradCommConfig) -> list[CompressedLink]:
    """The links of a route with their codecs, from first to last. All ranks call it together."""
    if route is None:
        return []
    groups = [world.dimensions[name].get_group()]
    if len(route.hops) > 1:
        # Hop 1 connects the ranks of a node; hop 2 connects the ranks with the same place in their nodes.
        within = [part for group in route.groups for part in group]
        between = [ranks for group in route.groups for ranks in zip(*group)]
        groups = [_group(members, world) for members in (within, between)]
    return [
        CompressedLink(kind, group, resolve_codec(getattr(settings, kind)))
        for (kind, _), group in zip(route.hops, groups, strict=True)
    ]


def _group(members: list[tuple[int, ...]], world: World) -> dist.ProcessGroup:
    """The group among `members` that this rank is in. All ranks call it together."""
    # `new_group` is a collective over all ranks: each rank creates every group, in the same order, also those that it
    # is not in.
    groups = [dist.new_group(list(ranks), timeout=world.timeout) for ranks in members]
    return next(group for group, ranks in zip(groups, members) if world.rank in ranks)
