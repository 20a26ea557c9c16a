"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import threading

import pytest

from trainer.util.reading import replace_file, write_atomic


def test_a_written_file_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "status.json"
    write_atomic(path, "ä\n")
    write_atomic(path, b"second\n")
    assert path.read_bytes() == b"second\n" and os.listdir(tmp_path) == ["status.json"]


def test_a_write_that_fails_leaves_the_old_content_and_nothing_beside_it(tmp_path):
    path = tmp_path / "status.json"
    path.write_text("old")
    with pytest.raises(KeyError), replace_file(path) as part:
        with open(part, "w") as file:
            file.write("half of the n")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["status.json"]


def test_readers_beside_several_writers_never_see_a_part(tmp_path):
    path, texts = tmp_path / "report.txt", [letter * 100_000 for letter in "abcd"]
    write_atomic(path, texts[0])
    threads = [
        threading.Thread(target=lambda text=text: [write_atomic(path, text) for _ in range(20)]) for text in texts
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_text() in texts
    for thread in threads:
        thread.join()
    assert path.read_text() in texts and os.listdir(tmp_path) == ["report.txt"]
