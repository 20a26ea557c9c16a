"""Real runs of two ranks, each with one cause that is known: `diagnose_evidence` names it, from what the run has
written."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.causes import CAUSES, LAUNCHED, folder, recorded, resampled
from support.launch import launch

from trainer.commands import diagnose
from trainer.config.fields import CONFIGS
from trainer.diagnosis.evidence import RunEvidence, RunMachine
from trainer.diagnosis.time_breakdown import build_profile
from trainer.diagnosis.verdict import Diagnosis
from trainer.diagnosis.verdict import diagnose_evidence as verdict
from trainer.observe.diagnose_run import diagnose_run
from trainer.planning.resolve import compose

DETAILS = {
    "communication": "data",
    "bubble": "imbalance",
    "data": "",
    "host": "launch",
    "straggler": "rank 1",
    "memory bandwidth": "kernels",
    "compute": "",
    "memory capacity": "full",
}
TOLD = {name: name for name in DETAILS} | {name: CAUSES[name][0] for name in LAUNCHED}
"""What bounds each run: of two causes the larger one."""

RUN_AND_HARDWARE = {"compute": ("memory capacity", "cpu")}
"""Causes that are told from the run of another, on other hardware: `cpu` has memory enough for it."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs by name, and a file of hardware whose memory only one of them fills."""
    root = tmp_path_factory.mktemp("bounds")
    launch("bounds.py", 2, root, forks=True)
    describe_hardware(root)
    for _ in range(2):  # what else runs on this machine may be a cause as well, and is right to be named
        wrong = [name for name in TOLD if told(root, name).kind != TOLD[name]]
        again = {RUN_AND_HARDWARE.get(name, (name,))[0] for name in wrong}
        for name in again:
            shutil.rmtree(folder(root, name))
        if again:
            launch("bounds.py", 2, root, *again, forks=True)
            describe_hardware(root)
    return root


def describe_hardware(root: Path) -> None:
    """Writes the file, of the runs as they are: one that is repeated by itself takes less memory than after others."""
    most = {name: diagnose_run(folder(root, name)).memory.peak for name in TOLD.keys() - RUN_AND_HARDWARE.keys()}
    full = most.pop("memory capacity")
    cpu = yaml.safe_load((CONFIGS / "hardware" / "cpu.yaml").read_text()) | {"memory": 1.05 * full}
    (root / "small.yaml").write_text(yaml.safe_dump(cpu))
    assert full > 1.15 * max(most.values())


def told(runs: Path, name: str) -> Diagnosis:
    run, hardware = RUN_AND_HARDWARE.get(name, (name, str(runs / "small.yaml")))
    return diagnose_run(folder(runs, run), hardware)


def test_eight_causes_of_eight_are_named_and_the_larger_of_two(runs):
    found = {name: told(runs, name) for name in TOLD}
    shares = {
        name: [(one.cost.kind, one.cost.share, one.cost.evidence) for one in found[name].findings] for name in TOLD
    }
    assert {name: diagnosis.kind for name, diagnosis in found.items()} == TOLD, {
        name: shares[name] for name, kind in TOLD.items() if found[name].kind != kind
    }
    assert {name: found[name].findings[0].cost.detail for name in DETAILS} == DETAILS
    for name, smaller in (("loader and sleep", "host"), ("sleep and loader", "data")):
        assert smaller in [finding.cost.kind for finding in found[name].findings], name


def test_of_forty_undisturbed_or_mixed_runs_at_most_one_is_told_wrong():
    """Twenty real runs, twice: of the steps that were recorded three at random, with noise of 5% in each term."""
    steps, wrong = recorded(), {}
    for seed, name in enumerate([*CAUSES, *CAUSES]):
        profile = build_profile(resampled(steps[name], random.Random(seed), 3, 0.05))
        kind = verdict(RunEvidence(Path("runs/x"), profile=profile, machine=RunMachine(2, 2, "CPU"))).kind
        if kind != CAUSES[name][0]:
            wrong[seed, name] = kind
    assert len(CAUSES) == len(steps) == 20 and len(wrong) <= 1, wrong


@pytest.mark.parametrize("slower, kind", [(1, "compute"), (2, "compute"), (10, "memory bandwidth")])
def test_a_busy_host_does_not_make_memory_bound_what_computes(slower, kind):
    """Other programs make all terms of a step longer, each step by another factor, and page faults `slower` those that
    touch memory."""
    steps, draw = recorded(), random.Random(0)
    for name in (name for name in CAUSES if CAUSES[name][0] == "compute"):
        load, busy = {one.step: draw.uniform(1, 4) for one in steps[name]}, []
        for one in steps[name]:
            touched = {term: slower * one.spent(term) for term in ("memory_bound", "optimizer")}
            terms = {term: load[one.step] * seconds for term, seconds in (one.terms | touched).items()}
            busy.append(replace(one, terms=terms, seconds=sum(terms.values())))
        evidence = RunEvidence(Path("runs/x"), profile=build_profile(busy), machine=RunMachine(2, 2, "CPU"))
        assert verdict(evidence).kind == kind, name


def test_what_is_offered_can_be_pasted(runs):
    texts = {name: [one.text for one in told(runs, name).findings[0].overrides] for name in DETAILS}
    assert texts["data"] == ["data.prefetch=4"] and "compile=true" in texts["memory bandwidth"]
    assert "parallel.pipeline.split=balanced" in texts["bubble"] and not texts["straggler"]
    assert all(texts[name] for name in ("communication", "memory capacity", "compute"))
    settings = yaml.safe_load((runs / "bubble" / "config.yaml").read_text())
    base = ["+config=debug", "parallel.pp=2", "batch.micro_size=2", f"model.depth={settings['model']['depth']}"]
    assert compose([*base, *shlex.split(texts["bubble"][0])], world_size=2)


def test_the_accounts_are_the_whole_step(runs, capsys):
    assert diagnose.main([str(runs / "straggler")]) == 0
    shown = capsys.readouterr().out
    assert "straggler bounds the run" in shown and "rank 1 computes" in shown and "preflight" in shown
    content = json.loads((runs / "straggler" / "diagnosis.json").read_text())
    assert [one["rank"] for one in content["accounts"]] == [0, 1]
    for account in content["accounts"]:
        assert sum(account["terms"].values()) == pytest.approx(account["seconds"], rel=1e-6)
    assert content["verdict"]["kind"] == "straggler" and content["findings"][0]["without"] < content["step"]["seconds"]
    assert [point["name"] for point in content["roofline"]["points"]][:1] == ["products"]
