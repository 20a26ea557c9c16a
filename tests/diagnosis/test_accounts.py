"""Accounts of steps from traces that are written by hand, shaped as those of CUDA devices with NCCL and of CPUs with
gloo."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces import AUTOGRAD, GLOO, NODE, Written
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from trainer.config import ConfigError
from trainer.diagnosis import accounts as command
from trainer.diagnosis import time_breakdown as contract
from trainer.diagnosis import traces
from trainer.diagnosis.accounts import break_down_step
from trainer.diagnosis.time_breakdown import TimeBreakdown, axis_of, choose_ranks, rank_coordinates, trace_of
from trainer.planning.schedules import ir
from trainer.planning.schedules.templates import build_schedule
from trainer.util import tables

GROUPS = {"1": ("data", (0, 1)), "2": ("tensor", (0, 1)), "0": ("all", (0, 1)), "pipeline 0 to 1": ("pipeline", (0, 1))}


@pytest.fixture
def of(tmp_path):
    """The accounts of written traces."""

    def make(*written: Written) -> list[TimeBreakdown]:
        return break_down_step(
            [traces.read_trace(one.write(tmp_path / f"{number}.json")) for number, one in enumerate(written)]
        )

    return make


def terms(account: TimeBreakdown) -> dict[str, float]:
    """In microseconds."""
    return {name: round(seconds * 1e6, 3) for name, seconds in account.terms.items()}


def device(rank: int = 0, end: float = 100, **given) -> Written:
    """A step of a device from 0 to `end`; the kernels of the step before ended at 0."""
    written = Written(rank, groups=GROUPS, **given)
    return written.step(-50, -10).kernel("before", -20, -15, 0).step(-5, end)


def test_kernels_belong_to_what_launched_them(of):
    written = device(end=70).label(tables.OPTIMIZER, 50, 60)
    written.kernel("sm90_xmma_gemm_bf16", -4, 0, 10).kernel("flash_fwd_kernel", -3, 10, 15)
    written.kernel("triton_poi_fused_add", -2, 15, 20)
    # Backward runs on another thread. There, an operator with a number in the graph is a forward pass again.
    written.op(NODE, 10, 49, AUTOGRAD).op("aten::mm", 11, 13, AUTOGRAD).kernel("nvjet_tst", 12, 20, 30, AUTOGRAD)
    repeated = {"Sequence number": 40}
    written.op("aten::linear", 20, 30, AUTOGRAD, **repeated).op("aten::addmm", 21, 24, AUTOGRAD, **repeated)
    written.kernel("nvjet_tst", 22, 30, 36, AUTOGRAD)
    written.op("CompiledFunctionBackward", 31, 36, AUTOGRAD).kernel("flash_fwd_kernel", 32, 36, 40, AUTOGRAD)
    written.op("aten::sum", 40, 42, AUTOGRAD).kernel("reduce_kernel", 41, 42, 44, AUTOGRAD)
    written.op("aten::_fused_adamw_", 51, 56).kernel("multi_tensor_apply_kernel", 52, 60, 68)
    (account,) = of(written)
    assert terms(account) == {
        "products": 20,
        "attention": 5,
        "memory_bound": 7,
        "recompute": 10,
        "optimizer": 8,
        "host/launch": 20,
    }
    assert account.launches == 8 and account.seconds == pytest.approx(70e-6)
    by_name = {(kernel.name, kernel.kind): kernel.calls for kernel in account.kernels}
    assert by_name["nvjet_tst", "products"] == 2 and by_name["multi_tensor_apply_kernel", "optimizer"] == 1


def shaped(*shapes: list[int], strides: list[list[int]]) -> dict[str, Any]:
    return {"Input Dims": list(shapes), "Input Strides": strides, "Input type": ["c10::BFloat16"] * len(shapes)}


FORWARD = shaped([32, 64], [64, 64], strides=[[64, 1], [1, 64]])
INPUT_GRADIENT = shaped([32, 64], [64, 64], strides=[[64, 1], [64, 1]])
WEIGHT_GRADIENT = shaped([64, 32], [32, 64], strides=[[1, 64], [64, 1]])
CAST = shaped([32, 64], [64, 64], [1], strides=[[64, 1], [1, 64], [1]])
NODE_OF_COMPILED = "autograd::engine::evaluate_function: CompiledFunctionBackward"


@pytest.mark.parametrize("name,forward", [("aten::mm", FORWARD), ("aten::_scaled_mm", CAST), ("aten::mm", {})])
def test_a_compiled_layer_repeats_the_products_that_lie_like_forward_s(of, name, forward):
    """Of a square matrix, by their strides; in fp8, and without strides, nothing tells."""
    written = device(end=60).op(name, 0, 4, **forward).kernel("nvjet_tst", 1, 4, 10)
    written.op(NODE_OF_COMPILED, 10, 50, AUTOGRAD)
    for number, details in enumerate((forward, INPUT_GRADIENT, WEIGHT_GRADIENT)):
        start = 12 + 10 * number
        written.op(name, start, start + 5, AUTOGRAD, **details).kernel(
            "nvjet_tst", start + 1, start + 5, start + 9, AUTOGRAD
        )
    (account,) = of(written)
    found = terms(account)
    assert (found["products"], found.get("recompute", 0)) == ((14, 4) if forward is FORWARD else (18, 0))


@pytest.mark.parametrize("recomputed", [True, False])
def test_a_real_compiled_layer_says_what_it_repeats(of, tmp_path, recomputed):
    """Of four products of each matrix (forward, again, and both gradients) one is recompute. Times are those of a clock
    that ticks when something begins or ends, since something else may run during a step."""
    up, down = (torch.nn.Linear(512, 512, bias=False) for _ in range(2))

    def layer(x):
        return x + down(torch.nn.functional.silu(up(x)))

    whole = partial(checkpoint, layer, use_reentrant=False) if recomputed else layer
    step, x = torch.compile(whole, backend="aot_eager"), torch.randn(1024, 512, requires_grad=True)
    step(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded, record_function(tables.STEP):
        step(x).sum().backward()
    recorded.export_chrome_trace(str(tmp_path / "recorded.json"))
    written = Written(device="cpu")
    written.events = json.loads((tmp_path / "recorded.json").read_text())["traceEvents"]
    timed = [event for event in written.events if "ts" in event]
    ends = [event["ts"] + event.get("dur", 0) for event in timed]
    ticks = {time: tick for tick, time in enumerate(sorted({*ends, *(event["ts"] for event in timed)}))}
    for event, end in zip(timed, ends):
        event |= {"ts": ticks[event["ts"]]} | ({"dur": ticks[end] - ticks[event["ts"]]} if "dur" in event else {})
    (account,) = of(written)
    products, again = account.spent("products"), account.spent("recompute")
    assert products > 0 and (0.1 < again / (products + again) < 0.4 if recomputed else again == 0)


def test_computation_hides_communication_and_copies_come_after_it(of):
    written = device(end=90).kernel("gemm", -4, 0, 40).nccl("1", -3, 10, 50).nccl("2", -3, 45, 60)
    written.add("cuda_runtime", "cudaMemcpyAsync", -2, -1, correlation=900)
    written.add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 55, 70, 7, correlation=900, stream=7)
    written.kernel("gemm", 60, 88, 90)
    (account,) = of(written)
    assert terms(account) == {
        "products": 42,
        "communication/tensor/transfer": 15,
        "communication/data/transfer": 5,
        "copies": 10,
        "host/launch": 18,
    }
    assert account.hidden == {"data": pytest.approx(30e-6)}


def test_an_idle_device_has_a_reason(of):
    written = device(end=900).label(tables.DATA, -5, 95).kernel("gemm", 98, 100, 200)
    written.synchronised(150, 205).kernel("gemm", 240, 250, 300)
    written.label(tables.COLLECTOR, 300, 340).kernel("gemm", 350, 360, 400)
    written.kernel("gemm", 260, 500, 600)  # launched long before: it waited for something on the device
    (account,) = of(written)
    assert terms(account) == {
        "data": 95,
        "products": 290,
        "host/synchronisation": 50,
        "host/collector": 40,
        "host/launch": 5 + 20 + 300,  # after the data, after the collection, and the end of the step
        "other": 100,
    }
    assert account.synchronisations == 1 and account.launch_delay == pytest.approx(10e-6)


def test_a_device_that_is_behind_its_host_begins_the_step_where_it_ended_the_last(of):
    written = Written(groups=GROUPS).step(0, 40).kernel("gemm", 5, 10, 300).step(40, 80)
    written.kernel("gemm", 45, 300, 520).kernel("reduce", 60, 520, 560)
    (account,) = of(written)
    assert terms(account) == {"products": 220, "memory_bound": 40}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_terms_are_all_of_the_step_whatever_the_trace(data, tmp_path_factory):
    """Random kernels, collectives, labels and waits, on two ranks."""
    folder, names = tmp_path_factory.mktemp("random"), ["gemm", "flash_fwd", "triton_red", "1", "2", "0"]
    ranks = []
    for rank in range(2):
        written = device(rank, clock=1e6 * (1 + rank)).label(tables.DATA, -5, data.draw(st.integers(0, 60)))
        for name in data.draw(st.lists(st.sampled_from(names), max_size=12)):
            launch, delay, length = (data.draw(st.floats(0, 60)) for _ in range(3))
            add = written.nccl if name in GROUPS else written.kernel
            add(name, launch, launch + delay, launch + delay + length)
        for start in data.draw(st.lists(st.integers(0, 90), max_size=3, unique=True)):
            written.synchronised(start, start + 0.5).label(tables.AWAITS + "2", start + 0.5, start + 0.75)
        written.note["spent"] = {"checkpoint": 0.25}
        ranks.append(traces.read_trace(written.write(folder / f"{rank}.json")))
    for account in break_down_step(ranks):
        assert math.fsum(account.terms.values()) == pytest.approx(account.seconds, rel=1e-12)
        assert account.terms["checkpoint"] == 0.25 and min(account.terms.values()) >= 0
        assert set(account.terms) <= {
            name.replace("AXIS", axis) for name in contract.TERMS for axis in ("AXIS", *contract.AXES)
        }
        assert account.seconds >= 0.25 + 100e-6


def test_waiting_is_told_by_the_rank_that_came_last_and_not_by_clocks(of):
    first = device(0, clock=5e6).nccl("1", 0, 0, 90).nccl("1", 5, 90, 100).kernel("gemm", 0, 0, 10)
    second = device(1, clock=9e6).nccl("1", 0, 70, 90).nccl("1", 5, 90, 100).kernel("gemm", 0, 0, 70)
    accounts = of(second, first)
    assert [account.rank for account in accounts] == [0, 1]
    assert terms(accounts[0])["communication/data/waiting"] == 60 and terms(accounts[0])["products"] == 10
    assert terms(accounts[0])["communication/data/transfer"] == 30
    assert "communication/data/waiting" not in terms(accounts[1])
    assert accounts[0].last == {"data": (0, 1)} and accounts[1].last == {"data": (1, 1)}


def test_a_stream_that_waits_for_a_flag_waits_for_its_peer(of):
    """Rank 0's second product could begin at 20; a copy to the other rank's memory goes on until 30."""
    ranks = []
    for rank, start in ((0, 180), (1, 20)):
        written = device(rank, end=400).label(tables.SENDS + "2", -4, -1)
        written.add("cuda_runtime", "cudaMemcpyAsync", -3, -2, correlation=900)
        written.add("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 10, 30, 9, correlation=900, stream=9)
        written.kernel("gemm", 0, 0, 20).label(tables.AWAITS + "2", 2, 3)
        written.kernel("gemm", 4, start, start + 100)
        written.label(tables.AWAITS + "2", 8, 9).kernel("gemm", 10, start + 100, start + 120)  # it is there already
        ranks.append(written.label(tables.AWAITS + "2", 12, 13))  # behind which nothing was launched
    first, second = of(*ranks)
    assert terms(first) == {
        "products": 140,
        "communication/tensor/transfer": 10,
        "communication/tensor/waiting": 150,
        "host/launch": 100,
    }
    assert terms(second) == {"products": 140, "host/launch": 260}
    assert first.hidden == {"tensor": pytest.approx(10e-6)} and second.hidden == {"tensor": pytest.approx(20e-6)}
    assert first.last == {"tensor": (0, 1)} and second.last == {"tensor": (1, 1)}
    assert [(one.name, one.kind) for one in first.kernels if "PtoP" in one.name] == [
        ("Memcpy PtoP (Device -> Device)", "communication")
    ]


def cpu(rank: int = 0, **given) -> Written:
    written = Written(rank, "cpu", GROUPS, **given)
    for number, name in enumerate(GROUPS):
        if name[0] != "p":
            written.label(tables.GROUP + name, -40 + 10 * number, -31 + 10 * number)
            written.gloo("all_reduce", -38 + 10 * number, -35 + 10 * number, GLOO + number)
    return written.step(0, 100)


def test_a_cpu_computes_in_operators_and_gloo_s_threads_have_names(of):
    written = cpu().label(tables.DATA, 0, 10).op("aten::stack", 2, 8)
    written.op("Linear", 10, 40).op("aten::linear", 12, 30).op("aten::mm", 14, 30)  # the first is Python's
    written.op("aten::scaled_dot_product_attention", 40, 50).op("aten::bmm", 42, 48)
    written.gloo("all_gather", 35, 60, GLOO).gloo("reduce_scatter", 60, 65, GLOO + 1).gloo("send", 65, 70, GLOO + 9)
    written.label(tables.OPTIMIZER, 70, 90).op("aten::mul_", 72, 80)
    (account,) = of(written)
    assert terms(account) == {
        "data": 10,
        "products": 18,
        "attention": 10,
        "optimizer": 8,
        "communication/data/transfer": 5 + 10 + 5,
        "communication/tensor/transfer": 5,
        "host/launch": 2 + 5 + 2 + 10 + 10,
    }
    assert account.hidden == {"data": pytest.approx(10e-6)} and account.launch_delay is None


def test_a_cpu_waits_for_flags_and_copies_by_itself(of):
    ranks = []
    for rank, end in ((0, 80), (1, 21)):
        written = cpu(rank).op("trainer::copied_gather_matmul", 5, 95).label(tables.SENDS + "2", 10, 20)
        written.op("aten::copy_", 11, 19).label(tables.AWAITS + "2", 20, end).op("aten::to", 20, 21)
        ranks.append(written.op("aten::mm", end + 1, end + 11))
    first, second = of(*ranks)
    assert terms(first) == {
        "products": 10,
        "communication/tensor/transfer": 11,
        "communication/tensor/waiting": 59,
        "host/launch": 20,
    }
    assert terms(second) == {"products": 10, "communication/tensor/transfer": 11, "host/launch": 79}


def test_a_cpu_repeats_forward_passes_in_backward(of):
    written = cpu().op(NODE, 10, 60).op("MmBackward0", 11, 59, **{"Sequence number": 4})
    written.op("aten::mm", 12, 20).op("aten::silu", 30, 45, **{"Sequence number": 9})
    (account,) = of(written)
    assert terms(account) == {"products": 8, "recompute": 15, "host/launch": 77}


def pipelined(rank: int, seconds: dict[int, float], schedule: ir.Schedule, wait: float) -> Written:
    """A pipeline rank that waits for `wait` microseconds; F and B of a stage take `seconds`."""
    written = cpu(rank).label(tables.WAIT, 10, 10 + wait)
    mine = [action for action in schedule.orders[rank]]
    lasting = [(str(action), 0.0, seconds[action.stage] * 1e-6) for action in mine]
    written.note |= {
        "place": {"pp": rank, "replicate": 0, "shard": 0, "tp": 0},
        "schedule": ir.format_schedule(schedule).splitlines(),
        "placement": list(schedule.placement),
        "actions": lasting,
    }
    return written


@pytest.mark.parametrize(
    "seconds,own,imbalance,transfer",
    [({0: 5, 1: 5}, 10, 0, 50), ({0: 5, 1: 10}, 15, 35, 10), ({0: 10, 1: 5}, 0, 0, 60)],
)
def test_a_bubble_is_its_schedule_s_then_that_of_unequal_stages(of, seconds, own, imbalance, transfer):
    """Two stages, four micro-batches, F and B as long: each rank is idle for one F and one B of the other.

    Stage 1 twice as slow is busy for 80 of 90, and rank 0 for 40, where stages of 7.5 would keep it idle for 15. A slow
    stage 0 is always busy."""
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    first, _ = of(*(pipelined(rank, seconds, schedule, 60) for rank in range(2)))
    found = terms(first)
    assert found.get("bubble/schedule", 0) == own
    assert found.get("bubble/imbalance", 0) == pytest.approx(imbalance)
    assert found.get("communication/pipeline/transfer", 0) == pytest.approx(transfer)


def test_a_pipeline_of_which_a_stage_was_not_seen_has_its_waiting_in_the_schedule(of):
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    (account,) = of(pipelined(0, {0: 5}, schedule, 40))
    assert terms(account)["bubble/schedule"] == 40


def test_a_device_waits_in_receives_and_at_the_end_in_sums(of):
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    ranks = []
    for rank in range(2):
        written = device(rank, end=80)
        written.note |= {key: pipelined(rank, {0: 5, 1: 5}, schedule, 0).note[key]
                         for key in ("place", "schedule", "placement", "actions")}  # fmt: skip
        ranks.append(written.nccl("pipeline 0 to 1", -4, 0, 60 if rank else 4).nccl("0", 50, 70, 74))
    _, second = of(*ranks)
    assert terms(second)["communication/pipeline/transfer"] == 4 + 46  # what no replay explains is the transfer's
    assert terms(second)["bubble/schedule"] == 10


def test_operations_and_bytes_follow_from_shapes(of):
    kinds = ["c10::BFloat16"] * 3
    product = {"Input Dims": [[64, 32], [32, 16]], "Input type": kinds[:2]}
    heads = {"Input Dims": [[2, 4, 128, 16]] * 3 + [[], []], "Input type": [*kinds, "", "Scalar"]}
    written = device(end=60)
    written.op("aten::mm", 0, 5, **product)
    written.kernel("Memset (Device)", 1, 9, 10).kernel("gemm", 2, 10, 20).kernel("splitKreduce", 3, 20, 21)
    causal = {**heads, "Concrete Inputs": ["", "", "", "0.", "True"]}
    written.op("aten::_scaled_dot_product_flash_attention", 6, 9, **causal).kernel("flash_fwd", 7, 21, 30)
    written.op("triton_poi_fused_add_0", 10, 12, **{"Input Dims": [[100], [100]], "Input type": ["float"] * 2})
    written.kernel("triton_poi_fused_add_0", 11, 30, 33)
    (account,) = of(written)
    found = {kernel.name: (kernel.flops, kernel.bytes) for kernel in account.kernels}
    assert found["gemm"] == (2 * 64 * 32 * 16, 2 * (64 * 32 + 32 * 16 + 64 * 16))
    assert found["splitKreduce"] == found["Memset (Device)"] == (None, None)
    assert found["flash_fwd"] == (2 * 2 * 2 * 4 * 128 * 128 * 16 / 2, 2 * 4 * (2 * 4 * 128 * 16))
    assert found["triton_poi_fused_add_0"] == (None, 800)


def test_the_command_says_nothing_where_no_trace_is_left(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(command, "PATIENCE", 0.0)
    command.main(tmp_path, 7, [0, 1])
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


def test_the_command_is_quiet_where_nobody_reads_its_metrics(tmp_path):
    (tmp_path / "traces").mkdir()
    device(0).nccl("1", 0, 0, 40).write(trace_of(tmp_path, 7, 0))
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", command.__name__, str(tmp_path), "7", "0"], stdout=writes, stderr=subprocess.PIPE
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"") and len(contract.read_breakdowns(tmp_path)) == 1


def test_the_command_adds_the_accounts_of_all_ranks_and_prints_their_metrics(tmp_path, capfd):
    (tmp_path / "traces").mkdir()
    for rank in range(2):
        written = device(rank).nccl("1", 0, 0, 40).kernel("gemm", 50, 60, 100)
        written.write(trace_of(tmp_path, 7, rank))
    command.main(tmp_path, 7, [0, 1])
    found = contract.read_breakdowns(tmp_path)
    assert [account.rank for account in found] == [0, 1]
    printed = json.loads(capfd.readouterr().out)
    assert printed == {
        "profiled_step": 7,
        "exposed/data": pytest.approx(0.4),
        "host": pytest.approx(0.2),
        "bubble_imbalance": 0,
        "launch_delay": pytest.approx(10e-6),
    }
    with open(tmp_path / contract.ACCOUNTS, "a") as file:
        file.write(found[0].dumps()[:40])  # as a run in progress leaves it
    assert contract.read_breakdowns(tmp_path) == found
    with open(tmp_path / contract.ACCOUNTS, "a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match=r"accounts.jsonl, line 3: .*; the file is damaged"):
        contract.read_breakdowns(tmp_path)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"terms": {"products": 1.0}}, "1.0 seconds in an account of 2.0"),
        ({"terms": {"products": 2.5, "other": -0.5}}, "other takes -0.5 seconds"),
        ({"terms": {"fun": 2.0}}, "no term fun"),
        ({"terms": {"communication/data": 2.0}}, "no term communication/data"),
        ({"hidden": {"moon": 2.0}}, "no term moon"),
    ],
)
def test_an_account_that_does_not_add_up_is_none(change, message):
    good = {"rank": 0, "step": 1, "place": {}, "device": "cpu", "seconds": 2.0, "terms": {"products": 2.0}}
    assert TimeBreakdown(**good).share("products") == 1.0
    with pytest.raises(ValueError, match=message):
        TimeBreakdown(**(good | change))


def test_what_is_no_trace_is_refused_by_name(tmp_path):
    path = tmp_path / "trace.json"
    for text in ("{", '{"traceEvents": []}', '{"traceEvents": [3]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"trace.json .*profile the step again"):
            traces.read_trace(path)
    written = device()
    del written.events[-1]["ts"]
    with pytest.raises(ConfigError, match="is no trace of a run: 'ts'; profile the step again"):
        traces.read_trace(written.write(path))
    with pytest.raises(ValueError, match="the trace of rank 3 has no step"):
        break_down_step([traces.read_trace(Written(3).write(path))])


def test_a_few_ranks_speak_for_a_large_world():
    mesh = {"pp": 4, "replicate": 2, "shard": 8, "tp": 4}
    everyone = rank_coordinates(mesh)
    assert choose_ranks({"pp": 2, "replicate": 1, "shard": 2, "tp": 2}) == list(range(8))
    for slow in (None, 0, 77, 255):
        ranks = choose_ranks(mesh, slow)
        assert len(ranks) <= 16 and 0 in ranks and (255 if slow is None else slow) in ranks
        assert {everyone[rank]["pp"] for rank in ranks} == set(range(4))


def test_groups_have_the_axis_along_which_their_ranks_lie():
    mesh = {"pp": 2, "replicate": 1, "shard": 2, "tp": 2}
    names = {(0, 1): "tensor", (0, 2): "data", (0, 4): "all", (0, 2, 4, 6): "all", tuple(range(8)): "all", (3,): "all"}
    assert {ranks: axis_of(ranks, mesh, "mesh_x") for ranks in names} == names
    assert axis_of((0, 2), mesh, "mesh_cp") == "context"
