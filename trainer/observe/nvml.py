"""What NVIDIA's management library says of a GPU while it works: utilisation, traffic, power, clocks.

It is asked through the module `pynvml` of the package nvidia-ml-py (the extra `gpu`). What the package, the driver or
the device does not have is None, and never an error."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

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

PERCENT, MIB_PER_SECOND = 0.01, 2**20 / 1e9
GPM = {
    "sm": ((2,), PERCENT),
    "tensor": ((5,), PERCENT),
    "dram": ((10,), PERCENT),
    "pcie_gb_s": ((20, 21), MIB_PER_SECOND),
    "nvlink_gb_s": ((60, 61), MIB_PER_SECOND),
}
"""Name -> numbers of GPM's metrics whose sum it is (`NVML_GPM_METRIC_...` of nvml.h), and the factor on them."""


class NVMLDevice:
    """One GPU, by the UUID that torch has of it, with or without "GPU-" before it."""

    def __init__(self, nvml: Any, uuid: str):
        self.nvml, self.handle = nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        self.counters: PerformanceCounters | None = None
        with contextlib.suppress(Exception):  # before Hopper there are none
            self.counters = PerformanceCounters(nvml, self.handle)

    @classmethod
    def find(cls, uuid: str) -> NVMLDevice | None:
        """The GPU, or None where the module or the driver is missing."""
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            return cls(pynvml, uuid)
        return None

    def read(self) -> dict[str, float | None]:
        """sm, tensor, dram: shares since the last call, 0 to 1; pcie_gb_s, nvlink_gb_s: sent and received; power_watts,
        clock_mhz, temperature; throttle: the bits of `REASONS`."""
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # as drivers before 535 call it
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        power = self._ask("nvmlDeviceGetPowerUsage")
        found: dict[str, float | None] = dict.fromkeys(GPM)
        if self.counters is not None:
            with contextlib.suppress(Exception):
                found = self.counters.read()
        return found | {
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


class PerformanceCounters:
    """The GPU's performance monitors (GPM, from Hopper on), which tell what was between two samples. Raises whatever
    NVML raises on a device without them."""

    def __init__(self, nvml: Any, handle: Any):
        support = nvml.nvmlGpmQueryDeviceSupport(handle)
        if not getattr(support, "isSupportedDevice", support):
            raise RuntimeError("the device has no GPM")
        self.nvml, self.handle = nvml, handle
        self.samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]  # the older, the newer
        nvml.nvmlGpmSampleGet(handle, self.samples[1])

    def read(self) -> dict[str, float | None]:
        """The values of `GPM` since the last call."""
        self.samples.reverse()
        self.nvml.nvmlGpmSampleGet(self.handle, self.samples[1])
        numbers = [number for some, _ in GPM.values() for number in some]
        get = self.nvml.c_nvmlGpmMetricsGet_t()
        get.version, get.numMetrics = getattr(self.nvml, "NVML_GPM_METRICS_GET_VERSION", 1), len(numbers)
        get.sample1, get.sample2 = self.samples
        for place, number in enumerate(numbers):
            get.metrics[place].metricId = number
        self.nvml.nvmlGpmMetricsGet(get)
        values = {number: _value(get.metrics[place]) for place, number in enumerate(numbers)}
        return {
            name: None if None in (parts := [values[number] for number in some]) else factor * sum(parts)
            for name, (some, factor) in GPM.items()
        }


def _value(metric: Any) -> float | None:
    return metric.value if metric.nvmlReturn == 0 and math.isfinite(metric.value) else None


def throttle_reasons(throttle: int) -> str:
    """The reasons that the bits of `throttle` stand for, for people."""
    return " and ".join(name for bit, name in REASONS.items() if throttle & bit)
