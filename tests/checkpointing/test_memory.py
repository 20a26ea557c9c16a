"""Checkpoints in host memory: which rank keeps whose copy, which checkpoint is whole, and what lost nodes leave."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launch import launch

from trainer.checkpointing.memory import MemoryCheckpoint, choose_newest, make_private_folder, pair_ranks


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_copies_lie_on_the_next_node_and_are_spread_evenly(sizes):
    ranks = iter(range(sum(sizes)))
    nodes = [[next(ranks) for _ in range(size)] for size in sizes]
    pairs = pair_ranks(nodes)
    assert pairs.keys() == (set(range(sum(sizes))) if len(nodes) > 1 else set())
    for number, node in enumerate(nodes):
        targets = Counter(pairs[rank] for rank in node if pairs)
        following = nodes[(number + 1) % len(nodes)]
        assert set(targets) <= set(following)
        assert not targets or max(targets.values()) <= -(-len(node) // len(following))


@given(st.data())
def test_the_newest_checkpoint_that_the_nodes_have_together_is_chosen(data):
    files = frozenset({"a", "b", "c"})
    steps = data.draw(st.lists(st.integers(1, 5), max_size=8))
    listings = [
        MemoryCheckpoint(
            step,
            data.draw(st.sampled_from("xy")),
            files,
            frozenset(data.draw(st.sets(st.sampled_from("abc")))),
            frozenset(),
        )
        for step in steps
    ]
    whole = [
        key[0]
        for key in {(listing.step, listing.manifest) for listing in listings}
        if set().union(*(listing.present for listing in listings if listing[:2] == key)) == files
    ]
    chosen = choose_newest(listings)
    assert (chosen.step if chosen else None) == max(whole, default=None)
    assert chosen is None or chosen.present == files


def test_lost_nodes_and_files_are_made_up_for(tmp_path):
    launch("memory_checkpoints.py", 5, tmp_path)


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    for make in (lambda path: path.mkdir(mode=0o777), lambda path: path.symlink_to(tmp_path)):
        folder = tmp_path / f"taken{len(list(tmp_path.iterdir()))}"
        make(folder)
        if not folder.is_symlink():
            os.chmod(folder, 0o777)
        with pytest.raises(PermissionError, match="somebody else"):
            make_private_folder(folder)
