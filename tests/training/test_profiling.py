"""Profiles of runs under way, on two processes with gloo: accounts of all of a step on both ranks, traces that stay,
metrics."""

from __future__ import annotations

import math
import subprocess

import pytest
from support.corpora import sources_of_runs
from support.launch import launch

import trainer
from trainer.diagnosis import time_breakdown, traces
from trainer.diagnosis.time_breakdown import trace_of
from trainer.observe.metrics import read_metrics
from trainer.util import tables


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    sources_of_runs(folder)
    launch("profiling.py", 2, folder, forks=True)
    return folder


def by_step(accounts):
    return [(one.step, one.rank) for one in accounts]


def test_accounts_are_all_of_the_step_on_both_ranks(root):
    accounts = time_breakdown.read_breakdowns(root / "sharded")
    assert by_step(accounts) == [(step, rank) for step in (3, 4) for rank in (0, 1)]
    for one in accounts:
        assert math.fsum(one.terms.values()) == pytest.approx(one.seconds, rel=1e-9)
        assert one.spent("other") == 0 and one.device == "cpu" and one.place["shard"] == one.rank
        terms = ("products", "attention", "memory_bound", "recompute", "optimizer", "communication/data/transfer")
        assert all(one.terms[term] > 0 for term in (*terms, "data", "host/launch"))
        assert all(
            one.terms[term] > 1e-4 for term in ("checkpoint", "evaluation")
        )  # both wait for the disk, or compute
        assert not one.spent("communication/tensor") and not one.spent("bubble")
    products = {kernel.name: kernel for kernel in accounts[-1].kernels}["aten::mm"]
    assert products.kind == "products" and products.flops > 0 and products.bytes > 0


def test_the_profile_saw_the_step_that_was_measured(root):
    newest = [one for one in time_breakdown.read_breakdowns(root / "sharded") if one.step == 4]
    assert {one.rank for one in newest} == {0, 1}
    for one in newest:
        step = traces.read_trace(trace_of(root / "sharded", 4, one.rank)).labelled(tables.STEP)[-1]
        rest = one.seconds - one.terms["checkpoint"] - one.terms["evaluation"]
        assert rest == pytest.approx((step.end - step.start) / 1e9, rel=1e-9)


def test_a_pipeline_has_bubbles_and_its_ranks_differ(root):
    accounts = time_breakdown.read_breakdowns(root / "pipeline")
    assert by_step(accounts) == [(3, 0), (3, 1)]
    for one in accounts:
        assert one.spent("bubble") + one.spent("communication/pipeline") > 0
        assert not one.spent("communication/data") and not one.spent("recompute")
    trace = traces.read_trace(trace_of(root / "pipeline", 3, 1))
    assert {name for name, _, _ in trace.actions} == {f"1{kind}{number}" for kind in "FB" for number in range(4)}
    assert trace.groups["pipeline 0 to 1"] == traces.TraceGroup("pipeline", (0, 1))


@pytest.mark.parametrize("name,axis", [("copied", "tensor"), ("copied_shards", "data")])
def test_memory_that_ranks_share_is_communication(root, name, axis):
    accounts = time_breakdown.read_breakdowns(root / name)
    assert by_step(accounts) == [(3, 0), (3, 1)]
    waits = []
    for one in accounts:
        trace = traces.read_trace(trace_of(root / name, 3, one.rank))
        waits.append([group for group, _ in trace.marked(tables.AWAITS)])
        shared = [mark for label in (tables.AWAITS, tables.SENDS) for mark in trace.marked(label)]
        assert {trace.axis(group) for group, _ in shared} == {axis}
        spent = sum(event.end - event.start for _, event in shared) / 1e9
        assert one.spent(f"communication/{axis}") > 0.95 * spent > 0
        assert one.spent(f"communication/{axis}/transfer") > 0
    assert waits[0] == waits[1]
    assert sum(one.spent(f"communication/{axis}/waiting") for one in accounts) > 0


def test_traces_that_were_asked_for_stay_and_of_the_others_the_newest(root):
    kept = sorted(path.name for path in (root / "sharded" / "traces").iterdir())
    assert kept == [trace_of(root, step, rank).name for step in (3, 4) for rank in (0, 1)]


def test_the_newest_account_is_in_the_metrics(root):
    lines = [line for line in read_metrics(root / "sharded") if "loss" in line]
    assert [line["profiled_step"] for line in lines[:3]] == [None] * 3
    last = lines[-1]  # that of step 4 may be there, or not yet
    known = [one for one in time_breakdown.read_breakdowns(root / "sharded") if one.step == last["profiled_step"]]
    assert last["profiled_step"] in (3, 4)
    spent, whole = (sum(values) for values in zip(*((one.spent("communication/data"), one.seconds) for one in known)))
    assert last["exposed/data"] == pytest.approx(spent / whole)
    assert last["host"] > 0 and last["launch_delay"] is None and "exposed/tensor" not in last


def test_a_run_goes_on_without_the_accounts_that_fail(tmp_path, monkeypatch, capfd):
    """The process that reads traces ends by an error: the run does not."""

    def broken(command, **given):
        return popen([command[0], "-c", "raise SystemExit('no account')"], **given)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", broken)
    settings = ["+config=debug", "run.steps=3", "logging.profile=3", "logging=quiet", f"run.dir={tmp_path / 'run'}"]
    small = ["model.width=32", "model.depth=2", "model.feed_forward.width=48", "data.workers=1"]
    result = trainer.run(trainer.compose([*settings, *small, f"data.cache={tmp_path / 'cache'}"]))
    assert result.code == 0 and time_breakdown.read_breakdowns(tmp_path / "run") == []
    assert "no account" in capfd.readouterr().err
