"""Processes -> one named device mesh. Every process group of the project is a dimension of this mesh."""
from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import ConfigError, RunConfig
from trainer.planning.plan import Plan

DIMENSIONS = ("pp", "replicate", "shard", "cp", "tp")
"""From the slowest to the fastest; neighbours in the last dimension are neighbours in a node. `cp` has one rank until there
is context parallelism."""


def local_device(run: RunConfig) -> torch.device:
    """The device of this process: GPU number LOCAL_RANK, or the CPU. Raises `ConfigError` where it does not exist."""
    if run.device == "cpu" or (run.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if count == 0:
        raise ConfigError("run.device=cuda: this machine has no GPU that torch can use; set run.device=cpu, or auto")
    if local >= count:
        raise ConfigError(f"run.device={run.device}: this machine has {count} GPUs, but runs at least {local + 1} processes; "
                          f"start at most {count} with --nproc-per-node, or set run.device=cpu")
    return torch.device("cuda", local)


@dataclass(frozen=True)
class World:
    """This process among all of them."""
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    data: DeviceMesh
    """The ranks that see different data: replicate x shard as one dimension."""
    timeout: datetime.timedelta
    """After which communication fails on its own. It has to outlast what a rank may keep the others waiting for, such as compiling."""

    @property
    def pipeline(self) -> list[int]:
        """The global ranks of this rank's pipeline, in order of their place in it."""
        return self.mesh["pp"].mesh.flatten().tolist()

    def place(self, name: str) -> int:
        """This rank's coordinate in a dimension of the mesh."""
        return self.mesh[name].get_local_rank()

    def sum_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` in place over the ranks that see different data."""
        return self._sum(values, self.data.get_group())

    def sum_all(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` in place over all ranks; every rank gets the same bits."""
        return self._sum(values, None)

    def most(self, value: int) -> int:
        """The largest `value` of all ranks."""
        everyone: list[int] = [0] * self.size
        dist.all_gather_object(everyone, value)
        return max(everyone)

    def agree(self, decide: Callable[[], Any]) -> Any:
        """What rank 0 decides (a picklable value), on every rank; an error of it is raised on every rank."""
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer = [decide()]
            except Exception as error:
                answer = [error]
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def _sum(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(values, group=group)
        return values


def join(plan: Plan, device: torch.device, timeout: float = 1200.0) -> World:
    """Starts torch.distributed (NCCL on GPUs, gloo on CPUs) unless it runs, and builds the mesh that the plan asks for. timeout: of
    communication, in seconds.

    A plain `python -m trainer` is a world of one and needs no rendezvous.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Pipelines have a communicator for each direction, which is what NCCL would warn about.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    backend, limit = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", datetime.timedelta(seconds=timeout)
    if not dist.is_initialized():
        rendezvous = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=limit, **rendezvous,
                                device_id=device if device.type == "cuda" else None)
    mesh = init_device_mesh(device.type, (plan.pp, plan.replicate, plan.shard, 1, plan.tp), mesh_dim_names=DIMENSIONS)
    data = mesh["replicate", "shard"]._flatten("dp")
    for group in (*mesh.get_all_groups(), data.get_group()):  # torch would give them 10 minutes with NCCL
        dist.distributed_c10d._set_pg_timeout(limit, group)
    return World(dist.get_rank(), dist.get_world_size(), device, mesh, data, limit)
