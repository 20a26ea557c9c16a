"""The watchdog: what it takes for progress, and what it says of ranks that make none."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.launch import WORKERS, warm_python

from trainer.cluster.node import free_ports
from trainer.config import GuardConfig
from trainer.observe import flight
from trainer.observe.watchdog import (
    DATA,
    EVALUATING,
    SAVING,
    SCHEDULE,
    STARTING,
    STEP,
    Heartbeat,
    NeighbourWatch,
    RankReport,
    Watchdog,
    describe_ranks,
)
from trainer.util.exit_codes import STALLED


def test_limits_follow_the_steps_and_leave_room_for_all_else(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("trainer.observe.watchdog.time.monotonic", lambda: now)
    dog = Watchdog(tmp_path, "start", 0, 1, GuardConfig(stall_factor=0), 9)
    dog.settings = GuardConfig(stall_factor=10, stall_seconds=5, stall_allowance=100)

    def step(seconds: float) -> float:
        """The limit of a step that takes so long."""
        nonlocal now
        dog.enter(DATA, 1)
        dog.enter(STEP, 1)
        limit, now = dog.limit, now + seconds
        return limit

    assert [step(seconds) for seconds in (60, 2, 2, 2)] == [100, 100, 100, 20]  # the first compiles
    dog.enter(EVALUATING, 4)
    now += 50
    assert dog.limit == 100 and step(0.1) == 20
    dog.enter(SAVING, 5)
    assert dog.limit == 100
    assert [step(0.1) for _ in range(9)][-1] == 5
    dog.enter(SCHEDULE, 9)
    assert step(1) == 100  # steps of another schedule
    assert [step(50) for _ in range(5)][-1] == 500
    dog.enter(EVALUATING, 9)
    assert dog.limit == 500  # no less than a step


@given(
    clock=st.floats(-1e6, 1e6),
    jumps=st.lists(st.floats(-1e5, 1e5), min_size=6, max_size=6),
    remaining=st.floats(40, 1000),
)
def test_a_rank_that_is_waited_for_is_judged_by_no_clock_of_another_node(clock, jumps, remaining):
    """A node's clock is off by `clock` seconds, and jumps. Its rank is waited for while its heartbeats change and its
    time is not over; after that it is not."""
    with tempfile.TemporaryDirectory() as folder:
        dog = Watchdog(Path(folder), "start", 0, 1, GuardConfig(stall_factor=0, stall_seconds=25), 9)
    now, wall = 1000.0, 2e9 + clock
    with patch("trainer.observe.watchdog.time.monotonic", lambda: now):
        for number, jump in enumerate(jumps):
            now, wall = now + 5, wall + 5 + jump
            left = remaining - 5 * number
            dog._hear({1: Heartbeat(1, "node1", 0, EVALUATING, 3, wall - 9, wall + left, wall)})
            assert dog._excused() and dog._alive(dog.beats[1])
        for _ in range(5):  # the same heartbeat is read again
            now += 5
            dog._hear({1: replace(dog.beats[1])})
        assert dog._excused() == (5 * 5 < left)
        now += 5
        assert not dog._excused() and not dog._alive(dog.beats[1])
        dog._hear({1: Heartbeat(1, "node1", 0, EVALUATING, 3, wall, wall - 1, wall + 1)})
        assert dog._alive(dog.beats[1]) and not dog._excused(), "its time is over"
        dog._hear({1: Heartbeat(1, "node1", 1 + dog.count, EVALUATING, 3, wall, wall + 99, wall + 2)})
        assert not dog._excused(), "it is ahead, and waits itself"


def entry(
    number: int,
    group: str = "0",
    retired: bool = False,
    p2p: bool = False,
    what: str = "gloo:all_reduce",
    state: str = "scheduled",
):
    return {
        "process_group": (group, "dp"),
        "is_p2p": p2p,
        "collective_seq_id": number,
        "p2p_seq_id": number,
        "retired": retired,
        "state": state,
        "profiling_name": what,
        "input_sizes": [[2, 3]],
        "input_dtypes": ["Float"],
        "frames": [
            {"filename": "/site-packages/torch/distributed.py", "line": 1, "name": "all_reduce"},
            {"filename": f"{flight.PROJECT}step.py", "line": 32, "name": "train_step"},
        ],
    }


def test_the_recorder_says_who_waits_for_whom():
    dump = {
        "pg_config": {"9": {"ranks": "[0, 1]"}},
        "entries": [
            entry(6, retired=True),
            entry(7),
            entry(8),
            entry(3, "9", p2p=True, what="nccl:send", state="completed"),
        ],
    }
    ahead = flight.summarise_dump(dump, {"0": [0, 1, 2, 3]})
    assert ahead["0 collective"] == {
        "desc": "dp",
        "ranks": [0, 1, 2, 3],
        "entered": 8,
        "number": 7,
        "what": "all_reduce Float[2, 3]",
        "at": "step.py:32 train_step",
    }
    assert ahead["9 p2p"] == {"desc": "dp", "ranks": [0, 1], "entered": 3}
    behind = flight.summarise_dump({"entries": [entry(6, retired=True)]}, {"0": [0, 1, 2, 3]})
    assert flight.describe_waits({0: ahead, 1: ahead, 2: behind}) == [
        "ranks 0-1 in all_reduce Float[2, 3] (number 7 of dp) at step.py:32 train_step, which rank 2 did not enter, "
        "which rank 3 may not have entered"
    ]
    assert flight.describe_waits({0: behind, 1: behind}) == []
    assert flight.format_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8" and flight.format_ranks([4]) == "rank 4"


def test_a_collective_that_torch_calls_by_itself_is_told_by_its_caller():
    wrappers = [
        ("/env/torch/distributed/distributed_c10d.py", 5, "all_reduce"),
        ("/env/torch/distributed/c10d_logger.py", 8, "wrapper"),
    ]
    fsdp = [
        ("/env/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 590, "foreach_reduce"),
        ("/env/torch/autograd/graph.py", 3, "backward"),
    ]
    assert flight.project_lines([*wrappers, *fsdp]) == "_fsdp_collectives.py:590 foreach_reduce"
    assert (
        flight.project_lines([*wrappers, (f"{flight.PROJECT}step.py", 32, "train_step"), *fsdp])
        == "step.py:32 train_step"
    )
    assert flight.project_lines(wrappers) == "distributed_c10d.py:5 all_reduce"


def test_the_report_begins_with_who_holds_up_the_others():
    beats = {
        rank: Heartbeat(rank, f"node{rank // 2}", count, phase, 8, 100.0, 110.0, 112.0)
        for rank, count, phase in ((0, 17, STEP), (1, 17, STEP), (2, 16, DATA), (3, 2, STARTING))
    }
    records = {rank: RankReport(beats[rank], "step.py:32 train_step") for rank in (0, 1, 2)}
    assert describe_ranks(records, beats, 4) == [
        "rank 3 does not answer: its process is stopped or stuck, or its machine is lost; last heard of: starting in "
        "step 8 for 12.0 s, on node1",
        "rank 2 (behind the others) on node1: waiting for data in step 8 for 12.0 s, at step.py:32 train_step",
        "ranks 0-1 on node0: training in step 8 for 12.0 s, at step.py:32 train_step",
    ]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("orderly", [True, False])
def test_all_ranks_learn_of_one_that_is_lost_and_none_of_one_that_says_goodbye(size, orderly):
    store, heard = dist.HashStore(), {rank: queue.Queue() for rank in range(size)}
    ring = [NeighbourWatch(store, rank, size, heard[rank].put) for rank in range(size)]
    stranger = json.loads(store.get("address/0"))["port"]
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", stranger), 5) as connection:
        connection.sendall(b"x" * 32)  # without the token
    end = time.monotonic() + 20
    while any(len(watch.connections) < 2 for watch in ring) and time.monotonic() < end:
        time.sleep(0.01)
    assert all(len(watch.connections) == 2 for watch in ring)
    ring[1].close(orderly)
    for rank in set(range(size)) - {1}:
        if orderly:
            with pytest.raises(queue.Empty):
                heard[rank].get(timeout=0.2)
        else:
            assert heard[rank].get(timeout=20) == 1
    for watch in ring:
        watch.close(orderly=True)


def test_a_stall_ends_every_rank_and_names_those_that_hold_up_the_others(tmp_path):
    [port] = free_ports()
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "4",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    ranks = [
        subprocess.Popen(
            [warm_python(), str(WORKERS / "watchdog.py"), str(tmp_path)],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    # A rank whose collective breaks because another has ended may end by that before its own watchdog ends it.
    assert STALLED in codes and set(codes[:3]) <= {STALLED, 1} and codes[3] == 1, outputs
    said = [errors for _, errors in outputs if "training stalled" in errors]
    assert len(said) == 1, outputs  # one speaks for all
    report = (tmp_path / "flight" / "start" / "report.txt").read_text()
    lines = report.splitlines()
    assert "step 8" in lines[0] and "guard.stall_seconds=3" in lines[0]  # and not in the evaluation of step 5
    assert "rank 3 does not answer" in lines[1] and "waiting for data in step 8" in lines[1]
    assert "rank 2 (behind the others)" in lines[2] and "waiting for data in step 8" in lines[2]
    assert "ranks 0-1" in lines[3]
    assert "ranks 0-1 in all_reduce Float[3] (number 8 of default_pg)" in report
    assert "which rank 2 did not enter, which rank 3 may not have entered" in report
    assert "rank 0 waits for gather (float32) of rank 1 in epoch 2; its flag says 1" in report
    assert "rank 1 waits for gather" not in report
    assert "in hang" in (tmp_path / "flight" / "start" / "rank-2.stack.txt").read_text()
    assert "in hang" in outputs[3][1]  # what C prints of the rank that ran no Python
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["status"] == "failed" and "rank 3 does not answer" in status["reason"]
