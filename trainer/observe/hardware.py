"""The machines under a run: a thread on each rank reads the counters of its device and of its host, and all ranks'
readings become the metrics `hardware/*`."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trainer.util import machine

if TYPE_CHECKING:
    import torch

# What NVIDIA's management library says of a GPU while it works: power, temperature, clocks. It is asked
# through the module `pynvml` of the package nvidia-ml-py (the extra `gpu`). What the package, the driver or the
# device does not have is None, and never an error.


SLOWED = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Reasons for which clocks are lower than they could be, by their bits, that mean a fault."""

FAULTS = sum(SLOWED)

REASONS = {0x4: "power cap"} | SLOWED
"""The same with the ordinary power cap. Other bits mean idleness and clocks that somebody chose."""


class NVMLDevice:
    """One GPU, by the UUID that torch has of it, with or without "GPU-" before it."""

    def __init__(self, nvml: Any, uuid: str):
        self.nvml, self.handle = nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")

    @classmethod
    def find(cls, uuid: str) -> NVMLDevice | None:
        """The GPU, or None where the module or the driver is missing."""
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            return cls(pynvml, uuid)
        return None

    def read(self) -> dict[str, float | None]:
        """power_watts, clock_mhz, temperature; throttle: the bits of `REASONS`."""
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # as drivers before 535 call it
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        power = self._ask("nvmlDeviceGetPowerUsage")
        return {
            "power_watts": None if power is None else power / 1000,
            "clock_mhz": self._ask("nvmlDeviceGetClockInfo", 1),  # NVML_CLOCK_SM
            "temperature": self._ask("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
            "throttle": None if reasons is None else reasons & sum(REASONS),
        }

    def _ask(self, name: str, *arguments: int) -> float | None:
        function: Callable | None = getattr(self.nvml, name, None)
        with contextlib.suppress(Exception):
            return None if function is None else function(self.handle, *arguments)
        return None


def throttle_reasons(throttle: int) -> str:
    """The reasons that the bits of `throttle` stand for, for people."""
    return " and ".join(name for bit, name in REASONS.items() if throttle & bit)


Reading = Mapping[str, float | None]


def _any(values: Sequence[float]) -> float:
    return functools.reduce(operator.or_, map(int, values))


OVER_RANKS: dict[str, Callable[[Sequence[float]], float]] = {
    "power_watts": fmean,
    "clock_mhz": min,
    "temperature": max,
    "throttle": _any,
    "alloc_retries": max,
    "host_cpu": max,
    "host_memory": max,
    "disk_free_gib": min,
}
"""What is read, and what becomes of the values of several ranks: the worst where there is a worst."""

OVER_TIME = {"throttle": _any, "clock_mhz": fmean, "alloc_retries": max}
"""The same of several readings of a rank; of all others the mean counts."""


class HostReader:
    """A machine. The first process on it reads for all."""

    def __init__(self, folder: Path):
        self.folder, self.ticks = folder, machine.processor_ticks()

    def read(self) -> dict[str, float | None]:
        before, self.ticks = self.ticks, machine.processor_ticks()
        passed = self.ticks[1] - before[1]
        return {
            "host_cpu": (self.ticks[0] - before[0]) / passed if passed > 0 else None,
            "host_memory": machine.used_memory() / machine.host_memory(),
            "disk_free_gib": shutil.disk_usage(self.folder).free / 2**30,
        }


class HardwareSampler:
    """Reads this rank's device, and on one rank of a machine (`first`) the machine, every `period` seconds until
    `close`; 0 reads nothing. folder: of the run, whose disk is looked at.

    A reading takes under a millisecond of a processor, and NVML's part of it does not hold the interpreter."""

    def __init__(self, device: torch.device, folder: Path, period: float, first: bool):
        self.sources: list[Callable[[], Reading]] = []
        self.period, self.readings, self.last = period, list[Reading](), dict[str, float | None]()
        self.lock, self.closed = threading.Lock(), threading.Event()
        if not period:
            return
        if device.type == "cuda":
            import torch  # not for commands that only read metrics

            gpu = NVMLDevice.find(str(torch.cuda.get_device_properties(device).uuid))
            self.sources += [gpu.read] if gpu is not None else []
            self.sources.append(lambda: {"alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries")})
        if first:
            with contextlib.suppress(OSError, ValueError):
                self.sources.append(HostReader(folder).read)
        if self.sources:
            threading.Thread(target=self._run, name="hardware", daemon=True).start()

    def close(self) -> None:
        self.closed.set()

    def sample(self) -> dict[str, float | None]:
        """One reading, now."""
        found: dict[str, float | None] = {}
        for read in self.sources:
            with contextlib.suppress(OSError, ValueError, KeyError, RuntimeError):  # a counter that is not there
                found |= read()
        return found

    def take(self) -> dict[str, float | None]:
        """What was read since the last call, as one reading; where there was none, the last one again."""
        with self.lock:
            readings, self.readings = self.readings, []
        if readings:
            self.last = {name: merge_readings(name, readings, OVER_TIME.get(name, fmean)) for name in OVER_RANKS}
        return {name: self.last.get(name) for name in OVER_RANKS}

    def _run(self) -> None:
        while not self.closed.wait(self.period):
            found = self.sample()
            with self.lock:
                self.readings.append(found)


def merge_readings(name: str, readings: Sequence[Reading], how: Callable[[Sequence[float]], float]) -> float | None:
    """One value of those that several readings have of a name."""
    values = [value for one in readings if (value := one.get(name)) is not None]
    return how(values) if values else None


def over_ranks(readings: Sequence[Reading]) -> dict[str, float | None]:
    """The metrics `hardware/*` of the ranks' readings, in order of rank."""
    found = {f"hardware/{name}": merge_readings(name, readings, how) for name, how in OVER_RANKS.items()}
    clocks = {rank: clock for rank, one in enumerate(readings) if (clock := one.get("clock_mhz")) is not None}
    known = {rank: int(bits) for rank, one in enumerate(readings) if (bits := one.get("throttle")) is not None}
    held = {rank: bits for rank, bits in known.items() if bits}
    worst = min(held, key=lambda rank: (not held[rank] & FAULTS, clocks.get(rank, math.inf)), default=None)
    return found | {
        "hardware/clock_rank": min(clocks, key=clocks.__getitem__) if clocks else None,
        "hardware/throttle_rank": worst,
        "hardware/throttle_of_rank": None if worst is None else held[worst],
        "hardware/throttle_ranks": len(held) if known else None,
    }
