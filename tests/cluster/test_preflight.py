"""The preflight of a cluster: what it makes of nvidia-smi's output, disks, bandwidths and clocks, and a small run of
each check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import warm_python

from trainer.cluster import node
from trainer.cluster.node import FIELDS, HUNG, BandwidthFloors, free_ports
from trainer.config import ConfigError

ROOT = Path(__file__).parents[2]


def gpu(index: int, **changes: str) -> str:
    """A line of nvidia-smi for `FIELDS`: an idle, healthy GPU with `changes`, by a word of the field's name."""
    values = {
        "index": str(index),
        "uuid": f"GPU-{index}a",
        "ecc": "0",
        "pending": "No",
        "failure": "No",
        "memory": "4",
        "temperature": "31",
        "clocks": "0x0000000000000001",
    }
    return ", ".join((values | changes).values())


def smi(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def test_healthy_gpus_pass():
    assert node.gpu_problems(smi(gpu(0), gpu(1)), 2) == []
    without_counters = gpu(
        0, ecc="[N/A]", pending="[N/A]", failure="[N/A]", clocks="0x0000000000000004"
    )  # no ECC; power cap
    assert node.gpu_problems(smi(without_counters), 1) == []
    assert len(gpu(0).split(",")) == len(FIELDS)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"ecc": "3"}, "3 uncorrected ECC errors"),
        ({"pending": "Yes"}, "waits to be remapped"),
        ({"failure": "Yes"}, "could not be remapped"),
        ({"memory": "70213"}, "70213 MiB of its memory are in use"),
        (
            {"clocks": "0x0000000000000048", "temperature": "91"},
            "throttled by hardware slowdown and hardware thermal slowdown at 91 degrees",
        ),
        ({"clocks": "0x0000000000000080"}, "throttled by power brake"),
    ],
)
def test_a_bad_gpu_is_named_with_what_to_do(change, said):
    [problem] = node.gpu_problems(smi(gpu(0), gpu(5, **change)), 2)
    assert problem.startswith("GPU 5 (GPU-5a): ") and said in problem


def test_gpus_are_counted_as_the_run_will_see_them():
    four = smi(*map(gpu, range(4)))
    assert "4 of 8 GPUs are there" in node.gpu_problems(four, 8)[0]
    assert node.gpu_problems(four, 2, visible="1,GPU-3a") == []
    assert "1 of 2 GPUs" in node.gpu_problems(four, 2, visible="1,7")[0]
    hidden = smi(gpu(0, ecc="3"), gpu(1))
    assert node.gpu_problems(hidden, 1, visible="1") == []
    assert "0 of 1 GPUs" in node.gpu_problems("", 1)[0]


def answering(**answers):
    """A stand-in for subprocess.run that knows the fields of one age of drivers."""

    def run(command, **_):
        known = answers["field"] in command[1]
        return subprocess.CompletedProcess(
            command, 0 if known else 2, "lines" if known else "Field is not a valid field to query.", ""
        )

    return run


def test_old_and_new_drivers_are_asked_in_their_words():
    assert node.nvidia_smi(answering(field="clocks_event_reasons.active")) == "lines"
    assert node.nvidia_smi(answering(field="clocks_throttle_reasons.active")) == "lines"
    with pytest.raises(ConfigError, match="not a valid field.*reboot"):
        node.nvidia_smi(answering(field="nothing"))


def failing(error: BaseException):
    def run(*_, **__):
        raise error

    return run


def test_a_driver_that_is_absent_or_hangs_is_said():
    with pytest.raises(ConfigError, match="no GPU driver"):
        node.nvidia_smi(failing(FileNotFoundError()))
    with pytest.raises(ConfigError, match="needs a reboot"):
        node.nvidia_smi(failing(subprocess.TimeoutExpired("nvidia-smi", 60)))


def test_disks_are_written_and_measured(tmp_path):
    assert node.disk_problems("run.dir", tmp_path / "new", 0.001) == []
    assert list((tmp_path / "new").iterdir()) == []  # nothing of the trial is left
    [problem] = node.disk_problems("data.cache", tmp_path, 1e6)
    assert "data.cache=" in problem and "1000000.0 are wanted" in problem
    (tmp_path / "file").touch()
    assert "cannot be written" in node.disk_problems("run.dir", tmp_path / "file" / "below", 0)[0]


def test_nodes_that_leave_no_mark_are_named(tmp_path):
    (tmp_path / "n2").touch()
    assert node.missing_nodes(tmp_path, ["n1", "n2", "n3", node.NODE], 0.3) == ["n1", "n3"]


@pytest.mark.parametrize("nodes", range(1, 10))
def test_each_node_meets_two_others_and_one_at_a_time(nodes):
    rounds = node.pair_nodes(nodes)
    met: dict[int, set[int]] = {node: set() for node in range(nodes)}
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        for first, second in pairs:
            met[first].add(second), met[second].add(first)
    ends = (0, nodes - 1) if nodes % 2 else ()
    assert all(len(others) == (min(nodes - 1, 1) if nodes < 3 or node in ends else 2) for node, others in met.items())


FLOORS = BandwidthFloors(20, 2, 0.6)


def problems(within=None, between=None, floors=FLOORS):
    return node.bandwidth_problems(within or {}, between or {}, floors)


def test_bandwidth_below_the_floor_or_the_others_is_named():
    assert problems({"n1": 350, "n2": 340}, {("n1", "n2"): 40}) == []
    [problem] = problems({"n1": 350, "n2": 12, "n3": 345})
    assert problem.startswith("n2: all-reduce over its processes at 12 GB/s, below the floor of 20")
    [problem] = problems({"n1": 350, "n2": 100, "n3": 345})
    assert "n2" in problem and "below 0.6 of the median 345" in problem
    [problem] = problems({"n1": 350, "n2": HUNG})
    assert "n2: all-reduce over its processes failed or did not end" in problem


def test_a_slow_node_is_told_from_a_slow_link():
    ring = {("n1", "n2"): 40, ("n3", "n4"): 41, ("n2", "n3"): 42, ("n4", "n1"): 39}
    assert problems(between=ring) == []
    [problem] = problems(between=ring | {("n1", "n2"): 1, ("n2", "n3"): 1.1})
    assert problem.startswith("n2: all-reduce with each of 2 other nodes")
    [problem] = problems(between=ring | {("n3", "n4"): 1})
    assert problem.startswith("n3 with n4: ")
    [problem] = problems(between={("n1", "n2"): 1})  # of two nodes nobody can say which
    assert problem.startswith("n1 with n2: ")


def test_clocks_count_by_their_best_round():
    late = {"n1": 100.0, "n2": 100.9, "n3": 100.1}  # a message to n2 was slow
    assert node.clock_problems([late, {"n1": 200.0, "n2": 200.0, "n3": 200.0}], 0.5) == []
    [problem] = node.clock_problems(
        [{"n1": 100.0, "n2": 96.0, "n3": 100.1}, {"n1": 200.0, "n2": 196.1, "n3": 200.0}], 0.5
    )
    assert problem.startswith("n2: its clock is 3.9 s behind")


def test_the_node_check_says_everything_at_once(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "trainer",
            "preflight",
            "check=node",
            "gpus=2",
            f"run_dir={tmp_path}",
            "free_gib=1e6",
            "nodes=n1,n9",
            "patience=0.2",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "SLURMD_NODENAME": "n1", "PATH": str(tmp_path)},
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 3 and len(lines) == 3 and all(line.startswith("preflight: n1: ") for line in lines)
    assert "nvidia-smi" in lines[0] and "GiB free" in lines[1] and "from n9" in lines[2]


def test_wrong_options_are_refused():
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "preflight", "check=nodes", "skw=1"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2 and "'node'" in done.stderr and "'skew'" in done.stderr


def test_folders_that_cannot_be_used_are_problems(tmp_path, monkeypatch):
    (tmp_path / "preflight").touch()
    wanted = node.PreflightOptions(
        "node", cache="~nobodyx/x", run_dir=str(tmp_path), free_gib=0, nodes="n1,n2", patience=0.1
    )
    cache, marks = node.check_node(wanted)
    assert cache.startswith("data.cache=~nobodyx/x: ") and cache.endswith("; set another data.cache")
    assert marks.startswith(f"{tmp_path}/preflight cannot be used: ")


def test_the_network_check_without_torchrun_is_refused():
    environment = {name: value for name, value in os.environ.items() if name not in node.TORCHRUN} | {
        "RANK": "0",
        "MASTER_PORT": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "preflight", "check=network"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 2 and done.stderr.endswith(
        "the environment has no LOCAL_RANK, WORLD_SIZE, MASTER_ADDR\n"
    ), done.stderr


def test_the_network_check_between_three_nodes():
    """Three processes that take themselves for nodes: fit as they are; with a floor that none reaches, the middle one,
    which meets two others, is the culprit."""
    for given, code, port in zip(([], ["between=1000"]), (0, 3), free_ports(2), strict=True):
        common = {
            **os.environ,
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes = [
            subprocess.Popen(
                [warm_python(), "-m", "trainer", "preflight", "check=network", *given],
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=common | {"RANK": str(rank), "GROUP_RANK": str(rank), "SLURMD_NODENAME": f"n{rank + 1}"},
            )
            for rank in range(3)
        ]
        outputs = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [code] * 3, outputs
        if code:
            [problem] = [line for line in outputs[0][1].splitlines() if line.startswith("preflight: ")]
            assert problem.startswith("preflight: n2: all-reduce with each of 2 other nodes at ")
        else:
            assert "3 nodes, all-reduce between nodes" in outputs[0][0]
