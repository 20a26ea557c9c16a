"""What is known of a run when it is diagnosed: its settings and layout, its machine, and what it has written."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import Config, ConfigError, typed
from trainer.config.hardware import HardwareConfig
from trainer.config.model import DEEPEST
from trainer.config.synonyms import REMOVED, rename_old_settings
from trainer.diagnosis.accounts import PipelineIdle, idle_of
from trainer.diagnosis.oom_report import OOMReport
from trainer.diagnosis.time_breakdown import StepProfile, TimeBreakdown, build_profile, ordinary_seconds, scale_profile
from trainer.planning.hardware import hardware_names, load_hardware
from trainer.planning.plan import MOST_PROCESSES
from trainer.planning.resolve import Layout, check_config, resolve_layout
from trainer.planning.schedules import ir
from trainer.planning.schedules.lower import validate_schedule
from trainer.planning.schedules.simulate import read_timeline
from trainer.util.lines import read_json_lines
from trainer.util.machine import error_reason, lacks_memory
from trainer.util.reading import on_one_line, read_yaml, shorten_foreign
from trainer.util.tables import format_duration

SETTINGS, STARTS = "config.yaml", "starts.jsonl"
SCHEDULE, TIMELINE = "schedule/schedule.csv", "schedule/measured.json"
START = {"processes": int, "hosts": {str: int}, "devices": {str: int}}
"""What a line of starts.jsonl has to have to say on what a run trains."""

PLANNED = ("model", "batch", "parallel", "precision", "activation", "optimizer", "compile")
"""Sections whose settings a plan follows from. What is wrong in others (something registered that this command does not
import) leaves it as it is."""

MOST_SEQUENCES = 1 << 16
"""Sequences of a step that a folder may speak of; nobody trains with more, and it would take long."""


@dataclass(frozen=True)
class RunMachine:
    """On what a run trains. processes: in all; node: on the machine with most of them; device: its name, `CPU` for
    CPUs; hosts: processes by machine."""

    processes: int
    node: int
    device: str
    hosts: Mapping[str, int] = field(default_factory=dict)

    def named(self, rank: int) -> str:
        """A rank for people: with its machine where there are several, which hold ranks in order."""
        first = 0
        for host, count in self.hosts.items() if len(self.hosts) > 1 else ():
            if first <= rank < (first := first + count):
                return f"rank {rank} on {host}"
        return f"rank {rank}"


class ThrottledRank(NamedTuple):
    """A rank whose clocks are held down of late, why, in words, and of how many ranks they are."""

    rank: int
    why: str
    ranks: int


@dataclass(frozen=True)
class RunEvidence:
    """folder: the run's. records: lines of metrics.jsonl of steps, oldest first. profile: the typical profiled step,
    None where none is profiled. config, layout: of the last start, None where they cannot be read. hardware: the kind
    of machine, None where it is not known. status: status.json. stalled: lines of the watchdog's last report, where the
    run has stalled. throttle: why clocks of any rank are held down of late, in words; held: of which, where metrics
    say so. shortage: what it left when memory ran out. idle: by pipeline rank, from the timed actions of its last step.
    silent: seconds for which a run that says that it goes on has written nothing; None where it does not say so. notes:
    what could not be known, and why."""

    folder: Path
    records: Sequence[Mapping[str, Any]] = ()
    profile: StepProfile | None = None
    config: Config | None = None
    layout: Layout | None = None
    machine: RunMachine = RunMachine(1, 1, "CPU")
    hardware: HardwareConfig | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    stalled: Sequence[str] = ()
    throttle: str = ""
    held: ThrottledRank | None = None
    shortage: OOMReport | None = None
    idle: Sequence[PipelineIdle] = ()
    silent: float | None = None
    notes: Sequence[str] = ()

    @property
    def lacked(self) -> str:
        """What a run that has ended for lack of memory said of it; empty for any other."""
        reason = str(self.status.get("reason", ""))
        return error_reason(reason) if self.status.get("status") == "failed" and lacks_memory(reason) else ""

    @property
    def pace(self) -> float | None:
        """Seconds of an ordinary step."""
        return _ordinary_step(self.records, self.profile)

    def values(self, key: str) -> list[float]:
        """What is known of a metric, oldest first."""
        return [record[key] for record in self.records if record.get(key) is not None]


def collect_evidence(
    known: RunEvidence, accounts: Sequence[TimeBreakdown], hardware: str = "", config_dir: str | None = None
) -> RunEvidence:
    """Adds what the folder of a run and the accounts of its steps tell to what is known already.

    hardware: a file of `configs/hardware` or of the same folder in `config_dir`, or its path; '' looks for the one of
    the run's device. Raises `ConfigError` for one that cannot be read."""
    folder = known.folder
    notes: list[str] = []
    machine = machine_of(folder, accounts)
    config = _settings(folder, notes)
    layout = _layout(config, machine, notes) if config else None
    kind = load_hardware(hardware, (), config_dir) if hardware else _known(machine.device, config_dir)
    if kind is None:
        why = (
            "CPUs differ too much for one file of configs/hardware"
            if machine.device == "CPU"
            else f"no file of configs/hardware is for {on_one_line(machine.device)}"
        )
        notes.append(f"{why}, so nothing is compared with its peaks; hardware=NAME names one")
    steps = [record for record in known.records if record.get("step_seconds") is not None]
    profile = build_profile(accounts)
    if profile and profile.unusual:
        left = ", ".join(map(str, profile.unusual))
        notes.append(f"step {left} took far longer than the other profiled ones, and is left out")
    ordinary = _ordinary_step(steps, profile)
    if profile and (as_trained := scale_profile(profile, ordinary)) is not profile:
        notes.append(
            f"profiled steps take {format_duration(profile.seconds)}, others {format_duration(ordinary)}: what "
            "the profiler costs "
            "the host is left out of its time"
        )
        profile = as_trained
    return replace(
        known,
        records=steps,
        profile=profile,
        config=config,
        layout=layout,
        machine=machine,
        hardware=kind,
        idle=_idle(folder),
        notes=tuple(notes),
    )


def _ordinary_step(records: Sequence[Mapping[str, Any]], profile: StepProfile | None) -> float | None:
    logged = [record for record in records if record.get("step_seconds") is not None]
    return ordinary_seconds([(record.get("step", 0), float(record["step_seconds"])) for record in logged], profile)


def machine_of(folder: Path, accounts: Sequence[TimeBreakdown]) -> RunMachine:
    """Of the last start, as far as starts.jsonl tells; else of the ranks that have accounts."""
    start: dict[str, Any] = {}
    with contextlib.suppress(OSError, ConfigError):
        for line in read_json_lines(folder / STARTS, START):
            start = line
    if start and 1 <= start["processes"] <= MOST_PROCESSES and start["devices"]:
        hosts = {name: count for name, count in start["hosts"].items() if 1 <= count <= start["processes"]}
        node = max(hosts.values(), default=start["processes"])
        return RunMachine(start["processes"], node, next(iter(start["devices"])), hosts)
    processes = min(MOST_PROCESSES, max((account.rank for account in accounts), default=0) + 1)
    device = accounts[-1].device if accounts else "CPU"
    return RunMachine(processes, processes, "CPU" if device == "cpu" else device)


def _settings(folder: Path, notes: list[str]) -> Config | None:
    """The settings of the last start. What they name to import is not imported."""
    path, problems = folder / SETTINGS, typed.Problems()
    try:
        values = read_yaml(path)
        if not isinstance(values, dict):
            raise ConfigError(f"it holds {shorten_foreign(values)} instead of settings")
        rename_old_settings(values)
        config = typed.build_typed(typed.complete_values(Config(), values), problems)
    except (OSError, ConfigError, ValueError, TypeError, ArithmeticError, typed.InvalidValue) as error:
        notes.append(f"settings are not known: {path}: {shorten_foreign(error)}")
        return None
    # A run of an earlier version has settings that are gone, most with their defaults.
    wrong = [text for name, text in problems.items() if name.partition(".")[0] in PLANNED and name not in REMOVED]
    if wrong or not isinstance(config, Config):
        notes.append(f"the plan is not known: {path}: {on_one_line(wrong[0])}")
        return None
    return config


def _layout(config: Config, machine: RunMachine, notes: list[str]) -> Layout | None:
    batch, model = config.batch, config.model
    sequences = (
        batch.global_size or 0,
        batch.accumulation or 0,
        (batch.global_tokens or 0) // max(1, batch.sequence_length),
    )
    if model.from_hf:
        notes.append("the model is that of a transformers folder, which is not read here: no plan is compared")
    elif model.depth > DEEPEST or max(sequences) > MOST_SEQUENCES:
        notes.append("the settings are of a model or batch that nobody trains: no plan is compared")
    else:
        try:
            if wrong := check_config(config, machine.processes, machine.node):
                raise ConfigError(wrong[0])
            return resolve_layout(config, machine.processes, config.model, machine.node)
        except (ConfigError, ValueError, ArithmeticError) as error:
            notes.append(f"the plan is not known: {shorten_foreign(error)}")
    return None


def _idle(folder: Path) -> list[PipelineIdle]:
    """By pipeline rank, where the run has left its schedule and when its actions ran; empty where it has not."""
    try:
        schedule, (ranks, _) = ir.load_schedule(folder / SCHEDULE, "schedule"), read_timeline(folder / TIMELINE)
        spans = (span for spans in ranks for span in spans if span.action.kind in ir.COMPUTE)
        timed = [(span.action, span.end - span.start) for span in spans]
        return [] if validate_schedule(schedule) else idle_of(schedule, timed)
    except (OSError, ConfigError, ValueError, LookupError, ArithmeticError):
        return []


def _known(device: str, config_dir: str | None) -> HardwareConfig | None:
    """The file that is for a device, one's own before a shipped one. That for CPUs is none for any of them: its numbers
    are orders of magnitude."""
    for name in hardware_names(config_dir):
        hardware = load_hardware(name, (), config_dir)
        if hardware.device.removeprefix("NVIDIA ") == device.removeprefix("NVIDIA ") != "CPU":
            return hardware
    return None
