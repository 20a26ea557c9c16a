"""Pictures of sweeps: what is a column, a row and a line, and what the command leaves."""

import json

import pytest
from matplotlib.figure import Figure

from trainer import plot
from trainer.plots.sweep import Trial, draw_setting
from trainer.sweep.results import MEASURED


def write_sweep(folder, trials):
    """trials: overrides -> loss, or None for one that was refused; each has trained."""
    folder.mkdir()
    results = []
    for number, (overrides, loss) in enumerate(trials.items()):
        line = {"trial": f"t{number}", "overrides": overrides.split(), "processes": 1, "folder": str(folder)}
        line |= {"status": "refused" if loss is None else "done", "reason": None} | dict.fromkeys(MEASURED)
        line |= {} if loss is None else {"loss": loss, "tokens_per_second": 1e3 * loss}
        results.append(json.dumps(line) + "\n")
        (folder / f"t{number}").mkdir()
        record = {"step": 1, "tokens": 9, "loss": loss, "lr": 1.0, "grad_norm": 1.0, "tokens_per_second": 2.0}
        (folder / f"t{number}" / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "results.jsonl").write_text("".join(results))
    return folder


SWEPT = {
    "lr.peak=1e-4 parallel=zero1": 5.0,
    "lr.peak=1e-2 parallel=zero1": 3.0,
    "lr.peak=1e-3 parallel=zero1": 4.0,
    "lr.peak=1e-4 parallel=zero3": 5.5,
    "lr.peak=1e-3 parallel=zero3": None,
}
TRIALS = [
    Trial(dict(one.split("=") for one in names.split()), {"loss": loss, "eval_loss": None, "tokens_per_second": loss})
    for names, loss in SWEPT.items()
]


def drawn(name, measure="loss"):
    axes = Figure().subplots()
    draw_setting(axes, TRIALS, name, measure, ["lr.peak", "parallel"])
    lines = {line.get_label(): list(zip(*line.get_data())) for line in axes.get_lines()}
    return axes, lines


def test_trials_that_differ_in_one_setting_alone_are_a_line():
    axes, lines = drawn("lr.peak")
    assert lines == {
        "parallel=zero1": [(1e-4, 5.0), (1e-3, 4.0), (1e-2, 3.0)],
        "parallel=zero3": [(1e-4, 5.5)],
        "a trial without a result": [(1e-3, 0.02)],
    }
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "lr.peak", "training loss, last step")


def test_values_that_are_no_numbers_stand_side_by_side():
    axes, lines = drawn("parallel", "tokens_per_second")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["zero1", "zero3"]
    assert lines["peak=1e-4"] == [(0.0, 5.0), (1.0, 5.5)] and lines["peak=1e-2"] == [(0.0, 3.0)]
    assert all(line.get_linestyle() == "None" for line in axes.get_lines()) and axes.get_ylim()[0] == 0


@pytest.mark.parametrize("out", [None, "pictures/all.svg"])
def test_a_sweep_is_drawn_beside_its_runs(tmp_path, capsys, out):
    folder = write_sweep(tmp_path / "sweep", SWEPT)
    assert plot.main([str(folder), *(["--out", str(tmp_path / out)] if out else [])]) == 0
    expected = [folder / "metrics.png", folder / "sweep.png"]
    if out:
        expected = [tmp_path / "pictures/all.svg", tmp_path / "pictures/all-sweep.svg"]
    assert capsys.readouterr().out.splitlines() == list(map(str, expected))
    assert all(path.stat().st_size > 1000 for path in expected)


def test_a_sweep_of_one_trial_has_no_such_picture(tmp_path, capsys):
    folder = write_sweep(tmp_path / "sweep", {"lr.peak=1e-4": 5.0})
    assert plot.main([str(folder)]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "metrics.png")]
