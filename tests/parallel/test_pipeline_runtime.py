"""The pipeline runtime on four gloo processes: gradients, losses, memory, failures. Its times against the simulator:
test_simulated_times.py."""

from __future__ import annotations

import json

import pytest
from support.launch import launch

RANKS = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank saw; rank 1 ends the run by vanishing."""
    out = tmp_path_factory.mktemp("runtime") / "out.json"
    done = launch("pipeline_runtime.py", RANKS, "numbers", out, check=False)
    files = [out.with_suffix(f".{rank}") for rank in (0, 2, 3)]
    assert all(file.exists() for file in files), f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return {rank: json.loads(file.read_text()) for rank, file in zip((0, 2, 3), files)}


def each(ranks):
    return [(f"rank {rank}: {case['case']}", case) for rank, results in ranks.items() for case in results["cases"]]


def test_gradients_and_losses(ranks):
    templates = {case["template"] for _, case in each(ranks)}
    assert templates >= {
        "gpipe",
        "1f1b",
        "interleaved",
        "zb_h1",
        "zb_h2",
        "zb_v",
        "v_half",
        "v_min",
        "dualpipe_v",
        "greedy",
    }
    for name, case in each(ranks):
        assert case["missing"] == 0, name
        assert max(case[value] for value in ("gradients", "losses", "evaluated")) < 1e-12, (name, case)


def test_evaluation_leaves_gradients(ranks):
    assert [name for name, case in each(ranks) if not case["untouched"]] == []


def test_reductions(ranks):
    """Every gradient is reduced as often as asked, the last time after all of it is there."""
    for name, case in each(ranks):
        assert case["late"] == 0 and case["reductions"], name
        assert case["reduced"] < 1e-12, name


def test_timeline(ranks):
    assert [name for name, case in each(ranks) if not case["timeline"]] == []


def test_receive_buffers_do_not_grow_with_micro_batches(ranks):
    for rank, results in ranks.items():
        memory = results["memory"]
        if rank:  # the first stage receives nothing that it keeps; GPipe keeps the inputs of all micro-batches
            assert memory["gpipe 16"][0] == memory["gpipe 8"][0] + 8
        for name in {key.split()[0] for key in memory} - {"gpipe"}:
            assert memory[f"{name} 8"] == memory[f"{name} 16"], name
        for alive, unread, left in memory.values():
            assert 0 < unread <= alive and left == 0


def test_two_forwards_a_layer_under_full_recompute(ranks):
    for results in ranks.values():
        for name, (forwards, error) in results["recomputed"].items():
            assert set(forwards) == {2.0}, name
            assert error < 1e-12, name


def test_profiler_names_every_action(ranks):
    assert all(results["ranges"] == results["steps"] for results in ranks.values())


def test_a_failure_is_told_to_all_ranks(ranks):
    said = "rank 2 failed in 2F3 (forward, stage 2, micro-batch 3): ValueError: boom"
    for rank, results in ranks.items():
        raised = results["raised"]
        assert raised["type"] == ("PipelineError" if rank == 2 else "PeerError") and raised["text"].startswith(said)
        assert raised["cause"] == ("ValueError" if rank == 2 else "TransferError")
        assert rank == 2 or f"[seen by rank {rank} at " in raised["text"]
        assert raised["seconds"] < 20


def test_a_configuration_error_stays_one(ranks):
    assert ranks[2]["config"]["type"] == "ConfigError" and ranks[2]["config"]["text"] == "model.width=3 is odd"
    assert all("ConfigError: model.width=3 is odd" in ranks[rank]["config"]["text"] for rank in (0, 3))


def test_a_vanished_peer_is_named(ranks):
    for results in ranks.values():
        vanished = results["vanished"]
        assert vanished["type"] == "PeerError"
        assert vanished["text"].startswith("rank 1 was lost") and " rank 1: " in vanished["text"]
        assert vanished["seconds"] < 20


def test_ranks_that_wait_for_every_transfer_finish(tmp_path):
    """As on GPUs, where whatever waits for the whole device waits for what was posted too. It compares numbers."""
    launch("pipeline_runtime.py", RANKS, "synchronous", tmp_path / "out.json")
    cases = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(RANKS)]
    assert len(cases[0]) > 25 and len({len(some) for some in cases}) == 1
