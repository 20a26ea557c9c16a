"""What is wrong with the nodes of a run: GPUs as nvidia-smi reports them, disks, folders that all nodes share,
bandwidth, and clocks."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.config.fields import option
from trainer.observe.hardware import SLOWED
from trainer.util.lines import refuse_links

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

NODE = os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass
class PreflightOptions:
    check: str = option(None, "what to look at", ("node", "network"))
    gpus: int = option(0, "GPUs that this node must have; 0: it is used for its CPUs, and GPUs are not looked at")
    run_dir: str = option("", "node: folder that all nodes must see; empty looks at none")
    cache: str = option("", "node: folder of tokenised corpora, written on first use; empty looks at none")
    free_gib: float = option(20.0, "node: GiB that must be free for run_dir")
    cache_gib: float = option(1.0, "node: GiB that must be free for cache")
    nodes: str = option(
        "", "node: names of all nodes, separated by commas, which must see each other's files in run_dir"
    )
    stamp: str = option("once", "node: a name for this check, so that files of an earlier one do not count")
    patience: float = option(60.0, "seconds to wait for other nodes' files, and for an all-reduce to end")
    within: float = option(
        -1.0, "network: least bus bandwidth of an all-reduce within a node, GB/s; -1: 20 (GPUs), 0.01 (CPUs)"
    )
    between: float = option(-1.0, "network: the same between two nodes, GB/s; -1: 2 (GPUs), 0.002 (CPUs)")
    share: float = option(-1.0, "network: least share of the median over nodes; -1: 0.6 (GPUs), 0 (CPUs)")
    skew: float = option(1.0, "network: most seconds that a node's clock may differ from the others'")


# Names of `nvidia-smi --query-gpu`; drivers before 535 know the last as clocks_throttle_reasons.active.
FIELDS = (
    "index",
    "uuid",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "memory.used",
    "temperature.gpu",
    "clocks_event_reasons.active",
)

OCCUPIED_MIB = 2048  # more than an idle driver holds


def nvidia_smi(run: Callable[..., Any] = subprocess.run) -> str:
    """The output of nvidia-smi for `FIELDS`. Raises `ConfigError`, with what to do, where there is none."""
    for last in (FIELDS[-1], "clocks_throttle_reasons.active"):
        query = ",".join([*FIELDS[:-1], last])
        try:
            done = run(
                ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                timeout=60,
            )
        except FileNotFoundError:
            raise ConfigError(
                "there is no nvidia-smi: the node has no GPU driver, or the job was given no GPUs"
            ) from None
        except subprocess.TimeoutExpired:
            raise ConfigError(
                "nvidia-smi does not answer within 60 s: the driver hangs, the node needs a reboot"
            ) from None
        if done.returncode == 0:
            return done.stdout
    raise ConfigError(
        f"nvidia-smi failed: {' '.join((done.stdout + done.stderr).split())[:300]}; reset the GPU or reboot the node"
    )


def gpu_problems(output: str, asked: int, visible: str | None = None) -> list[str]:
    """What is wrong with the GPUs of a node, from nvidia-smi's lines for `FIELDS`.

    visible: CUDA_VISIBLE_DEVICES, which hides GPUs from the run but not from nvidia-smi.
    """
    rows = [
        dict(zip(FIELDS, (cell.strip() for cell in line.split(",")))) for line in output.splitlines() if line.strip()
    ]
    if visible is not None:
        mine = [name.strip() for name in visible.split(",") if name.strip()]
        rows = [row for row in rows if any(row["index"] == name or row["uuid"].startswith(name) for name in mine)]
    problems = []
    if len(rows) != asked:
        problems.append(
            f"{len(rows)} of {asked} GPUs are there: look for 'fallen off the bus' (Xid 79) in dmesg, or set "
            "--gpus-per-node"
        )
    for row in rows:
        problems += [f"GPU {row['index']} ({row['uuid']}): {text}" for text in _gpu_problems(row)]
    return problems


def _gpu_problems(row: dict[str, str]) -> Iterator[str]:
    errors, pending, failed, used, degrees, reasons = (row.get(name, "") for name in FIELDS[2:])
    if _number(errors) > 0:
        yield (
            f"{errors} uncorrected ECC errors since the last reset: reset it (nvidia-smi --gpu-reset) or reboot the "
            "node"
        )
    if failed in ("Yes", "1"):
        yield "a row of its memory could not be remapped: have it replaced"
    if pending in ("Yes", "1"):
        yield "a row of its memory waits to be remapped: reset it (nvidia-smi --gpu-reset) or reboot the node"
    if _number(used) > OCCUPIED_MIB:
        yield f"{used} MiB of its memory are in use before the start: end the processes that nvidia-smi shows"
    active = int(reasons, 16) if reasons.startswith("0x") else 0
    if slowed := [name for bit, name in SLOWED.items() if active & bit]:
        yield f"throttled by {' and '.join(slowed)} at {degrees} degrees: look at its cooling and power supply"


def _number(text: str) -> float:
    """A number of nvidia-smi; 0 for `[N/A]`, which stands for what a GPU does not count."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def disk_problems(name: str, folder: Path, wanted: float) -> list[str]:
    """What is wrong with writing `wanted` GiB into `folder`, which is created. name: the setting that names it."""
    probe = folder / f".preflight-{NODE}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(probe, "xb") as file:  # a full quota shows here only
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return [f"{name}={folder} cannot be written: {error.strerror}; mend the mount, or set another {name}"]
    finally:
        try:
            probe.unlink(missing_ok=True)
        except OSError:
            pass  # the error is reported already
    free = shutil.disk_usage(folder).free / 2**30
    if free >= wanted:
        return []
    return [f"{name}={folder} has {free:.1f} GiB free and {wanted:.1f} are wanted: make room, or set another {name}"]


def missing_nodes(folder: Path, nodes: Iterable[str], patience: float) -> list[str]:
    """Leaves a file with this node's name in `folder`; returns those of `nodes` whose file does not appear there.

    patience: seconds to wait for them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NODE).touch()
    end, missing = time.monotonic() + patience, sorted(nodes)
    while missing and time.monotonic() < end:
        # The folder is listed, since network file systems cache for a while that a single name does not exist.
        seen = set(os.listdir(folder))
        missing = [node for node in missing if node not in seen]
        time.sleep(0.2 if missing else 0)
    return missing


def check_node(options: PreflightOptions) -> list[str]:
    """Everything that is wrong with this node, and the nodes whose files it does not see."""
    problems, nodes = [], [name for name in options.nodes.split(",") if name]
    if options.gpus:
        try:
            problems += gpu_problems(nvidia_smi(), options.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        except ConfigError as error:
            problems += error.problems
    if options.cache:
        try:
            problems += disk_problems("data.cache", Path(options.cache).expanduser(), options.cache_gib)
        except RuntimeError as error:  # ~NAME, of nobody here
            problems.append(f"data.cache={options.cache}: {str(error).rstrip('.')}; set another data.cache")
    if options.run_dir:
        folder = Path(options.run_dir)
        try:
            refuse_links(folder)
        except ConfigError as error:  # this check writes, and removes what earlier checks have left
            return problems + error.problems
        except OSError as error:
            return [*problems, f"run.dir={folder} cannot be read: {error.strerror}; mend that, or set another run.dir"]
        unwritable = disk_problems("run.dir", folder, options.free_gib)
        problems += unwritable
        if nodes and not (unwritable and "cannot be written" in unwritable[0]):
            marks = folder / "preflight"
            try:
                for old in marks.glob("*"):  # of earlier checks
                    if old.name != options.stamp:
                        shutil.rmtree(old, ignore_errors=True)
                problems += [
                    f"sees nothing in run.dir={folder} from {node} for {options.patience:g} s: either that node did "
                    "not start, or the folder is not the same on both; put run.dir on a shared file system"
                    for node in missing_nodes(marks / options.stamp, nodes, options.patience)
                ]
            except OSError as error:
                problems.append(f"{marks} cannot be used: {error.strerror}; remove it, or set another run.dir")
    return problems


# What is wrong between nodes: the bandwidth of all-reduces within and between them, and their clocks.


@dataclass(frozen=True)
class BandwidthFloors:
    """Least bus bandwidths in GB/s, and the least share of the median."""

    within: float
    between: float
    share: float


FLOORS = {"nccl": BandwidthFloors(20.0, 2.0, 0.6), "gloo": BandwidthFloors(0.01, 0.002, 0.0)}
"""These are far below what NVLink, PCIe 4 and 100 Gbit/s reach, and above what broken links leave. A cluster's own
figures, given as options, find more."""

ELEMENTS = {"nccl": 2**26, "gloo": 2**20}  # fp32

HUNG = 0.0  # GB/s of an all-reduce that failed or did not end


def pair_nodes(nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs of nodes, in which each node is paired with two others, where there are as many.

    A node that is slow in both pairs is slow itself; one that is slow in only one of them is not."""
    even = [(first, first + 1) for first in range(0, nodes - 1, 2)]
    odd = [(first, first + 1) for first in range(1, nodes - 1, 2)]
    if nodes > 2 and nodes % 2 == 0:
        odd.append((nodes - 1, 0))
    return [pairs for pairs in (even, odd) if pairs]


def bandwidth_problems(
    within: dict[str, float], between: dict[tuple[str, str], float], floors: BandwidthFloors
) -> list[str]:
    """Which nodes, or pairs of nodes, are slower than they may be. GB/s; `HUNG` where an all-reduce did not end."""
    problems = [
        f"{node}: all-reduce over its processes {speed}; look at nvidia-smi topo -m and nvlink --status, and leave it "
        "out meanwhile"
        for node, speed in _slow(within, floors.within, floors.share)
    ]
    slow = dict(_slow(between, floors.between, floors.share))
    for node in dict.fromkeys(itertools.chain(*slow)):
        links = [pair for pair in between if node in pair]
        if len(links) > 1 and all(link in slow for link in links):
            problems.append(
                f"{node}: all-reduce with each of {len(links)} other nodes {slow[links[0]]}; look at its network "
                "adapter (ibstat, ethtool), and leave it out meanwhile"
            )
            slow = {pair: speed for pair, speed in slow.items() if node not in pair}
    return problems + [
        f"{first} with {second}: all-reduce {speed}; look at the adapters of both, their cables and "
        "NCCL_SOCKET_IFNAME, NCCL_IB_HCA"
        for (first, second), speed in slow.items()
    ]


def _slow(speeds: dict[Any, float], floor: float, share: float) -> Iterator[tuple[Any, str]]:
    """Those whose speed is below the floor, or below the share of the median, with a text that says so."""
    median = statistics.median(speeds.values()) if speeds else 0.0
    for who, speed in speeds.items():
        if speed == HUNG:
            yield who, "failed or did not end"
        elif speed < floor:
            yield who, f"at {speed:.3g} GB/s, below the floor of {floor:g}"
        elif speed < share * median:
            yield who, f"at {speed:.3g} GB/s, below {share:g} of the median {median:.3g}"


def clock_problems(rounds: Sequence[dict[str, float]], limit: float) -> list[str]:
    """The nodes whose clock differs from the median by more than `limit` seconds.

    rounds: the nodes' clocks, read at one moment, but for the time that a message takes. Of several rounds a node's
    smallest difference counts, since delays look like differences."""
    least: dict[str, float] = {}
    for clocks in rounds:
        median = statistics.median(clocks.values())
        for node, clock in clocks.items():
            least[node] = min(least.get(node, float("inf")), clock - median, key=abs)
    return [
        f"{node}: its clock is {abs(difference):.1f} s {'ahead of' if difference > 0 else 'behind'} the others' (more "
        f"than {limit:g}): start chrony or ntpd there"
        for node, difference in least.items()
        if abs(difference) > limit
    ]


def check_network(options: PreflightOptions) -> tuple[list[str], str]:
    """Everything that is wrong between the processes that torchrun started, and a summary of what was measured.

    Both are the same on all processes."""
    import torch
    import torch.distributed as dist

    from trainer.distributed.mesh import gather_objects

    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=datetime.timedelta(seconds=options.patience + 60)
    )

    control = dist.new_group(backend="gloo")
    names = gather_objects((int(os.environ.get("GROUP_RANK", 0)), NODE), control)
    nodes = sorted(set(names))
    members = [[other for other, name in enumerate(names) if name == node] for node in nodes]

    def measure(groups: list[list[int]]) -> list[float]:
        """The bus bandwidth of each group, measured at the same time: that of its slowest process."""
        made = [dist.new_group(group) for group in groups]
        mine = next((index for index, group in enumerate(groups) if rank in group), None)
        speed = None
        if mine is not None:
            speed = all_reduce_speed(
                made[mine], len(groups[mine]), torch.ones(ELEMENTS[backend], device=device), options.patience
            )
        speeds = gather_objects(speed, control)
        return [min(speeds[member] for member in group) for group in groups]

    rounds = []
    for _ in range(5):
        dist.barrier(group=control)
        clocks = gather_objects(time.time(), control)
        rounds.append({node[1]: clocks[ranks[0]] for node, ranks in zip(nodes, members)})
    problems = clock_problems(rounds, options.skew)
    within = dict(zip((name for _, name in nodes), measure(members))) if len(members[0]) > 1 else {}
    between: dict[tuple[str, str], float] = {}
    for pairs in pair_nodes(len(nodes)):
        if HUNG in [*within.values(), *between.values()]:
            break  # processes may be stuck in that all-reduce
        speeds = measure([members[first] + members[second] for first, second in pairs])
        between |= {(nodes[first][1], nodes[second][1]): speed for (first, second), speed in zip(pairs, speeds)}
    given = {name: value for name in ("within", "between", "share") if (value := getattr(options, name)) != -1}
    floors = replace(FLOORS[backend], **given)
    measured = [
        f"{kind} {min(speeds.values()):.3g} to {max(speeds.values()):.3g} GB/s"
        for kind, speeds in (("within nodes", within), ("between nodes", between))
        if speeds
    ]
    return problems + bandwidth_problems(
        within, between, floors
    ), f"{len(nodes)} nodes, all-reduce {', '.join(measured)}"


def all_reduce_speed(group: Any, size: int, tensor: Any, patience: float) -> float:
    """Bus bandwidth of an all-reduce in GB/s: 2 (n - 1) / n of its bytes by its time, comparable between group sizes.

    `HUNG` where it fails, gives a wrong sum, or takes longer than `patience` seconds."""
    import torch
    import torch.distributed as dist

    seconds = []
    try:
        for _ in range(5):  # the first one also connects; the best one counts
            tensor.fill_(1)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            start = time.monotonic()
            work = dist.all_reduce(tensor, group=group, async_op=True)
            while not work.is_completed():
                if time.monotonic() - start > patience:
                    return HUNG
            seconds.append(time.monotonic() - start)
            work.wait()
            if not bool((tensor == size).all()):
                return HUNG
    except RuntimeError as error:  # a connection refused or lost; NCCL's errors
        print(f"preflight: {NODE}: {' '.join(str(error).split())[:300]}", file=sys.stderr, flush=True)
        return HUNG
    return 2 * (size - 1) / size * tensor.numel() * tensor.element_size() / min(seconds) / 1e9


# TCP ports for a rendezvous of processes that are started later; `python -m trainer.cluster.node` prints one.


HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""From which to which port Linux takes those that nobody named: of connections opened, of sockets bound to 0."""

LOWEST = 10_000
"""Services have their fixed ports below, Slurm's among them."""


def free_ports(count: int = 1) -> list[int]:
    """`count` different ports on which nothing listens now on this machine, and which the system hands out to nobody.

    A port that it does hand out can be gone before a rendezvous listens there, which takes seconds of imports: each
    connection that any process opens meanwhile may get it. torchrun then fails after 104 s (torch 2.13), or, where
    what took it listens, talks to a stranger. Raises `OSError` if there are not so many."""
    try:
        low, high = (int(bound) for bound in HANDED_OUT.read_text().split())
    except (OSError, ValueError):  # not Linux; IANA's range
        low, high = 49_152, 65_535
    every = range(LOWEST, 65_536)
    own = [port for port in every if not low <= port <= high] or list(every)
    found: list[int] = []
    for port in random.SystemRandom().sample(own, len(own)):  # never by a run's seed: two runs would take the same
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{len(found)} of {len(own)} ports are free, and {count} are wanted")


if __name__ == "__main__":
    print(*free_ports())
