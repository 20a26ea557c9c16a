"""What is wrong with one node: its GPUs as nvidia-smi reports them, its disks, and folders that all nodes share."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import ConfigError
from trainer.config.fields import option
from trainer.observe.hardware import SLOWED
from trainer.util.run_folder import refuse_links

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
