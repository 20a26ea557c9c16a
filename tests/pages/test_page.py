"""The page of runs: its numbers are those of the files, what a run does not have is not there, and texts stay texts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import DIAGNOSIS, account, start, step_line, write_metrics, write_run, write_search

from trainer.commands import report
from trainer.config import ConfigError
from trainer.config.fields import CONFIGS
from trainer.observe import metrics
from trainer.observe.diagnose_run import diagnose_run
from trainer.pages.folder import MetricCurves, MetricPoints, thin_curve
from trainer.pages.page import (
    FILES,
    LIBRARY,
    NOT_DRAWN,
    SCRIPTS,
    arrange_panels,
    open_folders,
    read_assets,
    render_page,
)
from trainer.pages.sections import run_numbers
from trainer.pages.sweeps import LINE
from trainer.util import reading
from trainer.util.tables import format_duration, format_percent

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"{{ 7919 * 7907 }}"


class Page(HTMLParser):
    """What a browser finds: elements, the text outside of scripts and styles, the data, and the sections."""

    VOID = {"meta", "link", "input", "img", "br", "hr"}

    def __init__(self, text: str):
        super().__init__()
        self.source, self.tags, self.texts, self.scripts, self.open = text, [], [], [], []
        self.feed(text)
        self.text = " ".join(" ".join(self.texts).split())
        self.data = json.loads(next(content for kind, content in self.scripts if kind == "application/json"))
        self.sections = [given["id"] for tag, given in self.tags if tag == "section"]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attributes).get("type"), ""))

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag, tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + text)
        elif self.open and self.open[-1] != "style":
            self.texts.append(text)

    def values(self, name: str, run: int = 0) -> dict[float, float | None]:
        """By step, the values of a curve."""
        given = self.data["runs"][run]
        (series,) = (one for one in given["series"] if one["name"] == name)
        return {given["x"]["step"][at]: value for at, value in zip(series["i"], series["v"], strict=True)}


def page_of(*folders: Path, hardware: str = "") -> Page:
    return Page(render_page(open_folders(folders, hardware)))


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", 60)


def test_numbers_are_those_of_the_files(rich):
    page, lines = page_of(rich), metrics.read_metrics(rich)
    for name in (
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_second",
        "step_seconds_p50",
        "memory_gib",
        "bubble",
        "eval_loss",
    ):
        logged = {line["step"]: line[name] for line in lines if name in line}
        found = page.values(name)
        assert {step: value for step, value in found.items() if value is not None} == {
            step: value for step, value in logged.items() if value is not None
        }
    x = page.data["runs"][0]["x"]
    kinds = {line["step"]: (line["tokens"], (line["time"] - lines[0]["time"]) / 3600) for line in lines}
    assert {step: (tokens, hours) for step, tokens, hours in zip(x["step"], x["tokens"], x["hours"])} == kinds
    last = [line for line in lines if "loss" in line][-1]
    held = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert f"loss {last['loss']:.4f}" in page.text and f"{held[-1]:.4f} best {min(held):.4f}" in page.text
    assert "MFU 31.0%" in page.text and "41.5 GiB" in page.text and "step 60 of 60" in page.text
    timelines = page.data["runs"][0]["timelines"]
    for timeline in timelines:
        file = json.loads((rich / "schedule" / f"{timeline['name']}.json").read_text())
        assert timeline["makespan"] == file["makespan"] and timeline["bubble"] == file["bubble"]
        drawn = [[(f"{one[5]}{one[0]}{one[2]}", one[3], one[4]) for one in rank] for rank in timeline["ranks"]]
        assert drawn == [[(one["action"], one["start"], one["end"]) for one in rank] for rank in file["ranks"]]
    shares = account(0).terms["products"] / account(0).seconds
    assert f"products {shares:.1%}" in page.text and "communication, data: waiting 3.0%" in page.text
    kernels = {one["name"]: one for one in page.data["runs"][0]["roofline"]["kernels"]}
    gemm = account(0).kernels[0]
    assert kernels[gemm.name]["rate"] == gemm.flops / gemm.seconds
    assert kernels[gemm.name]["intensity"] == gemm.flops / gemm.bytes
    assert page.data["runs"][0]["roofline"]["peak"] == 989.4e12


def test_what_bounds_the_run_stands_first_and_details_last(rich):
    page = page_of(rich)
    assert page.sections == ["bound", "account", "curves", "schedule", "kernels", "memory", "plan", "starts"]
    assert DIAGNOSIS["verdict"]["text"] in page.text
    for finding in DIAGNOSIS["findings"]:
        assert finding["title"] in page.text and finding["overrides"][0]["text"] in page.text
    assert "12.0% exposed communication of axis data 440 ms a step without it try" in page.text, "one share"
    assert "lr.peak 0.001 → 0.002" in page.text and "2 logged steps were trained again" in page.text
    assert "step 41: no update, the gradient of model.head.weight" in page.text and "step  1/60" not in page.source


def test_accounts_that_nobody_has_diagnosed_are_diagnosed(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    (folder / "diagnosis.json").unlink()
    (folder / "config.yaml").write_text("precision: {compute: bf16}")
    page = page_of(folder)
    assert page.sections[0] == "bound" and " bounds the run (" in page.text
    assert page.data["runs"][0]["roofline"]["peak"] == 989.4e12, "of an H200"
    probed = tmp_path / "probed.yaml"
    probed.write_text((CONFIGS / "hardware/h200.yaml").read_text().replace("bandwidth: 4800", "bandwidth: 4321"))
    (folder / "diagnosis.json").write_text(json.dumps(DIAGNOSIS))
    roofline = page_of(folder, hardware=str(probed)).data["runs"][0]["roofline"]
    assert roofline["bandwidth"] == 4321e9, "what a probe has measured, and not what was diagnosed before"
    os.utime(folder / "diagnosis.json", (1, 1))
    assert DIAGNOSIS["verdict"]["text"] not in page_of(folder).text, "which is older than the accounts"


def test_what_a_run_does_not_have_is_not_on_its_page(tmp_path):
    write_metrics(tmp_path / "bare", 3)
    page = page_of(tmp_path / "bare")
    assert page.sections == ["curves"]
    shown = [name for panel in page.data["panels"] for name in panel["names"]]
    assert "straggler" not in shown and "skipped" not in shown, "only nulls, and always zero"
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "status.json").write_text('{"status": "failed", "step": 0, "steps": 9, "reason": "OOM: no"}')
    page = page_of(tmp_path / "failed")
    assert page.sections == [] and "failed OOM: no" in page.text and "no step done, of 9" in page.text


def test_how_a_run_ended_stands_at_the_top(tmp_path):
    folder, reason = write_run(tmp_path / "run", 3), "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    for status, told in {
        "failed": f"out of memory tiny (llama) · 5.77M parameters · 4 x NVIDIA H200 · dp2 x pp2, ZeRO-1 {reason}",
        "stopped": "Stopped by a signal or at its hours; the same command goes on from its newest checkpoint",
    }.items():
        known = {"status": status, "step": 3, "steps": 9, "reason": reason if status == "failed" else None}
        (folder / "status.json").write_text(json.dumps(known))
        page = page_of(folder)
        assert told in page.text[: page.text.index("step 3 of 9")]
        compared = page_of(folder, write_run(tmp_path / "other", 3))
        assert (f"run: {reason}" in compared.text) == (status == "failed")


def test_texts_of_a_run_are_never_code(tmp_path):
    folder = write_run(tmp_path / "run", 5, **{f"user/{HOSTILE}": 1.5, "__proto__": 2.0, "hardware/constructor": 3.0})
    first = start(name=HOSTILE) | {"command": HOSTILE, "hosts": {HOSTILE: 1}, "versions": {HOSTILE: HOSTILE}}
    first |= {
        "table": {HOSTILE: [[HOSTILE, HOSTILE]], "memory": [[HOSTILE, HOSTILE]]},
        "changed": {HOSTILE: [HOSTILE, 1]},
    }
    first["settings"] |= {HOSTILE: {HOSTILE: HOSTILE}}
    (folder / "starts.jsonl").write_text(json.dumps(first) + "\n")
    (folder / "status.json").write_text(json.dumps({"status": HOSTILE, "step": 1, "steps": 2, "reason": HOSTILE}))
    (folder / "console.log").write_text(f"2026-11-22 10:00:21  {HOSTILE}\n")
    kernel = json.loads(account(0).dumps())
    kernel["kernels"][0]["name"] = kernel["device"] = HOSTILE
    kernel["kernels"][0]["kind"], kernel["place"] = '"><script>alert(3)</script>', {HOSTILE: 1}
    (folder / "accounts.jsonl").write_text(json.dumps(kernel) + "\n")
    told = json.loads(json.dumps(DIAGNOSIS).replace("communication bounds", json.dumps(HOSTILE)[1:-1]))
    told["findings"][0] |= {"title": HOSTILE, "evidence": [HOSTILE], "advice": HOSTILE, "layer": HOSTILE}
    (folder / "diagnosis.json").write_text(json.dumps(told))
    (folder / "earlier" / "1").mkdir(parents=True)
    search = write_search(tmp_path / "tune", HOSTILE, best=HOSTILE, command=HOSTILE, ended=HOSTILE, machine=HOSTILE)
    (search / "config/best.yaml").write_text(HOSTILE)
    for page in (page_of(folder), page_of(folder, write_run(tmp_path / "<b>&amp;", 5)), page_of(folder, search)):
        assert [kind for kind, _ in page.scripts] == ["application/json", None, None]
        scripts = [text for _, text in page.scripts[1:]]
        assert scripts == [read_assets(*names) for names in SCRIPTS], "the library, our script, and no other"
        assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "base", "form")]
        assert not [name for _, given in page.tags for name in given if name.startswith("on")]
        assert not [given for _, given in page.tags if "src" in given or "http" in (given.get("href") or "")]
        names = {one["name"] for one in page.data["runs"][0]["series"]}
        assert {f"user/{HOSTILE}", "__proto__", "hardware/constructor"} <= names, "as text they are there"
        assert page.text.count("{{ 7919 * 7907 }}") >= 10 and "62615533" not in re.findall(r"\d+", page.text)


def test_the_policy_lets_the_pages_own_scripts_run_and_nothing_else(rich):
    page = page_of(rich)
    (policy,) = (given["content"] for tag, given in page.tags if given.get("http-equiv") == "Content-Security-Policy")
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for _, text in page.scripts[1:]]
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert f"script-src {scripts};" in policy and policy.startswith("default-src 'none'")
    assert "connect-src" not in policy and "http:" not in policy and "https:" not in policy
    written = "".join(path.read_text() for path in FILES.glob("templates/*"))
    assert not re.search(r"https?://|(?:src|href)=\"?//|@import|url\(", written)
    library = "".join(text for _, text in page.scripts[1:2])
    assert not re.search(r"(?:src|href)=|@import|url\(|fetch\(|XMLHttpRequest|sourceMappingURL|</script|<!--", library)


def test_the_library_is_the_one_that_is_named():
    """Its version is in its line of the README, and its licence is beside it."""
    named = dict(re.findall(r"- `(.+?)`: (.+?) \(", (FILES / "vendor/README.md").read_text()))
    assert {f"vendor/{name}" for name in named} == set(LIBRARY)
    for name, version in named.items():
        assert f"{version.replace(' ', ' v')}\n" in (FILES / "vendor" / name).read_text()[:200]
        licence = (FILES / "vendor" / f"LICENSE-{version.split()[0].lower()}.txt").read_text()
        assert "MIT License" in licence and "Permission is hereby granted" in licence


def test_settings_that_another_version_does_not_have_are_folded(tmp_path):
    """Unless the runs that have one differ in it."""
    runs = [write_run(tmp_path / name, 3) for name in ("new", "newer", "old")]
    for place, run in enumerate(runs):
        first = json.loads((run / "starts.jsonl").read_text().splitlines()[-1])
        if place < 2:
            first["settings"]["guard"] = {"slow_factor": 1.25, "nothing": None, "slow_lines": 20 + place}
        (run / "starts.jsonl").write_text(json.dumps(first) + "\n")
    page = page_of(*runs)
    differ = page.source[page.source.index('id="differ"') : page.source.index('id="bound"')]
    shown, folded = (re.findall(r"<td[^>]*>([^<]*)</td>", part) for part in differ.split('id="lacking"'))
    assert shown == ["guard.slow_lines", "20", "21", "–"]
    assert folded == ["guard.slow_factor", "1.25", "1.25", "–", "guard.nothing", "null", "null", "–"]
    assert "2 settings that not all runs have" in page.text


def test_runs_are_compared(tmp_path):
    slow, fast = write_run(tmp_path / "slow", 40), write_run(tmp_path / "fast", 30, speed=2.0)
    page = page_of(slow, fast)
    assert page.sections[:4] == ["differ", "bound", "account", "curves"]
    assert [run["label"] for run in page.data["runs"]] == ["slow", "fast"]
    for place, folder in enumerate((slow, fast)):
        assert page.values("loss", place) == {
            line["step"]: line["loss"] for line in metrics.read_metrics(folder) if "loss" in line
        }
    differ = page.source[page.source.index('id="differ"') : page.source.index('id="bound"')]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", differ)
    assert cells == ["lr.peak", "0.002", "0.001"], "names and folders of runs differ anyway"
    assert "lacking" not in page.source
    for name in ("bound", "schedule", "kernels", "plan", "starts"):  # what is told run by run is folded, and named
        for place in (0, 1):
            assert ("details", {"class": "one", "id": f"{name}-run-{place}"}) in page.tags
    memory = page.source[page.source.index('id="memory"') : page.source.index('id="plan"')]
    assert memory.count("<table>") == 2 and memory.count("11.0 MiB") == 2, "states and peak, a column for each"
    assert memory.count("115 MiB") == 2 and memory.count(">measured</td>") == 1 and memory.count("41.5 GiB") == 2
    single = page_of(slow)
    assert not [given for tag, given in single.tags if given.get("class") == "one"]
    best = re.findall(r'<td class="number good">([^<]*)</td>', page.source)
    assert (
        f"{json.loads((slow / 'metrics.jsonl').read_text().splitlines()[-2])['loss']:.4f}" in best and "250 ms" in best
    )
    lengths = [float(width) for width in re.findall(r'class="bar"[^>]*style="width: ([\d.]+)%"', page.source)]
    assert lengths == [100.0, 50.0], "bars are as long as the steps"


def test_a_search_is_shown_by_its_plans_and_trials(tmp_path):
    folder = write_search(tmp_path / "tune")
    page = page_of(folder)
    assert page.sections[:5] == ["best", "foretold", "trials", "compared", "curves"]
    assert [run["label"] for run in page.data["runs"]] == ["dp2_none", "tp2_none"], "trials that have written"
    lines = {line["trial"]: line for line in map(json.loads, (folder / "trials.jsonl").read_text().splitlines())}
    (points,) = page.data["searches"]
    assert [(one["plan"], one["measured"]) for one in points[:6]] == [
        (name, line["step_seconds_p50"]) for name, line in lines.items()
    ]
    assert [one["status"] for one in points[6:]] == [None, None] and points[6]["high"] == 0.9 * 1.25
    assert [one["plan"] for one in points if one["front"]] == ["dp2_none", "tp2_none"], "dp2_full is slower, and larger"
    shown = page.source[page.source.index('id="trials"') : page.source.index('id="compared"')]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in shown.split("<tr>")[2:]]
    assert [row[2] for row in rows] == ["done", "done", "done", "out of memory", "failed", "timeout"]
    assert rows[0][3:] == ["500 ms", "400 ms", "400 ms", "4.10k", "30.0 GiB", "35.0 GiB", ""]
    assert rows[3][3:] == [
        "–",
        "500 ms",
        "450 ms",
        "–",
        "–",
        "35.0 GiB",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
    ]
    assert "trainer train --gpus 2 +config=debug parallel.zero.stage=1" in page.text and "zero: {stage: 1}" in page.text
    assert "6 trials of 8 plans · budget 6 · 2 x NVIDIA H200" in page.text and "step time 500 ms" in page.text


def test_a_search_that_has_measured_nothing_says_so(tmp_path):
    folder = write_search(tmp_path / "tune", best=None, command=None, ended=None)
    (folder / "trials.jsonl").unlink()
    page = page_of(folder)
    assert page.sections[0] == "foretold" and "the search goes on" in page.text and "zero: {stage: 1}" not in page.text


@given(st.lists(st.none() | st.floats(-1e9, 1e9), min_size=1, max_size=400), st.integers(8, 60))
def test_fewer_points_keep_the_extremes_and_invent_none(values, most):
    points = MetricPoints()
    for line, value in enumerate(values):
        points.add(line, value)
    lines, drawn = thin_curve(points, most)
    assert len(lines) <= max(most, 2) and list(lines) == sorted(set(lines.tolist()))
    known = {line: value for line, value in enumerate(values) if value is not None}
    found = {line: value for line, value in zip(lines.tolist(), drawn.tolist()) if math.isfinite(value)}
    assert found.items() <= known.items()
    if known:
        assert {min(known.values()), max(known.values())} <= set(found.values())


def test_half_a_line_and_damaged_lines_are_left_out(tmp_path):
    folder = tmp_path / "run"
    write_metrics(folder, 2)
    curves, path = MetricCurves(), folder / "metrics.jsonl"
    text = json.dumps(step_line(3, loss=1.25)) + "\n"
    with open(path, "a") as file:
        file.write("no line of metrics\n" + text + text[:40])
    curves.read(path)
    assert len(curves) == 3 and curves.last("loss") == 1.25 and curves.damaged == 1


def test_many_metrics_are_drawn_each_in_its_place():
    names = [
        "step",
        "loss",
        "eval_loss",
        "loss/web",
        "eval_loss/code",
        "targets/web",
        "user/norm",
        "hardware/power",
        "new",
    ]
    found = {panel.names: panel.group for panel in arrange_panels(names)}
    assert found == {
        ("loss", "eval_loss"): "",
        ("loss/web",): "",
        ("eval_loss/code",): "",
        ("user/norm",): "registered metrics",
        ("hardware/power",): "hardware",
        ("new",): "others",
    }
    drawn = {name for panel in arrange_panels(metrics.METRICS) for name in panel.names}
    assert drawn == set(metrics.METRICS) - NOT_DRAWN - {"targets/NAME"}


def test_a_page_of_a_long_run_stays_small(tmp_path, monkeypatch):
    run = SimpleNamespace(folder=tmp_path / "run")
    write_metrics(run.folder, 1)
    line = json.dumps(step_line(2))
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.writelines(line.replace('"step": 2,', f'"step": {step},') + "\n" for step in range(2, 4000))
    page = page_of(run.folder)
    assert len(page.source) < 1_000_000 and page.text.count("step 3999")
    assert max(len(one["v"]) for one in page.data["runs"][0]["series"]) <= 1500


# The command


def test_the_command_writes_one_file(tmp_path, capsys, monkeypatch):
    slow, fast = write_run(tmp_path / "a" / "slow", 4), write_run(tmp_path / "a" / "fast", 4)
    assert report.main([str(slow)]) == 0 and capsys.readouterr().out.strip() == str(slow / "report.html")
    monkeypatch.chdir(tmp_path)
    assert report.main([str(slow), str(fast)]) == 0 and "2 runs compared" in (tmp_path / "report.html").read_text()
    (tmp_path / "a" / "slow" / "trial.json").write_text("{}")  # of a sweep whose first trial has not ended
    assert report.main([str(tmp_path / "a"), "out=sweep.html"]) == 0
    assert [run["label"] for run in Page(Path("sweep.html").read_text()).data["runs"]] == ["fast", "slow"]


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "runs=... is needed"),
        (["nowhere"], "nowhere: no run has written there (no starts.jsonl); give a run folder like runs/NAME"),
        (["run", "out=no/such/report.html"], "no/such/report.html: cannot write"),
        (["run", "hardware=h201"], "hardware=h201: there is no such file; did you mean 'h200'?"),
        (["run", "output=a.html"], "output is no option of trainer report; did you mean 'out'?"),
    ],
)
def test_what_cannot_be_shown_is_said_once(tmp_path, capsys, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    write_metrics(tmp_path / "run", 1)
    assert report.main(words) == 2
    shown = capsys.readouterr()
    assert not shown.out and told in shown.err and shown.err.count("configuration error:") == 1


def test_damage_is_named_and_left_out(rich, tmp_path):
    folder = write_run(tmp_path / "run", 4)
    for name in ("status.json", "diagnosis.json", "accounts.jsonl", "schedule/measured.json"):
        (folder / name).write_text("{\n")
    page = page_of(folder)
    assert page.sections == ["curves", "schedule", "memory", "plan", "starts"]
    assert [timeline["name"] for timeline in page.data["runs"][0]["timelines"]] == ["planned"]
    for name in ("status.json", "diagnosis.json", "accounts.jsonl", "measured.json"):
        assert name in page.text[page.text.index("command and versions") :]


def test_only_what_was_added_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    assert reading.read_bytes(tmp_path / "file", 4, start=6) == b"6789"
    with pytest.raises(ConfigError, match="more than 3 bytes"):
        reading.read_bytes(tmp_path / "file", 3, start=6)


def test_the_bubble_of_a_run_with_accounts_is_that_of_its_accounts(rich):
    """The metric leaves out what is not computation. Without accounts a diagnosis tells it, else the metric."""
    shown = open_folders([rich])
    (run,) = shown.runs
    share, logged = run.profile.share("bubble"), run.curves.recent("bubble")
    assert abs(share - logged) > 0.001
    assert f"bubble {format_percent(share)} of the step" in page_of(rich).text
    waiting = format_percent(run.profile.share("data"))
    assert f"waiting for data {waiting} of the step" in page_of(rich).text
    with patch.object(type(run), "profile", None):
        numbers = {one.name: (one.text, one.note) for one in run_numbers(run)}
    told = f"of the step; {format_percent(logged)} of the schedule"
    assert numbers["bubble"] == ("10.0%", told), "as the finding says, and as the console says of each step"
    (run,) = open_folders([rich]).runs
    with patch.object(type(run), "profile", None), patch.object(type(run), "diagnosis", None):
        numbers = {one.name: (one.text, one.note) for one in run_numbers(run)}
    assert numbers["bubble"] == (format_percent(logged), "of the step")


def test_a_step_has_one_time(rich):
    """The tile has that of a diagnosis: the median without the first step, and without those beside a profiled one."""
    page, found = page_of(rich), diagnose_run(rich)
    assert f"step time {format_duration(found.seconds)} median" in page.text and "A step takes" not in page.text


def test_numbers_of_a_sweep_s_trials_stand_once(tmp_path):
    folder = tmp_path / "sweep"
    for name in ("lr-1", "lr-2"):
        write_run(folder / name, 4)
    line = {"trial": "lr-1", "status": "done", "step_seconds_p50": 0.123, "loss": 1.2345, "tokens_per_second": 77.0}
    lines = [line, {"trial": "lr-3", "status": "refused", "reason": "parallel.tp=3 divides nothing"}]
    (folder / "results.jsonl").write_text("".join(json.dumps(dict.fromkeys(LINE) | one) + "\n" for one in lines))
    page = page_of(folder)
    assert page.sections[:2] == ["trials", "compared"] and "parallel.tp=3 divides nothing" in page.text
    assert "123 ms" not in page.text and page.text.count("tokens/s") == 1


def test_twenty_runs_differ_by_colour_and_dash(tmp_path):
    page = page_of(*(write_run(tmp_path / f"run{place}", 3, speed=1.0 + (place == 7)) for place in range(20)))
    differ = page.source[page.source.index('id="differ"') : page.source.index('id="bound"')]
    assert re.findall(r"<th[^>]*>([^<]*)</th>", differ) == ["run", "lr.peak"], "a row each: columns would not fit"
    assert re.findall(r"<td[^>]*>([\d.]+)</td>", differ) == ["0.001" if place == 7 else "0.002" for place in range(20)]
    memory = page.source[page.source.index('id="memory"') : page.source.index('id="plan"')]
    heads = ["run", "parameters", "optimizer", "run", "at", "activations", "sum", "measured"]
    assert re.findall(r"<th[^>]*>([^<]*)</th>", memory) == heads and memory.count("41.5 GiB") == 20
    buttons = re.findall(r'data-run="\d+"[^>]*><span class="swatch ([^"]+)"', page.source)
    assert len(buttons) == len(set(buttons)) == 20
    assert {len(panel["names"]) for panel in page.data["panels"]} == {1}, "where dashes tell runs apart"
    titles = [panel["title"] for panel in page.data["panels"]]
    assert len(titles) == len(set(titles)) and {"step_seconds", "step_seconds_p50"} <= set(titles)
    styles = (FILES / "templates/style.css").read_text()
    for dash in {int(name.split("dash")[1]) for name in buttons} - {0}:
        assert f".swatch.dash{dash} {{" in styles
