"""Replicas that are compared, and steps that are run again, in whole runs of four ranks under many plans."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.launch import launch
from workers.replicas import BREAKS, BROKEN, FLIPPED, FLIPS, STEPS, UNDISTURBED, flipped_after

from trainer.distributed.tensors import ROW, digest_rows, elements_of_rows, row_sums, tensor_words
from trainer.training.replicas import RepeatReport, ReplicaVerdict, blame_ranks, explain_repeat

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def results(root: Path) -> dict:
    launch("replicas.py", 4, root, forks=True)
    return json.loads((root / "results.json").read_text())


@pytest.mark.parametrize("plan", UNDISTURBED)
def test_replicas_are_equal_to_the_bit_under_every_plan(results, plan):
    """The other plans: until a bit flips, see below."""
    result = results[plan]
    assert (result["code"], result["error"]) == (0, None)
    assert len(result["losses"]) == STEPS and len(result["saved"]) == 2 and set(result["repeated"]) == {0}


@pytest.mark.parametrize("name", FLIPS)
def test_a_flipped_bit_is_found_before_a_save(results, name):
    _, pattern, rank, _ = FLIPS[name]
    result, after = results[name], flipped_after(name)
    assert result["kind"] == "ReplicaMismatch" and len(set(result["errors"])) == 1, result
    saved = [f"step-{STEPS // 2:08d}"] if after > STEPS // 2 else []
    assert result["flipped"] and result["saved"] == saved and len(result["losses"]) == after
    heading, tensor, *_ = result["error"].splitlines()
    assert heading.startswith(f"replicas differ after step {after}: ") and f"rank {rank} on " in heading
    assert re.match(rf"  {pattern}.*: 1 of [\d,]+ elements differ", tensor) and f" on rank {rank}" in tensor
    assert "guard.compare_every=0" in result["error"]
    assert (f"{saved[0]} is the last checkpoint" if saved else "nothing had been saved") in result["error"]


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "zero0 model": "differs from the majority",
        "hsdp1 model": "one of rank 1 on .*, rank 3 on .* is wrong",
        "hsdp1 exponent": "rank 3 on .* holds implausible values",
        "pp2_tied embedding": "rank 3 on .* differs from the majority",
        "pp2_tied_v copy": r"rank 0 on .*, rank 0 \(its copy\) on .* are two copies",
    }.items(),
)
def test_who_is_to_blame(results, name, words):
    assert re.search(words, results[name]["error"].splitlines()[0])


def test_what_differs_is_looked_for_every_so_many_steps_and_before_saves(results):
    assert len(results["every 3"]["losses"]) == 3 > FLIPPED
    assert len(results["before a save"]["losses"]) == STEPS // 2 and not results["before a save"]["saved"]
    assert results["never"]["code"] == 0 and len(results["never"]["saved"]) == 2
    counter = results["counter"]
    assert (
        counter["kind"] == "ReplicaMismatch"
        and "tokens: 512 on rank 0, 512 on rank 1, 513 on rank 2" in (counter["error"])
    )


def test_a_save_in_progress_is_completed_first(results):
    result = results["while saving"]
    assert result["kind"] == "ReplicaMismatch" and result["saved"] == [f"step-{STEPS // 2:08d}"]
    assert f"{result['saved'][0]} is the last checkpoint" in result["error"]


def test_the_command_says_so_and_fails(results):
    assert (
        results["command"]["code"] == 1
        and f"training stopped: replicas differ after step {FLIPPED}" in (results["command"]["printed"])
    )
    assert "Traceback" not in results["command"]["printed"]


@pytest.mark.parametrize("name", [name for name in BREAKS if name.startswith("once")])
def test_a_transient_fault_leaves_no_trace_in_the_numbers(results, name):
    plan, how = BREAKS[name]
    result, undisturbed = results[name], results[plan]
    for what in ("losses", "skipped", "scales", "tokens", "epochs", "saved"):
        assert result[what] == undisturbed[what], what
    at = how.get("at", BROKEN)
    late = how.get("late") and at < STEPS
    assert result["taken"] == [*range(1, at + 1), *([at + 1] if late else []), at, *range(at + 1, STEPS + 1)]
    assert result["repeated"][-1] == 1
    [line] = [line for line in result["log"].splitlines() if "run again" in line]
    assert f"step {at} was run again" in line and "hardware fault" in line
    if how.get("backward"):
        assert "do not tell the rank" in line
    else:
        assert f"rank {how.get('rank', 1)} on " in line and "loss nan" in line


@pytest.mark.parametrize("name", [name for name in BREAKS if name.startswith("always")])
def test_a_fault_that_comes_again_is_of_the_data(results, name):
    plan, _ = BREAKS[name]
    result, undisturbed = results[name], results[plan]
    assert result["code"] == 0 and result["repeated"][-1] == 1
    before = BROKEN - 1
    assert result["losses"][:before] == undisturbed["losses"][:before] and result["losses"][before] is None
    assert result["skipped"][before] == undisturbed["skipped"][before] + 1
    [line] = [line for line in result["log"].splitlines() if "run again" in line]
    assert "reproducible: the data or the optimisation is the cause, by its samples stdlib:" in line
    if plan == "fp16":  # the scale moves once, as in a step that is not run again
        assert result["scales"][BROKEN] == result["scales"][BROKEN - 1] / 2


def test_gradients_that_are_not_finite_elsewhere_the_second_time(results):
    result = results["elsewhere zero0"]
    assert result["code"] == 0 and result["skipped"][-1] == 1
    [line] = [line for line in result["log"].splitlines() if "run again" in line]
    assert "a hardware fault in a backward pass" in line and "neither result is finite" in line


def test_weights_that_are_not_finite_are_told(results):
    alone = results["weight zero3"]
    assert alone["kind"] == "NonFiniteError" and alone["repeated"][-1] == 3 and alone["skipped"][-1] == 3
    assert "weights are not finite: layers.1.attention.q.weight on rank 1" in alone["log"]
    replica = results["weight zero0"]
    assert replica["kind"] == "ReplicaMismatch" and "rank 1 on " in replica["error"].splitlines()[0]
    assert f"step-{STEPS // 2:08d} is the last checkpoint" in replica["error"]


DTYPES = {torch.float32: np.int32, torch.bfloat16: np.int16, torch.float64: np.int64, torch.int8: np.int8}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_digest_notices_every_bit(data):
    """In any type, of any length, wherever the tensor begins in memory."""
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    per_row = ROW * 8 // dtype.itemsize
    length = data.draw(st.one_of(st.integers(1, 40), st.integers(per_row - 5, 2 * per_row + 5)))
    offset = data.draw(st.integers(0, 3))
    values = torch.randint(-100, 100, (length,)).to(dtype)
    moved = torch.cat([values[:1].expand(offset), values])[offset:]
    before = digest_rows([row_sums(values)], CPU)
    assert digest_rows([row_sums(moved)], CPU) == before
    place, bit = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    flipped = values.clone()
    whole, rest = tensor_words(flipped)
    part, at = (whole, place) if place < len(whole) else (rest, place - len(whole))
    mask = torch.tensor(1, dtype=part.dtype) << bit
    part[at] ^= mask
    assert digest_rows([row_sums(flipped)], CPU) != before
    [row] = (row_sums(flipped) != row_sums(values)).nonzero().flatten().tolist()
    [(first, elements)] = elements_of_rows(flipped, [row]).items()
    assert first <= place < first + len(elements)
    assert elements[place - first].view(part.dtype) == flipped[place].view(part.dtype)


def test_a_digest_depends_on_the_order_of_tensors_and_rows():
    one, two = torch.randn(2, 3 * 2 * ROW)
    assert digest_rows([row_sums(one), row_sums(two)], CPU) != digest_rows([row_sums(two), row_sums(one)], CPU)
    swapped = torch.cat([one[2 * ROW : 4 * ROW], one[: 2 * ROW], one[4 * ROW :]])
    assert digest_rows([row_sums(one)], CPU) != digest_rows([row_sums(swapped)], CPU)


@settings(deadline=None)
@given(st.integers(2, 9), st.data())
def test_the_odd_ones_out_are_named(holders, data):
    wrong = data.draw(st.sets(st.integers(0, holders - 1), min_size=1, max_size=holders // 2))
    verdict = ReplicaVerdict.of({(rank, 0): 8 + rank if rank in wrong else 7 for rank in range(holders)})
    nodes = {rank: f"node{rank}" for rank in range(holders)}
    named = {int(rank) for rank in re.findall(r"rank (\d+) on node\d", blame_ranks([verdict], nodes))}
    if 2 * len(wrong) < holders:
        assert named == wrong
    else:
        assert named == set(range(holders)), "there is no majority"


def test_both_executions_differ_and_neither_is_finite():
    first, second = ({"loss": float("nan"), "grad_norm": float("nan")} for _ in range(2))
    reports = [RepeatReport("a", 0, ["text:1"], [], []), RepeatReport("b", 1, ["text:2"], ["text:2"], [])]
    text = explain_repeat(reports, first, second, again=True, same=True)
    assert "a hardware fault of rank 1 on b" in text and "nothing is updated" in text
