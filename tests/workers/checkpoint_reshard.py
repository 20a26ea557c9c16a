"""Four ranks: saves the same values under several layouts, loads each under several others, and compares bits.

Arguments: the folder to work in; it holds `single`, written by one process without a process group.
"""

import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_values import FSDP_NAMES, expected, linear
from support.checkpoints import read_tensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.loading import load_tensors
from trainer.checkpointing.manifest import read_manifest, step_folder
from trainer.checkpointing.retention import find_resume
from trainer.config import CheckpointConfig, ConfigError

CONFIG = CheckpointConfig()


def lay_out(values, mesh, fsdp=False):
    """`values` over `mesh`: rows over the last dimension, columns over the first where that is a tensor dimension."""
    tensors = {}
    for name, value in values.items():
        if mesh is None or value.dim() == 0:
            tensors[name] = value.clone()
        elif mesh.mesh_dim_names == ("dp", "tp"):
            tensors[name] = distribute_tensor(value.clone(), mesh, [Shard(0), Shard(value.dim() - 1)])
        else:
            tensors[name] = distribute_tensor(value.clone(), mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(0)])
    if fsdp:
        module = linear(values)
        fully_shard(module, mesh=mesh)
        tensors |= {f"linear.{name}": parameter for name, parameter in module.named_parameters()}
        assert all(isinstance(tensors[name], DTensor) for name in FSDP_NAMES)
    return tensors


def local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def overwrite(tensors):
    for tensor in tensors.values():
        local(tensor).fill_(7)


def check_equal(tensors, wanted, label):
    for name, tensor in tensors.items():
        assert torch.equal(local(tensor), local(wanted[name])), f"{label}: {name}"


def reshard(folder, meshes):
    values = expected()
    saved = {"single": folder / "single"}
    for name in ("dp4", "hsdp", "fsdp_tp", "plain"):
        checkpointer = Checkpointer(folder / name, CONFIG)
        tensors = lay_out(values, meshes[name], fsdp=name in ("dp4", "hsdp"))
        checkpointer.save(3, tensors, {"layout": name})
        overwrite(tensors)
        checkpointer.close()
        assert checkpointer.saved_step == 3
        saved[name] = folder / name
        files = read_manifest(step_folder(folder / name, 3))["files"]
        sizes = [file["bytes"] for file in files.values()]
        assert len(sizes) == 4 and max(sizes) < 1.5 * min(sizes), f"{name}: ranks write {sizes} bytes"
    for source, path in saved.items():
        for target in ("dp4", "hsdp", "fsdp_tp", "plain", "dp2", "dp3"):
            wanted = lay_out(values, meshes[target], fsdp=target in ("dp4", "hsdp"))
            tensors = lay_out(values, meshes[target], fsdp=target in ("dp4", "hsdp"))
            overwrite(tensors)
            load_tensors(step_folder(path, 3), tensors)
            check_equal(tensors, wanted, f"{source} -> {target}")


def stages(folder, rank):
    """Ranks that hold different tensors, as pipeline stages do."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    value = expected()["matrix"] + rank // 2
    mine = {f"stage{rank // 2}": distribute_tensor(value, meshes[rank // 2], [Shard(0)])}
    checkpointer = Checkpointer(folder / "stages", CONFIG)
    checkpointer.save(1, mine, {})
    checkpointer.close()
    whole = read_tensors(step_folder(folder / "stages", 1))
    assert all(torch.equal(whole[f"stage{i}"], expected()["matrix"] + i) for i in (0, 1))
    other = {f"stage{1 - rank // 2}": torch.zeros_like(value)}
    load_tensors(step_folder(folder / "stages", 1), other)
    assert torch.equal(other[f"stage{1 - rank // 2}"], expected()["matrix"] + (1 - rank // 2))


def agreed_error(folder, rank):
    """A tensor that only one rank misses is everybody's error."""
    try:
        load_tensors(step_folder(folder / "stages", 1), {"absent": torch.zeros(2)} if rank == 2 else {})
    except ConfigError as error:
        assert "absent" in str(error)
    else:
        raise AssertionError("a missing tensor was not noticed")


def agreed_damage(folder, rank):
    """Damage that only the readers of one file meet is everybody's error, or the others would wait for them."""
    path = step_folder(folder / "stages", 1)
    dist.barrier()
    if rank == 0:
        os.truncate(path / "rank-00002.bin", 10)
    dist.barrier()
    try:
        load_tensors(path, {f"stage{rank // 2}": torch.zeros_like(expected()["matrix"])})
    except ConfigError as error:
        assert "rank-00002.bin has 10 bytes" in str(error)
    else:
        raise AssertionError("a short file was not noticed")


def failing_rank(folder, rank):
    """A rank that cannot write: the run goes on and says so, the older checkpoint stays, the next save works."""
    checkpointer = Checkpointer(folder / "failing", CONFIG)
    tensors = {"weights": distribute_tensor(torch.randn(40_000), init_device_mesh("cpu", (4,)), [Shard(0)])}
    checkpointer.save(1, tensors, {}, wait=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    checkpointer.save(2, tensors, {})
    checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    open_files = [os.path.realpath(entry) for entry in Path("/proc/self/fd").glob("*")]
    assert not any("step-00000002" in name for name in open_files)  # they would hold on to the space
    messages = checkpointer.poll()
    if rank == 0:
        assert "saved" in messages[0] and len(messages) == 2
        assert "step 2 could not be saved: rank 1: [Errno 27] File too large" in messages[1], messages
        assert [path.name for path in (folder / "failing").iterdir()] == ["step-00000001"]
        assert find_resume("auto", folder / "failing") == (step_folder(folder / "failing", 1), [])
    else:
        assert messages == []
    assert checkpointer.saved_step == 1
    checkpointer.save(3, tensors, {})
    checkpointer.close()
    assert checkpointer.saved_step == 3


def main():
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    meshes = {
        "dp4": init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)),
        "hsdp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        "fsdp_tp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        "dp2": DeviceMesh("cpu", [0, 1], mesh_dim_names=("shard",)),
        "dp3": DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("shard",)),
        "plain": None,
    }
    reshard(folder, meshes)
    stages(folder, rank)
    agreed_error(folder, rank)
    agreed_damage(folder, rank)
    failing_rank(folder, rank)
    dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
