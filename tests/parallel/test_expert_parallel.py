"""Experts that ranks share: how tokens reach them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.launch import launch

from trainer.config import Config, ConfigError, ModelConfig
from trainer.config.model import ExpertsSpec, FeedForwardSpec, ModelSpec
from trainer.config.schema import ActivationConfig
from trainer.parallel.experts.plan import choose_dispatch
from trainer.planning.decide import MemoryLimit, decide
from trainer.planning.estimate.memory import count_turns, find_peaks
from trainer.planning.estimate.plans import rank_plans
from trainer.planning.estimate.step import estimate_step
from trainer.planning.features import check_whole_plan, communication_table, resolve_plan
from trainer.planning.hardware import load_hardware
from trainer.planning.layer import model_programs
from trainer.planning.recompute import recompute_effect
from trainer.planning.resolve import resolve_layout
from trainer.planning.states import state_bytes

SIZES = {"alltoall": "exchange_counts", "allgather": "select_choices", "shared_memory": "select_choices"}
"""The operator of each way for which the host waits."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """By rank, what tests/workers/expert_ranks.py saw."""
    out = tmp_path_factory.mktemp("experts") / "results.json"
    launch("expert_ranks.py", 4, out, forks=True)
    results = json.loads(out.read_text())
    overflows.extend(one.pop() for one in results)
    return results


overflows: list[dict] = []
"""What ranks saw that had too little room."""


def test_shared_experts_compute_what_one_process_computes(measured):
    """Results and all gradients, with skewed routing: one rank may receive all rows, or none."""
    assert len(measured) == 4 and all(len(results) == 4 * 4 * 2 * 5 for results in measured)
    wrong = [
        result["case"] for results in measured for result in results if result["missing"] or result["error"] > 1e-12
    ]
    assert not wrong


def test_recompute_asks_for_no_sizes_again(measured):
    for result in (result for results in measured for result in results):
        name = SIZES[result["case"].split()[0]]
        assert result["calls"][name] == 1, result


def test_estimates_know_how_often_a_layer_exchanges_rows(measured):
    """Each exchange gives the turn to the pass that overlaps. Recompute sends rows again, but not their numbers."""
    (program, *_) = model_programs(spec_of(count=8), 64, 1, 4)
    seen = {False: set(), True: set()}
    for result in (result for results in measured for result in results if result["case"].startswith("alltoall")):
        calls = sum(result["calls"][name] for name in ("exchange_counts", "send_rows", "return_rows"))
        seen["recomputed" in result["case"]].add(calls)
    for recomputed, calls in seen.items():
        policy = ActivationConfig(mode="full" if recomputed else "none")
        assert calls == {sum(count_turns(program, recompute_effect(program, 0, policy, False), False))}


def test_choices_without_room_are_counted(measured):
    """Of the first rank, which has 16 rows for 48 choices."""
    assert [one["missing"] for one in overflows] == [[32, 0, 0], *[[0, 0, 0]] * 3]


def spec_of(**experts: int) -> ModelSpec:
    spec = ModelSpec(vocab_size=64, width=32, depth=2)
    spec.feed_forward = FeedForwardSpec(width=48, experts=ExpertsSpec(**experts))
    return spec


def config_of(**settings: object) -> Config:
    config = Config()
    for name, value in settings.items():
        target, *path = config.parallel, *name.split("__")
        for part in path[:-1]:
            target = getattr(target, part)
        setattr(target, path[-1], value)
    return config


@pytest.mark.parametrize(
    ("world", "experts", "changes", "words", "legal"),
    [
        (4, {"count": 0}, {"ep": 2}, ["parallel.ep=2", "count=0", "parallel.ep=1"], {"ep": 1}),
        (4, {"count": 6}, {"ep": 4}, ["parallel.ep=4", "count=6", "legal: 1, 2, 3, 6"], {"ep": 2}),
        (6, {"count": 8}, {"ep": 4}, ["parallel.ep=4", "6 ranks", "legal: 1, 2, 3, 6"], {"ep": 2}),
        (
            12,
            {"count": 12},
            {"ep": 4, "shard": 6, "zero__stage": 1},
            ["parallel.ep=4", "6 ranks", "legal: 1, 2, 3, 6, 12"],
            {"ep": 12, "shard": 6, "zero__stage": 1},
        ),
        (4, {"count": 8}, {"ep_dispatch": "alltoall"}, ["ep_dispatch=alltoall", "parallel.ep=1"], {"ep": 2}),
        (4, {"count": 8}, {"ep": 0}, ["parallel.ep=0", "at least 1"], {"ep": 4}),
        (
            4,
            {"count": 8},
            {"ep_capacity": 2.0},
            ["ep_capacity=2", "parallel.ep=1"],
            {"ep": 2, "ep_dispatch": "allgather"},
        ),
        (
            4,
            {"count": 8},
            {"ep": 2, "ep_dispatch": "allgather", "ep_capacity": 0.5},
            ["ep_capacity=0.5", "1 or more"],
            {"ep": 2, "ep_dispatch": "shared_memory", "ep_capacity": 1.0},
        ),
    ],
)
def test_ranks_that_cannot_share_experts_are_refused(world, experts, changes, words, legal):
    spec = spec_of(**experts)
    with pytest.raises(ConfigError) as refusal:
        resolve_plan(config_of(**changes).parallel, world, spec)
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert resolve_plan(config_of(**legal).parallel, world, spec).ep == legal["ep"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero__engine": "deepspeed", "zero__stage": 1}, ["parallel.ep=2", "DeepSpeed", "parallel.zero.engine=torch"]),
        (
            {"zero__collectives": "copy_engine", "zero__stage": 1},
            ["parallel.ep=2", "collectives=copy_engine", "collectives=nccl"],
        ),
        ({"ep_dispatch": "alltoall", "ep_capacity": 1.5}, ["ep_capacity=1.5", "parallel.ep_dispatch=shared_memory"]),
        (
            {"ep_dispatch": "alltoall_overlap", "ep_capacity": 1.5},
            ["ep_capacity=1.5", "parallel.ep_dispatch=shared_memory"],
        ),
        (
            {"ep_dispatch": "alltoall_overlap", "zero__stage": 3},
            ["ep_dispatch=alltoall_overlap", "parallel.zero.stage=3", "parallel.zero.stage=2"],
        ),
        (
            {"ep_dispatch": "alltoall_overlap", "terms": {"entropy": {}}},
            ["ep_dispatch=alltoall_overlap", "loss.terms", "ep_dispatch=alltoall,"],
        ),
        (
            {"grad_comm__inner__codec": "int8", "zero__stage": 1},
            ["parallel.ep=2", "grad_comm.inner.codec", "codec=none"],
        ),
    ],
)
def test_what_experts_cannot_travel_by_is_refused(changes, words):
    parallel = {name: value for name, value in changes.items() if name != "terms"}
    config, spec = config_of(ep=2, **parallel), spec_of(count=4)
    config.loss.terms = changes.get("terms", {})
    (problem,) = check_whole_plan(config, spec, resolve_plan(config.parallel, 2, spec), 2)
    assert all(word in problem for word in words)


@pytest.mark.parametrize(("ep", "devices"), [(2, 8), (8, 8), (8, 2)])
@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 8])
def test_less_time_decides_how_tokens_travel(top_k, ep, devices):
    """The estimate, the choice of a run and the table of its start name the way whose predicted step is shorter."""
    spec, hardware = spec_of(count=16, top_k=top_k), replace(load_hardware("h100"), devices=devices)
    spec.width, found, ways = 1024, {}, ("auto", "alltoall", "allgather")
    for way in ways:
        config = config_of(ep=ep, ep_dispatch=way)
        config.model, config.batch.sequence_length, config.batch.micro_size = ModelConfig(**vars(spec)), 2048, 4
        layout = resolve_layout(config, 8, config.model, devices)
        found[way] = estimate_step(config, layout, hardware)
        assert decide(config, layout, MemoryLimit(None, 1e15), devices, hardware).config.parallel.ep_dispatch == (
            found[way].config.parallel.ep_dispatch
        )
        rows = dict(communication_table(found[way].config, spec, layout.plan))
        assert rows["tokens of experts"] == f"parallel.ep_dispatch={found[way].config.parallel.ep_dispatch}"
    faster = min(ways[1:], key=lambda way: found[way].seconds)
    assert found["auto"].config.parallel.ep_dispatch == faster
    assert found["auto"].seconds == found[faster].seconds < found[({*ways[1:]} - {faster}).pop()].seconds


@pytest.mark.parametrize(
    ("changes", "accumulation", "words"),
    [
        ({}, 1, ["batch.accumulation=1", "batch.accumulation=2 or more"]),
        ({"pp": 2}, 8, ["schedule=1f1b", "schedule=dualpipe_v", "ep_dispatch=alltoall"]),
        ({"pp": 2, "pipeline__schedule": "greedy"}, 8, ["schedule=greedy", "schedule=dualpipe_v"]),
        ({"pp": 2, "pipeline__schedule": "dualpipe_v"}, 2, ["batch.accumulation=2", "batch.accumulation=5 or more"]),
    ],
)
def test_schedules_without_pairs_of_passes_are_refused(changes, accumulation, words):
    config, spec = config_of(ep=2, ep_dispatch="alltoall_overlap", **changes), spec_of(count=4)
    spec.depth, config.batch.accumulation, config.batch.micro_size = 4, accumulation, 1
    with pytest.raises(ConfigError) as refusal:
        resolve_layout(config, 4, spec)
    assert all(word in str(refusal.value) for word in ["parallel.ep_dispatch=alltoall_overlap", *words]), refusal.value
    config.batch.accumulation = 8
    config.parallel.pipeline.schedule = "dualpipe_v" if config.parallel.pp > 1 else "1f1b"
    assert any(action.parts for order in resolve_layout(config, 4, spec).pipeline.schedule.orders for action in order)


def test_a_file_whose_pairs_cannot_begin_together_is_refused(tmp_path):
    """Rank 1 waits for the forward pass of rank 0's pair, and rank 0 for the backward pass of rank 1's."""
    path = tmp_path / "pairs.csv"
    path.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    config, spec = config_of(ep=2, ep_dispatch="alltoall_overlap", pp=2, pipeline__schedule=str(path)), spec_of(count=4)
    config.batch.accumulation, config.batch.micro_size = 2, 1
    with pytest.raises(ConfigError, match="ranks 0, 1 wait for ever"):
        resolve_layout(config, 4, spec)
    config.parallel.ep_dispatch = "alltoall"
    assert resolve_layout(config, 4, spec).pipeline.schedule.microbatches == 2


@pytest.mark.parametrize("changes", [{}, {"pp": 2, "pipeline__schedule": "dualpipe_v"}])
def test_estimates_hide_what_passes_in_turns_hide(changes):
    """Less exposed communication of experts, in a step that moves as much and takes hardly more memory: one pass frees
    a layer where the other one fills one."""
    spec, found, hardware = spec_of(count=16, top_k=4), {}, load_hardware("h100")
    spec.width, spec.depth, spec.feed_forward.width = 1024, 8, 512
    for way in ("alltoall", "alltoall_overlap"):
        config = config_of(ep=4, ep_dispatch=way, zero__stage=2, **changes)
        config.model, config.batch.sequence_length = ModelConfig(**vars(spec)), 2048
        config.batch.micro_size, config.batch.accumulation = 4, 8
        layout = resolve_layout(config, 8, config.model, 8)
        found[way] = estimate_step(config, layout, hardware), max(one.reserved for one in find_peaks(config, layout))
    (plain, held), (turned, more) = found.values()
    assert turned.seconds < plain.seconds
    assert 0.5 * plain.exposed["experts"] < turned.exposed["experts"] < 0.9 * plain.exposed["experts"]
    assert turned.communication["experts"] == pytest.approx(plain.communication["experts"])
    assert 0.95 * held < more < 1.25 * held


def test_experts_of_a_token_decide_between_the_ways():
    """An all-gather sends each token to every other rank, an all-to-all a row for each choice, which is then sorted."""
    config, chosen = config_of(ep=4), {}
    plan = resolve_plan(config.parallel, 4, spec_of(count=16))
    for top_k in (1, 2, 8):
        chosen[top_k] = choose_dispatch(config, spec_of(count=16, top_k=top_k), plan)
    assert chosen == {1: "alltoall", 2: "alltoall", 8: "allgather"}
    config.parallel.ep_dispatch = "alltoall"
    assert choose_dispatch(config, spec_of(count=16, top_k=8), plan) == "alltoall"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_of_experts_are_shared_by_all_ranks(stage):
    """Each rank of 8 keeps an eighth of the experts' states, however many are dealt out before."""
    spec = spec_of(count=8)
    found = {
        ep: state_bytes(spec, resolve_plan(config_of(ep=ep, zero__stage=stage, tp=2).parallel, 8, spec), 2)
        for ep in (1, 2, 4, 8)
    }
    experts = 4 * 2 * 3 * 8 * 48 * 32
    for ep, states in found.items():
        plain = found[1]
        whole = plain.parameters - experts / (1 if stage == 0 else 4)
        assert states.parameters == whole + experts / (ep if stage == 0 else 8 if ep > 1 else 4)
        assert states.gathered <= plain.gathered and (ep == 1 or states.gathered < plain.gathered)


def test_the_fastest_plans_are_looked_for_with_shared_experts():
    """Where ranks can: not for five experts, nor where `parallel.ep` is kept."""
    config = config_of()
    config.model = ModelConfig(**vars(spec_of(count=8)))
    config.batch.sequence_length, config.batch.micro_size, config.activation.mode = 128, 1, "none"
    found = {
        kept: rank_plans(config, load_hardware("h100"), 4, 4, most=40, kept=kept) for kept in ((), ("parallel.ep",))
    }
    assert {one.layout.plan.ep for one in found[()].best} > {1}
    assert all((one.config.parallel.ep_dispatch == "auto") == (one.layout.plan.ep == 1) for one in found[()].best)
    assert {one.layout.plan.ep for one in found["parallel.ep",].best} == {1}
    config.model.feed_forward.experts.count = 5
    assert {one.layout.plan.ep for one in rank_plans(config, load_hardware("h100"), 4, 4, most=40).best} == {1}


@pytest.mark.parametrize(("top_k", "dispatch"), [(1, "alltoall"), (4, "allgather")])
def test_the_table_names_the_dispatch_of_the_trained_model(top_k, dispatch):
    """Of the spec, as with `model.from_hf`, and not of the settings below `model`."""
    config, spec = config_of(ep=2), spec_of(count=8, top_k=top_k)
    rows = dict(communication_table(config, spec, resolve_plan(config.parallel, 2, spec)))
    assert rows["tokens of experts"] == f"parallel.ep_dispatch={dispatch}"
