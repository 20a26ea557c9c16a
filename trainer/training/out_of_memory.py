"""Out of memory: what a run says of it, and leaves in its folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.config import Config, ConfigError
from trainer.diagnosis.oom_report import NOTHING, OUTSIDE, POOLS, REST, MemoryOverride, OOMReport
from trainer.distributed.mesh import World
from trainer.distributed.tensors import Fragment, local_values
from trainer.observe.report import device_name, peak_memory_gib
from trainer.observe.sinks import reason_of, write_status
from trainer.planning.decide import Decision, MachineMemory, MemoryLimit, describe_recompute
from trainer.planning.hardware import load_hardware, shipped_for
from trainer.planning.plan import node_size
from trainer.planning.resolve import Layout
from trainer.training.state import TrainState
from trainer.util.machine import missing_memory, resident_memory, used_memory
from trainer.util.tables import format_bytes

if TYPE_CHECKING:  # loaded where memory has run out
    from trainer.diagnosis.evidence import RunMachine
    from trainer.diagnosis.suggestions import Suggestions

# What a rank has in memory at this moment, by category. It is read where memory has run out: nothing is allocated.


HOST = "states in host memory"
"""Of a run on GPUs: what is told of tensors that do not lie on its device."""


@torch.no_grad()
def memory_breakdown(state: TrainState) -> dict[str, float | None]:
    """Bytes by the estimator's categories, None where they cannot be known; in the middle of a step too.

    Memory counts whole, padding included, and once: of categories whose tensors share it, the first has it."""
    found: dict[str, float | None] = {}
    seen, host = set[int](), 0
    engine = state.engine.holds()
    for name, own in state_bytes(state).items():
        theirs = engine.get(name, ())
        if theirs is None:
            found[name] = None
            continue
        found[name] = 0
        for tensor in chain(own, theirs):
            memory = tensor.untyped_storage()
            size = memory.nbytes()
            if not size or memory.data_ptr() in seen:
                continue
            seen.add(memory.data_ptr())
            if tensor.device.type == state.world.device.type:
                found[name] += size
            else:
                host += size
    return found | ({HOST: host} if host else {})


def state_bytes(state: TrainState) -> dict[str, Iterable[Tensor]]:
    """What does not depend on the engine; empty of the categories that only it knows of."""
    parameters: list[Tensor | Fragment] = list(state.optimizer.parameters.values())
    return {
        "parameters": [local_values(one) for one in (*parameters, *(one for _, one in state.frozen))],
        "optimizer": state.optimizer.moments(),
        "average of weights": state.average.values.values() if state.average is not None else (),
        "error feedback": state.compression.errors,
        "gradients": [local_values(one.grad) for one in parameters if one.grad is not None],
        "gathered parameters": (),
        "communication buffers": (),
    }


@contextlib.contextmanager
def explain_oom(
    config: Config, layout: Layout, world: World, memory: MachineMemory, done: Callable[[], int]
) -> Iterator[list[Callable[[], TrainState]]]:
    """Around what may run out of memory: adds what is known of it to such an error (`BaseException.add_note`), and
    leaves it in the run's folder. done: says how many steps were. Yields a list for what says which state is trained,
    once there is one."""
    states: list[Callable[[], TrainState]] = []
    try:
        yield states
    except Exception as error:
        if missing := missing_memory(error):
            with contextlib.suppress(Exception):  # whatever goes wrong here, the error is told
                error.add_note("\n".join(report_oom(config, layout, world, memory, done(), missing, states)))
            with contextlib.suppress(OSError):  # on any rank: the first one is ended by this, and knows no reason
                write_status(Path(config.run.dir), "failed", done(), config.run.steps, reason_of(error))
        raise


def report_oom(
    config: Config,
    layout: Layout,
    world: World,
    memory: MachineMemory,
    step: int,
    missing: str,
    states: Sequence[Callable[[], TrainState]],
) -> list[str]:
    """The lines that are to be said of memory that has run out, which are left in the run's folder."""
    node, device = node_size(world.size), device_name(world.device)
    capacity = memory.device or memory.host / node
    found = OOMReport(world.rank, step, missing, device, capacity, *measured_memory(world.device, states))
    try:
        from trainer.diagnosis.evidence import RunMachine
        from trainer.diagnosis.suggestions import FREED

        workshop = make_suggestions(config, layout, RunMachine(world.size, node, device), memory)
        overrides = tuple(workshop.against(*FREED))
        if (predicted := workshop.predicted) is None:
            engine = f"parallel.zero.engine={layout.plan.engine} holds memory that the estimator does not know"
            found = replace(found, overrides=overrides, problem=engine)
        else:
            full, outside = predicted.fullest, predicted.hardware.fixed * 2**30
            planned = {**full.categories, POOLS: full.pools, OUTSIDE: outside}
            where = f"{full.where} of pipeline rank {full.rank}" if layout.plan.pp > 1 else full.where
            fits = predicted.fits == "yes"
            found = replace(found, planned=planned, where=where, explained=not fits, overrides=overrides)
    except Exception as error:
        found = replace(found, problem=f"the estimator failed ({reason_of(error)})")
    with contextlib.suppress(OSError):
        found.write(Path(config.run.dir))
    return [*found.facts, *found.ways]


def make_suggestions(config: Config, layout: Layout, machine: RunMachine, memory: MachineMemory) -> Suggestions:
    """What tries overrides on a run that lacks memory."""
    from trainer.diagnosis.evidence import RunEvidence
    from trainer.diagnosis.suggestions import Suggestions

    lacking = {"status": "failed", "reason": "MemoryError"}
    here = (memory.device or memory.host / machine.node) / 2**30  # of a process
    hardware = replace(load_hardware(shipped_for(machine.device)), memory=here)
    folder = Path(config.run.dir)
    known = RunEvidence(folder, config=config, layout=layout, machine=machine, hardware=hardware, status=lacking)
    return Suggestions(known, None, memory.host)


def suggest_overrides(config: Config, layout: Layout, machine: RunMachine, memory: MachineMemory) -> str:
    """What to set so that a run fits, in words."""
    from trainer.diagnosis.suggestions import FREED

    found: list[MemoryOverride] = make_suggestions(config, layout, machine, memory).against(*FREED)
    return "set " + ", or ".join(f"{one.text} ({one.told})" for one in found) if found else NOTHING


def check_decision(asked: Config, decision: Decision, memory: MachineMemory, node: int, device: torch.device) -> None:
    """Raises `ConfigError`, with what to set, where nothing that `activation.mode=auto` may choose fits. asked: the
    configuration before the decision. memory: what the rank with least has free; node: processes of a machine."""
    config, layout = decision.config, decision.layout
    if decision.predicted is None or config.run.force:
        return
    given, available, peak = asked.activation.memory, MemoryLimit.of(memory, node), decision.predicted.peak
    whole = given * 2**30 if given is not None else available.device or available.host
    if peak <= whole:
        return
    from trainer.diagnosis.evidence import RunMachine

    place = RunMachine(layout.plan.world, node, device_name(device))
    memory = replace(memory, device=int(whole) if memory.device else None)
    ways = suggest_overrides(config, layout, place, memory)
    if given is not None:
        ways = f"set activation.memory={1.01 * peak / 2**30:.3g}, which would do, or {ways}"
    there = f"activation.memory={given:g}" if given is not None else f"there are {format_bytes(whole)}"
    raise ConfigError(
        f"activation.mode=auto: nothing fits: the least that a step is predicted to take is "
        f"{format_bytes(peak)} a rank ({describe_recompute(config.activation)}), and {there}; {ways}, or go "
        "on all the same with run.force=true"
    )


def measured_memory(
    device: torch.device, states: Sequence[Callable[[], TrainState]]
) -> tuple[dict[str, float], dict[str, float], tuple[str, ...]]:
    """Bytes that are taken by category, which add up to what is taken of a GPU, or of a CPU by this process; counts
    beside them; and the categories of which nothing is known, which are part of the rest.

    states: says which state is trained, where there is one. Nothing is allocated on the device."""
    parts: dict[str, float | None] = {}
    reason = ""
    if states:
        try:
            parts = memory_breakdown(states[0]())
        except Exception as error:  # a state that is half made, or half freed
            reason = f" ({reason_of(error)})"
    counts = {} if parts.get(HOST) is None else {HOST: parts.pop(HOST)}
    unknown = tuple(name for name, size in parts.items() if size is None) if parts else (f"states{reason}",)
    known = {name: size for name, size in parts.items() if size is not None}
    taken = sum(known.values())
    if device.type != "cuda":
        counts["process at its peak"] = peak_memory_gib(device) * 2**30
        with contextlib.suppress(OSError, ValueError, KeyError):
            known[REST] = max(0.0, resident_memory() - taken)
            counts["machine"] = used_memory()
        return known, counts, unknown
    stats, (free, total) = torch.cuda.memory_stats(device), torch.cuda.mem_get_info(device)
    allocated, reserved = (stats[f"{kind}_bytes.all.current"] for kind in ("allocated", "reserved"))
    known |= {REST: max(0, allocated - taken), POOLS: reserved - allocated, OUTSIDE: max(0, total - free - reserved)}
    peaks = {f"{kind} at the peak": stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved")}
    return known, counts | peaks, unknown


def format_oom(error: BaseException, missing: str) -> str:
    """What a process says that ends for lack of memory."""
    notes = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    return "\n  ".join([f"out of memory on rank {os.environ.get('RANK', 0)}: {missing}", *notes])
