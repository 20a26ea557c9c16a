"""The command `trainer diagnose`: runs that stalled, runs that go on, folders that are none."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from support.accounts import QUIET, Case, accounts

from trainer.commands import diagnose
from trainer.config import typed
from trainer.config.fields import CONFIGS
from trainer.config.synonyms import REMOVED
from trainer.diagnosis.evidence import RunEvidence, collect_evidence
from trainer.diagnosis.time_breakdown import ACCOUNTS
from trainer.observe.diagnose_run import diagnose_run
from trainer.observe.hardware import over_ranks
from trainer.observe.watchdog import Heartbeat, RankReport
from trainer.pages.folder import RunFolder
from trainer.planning.resolve import compose
from trainer.planning.schedules import ir
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.simulate import simulate_schedule, write_timeline
from trainer.planning.schedules.templates import build_schedule


def lines(folder: Path, count: int = 4, **values: float) -> Path:
    folder.mkdir(exist_ok=True)
    records = [{"step": step, "step_seconds": 1.0} | values for step in range(1, count + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def status(folder: Path, word: str) -> None:
    (folder / "status.json").write_text(json.dumps({"status": word, "step": 4, "steps": 9}))


def test_a_run_that_stalled_says_where(tmp_path, capsys):
    run = lines(tmp_path / "run")
    (run / "starts.jsonl").write_text(json.dumps({"processes": 2, "hosts": {"a": 2}, "devices": {"CPU": 2}}) + "\n")
    place = run / "flight" / "20260101-000000"
    place.mkdir(parents=True)
    group = {"desc": "mesh_shard", "ranks": [0, 1], "entered": 4, "number": 4, "what": "all_gather", "at": "x.py:1"}
    for rank, what in ((0, {"gloo 1": group}), (1, {"gloo 1": {**group, "entered": 3, "number": 3}})):
        beat = Heartbeat(rank, "a", 5 + rank, "training", 3, 1.0, 2.0, 3.0)
        (place / f"rank-{rank}.json").write_text(json.dumps(asdict(RankReport(beat, f"step.py:{rank}", what))))
    assert diagnose.main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "the run stalled" in shown and "which rank 1 did not enter" in shown
    content = json.loads((run / "diagnosis.json").read_text())
    assert content["verdict"]["kind"] == "hang" and len(content["stalled"]) >= 3
    os.utime(run / "metrics.jsonl", (time.time() + 60,) * 2)  # it has gone on since
    assert diagnose_run(run).kind == "unknown"


def test_live_looks_until_the_run_ends(tmp_path, capsys):
    run = lines(tmp_path / "run", data_seconds=0.4)
    status(run, "running")

    def end() -> None:
        time.sleep(0.4)
        status(run, "done")

    threading.Thread(target=end).start()
    assert diagnose.main([str(run), "--live", "--every", "0.1", "--json", str(tmp_path / "all.json")]) == 0
    assert capsys.readouterr().out.count("data bounds the run") >= 2
    assert json.loads((tmp_path / "all.json").read_text())["status"]["status"] == "done"
    assert not (run / "diagnosis.json").exists()


def test_live_ends_where_a_run_was_killed(tmp_path, capsys):
    """It stays `running` for ever, and nothing is written any more."""
    run = lines(tmp_path / "run", data_seconds=0.4)
    status(run, "running")
    assert not [note for note in diagnose_run(run).notes if "written" in note]
    long_ago = (time.time() - 100,) * 2
    for path in (run / "metrics.jsonl", run / "status.json"):
        os.utime(path, long_ago)
    live = [str(run), "--live", "--every", "0.1", "--patience"]
    assert diagnose.main([*live, "100.3"]) == 1
    said = capsys.readouterr()
    assert said.out.count("data bounds the run") >= 2 and "nothing has been written for 1m 40s" in said.out
    assert "taken for dead (--patience 100.3)" in said.err
    status(run, "failed")  # as the watchdog or a rank writes at last
    assert diagnose.main([*live, "0"]) == 0 and diagnose_run(run).evidence.silent is None


@pytest.mark.parametrize("content", [None, "", '{"step": 1'])
def test_what_is_no_run_is_refused(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert diagnose.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert diagnose.main([str(lines(tmp_path / "run")), "--hardware", "h201"]) == 2
    assert "did you mean 'h200'?" in capsys.readouterr().err
    assert diagnose.main([str(tmp_path / "run"), "--json", str(tmp_path / "nowhere" / "all.json")]) == 2
    assert "--json FILE" in capsys.readouterr().err
    for every in ("0", "-1", "nan"):
        assert diagnose.main([str(tmp_path / "run"), "--live", "--every", every]) == 2
        assert f"every={float(every)} must be above 0" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    assert diagnose.main([str(tmp_path)]) == 2
    assert f"{tmp_path} holds runs, and is none; name one: {tmp_path / 'run'}" in capsys.readouterr().err


CLOCKS = [{"clock_mhz": 1980, "throttle": 4}, {"clock_mhz": 1970, "throttle": 0}] * 2
"""Readings of four ranks, two of which the power cap holds down."""


@pytest.mark.parametrize("hosts", [{"node0": 4}, {"node0": 2, "node1": 2}])
def test_which_rank_is_throttled_and_why_stands_beside_the_straggler(tmp_path, hosts):
    def told(slow: int, throttled: int, reading: dict):
        readings = [reading if rank == throttled else one for rank, one in enumerate(CLOCKS)]
        run = lines(tmp_path / f"{slow} {throttled} {reading}", **over_ranks(readings))
        start = {"processes": 4, "hosts": hosts, "devices": {"NVIDIA H200": 4}}
        (run / "starts.jsonl").write_text(json.dumps(start) + "\n")
        made = accounts(Case(QUIET, slow={slow: 1.6}), random.Random(0))
        (run / ACCOUNTS).write_text("".join(account.dumps() + "\n" for account in made))
        return diagnose_run(run)

    where = " on node1" * (len(hosts) > 1)
    hot = {"clock_mhz": 1300, "throttle": 4 | 64}
    found = told(slow=3, throttled=3, reading=hot)
    reasons = "power cap and hardware thermal slowdown"
    said = f"its clock is the lowest of all ranks, 1300 MHz; clocks are held down by {reasons}"
    cost = found.findings[0].cost
    assert said in cost.evidence and cost.layer == "hardware" and f"rank 3{where} is slow" in found.text
    assert not any("held down" in note for note in found.notes)
    found = told(slow=1, throttled=3, reading=hot)  # both are true, and not one because of the other
    cost = found.findings[0].cost
    assert cost.detail == "rank 1" and cost.layer == "runtime orchestration" and "held" not in str(cost.evidence)
    assert f"clocks of rank 3{where} are held down by {reasons}, and those of 2 other ranks too" in found.notes
    unknown = told(slow=3, throttled=3, reading={"clock_mhz": None, "throttle": 128})
    assert "its clocks are held down by power brake" in unknown.findings[0].cost.evidence
    assert not any("of rank 1" in note for note in told(slow=3, throttled=1, reading=CLOCKS[1]).notes), (
        "it has no reason"
    )


def test_hardware_tells_rooflines_and_throttled_clocks(tmp_path):
    run = lines(tmp_path / "run", **{"hardware/clock_rank": 2, "hardware/clock_mhz": 900, "hardware/throttle": 64})
    made = accounts(Case(QUIET, slow={2: 1.6}), random.Random(0))
    (run / ACCOUNTS).write_text("".join(account.dumps() + "\n" for account in made))
    found = diagnose_run(run, "h200")
    first = found.findings[0].cost
    assert (first.kind, first.detail, first.layer) == ("straggler", "rank 2", "hardware")
    assert any("900 MHz" in text and "thermal" in text for text in first.evidence)
    assert found.points[0].kind == "products" and found.points[0].bytes
    records = [
        {"step": step, "step_seconds": 1.0, "hardware/clock_rank": 2, "hardware/clock_mhz": 900} for step in range(399)
    ]
    for record in (*records[:300], records[395]):  # long ago, and once since
        record["hardware/throttle"] = 64
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    evidence = diagnose_run(run, "h200").findings[0].cost.evidence
    assert any("900 MHz" in text for text in evidence) and not any("held down" in text for text in evidence)
    (run / "config.yaml").write_text("precision: {compute: bf16}")
    (run / "starts.jsonl").write_text('{"processes": 4, "hosts": {"a": 4}, "devices": {"NVIDIA H200": 4}}\n')
    (tmp_path / "hardware").mkdir()
    own = (CONFIGS / "hardware/h200.yaml").read_text().replace("bandwidth: 4800", "bandwidth: 4321")
    (tmp_path / "hardware/probed.yaml").write_text(own)
    out = tmp_path / "all.json"
    for words in (["--hardware", "probed"], []):  # without a name, one's own file of the device
        assert diagnose.main([str(run), "--config-dir", str(tmp_path), "--json", str(out), *words]) == 0
        found = json.loads(out.read_text())["roofline"]["ceilings"]
        assert found and found["bandwidth"] == 4321e9


@pytest.mark.parametrize("removed", [one for one in REMOVED if "context.method=" not in one])
def test_the_plan_of_a_run_of_an_earlier_version_is_known_or_said_why_not(tmp_path, removed):
    """Settings that are gone stand in every config.yaml of such a run, and change nothing; values that are gone do."""
    settings = typed.to_plain(compose(["+config=debug"], world_size=1))
    path, _, value = removed.partition("=")
    *sections, name = path.split(".")
    section = settings
    for one in sections:
        section = section[one]
    section[name] = value or 4
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    found = collect_evidence(RunEvidence(tmp_path), [])
    assert (found.layout is None) == bool(value)
    said = [note for note in found.notes if "the plan is not known" in note]
    assert len(said) == bool(value) and all(f"{removed} was removed; set" in note for note in said)


def test_the_plan_of_a_run_with_old_names_is_known(tmp_path):
    given = ["parallel.cp=2", "parallel.tp=2", "parallel.context.method=allgather", "parallel.zero.stage=1"]
    given += ["parallel.zero.collectives=nccl"]
    config = compose(["+config=debug", *given, "parallel.tp_overlap=copy_engine"], world_size=4)
    settings = typed.to_plain(config)
    parallel = settings["parallel"]
    parallel["fusion"], parallel["context"]["method"] = parallel.pop("tp_overlap"), "gather"
    parallel["zero"]["transport"] = {"nccl": "collectives"}[parallel["zero"].pop("collectives")]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "starts.jsonl").write_text('{"processes": 4, "hosts": {"a": 4}, "devices": {"NVIDIA H200": 4}}\n')
    found = collect_evidence(RunEvidence(tmp_path), [])
    assert found.config is not None and found.config.parallel == config.parallel and found.layout is not None


@pytest.mark.parametrize("seconds, micro, part", [((0.3, 0.1), 16, "imbalance"), ((0.2, 0.2), 2, "schedule")])
def test_without_a_profile_a_bubble_is_told_by_the_last_step_s_actions(tmp_path, seconds, micro, part):
    """Of a split [3,1] the mending one is offered alone, and not behind schedules that hide it."""
    run, schedule = lines(tmp_path / "run", bubble=0.4), build_schedule("1f1b", 2, micro)
    given = ["+config=debug", "parallel.pp=2", "parallel.pipeline.split=[3,1]", f"batch.micro_size={16 // micro}"]
    given += [f"batch.accumulation={micro}", "batch.global_size=16", "model.depth=4", "parallel.pipeline.schedule=1f1b"]
    (run / "config.yaml").write_text(typed.to_yaml(compose(given, world_size=2)))
    (run / "starts.jsonl").write_text(json.dumps({"processes": 2, "hosts": {"a": 2}, "devices": {"CPU": 2}}) + "\n")
    found = diagnose_run(run)
    assert (found.kind, found.findings[0].cost.detail) == ("bubble", "")
    step = simulate_schedule(schedule, StageCosts(seconds, seconds, (0.0, 0.0), seconds, (0.0, 0.0)))
    write_timeline(run / "schedule" / "measured.json", step.spans, step.makespan)
    (run / "schedule" / "schedule.csv").write_text(ir.format_schedule(schedule))
    first = diagnose_run(run).findings[0]
    assert first.cost.detail == part and "schedule's own" in first.cost.evidence[1]
    texts = [one.text for one in first.overrides]
    assert ("parallel.pipeline.split=balanced" in texts) == (part == "imbalance") and texts
    if part == "imbalance":
        assert not any("zb_v" in text or "interleaved" in text for text in texts), texts
    (run / "schedule" / "measured.json").write_text(
        '{"makespan": 1, "ranks": [[{"action": "9F0", "start": 0, "end": 1}]]}'
    )
    assert diagnose_run(run).findings[0].cost.detail == ""


def test_what_a_profiler_costs_the_host_is_not_the_run_s(tmp_path):
    """A GPU whose host keeps up, but not in profiled steps: each, the one before and the one after take longer."""
    run = lines(tmp_path / "run")
    base = accounts(Case(QUIET), random.Random(0))[0]
    late = {**base.terms, "host/launch": 0.5 * base.seconds}
    usual = base.seconds - base.spent("host/launch") + 0.01
    profiled = (8, 16)
    records = [
        {"step": step, "step_seconds": usual * (2 if any(abs(step - one) < 2 for one in profiled) else 1)}
        for step in range(1, 25)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    made = [replace(base, step=step, device="NVIDIA H200", terms=late, seconds=sum(late.values())) for step in profiled]
    (run / ACCOUNTS).write_text("".join(account.dumps() + "\n" for account in made))
    found = diagnose_run(run, "h200")
    (rank,) = found.evidence.profile.ranks
    assert found.kind == "compute" and found.seconds == pytest.approx(usual)
    assert rank.seconds == pytest.approx(usual) and rank.spent("host/launch") == pytest.approx(0.01)
    assert rank.spent("products") == base.spent("products")
    assert any("the profiler costs the host" in note for note in found.notes)
    assert RunFolder("run", run).profile.ranks[0].seconds == pytest.approx(usual)
    slow = [record | {"step_seconds": sum(late.values())} for record in records]  # the others are as slow
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in slow))
    assert diagnose_run(run, "h200").kind == "host"
