"""The metrics `hardware/*`: what a fake NVML says becomes numbers, what it lacks becomes null."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.observe import hardware
from trainer.observe.hardware import OVER_RANKS, HardwareSampler, over_ranks
from trainer.observe.metrics import METRICS

READ = {"power_watts": 650.5, "clock_mhz": 1755, "temperature": 61, "throttle": 4 | 64}
"""What a reading then is."""


class FakeNvml:
    """The functions of pynvml that are used."""

    def __init__(self, failing=(), missing=()):
        self.failing, self.missing = failing, missing

    def __getattribute__(self, name):
        missing = object.__getattribute__(self, "missing") if name.startswith("nvmlD") else ()
        if name in missing:
            raise AttributeError(name)
        if name.startswith("nvml") and name in object.__getattribute__(self, "failing"):
            return self.fails
        return object.__getattribute__(self, name)

    def fails(self, *_):
        raise RuntimeError("Not Supported")

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1-2"
        return "handle"

    def nvmlDeviceGetPowerUsage(self, handle):
        return 650_500

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1755}[kind]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return {0: 61}[sensor]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return 1 | 4 | 16 | 64

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 4 | 64


@pytest.fixture
def gpu(monkeypatch):
    """What `Gpu.find` finds with a module of these faults."""

    def find(**faults):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(**faults))
        return hardware.NVMLDevice.find("1-2")

    return find


def test_known_values_become_known_numbers(gpu):
    found = gpu()
    assert found.read() == pytest.approx(READ) and found.read() == pytest.approx(READ)
    assert hardware.throttle_reasons(READ["throttle"]) == "power cap and hardware thermal slowdown"


LOST = {
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetClockInfo": {"clock_mhz"},
    "nvmlDeviceGetTemperature": {"temperature"},
    "nvmlDeviceGetCurrentClocksEventReasons": set(),  # the older name is asked
}


@pytest.mark.parametrize("how", ["failing", "missing"])
@pytest.mark.parametrize("function", LOST)
def test_a_function_that_is_not_there_makes_its_numbers_null(gpu, function, how):
    expected = {name: None if name in LOST[function] else value for name, value in READ.items()}
    assert gpu(**{how: (function,)}).read() == pytest.approx(expected)


def test_devices_without_reasons_or_anything(gpu, monkeypatch):
    both = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    assert gpu(failing=both).read()["throttle"] is None
    assert gpu(failing=("nvmlInit",)) is None and gpu(failing=("nvmlDeviceGetHandleByUUID",)) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert hardware.NVMLDevice.find("1-2") is None


READINGS = st.fixed_dictionaries({name: st.none() | st.integers(0, 255) for name in OVER_RANKS})


@given(st.lists(READINGS, max_size=5))
def test_of_all_ranks_the_worst_counts(readings):
    found = over_ranks(readings)
    assert set(found) == {name for name in METRICS if name.startswith("hardware/")}
    columns = {name: [one[name] for one in readings if one[name] is not None] for name in OVER_RANKS}
    for name, values in columns.items():
        value = found[f"hardware/{name}"]
        assert (value is None) == (not values)
        if values:
            assert min(values) <= value <= (255 if name == "throttle" else max(values))
    if columns["clock_mhz"]:
        assert found["hardware/clock_mhz"] == min(columns["clock_mhz"])
        assert readings[found["hardware/clock_rank"]]["clock_mhz"] == min(columns["clock_mhz"])
    if columns["throttle"]:
        assert all(found["hardware/throttle"] & bits == bits for bits in columns["throttle"])
    held = {rank: one["throttle"] for rank, one in enumerate(readings) if one["throttle"]}
    assert (found["hardware/throttle_rank"] in held) == bool(held)
    assert found["hardware/throttle_of_rank"] == held.get(found["hardware/throttle_rank"])
    assert found["hardware/throttle_ranks"] == (len(held) if columns["throttle"] else None)
    for name in ("temperature", "host_cpu", "host_memory", "alloc_retries"):
        assert not columns[name] or found[f"hardware/{name}"] == max(columns[name])


def test_of_ranks_whose_clocks_are_held_down_one_with_a_fault_is_named_and_of_these_the_slowest():
    capped, hot, braked = (
        {"clock_mhz": clock, "throttle": bits} for clock, bits in ((900, 4), (1200, 68), (1100, 128))
    )
    ranks = [
        over_ranks(some)["hardware/throttle_rank"] for some in ([{}, capped, hot], [hot, capped, braked], [{}, capped])
    ]
    assert ranks == [2, 2, 1] and over_ranks([{"throttle": 0}] * 2)["hardware/throttle_rank"] is None


def taken(sampler):
    """What the sampler's thread has read, once it has."""
    end, found = time.monotonic() + 20, sampler.take()
    while set(found.values()) == {None} and time.monotonic() < end:
        time.sleep(0.005)
        found = sampler.take()
    sampler.close()
    return found


def test_a_gpu_is_sampled_and_its_machine(gpu, monkeypatch, tmp_path):
    gpu()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 3})
    sampler = HardwareSampler(torch.device("cuda", 0), tmp_path, 0.01, first=True)
    found = taken(sampler)
    assert {name: found[name] for name in READ} == pytest.approx(READ) and found["alloc_retries"] == 3
    assert 0 <= found["host_cpu"] <= 1 and 0 < found["host_memory"] < 1 and found["disk_free_gib"] > 0
    assert sampler.take()["power_watts"] is not None, "between two readings, the last one counts"


def test_a_machine_without_gpus_has_its_own_counters_on_one_rank(tmp_path):
    first = taken(HardwareSampler(torch.device("cpu"), tmp_path, 0.01, first=True))
    assert {name for name, value in first.items() if value is not None} >= {"host_memory", "disk_free_gib"}
    assert not {"power_watts", "alloc_retries"} & {name for name, value in first.items() if value is not None}
    for other in (
        HardwareSampler(torch.device("cpu"), tmp_path, 0.01, first=False),
        HardwareSampler(torch.device("cpu"), tmp_path, 0.0, first=True),
    ):
        assert set(other.take().values()) == {None} and not other.sample()


def test_a_reading_costs_less_than_a_hundredth_of_its_period(tmp_path):
    sampler, seconds = HardwareSampler(torch.device("cpu"), tmp_path, 3600.0, first=True), []
    for _ in range(5):
        start = time.thread_time()
        sampler.sample()
        seconds.append(time.thread_time() - start)
    sampler.close()
    assert min(seconds) < 0.01  # of one second, the default of logging.hardware


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_tells_what_it_does():
    pytest.importorskip("pynvml")
    properties = torch.cuda.get_device_properties(0)
    found = hardware.NVMLDevice.find(str(properties.uuid))
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(300):
        square @ square
    torch.cuda.synchronize()
    read = found.read()
    assert read["power_watts"] > 20 and read["clock_mhz"] > 100 and read["temperature"] > 10, read
    assert read["throttle"] is not None and not int(read["throttle"]) & ~sum(hardware.REASONS)
