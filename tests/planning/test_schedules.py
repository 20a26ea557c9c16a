"""Schedules as data: notation and CSV, validation, templates against closed formulas and torch, greedy, lowering."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedules import merge_backward, peak_activations
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

import trainer
from trainer.config import ConfigError
from trainer.planning.schedules import ir
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.greedy import fits_cap, least_cap, list_schedule
from trainer.planning.schedules.ir import (
    Action,
    Schedule,
    format_schedule,
    parse_action,
    parse_schedule,
    split_overlaps,
)
from trainer.planning.schedules.lower import find_blocked_ranks, input_of, lower_all, lower_schedule, validate_schedule
from trainer.planning.schedules.simulate import simulate_schedule
from trainer.planning.schedules.templates import (
    TEMPLATES,
    build_greedy,
    build_schedule,
    forward_only,
    pair_passes,
    place_stages,
)

SPLITTING = [name for name, template in TEMPLATES.items() if template.splits]
V_SHAPED = [name for name, template in TEMPLATES.items() if template.placement == "v"]


def receive_buffers(program: tuple[Action, ...]) -> int:
    """The most receive buffers that a rank's program has at once, from posting to the action that reads them."""
    buffers: set[Action] = set()
    most = 0
    for action in program:
        if action.kind.startswith("RECV"):
            buffers.add(action)
            most = max(most, len(buffers))
        elif action.kind in ir.COMPUTE:
            buffers.discard(Action(action.stage, "RECV_F" if action.kind == "F" else "RECV_B", action.microbatch))
    return most


@st.composite
def built(draw, names=tuple(TEMPLATES), most_ranks: int = 8) -> Schedule:
    """A template's schedule, of any legal size."""
    name, ranks = draw(st.sampled_from(names)), draw(st.integers(1, most_ranks))
    microbatches = draw(st.integers(1, 3 * ranks + 2))
    chunks = draw(st.integers(1, 4)) if name == "interleaved" else None
    return build_schedule(name, ranks, microbatches, chunks)


def unit(schedule: Schedule):
    """The simulated step for F = I = W = 1 on a rank's share of the model, split evenly over its chunks."""
    each = 1 / schedule.chunks
    return simulate_schedule(schedule, StageCosts.uniform(schedule.stages, each, each, each, activation=each, kept=1.0))


def excess(schedule: Schedule) -> float:
    """Time beyond the 3 M that every rank computes."""
    return unit(schedule).makespan - 3 * schedule.microbatches


def from_torch(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> tuple[tuple[Action, ...], ...]:
    """What torch's own template computes; some list idle slots and the reduction of gradients too."""
    rows = [
        [parse_action(str(action)) for action in row if action is not None]
        for row in get_schedule_ops(name, ranks, microbatches, chunks)
    ]
    return tuple(tuple(action for action in row if action.kind not in ir.PARAMETERS) for row in rows)


def schedule(*lines: str, placement: tuple[int, ...] = (0, 1), microbatches: int = 1) -> Schedule:
    return Schedule("test", tuple(tuple(map(parse_action, line.split())) for line in lines), placement, microbatches)


# Notation and files


@pytest.mark.parametrize(
    "text",
    [
        "2F0",
        "12I3",
        "0W11",
        "7B1",
        "1UNSHARD",
        "1RESHARD",
        "0REDUCE_GRAD",
        "3SEND_F1",
        "3RECV_F1",
        "3SEND_B1",
        "3RECV_B1",
        "(0F7;7B3)OVERLAP_F_B",
        "(0F7;7I3)OVERLAP_F_B",
    ],
)
def test_notation_is_torchs(text):
    assert str(parse_action(f" {text} ")) == text == str(torch_schedules._Action.from_str(text))
    assert [part.stage for part in split_overlaps([parse_action(text)])] == [
        part.stage_index
        for part in torch_schedules._Action.from_str(text).sub_actions or [torch_schedules._Action.from_str(text)]
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2F",
        "2X0",
        "2F0x",
        "-1F0",
        "2F-1",
        "2f0",
        "1UNSHARD3",
        "(0F7)OVERLAP_F_B",
        "(0F7;7B3)",
        "(0F7;7B3;1W1)OVERLAP_F_B",
        "((0F7;7B3)OVERLAP_F_B;1B2)OVERLAP_F_B",
    ],
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ConfigError, match="is not an action; legal: .*2F0"):
        parse_action(text)


@pytest.mark.parametrize("text", ["(7B3;0F7)OVERLAP_F_B", "(0F7;7W3)OVERLAP_F_B", "(0F7;1F3)OVERLAP_F_B"])
def test_only_a_forward_and_a_backward_overlap(text):
    with pytest.raises(ConfigError, match="overlaps .* with .*; legal: a forward with a backward"):
        parse_action(text)


@settings(max_examples=40, deadline=None)
@given(built())
def test_csv_round_trip(built):
    read = parse_schedule(format_schedule(built), name=built.name)
    assert read == built
    assert parse_schedule(format_schedule(built), placement=built.placement).placement == built.placement


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_torch_files_with_and_without_communication(name):
    plain = get_schedule_ops(name, 4, 8)
    text = "\n".join(",".join("" if action is None else str(action) for action in row) for row in plain)
    read = parse_schedule(text)
    assert read.orders == from_torch(name, 4, 8)
    assert validate_schedule(read) == []
    if name != "GPipe":
        with_comms = get_schedule_ops(name, 4, 8, with_comms=True)
        assert any("SEND_F" in str(action) for action in with_comms[0])
        assert parse_schedule("\n".join(",".join(map(str, row)) for row in with_comms)) == read


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0,0B0\n1F0,1X0\n", r"plan\.csv, line 2, cell 2: '1X0' is not an action"),
        ("0F0,,0B0,0F\n1F0,1B0\n", r"plan\.csv, line 1, cell 4: '0F' is not an action"),
        ("0F0,(0B0;1F0)OVERLAP_F_B\n", r"plan\.csv, line 1, cell 2: .*overlaps B with F"),
        (
            "0F0,0B0\n1F0,0W0,1B0\n",
            r"plan\.csv, line 2, cell 2: 0W0 puts stage 0 on rank 1, but line 1, cell 1 puts it on rank 0",
        ),
        ("0F0,0B0\n\n1F0,1B0\n", r"plan\.csv, line 2: rank 1 computes nothing"),
        ("0F0,0B0\n2F0,2B0\n", r"plan\.csv: no line has an action of stage 1, but one has stage 2"),
        ("\n", r"plan\.csv is empty"),
    ],
)
def test_damaged_files_are_refused_with_line_and_cell(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_schedule(text, name="plan.csv")


@pytest.mark.parametrize(
    "content, told", [(b"1,2", ", line 1, cell 1: '1' is not an action"), (b"\xff", " is not a text file")]
)
def test_a_damaged_file_is_refused_by_its_setting(content, told, tmp_path):
    (path := tmp_path / "plan.csv").write_bytes(content)
    setting = f"parallel.pipeline.schedule={path}"
    with pytest.raises(ConfigError) as caught:
        trainer.compose(["+config=debug", "parallel=pp2", setting], world_size=2)
    assert caught.value.problems[0].startswith(setting + told)


def test_all_damage_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_schedule("0F0,what\n1F0,ever\n")
    assert len(caught.value.problems) == 2


# Validation


@pytest.mark.parametrize(
    "broken, message",
    [
        (schedule("0F0 0B0", "1F0 1B0", placement=(0, 2)), "stage 1 is placed on rank 2; legal: 0 to 1"),
        (schedule("0F0 1F0 1B0 0B0", "", placement=(0, 0)), "rank 1 holds no stage"),
        (schedule("0F0 0B0 0UNSHARD", "1F0 1B0"), r"rank 0, action 3 \(0UNSHARD\): UNSHARD is no compute action"),
        (schedule("0F0 0B0", "1F0 2F0 1B0"), r"rank 1, action 2 \(2F0\): there is no stage 2; legal: 0 to 1"),
        (schedule("0F0 0F1 0B0", "1F0 1B0"), r"rank 0, action 2 \(0F1\): there is no micro-batch 1; legal: 0 to 0"),
        (schedule("0F0 1F0 0B0", "1F0 1B0"), r"rank 0, action 2 \(1F0\): stage 1 is held by rank 1"),
        (schedule("0F0 0F0 0B0", "1F0 1B0"), r"rank 0, action 2 \(0F0\): repeats what action 1 \(0F0\) did"),
        (schedule("0F0 0B0 0W0", "1F0 1B0"), r"rank 0, action 3 \(0W0\): repeats what action 2 \(0B0\) did"),
        (schedule("0F0 0I0 0W0 0B0", "1F0 1B0"), r"rank 0, action 4 \(0B0\): repeats what action 2 \(0I0\) did"),
        (schedule("0B0 0F0", "1F0 1B0"), r"rank 0, action 1 \(0B0\): comes before 0F0"),
        (schedule("0F0 0W0 0I0", "1F0 1B0"), r"rank 0, action 2 \(0W0\): comes before 0I0"),
        (
            schedule("0F0 0B0 0F1 0B1", "1F0 1B0 1F1", microbatches=2),
            r"rank 1, end of its 3 actions: 1I1 never computed",
        ),
        (schedule("0F0 0I0", "1F0 1B0"), "rank 0, end of its 2 actions: 0W0 never computed"),
        (
            schedule("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1", microbatches=2),
            r"rank 0, action 2 \(0B0\): waits for ever for the gradient from stage 1, micro-batch 0",
        ),
        (
            schedule("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1", microbatches=2),
            r"rank 1, action 1 \(1F1\): waits for ever for the output of stage 0, micro-batch 1",
        ),
        (
            schedule(
                "0F0 0B0 (0F1;3B0)OVERLAP_F_B 3F0 3F1 3B1 0B1",
                "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1",
                placement=(0, 1, 1, 0),
                microbatches=2,
            ),
            r"rank 0, action 3 \(\(0F1;3B0\)OVERLAP_F_B\): comes before 3F0",
        ),
    ],
)
def test_what_cannot_run_is_named_by_rank_position_and_action(broken, message):
    assert any(ir.re.search(message, problem) for problem in validate_schedule(broken)), validate_schedule(broken)


def test_forwards_alone_do_not_pass_as_training():
    assert [problem.split(":")[1] for problem in validate_schedule(schedule("0F0", "1F0"))] == [
        f" {stage}{kind}0 never computed" for stage in (0, 1) for kind in "IW"
    ]


@settings(max_examples=60, deadline=None)
@given(built(most_ranks=5), st.randoms(use_true_random=False))
def test_any_lost_repeated_or_moved_action_is_found_or_harmless(built, rng):
    rank = rng.randrange(built.ranks)
    order = list(built.orders[rank])
    place_ = rng.randrange(len(order))
    lost = order[:place_] + order[place_ + 1 :]
    repeated = order[:place_] + [order[place_]] + order[place_:]
    for broken in (lost, repeated):
        orders = tuple(tuple(broken) if r == rank else o for r, o in enumerate(built.orders))
        assert any(problem.startswith(f"rank {rank}, ") for problem in validate_schedule(replace(built, orders=orders)))
    moved = lost[: (to := rng.randrange(len(order)))] + [order[place_]] + lost[to:]
    mutant = replace(built, orders=tuple(tuple(moved) if r == rank else o for r, o in enumerate(built.orders)))
    if not validate_schedule(mutant):
        assert simulate_schedule(mutant, StageCosts.uniform(built.stages)).makespan > 0
    else:
        with pytest.raises(ValueError):
            simulate_schedule(mutant, StageCosts.uniform(built.stages))


# Templates

CAPS = {
    "gpipe": lambda p, m: m,
    "1f1b": lambda p, m: p,
    "zb_h1": lambda p, m: p,
    "zb_h2": lambda p, m: 2 * p - 1,
    "zb_v": lambda p, m: p,
    "v_half": lambda p, m: (p + 2) // 2,
    "v_min": lambda p, m: (p + 4) // 3,
    "dualpipe_v": lambda p, m: p + 0.5,
}


@settings(max_examples=150, deadline=None)
@given(built())
def test_every_template_is_valid_within_its_memory(built):
    cap = CAPS.get(built.name, lambda p, m: m)(built.ranks, built.microbatches)
    assert validate_schedule(built) == [] and max(peak_activations(built)) <= cap + 1e-9
    kinds = {action.kind for order in built.orders for action in split_overlaps(order)}
    if built.name not in SPLITTING:
        assert kinds == {"F", "B"}
    elif built.name != "dualpipe_v" or built.microbatches >= 2 * built.ranks:
        assert kinds >= {"F", "I", "W"}
    torch_orders = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in order]
        for rank, order in enumerate(built.orders)
    }
    owners = torch_schedules._validate_schedule(torch_orders, built.ranks, built.stages, built.microbatches)
    assert tuple(owners[stage] for stage in range(built.stages)) == built.placement


@pytest.mark.parametrize("ranks", range(1, 9))
def test_bubbles_and_memory_have_their_closed_forms(ranks):
    p = ranks
    for m in (2 * p, 3 * p + 1):
        for name in ("gpipe", "1f1b"):
            assert unit(build_schedule(name, p, m)).bubble == pytest.approx((p - 1) / (m + p - 1))
        assert max(peak_activations(build_schedule("gpipe", p, m))) == m
        assert peak_activations(build_schedule("1f1b", p, m)) == tuple(p - rank for rank in range(p))
        # A third of 1F1B's at 1F1B's memory; with twice the memory no rank waits once it has begun.
        assert excess(build_schedule("zb_h1", p, m)) == pytest.approx((p - 1) * (1 + 1 - 1))
        assert max(peak_activations(build_schedule("zb_h1", p, m))) == p
        second = build_schedule("zb_h2", p, m)
        assert all(spans[-1].end - spans[0].start == pytest.approx(3 * m) for spans in unit(second).spans)
        assert max(peak_activations(second)) == 2 * p - 1
        # V schedules wait half as long for the first hidden state, since a chunk is half as long.
        first = (p - 1) / 2
        for name, peak, wait in (
            ("zb_v", p, first),
            ("v_half", (p + 2) // 2, (3 * p - 4 - (p % 2 == 0)) / 2),
            ("v_min", (p + 4) // 3, (4 * p - 5) / 2),
        ):
            plan = build_schedule(name, p, m)
            assert max(peak_activations(plan)) == peak
            if peak == p:  # as much memory as V-ZB has
                assert excess(plan) == pytest.approx(first)
            elif name == "v_min" and peak == (p + 2) // 2:
                assert excess(plan) == pytest.approx(excess(build_schedule("v_half", p, m)))
            else:
                assert excess(plan) == pytest.approx(wait)
        dual = build_schedule("dualpipe_v", p, m)  # its pairs run one after the other here
        assert excess(dual) == pytest.approx(first) and max(peak_activations(dual)) == p + 0.5


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble(ranks, chunks):
    p, v = ranks, chunks
    for m in (p, 2 * p, 4 * p):
        plan = build_schedule("interleaved", p, m, chunks)
        assert unit(plan).bubble == pytest.approx((p - 1) / (v * m + p - 1))
        assert max(peak_activations(plan)) == pytest.approx(p if v == 1 else min(m, p * (1 + (p - 1) / (p * v))))
    for m in range(p, 4 * p):  # groups of unequal size cost memory, not time
        assert excess(build_schedule("interleaved", p, m, chunks)) == pytest.approx(3 * (p - 1) / v)


def test_one_rank_takes_one_micro_batch_after_the_other():
    assert format_schedule(build_schedule("1f1b", 1, 3)) == "0F0,0B0,0F1,0B1,0F2,0B2\n"
    assert format_schedule(build_schedule("gpipe", 1, 2)) == "0F0,0F1,0B0,0B1\n"
    assert format_schedule(build_schedule("interleaved", 1, 2, 2)) == "0F0,1F0,1B0,0F1,0B0,1F1,1B1,0B1\n"
    assert all(
        peak_activations(build_schedule(name, 1, 4)) == (1.0,)
        for name in ("1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min")
    )


def test_a_wave_turns_at_the_ends():
    assert place_stages(4, 2, "loop") == (0, 1, 2, 3, 0, 1, 2, 3)
    assert place_stages(4, 2, "v") == (0, 1, 2, 3, 3, 2, 1, 0)
    assert place_stages(2, 3, "v") == (0, 1, 1, 0, 0, 1)
    assert all(build_schedule(name, 3, 6).placement == (0, 1, 2, 2, 1, 0) for name in V_SHAPED)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 4), (4, 8), (4, 10), (3, 9), (8, 16)])
def test_orders_equal_torchs_where_torch_is_right(ranks, microbatches):
    assert build_schedule("gpipe", ranks, microbatches).orders == from_torch("GPipe", ranks, microbatches)
    # torch's 1F1B does one forward too many before the last rank's first backward.
    assert build_schedule("1f1b", ranks, microbatches).orders[:-1] == from_torch("1F1B", ranks, microbatches)[:-1]
    for chunks in (2, 3):
        assert build_schedule("interleaved", ranks, microbatches, chunks).orders == from_torch(
            "Interleaved1F1B", ranks, microbatches, chunks
        )
    if microbatches >= 2 * ranks:
        assert build_schedule("dualpipe_v", ranks, microbatches).orders == from_torch("DualPipeV", ranks, microbatches)
    ours = build_schedule("zb_v", ranks, microbatches)
    theirs = replace(ours, orders=from_torch("ZBVZeroBubble", ranks, microbatches))
    assert unit(ours).makespan <= unit(theirs).makespan
    assert max(peak_activations(ours)) <= max(peak_activations(theirs))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("zbv", 4, 8), "parallel.pipeline.schedule=zbv is not a template; legal: gpipe, 1f1b, "),
        (("1f1b", 0, 8), "parallel.pp=0 must be at least 1"),
        (("1f1b", 4, 0), "batch.accumulation=0 must be at least 1"),
        (
            ("1f1b", 4, 8, 2),
            "parallel.pipeline.chunks=2: schedule=1f1b places 1 on each rank; legal: 1, or .*schedule=interleaved",
        ),
        (("zb_v", 4, 8, 3), "parallel.pipeline.chunks=3: schedule=zb_v places 2 on each rank; legal: 2, or"),
        (("zb_v", 4, 8, 0), "parallel.pipeline.chunks=0: schedule=zb_v places 2 on each rank; legal: 2$"),
        (("interleaved", 4, 8, 0), "parallel.pipeline.chunks=0 must be at least 1"),
    ],
)
def test_refusals_name_the_setting_and_a_legal_value(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(*arguments)


# Greedy


@st.composite
def uneven(draw, most_ranks: int = 5):
    """Costs of stages that differ, their placement, and the number of micro-batches."""
    ranks, chunks, style = (
        draw(st.integers(1, most_ranks)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(("loop", "v"))),
    )
    stages = ranks * chunks
    seconds = st.lists(st.floats(0.1, 4.0), min_size=stages, max_size=stages).map(tuple)
    f, i, w = draw(seconds), draw(seconds), draw(seconds)
    costs = StageCosts(
        f,
        i,
        w,
        tuple(x + y for x, y in zip(i, w)),
        draw(seconds),
        kept=draw(st.sampled_from((0.0, 0.5, 1.0, 1.3, 5.0))),
        transfer=draw(st.sampled_from((0.0, 0.2))),
        host=draw(st.sampled_from((0.0, 0.01))),
    )
    return costs, place_stages(ranks, chunks, style), draw(st.integers(1, 8))


@settings(max_examples=60, deadline=None)
@given(uneven(), st.floats(0, 1.5), st.booleans(), st.sampled_from((0.0, 0.5, 1.0)))
def test_greedy_is_valid_and_respects_its_cap(case, room, split, patience):
    costs, placement, microbatches = case
    least = least_cap(costs, placement, split=False)
    cap = least * (1 + room)
    plan = build_greedy(costs, placement, microbatches, cap, split, patience)
    assert validate_schedule(plan) == []
    kinds = {action.kind for order in plan.orders for action in order}
    assert kinds == {"F", "B"} or split and cap >= least_cap(costs, placement) and kinds == {"F", "I", "W"}
    assert max(simulate_schedule(plan, costs).memory) <= cap * (1 + 1e-6)
    assert build_greedy(costs, placement, microbatches, cap, split, patience) == plan
    with pytest.raises(ConfigError, match="is below the .* that one micro-batch takes; legal: .* or more"):
        build_greedy(costs, placement, microbatches, least * 0.99, split, patience)


@settings(max_examples=60, deadline=None)
@given(uneven(), st.floats(0, 1.5))
def test_list_scheduling_splits_within_the_least_cap_and_above(case, room):
    costs, placement, microbatches = case
    cap = least_cap(costs, placement) * (1 + room)
    plan, _ = list_schedule("free", costs, placement, microbatches, cap=cap)
    assert validate_schedule(plan) == [] and {action.kind for order in plan.orders for action in order} == {
        "F",
        "I",
        "W",
    }
    assert max(simulate_schedule(plan, costs).memory) <= cap * (1 + 1e-6)
    with pytest.raises(ConfigError, match="is below the"):
        list_schedule("free", costs, placement, microbatches, cap=least_cap(costs, placement) * 0.99)


def test_greedy_takes_full_backwards_where_splitting_does_not_pay_or_fit():
    def kinds(costs: StageCosts, cap: float) -> set[str]:
        return {
            action.kind for order in build_greedy(costs, place_stages(4, 1, "loop"), 8, cap).orders for action in order
        }

    assert kinds(StageCosts.uniform(4), 4) == {"F", "I", "W"}
    assert kinds(StageCosts.uniform(4, b=1.2), 4) == {"F", "B"}  # as where a compiler makes one graph of both
    assert kinds(StageCosts.uniform(4, kept=17.0), 4) == {
        "F",
        "B",
    }  # full recompute: what W reads is far more than F keeps
    assert kinds(StageCosts.uniform(4, kept=17.0), 40) == {"F", "I", "W"}


@settings(max_examples=40, deadline=None)
@given(uneven())
def test_the_predicted_time_of_a_list_schedule_is_the_simulators(case):
    costs, placement, microbatches = case
    plan, seconds = list_schedule("free", costs, placement, microbatches, patience=0.5)
    assert seconds == pytest.approx(simulate_schedule(plan, costs).makespan, rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_greedy_matches_the_templates_on_even_costs(ranks):
    m = 4 * ranks
    for name, chunks in (("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("v_half", 2), ("v_min", 2)):
        known = build_schedule(name, ranks, m)
        costs = StageCosts.uniform(known.stages, kept=1.0)
        found = build_greedy(
            costs, known.placement, m, cap=max(peak_activations(known)) * chunks, split=name in SPLITTING, patience=0.0
        )
        assert simulate_schedule(found, costs).makespan <= simulate_schedule(known, costs).makespan


def test_greedy_gains_on_uneven_costs():
    """Attention-heavy layers of differing lengths under a heavy head, where no template's assumptions hold."""
    gains, distances, rng = [], [], random.Random(1)
    for _ in range(12):
        ranks = rng.choice((3, 4, 6))
        m = 3 * ranks
        f = [rng.uniform(0.8, 1.2) for _ in range(2 * ranks - 1)] + [rng.uniform(1.5, 2.5)]
        i, w, b = (tuple(factor * x for x in f) for factor in (1.6, 0.6, 2.2))
        costs = StageCosts(tuple(f), i, w, b, (1.0,) * len(f), kept=1.0)
        known = build_schedule("zb_v", ranks, m)
        # No step is shorter than the work of a rank after the first hidden state has reached it.
        least = max(m * 3.2 * (f[rank] + f[-1 - rank]) + sum(f[:rank]) for rank in range(ranks))
        same, more = (
            simulate_schedule(build_greedy(costs, known.placement, m, cap), costs).makespan
            for cap in (2 * ranks, 3 * ranks)
        )
        gains.append(simulate_schedule(known, costs).makespan / same)
        distances.append(more / least)
    assert min(gains) >= 1 and sum(gains) / len(gains) > 1.01, gains
    assert max(distances) < 1.05 and sum(distances) / len(distances) < 1.02, distances


@pytest.mark.parametrize("ranks, cap", [(4, 6), (6, 8), (8, 8)])
def test_greedy_stays_steady_under_a_tight_cap(ranks, cap):
    """Taking whatever is ready loses more with every micro-batch; the order of a V schedule does not."""
    costs = StageCosts.uniform(2 * ranks, kept=1.0)
    few, many = (
        simulate_schedule(build_greedy(costs, place_stages(ranks, 2, "v"), m, cap), costs).makespan - 6 * m
        for m in (4 * ranks, 8 * ranks)
    )
    assert few == many <= 4 * (ranks - 1)


def test_lines_that_do_not_fit_the_cap_are_refused():
    costs = StageCosts.uniform(2)
    lines = [[parse_action(text) for text in line.split()] for line in ("0F0 0F1 0I0 0I1", "1F0 1I0 1F1 1I1")]
    assert (
        fits_cap(lines, costs, (0, 1), 2.0)
        and fits_cap(lines, costs, (0, 1), None)
        and not fits_cap(lines, costs, (0, 1), 1.0)
    )
    assert validate_schedule(list_schedule("lines", costs, (0, 1), 2, cap=2.0, lines=lines)[0]) == []
    with pytest.raises(ValueError, match="cannot be kept within a cap of 1"):
        list_schedule("lines", costs, (0, 1), 2, cap=1.0, lines=lines)


def test_patience_waits_for_what_is_due():
    """Rank 0 is due a backward soon after it could start a long weight gradient."""
    costs = StageCosts((1.0, 0.5), (1.0, 1.2), (4.0, 0.1), (5.0, 1.3), (1.0, 1.0))
    kinds = [
        [action.kind for action in list_schedule("p", costs, (0, 1), 2, patience=patience)[0].orders[0]]
        for patience in (0.0, 1.0)
    ]
    assert kinds == [["F", "F", "I", "W", "I", "W"], ["F", "F", "I", "I", "W", "W"]]


# Evaluation


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from(("loop", "v")), st.integers(0, 20))
def test_forward_only_runs_on_any_placement(ranks, chunks, style, microbatches):
    plan = forward_only(place_stages(ranks, chunks, style), microbatches)
    assert not plan.trains
    programs = lower_all(plan)
    assert find_blocked_ranks(programs, plan.placement) == {}
    assert not any(
        action.kind in ("B", "I", "W", "REDUCE_GRAD", "SEND_B", "RECV_B") for program in programs for action in program
    )
    assert all(program[-1].kind == "RESHARD" for program in programs if microbatches)
    assert max(map(receive_buffers, programs)) <= 4


@pytest.mark.parametrize(
    "ranks, chunks, style, wait", [(4, 1, "loop", 3), (4, 2, "loop", 3), (4, 2, "v", 6), (8, 4, "loop", 7)]
)
def test_forward_only_has_no_gaps(ranks, chunks, style, wait):
    plan = forward_only(place_stages(ranks, chunks, style), 4 * ranks)
    assert simulate_schedule(plan, StageCosts.uniform(plan.stages)).makespan == 4 * ranks * chunks + wait


# Lowering


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_ranks_wait_for_each_other_in_a_circle(name):
    """Not even where every action waits for all that its rank has started, as what waits for a whole GPU does."""
    for ranks in (1, 2, 3, 4, 7):
        for microbatches in (1, 2, 3, ranks, ranks + 1, 3 * ranks):
            for chunks in (1, 2, 3) if name == "interleaved" else (None,):
                plan = build_schedule(name, ranks, microbatches, chunks)
                assert find_blocked_ranks(lower_all(plan), plan.placement) == {}, (ranks, microbatches, chunks)


@settings(max_examples=150, deadline=None)
@given(built(most_ranks=6), st.integers(0, 3), st.sampled_from(("last", "every")))
def test_lowered_programs_cannot_deadlock(built, ahead, reduce):
    programs = lower_all(built, reduce, ahead)
    assert find_blocked_ranks(programs, built.placement) == {}
    for rank, program in enumerate(programs):
        assert program == lower_schedule(built, rank, reduce, ahead)
        assert [action for action in program if action.kind in ir.COMPUTE] == list(split_overlaps(built.orders[rank]))


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 6), st.integers(1, 20), st.integers(0, 3), st.sampled_from(("last", "every")))
def test_passes_that_run_in_turns_cannot_deadlock(ranks, microbatches, ahead, reduce):
    """Where a pair waits for the inputs of both passes before, and sends both results afterwards."""
    plan = build_schedule("dualpipe_v", ranks, microbatches)
    programs = lower_all(plan, reduce, ahead, overlaps=True)
    assert find_blocked_ranks(programs, plan.placement) == {}
    for program, order in zip(programs, plan.orders):
        assert [action for action in program if action.parts or action.kind in ir.COMPUTE] == list(order)
        received = {(action.kind, action.stage, action.microbatch) for action in program if "RECV" in action.kind}
        begun: set[tuple] = set()
        for action in program:
            if "RECV" in action.kind:
                begun.add((action.kind, action.stage, action.microbatch))
            for part in action.computed:
                kind = "RECV_F" if part.kind == "F" else "RECV_B"
                if part.kind in "FIB" and (kind, part.stage, part.microbatch) in received:
                    assert (kind, part.stage, part.microbatch) in begun, f"{action} before its input"
    # Every REDUCE_GRAD comes after the backward pass that it is for.
    for program in programs:
        for place, action in enumerate(program):
            if action.kind == "REDUCE_GRAD":
                parts = [part for earlier in program[:place] for part in earlier.computed]
                assert any(part.kind in "BW" and part.stage == action.stage for part in parts)


def test_one_rank_pairs_each_backward_pass_with_the_next_forward_pass():
    paired = pair_passes(build_schedule("1f1b", 1, 3))
    assert format_schedule(paired).strip() == "0F0,(0F1;0B0)OVERLAP_F_B,(0F2;0B1)OVERLAP_F_B,0B2"
    assert not validate_schedule(paired)


@settings(max_examples=40, deadline=None)
@given(uneven(most_ranks=4), st.integers(0, 3))
def test_greedy_schedules_lower_without_deadlock(case, ahead):
    plan = build_greedy(*case)
    assert find_blocked_ranks(lower_all(plan, ahead=ahead), plan.placement) == {}
    csv = parse_schedule(format_schedule(merge_backward(plan)), placement=plan.placement)
    assert find_blocked_ranks(lower_all(csv, ahead=ahead), plan.placement) == {}


def test_a_receive_is_a_circle_before_what_it_waits_for():
    """The work of the rank itself, or of two that each hold a receive and wait for the next work of the other."""
    itself = [
        [parse_action(text) for text in line.split()]
        for line in ("0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")
    ]
    assert find_blocked_ranks(itself, (0, 1)) == {0: 0, 1: 0}
    start = "0F0 0SEND_F0", "1RECV_F0 1F0"
    ends = {  # how rank 0 and rank 1 go on, and whether they can
        ("0RECV_B0 0F1 0SEND_F1 0B0", "1RECV_F1 1B0 1SEND_B0 1F1"): False,
        ("0F1 0SEND_F1 0RECV_B0 0B0", "1RECV_F1 1B0 1SEND_B0 1F1"): True,
        ("0RECV_B0 0F1 0SEND_F1 0B0", "1B0 1SEND_B0 1RECV_F1 1F1"): True,
    }
    for lines, possible in ends.items():
        programs = [[parse_action(text) for text in f"{first} {then}".split()] for first, then in zip(start, lines)]
        assert find_blocked_ranks(programs, (0, 1)) == ({} if possible else {0: 2, 1: 2})


@pytest.mark.parametrize("name", [*TEMPLATES, "forward_only"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_receive_buffers_do_not_grow_with_micro_batches(name, ranks):
    def most(microbatches: int) -> int:
        plan = (
            forward_only(place_stages(ranks, 2, "v"), microbatches)
            if name == "forward_only"
            else build_schedule(name, ranks, microbatches)
        )
        return max(map(receive_buffers, lower_all(plan)))

    assert most(12 * ranks) == most(6 * ranks) <= 4


def compute_and_transfers(plan: Schedule, rank: int, ahead: int) -> list[str]:
    program = lower_schedule(plan, rank, ahead=ahead)
    return [str(action) for action in program if action.kind not in ("UNSHARD", "RESHARD")]


def test_receives_are_posted_one_action_ahead_and_no_further():
    def start(name: str, ahead: int) -> str:
        return " ".join(compute_and_transfers(build_schedule(name, 2, 4), 1, ahead)[:7])

    assert start("gpipe", 0) == "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1RECV_F3"
    assert start("gpipe", 1) == "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1RECV_F3 1F2"
    assert start("1f1b", 1) == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2"
    # Not posted when needed, but before a send that would otherwise wait for rank 0 while rank 0 waits to send this.
    assert start("1f1b", 0) == "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1"
    early = schedule("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", microbatches=4)
    assert [receive_buffers(lower_schedule(early, 1, ahead=ahead)) for ahead in (0, 1, 3, 6)] == [1, 1, 2, 3]


def test_receives_ahead_keep_to_their_number_of_buffers():
    """What rank 1 reads next is what rank 0 sends second, so that posting it ahead takes a buffer for the first too."""
    plan = schedule("1F0 1F1 1B1 1B0", "0F0 0F1 2F1 2F0 2B1 2B0 0B1 0B0", placement=(1, 0, 1), microbatches=2)
    assert validate_schedule(plan) == []
    for ahead in (0, 1, 2):
        program = " ".join(compute_and_transfers(plan, 1, ahead))
        assert program.startswith("0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2RECV_F1 2F1 ")


def test_work_on_parameters():
    plan = build_schedule("zb_v", 2, 3)
    last, every = lower_schedule(plan, 0), lower_schedule(plan, 0, reduce="every")
    for program, count in ((last, 1), (every, 3)):
        for stage in (0, 3):
            mine = [
                action.kind
                for action in program
                if action.stage == stage and not action.kind.startswith(("SEND", "RECV"))
            ]
            assert mine[0] == "UNSHARD" and mine[-1] == "RESHARD" and mine[-2] == "REDUCE_GRAD" and mine[-3] == "W"
            assert mine.count("REDUCE_GRAD") == count and mine.count("UNSHARD") == mine.count("RESHARD") == 1
    assert all(
        every[place_ - 1].kind in ("W", "B") or every[place_ - 1].kind == "SEND_B"
        for place_, action in enumerate(every)
        if action.kind == "REDUCE_GRAD"
    )
    # The second chunk is gathered during the action before its first one.
    compute = [action for action in last if action.kind in (*ir.COMPUTE, "UNSHARD")]
    first = next(n for n, action in enumerate(compute) if action.stage == 3 and action.kind == "F")
    assert str(compute[first - 2]) == "3UNSHARD"


@settings(max_examples=40, deadline=None)
@given(built(most_ranks=5))
def test_communication_is_torchs(built):
    """The same sends and receives on each rank as torch derives, and in the same order on each directed edge."""
    compute = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in split_overlaps(order)]
        for rank, order in enumerate(built.orders)
    }
    theirs = torch_schedules._add_send_recv(compute, built.placement.__getitem__, built.stages)
    for rank, program in enumerate(lower_all(built)):
        ours = [str(action) for action in program if action.kind in ir.COMMUNICATION]
        torchs = [str(action) for action in theirs[rank] if parse_action(str(action)).kind in ir.COMMUNICATION]
        assert sorted(ours) == sorted(torchs)
        assert [text for text in ours if "SEND" in text] == [text for text in torchs if "SEND" in text]


def test_replay_finds_crossed_transfers_and_blocking_sends():
    """Receives out of the sender's order, and two ranks that each send before they post what the other sends."""
    crossed = [
        [parse_action(text) for text in line.split()]
        for line in ("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1")
    ]
    assert find_blocked_ranks(crossed, (0, 1)) == {0: 1, 1: 0}
    exchange = [
        [parse_action(text) for text in line.split()]
        for line in ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1")
    ]
    assert find_blocked_ranks(exchange, (0, 1)) == {0: 3, 1: 3}


def finish(programs: tuple[tuple[Action, ...], ...], placement: tuple[int, ...], costs: StageCosts) -> float:
    """When the last action ends on GPUs, where a transfer starts once its sender has computed and its receiver has done
    what stands before the RECV."""
    clocks, places, posted, ends = [0.0] * len(programs), [0] * len(programs), {}, {}
    seconds = {"F": costs.f, "I": costs.i, "W": costs.w, "B": costs.b}
    while any(place < len(program) for place, program in zip(places, programs)):
        for rank, program in enumerate(programs):
            for action in program[places[rank] :]:
                if action.kind in ir.COMPUTE:
                    source = input_of(action, len(placement))
                    if source is not None and source not in ends:
                        break
                    ready = 0.0 if source is None else ends[source]
                    if source is not None and placement[source.stage] != rank:
                        ready = max(ready, posted[action.stage, action.kind == "F", action.microbatch]) + costs.transfer
                    clocks[rank] = max(clocks[rank], ready) + seconds[action.kind][action.stage]
                    ends[replace(action, kind="I") if action.kind == "B" else action] = clocks[rank]
                elif action.kind.startswith("RECV"):
                    posted[action.stage, action.kind == "RECV_F", action.microbatch] = clocks[rank]
                places[rank] += 1
    return max(clocks)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("backward", [(1.0, 1.0), (1.6, 0.6), (2.0, 1.0)], ids=["even", "attention", "recompute"])
def test_transfers_overlap_with_computation(name, backward):
    """Where a receive is posted costs next to nothing, against receives that are posted from the start."""
    i, w = backward
    for ranks, microbatches in ((2, 2), (2, 8), (4, 4), (4, 16), (8, 8), (8, 32)):
        plan = build_schedule(name, ranks, microbatches)
        costs = StageCosts.uniform(plan.stages, 1.0, i, w, i + w, transfer=0.05)
        assert finish(lower_all(plan), plan.placement, costs) <= 1.02 * simulate_schedule(plan, costs).makespan


def test_one_rank_communicates_with_nobody():
    assert [str(action) for action in lower_schedule(build_schedule("interleaved", 1, 1, 2), 0)] == [
        "0UNSHARD",
        "1UNSHARD",
        "0F0",
        "1F0",
        "1B0",
        "1REDUCE_GRAD",
        "1RESHARD",
        "0B0",
        "0REDUCE_GRAD",
        "0RESHARD",
    ]


def test_schedules_need_no_torch():
    code = (
        "import sys, trainer.planning.schedules.templates, trainer.planning.schedules.lower; sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
