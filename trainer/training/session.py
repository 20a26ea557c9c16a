"""The surroundings of a training run: torch's global switches, the run folder, the watchdog, signals, and the launch
that the run is a part of."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from trainer.config import Config, ConfigError
from trainer.config.hardware import HardwareConfig
from trainer.config.typed import flatten_values
from trainer.data.corpus import Corpus
from trainer.distributed.mesh import World
from trainer.distributed.symmetric_memory import can_share_memory
from trainer.model.attention import kernel_priority
from trainer.model.initial import name_seed
from trainer.observe.report import device_name
from trainer.observe.sinks import write_status
from trainer.observe.watchdog import Watchdog
from trainer.parallel.compress.plan import enabled_codecs
from trainer.planning.decide import MachineMemory, decide_collectives
from trainer.planning.hardware import load_hardware, shipped_for
from trainer.planning.plan import Plan, node_size
from trainer.planning.resolve import Layout
from trainer.planning.schedules import ir
from trainer.training import history
from trainer.util.exit_codes import process_rank
from trainer.util.lines import read_status, refuse_links
from trainer.util.machine import LAUNCHER_ENDED, SignalHandlers, find_launcher, host_memory
from trainer.util.reading import explain_errors, lock_folder


@contextlib.contextmanager
def numeric_mode(config: Config) -> Iterator[None]:
    """Context that sets torch's global numeric switches for a run, and restores them afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    if config.run.deterministic:
        # cuBLAS reads this when it is first used. Without it torch raises an error for cuBLAS calls in deterministic
        # mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.run.deterministic)
    torch.set_float32_matmul_precision(config.precision.matmul)
    try:
        with kernel_priority(config.run.deterministic):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])


@contextlib.contextmanager
def host_threads(plan: Plan, device: torch.device) -> Iterator[None]:
    """Context for offload, where the host computes the update. A process with a GPU uses its share of the cores if it
    has one thread, which is what torchrun sets unless OMP_NUM_THREADS is set."""
    before = torch.get_num_threads()
    if plan.offload and device.type == "cuda" and before == 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // node_size(plan.world)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def memory_of(device: torch.device) -> MachineMemory:
    """The memory of a process's GPU, and that of its machine or container."""
    gpu = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return MachineMemory(gpu, host_memory())


def least_memory(world: World) -> MachineMemory:
    """The memory by which all ranks decide alike. GPU: the smallest amount that any rank has free or already reserved.
    Host: that of the smallest machine. All ranks call it together."""
    free = None
    if world.device.type == "cuda":
        # torch's cache counts as free: a run that follows another in one process reuses it.
        free = torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device)
    everyone = world.gather((free, host_memory()))
    return MachineMemory(
        min((free for free, _ in everyone if free is not None), default=None), min(host for _, host in everyone)
    )


def can_share_states(config: Config, layout: Layout, world: World, node: int) -> bool:
    """The check behind `parallel.zero.collectives=auto`: whether the GPUs that would copy states to each other can
    share memory. All ranks call it together. node: processes of a machine."""
    copied = decide_collectives(config, layout, node, True).parallel.zero.collectives == "copy_engine"
    if world.device.type != "cuda" or config.parallel.zero.collectives != "auto" or not copied:
        return False
    able = all(world.gather(can_share_memory(world.device, world.mesh["shard"].get_group())))
    if not able and world.rank == 0 and config.logging.console != "none":
        print("parallel.zero.collectives=auto is nccl: GPUs of this node cannot share memory", flush=True)
    return able


def find_hardware(config: Config, device: torch.device) -> HardwareConfig | None:
    """The speed of the run's devices, if `activation.mode=auto` or `parallel.ep_dispatch=auto` needs it, else None.
    Raises `ConfigError`."""
    shares = config.parallel.ep > 1 and config.parallel.ep_dispatch == "auto"
    if config.activation.mode != "auto" and not shares:
        return None
    try:
        return load_hardware(config.activation.hardware or shipped_for(device_name(device)))
    except ConfigError as error:
        raise ConfigError([f"activation.{problem}" for problem in error.problems]) from None


@contextlib.contextmanager
def claim_folder(folder: Path, world: World) -> Iterator[None]:
    """Context in which the run folder is locked against other runs. It is created, and what a killed start left half
    done in it is undone. Raises `ConfigError` and `FolderError` on every rank; the former also where links in the
    folder lead out of it."""

    def claim() -> int:
        descriptor = lock_folder("run.dir", folder, "run", "run.name or run.dir")
        try:
            with explain_errors(folder):
                refuse_links(folder)
                history.recover_folder(folder)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    # Rank 0 alone holds the lock. The others learn from `agree` whether it was granted.
    descriptor = world.agree(claim)
    try:
        yield
    finally:
        if world.rank == 0:
            os.close(descriptor)


def compare_ranks(config: Config, layout: Layout, corpus: Corpus, world: World) -> None:
    """Refuses processes that were started with different settings or that found different data, which happens on
    several nodes with a command line and a cache each. Folders may differ. Raises `ConfigError` on every rank."""
    folders = (
        "run.dir",
        "data.cache",
        "data.chat_template",
        "model.from_hf",
        "checkpoint.resume",
        "checkpoint.peer_folder",
    )
    mine = {
        name: value
        for name, value in flatten_values(dataclasses.asdict(config)).items()
        if name not in folders and not (name.startswith(("data.sources.", "eval.sets.")) and name.endswith(".path"))
    }
    mine |= {
        "the content of data.sources and data.tokenizer": corpus.fingerprint,
        "the content of eval.sets": corpus.sets_fingerprint,
        "model": layout.spec.to_dict(),
        "the schedule": name_seed(0, ir.format_schedule(layout.pipeline.schedule) + str(layout.pipeline.split)),
    }
    quantised = bool(enabled_codecs(config.parallel.grad_comm))
    if quantised:  # the hops of gradients follow from it
        mine["LOCAL_WORLD_SIZE, the processes of a node,"] = node_size(world.size)
    everyone = world.gather((mine, socket.gethostname()))
    first = everyone[0][0]
    problems = [
        f"{name}={first.get(name)} on rank 0, but {other.get(name)} on rank {rank}; start every process with the same "
        "settings"
        for rank, (other, _) in enumerate(everyone)
        for name in first
        if first.get(name) != other.get(name)
    ]
    machines = len({machine for _, machine in everyone})
    if quantised and machines > 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        problems.append(
            f"parallel.grad_comm needs to know which of the processes on {machines} machines are on one: set "
            "LOCAL_WORLD_SIZE, the processes of a machine, for every process, as torchrun does"
        )
    if problems:
        # All ranks have gathered the same values, so all raise the same error.
        raise ConfigError(problems[:5])


@contextlib.contextmanager
def start_watchdog(config: Config, world: World) -> Iterator[Watchdog]:
    """Context with the run's watchdog. Its files are named by the time at which rank 0 started."""
    start = world.agree(lambda: time.strftime("%Y%m%d-%H%M%S"))
    watchdog = Watchdog(Path(config.run.dir), start, world.rank, world.size, config.guard, config.run.steps)
    try:
        yield watchdog
    except BaseException:
        # Other ranks then know that this one failed, and do not wait for its heartbeat.
        watchdog.close(orderly=False)
        raise
    watchdog.close(orderly=True)


class StopRequest:
    """Whether this process was requested to end the run: by a signal, or because its launcher has ended. See
    `stop_signals`.

    asked_by: what requested it, for messages; empty as long as nothing has.
    """

    def __init__(self, signals: SignalHandlers | None):
        self.signals, self.asked_by = signals, ""

    def ask(self, what: str) -> None:
        """Ends the run after the present step, with a checkpoint."""
        self.asked_by = what if what == LAUNCHER_ENDED else "a signal"

    def defer(self, folder: Path, done: Callable[[], int], steps: int) -> None:
        """From now on, signals only set the request, and the next step tells all ranks. Before that they end the
        process at once. Called when status.json is about to say `running`; a signal that ends the process at once then
        changes it to `failed`.

        done: returns the number of steps done, of `steps`.
        """
        if self.signals is None:
            return

        def leave(name: str) -> None:
            reason = (
                f"{name} to rank {process_rank()}, which left at once; the newest checkpoint is the last that was saved"
            )
            if read_status(folder).get("status") == "running":
                write_status(folder, "failed", done(), steps, reason)
            os.write(2, f"\n{reason}\n".encode())

        def interrupt(*_: object) -> None:
            # The second Ctrl-C raises KeyboardInterrupt.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if process_rank() == 0:
                # Written to the file descriptor, since the signal may have interrupted a `print`. Ctrl-C may also have
                # ended a `tee` that reads it.
                with contextlib.suppress(OSError):
                    os.write(2, INTERRUPTING)
            self.ask("SIGINT")

        self.signals.stop, self.signals.leave = self.ask, leave
        if not self.signals.own:
            self.signals.handle()
        # Background jobs of a script ignore SIGINT, and have to keep ignoring it.
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self.signals.before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)


INTERRUPTING = b"\nstopping: this step ends, then the run saves. Ctrl-C again leaves at once, unsaved\n"


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Context in which signals that would end this process end the run in order; see `util/machine.py` and
    `StopRequest.defer`. A second Ctrl-C raises `KeyboardInterrupt`.

    The command line's own process has handlers already and keeps them to its end: signals must not change its exit code
    while it ends.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield StopRequest(None)
    elif SignalHandlers.present is not None:
        yield StopRequest(SignalHandlers.present)
    else:
        stop = StopRequest(None)
        stop.signals = SignalHandlers(stop.ask, leave=lambda _: None, own=False)
        try:
            yield stop
        finally:
            stop.signals.restore()


class RunClock:
    """The time that remains to this start of the run, where `hours` limit it. It counts from the clock's construction.

    A pass of the training loop is one step with what follows it (evaluation, save). The first pass of a start compiles,
    so it is not taken as a measure.
    """

    UNKNOWN_SAVE = 0.05
    """Fraction of the limit reserved for the last save, as long as no save has been timed."""
    LONGEST_UNKNOWN = 300.0
    """Upper limit of that reserve, in seconds."""

    def __init__(self, hours: float | None):
        self.limit, self.began, self.over = None if hours is None else 3600 * hours, time.monotonic(), False
        self.passes, self.longest, self.entered = 0, 0.0, self.began

    def next_pass(self) -> None:
        """Marks the end of a pass and the start of the next."""
        now = time.monotonic()
        # The first pass compiles, so it says nothing of the others.
        if self.passes > 1:
            self.longest = max(self.longest, now - self.entered)
        self.passes, self.entered = self.passes + 1, now

    def up(self, save: float | None) -> bool:
        """Whether the run has to end now; `over` from then on. save: seconds of the longest save so far, None if there
        was none.

        That is when two more passes and the last save would exceed the limit: the other ranks may learn of the decision
        one pass later.
        """
        if self.limit is not None and not self.over:
            save_time = min(self.UNKNOWN_SAVE * self.limit, self.LONGEST_UNKNOWN) if save is None else 2 * save
            self.over = time.monotonic() - self.began + 2 * self.longest + save_time >= self.limit
        return self.over


def list_launchers(world: World) -> list[str]:
    """Names of the torchrun processes that started this run's ranks and may restart them; empty if none may.

    Two starts with a name in common belong to one launch, even if other nodes have joined or left in between. All ranks
    call it together.
    """
    mine = ""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        launcher = find_launcher()
        mine = f"{socket.gethostname()} {launcher.pid} {launcher.started}" if launcher else ""
    return sorted(set(world.gather(mine)) - {""})


def warn_of_stale_store() -> None:
    """Warns at the first start that torchrun's restarts would fail. Workers that it starts again read the addresses of
    the dead ones from the shared store, unless they have a store of their own."""
    if (
        int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("RANK") == "0"
    ):
        print(
            "torchrun --max-restarts will not work: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's "
            "environment, or start it with launch/elastic.sh",
            file=sys.stderr,
            flush=True,
        )
