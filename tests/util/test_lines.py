"""Files of lines: what is read of them, what an append leaves, and which files are not appended to."""

from __future__ import annotations

import os
import resource

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.config import ConfigError
from trainer.util import lines
from trainer.util.lines import LineFile, count_lines, read_lines
from trainer.util.reading import Malformed

CONTENT = st.binary(max_size=40).map(lambda content: content.replace(b"\x07", b"\n").replace(b"a", b"\n"))
anything = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(content=CONTENT, chunk=st.integers(1, 9))
@anything
def test_lines_are_those_that_have_an_end_in_both_directions(tmp_path, content, chunk):
    path, whole = tmp_path / "lines", content.split(b"\n")[:-1]
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK", chunk)
        assert [*read_lines(path)] == whole and count_lines(path) == len(whole)
        assert [*read_lines(path, rest=True)] == [*whole, *filter(None, [content.split(b"\n")[-1]])]
        with LineFile(path) as file:
            found = [*file.backwards()]
        assert [text for _, text in found] == whole[::-1]
        assert all(content[place : place + len(text) + 1] == text + b"\n" for place, text in found)
    assert path.read_bytes() == b"".join(line + b"\n" for line in whole)  # half a line is dropped


@given(content=CONTENT, other=CONTENT, chunk=st.integers(1, 9), data=st.data())
@anything
def test_lines_of_another_file_are_appended_from_any_place(tmp_path, content, other, chunk, data):
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(other)
    with pytest.MonkeyPatch.context() as patch, LineFile(tmp_path / "a") as file, LineFile(tmp_path / "b") as source:
        patch.setattr(lines, "CHUNK", chunk)
        start = data.draw(st.integers(0, source.size))
        file.append_from(source, start)
        assert file.ends_with(source, start, source.size)
        for begin in range(source.size + 1):
            ours = file.size >= source.size - begin and (tmp_path / "a").read_bytes().endswith(
                (tmp_path / "b").read_bytes()[begin:]
            )
            assert file.ends_with(source, begin, source.size) == ours
    kept = [text[: text.rfind(b"\n") + 1] for text in (content, other)]
    assert (tmp_path / "a").read_bytes() == kept[0] + kept[1][start:]


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LineFile(tmp_path / "a") as file, LineFile(tmp_path / "b") as source:
        file.append("first\n")
        source.append("second, longer than ten bytes\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            for append in (lambda: file.append("second\n"), lambda: file.append_from(source, 0)):
                with pytest.raises(OSError):
                    append()
                assert (tmp_path / "a").read_bytes() == b"first\n"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LIMIT", 100)
    monkeypatch.setattr(lines, "CHUNK", 32)
    (tmp_path / "lines").write_bytes(b"short\n" + b"x" * 500 + b"\n")
    for read in (lambda: [*read_lines(tmp_path / "lines")], lambda: [*LineFile(tmp_path / "lines").backwards()]):
        with pytest.raises(Malformed, match="line of more than 100 bytes"):
            read()


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "pipe"])
def test_only_a_file_with_one_name_is_appended_to(tmp_path, kind):
    outside, path = tmp_path / "outside", tmp_path / "console.log"
    outside.write_text("precious")
    make = {
        "link": lambda: path.symlink_to(outside),
        "dangling": lambda: path.symlink_to(tmp_path / "nowhere"),
        "hard link": lambda: os.link(outside, path),
        "pipe": lambda: os.mkfifo(path),
    }
    make[kind]()
    with pytest.raises(ConfigError, match=r"console\.log is .*(link|no regular file)"):
        LineFile(path)
    assert outside.read_text() == "precious" and not (tmp_path / "nowhere").exists()


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Malformed, match="not a regular file"):
        next(read_lines(tmp_path / "pipe"))
