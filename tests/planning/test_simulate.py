"""Costs of stages and the simulation of schedules on them: closed formulas, memory, transfers, gathers, deadlocks."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import ActivationConfig
from trainer.config.model import AttentionSpec, FeedForwardSpec, ModelSpec
from trainer.parallel.pipeline.plan import layer_costs
from trainer.planning.layer import flops_per_token, seen_keys
from trainer.planning.schedules.costs import LayerCosts, StageCosts
from trainer.planning.schedules.ir import Action, Schedule, parse_action
from trainer.planning.schedules.simulate import Simulation, activation_change, simulate_schedule
from trainer.planning.schedules.templates import build_greedy, build_schedule, forward_only, place_stages

SHAPES = [(1, 1), (1, 5), (2, 2), (2, 7), (4, 4), (4, 8), (8, 32)]
LLAMA = ModelSpec(
    width=4096,
    depth=2,
    vocab_size=128256,
    attention=AttentionSpec(heads=32, kv_heads=8),
    feed_forward=FeedForwardSpec(width=14336),
)


def schedule(*lines: str, placement: tuple[int, ...], microbatches: int) -> Schedule:
    return Schedule(
        "test", tuple(tuple(parse_action(cell) for cell in line.split()) for line in lines), placement, microbatches
    )


def held(result: Simulation, rank: int) -> list[float]:
    """What the rank holds after each of its actions."""
    return list(accumulate(activation_change(action, result.costs, True) for action in result.actions[rank]))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p, m", SHAPES)
def test_bubble_of_gpipe_and_1f1b_is_the_closed_formula(name, p, m):
    result = simulate_schedule(build_schedule(name, p, m), StageCosts.uniform(p, f=1, i=2, w=1))
    assert result.makespan == 4 * (m + p - 1)
    assert result.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)
    assert result.busy == (4.0 * m,) * p


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p, m", [(2, 2), (2, 8), (4, 4), (4, 8), (8, 16), (8, 32)])
def test_interleaving_divides_the_bubble_by_the_chunks(p, m, v):
    result = simulate_schedule(build_schedule("interleaved", p, m, v), StageCosts.uniform(p * v, f=1, i=1, w=1))
    assert result.makespan == 3 * (v * m + p - 1)
    assert result.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-15)


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (8, 16), (8, 32)])
def test_zero_bubble_h1_leaves_a_third_of_the_bubble(p, m):
    assert simulate_schedule(build_schedule("zb_h1", p, m), StageCosts.uniform(p)).makespan == 3 * m + (p - 1)


@pytest.mark.parametrize("p, m", SHAPES)
def test_activations_held_at_the_peak(p, m):
    assert simulate_schedule(build_schedule("1f1b", p, m), StageCosts.uniform(p)).memory == tuple(
        min(m, p - rank) for rank in range(p)
    )
    assert simulate_schedule(build_schedule("gpipe", p, m), StageCosts.uniform(p)).memory == (m,) * p


@pytest.mark.parametrize("p, m, v", [(4, 8, 2), (8, 32, 2), (8, 32, 4)])
def test_interleaving_holds_a_little_more(p, m, v):
    costs = StageCosts.uniform(p * v, activation=1)
    held = tuple((v - 1) * p + 2 * (p - 1 - rank) + 1 for rank in range(p))
    assert simulate_schedule(build_schedule("interleaved", p, m, v), costs).memory == held


@pytest.mark.parametrize("p, m", SHAPES)
def test_transfers_shift_the_phases_of_gpipe_and_cost_nothing_within_a_rank(p, m):
    plan, costs = build_schedule("gpipe", p, m), StageCosts.uniform(p, transfer=0.25)
    assert simulate_schedule(plan, costs).makespan == 3 * (m + p - 1) + 2 * (p - 1) * 0.25
    turn = schedule("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=(0, 1, 1, 0), microbatches=1)
    assert simulate_schedule(turn, StageCosts.uniform(4, transfer=0.25)).makespan == 12 + 4 * 0.25


def test_transfers_overlap_with_computation():
    """In 1F1B's steady state one hop there and one back lie between a forward and its turn, and only they show."""
    p, m = 4, 32
    plain, slow = (
        simulate_schedule(build_schedule("1f1b", p, m), StageCosts.uniform(p, transfer=seconds))
        for seconds in (0.0, 0.1)
    )
    assert plain.makespan + 2 * (p - 1) * 0.1 <= slow.makespan < plain.makespan + 2 * m * 0.1
    assert slow.busy == plain.busy


@pytest.mark.parametrize("latency", [0.0, 3.0])
def test_transfers_of_one_sender_queue(latency):
    """Forwards take a second and their transfers five, of which all or two occupy the link."""
    plan, m = build_schedule("gpipe", 2, 6), 6
    forward = StageCosts.uniform(2, f=1, i=0, w=0, transfer=5.0, latency=latency)
    arrivals = [1 + 5 + number * (5 - latency) for number in range(m)]
    result = simulate_schedule(plan, forward)
    assert [span.start for span in result.spans[1] if span.action.kind == "F"] == arrivals
    lone = simulate_schedule(schedule("0F0 0B0", "1F0 1B0", placement=(0, 1), microbatches=1), forward)
    assert lone.makespan == 1 + 5 + 1 + 5


def test_a_rank_sends_to_both_neighbours_over_one_link():
    """Rank 1 sends hidden states and gradients: two transfers a micro-batch, where the ends have one."""
    m, makespans = 40, []
    for ranks in (2, 3):
        costs = StageCosts.uniform(ranks, f=0.01, i=0.01, w=0, transfer=1.0)
        makespans.append(simulate_schedule(build_schedule("1f1b", ranks, m), costs).makespan)
    two, three = makespans
    assert m < two < 1.6 * m and 2 * m < three < 2.2 * m


def test_host_time_precedes_every_action_and_is_not_computation():
    result = simulate_schedule(build_schedule("1f1b", 1, 6), StageCosts.uniform(1, host=0.5))
    assert (result.makespan, result.busy) == (6 * 3 + 12 * 0.5, (18.0,))
    assert (result.spans[0][0].start, result.spans[0][0].end) == (0.5, 1.5)


def test_gathers_delay_the_first_use_and_reductions_follow_the_last():
    plan = schedule("0F0 1F0 1B0 0B0", placement=(0, 0), microbatches=1)
    costs = replace(StageCosts.uniform(2), unshard=(1.0, 5.0), reduce=(4.0, 1.0))
    result = simulate_schedule(plan, costs)
    assert [(str(span.action), span.start, span.end) for span in result.spans[0]] == [
        ("0F0", 1, 2),
        ("1F0", 6, 7),
        ("1B0", 7, 9),
        ("0B0", 9, 11),
    ]
    assert result.makespan == 11 + 4 and result.busy == (6.0,)
    assert simulate_schedule(plan, replace(costs, reduce=(1.0, 9.0))).makespan == 9 + 9 + 1


def test_an_overlapped_pair_runs_one_after_the_other():
    apart = schedule("0F0 1F0 0F1 1B0 1F1 1B1 0B0 0B1", placement=(0, 0), microbatches=2)
    paired = schedule("0F0 1F0 (0F1;1B0)OVERLAP_F_B 1F1 1B1 0B0 0B1", placement=(0, 0), microbatches=2)
    costs = StageCosts.uniform(2)
    assert simulate_schedule(apart, costs).spans == simulate_schedule(paired, costs).spans


def test_forward_only_schedules_hold_nothing():
    result = simulate_schedule(forward_only((0, 1, 1, 0), 5), replace(StageCosts.uniform(4), reduce=(9.0,) * 4))
    assert result.memory == (0.0, 0.0) and result.busy == (10.0, 10.0)
    assert simulate_schedule(forward_only(place_stages(4, 1, "loop"), 6), StageCosts.uniform(4)).makespan == 6 + 3


def test_split_backward_keeps_a_share_until_w():
    plan = schedule("0F0 0F1 0I0 0I1 0W0 0W1", placement=(0,), microbatches=2)
    result = simulate_schedule(plan, StageCosts.uniform(1, kept=0.25, activation=8))
    assert result.memory == (16.0,)
    assert held(result, 0) == [8.0, 16.0, 10.0, 4.0, 2.0, 0.0]
    # After recompute, W can hold more than F left.
    assert simulate_schedule(plan, StageCosts.uniform(1, kept=3.0, activation=8)).memory == (48.0,)


@pytest.mark.parametrize(
    "lines, stuck",
    [
        (
            ("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"),
            ["rank 0 at position 1, 0B0, waits for 1I0 or 1B0", "rank 1 at position 0, 1F1, waits for 0F1"],
        ),
        (
            ("0F0 0W0 0I0 0F1 0B1", "1F0 1B0 1F1 1B1"),
            ["rank 0 at position 1, 0W0, waits for 0I0", "rank 1 at position 2, 1F1, waits for 0F1"],
        ),
        (
            ("0B0 0F0 0F1 0B1", "1F0 1B0 1F1 1B1"),
            ["rank 0 at position 0, 0B0, waits for 1I0 or 1B0", "rank 1 at position 0, 1F0, waits for 0F0"],
        ),
        (("0F0 0F1 0B1 0B0", "1B0 1F0 1F1 1B1"), ["rank 1 at position 0, 1B0, waits for 1F0"]),
    ],
)
def test_deadlocks_name_rank_and_action(lines, stuck):
    with pytest.raises(ValueError) as error:
        simulate_schedule(schedule(*lines, placement=(0, 1), microbatches=2), StageCosts.uniform(2))
    assert all(text in str(error.value) for text in stuck), error.value


def test_costs_of_other_stages_are_refused():
    with pytest.raises(ValueError, match="costs of 3 stages"):
        simulate_schedule(build_schedule("1f1b", 2, 2), StageCosts.uniform(3))


def reference(plan: Schedule, costs: StageCosts) -> dict[Action, float]:
    """End times by the definition: an action starts when its predecessor on the rank has ended and its input is there;
    a result leaves its rank when it is there and the one before it has left."""
    rank_of = {
        action: (rank, order, position)
        for rank, order in enumerate(plan.orders)
        for position, action in enumerate(order)
    }
    seconds = {"F": costs.f, "I": costs.i, "W": costs.w, "B": costs.b}
    ends: dict[Action, float] = {}

    def sends(action: Action) -> bool:
        rank, other = rank_of[action][0], action.stage + (1 if action.kind == "F" else -1)
        return action.kind != "W" and 0 <= other < plan.stages and plan.placement[other] != rank

    def leaves(action: Action) -> float:
        rank, order, position = rank_of[action]
        before = [one for one in order[:position] if sends(one)]
        return max(end(action), leaves(before[-1]) + costs.transfer - costs.latency if before else 0.0)

    def end(action: Action) -> float:
        if action not in ends:
            rank, order, position = rank_of[action]
            stage, m = action.stage, action.microbatch
            behind = (
                [Action(stage + 1, "I", m), Action(stage + 1, "B", m)]
                if stage < plan.stages - 1
                else [Action(stage, "F", m)]
            )
            source = {"F": [Action(stage - 1, "F", m)], "W": [Action(stage, "I", m)]}.get(action.kind, behind)
            start = end(order[position - 1]) if position else 0.0
            for need in source:
                if need in rank_of:
                    there = leaves(need) + costs.transfer if plan.placement[need.stage] != rank else end(need)
                    start = max(start, there)
            ends[action] = start + costs.host + seconds[action.kind][stage]
        return ends[action]

    for order in plan.orders:
        for action in order:
            end(action)
    return ends


times = st.floats(0.01, 4)


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    st.integers(1, 3),
    st.sampled_from([(1, "loop"), (2, "loop"), (2, "v")]),
    st.integers(1, 5),
    st.booleans(),
)
def test_any_schedule_and_costs_equal_the_definition(data, ranks, layout, microbatches, split):
    chunks, style = layout
    stages = ranks * chunks

    def draw() -> tuple[float, ...]:
        return tuple(data.draw(st.lists(times, min_size=stages, max_size=stages)))

    costs = StageCosts(
        draw(),
        draw(),
        draw(),
        draw(),
        draw(),
        kept=data.draw(st.floats(0, 2)),
        transfer=(transfer := data.draw(st.floats(0, 3))),
        latency=transfer * data.draw(st.floats(0, 1)),
        host=data.draw(st.floats(0, 0.5)),
    )
    plan = build_greedy(StageCosts.uniform(stages), place_stages(ranks, chunks, style), microbatches, None, split)
    result = simulate_schedule(plan, costs)
    ends = reference(plan, costs)
    assert result.makespan == pytest.approx(max(ends.values()), rel=1e-12)
    for rank, spans in enumerate(result.spans):
        assert [span.action for span in spans] == list(plan.orders[rank])
        assert [span.end for span in spans] == pytest.approx([ends[span.action] for span in spans], rel=1e-12)
        assert all(a.end <= b.start + 1e-9 for a, b in zip(spans, spans[1:]))
        assert result.busy[rank] == pytest.approx(sum(span.end - span.start for span in spans))
        amounts = held(result, rank)
        assert max(amounts) == pytest.approx(result.memory[rank]) and amounts[-1] == pytest.approx(0, abs=1e-9)
    assert result.bubble == pytest.approx(1 - sum(result.busy) / (ranks * result.makespan))


def test_a_thousand_gpu_schedule_takes_about_a_second():
    plan, costs = build_schedule("1f1b", 64, 512), StageCosts.uniform(64)
    start = time.perf_counter()
    assert simulate_schedule(plan, costs).makespan == 3 * (512 + 63)
    assert time.perf_counter() - start < 3


# Costs from operations


@pytest.mark.parametrize(
    "mode, save, units",
    [
        ("none", [], 12 + 4 / 4 + 8 * 3.5 + 4 * 32 / 4096 + 8 / 4096),
        ("full", [], 2),
        ("selective", ["matmul", "attention"], 10 + 4 / 4 + 4 * 3.5 + 4 * 32 / 4096),
        ("selective", ["attention"], 4 + 4 * 32 / 4096),
        ("selective", ["attention", "matmul/2"], 2 + 0.5 + 2 + 7 + 2 + 4 * 32 / 4096),
    ],
)
def test_saved_activations_by_recompute(mode, save, units):
    """In units of tokens x width bytes, bf16; the first, second, third and fourth are traced values. Ranks that share
    layers keep the sum that attention's output is, too."""
    config = ActivationConfig(mode=mode, save=save)
    for tp in (1, 4):
        costs = layer_costs(LLAMA, 512, 2, tp, recompute=config)
        summed = 2 * (tp > 1 and save == ["attention"])
        assert costs.activation[1] / (1024 * 4096) == pytest.approx((units + summed) / tp)


def test_flops_are_those_of_the_model():
    costs = layer_costs(LLAMA, 1024, 3, 1)
    scores = (
        LLAMA.depth * 4 * 4096 * seen_keys(1024) * 3 * 1024
    )  # attention forward; its backward also computes them again
    assert sum(costs.total) - 0.5 * scores == pytest.approx(flops_per_token(LLAMA, 1024, causal=True) * 3 * 1024)
    assert costs.w[1] == pytest.approx(costs.f[1] - scores / 2)
    assert costs.i[1] == pytest.approx(costs.w[1] + 2.5 * scores / 2)
    halved = layer_costs(LLAMA, 1024, 3, 2)
    assert halved.f == pytest.approx([x / 2 for x in costs.f]) and halved.w == pytest.approx([x / 2 for x in costs.w])


def test_recompute_adds_to_the_input_gradient_only():
    kept = layer_costs(LLAMA, 1024, 1, 1)
    full, half, odd = (
        layer_costs(LLAMA, 1024, 1, 1, recompute=ActivationConfig(**options))
        for options in ({"mode": "full"}, {"mode": "selective"}, {"mode": "selective", "save": ["all@1-99/2"]})
    )
    down = 2 * 1024 * 4096 * 14336
    assert (full.f, full.w) == (kept.f, kept.w)
    assert full.i[1] - kept.i[1] == pytest.approx(
        kept.f[1] - down
    )  # nothing in backward reads the last product's result
    assert half.i[1] - kept.i[1] == pytest.approx(2 * 1024 * 4096 * (4096 + 1024 + 14336))  # q, v and gate
    assert odd.i[1] == full.i[1] and odd.i[2] == kept.i[2] and odd.activation[2] == kept.activation[2]
    assert full.kept > half.kept > kept.kept


def test_stages_sum_their_layers_embedding_and_head():
    layers = LayerCosts(
        f=(1, 2, 4, 8, 16),
        i=(1, 1, 1, 1, 1),
        w=(0, 1, 2, 3, 4),
        activation=(1, 0, 0, 5, 7),
        reduce=(1, 1, 1, 1, 2),
        kept=0.3,
    )
    stage = layers.stage((range(0, 1), range(1, 3)))
    assert stage == StageCosts(f=(3, 28), i=(2, 3), w=(1, 9), b=(3, 12), activation=(1, 12), kept=0.3, reduce=(2, 4))
    for wrong in ((range(0, 2),), (range(1, 3), range(0, 1)), (range(0, 2), range(1, 3))):
        with pytest.raises(ValueError, match="does not cover layers 0 to 2"):
            layers.stage(wrong)


def test_costs_are_checked():
    with pytest.raises(ValueError, match="w has 1 entries, f has 2"):
        StageCosts((1, 1), (1, 1), (1,), (1, 1), (1, 1))
    with pytest.raises(ValueError, match="must not be negative"):
        StageCosts.uniform(2, f=-1)


def test_scaled_costs_are_those_of_a_larger_micro_batch():
    once = {"unshard": (2.0,) * (LLAMA.depth + 2), "reduce": (3.0,) * (LLAMA.depth + 2)}
    one, four = (replace(layer_costs(LLAMA, 256, size, 2), transfer=0.5 * size, **once) for size in (1, 4))
    scaled = one.scaled(4)
    for name in ("f", "i", "w", "b", "activation", "unshard", "reduce", "transfer"):
        assert getattr(scaled, name) == pytest.approx(getattr(four, name))


def test_bubbles_by_rank():
    result: Simulation = simulate_schedule(
        build_schedule("1f1b", 2, 1), StageCosts((1.0, 3.0), (0.5, 1.5), (0.5, 1.5), (1.0, 3.0), (1.0, 1.0))
    )
    assert result.makespan == 8 and result.bubbles == (0.75, 0.25) and result.bubble == 0.5
