"""Sequences that several ranks share: the numbers of one process, and what each rank sends and keeps for it."""

from __future__ import annotations

import json

import pytest
from support.launch import launch


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("context") / "results.json"
    launch("context.py", 4, out, timeout=400, forks=True)
    return json.loads(out.read_text())


def test_every_way_gives_the_numbers_of_one_process(results):
    """Loss and every gradient, in fp64: all masks and numbers of key-value heads, targets on one rank alone."""
    ways = results["ways"]
    assert {(one["way"], one["mask"], one["kv_heads"], one["size"]) for one in ways} >= {
        (way, mask, heads, size)
        for way in ("gather zigzag", "gather contiguous", "gather blocks", "heads")
        for mask in ("causal", "documents", "window", "longer window", "cap", "all")
        for heads, size in ((1, 4), (2, 4), (4, 4), (2, 2))
    }
    assert not [one for one in ways if not one["error"] < 1e-14]


def test_every_rank_takes_part_in_every_collective(results):
    """Forward and backward: a rank that left one out, for having nothing to send or to use, would let the others
    wait."""
    for one in results["ways"]:
        counts = one["counts"]
        assert all(count == counts[0] for count in counts), one
        both, fetched = "both" in one["way"], fetches(one)
        groups = min(2, one["kv_heads"] // (1 + both) or 1) * (one["way"] != "heads" and not fetched)
        again = one["mask"] not in ("cap", "all")  # a CPU's soft caps are computed with copies of keys, which are kept
        exchanges = 4 * (both or one["way"] == "heads") + 2 * fetched
        expected = {"gather": groups * (1 + again), "scatter_sum": groups, "exchange": exchanges}
        assert counts[0] == {name: count for name, count in expected.items() if count}, one


def fetches(one):
    """Whether layers of the model fetch the keys before a run. Of 32 tokens, runs have 4 in zigzag order on 4 ranks,
    and 8 where two gather: a window of 5, of 4 keys before a query, fits all."""
    return (
        one["mask"] == "window"
        and ("halo" in one["way"] or "both" in one["way"])
        or ("both" in one["way"] and one["mask"] in ("longer window", "all"))
    )


def test_what_arrives_is_what_the_plan_says(results):
    """On the rank that most comes to, forward and backward, in every way, with and without recompute: it repeats all
    that is sent in the forward pass, and keys are gathered again in any case."""
    for one in [*results["ways"], *results["recompute"].values()]:
        # Of two ranks in contiguous order one fetches keys, and the other their gradients.
        apart = one.get("way") == "halo contiguous" and one["size"] == 2
        assert max(one["received"]) * (1 + apart) == one["formula"], one
    found = {name: max(one["received"]) for name, one in results["recompute"].items()}
    for mode in ("full", "selective", "modules"):
        assert found[f"gather zigzag {mode} 2"] == found["gather zigzag none 2"]
        for way in ("heads", "halo zigzag"):
            assert found[f"{way} {mode} 2"] == 1.5 * found[f"{way} none 2"]


def gathering(results):
    return {name: one for name, one in results["recompute"].items() if "gather" in name}


def test_keys_are_gathered_twice_whatever_is_recomputed(results):
    """Two layers. Backward gathers again, or the layer's recompute does; groups of heads change no bit."""
    found = {name: one for name, one in gathering(results).items() if "kept" not in name}
    assert len({one["digest"] for one in found.values()}) == 1 and len(found) == 6
    for name, one in found.items():
        groups = int(name.split()[-1])
        assert one["counts"] == {"gather": 2 * 2 * groups, "scatter_sum": 2 * groups}, name


def test_keys_do_not_stay_until_backward(results):
    kept = {name: one["kept"] for name, one in gathering(results).items()}
    assert kept.pop("gather zigzag kept 2") == 2 * 2 and set(kept.values()) == {0}


def test_ranks_that_share_a_cache_compute_the_logits_of_one(results):
    """Each holds every c-th key of a sequence, and the parts of attention are brought together: in fp64, with windows
    and soft caps, where ranks see no key, and beyond a block of slots."""
    found = results["generated"]
    assert {(one["mask"], one["size"]) for one in found} == {
        (m, s) for m in ("causal", "window", "cap") for s in (1, 2, 4)
    }
    for one in found:
        assert one["error"] < 1e-13 and one["slots"] == [-(-67 // one["size"])] * 3, one


def test_the_benchmark_of_shared_keys_compares_equal_results(results):
    """On CPUs a gather beside one rank with all keys; both attend to the same."""
    assert [(one["tokens"], one["ranks"]) for one in results["benched"]] == [(5, 4), (40, 4)]
    for one in results["benched"]:
        took, ratios = one["microseconds"], one["ratios"]
        assert one["errors"]["gather"] < 1e-5 and took.keys() == {"alone", "gather", "whole"}
        assert ratios == pytest.approx({name: took["gather"] / took[name] for name in ("alone", "whole")})
        read = 2 * 4 * 2 * 2 * one["tokens"] * 16
        assert one["bound"] == pytest.approx(read / one["bandwidth"] / 1e3)
