"""Every plan gives the numbers of one process: losses, gradient norm, and every parameter's gradient."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import matrix
from support.launch import CAN_COMPILE, launch
from support.reference import settings, tiny_spec

from trainer.config import Config, ConfigError, ParallelConfig
from trainer.parallel.pipeline.plan import check_pipeline
from trainer.planning.features import check_plan, resolve_plan
from trainer.planning.plan import nearby_worlds, resolve_batch
from trainer.planning.resolve import check_config


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Number of processes -> what tests/workers/plans.py measured on them, one launch each."""
    seen: dict = {}

    def measure(world: int) -> dict:
        if world not in seen:
            out = tmp_path_factory.mktemp("plans") / "results.json"
            try:
                launch("plans.py", world, out, forks=True)
                seen[world] = json.loads(out.read_text())
            except AssertionError as error:
                seen[world] = error
        if isinstance(seen[world], AssertionError):  # for every test that asks, without another launch
            raise seen[world]
        return seen[world]

    return measure


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_plans_match_one_process(world, measured):
    results = measured(world)["cases"]
    assert len(results) == len(matrix.cases(world, CAN_COMPILE)) >= {1: 25, 2: 75, 4: 80, 8: 10}[world]
    failed = [
        result["plan"] + "".join(f"\n    {reason}" for reason in result["reasons"])
        for result in results
        if result["verdict"] != "PASS"
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_routers_have_fp32_weights_in_every_plan(world, measured):
    results = [result for result in measured(world)["cases"] if "experts" in result["case"]["family"]]
    types = {result["plan"]: result["routers"] for result in results if "compile" not in result["case"]}
    assert types == dict.fromkeys(types, ["torch.float32"]) and len(types) >= {1: 2, 2: 16, 4: 9}[world]


@pytest.mark.parametrize("world", [2, 4])
def test_passes_in_turns_change_no_bit(world, measured):
    results = [one for one in measured(world)["cases"] if one["case"].get("bits") and "ep_dispatch" in one["case"]]
    assert [one["case"]["ep_dispatch"] for one in results] == ["alltoall", "alltoall_overlap"]
    assert results[0]["digest"] == results[1]["digest"]


def test_recompute_changes_no_bit(measured):
    cases = [result for result in measured(2)["cases"] if result["case"].get("bits")]
    results = [result for result in cases if "ep_dispatch" not in result["case"]]
    plain = {
        repr(result["case"] | {"recompute": ""}): result["digest"]
        for result in results
        if result["case"]["recompute"] == "none"
    }
    different = [
        result["plan"] for result in results if result["digest"] != plain[repr(result["case"] | {"recompute": ""})]
    ]
    assert len(results) == 18 and len(set(plain.values())) >= 3 and not different, different


def test_an_overflow_of_one_rank_skips_the_step_on_all(measured):
    results = measured(4)["overflow"]
    assert len(results) == 4 * 5
    for *broken, last in (results[first : first + 5] for first in range(0, len(results), 5)):
        assert last["next"] == 0.0, last["case"]
        assert last["empty"] == [[1.0, True, True]] * 4, "a step without any target changes nothing"
        skipped = {"found_inf": 1.0, "backoff": 0.5, "updates": 0.0, "unchanged": True, "loss": last["loss"]}
        for result in broken:  # the loss of the same weights and batch is known, whatever the gradients are
            assert result["ranks"] == [skipped] * 4, result["case"]


@pytest.mark.parametrize("world", [2, 4])
def test_first_gradients_in_fp8_are_those_of_one_process_in_fp8(world, measured):
    """Later ones are of weights that differ in the last bit, which rounding to eight bits enlarges."""
    cases = measured(world)["cases"]
    results = [one for one in cases if "float8" in one["case"] and one["case"]["precision"] == "fp32"]
    assert len(results) >= {2: 4, 4: 2}[world]
    for result in results:
        loss, norm, gradient, where = result["errors"]["steps"][0]
        assert loss < 1e-6 and norm < 5e-4 and gradient < 5e-2, (result["plan"], where)


def test_muon_updates_whole_matrices_bit_by_bit(measured):
    results = measured(4)["matrices"]
    assert len(results) == 4 and all(result["matrices"] == 21 for result in results)
    for result in results:
        assert result["ranks"] == [[[], True]] * 4, result["case"]


def test_a_loss_scale_that_is_too_high_costs_steps_and_no_accuracy(measured):
    (result,) = (result for result in measured(4)["cases"] if result["case"].get("overflow"))
    assert result["overflows"] >= 2 and result["verdict"] == "PASS"


def test_the_sample_covers_every_pair_of_values():
    sample = matrix.sample()
    assert all(map(matrix.legal, sample)) and all(case.keys() == matrix.FACTORS.keys() for case in sample)
    assert set().union(matrix.covered(), *map(matrix.pairs, sample)) >= matrix.possible()
    run = [case for processes in (1, 2, 4, 8) for case in matrix.cases(processes, compiled=False)]
    exact = ({name: case[name] for name in matrix.FACTORS} for case in run if "float8" not in case)
    assert set().union(*map(matrix.pairs, exact)) >= matrix.possible()
    assert len(sample) < 60
    met: dict[tuple, set[tuple]] = {}
    for pair in matrix.possible():
        met.setdefault(tuple(name for name, _ in pair), set()).add(tuple(value for _, value in pair))
    # Nothing that can occur is left out by the definition of what can.
    assert {schedule for _, schedule in met["pp", "schedule"]} == set(matrix.LAYOUT["schedule"])
    assert len(met["schedule", "stage"]) == len(matrix.KINDS) * 4
    assert len(met["precision", "recompute"]) == 3 * 6
    assert len(met["recompute", "way"]) == 6 * 4 and len(met["stage", "way"]) == 4 * 4
    assert {schedule for cp, schedule in met["cp", "schedule"] if cp == 2} == set(matrix.LAYOUT["schedule"])
    assert len(met["schedule", "way"]) == len(matrix.KINDS) * 4
    assert not any({"schedule": "none", "pp": 2}.items() == dict(pair).items() for pair in matrix.possible())


REFUSED = [  # processes, settings, words of the refusal, a legal neighbour that it names
    (3, {"tp": 3}, ["parallel.tp=3", "heads=4", "legal: 1, 2, 4"], {"tp": 1}),
    (8, {"tp": 8}, ["parallel.tp=8", "legal: 1, 2, 4"], {"tp": 4}),
    (
        8,
        {"tp": 4, "node": 2},
        ["spans nodes of 2 processes", "parallel.tp=2", "parallel.tp_across_nodes=true"],
        {"tp": 2, "node": 2},
    ),
    (8, {"tp": 4, "node": 2}, ["parallel.tp_across_nodes=true"], {"tp": 4, "node": 2, "tp_across_nodes": True}),
    (8, {"pp": 8}, ["parallel.pp=8", "5 layers", "legal: up to 5"], {"pp": 4}),
    (
        4,
        {"tp": 4, "pp": 2},
        ["multiple of 8 processes", "start 8 processes", "parallel.tp=2 parallel.pp=2"],
        {"tp": 2, "pp": 2},
    ),
    (4, {"tp": 2, "dp": 4}, ["needs 8 processes, but 4 run", "parallel.dp=2"], {"tp": 2, "dp": 2}),
    (4, {"shard": 3, "stage": 3}, ["parallel.shard=3", "legal: 1, 2, 4"], {"shard": 2, "stage": 3}),
    (8, {"tp": 2, "shard": 8, "stage": 3}, ["parallel.shard=8", "legal: 1, 2, 4"], {"tp": 2, "shard": 4, "stage": 3}),
    (2, {"shard": 2}, ["parallel.zero.stage=0", "parallel.shard=-1"], {"shard": -1}),
    (
        4,
        {"offload": True, "pp": 2},
        ["parallel.zero.offload=true", "stage=1, 2 or 3"],
        {"offload": True, "pp": 2, "stage": 1},
    ),
    (2, {"tp": 0}, ["parallel.tp=0 must be at least 1"], {"tp": 1}),
    (2, {"pp": 0}, ["parallel.pp=0 must be at least 1"], {"pp": 1}),
    (
        2,
        {"tp_overlap": "copy_engine"},
        ["parallel.tp_overlap=copy_engine", "parallel.tp=1", "tp_overlap=off"],
        {"tp_overlap": "copy_engine", "tp": 2},
    ),
    (
        2,
        {"tp": 2, "tp_overlap": "copy_engine", "tp_across_nodes": True},
        ["parallel.tp_overlap=copy_engine", "parallel.tp_across_nodes=true", "tp_overlap=off"],
        {"tp": 2, "tp_overlap": "copy_engine"},
    ),
    (
        2,
        {"collectives": "copy_engine"},
        ["collectives=copy_engine", "stage=0"],
        {"collectives": "copy_engine", "stage": 1},
    ),
    (
        4,
        {"collectives": "copy_engine", "stage": 3, "offload": True},
        ["collectives=copy_engine", "parallel.zero.offload=true", "collectives=nccl"],
        {"collectives": "nccl", "stage": 3, "offload": True},
    ),
    (
        8,
        {"collectives": "copy_engine", "stage": 3, "tp": 2, "node": 4},
        ["the 4 ranks that share states", "parallel.tp=2", "nodes of 4 processes", "parallel.shard=2"],
        {"collectives": "copy_engine", "stage": 3, "tp": 2, "node": 4, "shard": 2},
    ),
    (
        2,
        {"collectives": "copy_engine", "stage": 1, "engine": "deepspeed"},
        ["collectives=copy_engine is for FSDP", "parallel.zero.engine=torch"],
        {"stage": 1, "engine": "deepspeed"},
    ),
    (2, {"tp": 2, "length": 15}, ["batch.sequence_length=15", "parallel.tp=2", "14 or 16"], {"tp": 2, "length": 16}),
    (
        2,
        {"pp": 2, "schedule": "zb_v", "chunks": 3},
        ["parallel.pipeline.chunks=3", "zb_v", "legal: 2"],
        {"pp": 2, "schedule": "zb_v", "chunks": 2},
    ),
    (
        2,
        {"pp": 2, "schedule": "1f1b", "chunks": 2},
        ["parallel.pipeline.chunks=2", "schedule=interleaved"],
        {"pp": 2, "schedule": "interleaved", "chunks": 2},
    ),
    (
        4,
        {"pp": 4, "schedule": "interleaved"},
        ["8 layers", "the model has 5", "schedule=1f1b"],
        {"pp": 4, "schedule": "1f1b"},
    ),
    (4, {"pp": 4, "schedule": "v_min"}, ["8 layers", "parallel.pp lower"], {"pp": 2, "schedule": "v_min"}),
    (2, {"pp": 2, "schedule": "2f2b"}, ["schedule=2f2b is unknown", "zb_v", "greedy"], {"pp": 2, "schedule": "greedy"}),
    (2, {"pp": 2, "schedule": "nowhere.csv"}, ["nowhere.csv", "cannot read"], {"pp": 2, "schedule": "gpipe"}),
    (
        2,
        {"pp": 2, "split": [3, 3]},
        ["parallel.pipeline.split=[3,3]", "model.depth=5", "[3,2]"],
        {"pp": 2, "split": [3, 2]},
    ),
    (2, {"pp": 2, "split": "fair"}, ["parallel.pipeline.split=fair", "balanced, even"], {"pp": 2, "split": "even"}),
]


def problems(world: int, node: int = 0, length: int = 16, **changes) -> list[str]:
    """What is wrong with a plan of a model of 5 layers and 4 heads, by the names of settings within `parallel`."""
    where = {
        "stage": "zero__stage",
        "offload": "zero__offload",
        "collectives": "zero__collectives",
        "engine": "zero__engine",
        **{name: f"pipeline__{name}" for name in ("schedule", "chunks", "split")},
    }
    config, spec = (
        settings(**{f"parallel__{where.get(name, name)}": value for name, value in changes.items()}),
        tiny_spec(depth=5),
    )
    config.batch.sequence_length, config.batch.global_size, config.batch.accumulation = length, 96, 4
    found = check_plan(config.parallel, world, spec, node or world)
    if not found:
        try:
            plan = resolve_plan(config.parallel, world, spec, node or world)
            check_pipeline(config, spec.depth, plan, resolve_batch(config.batch, plan.dp, plan.tp))
        except ConfigError as error:
            found = error.problems
    return found


@pytest.mark.parametrize(
    "world, changes, words, neighbour",
    REFUSED,
    ids=[f"{world}-{list(changes.items())}" for world, changes, _, _ in REFUSED],
)
def test_what_cannot_be_laid_out_is_refused_with_a_legal_neighbour(world, changes, words, neighbour):
    text = "\n".join(problems(world, **changes))
    assert text and all(word in text for word in words), text
    assert problems(world, **neighbour) == []


def test_refusals_come_with_the_configuration():
    config = Config()
    config.parallel.tp, config.batch.sequence_length = 3, 512
    assert any("parallel.tp=3 does not divide" in problem for problem in check_config(config, 3))
    config.parallel.tp, config.parallel.pp, config.parallel.pipeline.schedule = 1, 2, "zb_v"
    config.parallel.pipeline.chunks = 3
    assert any("parallel.pipeline.chunks=3" in problem for problem in check_config(config, 2))
    config = Config()
    config.parallel.zero.stage, config.parallel.zero.collectives = 3, "copy_engine"
    config.parallel.grad_comm.inner.codec = "int8"
    wrong = "copy_engine sends gradients as they are, and parallel.grad_comm.inner.codec=int8 quantises them"
    assert any(wrong in problem for problem in check_config(config, 2))


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 8), st.sampled_from([1, 2, 4, 8]))
def test_offered_numbers_of_processes_run_and_are_the_nearest(world, tp, pp, node):
    parallel = ParallelConfig(tp=tp, pp=pp, tp_across_nodes=True)
    offered = nearby_worlds(world, tp * pp, node)
    assert offered and all(check_plan(parallel, count, node=min(node, count)) == [] for count in offered)
    if node < world:
        assert all(count % node == 0 for count in offered)
    else:
        assert all(abs(count - world) <= tp * pp for count in offered)
