"""`trainer probe`: two processes measure this machine, and the estimate with their file is near the steps of a run."""

from __future__ import annotations

import json

import pytest
from support.launch import launch

from trainer.cluster.probe import list_axes
from trainer.commands import estimate
from trainer.commands.probe import main
from trainer.config import ParallelConfig
from trainer.parallel.context.plan import KERNELS
from trainer.planning.estimate.calibrate import COLLECTIVES
from trainer.planning.features import resolve_plan
from trainer.planning.hardware import load_hardware

FACTOR = 3.0
"""Within which the estimate is to be of a run: half of a step this small is Python between kernels, which on a CPU is
nobody's time in the estimate, and machines are shared."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    root = tmp_path_factory.mktemp("probe")
    launch("probe.py", 2, root, forks=True)
    return root, json.loads((root / "results.json").read_text())


def test_the_file_is_hardware_and_says_what_was_measured(measured):
    root, results = measured
    assert results["code"] == 0
    hardware, text = load_hardware(str(root / "here.yaml")), (root / "here.yaml").read_text()
    assert (hardware.device, hardware.devices, hardware.network.bandwidth) == ("CPU", 2, 1.0)
    assert hardware.peak["fp32"] > 1e-3 and hardware.node.bandwidth > 1e-3 and 0.05 <= hardware.band < 1
    said = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    for expected in (
        "2 processes on 1 node, ",
        "trainer probe +config=debug",
        "feed_forward.down 128 x 352 ",
        "head 512 x 128 ",
        "forward pass of 2 layers ",
        "Not measured but taken from the figures of CPU: network, achieved.float8",
        *(f"{name} 0." for name in KERNELS),
        "A call by copies beside its bytes: ",
        *(f"node, shard: {kind} over 2 ranks, " for kind in COLLECTIVES),
    ):
        assert expected in said, (expected, said)


def test_the_estimate_with_it_is_near_a_run(measured, capsys):
    root, results = measured
    recipe = ["+config=debug", "model.depth=2", "batch.sequence_length=128", "parallel=zero2", "processes=2"]
    out = root / "numbers.json"
    assert estimate.main([*recipe, f"hardware={root / 'here.yaml'}", f"json={out}"]) == 0
    [one] = json.loads(out.read_text())
    assert results["step"] / FACTOR < one["seconds"] < FACTOR * results["step"], (one["terms"], results)


@pytest.mark.parametrize(
    "words, problem",
    [
        (["seconds=-1"], "seconds=-1.0 must be at least 0"),
        (["seconds=soon"], "seconds=soon must be a number"),
        (["out=/no/such/folder/here.yaml"], "out=/no/such/folder/here.yaml: there is no folder /no/such/folder"),
        (["hardware=h20"], "hardware=h20: there is no such file; did you mean 'h200'?"),
        (["run.device=cuda"], "run.device=cuda: this machine has no GPU that torch can use"),
        (["parallel.tp=2"], "parallel.tp=2 x parallel.pp=1 needs a multiple of 2 processes, but 1 run"),
        (["--fast"], "--fast is no option of trainer probe; legal: --out"),
    ],
)
def test_refusals(words, problem, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["+config=debug", *words]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings, world, node, expected",
    [
        ({}, 4, 4, {"node, shard": "node"}),
        ({}, 4, 2, {"node": "node", "network": "network", "shard": ""}),
        ({"tp": 2}, 4, 2, {"node, tp": "node", "network, shard": "network"}),
        ({"tp": 2, "pp": 2}, 8, 4, {"node": "node", "network, pp": "network", "tp": "node", "shard": "node"}),
    ],
)
def test_groups_and_the_links_between_them(settings, world, node, expected, monkeypatch):
    """The link of a node is measured by all its ranks, that between nodes by one rank of each."""
    monkeypatch.setattr("trainer.cluster.probe.own_group", lambda groups, *_: groups)
    parallel = ParallelConfig(**settings)
    parallel.zero.stage = 3
    plan = resolve_plan(parallel, world, None, node)
    found = list_axes(plan, type("Ranks", (), {"size": world, "timeout": None}), node)
    assert {axis.name: axis.place for axis in found} == expected
    for axis in found:
        assert sorted(rank for group in axis.groups for rank in group) == list(range(world))
