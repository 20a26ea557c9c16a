"""Constants from measurements: a machine whose times the model predicts exactly is found again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import h200, settings, shipped

from trainer.planning.estimate.calibrate import (
    COLLECTIVES,
    LEAST_BAND,
    DeviceMeasurements,
    MeasuredCollective,
    MeasuredGEMM,
    MeasuredPass,
    MeasuredWork,
    calibrate_hardware,
    fit_link,
    pass_seconds,
    truncate_model,
)
from trainer.planning.estimate.rates import DeviceRates
from trainer.planning.hardware import hardware_text, load_hardware, shipped_for
from trainer.planning.layer import model_programs

GIB = 2**30
SIZES = (2**12, 2**16, 2**20, 2**24, 2**28)


def recipe(**changes):
    spec = shipped("llama_60m")
    return settings(spec, batch__sequence_length=1024, batch__micro_size=4, compile=True, **changes)


def measure(hardware, config, slower=1.0, links=("node", "network"), device=None, float8=True):
    """What would be measured on such a machine. slower: factor on passes."""
    pace = DeviceRates.of(hardware, config.precision)
    [layer, *_] = model_programs(config.model, 1024, 1, 2)
    shapes = {name: gemm.shape for name, gemm in layer.gemms.items()}

    def product(name, rows, columns, tokens=4096, count=1):
        moved = 2 * (tokens * (rows + columns) + rows * columns)
        seconds = math.hypot(2 * tokens * rows * columns / pace.products, moved / pace.memory) + pace.kernel
        return MeasuredGEMM(name, tokens, rows, columns, seconds, count)

    def through(depth):
        times = pass_seconds(*truncate_model(config, depth, 1024, 4), hardware)
        return MeasuredPass(depth, 1024, 4, *(slower * one for one in times))

    sent = []
    for place in links:
        link = getattr(hardware, place)
        for kind in COLLECTIVES:
            for size in SIZES:
                one = MeasuredCollective(place, place, kind, 8, size, 1.0)
                rate = link.bandwidth * link.achieved * 1e9
                seconds = one.steps * link.latency * 1e-6 + one.through / rate
                sent.append(MeasuredCollective(place, place, kind, 8, size, seconds))
    bandwidth = hardware.bandwidth * 1e9
    return DeviceMeasurements(
        device=device or hardware.device,
        memory=hardware.memory * GIB,
        fixed=hardware.fixed * GIB,
        devices=hardware.devices,
        products=[product(name, round(rows), round(columns)) for name, (rows, columns) in shapes.items()],
        sweep=[product("1024", 1024, 1024, 1024)],
        attention={name: MeasuredWork(1e12, 1e12 / rate + 2 * pace.kernel) for name, rate in pace.attention.items()},
        passes=[through(depth) for depth in (1, 2)],
        stream=MeasuredWork(1e9, 1e9 / (bandwidth * hardware.achieved.memory)),
        update=MeasuredWork(1e9, 1e9 / (bandwidth * hardware.achieved.optimizer)),
        copy=MeasuredWork(1e9, 1e9 / (bandwidth * hardware.achieved.copy)),
        kernel=pace.kernel,
        launch=pace.launch,
        hidden=hardware.achieved.hidden,
        signal=hardware.signal * 1e-6,
        sent=sent,
        float8=MeasuredWork(1e12, 1e12 / (1978.9e12 * hardware.achieved.product * hardware.achieved.float8))
        if float8
        else None,
    )


def test_a_machine_is_found_again_in_what_it_would_show():
    own = ["signal=17", "achieved.last_queries=0.8", "achieved.block_mask=1.2"]
    hardware, config = load_hardware("h200", own), recipe()
    other = load_hardware(
        "h200", ["achieved.product=0.5", "achieved.memory=0.4", "achieved.float8=0.5", "kernel=9", "node.latency=50"]
    )
    found = calibrate_hardware(measure(hardware, config), config, other)
    kernels = ("attention", "last_queries", "block_mask")
    for name in ("product", *kernels, "memory", "optimizer", "copy", "hidden", "float8"):
        assert getattr(found.hardware.achieved, name) == pytest.approx(getattr(hardware.achieved, name), rel=0.02), name
    for place in ("node", "network"):
        one, expected = getattr(found.hardware, place), getattr(hardware, place)
        assert (one.bandwidth, one.latency) == pytest.approx((expected.bandwidth, expected.latency), rel=1e-6)
        assert one.achieved == pytest.approx(expected.achieved, rel=1e-6)
    assert (found.hardware.kernel, found.hardware.launch, found.hardware.signal) == pytest.approx((4, 6, 17))
    assert found.kept == ("bandwidth",)
    assert found.hardware.band == LEAST_BAND and max(abs(said / took - 1) for _, took, said in found.errors) < 0.02


def test_a_pass_with_a_window_is_that_of_the_kernel_that_it_takes():
    config = recipe()
    config.model.attention.window = 256
    found = calibrate_hardware(measure(h200(), config), config, h200())
    assert found.hardware.achieved.attention == pytest.approx(0.48)
    assert max(abs(said / took - 1) for _, took, said in found.errors) < 0.02


def test_kernels_that_were_not_measured_are_those_of_the_other_file():
    config, measured = recipe(), measure(h200(), recipe())
    one = calibrate_hardware(
        replace(measured, attention={"attention": measured.attention["attention"]}), config, h200()
    )
    assert one.kept == ("bandwidth", "achieved.last_queries", "achieved.block_mask")
    assert (one.hardware.achieved.last_queries, one.hardware.achieved.block_mask) == (0.58, 0.69)
    none = calibrate_hardware(replace(measured, attention={}, signal=None), config, h200())
    assert none.kept == ("bandwidth", "achieved.last_queries", "achieved.block_mask", "signal")
    assert none.hardware.achieved.attention == none.hardware.achieved.product and none.hardware.signal == 30


def test_an_unknown_device_has_the_best_that_was_reached_as_its_peaks():
    config, base = recipe(), load_hardware("l40s")
    measured = measure(h200(), config, device="NVIDIA Abacus", links=("node",))
    found = calibrate_hardware(measured, config, base)
    one = found.hardware
    best = max(product.flops / product.seconds for product in [*measured.products, *measured.sweep])
    assert one.peak["bf16"] == pytest.approx(best / 1e12) and one.device == "NVIDIA Abacus"
    assert max(one.achieved.memory, one.achieved.optimizer, one.achieved.copy) == pytest.approx(1)
    expected = 4800e9 * h200().achieved.optimizer
    assert one.bandwidth * 1e9 * one.achieved.optimizer == pytest.approx(expected, rel=1e-6)
    reached = h200().achieved
    expected = 1978.9 * reached.product * reached.float8
    assert one.peak["fp8"] * one.achieved.product == pytest.approx(expected) and one.achieved.float8 == 1
    assert found.kept == ("network",) and one.network == base.network
    without = calibrate_hardware(measure(h200(), config, device="NVIDIA Abacus", float8=False), config, base)
    assert without.kept == ("achieved.float8",) and without.hardware.peak.keys() == {"bf16"}
    for one_pass in measured.passes:
        said = pass_seconds(*truncate_model(config, one_pass.depth, 1024, 4), one)
        assert sum(said) == pytest.approx(one_pass.forward + one_pass.backward, rel=0.1)


def test_layers_count_as_often_as_a_step_has_them():
    """Time that belongs to no layer, as of a head that the model puts too low, does not make all layers slower."""
    hardware, config = h200(), recipe()
    measured = measure(hardware, config)
    passes = [replace(one, forward=one.forward + 5e-4, backward=one.backward + 5e-4) for one in measured.passes]
    found = calibrate_hardware(replace(measured, passes=passes), config, hardware).hardware

    def whole(machine) -> float:
        return sum(pass_seconds(*truncate_model(config, config.model.depth, 1024, 4), machine))

    assert whole(found) == pytest.approx(whole(hardware) + 1e-3, rel=0.005)


def test_what_does_not_fit_widens_the_band():
    config = recipe()
    measured = measure(h200(), config)
    sent = [replace(one, seconds=one.seconds * (2 if one.kind == "all-reduce" else 1)) for one in measured.sent]
    worse = calibrate_hardware(replace(measured, sent=sent), config, h200())
    assert 0.2 < worse.hardware.band < 0.6
    impossible = calibrate_hardware(measure(h200(), config, slower=0.3), config, h200())  # faster than its own products
    assert impossible.hardware.achieved.memory == pytest.approx(1, abs=0.01) and impossible.hardware.band > 0.5


@given(
    st.floats(0, 1e-3),
    st.floats(1e6, 1e12),
    st.integers(2, 64),
    st.lists(st.floats(0.97, 1.03), min_size=5, max_size=5),
)
def test_a_link_is_found_in_its_transfers(latency, bandwidth, ranks, noise):
    for kind in COLLECTIVES:
        shapes = [MeasuredCollective("node", "node", kind, ranks, size, 1.0) for size in SIZES]
        times = [one.steps * latency + one.through / bandwidth for one in shapes]
        exact = [MeasuredCollective("node", "node", kind, ranks, one.size, time) for one, time in zip(shapes, times)]
        noisy = [
            MeasuredCollective("node", "node", kind, ranks, one.size, time * by)
            for one, time, by in zip(shapes, times, noise)
        ]
        for sent, off in ((exact, 1e-3), (noisy, 0.15)):
            found_latency, found_bandwidth = fit_link(sent)
            assert found_latency >= 0 and found_bandwidth > 0
            for one, time in zip(shapes, times):
                said = one.steps * found_latency + one.through / found_bandwidth
                assert said == pytest.approx(time, rel=off), (kind, one)


def test_the_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "here.yaml"
    for name in ("h200", "cpu"):
        path.write_text(
            hardware_text(load_hardware(name), ["One paragraph. " * 20, "Another: with a colon # and a hash"])
        )
        assert load_hardware(str(path)) == load_hardware(name)
        assert all(len(line) <= 120 for line in path.read_text().splitlines() if line.startswith("#"))
    assert (shipped_for("CPU"), shipped_for("NVIDIA H200"), shipped_for("NVIDIA Abacus")) == ("cpu", "h200", "l40s")
