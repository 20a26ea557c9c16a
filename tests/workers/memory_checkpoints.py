"""Five ranks on three nodes (folders that stand for memory file systems): saves into memory, loses nodes and files, and
loads what is left under other layouts.

Arguments: the folder to work in.
"""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_values import expected
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainer.checkpointing.loading import load_tensors
from trainer.checkpointing.manifest import list_checkpoints, step_folder
from trainer.checkpointing.memory import MemoryCheckpointer, MemoryNodes, fetch_files, find_in_memory
from trainer.config import CheckpointConfig, ConfigError
from trainer.distributed.mesh import join_world
from trainer.planning.plan import Plan

NODE_OF_RANK = (0, 0, 1, 1, 2)


def lay_out(values, mesh, layout):
    """Replicated plain tensors, or rows over all ranks."""
    if layout == "plain":
        return {name: value.clone() for name, value in values.items()}
    return {
        name: distribute_tensor(value.clone(), mesh, [Shard(0) if value.dim() else Replicate()])
        for name, value in values.items()
    }


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def find(nodes, world, identity="run", launchers=(), any_launch=True):
    return find_in_memory(nodes, identity, launchers, any_launch, world)


def check_loads(nodes, world, mesh, step, label):
    """The newest in-memory checkpoint is that of `step`, and both layouts can be filled from it."""
    found = find(nodes, world)
    assert found is not None and found[0] == step, f"{label}: {found}"
    for layout in ("plain", "rows"):
        wanted, tensors = (lay_out(expected(), mesh, layout) for _ in range(2))
        for tensor in tensors.values():
            local(tensor).fill_(7)
        fetch_files(nodes, found[1], tensors, world)
        load_tensors(found[1], tensors)
        for name, tensor in tensors.items():
            assert torch.equal(local(tensor), local(wanted[name])), f"{label}: {name} as {layout}"


def lose_node(nodes, number):
    """A node that has been replaced has nothing in its memory."""
    dist.barrier()
    if nodes.leads and NODE_OF_RANK[nodes.rank] == number:
        shutil.rmtree(nodes.folder)
    dist.barrier()


def main(folder):
    world = join_world(Plan(shard=5), torch.device("cpu"))
    mesh = world.mesh["shard"]
    root = folder / f"node-{NODE_OF_RANK[world.rank]}"
    root.mkdir(exist_ok=True)
    config = CheckpointConfig(peer_every=1, peer_folder=str(root))
    nodes = MemoryNodes.find(config, folder / "run", world)
    assert nodes.nodes == [[0, 1], [2, 3], [4]] and nodes.own == nodes.nodes[NODE_OF_RANK[world.rank]]
    assert find(nodes, world) is None

    for layout in ("plain", "rows"):
        for lost in (None, 0, 1, 2):
            memory = MemoryCheckpointer(nodes, config, "run")
            memory.check_memory(lay_out(expected(), mesh, layout), world)
            for step in (3, 4):
                memory.save(step, lay_out(expected(), mesh, layout), {"launchers": ["mine"]})
            memory.close()
            dist.barrier()  # the first rank of each node has removed the one before
            assert memory.saved_step == 4 and all("training waited" in text for text in memory.poll())
            assert list(list_checkpoints(nodes.folder)) == [4], "the one before stays"
            if lost is not None:
                lose_node(nodes, lost)
            check_loads(nodes, world, mesh, 4, f"{layout} without node {lost}")
    assert find(nodes, world, identity="another run") is None and find(nodes, world, identity=None) is None
    assert find(nodes, world, any_launch=False, launchers=["another"]) is None
    assert find(nodes, world, any_launch=False, launchers=["another", "mine"])[0] == 4

    # Every node has all files by now, as each rank has loaded all. A fresh save spreads them again.
    memory = MemoryCheckpointer(nodes, config, "run")
    memory.save(5, lay_out(expected(), mesh, "rows"), {}, wait=True)
    own = step_folder(nodes.folder, 5) / f"rank-{world.rank:05d}-0.bin"
    dist.barrier()
    if world.rank in (0, 2):
        own.write_bytes(bytes(reversed(own.read_bytes())))
    dist.barrier()
    check_loads(nodes, world, mesh, 5, "two files damaged, whose copies are whole")

    # A kill between the renames of two nodes: one has the new checkpoint, all have the old one.
    memory._finish = lambda *_: None
    memory.save(6, lay_out(expected(), mesh, "rows"), {}, wait=True)
    dist.barrier()
    if nodes.leads and NODE_OF_RANK[world.rank] != 1:
        step_folder(nodes.folder, 6).rename(step_folder(nodes.folder, 6).with_suffix(".tmp"))
    dist.barrier()
    check_loads(nodes, world, mesh, 5, "the new one on one node of three")
    nodes.remove_checkpoints(step_folder(nodes.folder, 5))
    dist.barrier()
    assert [path.name for path in nodes.folder.iterdir()] == ["step-00000005"]

    memory.save(7, lay_out(expected(), mesh, "rows"), {}, wait=True)
    nodes.remove_checkpoints(step_folder(nodes.folder, 7))
    lose_node(nodes, 0), lose_node(nodes, 2)
    assert find(nodes, world) is None, "two of three nodes are lost"
    memory.close(remove=True)
    dist.barrier()
    assert not nodes.folder.exists()

    try:
        MemoryNodes.find(CheckpointConfig(peer_every=1, peer_folder=str(folder / "absent")), folder / "run", world)
        raise AssertionError("a missing folder was not noticed")
    except ConfigError as error:
        assert "peer_folder" in str(error) and "absent" in str(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
