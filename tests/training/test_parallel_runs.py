"""Whole runs under plans of data, tensor and pipeline parallelism: equal numbers, checkpoints between plans, import and
export, `schedule: auto`, lost ranks, and plans that are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
import yaml
from support.checkpoints import read_tensors
from support.corpora import sources_of_runs
from support.launch import WORKERS, launch, warm_python
from transformers import AutoModelForCausalLM
from workers.parallel_runs import CHAINS, COMMON, FIRST, LEG, PLANS, STOPPED, TRAINED, run, settings

import trainer
import trainer.training.run
from trainer.cluster.node import free_ports
from trainer.commands import export, plot, train
from trainer.config import ConfigError
from trainer.planning.schedules import ir
from trainer.planning.schedules.lower import validate_schedule
from trainer.planning.schedules.simulate import read_timeline

STEPS = FIRST + 5 * LEG


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of runs, and the text that they train on."""
    folder = tmp_path_factory.mktemp("runs")
    sources_of_runs(folder)
    return folder


@pytest.fixture(scope="module")
def alone(root):
    """One process, undisturbed: the numbers that every plan has to give. Leaves its second step for the chains to go on
    from, and its fourth as a transformers folder."""
    seen = {}
    for name in CHAINS:
        seen[name] = run(root / name, STEPS, **TRAINED[name], **{"checkpoint.every": 2})
        later = [f"step-{step:08d}" for step in range(FIRST + 1, STEPS + 1)]
        shutil.copytree(root / name, root / f"chain_{name}", ignore=shutil.ignore_patterns(*later))
    assert (
        export.main(
            [f"checkpoint={root / 'untied/checkpoints/step-00000004'}", f"out={root / 'exported'}", "dtype=fp32"]
        )
        == 0
    )
    return seen


@pytest.fixture(scope="module")
def four(root, alone):
    """What tests/workers/parallel_runs.py saw on four processes."""
    launch("parallel_runs.py", 4, "four", root, forks=True)
    return json.loads((root / "four.json").read_text())


@pytest.fixture(scope="module")
def two(root, four):
    """The same on two, after the four."""
    launch("parallel_runs.py", 2, "two", root, forks=True)
    return json.loads((root / "two.json").read_text())


def assert_equal(seen, expected, steps):
    """Losses, gradient norms and evaluations of steps 1 to `steps`."""
    assert seen["steps"] == list(range(1, steps + 1))
    assert seen["losses"] == pytest.approx(expected["losses"][:steps], rel=2e-6)
    assert seen["norms"] == pytest.approx(expected["norms"][:steps], rel=2e-6)
    held_out = {int(step): loss for step, loss in seen["eval"].items() if int(step) in expected["eval"]}
    assert len(held_out) >= steps // 2 - 1  # a run that is told to end evaluates no more
    assert held_out == pytest.approx({step: expected["eval"][step] for step in held_out}, rel=2e-6)


def assert_continued(legs, whole):
    """Of a chain whose folder began with what one process left: the texts of its legs, context-parallel ones and those
    by an average of the weights among them."""
    texts = {(one["step"], one["prompt"]): one["text"] for one in whole["samples"]}
    mine = [one for one in legs[-1]["samples"][len(whole["samples"]) :] if one["step"] % 4 == 0]
    assert {one["step"] for one in mine} >= {4, STEPS}
    assert all(one["text"] == texts[one["step"], one["prompt"]] for one in mine)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_the_same_run(alone, four, plan):
    assert four[plan]["code"] == 0
    assert_equal(four[plan], alone["untied"], 4)
    assert four[plan]["ids"] == alone["untied"]["ids"][:4]


@pytest.mark.parametrize("plan", PLANS)
def test_losses_by_source_and_set_are_those_of_one_process(alone, four, plan):
    expected = alone["untied"]["by_name"][:6]
    assert [len(line) for line in expected] == [4, 4, 3, 4, 4, 3] and all(line["targets/more"] for line in expected[:2])
    assert len(four[plan]["by_name"]) == 6
    for seen, line in zip(four[plan]["by_name"], expected):
        assert seen == pytest.approx(line, rel=2e-6)
        assert [seen[name] for name in seen if "targets" in name] == [line[name] for name in line if "targets" in name]


@pytest.mark.parametrize("plan", PLANS)
def test_a_model_under_every_plan_continues_prompts_alike(alone, four, plan):
    expected, seen = (
        [(s["step"], s["prompt"], s["text"]) for s in run["samples"]] for run in (alone["untied"], four[plan])
    )
    assert [(step, prompt) for step, prompt, _ in seen] == [
        (4, text) for text in ("the", "", "a longer beginning of a text")
    ]
    assert seen == expected[:3] and any(text for *_, text in seen)


def test_the_bubble_is_logged_where_there_is_a_pipeline(alone, four):
    for name, seen in {"alone": alone["untied"], **{plan: four[plan] for plan in PLANS}}.items():
        if "pp" in name:
            assert all(0 <= bubble < 1 for bubble in seen["bubbles"]), name
        else:
            assert set(seen["bubbles"]) == {None}, name


@pytest.mark.parametrize("name", CHAINS)
def test_any_plan_resumes_any_other(root, alone, four, two, name):
    """From one process over plans on four and two back to one, each two steps that begin with the last one's
    checkpoint."""
    whole, results = alone[name], four | two
    legs = [results[f"{name}_{leg}"] for leg in range(1, len(CHAINS[name][4]) + len(CHAINS[name][2]) + 1)]
    legs.append(run(root / f"chain_{name}", STEPS, **TRAINED[name]))
    assert len(legs) == 5
    plans = [*[{}] * FIRST, *(plan for plan in CHAINS[name][4] for _ in range(LEG)), *[{}] * STEPS]
    shared = [plan.get("parallel.ep", 1) for plan in plans]
    for leg, seen in enumerate(legs, start=1):
        assert_equal(seen, whole, FIRST + leg * LEG)
        once = [list(ids) for ids in dict.fromkeys(map(tuple, seen["ids"]))]  # steps may be run again
        assert once == whole["ids"][FIRST + (leg - 1) * LEG : FIRST + leg * LEG], leg
        for ep, line, expected in zip(shared, seen["experts"], whole["experts"]):
            rank, *_ = (some.pop("experts/fullest_rank", None) for some in (line, expected))
            assert line == (pytest.approx(expected, rel=2e-6) if name == "tied" else dict.fromkeys(expected))
            if ep == 4:  # each rank has one expert
                assert rank == line["experts/fullest"] > 1
            else:
                assert 1 <= rank <= line["experts/fullest"] if ep == 2 else rank is None
    kept = [read_tensors(root / f"{run}/checkpoints/step-{STEPS:08d}") for run in (name, f"chain_{name}")]
    routers = [key for key in kept[0] if ".router." in key and key.startswith("model.") and "weight" not in key]
    assert len(routers) == (8 if name == "tied" else 0) and all(
        torch.equal(kept[0][key], kept[1][key]) for key in routers
    )
    assert_continued(legs, whole)


def test_a_step_without_room_for_all_rows_is_run_again(four):
    """Its numbers are those of one process, see `test_any_plan_resumes_any_other`."""
    limited = [leg for leg, plan in enumerate(CHAINS["tied"][4], start=1) if "parallel.ep_capacity" in plan]
    assert limited == [3]
    for leg in (1, 2, 3):
        overflow = four[f"tied_{leg}"]["overflow"]
        assert all(0 < share < 1 for share in overflow[-LEG:]) if leg in limited else overflow == [None] * len(overflow)


@pytest.mark.parametrize("name", CHAINS)
def test_a_signal_to_one_rank_ends_all_after_the_same_step(root, four, name):
    leg, last = STOPPED[name], FIRST + STOPPED[name] * LEG
    assert four[f"{name}_{leg}"]["codes"] == [75] * 4 and four[f"{name}_{leg}"]["steps"][-1] == last
    assert (root / f"chain_{name}/checkpoints/step-{last:08d}/manifest.json").is_file()


def test_export_from_any_plan(root, four):
    """Of ZeRO-3 on two tensor-parallel ranks and two pipeline ranks that hold two stages each."""
    out = root / "exported_tp2_pp2"
    command = [
        warm_python(),
        "-m",
        "trainer",
        "export",
        f"checkpoint={root / 'tp2_pp2_interleaved'}",
        f"out={out}",
        "dtype=fp32",
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(WORKERS.parent.parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (out, root / "exported")
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_any_plan_starts_from_transformers_weights(root, four):
    saved = read_tensors(root / "untied/checkpoints/step-00000004")
    started = torch.load(root / "weights.pt")
    assert four["from_hf"]["code"] == 0 and set(started) == {
        name.removeprefix("model.") for name in saved if name.startswith("model.")
    }
    assert [name for name, value in started.items() if not torch.equal(value, saved[f"model.{name}"])] == []


@pytest.mark.parametrize("name", ["auto", "auto_given", "auto_rebuilt"])
def test_auto_measures_chooses_and_goes_on(root, alone, two, name):
    """As measured; with settings that stay; and with a choice for which the layers are cut anew in the middle of the
    run."""
    first, again = two[f"{name}_5"], two[f"{name}_7"]
    assert first["code"] == again["code"] == 0
    assert (
        first["measured"] == [4] and again["measured"] == []
    )  # two steps after the one that warms up; a resumed run has its choice
    assert_equal(first, alone["untied"], 5)
    assert_equal(again, alone["untied"], 7)
    assert first["ids"] + again["ids"] == alone["untied"]["ids"][:7]

    folder = root / name / "schedule"
    choice = yaml.safe_load((folder / "choice.yaml").read_text())
    chosen = ir.parse_schedule((folder / "chosen.csv").read_text())
    assert (
        validate_schedule(chosen) == [] and (folder / "chosen.csv").read_text() == (folder / "schedule.csv").read_text()
    )
    batch, pipeline = choice["batch"], choice["parallel"]["pipeline"]
    assert batch["accumulation"] == chosen.microbatches and batch["accumulation"] * batch["micro_size"] == 8
    assert len(pipeline["split"]) == chosen.stages == 2 * pipeline["chunks"] and sum(pipeline["split"]) == 4
    if name != "auto":
        assert (batch["accumulation"], pipeline["split"], pipeline["chunks"]) == (4, [3, 1], 1)
    actions = sorted(str(action) for order in chosen.orders for action in ir.split_overlaps(order))
    for timeline in ("planned", "measured"):
        spans, makespan = read_timeline(folder / f"{timeline}.json")
        assert len(spans) == 2 and sorted(str(span.action) for rank in spans for span in rank) == actions
        assert all(0 <= span.start < span.end <= makespan * 1.0001 for rank in spans for span in rank)


def test_the_schedule_of_a_run_is_drawn(root, two, capsys):
    assert plot.main([str(root / "auto")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(root / "auto/schedule.png")]
    assert (root / "auto/schedule.png").read_bytes().startswith(b"\x89PNG")


def test_a_rank_that_vanishes_is_named_by_all_others(root):
    """Killed between two stages' transfers and inside of a tensor-parallel group: none of the others waits for it."""
    [port] = free_ports()
    arguments = [f"{name}={value}" for name, value in COMMON.items()] + [
        f"data.sources.text.path={root / 'corpus'}",
        f"data.cache={root / 'cache'}",
        f"run.dir={root / 'killed'}",
        "run.steps=20",
        "eval.every=0",
        "parallel.tp=2",
        "parallel.pp=2",
    ]
    common = {
        **os.environ,
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(WORKERS.parent.parent), str(WORKERS.parent)]),
    }
    ranks = [
        subprocess.Popen(
            [warm_python(), str(WORKERS / "parallel_runs.py"), "dies", *arguments],
            text=True,
            stderr=subprocess.PIPE,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(4)
    ]
    try:
        assert ranks[1].wait(timeout=200) == -9, ranks[1].communicate()[1]
        killed = time.monotonic()
        said = {rank: process.communicate(timeout=60)[1] for rank, process in enumerate(ranks) if rank != 1}
        seconds = time.monotonic() - killed
    finally:
        for process in ranks:
            process.kill()
    for rank, text in said.items():
        assert ranks[rank].returncode == 1, text
        last = text.strip().splitlines()[-1]
        assert "training stopped: rank 1 was lost" in last and f"[seen by rank {rank} at " in last, text
    assert seconds < 30
    steps = [json.loads(line)["step"] for line in (root / "killed/metrics.jsonl").read_text().splitlines()]
    assert steps in ([1], [1, 2])  # what had arrived when the third step broke


REFUSED = {  # processes, settings that cannot be, what is said about them, a way out that is among it
    "tp that does not divide the heads": (
        3,
        {"parallel.tp": 3},
        ["parallel.tp=3", "model.attention.heads=4", "legal: 1, 2, 4"],
        {"parallel.tp": 1},
    ),
    "more pipeline ranks than layers": (
        5,
        {"parallel.pp": 5},
        ["parallel.pp=5", "4 layers", "legal: up to 4"],
        {"parallel.pp": 1},
    ),
    "a split that does not add up": (
        2,
        {"parallel.pp": 2, "parallel.pipeline.split": [3, 2]},
        ["parallel.pipeline.split=[3,2]", "5 layers", "model.depth=4", "[2,2]"],
        {"parallel.pipeline.split": [2, 2]},
    ),
    "a split of another number of stages": (
        2,
        {"parallel.pp": 2, "parallel.pipeline.split": [2, 1, 1]},
        ["parallel.pipeline.split=[2,1,1]", "3 entries", "2 stages", "[2,2]"],
        {"parallel.pipeline.split": [2, 2]},
    ),
    "more stages than layers": (
        2,
        {"parallel.pp": 2, "parallel.pipeline.schedule": "interleaved", "parallel.pipeline.chunks": 3},
        ["parallel.pp=2", "3 stages", "needs 6 layers", "the model has 4", "parallel.pipeline.chunks"],
        {"parallel.pipeline.chunks": 2},
    ),
    "chunks that a schedule does not have": (
        2,
        {"parallel.pp": 2, "parallel.pipeline.schedule": "zb_v", "parallel.pipeline.chunks": 3},
        ["parallel.pipeline.chunks=3", "zb_v", "legal: 2"],
        {"parallel.pipeline.chunks": 2},
    ),
    "an unknown schedule": (
        2,
        {"parallel.pp": 2, "parallel.pipeline.schedule": "2f2b"},
        ["parallel.pipeline.schedule=2f2b", "1f1b", "auto", ".csv"],
        {"parallel.pipeline.schedule": "1f1b"},
    ),
    "a schedule that cannot be read": (
        2,
        {"parallel.pp": 2, "parallel.pipeline.schedule": "nowhere.csv"},
        ["parallel.pipeline.schedule=nowhere.csv", "cannot read"],
        {"parallel.pipeline.schedule": "greedy"},
    ),
    "a world that the degrees do not divide": (
        6,
        {"parallel.tp": 2, "parallel.pp": 2},
        ["parallel.tp=2 x parallel.pp=2", "6", "parallel.tp=2 parallel.pp=1"],
        {"parallel.pp": 1},
    ),
    "tokens that cannot be shared": (
        2,
        {"parallel.tp": 2, "batch.sequence_length": 31},
        ["batch.sequence_length=31", "parallel.tp=2", "30 or 32"],
        {"batch.sequence_length": 30},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_plans_are_refused_before_anything_starts(root, monkeypatch, case):
    world, wrong, words, way_out = REFUSED[case]
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setattr(trainer.training.run, "join_world", lambda *_: pytest.fail("joined a process group"))
    monkeypatch.setattr(trainer.training.run, "open_corpus", lambda *_: pytest.fail("opened the corpus"))
    common = [
        f"{name}={value}"
        for name, value in {**COMMON, "batch.global_size": 12 if world % 3 == 0 else 8 * world}.items()
    ]

    def overrides(changes):
        return [*common, "data.sources.text.path=corpus", *[f"{name}={value}" for name, value in changes.items()]]

    with pytest.raises(ConfigError) as said:
        trainer.compose(overrides(wrong))
    with pytest.raises(ConfigError) as said_later:  # of a configuration that nobody checked
        trainer.run(settings(root / "refused", **wrong))
    for error in (said, said_later):
        assert len(error.value.problems) == 1 and all(word in str(error.value) for word in words), error.value
    trainer.compose(overrides({**wrong, **way_out}))
    assert not dist.is_initialized() and not (root / "refused").exists()


def test_tensor_parallelism_stays_inside_a_node_unless_forced(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(trainer.training.run, "join_world", lambda *_: pytest.fail("joined a process group"))
    arguments = [
        *[f"{name}={value}" for name, value in COMMON.items()],
        "data.sources.text.path=corpus",
        "parallel.tp=4",
    ]
    assert train.main(arguments) == 2
    said = capsys.readouterr().err
    for words in (
        "parallel.tp=4 spans nodes of 2 processes",
        "parallel.tp=2",
        "parallel.pp",
        "parallel.tp_across_nodes=true",
    ):
        assert words in said, said
    assert trainer.compose([*arguments, "parallel.tp_across_nodes=true"]).parallel.tp == 4
    assert trainer.compose([*arguments, "parallel.tp=2", "parallel.pp=2"]).parallel.tp == 2
