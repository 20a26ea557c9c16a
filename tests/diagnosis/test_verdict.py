"""What bounds a run, told from accounts of known causes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.accounts import QUIET, Case, accounts, quiet

from trainer.config import Config
from trainer.diagnosis.evidence import RunEvidence, RunMachine
from trainer.diagnosis.time_breakdown import LAYERS, breakdown_metrics, build_profile, busy_seconds, compute_seconds
from trainer.diagnosis.verdict import Diagnosis, diagnose_evidence, print_diagnosis, say_more, to_json
from trainer.planning.hardware import load_hardware
from trainer.planning.resolve import compose
from trainer.util.tables import format_percent


def told(case: Case, seed: int = 0, **more) -> Diagnosis:
    profile = build_profile(accounts(case, random.Random(seed), noise=0.08))
    return diagnose_evidence(
        RunEvidence(Path("runs/x"), profile=profile, machine=RunMachine(case.ranks, case.ranks, "NVIDIA H200"), **more)
    )


def with_(draw: random.Random, **shares: float) -> dict[str, float]:
    """A quiet step in which a term takes a share of the whole."""
    terms = quiet(draw)
    total = sum(terms.values()) / (1 - sum(shares.values()))
    return terms | {name.replace("__", "/"): share * total for name, share in shares.items()}


def disturbed(seed: int) -> Case:
    """One of the eight causes, or none, at a random size above its limit; or two, of which one is clearly larger."""
    draw = random.Random(seed)
    size = draw.uniform(0.18, 0.5)
    smaller = size / draw.uniform(1.3, 3)
    kinds = ["compute", "data", "host", "communication", "bubble", "imbalance", "straggler", "memory bandwidth"]
    axis = draw.choice(["data", "tensor", "pipeline", "all"])
    terms = {
        "data": "data",
        "host": draw.choice(["host__launch", "host__synchronisation", "host__collector"]),
        "communication": f"communication__{axis}__transfer",
        "memory bandwidth": "memory_bound",
    }
    kind, other = kinds[seed % len(kinds)], draw.choice([None, "data", "host", "communication"])
    shares = {terms[other]: smaller} if other and other != kind and kind in terms else {}
    if kind == "memory bandwidth":
        return Case(with_(draw, memory_bound=size + 0.1), kind)
    if kind in terms:
        return Case(with_(draw, **shares, **{terms[kind]: size}), kind)
    if kind == "straggler":
        return Case(quiet(draw), kind, slow={draw.randrange(4): 1 + size})
    if kind == "bubble":
        return Case(quiet(draw), kind, stages=(1.0, 1.0), micro=draw.choice([2, 3, 4]))
    if kind == "imbalance":
        return Case(quiet(draw), "bubble", stages=(1.0, 1 + 2 * size), micro=32)
    return Case(quiet(draw), "compute")


def test_of_forty_runs_at_most_one_is_told_wrong():
    cases = {seed: disturbed(seed) for seed in range(40)}
    found = {seed: told(case, seed).kind for seed, case in cases.items()}
    wrong = {seed: (case.tell, found[seed]) for seed, case in cases.items() if found[seed] != case.tell}
    assert len(wrong) <= 1, wrong
    assert set(found.values()) >= {"compute", "data", "host", "communication", "bubble", "straggler"}


@pytest.mark.parametrize("seed", range(5))
def test_quiet_runs_are_bound_by_their_computation(seed):
    draw = random.Random(seed)
    diagnosis = told(Case(quiet(draw), ranks=8), seed)
    assert diagnosis.kind == "compute" and diagnosis.findings[0].cost.layer == LAYERS[0]


def test_the_step_without_a_cost_is_that_of_a_run_without_it():
    """The same run, simulated without its cause, takes as long as was predicted."""
    for terms, gone in (
        ({"data": 0.4}, {"data": 0.0}),
        ({"communication/data/transfer": 0.5}, {"communication/data/transfer": 0.0}),
        ({"host/launch": 0.3}, {"host/launch": 0.0}),
    ):
        case = Case({**QUIET, **terms})
        predicted = told(case).findings[0].seconds
        real = build_profile(accounts(Case({**QUIET, **gone}), random.Random(1))).seconds
        assert predicted == pytest.approx(real, rel=0.05)
    slow = told(Case(QUIET, slow={2: 1.5}))
    assert slow.findings[0].cost.detail == "rank 2"
    assert slow.findings[0].seconds == pytest.approx(
        build_profile(accounts(Case(QUIET), random.Random(1))).seconds, rel=0.06
    )
    stages = told(Case(QUIET, stages=(1.0, 2.0), micro=32))
    balanced = build_profile(accounts(Case(QUIET, stages=(1.5, 1.5), micro=32), random.Random(1))).seconds
    assert stages.findings[0].cost.detail == "imbalance"
    assert stages.findings[0].seconds == pytest.approx(balanced, rel=0.06)


@pytest.mark.parametrize("seed", range(6))
def test_noise_is_no_straggler(seed):
    """Single steps in which a rank is half as slow again tell nothing; as many in which one always is do."""
    draw = random.Random(seed)
    noisy = build_profile(accounts(Case(QUIET, ranks=2), draw, steps=3, noise=0.3))
    assert diagnose_evidence(RunEvidence(Path("runs/x"), profile=noisy)).kind != "straggler"
    slow = build_profile(accounts(Case(QUIET, ranks=2, slow={1: 3.0}), draw, steps=6, noise=0.2))
    assert diagnose_evidence(RunEvidence(Path("runs/x"), profile=slow)).findings[0].cost.detail == "rank 1"
    alone = build_profile(accounts(Case(QUIET, slow={1: 9.0}), draw, steps=1))
    costs = diagnose_evidence(RunEvidence(Path("runs/x"), profile=alone)).findings
    assert not any(one.cost.detail == "rank 1" for one in costs)


def test_a_share_is_the_same_in_findings_account_and_metrics(capsys):
    """Also where ranks count steps of different lengths."""
    case = Case({**QUIET, "data": 0.6, "checkpoint": 0.5})
    first, *rest = accounts(case, random.Random(0), steps=1)
    terms = {**first.terms, "other": 0.4}
    made = [replace(first, terms=terms, seconds=sum(terms.values())), *rest]
    diagnosis = diagnose_evidence(RunEvidence(Path("runs/x"), profile=build_profile(made)))
    expected = sum(one.spent("data") for one in made) / sum(one.seconds for one in made)
    found = {finding.cost.kind: finding.cost.share for finding in diagnosis.findings}
    assert found["data"] == pytest.approx(expected) and max(one.seconds for one in made) > 1.1 * rest[0].seconds
    print_diagnosis(diagnosis, Console(width=120))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {line[0]: line[1] for line in lines if line and line[0] in ("data", "step", "checkpoint")}
    assert shown["data"] == format_percent(expected) and shown["checkpoint"] == format_percent(found["checkpoint"])
    assert breakdown_metrics([replace(one, terms={**one.terms}) for one in made])["exposed/data"] == pytest.approx(
        sum(one.spent("communication/data") for one in made) / sum(one.seconds for one in made)
    )


def test_the_axis_and_the_part_are_named():
    communication = told(Case({**QUIET, "communication/tensor/transfer": 0.4})).findings[0].cost
    assert communication.detail == "tensor" and "tensor" in communication.title
    host = told(Case({**QUIET, "host/synchronisation": 0.4})).findings[0].cost
    assert host.detail == "synchronisation" and host.layer == "runtime orchestration"
    assert told(Case(QUIET, stages=(1.0, 1.0), micro=2)).findings[0].cost.detail == "schedule"


@pytest.mark.parametrize("busy, named", [(0.97, True), (0.5, False)])
def test_other_programs_are_suspected_where_a_slow_host_is_busy(busy, named):
    case = Case({**QUIET, "host/launch": 0.6})
    records = [{"step": step, "step_seconds": 1.0, "hardware/host_cpu": busy} for step in range(1, 30)]
    first = told(case, records=records).findings[0].cost
    assert first.kind == "host" and any(f"{busy:.0%} of a machine's proc" in text for text in first.evidence) == named


def test_memory_that_is_full_bounds_where_nothing_else_does():
    hardware = load_hardware("h200")
    full = [{"step": step, "step_seconds": 1.0, "memory_gib": 0.97 * hardware.memory} for step in (1, 2, 3)]
    diagnosis = told(Case(QUIET), records=full, hardware=hardware)
    assert diagnosis.kind == "memory capacity" and diagnosis.memory.used == pytest.approx(0.97)
    assert told(Case({**QUIET, "data": 0.5}), records=full, hardware=hardware).kind == "data"
    again = told(Case({**QUIET, "recompute": 0.3})).findings[0].cost
    assert again.kind == "memory capacity" and again.detail == "recompute"


@pytest.mark.parametrize("moved,kind", [(0.79, "memory bandwidth"), (0.40, "host")])
def test_compiled_kernels_beyond_what_is_usual_bound_a_run(moved, kind):
    """A device that waits for its host for an eighth of the step is no excuse for four fifths of moving bytes."""
    config = compose(["+config=debug", "compile=true"], world_size=1)
    shares = {"host/launch": 0.13, "memory_bound": moved, "products": 0.87 - moved}
    assert told(Case(shares), config=config).kind == kind


def test_metrics_alone_say_what_they_can():
    def record(step: int, **values: float) -> dict:
        return {"step": step, "step_seconds": 1.0, "data_seconds": 0.001} | values

    def kind(**values: float) -> Diagnosis:
        return diagnose_evidence(RunEvidence(Path("runs/x"), [record(step, **values) for step in range(1, 8)]))

    silent = kind()
    assert silent.kind == "unknown" and "logging.profile" not in silent.text
    assert ["logging.profile=50" in note for note in silent.notes].count(True) == 1, "told once"
    data = kind(data_seconds=0.3)
    assert data.kind == "data" and data.findings[0].seconds == pytest.approx(0.7)
    assert data.findings[0].cost.evidence == ("a step waits 300 ms for its batch on the slowest rank",)
    slow = kind(straggler=1.5, straggler_rank=3)
    assert slow.kind == "straggler" and slow.findings[0].cost.detail == "rank 3"
    assert kind(straggler=1.02, straggler_rank=3).kind == "unknown"
    assert kind(bubble=0.4).kind == "bubble"
    saves = kind(checkpoint_seconds=0.25, evaluation_seconds=0.02)
    assert saves.kind == "checkpoint" and saves.findings[0].cost.share == pytest.approx(0.25 / 1.27)
    assert kind(evaluation_seconds=0.25).kind == "evaluation" and kind(evaluation_seconds=0.05).kind == "unknown"


def test_a_pause_counts_for_the_steps_of_its_line():
    """Of 11 steps, ten have a quarter of a second each."""
    records = [{"step": 1, "step_seconds": 1.0}, {"step": 11, "step_seconds": 1.0, "checkpoint_seconds": 0.25}]
    found = diagnose_evidence(RunEvidence(Path("runs/x"), [*records, {"step": 12, "step_seconds": 1.0}]))
    pause = 2.5 / 11
    assert found.findings[0].cost.share == pytest.approx(pause / (1 + pause))


NUMBER = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e299, max_value=1e299)
LINE = st.fixed_dictionaries(
    {"step_seconds": NUMBER},
    optional=dict.fromkeys(
        ["data_seconds", "bubble", "straggler", "checkpoint_seconds", "evaluation_seconds", "memory_gib"], NUMBER
    )
    | {"straggler_rank": st.integers(0, 9)},
)


@given(st.lists(LINE, min_size=1, max_size=12))
def test_whatever_the_metrics_the_shares_are_shares(lines):
    records = [{"step": step} | line for step, line in enumerate(lines, 1)]
    for one in diagnose_evidence(RunEvidence(Path("runs/x"), records)).findings:
        assert 0 <= one.cost.share <= 1 and one.seconds >= 0, one.cost


@pytest.mark.parametrize("seconds", [1e-6, 0.002, 0.22, 0.61, 1.0, 7.0, 400.0])
def test_a_profile_is_advised_that_costs_a_hundredth_at_most(seconds):
    every = int(say_more(RunEvidence(Path("runs/x"), []), seconds).removeprefix("logging.profile="))
    assert 0.3 <= 0.0101 * every * seconds or seconds < 1e-5
    assert every == 10 or 0.3 > 0.01 * every / 2.6 * seconds, "and not far less"


@pytest.mark.parametrize("steps", [2, 3, 20, 400, 10**6])
@pytest.mark.parametrize("seconds", [None, 0.002, 0.22, 7.0])
def test_a_profile_is_advised_that_a_run_reaches_twice(steps, seconds):
    config = compose(["+config=debug", f"run.steps={steps}"], world_size=1)
    every = int(say_more(RunEvidence(Path("runs/x"), [], config=config), seconds).removeprefix("logging.profile="))
    assert 1 <= every <= max(1, steps // 2)
    for done in (steps // 2, steps - 1, steps):
        going = RunEvidence(Path("runs/x"), [], config=config, status={"status": "running", "step": done})
        every = int(say_more(going, seconds).removeprefix("logging.profile="))
        assert 2 * every <= steps - done or steps - done < 4 and every <= max(1, steps // 2), "also in the steps left"


def test_a_step_that_stalled_is_left_out():
    found = accounts(Case(QUIET), random.Random(0))
    long = accounts(Case({**QUIET, "host/launch": 30.0}), random.Random(0), steps=1)
    late = [type(one)(**{**vars(one), "step": 1000}) for one in long]
    profile = build_profile([*found, *late])
    assert profile.unusual == (1000,) and profile.seconds < 2
    assert build_profile([]) is None


TERMS = st.fixed_dictionaries({name: st.floats(0, 3) for name in [*QUIET, "recompute", "host/collector", "checkpoint"]})


@settings(max_examples=60, deadline=None)
@given(TERMS, st.integers(1, 3), st.dictionaries(st.integers(0, 3), st.floats(0.5, 4)), st.booleans())
def test_whatever_the_account_the_diagnosis_is_sound(terms, steps, slow, pipeline):
    case = Case(terms, slow=slow, stages=(1.0, 1.7) if pipeline else (1.0,))
    profile = build_profile(accounts(case, random.Random(3), steps))
    assert (profile is None) == (sum(terms.values()) == 0)
    if profile is None:
        return
    for account in profile.ranks:
        assert -1e-9 <= compute_seconds(account) <= busy_seconds(account) <= account.seconds * (1 + 1e-9)
    diagnosis = diagnose_evidence(RunEvidence(Path("runs/x"), profile=profile, config=Config()))
    for finding in diagnosis.findings:
        assert 0 <= finding.seconds <= diagnosis.seconds * (1 + 1e-6) and 0 <= finding.cost.share <= 1 + 1e-6
    rest = [finding.cost.share for finding in diagnosis.findings[1:]]
    assert rest == sorted(rest, reverse=True) and len(diagnosis.findings) <= 3, (
        "what takes most of the step comes first"
    )
    content = json.loads(json.dumps(to_json(diagnosis), allow_nan=False))
    assert sum(content["accounts"][0]["terms"].values()) == pytest.approx(content["accounts"][0]["seconds"], rel=1e-6)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_download_is_advised_where_something_streams(streaming):
    config = compose(["+config=debug"])
    config.data.sources["stdlib"].streaming = streaming
    records = [{"step": step, "step_seconds": 1.0, "data_seconds": 0.5} for step in range(1, 9)]
    evidence = RunEvidence(Path("runs/x"), config=config, records=records, machine=RunMachine(1, 1, "CPU"))
    [first] = diagnose_evidence(evidence).findings
    assert first.cost.kind == "data" and ("stream" in first.advice) == streaming
