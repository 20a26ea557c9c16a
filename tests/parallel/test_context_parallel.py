"""Sequences that several ranks share: the numbers of one process, and what each rank sends and keeps for it."""

from __future__ import annotations

import itertools
import json

import pytest
from support.launch import launch
from workers.context import MASKS, WAYS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("context") / "results.json"
    launch("context.py", 4, out, forks=True)
    return json.loads(out.read_text())


def test_every_way_gives_the_numbers_of_one_process(results):
    """Loss and every gradient, in fp64: all masks and numbers of key-value heads, the shortest sequences, targets on
    one rank alone."""
    ways = results["ways"]
    for name, values in {"batch": (1, 3), "size": (2, 4), "kv_heads": (1, 2, 4), "way": WAYS}.items():
        assert {(one["mask"], one[name]) for one in ways} == set(itertools.product(MASKS, values))
    assert len({(one["way"], one["batch"], one["size"]) for one in ways if "hybrid" not in one["way"]}) == 3 * 2 * 2
    lengths = {(one["way"].split()[0], one["length"]) for one in ways}
    assert lengths >= set(itertools.product(("allgather", "ulysses", "hybrid"), (8, 16, 24, 48))) | {
        ("allgather", 4),
        ("ulysses", 4),
    }
    assert {(one["way"], one["kv_heads"]) for one in ways} == set(itertools.product(WAYS, (1, 2, 4)))
    for method in ("allgather", "ulysses"):
        heads = {(one["kv_heads"], one["size"]) for one in ways if one["way"].startswith(method)}
        assert heads == set(itertools.product((1, 2, 4), (2, 4)))
    assert not [one for one in ways if not one["error"] < 1e-14]


def test_every_rank_takes_part_in_every_collective(results):
    """Forward and backward: a rank that left one out, for having nothing to send or to use, would let the others
    wait."""
    for one in results["ways"]:
        counts = one["counts"]
        assert all(count == counts[0] for count in counts), one
        both, heads = "hybrid" in one["way"], max(one["kv_heads"] // (1 + ("hybrid" in one["way"])), 1)
        groups = heads * (one["way"] != "ulysses")
        again = one["mask"] not in ("cap", "all")  # a CPU's soft caps are computed with copies of keys, which are kept
        # Gradients of groups of heads are exchanged too.
        exchanges = 4 * (both or one["way"] == "ulysses") + groups
        expected = {"gather": groups * (1 + again), "exchange": exchanges}
        assert counts[0] == {name: count for name, count in expected.items() if count}, one


def test_compiled_layers_share_sequences_in_one_graph(results):
    """With everything saved and recomputed: as exact, without a break."""
    found = results["compiled"]
    ways = "allgather zigzag", "allgather blocks", "ulysses"
    assert [(one["mode"], one["way"]) for one in found] == list(itertools.product(("none", "full"), ways))
    for one in found:
        assert one["error"] < 1e-14 and one["graphs"] == 1 and one["breaks"] == 0, one


def test_compiled_layers_that_are_recomputed_keep_their_input_alone(results):
    """And the cosines and sines of positions, which all layers share. torch 2.11 keeps what is communicated within an
    autograd.Function, unless a policy says otherwise."""
    for one in results["compiled"]:
        if one["mode"] == "full":
            first, *rotations = one["kept"]
            assert first == one["input"] and len(rotations) == 2, one


def test_what_arrives_is_what_the_plan_says(results):
    """On the rank that most comes to, forward and backward, in every way, with and without recompute: it repeats all
    that is sent in the forward pass, and keys are gathered again in any case."""
    for one in [*results["ways"], *results["recompute"].values()]:
        most, said = max(one["received"]), one["formula"]
        assert most == said, one
    found = {name: max(one["received"]) for name, one in results["recompute"].items()}
    for mode in ("full", "selective"):
        assert found[f"allgather zigzag {mode} 2"] == found["allgather zigzag none 2"]
        assert found[f"ulysses {mode} 2"] == 1.5 * found["ulysses none 2"]


def gathering(results):
    return {name: one for name, one in results["recompute"].items() if "allgather" in name}


def test_keys_are_gathered_twice_whatever_is_recomputed(results):
    """Two layers. Backward gathers again, or the layer's recompute does; groups of heads change no bit."""
    found = {name: one for name, one in gathering(results).items() if "kept" not in name}
    assert len({one["digest"] for one in found.values()}) == 1 and len(found) == 5
    for name, one in found.items():
        groups = int(name.split()[-1])
        assert one["counts"] == {"gather": 2 * 2 * groups, "exchange": 2 * groups}, name


def test_keys_do_not_stay_until_backward(results):
    kept = {name: one["kept"] for name, one in gathering(results).items()}
    assert kept.pop("allgather zigzag kept 2") == 2 * 2 and set(kept.values()) == {0}


def test_gradients_of_two_groups_of_heads_arrive_at_a_time(results):
    """One travels behind attention of the group before; more would take the memory of all."""
    for name, one in gathering(results).items():
        assert one["arriving"] == min(2, int(name.split()[-1])), name
