"""Texts that a run's files hold are shown whatever they are: by pages, plots, tables and on consoles."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.runs import write_run, write_search

from trainer.cluster import job
from trainer.commands import diagnose, plot, report
from trainer.config import ConfigError
from trainer.observe import metrics
from trainer.pages.page import content_of, data_of, open_folders, render_page
from trainer.sweep import results
from trainer.util.lines import label_runs
from trainer.util.reading import SURROGATES, Malformed, read_json, read_yaml

FILES = ("status.json", "starts.jsonl", "metrics.jsonl", "accounts.jsonl", "diagnosis.json")
ODD = [
    "\ud800",
    "\udfff\ud800",
    "\0",
    "\x1b[2J",
    "\u202e\u2066",
    "$\\frac{$",
    "$a$ $",
    "</script><script>",
    "_",
    "\n",
    "",
]
TEXT = st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_categories=()), max_size=40))
ANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def with_texts(value: Any, text: str, seed: int, share: float = 0.3) -> Any:
    """A JSON value, some texts of which, keys included, are another one."""
    chosen = random.Random(seed)
    if isinstance(value, dict):
        inner = {key: with_texts(item, text, seed + place, share) for place, (key, item) in enumerate(value.items())}
        return {(text if chosen.random() < share / 10 else key): item for key, item in inner.items()}
    if isinstance(value, list):
        return [with_texts(item, text, seed + place, share) for place, item in enumerate(value)]
    return text if isinstance(value, str) and chosen.random() < share else value


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A run and a search, as they are left."""
    folder = tmp_path_factory.mktemp("good")
    write_run(folder / "run", 4)
    write_search(folder / "search")
    return folder


def damage(good: Path, folder: Path, files: tuple[str, ...], text: str, seed: int) -> None:
    """Writes the files of a good folder with other texts, as some JSON writers do: with and without escapes."""
    for place, name in enumerate(files):
        lines = [with_texts(json.loads(line), text, seed + place) for line in (good / name).read_text().splitlines()]
        ascii_only = bool(seed % 2) or SURROGATES.search(text) is not None
        content = "".join(json.dumps(line, ensure_ascii=ascii_only) + "\n" for line in lines)
        (folder / name).write_text(content, encoding="utf-8")


class Tags(HTMLParser):
    """The scripts of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.scripts = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.scripts += tag == "script"


@given(text=TEXT, seed=st.integers(0, 10**6))
@example(text="\ud800", seed=1)
@ANY
def test_a_page_survives_any_text(good, tmp_path_factory, text, seed):
    folder = tmp_path_factory.mktemp("damaged")
    write_run(folder / "run", 4)
    damage(good / "run", folder / "run", FILES, text, seed)
    write_search(folder / "search")
    damage(good / "search", folder / "search", ("search.json", "trials.jsonl"), text, seed)
    for one in (folder / "run", folder / "search"):
        shown = open_folders([one])
        page = render_page(shown)
        assert Tags(page).scripts == Tags(render_page(open_folders([good / one.name]))).scripts
        json.dumps({"content": content_of(shown, data_of(shown)), "data": data_of(shown)}, allow_nan=False).encode()
        page.encode()
        report.main([str(one), f"out={folder / 'page.html'}"])
    status = {"status": text, "step": 1, "steps": 2, "reason": text}
    (folder / "run" / "status.json").write_text(json.dumps(status))
    assert report.main([str(folder / "run")]) == 0


@given(text=TEXT, seed=st.integers(0, 10**6))
@example(text="\ud800", seed=1)
@ANY
def test_commands_print_any_text(good, tmp_path_factory, text, seed, monkeypatch_module):
    folder = tmp_path_factory.mktemp("printed")
    write_run(folder / "run", 4)
    damage(good / "run", folder / "run", FILES, text, seed)
    sweep = folder / "sweep"
    sweep.mkdir()
    damage(good / "search", sweep, ("trials.jsonl",), text, seed)
    (sweep / "trials.jsonl").rename(sweep / "results.jsonl")
    for encoding in ("utf-8", "ascii"):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch_module.setattr(sys, "stdout", stdout)
        monkeypatch_module.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace"))
        try:
            assert diagnose.main([str(folder / "run")]) in (0, 2)
            with contextlib.suppress(ConfigError):  # a key is another one
                results.print_results(results.SweepResults(sweep).lines.values(), "loss")
            print(job.end_job(folder / "run", "17", 1, False, "RUNNING", 3))
            stdout.flush()
        finally:
            monkeypatch_module.undo()
        printed = stdout.buffer.getvalue().decode(encoding)
        assert not {character for character in printed if not character.isprintable()} - {"\n"}


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("text", ODD)
def test_a_plot_survives_any_text(text, tmp_path, capsys):
    folder = tmp_path / ("run" + text.replace("\0", "").replace("/", "").encode("utf-8", "replace").decode())
    write_run(folder, 4, **{f"loss/{text}": 1.0, f"eval_loss/{text}": 2.0})
    assert plot.main([str(folder)]) == 0
    assert (folder / "schedule.png").stat().st_size > 10_000


def test_a_folder_whose_name_is_no_text_is_shown(tmp_path, capsys):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff\xfe-$x$-\x1b[2J"))
    write_run(tmp_path / "run", 4).rename(folder)
    assert label_runs([folder]) == ["run-  -$x$- [2J"]
    assert report.main([str(folder)]) == 0
    assert plot.main([str(folder)]) == 0
    assert diagnose.main([str(folder)]) == 0


@given(
    value=st.recursive(TEXT | st.none() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner))
)
@settings(max_examples=200, deadline=None)
def test_what_is_parsed_can_be_written(value, tmp_path_factory):
    path = tmp_path_factory.mktemp("parsed") / "value.json"
    path.write_text(json.dumps([value]))
    json.dumps(read_json(path, list, "no"), ensure_ascii=False).encode()
    with contextlib.suppress(
        Malformed
    ):  # PyYAML's parser in C refuses halves of characters, the one in Python does not
        json.dumps(read_yaml(path), ensure_ascii=False).encode()
    plain = json.loads(json.dumps([value]))
    if not SURROGATES.search(json.dumps(plain, ensure_ascii=False)):
        assert read_json(path, list, "no") == plain
    path.write_bytes(b'["\xed\xa0\x80"]')
    with pytest.raises(Malformed):
        read_json(path, list, "no")


def test_a_line_of_a_run_is_printed_where_its_text_cannot_be_encoded(tmp_path):
    """`trainer` on a terminal that knows ASCII alone, of a run whose sources have other names."""
    write_run(tmp_path / "run-ä-€", 4)
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "report", str(tmp_path / "run-ä-€")],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(metrics.__file__).parents[2])},
        capture_output=True,
    )
    assert done.returncode == 0 and b"\\u20ac" in done.stdout, done.stderr
