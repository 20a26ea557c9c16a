"""What is offered against a bound: it can be pasted, is legal, keeps the batch, and is faster where one can predict."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from support.estimates import every_way, lacking

from trainer.config import Config, typed
from trainer.diagnosis.evidence import RunEvidence, RunMachine, collect_evidence
from trainer.diagnosis.suggestions import FREED, MAX_SUGGESTIONS, MOVES, Suggestions
from trainer.planning.estimate.step import estimate_step
from trainer.planning.hardware import load_hardware, peak_flops
from trainer.planning.resolve import compose, resolve_layout

H200 = load_hardware("h200")
RUNS = {
    "zero3": (8, ["+config=llama3_8b", "parallel=zero3", "batch.accumulation=8", "compile=false"]),
    "tp4_pp2": (
        16,
        [
            "+config=llama3_8b",
            "parallel.tp=4",
            "parallel.pp=2",
            "batch.micro_size=2",
            "batch.accumulation=8",
            "parallel.pipeline.schedule=gpipe",
            "parallel.pipeline.split=[4,28]",
            "activation=full",
        ],
    ),
    "alone": (1, ["+config=debug", "compile=true", "logging.profile=20"]),
    "debug": (2, ["+config=debug", "model=tiny", "batch.global_size=16"]),
}


def evidence(name: str) -> tuple[RunEvidence, list[str]]:
    processes, overrides = RUNS[name]
    config = compose(overrides, world_size=processes)
    # What a run writes and the command reads again.
    config = typed.build_typed(typed.complete_values(Config(), typed.to_plain(config)), {})
    layout = resolve_layout(config, processes, config.model, 8)
    return RunEvidence(Path("x"), (), None, config, layout, RunMachine(processes, 8, H200.device), H200), overrides


@pytest.mark.parametrize("name", ["zero3", "tp4_pp2"])
def test_overrides_can_be_pasted(name):
    known, overrides = evidence(name)
    workshop, offered, world = Suggestions(known, 1.0), {}, known.machine.processes
    before = estimate_step(known.config, known.layout, H200)
    for bound in MOVES:
        for one in workshop.against(*bound):
            offered.setdefault(one.text, (bound, one))
    for text, (bound, one) in list(offered.items())[:6]:
        pasted = compose([*overrides, *shlex.split(text)], world_size=world)
        layout = resolve_layout(pasted, world, pasted.model, 8)
        assert layout.batch.global_size == known.layout.batch.global_size, text
        after = estimate_step(pasted, layout, H200)
        if one.seconds is not None:
            assert one.seconds == pytest.approx(after.seconds / before.seconds, rel=1e-6), text
            assert after.memory < 1.01 * before.memory if bound == FREED else one.seconds < 1, text
    assert len(offered) >= 3 and peak_flops(H200.device, "bf16")


def test_what_helps_is_found():
    known, _ = evidence("tp4_pp2")
    workshop = Suggestions(known, 2.0)
    texts = {kind: " ".join(one.text for one in workshop.against(kind, detail)) for kind, detail in (
        ("communication", "tensor"), ("bubble", "imbalance"), ("bubble", "schedule"), ("compute", ""), ("data", "")
    )}  # fmt: skip
    assert "parallel.tp=" in texts["communication"] and "data.prefetch=4" in texts["data"]
    assert "activation.mode=" in texts["compute"]
    first = workshop.against("bubble", "imbalance")[0]
    assert "parallel.pipeline.split=balanced" in first.text and first.seconds < 1.5
    assert not workshop.against("straggler", "rank 3")


@pytest.mark.parametrize(
    "overrides, axis, offered",
    [
        (["parallel.tp=2"], "tensor", "parallel.tp_overlap=copy_engine"),
        (["parallel=tp2_zero3", "parallel.tp_overlap=copy_engine", "activation=none"], "tensor", "parallel.tp=1"),
        (["parallel=tp2_zero3", "precision.float8.recipe=tensorwise"], "tensor", "parallel.tp=1"),
        (["parallel=zero3", "batch.accumulation=1"], "data", "parallel.zero.collectives=copy_engine"),
        (["parallel=zero3", "parallel.zero.offload=true"], "data", ""),
    ],
)
def test_copies_are_offered_where_they_are_legal(overrides, axis, offered):
    """With the step that they are predicted to take; without tensor-parallel ranks there is nothing to fuse."""
    config = compose(["+config=llama3_8b", "batch.micro_size=2", "batch.accumulation=2", *overrides], world_size=4)
    layout = resolve_layout(config, 4, config.model, 4)
    workshop = Suggestions(RunEvidence(Path("x"), (), None, config, layout, RunMachine(4, 4, H200.device), H200), 1.0)
    found = workshop.against("communication", axis)
    texts = [one.text for one in found if "copy_engine" in one.text or "parallel.tp=1" in one.text]
    assert offered in (texts[:1] or [""])[0] and bool(texts) == bool(offered), found
    for one in found:
        assert one.seconds is not None and one.seconds < 1
        compose(
            ["+config=llama3_8b", "batch.micro_size=2", "batch.accumulation=2", *overrides, *shlex.split(one.text)],
            world_size=4,
        )
    cpu = RunEvidence(Path("x"), (), None, config, layout, RunMachine(4, 4, "CPU"), None)
    assert not any("zero.collectives" in one.text for one in Suggestions(cpu, 1.0).against("communication", axis))


def test_recompute_that_no_lack_of_memory_asks_for_is_left_out():
    config = compose(["+config=llama_60m", "model=tinyllama_1b", "activation=full", "compile=true"], world_size=1)
    layout = resolve_layout(config, 1, config.model, 1)
    known = RunEvidence(Path("x"), (), None, config, layout, RunMachine(1, 1, H200.device), H200)
    assert known.layout.batch.micro_size and estimate_step(config, layout, H200).memory < 0.5 * H200.memory * 2**30
    texts = [one.text for one in Suggestions(known, 1.0).against("memory capacity", "recompute")]
    assert {text.split()[0] for text in texts} == {"activation.mode=auto", "activation.mode=none"}


@pytest.mark.parametrize("memory, settings", [(40.0, 1), (20.0, 2)])
def test_what_ran_out_of_memory_is_offered_what_fits(memory, settings):
    """The fewest settings that do, however wrong the prediction was; a plan that has to be smaller by half is."""
    overrides = ["+config=llama_60m", "model=tinyllama_1b", "compile=true", "activation=none", "batch.micro_size=16"]
    config = compose(overrides := [*overrides, "batch.accumulation=4", "batch.global_size=null"], world_size=1)
    hardware = replace(H200, memory=memory)
    workshop = lacking(config, hardware=hardware)
    found, before = workshop.against(*FREED), workshop.predicted
    assert before.fits == "no" and 1 <= len(found) <= MAX_SUGGESTIONS + 1
    assert [one.relative for one in found] == sorted(one.relative for one in found)
    for one in found:
        pasted = compose([*overrides, *shlex.split(one.text)], world_size=1)
        after = estimate_step(pasted, resolve_layout(pasted, 1, pasted.model, 1), hardware)
        assert one.memory == pytest.approx(after.memory / 2**30, rel=0.01) and after.memory < 0.93 * memory * 2**30
        assert one.relative == pytest.approx(after.seconds / before.seconds, rel=0.01) and one.seconds is None
    assert min(len({name.partition(".")[0] for name in one.text.split()}) for one in found) == settings
    assert all(("offload" in one.text) == ("update there" in one.note) for one in found)
    wrong = lacking(config, hardware=replace(H200, memory=1.3 * before.memory / 2**30))
    assert wrong.predicted.fits == "yes" and wrong.against(*FREED)
    assert all(one.memory < 0.95 * before.memory / 2**30 for one in wrong.against(*FREED))
    assert not lacking(config, hardware=replace(H200, memory=0.5)).against(*FREED)


def test_only_what_is_legal_and_of_use_is_offered_to_a_run_without_memory():
    alone = every_way(compose(["+config=debug"], world_size=1))
    assert (
        "activation.mode=full" in alone
        and "batch.micro_size=4" in alone
        and "parallel.zero.stage=1 parallel.zero.offload=true" in alone
    )
    assert not any("parallel.tp" in text or "stage=2" in text or text == "parallel.zero.stage=1" for text in alone)
    two = every_way(compose(["+config=debug"], world_size=2), 2)
    assert {"parallel.zero.stage=2", "parallel.zero.stage=3", "parallel.tp=2"} <= set(two)
    given = ["+config=debug", "parallel=zero3_offload", "activation=full", "batch.micro_size=1"]
    rest = every_way(compose([*given, "batch.accumulation=4"], world_size=2), 2)
    assert not any("micro" in one or "mode=full" in one for one in rest)


def test_what_the_machine_of_is_not_known_is_offered_unpredicted():
    known, _ = evidence("debug")
    bare = RunEvidence(known.folder, config=known.config, layout=known.layout, machine=known.machine)
    offered = Suggestions(bare, 1.0).against("host", "launch")
    assert [one.text for one in offered] == ["compile=true"] or offered[0].text == "compile=true"
    assert all(one.seconds is None for one in offered)


@pytest.mark.parametrize("name, offered", [("alone", True), ("debug", False)])
def test_a_host_that_is_slow_to_start_kernels_records_them_where_a_process_is_alone_on_its_gpu(name, offered):
    known, overrides = evidence(name)
    texts = [one.text for one in Suggestions(known, 1.0).against("host", "launch")]
    assert any(set(text.split()) == {"run.cuda_graphs=true", "logging.profile=0"} for text in texts) == offered, texts
    if offered:
        compose([*overrides, *texts[0].split()], world_size=1)
        cpu = RunEvidence(known.folder, (), None, known.config, known.layout, RunMachine(1, 8, "CPU"), None)
        assert not any("run.cuda_graphs" in one.text for one in Suggestions(cpu, 1.0).against("host", "launch"))


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_less_recompute_is_tried_where_something_is_recomputed(mode):
    config = compose(["+config=debug", f"activation.mode={mode}"], world_size=2)
    known, _ = evidence("debug")
    workshop = Suggestions(replace(known, config=config), 1.0)
    for bound in (("compute", ""), ("memory capacity", "recompute")):
        tried = [way.get("activation.mode") for way in workshop.alternatives(*bound)]
        assert ("auto" in tried) == (mode != "none"), (bound, tried)
    assert any(way.get("activation.mode") == "auto" for way in workshop.alternatives(*FREED))


def test_what_is_said_of_a_device_without_a_file_is_true(tmp_path):
    for device, words in (
        ("CPU", "CPUs differ too much"),
        ("NVIDIA T9", "no file of configs/hardware is for NVIDIA T9"),
    ):
        known = RunEvidence(tmp_path, [])
        with patch("trainer.diagnosis.evidence.machine_of", return_value=RunMachine(1, 1, device)):
            (note,) = [one for one in collect_evidence(known, []).notes if "peaks" in one]
        assert note.startswith(words)
