"""Pictures of runs: the points that are drawn, the labels, and the command line with its exit codes."""

import json
import math
import re

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import plot
from trainer.config import ConfigError
from trainer.plots import runs

PNG = b"\x89PNG\r\n\x1a\n"


def lines(steps, scale=1.0):
    """A run's records: falling loss with one missing value, an evaluation every tenth step."""
    records = []
    for step in range(1, steps + 1):
        tokens = step * 4096
        records.append(
            {
                "step": step,
                "tokens": tokens,
                "loss": None if step == 7 else scale + 8 / step,
                "lr": 3e-4 * step / steps,
                "grad_norm": 2.0 / step,
                "tokens_per_second": 20e3 * scale,
            }
        )
        if step % 10 == 0:
            records.append({"step": step, "tokens": tokens, "eval_loss": scale + 9 / step})
    return records


@pytest.fixture
def run(tmp_path):
    """Writes a run folder and returns its path."""

    def write(name, records=None, text=None):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(
            text if text is not None else "".join(json.dumps(r) + "\n" for r in records)
        )
        return folder

    return write


def test_two_runs_become_one_picture(run, tmp_path, capsys):
    out = tmp_path / "pictures" / "both.png"
    runs = [str(run("a", lines(40))), str(run("b", lines(25, 1.5)))]
    code = plot.main([*runs, "--out", str(out), "--x", "tokens", "--smooth", "5"])
    assert code == 0 and capsys.readouterr().out.strip() == str(out)
    assert out.read_bytes().startswith(PNG)
    assert [path.name for path in out.parent.iterdir()] == ["both.png"]  # nothing half-written stays behind


def test_losses_by_source_and_set_have_panels_of_their_own():
    records = lines(40)
    for record in records:
        kind = "loss" if "loss" in record else "eval_loss"
        record |= {f"{kind}/{name}": factor * (record[kind] or 1) for name, factor in {"code": 2, "text": 3}.items()}
    plain, by_source, by_set = (runs.draw_metrics({"a": records, "b": lines(20)}).axes[index] for index in (0, 4, 5))
    assert by_source.get_title(loc="left") == "loss by source" and by_set.get_title(loc="left").endswith("by set")
    for panel, points in ((by_source, 40), (by_set, 4)):
        drawn = [line for line in panel.lines if len(line.get_xdata())]
        assert [len(line.get_xdata()) for line in drawn] == [points, points], "of the run that has them"
        assert [text.get_text() for text in panel.get_legend().get_texts()] == ["code", "text"]
    assert list(by_set.lines[0].get_ydata()) == [2 * value for value in plain.lines[1].get_ydata()]


def test_one_run_is_drawn_into_its_folder_even_while_it_is_writing(run):
    folder = run("live", text="".join(json.dumps(r) + "\n" for r in lines(3)) + '{"step": 4, "lo')
    assert plot.main([str(folder)]) == 0
    assert (folder / "metrics.png").read_bytes().startswith(PNG)


def test_the_curves_are_the_data(run):
    figure = runs.draw_metrics({"a": lines(40), "b": lines(20, 2.0)})
    loss, rate, norm, speed = figure.axes
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["loss", "learning rate", "gradient norm", "throughput"]
    train_a, held_a, train_b, held_b = loss.lines
    assert len(train_a.get_xdata()) == 40 and numpy.isnan(train_a.get_ydata()[6]) and train_a.get_ydata()[0] == 9.0
    assert list(held_a.get_xdata()) == [10, 20, 30, 40] and list(held_b.get_xdata()) == [10, 20]
    assert train_a.get_color() == held_a.get_color() != train_b.get_color()
    assert list(rate.lines[1].get_ydata()) == [3e-4 * step / 20 for step in range(1, 21)]
    assert norm.get_yscale() == "log"  # from 2 down to 0.05
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_tick_labels_say_what_the_ticks_are():
    figure = runs.draw_metrics({"a": lines(2000)}, x="tokens")
    figure.canvas.draw()
    units = {"": 1, "k": 1e3, "M": 1e6}
    axes = figure.axes[3]
    for axis in (axes.xaxis, axes.yaxis):
        ticks = [(tick, label.get_text()) for tick, label in zip(axis.get_ticklocs(), axis.get_ticklabels())]
        assert any(label.endswith(("k", "M")) for _, label in ticks)
        for tick, label in ticks:
            number, unit = re.fullmatch(r"(-?[\d.]+)([kM]?)", label).groups()
            assert float(number) * units[unit] == pytest.approx(tick, rel=5e-3)
    for tick, label in zip(figure.axes[1].yaxis.get_ticklocs(), figure.axes[1].get_yticklabels()):
        assert float(label.get_text()) == pytest.approx(tick)


@given(st.lists(st.floats(-100, 100) | st.just(math.nan), min_size=1, max_size=60), st.integers(1, 20))
def test_smoothing_keeps_gaps_and_stays_within_the_data(values, window):
    values = numpy.array(values)
    result = runs.smooth(values, window)
    assert (numpy.isnan(result) == numpy.isnan(values)).all()
    if not numpy.isnan(values).all():
        assert numpy.nanmin(result) >= numpy.nanmin(values) - 1e-9
        assert numpy.nanmax(result) <= numpy.nanmax(values) + 1e-9
    if window <= 2:
        numpy.testing.assert_allclose(result, values, atol=1e-9)


def test_smoothing_is_a_centred_mean():
    numpy.testing.assert_allclose(runs.smooth(numpy.arange(6.0) ** 2, 3), [0, 5 / 3, 14 / 3, 29 / 3, 50 / 3, 41 / 2])


def test_runs_are_told_apart(tmp_path):
    paths = [tmp_path / "x/demo", tmp_path / "y/demo", tmp_path / "y/other"]
    assert runs.labels(paths) == ["x/demo", "y/demo", "y/other"]
    assert runs.labels(paths[1:]) == ["demo", "other"]


def test_what_cannot_be_drawn_is_said_for_every_run_at_once(run, tmp_path, capsys):
    good = run("good", lines(3))
    broken = run("broken", text='{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.0}\n')
    folders = [
        tmp_path / "absent",
        run("empty", text=""),
        broken,
        run("words", text='{"step": 1, "loss": "low"}\n'),
        good,
    ]
    assert plot.main([*map(str, folders), "--out", str(tmp_path / "out.png")]) == 2
    shown = capsys.readouterr().err
    assert "absent" in shown and "runs/NAME" in shown and "no step has been logged" in shown
    assert f"{broken}/metrics.jsonl, line 2" in shown and "words/metrics.jsonl, line 1" in shown and "good" not in shown
    assert "Traceback" not in shown and not (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--smooth", "0"], "--smooth 0"),
        (["--out", "x.doc"], ".png"),
        (["--x", "time"], "tokens"),
        (["--out", "/dev/null/x.png"], "cannot write"),
    ],
)
def test_wrong_options_exit_with_2(run, arguments, words, capsys):
    try:
        code = plot.main([str(run("a", lines(3))), *arguments])
    except SystemExit as stop:  # argparse's own
        code = stop.code
    assert code == 2 and words in capsys.readouterr().err


def test_no_run_given_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stop:
        plot.main([])
    assert stop.value.code == 2 and "RUN" in capsys.readouterr().err


def test_loading_from_python_raises_one_error(tmp_path):
    with pytest.raises(ConfigError) as caught:
        runs.read_runs([tmp_path / "a", tmp_path / "b"])
    assert len(caught.value.problems) == 2
