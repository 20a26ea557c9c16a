"""The ports at which processes meet that are started later."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from trainer.cluster import node


def test_none_is_among_those_that_the_system_hands_out():
    low, high = (int(bound) for bound in node.HANDED_OUT.read_text().split())
    found = node.free_ports(200)
    assert len(set(found)) == 200 and not [port for port in found if low <= port <= high or port < node.LOWEST]
    printed = subprocess.check_output([sys.executable, "-m", "trainer.cluster.node"], text=True)
    assert not low <= int(printed) <= high


def test_one_at_which_somebody_listens_is_left_out(tmp_path, monkeypatch):
    """Three ports are not handed out here."""
    with socket.socket() as stranger:
        stranger.bind(("", *node.free_ports()))
        stranger.listen()
        taken = stranger.getsockname()[1]
        monkeypatch.setattr(node, "LOWEST", taken - 1)
        monkeypatch.setattr(node, "HANDED_OUT", tmp_path / "range")
        (tmp_path / "range").write_text(f"{taken + 2}\t65535\n")
        assert taken not in node.free_ports()
        with pytest.raises(OSError, match="of 3 ports are free, and 3 are wanted"):
            node.free_ports(3)


@pytest.mark.parametrize("text", ["1024 65535", "", None])
def test_where_all_are_handed_out_or_nobody_knows_there_still_is_one(tmp_path, monkeypatch, text):
    monkeypatch.setattr(node, "HANDED_OUT", tmp_path / "range")
    if text is not None:
        (tmp_path / "range").write_text(text)
    assert len(set(node.free_ports(3))) == 3
