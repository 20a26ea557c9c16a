"""What a run shows of itself: the metrics contract, bookkeeping, device peaks, sinks, numbers for people, tables."""

import io
import json
import math
import os
import queue
import re
import resource
import sys
import threading
import time
import types

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trainer.config import ConfigError, LoggingConfig, RunConfig, WandbConfig
from trainer.observe import metrics, sinks
from trainer.observe.deferred import DeferredScalars
from trainer.observe.hardware import over_ranks
from trainer.observe.metrics import SpeedMeter
from trainer.observe.sinks import Logger
from trainer.planning import hardware
from trainer.util import tables


def logger(folder, resume_step=0, console="none", enabled=True, steps=100, **logging):
    return Logger(
        folder,
        LoggingConfig(console=console, **logging),
        RunConfig(name="demo", steps=steps),
        resume_step,
        {"seed": 1},
        enabled,
    )


def record(step, **values):
    return {"step": step, "loss": 10 / step, "tokens": 4096 * step, **values}


def strict(text):
    """JSON as the standard has it: no NaN, no Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def written(folder):
    return [strict(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


# The contract


def test_lines_have_the_keys_of_the_contract(tmp_path):
    log = logger(tmp_path)
    log.step(record(1))
    log.evaluation({"step": 1, "tokens": 4096, "eval_loss": 2.0})
    log.close("done")
    step, evaluation = written(tmp_path)
    contract = {
        "step",
        "time",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_second",
        "mfu",
        "mfu_full",
        "memory_gib",
        "step_seconds",
        "step_seconds_p50",
        "step_seconds_p95",
        "data_seconds",
        "evaluation_seconds",
        "checkpoint_seconds",
        "eta_seconds",
        "epoch",
        "bubble",
        "loss_scale",
        "learned",
        "skipped",
        "repeated",
        "damaged",
        *(
            f"experts/{name}"
            for name in ("overflow", "fullest", "fullest_rank", "idle", "entropy", "balance", "z_loss", "bias")
        ),
        "straggler",
        "straggler_rank",
        "comm/bytes_inner",
        "comm/bytes_outer",
        "bubble_imbalance",
        "host",
        "launch_delay",
        "profiled_step",
        *over_ranks([]),
    }
    assert set(step) == contract
    assert evaluation == {"step": 1, "time": evaluation["time"], "tokens": 4096, "eval_loss": 2.0}
    assert abs(evaluation["time"] - time.time()) < 60 and step["time"] <= evaluation["time"]
    assert {name for name in metrics.METRICS if not metrics.stands_for_many(name)} == contract | {"eval_loss"} and all(
        metrics.METRICS.values()
    )


def test_keys_by_source_and_set_stand_behind_their_sum_and_are_shown(tmp_path, capsys):
    log = logger(tmp_path, console="plain")
    log.step(record(1, **{"loss/text": 1.25, "loss/code": None, "targets/text": 30, "targets/code": 0}))
    log.evaluation({"step": 1, "eval_loss": None, "eval_loss/notes": 3.0})
    with pytest.raises(ValueError, match="lost/text"):
        log.step(record(2, **{"lost/text": 1.0}))
    step, evaluation = written(tmp_path)
    names = list(step)
    assert names[names.index("loss") :][:5] == ["loss", "loss/text", "loss/code", "targets/text", "targets/code"]
    assert metrics.of_names(step, "loss") == {"text": 1.25, "code": None}
    assert evaluation["eval_loss"] is None and metrics.of_names(evaluation, "eval_loss") == {"notes": 3.0}
    shown = capsys.readouterr().out
    assert "(text 1.2500, code -)" in shown and "evaluation loss notes 3.0000" in shown


def test_a_name_outside_the_table_is_an_error(tmp_path):
    log = logger(tmp_path)
    with pytest.raises(ValueError, match="tokens_per_sec'"):
        log.step(record(1, tokens_per_sec=3.0))
    with pytest.raises(ValueError, match="step"):
        log.evaluation({"eval_loss": 1.0})
    assert written(tmp_path) == []


SINGLE = [name for name in metrics.STEP[1:] if not metrics.stands_for_many(name)]


@given(st.dictionaries(st.sampled_from([*SINGLE, "user/a", "user/b"]), st.floats() | st.integers() | st.none()))
def test_every_line_is_json_and_what_is_not_finite_is_null(values):
    line = strict(json.dumps(metrics.format_line({"step": 3, **values}, metrics.STEP), allow_nan=False))
    assert set(line) == {"step", *SINGLE, *values}
    for name in {*SINGLE, *values}:
        value = values.get(name)
        assert line[name] == (None if value is None or isinstance(value, float) and not math.isfinite(value) else value)


def test_tensors_and_numpy_scalars_are_numbers(tmp_path):
    log = logger(tmp_path)
    log.step(record(2, loss=torch.tensor(1.5), grad_norm=numpy.float32(0.25), lr=torch.tensor(math.inf)))
    assert [written(tmp_path)[0][name] for name in ("loss", "grad_norm", "lr")] == [1.5, 0.25, None]


def test_lines_can_be_read_while_the_run_writes(tmp_path):
    log = logger(tmp_path)
    for step in (1, 2):
        log.step(record(step))
        assert [line["step"] for line in metrics.read_metrics(tmp_path)] == list(range(1, step + 1))
    log.close("done")


@pytest.mark.parametrize(
    "text, words",
    [
        (None, ["cannot read", "runs/NAME"]),
        ("", ["no step has been logged"]),
        ('{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.0}\n', ["metrics.jsonl, line 2"]),
        ('{"step": 1, "loss": "low"}\n', ["metrics.jsonl, line 1"]),
    ],
)
def test_metrics_that_cannot_be_read_are_refused(text, words, tmp_path):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        metrics.read_metrics(tmp_path)
    assert all(word in str(refusal.value) for word in [str(tmp_path), *words])


# Bookkeeping


def test_meter_counts_the_window_and_leaves_the_first_step_out_of_the_percentiles():
    meter = SpeedMeter(total_steps=10, flops_per_token=100.0, flops_per_token_full=150.0, peak=1e4, world=2)
    meter.finished(1, seconds=50.0, data_seconds=1.0, tokens=100)
    first = meter.read()
    assert first["tokens_per_second"] == 2.0 and first["step_seconds"] == 50.0
    assert first["step_seconds_p50"] is None and first["step_seconds_p95"] is None and first["eta_seconds"] is None
    for step, seconds in ((2, 1.0), (3, 2.0), (4, 3.0)):
        meter.finished(step, seconds, data_seconds=0.25 * seconds, tokens=100)
    values = meter.read()
    assert values["tokens_per_second"] == 50.0 and values["step_seconds"] == 2.0 and values["data_seconds"] == 0.5
    assert values["mfu"] == pytest.approx(100 * 50 / 2e4) and values["mfu_full"] == pytest.approx(150 * 50 / 2e4)
    assert values["step_seconds_p50"] == 2.0 and values["step_seconds_p95"] == pytest.approx(2.9)
    assert values["eta_seconds"] == pytest.approx(6 * 2.0)
    meter.finished(10, 1.0, 0.0, 100)
    assert meter.read()["eta_seconds"] == 0.0


def test_meter_after_a_resume_has_only_the_remaining_steps():
    meter = SpeedMeter(total_steps=100, flops_per_token=1.0, flops_per_token_full=1.0, peak=None, world=1, recent=2)
    for step, seconds in ((91, 30.0), (92, 9.0), (93, 1.0), (94, 3.0)):
        meter.finished(step, seconds, 0.0, 10)
    values = meter.read()
    assert values["eta_seconds"] == pytest.approx(6 * 2.0)  # the last two steps only
    assert values["mfu"] is None and values["mfu_full"] is None and values["tokens_per_second"] is not None


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=50))
def test_meter_percentiles_are_ordered_and_lie_within_the_steps(seconds):
    meter = SpeedMeter(1000, 1.0, 1.0, 1e12, 4)
    for step, value in enumerate(seconds, 1):
        meter.finished(step, value, 0.0, 8)
    values = meter.read()
    least, most = min(seconds[1:]) * (1 - 1e-9), max(seconds[1:]) * (1 + 1e-9)
    assert least <= values["step_seconds_p50"] <= values["step_seconds_p95"] <= most
    assert set(values) <= set(metrics.METRICS)


# Device peaks


@pytest.mark.parametrize(
    "name, dtype, peak",
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA H200 NVL", "bf16", 835.5e12),
        ("NVIDIA H20", "bf16", 148e12),
        ("NVIDIA GH200 480GB", "fp8", 1978.9e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA A10G", "bf16", 70e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA B300 SXM6 AC", "fp8", 4500e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("AMD Instinct MI250X", "bf16", 191.5e12),
        ("AMD Instinct MI300X", "bf16", 1307.4e12),
    ],
)
def test_known_peaks(name, dtype, peak):
    assert hardware.peak_flops(name, dtype) == (None if peak is None else pytest.approx(peak))


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H200 NVL 2",
        "NVIDIA H2000",
        "NVIDIA H100",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA",
        "",
        "cpu",
        "GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "AMD Instinct MI250X/MI250",
    ],
)
def test_other_devices_have_no_peak(name):
    assert all(hardware.peak_flops(name, dtype) is None for dtype in hardware.DTYPES)


def test_each_device_is_listed_once_with_plausible_peaks():
    names = [name for _, names in hardware._PEAKS for name in names]
    assert len(names) == len(set(names)) == len(hardware._BY_NAME)
    for name in hardware._BY_NAME:
        peak = {dtype: hardware.peak_flops(name, dtype) for dtype in hardware.DTYPES}
        assert peak["fp16"] and peak["fp32"] and peak["fp16"] > peak["fp32"] > 1e12
        assert peak["bf16"] in (None, peak["fp16"])
        assert peak["fp8"] is None or peak["fp8"] == pytest.approx(2 * peak["bf16"], rel=0.02)
        assert peak["tf32"] is None or peak["tf32"] == pytest.approx(peak["bf16"] / 2, rel=0.05)
    with pytest.raises(ValueError, match="int8.*bf16"):
        hardware.peak_flops("NVIDIA H200", "int8")


# From device to host


def test_scalars_and_vectors_come_back_as_they_were():
    deferred = DeferredScalars(torch.device("cpu"))
    deferred.push(
        5,
        {
            "loss": torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True),
            "tokens": torch.tensor(2**40),
            "norms": torch.tensor([1.0, math.inf, 3.0]),
        },
        {"lr": 3e-4},
    )
    deferred.push(6, {"loss": torch.tensor(1.0)})
    (step, values, host), (next_step, *_) = deferred.pop_ready()
    assert (step, next_step) == (5, 6) and host == {"lr": 3e-4}
    assert values["loss"] == 2.5 and type(values["loss"]) is float and values["tokens"] == 2**40
    assert values["norms"].tolist() == [1.0, math.inf, 3.0]
    assert deferred.pop_ready(block=True) == []


def test_values_are_those_of_the_push_even_if_the_tensor_changes():
    deferred, loss = DeferredScalars(torch.device("cpu")), torch.tensor(1.0)
    deferred.push(1, {"loss": loss})
    loss.fill_(9.0)
    assert deferred.pop_ready()[0][1]["loss"] == 1.0


def test_each_step_carries_its_own_duration():
    deferred = DeferredScalars(torch.device("cpu"))
    for step, seconds in ((1, 0.03), (2, 0.06)):
        deferred.begin()
        time.sleep(seconds)
        deferred.push(step, {"loss": torch.tensor(1.0)})
        ((_, values, _),) = deferred.pop_ready()
        assert seconds <= values["seconds"] < seconds + 0.5
        time.sleep(0.6)  # an evaluation or a checkpoint between steps is not part of the next


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_a_step_is_read_one_push_later_without_waiting_for_the_newest():
    deferred, work = DeferredScalars(torch.device("cuda")), torch.randn(4096, 4096, device="cuda")
    numbers = {"loss": torch.tensor(1.0, device="cuda"), "norms": torch.arange(3.0, device="cuda")}

    def burst(products: int) -> dict:
        nonlocal work
        for _ in range(products):
            work = (work @ work).clamp(-1, 1)
        return {"loss": work.sum() * 0 + 2, "norms": numbers["norms"]}

    burst(1)  # loading a kernel for the first time waits for the device
    for step in (1, 2):
        deferred.push(step, numbers)
    assert len(deferred.pop_ready()) == len(deferred.pop_ready(block=True)) == 1  # and the pinned pool is warm
    deferred.push(3, numbers)
    assert deferred.pop_ready() == []
    torch.cuda.synchronize()
    begin = time.perf_counter()
    deferred.push(4, burst(200))
    ((step, values, _),) = deferred.pop_ready()
    seen = time.perf_counter() - begin
    assert step == 3 and values["loss"] == 1.0 and values["norms"].tolist() == [0, 1, 2]
    ((step, values, _),) = deferred.pop_ready(block=True)
    assert step == 4 and values["loss"] == 2.0 and time.perf_counter() - begin > 2 * seen


# metrics.jsonl over crashes and resumes


def test_a_resume_puts_away_what_the_lost_part_wrote(tmp_path):
    log = logger(tmp_path)
    for step in range(1, 6):
        log.step(record(step))
        log.evaluation({"step": step, "tokens": 0, "eval_loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "loss": 1.')  # killed here
    log = logger(tmp_path, resume_step=3)
    assert [line["step"] for line in written(tmp_path)] == [1, 1, 2, 2, 3, 3]
    log.step(record(4, loss=0.5))
    log.close("done")
    assert [line["step"] for line in metrics.read_metrics(tmp_path)] == [1, 1, 2, 2, 3, 3, 4]
    assert metrics.read_metrics(tmp_path)[-1]["loss"] == 0.5
    again = [strict(text)["step"] for text in (tmp_path / "metrics-replaced.jsonl").read_text().splitlines()]
    assert again == [4, 4, 5, 5]
    assert {path.name for path in tmp_path.iterdir()} == {
        "console.log",
        "metrics.jsonl",
        "metrics-replaced.jsonl",
        "status.json",
    }


def test_the_log_has_what_the_console_shows_or_would_show(tmp_path):
    for console in ("plain", "rich", "none"):
        log = logger(tmp_path, console=console)
        log.step(record(1))
        log.event(f"saved on {console}")
        log.close("failed", "OSError: no space")
    text = (tmp_path / "console.log").read_text()
    assert text.count("step   1/100  loss 10.0000") == text.count("failed: OSError: no space") == 3
    assert "saved on rich" in text and "\x1b" not in text
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in text.splitlines())


def test_the_folder_says_what_became_of_the_run(tmp_path):
    def status() -> list:
        return list(json.loads((tmp_path / "status.json").read_text()).values())

    for end in ("stopped", "failed", "done"):
        log = logger(tmp_path, resume_step=2, steps=5)
        assert status() == ["running", 2, 5]
        log.step(record(3))
        log.close(end)
        assert status() == [end, 3, 5]


def test_the_first_reason_of_a_failure_stays(tmp_path):
    """That of another rank's watchdog: the connection that breaks then is not the cause."""
    for told, kept in (("rank 0 does not answer", "rank 0 does not answer"), (None, "Read error")):
        log = logger(tmp_path, steps=5)
        if told:
            sinks.write_status(tmp_path, "failed", 1, 5, told)
        log.close("failed", "Read error")
        assert json.loads((tmp_path / "status.json").read_text())["reason"] == kept


def test_a_torn_line_is_dropped_even_where_nothing_else_is(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n\x00\xff{"ste')
    logger(tmp_path, resume_step=2).step(record(3))
    assert [line["step"] for line in written(tmp_path)] == [1, 2, 3]


def test_an_intact_file_is_not_rewritten(tmp_path):
    logger(tmp_path).step(record(1))
    before = os.stat(tmp_path / "metrics.jsonl").st_ino
    logger(tmp_path, resume_step=1)
    assert os.stat(tmp_path / "metrics.jsonl").st_ino == before


def test_a_new_run_in_the_same_folder_starts_a_new_file(tmp_path):
    logger(tmp_path).evaluation({"step": 0, "tokens": 0, "eval_loss": 8.0})
    logger(tmp_path, resume_step=0).step(record(1))
    assert [line["step"] for line in written(tmp_path)] == [1]


def test_a_full_disk_is_said_once_and_does_not_stop_the_run(tmp_path, capsys):
    log = logger(tmp_path, console="plain")
    log.step(record(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, limits[1])
    )  # ten bytes fit
    try:
        log.step(record(2))
        log.step(record(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.step(record(4))
    log.close("done")
    shown = capsys.readouterr().out
    assert shown.count("not written") == 1 and "step 2 not written" in shown and "step   4/100" in shown
    assert [line["step"] for line in written(tmp_path)] == [1, 4]


def test_a_folder_that_cannot_be_written_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir=.*file/run"):
        logger(tmp_path / "file" / "run")


def test_other_ranks_write_nothing(tmp_path, capsys):
    log = logger(tmp_path / "run", enabled=False, console="plain", tensorboard=True, wandb=WandbConfig(enabled=True))
    log.step(record(1))
    log.evaluation({"step": 1, "eval_loss": 1.0})
    log.event("checkpoint saved")
    log.close("done")
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


# Console

FULL = {
    "loss": 2.34567,
    "grad_norm": 0.8123,
    "lr": 3e-4,
    "tokens_per_second": 12345.6,
    "mfu": 0.5321,
    "memory_gib": 54.321,
    "eta_seconds": 130.0,
    "learned": 1.0,
    "skipped": 0,
}


def test_plain_lines(tmp_path, capsys):
    log = logger(tmp_path, console="plain", steps=1200)
    log.step({"step": 5, **FULL})
    log.step({"step": 10, **FULL, "mfu": None, "loss": math.nan, "skipped": 2, "grad_norm": 11.0, "eta_seconds": None})
    log.evaluation({"step": 10, "tokens": 1, "eval_loss": 3.21})
    log.event("checkpoint saved: runs/[demo]/checkpoints/step-00000010")
    log.close("done")
    assert capsys.readouterr().out.splitlines() == [
        "step    5/1200  loss  2.3457  12.3k tokens/s  grad norm   0.812  lr 3.00e-04  MFU 53.2%  memory 54.3 GiB  "
        "ETA 2m 10s",
        "step   10/1200  loss not finite  12.3k tokens/s  grad norm      11  lr 3.00e-04  memory 54.3 GiB  skipped 2",
        "step   10/1200  evaluation loss 3.2100",
        "checkpoint saved: runs/[demo]/checkpoints/step-00000010",
    ]


def test_auto_is_plain_when_the_output_is_no_terminal_and_none_is_silent(tmp_path, capsys):
    for console, expected in (("auto", 1), ("none", 0)):
        log = logger(tmp_path, console=console)
        log.step(record(1))
        log.close("done")
        assert len(capsys.readouterr().out.splitlines()) == expected


def test_the_progress_bar_shows_progress_numbers_and_notices(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    log = logger(tmp_path, console="rich", resume_step=10, steps=20)
    log.step({"step": 11, **FULL})
    log.event("checkpoint saved: [a]")
    log.evaluation({"step": 11, "tokens": 1, "eval_loss": 3.21})
    log.step({"step": 12, **FULL})
    log.close("done")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "10/20" in shown and "checkpoint saved: [a]" in shown and "step 11/20  evaluation loss 3.2100" in shown
    last = shown.rstrip().splitlines()[-2:]
    assert "demo" in last[0] and "12/20" in last[0] and last[0].rstrip().endswith("ETA 2m 10s")
    assert last[1].rstrip() == "loss 2.3457  12.3k tokens/s  grad norm 0.812  lr 3.00e-04  MFU 53.2%  54.3 GiB"


# TensorBoard and Weights & Biases


def test_tensorboard_events_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def curve(name):
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        return [(event.step, event.value) for event in events.Scalars(name)]

    log = logger(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        log.step({"step": step, "loss": float(step), "mfu": None, "grad_norm": math.nan})
    log.close("stopped")
    log = logger(tmp_path, resume_step=2, tensorboard=True)
    log.step({"step": 3, "loss": 7.0})
    log.evaluation({"step": 3, "tokens": 9, "eval_loss": 5.0})
    log.close("done")
    assert curve("loss") == [(1, 1.0), (2, 2.0), (3, 7.0)] and curve("eval_loss") == [(3, 5.0)]
    with pytest.raises(KeyError):
        curve("mfu")


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    return monkeypatch


def test_wandb_without_a_key_is_kept_in_the_run_folder(tmp_path, no_key, capsys):
    log = logger(tmp_path, console="plain", wandb=WandbConfig(enabled=True))
    log.step(record(1))
    log.close("stopped")
    (first,) = (tmp_path / "wandb").glob("offline-run-*")
    kept = (tmp_path / "wandb-id").read_text()
    assert first.name.endswith(kept) and (first / f"run-{kept}.wandb").stat().st_size > 0
    assert "wandb" not in capsys.readouterr().out


class FakeWandb(types.ModuleType):
    """A stand-in that records the calls; `init` fails as often as told, or hangs."""

    def __init__(self, failures=0, fail_log=False, hang=False):
        super().__init__("wandb")
        self.inits, self.logged, self.ended, self.torn_down = [], queue.Queue(), [], 0
        self.failures, self.fail_log, self.hang = failures, fail_log, hang
        self.Settings = dict

    def init(self, **arguments):
        self.inits.append(arguments)
        if self.hang:
            threading.Event().wait()
        if len(self.inits) <= self.failures:
            raise ConnectionError("no route to host\nwith a long story")
        return self

    def log(self, values, step):
        if self.fail_log:
            raise RuntimeError("quota exceeded")
        self.logged.put((step, values))

    def mark_preempting(self):
        self.ended.append("preempting")

    def finish(self, exit_code):
        self.ended.append(exit_code)

    def teardown(self):
        self.torn_down += 1


def with_wandb(monkeypatch, tmp_path, fake, resume_step=0, status="done", steps=(1, 2)):
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = logger(tmp_path, resume_step=resume_step, console="plain", wandb=WandbConfig(enabled=True, project="p"))
    for step in steps:
        log.step(record(step))
    log.close(status)
    return log


def test_wandb_gets_lines_settings_and_the_way_the_run_ended(tmp_path, no_key):
    fake = FakeWandb()
    no_key.setenv("WANDB_API_KEY", "x" * 40)
    with_wandb(no_key, tmp_path, fake, status="stopped")
    (init,) = fake.inits
    assert [init[name] for name in ("mode", "resume", "project", "name")] == ["online", "allow", "p", "demo"]
    assert init["config"] == {"seed": 1} and init["id"] == (tmp_path / "wandb-id").read_text()
    assert fake.logged.get_nowait() == (1, {"loss": 10.0, "tokens": 4096})
    assert fake.logged.get_nowait() == (2, {"loss": 5.0, "tokens": 8192})
    assert fake.ended == ["preempting", 75]
    with_wandb(no_key, tmp_path, fake, resume_step=2, steps=(3,))
    with_wandb(no_key, tmp_path, fake, resume_step=0, status="failed", steps=(1,))
    ids = [init["id"] for init in fake.inits]
    assert ids[1] == ids[0] != ids[2] and fake.ended[2:] == [0, 1]


def test_wandb_mode_and_netrc_are_respected(tmp_path, no_key):
    fake = FakeWandb()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "x" * 40 + "\n")
    no_key.setenv("NETRC", str(tmp_path / "netrc"))
    with_wandb(no_key, tmp_path, fake)
    no_key.setenv("WANDB_MODE", "disabled")
    with_wandb(no_key, tmp_path, fake)
    no_key.delenv("WANDB_MODE")
    no_key.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with_wandb(no_key, tmp_path, fake)
    assert [init["mode"] for init in fake.inits] == ["online", "disabled", "offline"]


def test_wandb_goes_offline_when_the_server_cannot_be_reached(tmp_path, no_key, capsys):
    fake = FakeWandb(failures=1)
    no_key.setenv("WANDB_API_KEY", "x" * 40)
    with_wandb(no_key, tmp_path, fake)
    assert [init["mode"] for init in fake.inits] == ["online", "offline"]
    assert fake.torn_down == 1 and fake.logged.qsize() == 2
    assert "stays offline" in capsys.readouterr().out


@pytest.mark.parametrize("fake", [FakeWandb(failures=2), FakeWandb(fail_log=True), None])
def test_a_failing_wandb_is_named_once_and_training_goes_on(tmp_path, no_key, capsys, fake):
    with_wandb(no_key, tmp_path, fake, steps=range(1, 6))  # None: import wandb raises
    shown = capsys.readouterr().out
    assert shown.count("andb is off") == 1 and "long story" not in shown
    assert len(written(tmp_path)) == 5


def test_a_hanging_wandb_holds_up_neither_a_step_nor_the_end(tmp_path, no_key, capsys):
    no_key.setattr(sinks.Wandb, "FINISH", 0.2)
    begin = time.monotonic()
    with_wandb(no_key, tmp_path, FakeWandb(hang=True), steps=range(1, 50))
    assert time.monotonic() - begin < 5 and len(written(tmp_path)) == 49
    assert "did not finish within 0.2 s" in capsys.readouterr().out


def test_a_broken_tensorboard_and_a_closed_output_do_not_stop_the_run(tmp_path, monkeypatch):
    (tmp_path / "tensorboard").write_text("in the way")
    log = logger(tmp_path, console="plain", tensorboard=True)
    closed = open(os.devnull, "w")
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    log.step(record(1))
    log.event("still here")
    log.step(record(2))
    log.close("done")
    assert [line["step"] for line in written(tmp_path)] == [1, 2]


# Numbers and tables


@pytest.mark.parametrize(
    "format_, value, text",
    [
        (tables.format_count, 0, "0"),
        (tables.format_count, 999, "999"),
        (tables.format_count, 999.9, "1.00k"),
        (tables.format_count, 1234, "1.23k"),
        (tables.format_count, 8030261248, "8.03B"),
        (tables.format_count, 0.5, "0.50"),
        (tables.format_count, -2500, "-2.50k"),
        (tables.format_count, None, "-"),
        (tables.format_count, 5e16, "50000T"),
        (tables.format_flops, 48.1e9, "48.1 GFLOP"),
        (tables.format_bytes, 54.3 * 2**30, "54.3 GiB"),
        (tables.format_bytes, 512, "512 B"),
        (tables.format_bytes, 1023.9, "1.00 KiB"),
        (tables.format_percent, 0.5321, "53.2%"),
        (tables.format_percent, None, "-"),
        (tables.format_duration, 0.01234, "12.3 ms"),
        (tables.format_duration, 4.567, "4.57 s"),
        (tables.format_duration, 59.97, "1m 00s"),
        (tables.format_duration, 125, "2m 05s"),
        (tables.format_duration, 3599.9, "1h 00m"),
        (tables.format_duration, 11220, "3h 07m"),
        (tables.format_duration, 86399, "1d 00h"),
        (tables.format_duration, 352800, "4d 02h"),
        (tables.format_duration, math.nan, "-"),
    ],
)
def test_numbers_for_people(format_, value, text):
    assert format_(value) == text


@given(st.floats(0.01, 9e14))
def test_counts_are_short_and_right(value):
    text = tables.format_count(value)
    number, unit = re.fullmatch(r"([\d.]+)([kMBT]?)", text).groups()
    assert float(number) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[unit] == pytest.approx(
        value, rel=6e-3, abs=6e-3
    )
    assert len(text) <= 5


@given(st.floats(0, 1e7))
def test_durations_are_right_and_never_show_a_full_unit(value):
    text = tables.format_duration(value)
    seconds = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}
    parts = re.findall(r"([\d.]+) ?(ms|[smhd])", text)
    assert sum(float(number) * seconds[unit] for number, unit in parts) == pytest.approx(value, rel=0.03, abs=1e-5)
    assert all(float(number) < {"ms": 1000, "s": 60, "m": 60, "h": 24, "d": math.inf}[unit] for number, unit in parts)


STARTUP = dict(
    model=[("name", "llama3_8b"), ("parameters", tables.format_count(8030261248))],
    plan=[("zero", "stage 3, [shard] 8")],
    batch=[("global", "64 sequences x 8192 = 524k tokens")],
    memory=[("parameters", tables.format_bytes(4e9)), ("total", None)],
)


def test_startup_is_aligned_plain_text_in_a_log():
    out = io.StringIO()
    tables.print_sections(STARTUP, console=Console(file=out))
    assert out.getvalue().splitlines() == [
        "model   name        llama3_8b",
        "        parameters  8.03B",
        "plan    zero        stage 3, [shard] 8",
        "batch   global      64 sequences x 8192 = 524k tokens",
        "memory  parameters  3.73 GiB",
        "        total       -",
    ]


def test_startup_is_one_framed_table_on_a_terminal():
    out = io.StringIO()
    tables.print_sections(STARTUP, console=Console(file=out, force_terminal=True, width=80, color_system=None))
    lines = out.getvalue().splitlines()
    assert sum("├" in line for line in lines) == 3 and len({len(line) for line in lines}) == 1
    assert "[shard] 8" in out.getvalue()


def test_the_parameter_type_map_is_a_table():
    out = io.StringIO()
    rows = [
        {"type": "norm", "parameters": 266240, "weight decay": 0.0, "optimizer": "adamw"},
        {"type": "matrix", "parameters": 6979321856, "weight decay": 0.1, "optimizer": None},
    ]
    tables.print_rows("parameter types", rows, console=Console(file=out))
    header, *body = [line.split() for line in out.getvalue().splitlines()[1:]]
    assert header == ["type", "parameters", "weight", "decay", "optimizer"]
    assert body == [["norm", "266k", "0.0", "adamw"], ["matrix", "6.98B", "0.1", "-"]]
