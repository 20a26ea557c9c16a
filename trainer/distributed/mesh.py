"""From processes to one named device mesh. The process groups of model and data parallelism are its dimensions, or
views of them."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import ConfigError, RunConfig
from trainer.distributed.c10d_internals import give_gloo_one_thread, interrupt_nobody, set_timeout
from trainer.planning.plan import Plan

T = TypeVar("T")


def local_device(run: RunConfig) -> torch.device:
    """The device of this process: GPU number LOCAL_RANK, or the CPU. Raises `ConfigError` where it does not exist."""
    if run.device == "cpu" or (run.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if count == 0:
        raise ConfigError("run.device=cuda: this machine has no GPU that torch can use; set run.device=cpu, or auto")
    if local >= count:
        raise ConfigError(
            f"run.device={run.device}: this machine has {count} GPUs, but runs at least {local + 1} processes; start "
            f"at most {count} with --nproc-per-node, or set run.device=cpu"
        )
    return torch.device("cuda", local)


@dataclass(frozen=True)
class World:
    """This process among all processes of the run. Methods that communicate are called by all ranks together."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    data: DeviceMesh
    """The ranks that see different data: of replicate x shard, flattened, every cp-th rank."""
    timeout: datetime.timedelta
    """Time after which communication fails. It has to exceed whatever a rank may keep the others waiting for, such as
    compilation."""
    context: DeviceMesh | None = None
    """The ranks that share sequences: neighbours in replicate x shard. None without context parallelism."""
    experts: DeviceMesh | None = None
    """All ranks as experts see them (`Plan.expert_mesh`). None without expert parallelism."""
    subgroups: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = field(default_factory=dict)

    @cached_property
    def dimensions(self) -> dict[str, DeviceMesh]:
        """The dimensions of the mesh, and of that of experts, by name, each as a mesh of its own. Cached, because
        slicing a DeviceMesh takes enough host time to slow down a step."""
        meshes = [self.experts, self.mesh] if self.experts is not None else [self.mesh]
        return {name: mesh[name] for mesh in meshes for name in mesh.mesh_dim_names}

    @cached_property
    def places(self) -> dict[str, int]:
        """This rank's coordinate in each dimension of the mesh."""
        return {name: dimension.get_local_rank() for name, dimension in self.dimensions.items()}

    def place(self, name: str) -> int:
        """This rank's coordinate in a dimension of the mesh."""
        return self.places[name]

    @property
    def pipeline(self) -> list[int]:
        """The global ranks of this rank's pipeline, in the order of their places in it."""
        return self.dimensions["pp"].mesh.flatten().tolist()

    @cached_property
    def peers(self) -> dist.ProcessGroup:
        """The process group of the ranks that hold parts of the same pipeline stages. All ranks access it together for
        the first time, since that creates it."""
        size = self.size // self.dimensions["pp"].size()
        return dist.group.WORLD if size == self.size else dist.new_subgroups(size, timeout=self.timeout)[0]

    @cached_property
    def peer_places(self) -> list[dict[str, int]]:
        """The mesh coordinates of these ranks, those of experts included, in the order of the group. `pp` is the
        slowest dimension, so they are all ranks with this rank's pipeline coordinate."""
        found: list[dict[str, int]] = [{} for _ in range(self.size // self.dimensions["pp"].size())]
        for mesh in filter(None, (self.mesh, self.experts)):
            names = [name for name in mesh.mesh_dim_names if name != "pp"]
            sizes = [range(self.dimensions[name].size()) for name in names]
            for place, coordinates in zip(found, itertools.product(*sizes), strict=True):
                place.update(zip(names, coordinates))
        return found

    @property
    def speaks_for_data(self) -> bool:
        """Whether this rank is the one that counts its data-parallel rank's batch. The ranks of the other dimensions,
        and those that share its sequences, read the same batch."""
        return not (self.place("pp") or self.place("tp")) and (
            self.context is None or self.context.get_local_rank() == 0
        )

    def split_context(self, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Two process groups of the context-parallel ranks: this rank's `inner` neighbours, and the ranks with its
        place among their neighbours. All ranks call it together; groups are created once and cached."""
        if inner not in self.subgroups:
            # Creating groups is a collective of all ranks, so each rank lists the context groups of all ranks, in the
            # same order.
            everyone = self.gather(self.context.mesh.tolist())
            groups = [list(group) for group in dict.fromkeys(map(tuple, everyone))]
            near = [group[start : start + inner] for group in groups for start in range(0, len(group), inner)]
            far = [group[start::inner] for group in groups for start in range(inner)]
            self.subgroups[inner] = own_group(near, self.timeout, "cp"), own_group(far, self.timeout, "cp")
        return self.subgroups[inner]

    def sum_all(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` in place over all ranks. Every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """The `value` (picklable) of every rank, in the order of ranks, on every rank."""
        return gather_objects(value)

    def agree(self, decide: Callable[[], Any]) -> Any:
        """The result of `decide` (picklable) on rank 0, on every rank. An error on rank 0 is raised on every rank. This
        makes ranks agree on whatever depends on files or clocks."""
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer = [decide()]
            except Exception as error:
                # Broadcast as well: if rank 0 raised alone, the others would wait in the broadcast forever.
                answer = [error]
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def together(self, act: Callable[[], T]) -> T:
        """The result of `act` on this rank. An error on any rank is raised on every rank. `act` must not communicate
        after a point where it may fail on one rank only."""
        error: Exception | None = None
        try:
            result = act()
        except Exception as problem:
            error = problem
        everyone = self.gather(error)
        if found := error or next(filter(None, everyone), None):
            raise found
        return result


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` (picklable) of every rank of a group (None: all ranks), in the order of ranks, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def own_group(groups: list[list[int]], timeout: datetime.timedelta, name: str) -> dist.ProcessGroup:
    """Creates several process groups, by all ranks together, and returns the one that this rank is in. Its description
    is like that of a mesh dimension, by which profiles recognise groups (`diagnosis/time_breakdown.py`)."""
    return dist.new_subgroups_by_enumeration(groups, timeout=timeout, group_desc=f"mesh_{name}")[0]


def join_world(plan: Plan, device: torch.device, timeout: float = 1200.0) -> World:
    """Starts torch.distributed (NCCL on GPUs, gloo on CPUs) unless it is running, and builds the mesh of a plan.
    timeout: of communication, in seconds.

    A plain `python -m trainer` is a world of one rank and needs no rendezvous.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # torch warns that transfers on an eagerly opened communicator run one after the other. That is intended here:
        # every direction of a pipeline has a communicator of its own.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    # Host objects (gathers of Python values, checkpoints) travel over gloo also on GPUs, so they do not queue behind
    # kernels.
    backend, limit = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", datetime.timedelta(seconds=timeout)
    # Before any group exists, since it changes how gloo's communicators are constructed.
    give_gloo_one_thread()
    if device.type == "cpu" and "RANK" in os.environ:
        interrupt_nobody()
    if not dist.is_initialized():
        rendezvous = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(
            backend, timeout=limit, **rendezvous, device_id=device if device.type == "cuda" else None
        )
    mesh = init_device_mesh(device.type, tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    # Context parallelism is a second view of replicate x shard: for sharded states its ranks are ordinary data-parallel
    # ranks.
    states, context, cp = mesh["replicate", "shard"], None, plan.cp
    if cp > 1:
        everyone = gather_objects(states.mesh.flatten().tolist())
        runs = [list(ranks) for ranks in dict.fromkeys(map(tuple, everyone))]
        shared = [ranks[start : start + cp] for ranks in runs for start in range(0, len(ranks), cp)]
        strided = [ranks[start::cp] for ranks in runs for start in range(cp)]
        context, data = (
            DeviceMesh.from_group(own_group(groups, limit, name), device.type, mesh_dim_names=(name,))
            for groups, name in ((shared, "cp"), (strided, "dp"))
        )
    else:
        data = states._flatten("dp")
    experts = None
    if plan.ep > 1:
        sizes = plan.expert_mesh
        experts = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    everyone = [*mesh.get_all_groups(), data.get_group(), *(experts.get_all_groups() if experts is not None else [])]
    for group in everyone:  # with NCCL, torch gives them 10 minutes
        set_timeout(group, limit)
    return World(dist.get_rank(), dist.get_world_size(), device, mesh, data, limit, context, experts)
