"""Pictures and files of pipeline timelines: what is drawn is the spans, and the numbers beside are theirs."""

import json
import re
from collections import Counter
from pathlib import Path

import matplotlib.colors
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.commands import plot
from trainer.config import ConfigError
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.ir import Action, format_schedule
from trainer.planning.schedules.simulate import (
    ActionSpan,
    idle_gaps,
    measure_timeline,
    read_timeline,
    simulate_schedule,
    write_timeline,
)
from trainer.planning.schedules.templates import TEMPLATES, build_schedule
from trainer.plots import runs, templates
from trainer.plots import schedule as pictures
from trainer.plots.runs import save_figure
from trainer.plots.schedule import MOST, draw_schedule

PNG = b"\x89PNG\r\n\x1a\n"


def planned(name, ranks, microbatches, seconds=1.0):
    schedule = build_schedule(name, ranks, microbatches)
    return simulate_schedule(schedule, StageCosts.uniform(schedule.stages, seconds, seconds, seconds)).spans


def bars(axes):
    """Bars by (rank, kind), bubbles included, over a rank's chunks."""
    found = Counter()
    for collection in axes.collections:
        rank = int(re.match(r"rank(\d+)-", collection.get_gid())[1])
        found[rank, collection.get_label()] += len(collection.get_paths())
    return found


def times(collection):
    return sorted((path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in collection.get_paths())


def titles(axes):
    return axes.get_title(loc="left"), axes.get_title(loc="right")


def rows(axes):
    """The text beside each row."""
    return [text.get_text() for text in axes.texts if text.get_transform() == axes.get_yaxis_transform()]


def test_1f1b_is_drawn_as_its_textbook_picture():
    spans = planned("1f1b", 4, 8, 0.01)
    figure = draw_schedule({"planned": spans}, title="a run")
    (axes,) = figure.axes
    # (p - 1)(F + B) of bubble and m (F + B) of work a rank: 90 ms and 240 ms.
    assert titles(axes) == ("planned", "makespan 330 ms, bubble 27.3%") and rows(axes) == ["27.3%"] * 4
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    found = bars(axes)
    for rank in range(4):
        assert found[rank, "F"] == found[rank, "B"] == 8 and found[rank, "bubble"] == len(idle_gaps(spans[rank], 0.33))
    assert sum(found.values()) == 4 * 16 + sum(found[rank, "bubble"] for rank in range(4))
    drawn = {collection.get_gid(): times(collection) for collection in axes.collections}
    numpy.testing.assert_allclose(drawn["rank0-bubble"][0], (0.04, 0.10), atol=1e-12)
    numpy.testing.assert_allclose(
        drawn["rank3-B0"], [(span.start, span.end) for span in spans[3] if span.action.kind == "B"]
    )
    assert all(collection.get_hatch() for collection in axes.collections if collection.get_label() == "bubble")
    assert axes.yaxis_inverted() and figure.get_suptitle() == "a run"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "full backward", "bubble"]


def test_planned_above_measured_share_one_time_axis():
    slower = [
        [ActionSpan(action, 2 * start, 2 * end) for action, start, end in spans] for spans in planned("zb_h1", 3, 5)
    ]
    figure = draw_schedule({"planned": planned("zb_h1", 3, 5), "measured": slower})
    above, below = figure.axes
    assert above.get_position().y0 > below.get_position().y1 and above.get_xlim() == below.get_xlim()
    assert below.get_xlim() == (0, pytest.approx(measure_timeline(slower)[0])) and bars(above) == bars(below)
    assert titles(above)[0] == "planned" and titles(below)[0] == "measured"
    assert titles(above)[1].split("bubble")[1] == titles(below)[1].split("bubble")[1]


def test_numbers_are_micro_batches_and_go_when_bars_are_narrow():
    (axes,) = draw_schedule({"": planned("1f1b", 2, 12)}).axes
    numbers = Counter(text.get_text() for text in axes.texts if text.get_text().isdigit())
    assert numbers == {str(microbatch): 4 for microbatch in range(12)}  # F and B on two ranks
    (crowded,) = draw_schedule({"": planned("zb_h1", 48, 50)}).axes
    assert not [text for text in crowded.texts if text.get_text().isdigit()] and bars(crowded)[0, "W"] == 50


def test_of_hundreds_of_actions_the_beginning_and_the_end_are_drawn():
    """At the end, each timeline ends where it does."""
    short, long = planned("1f1b", 2, 100), planned("1f1b", 2, 100, seconds=2.0)
    figure = draw_schedule({"planned": short, "measured": long})
    begin, end, begin_long, end_long = figure.axes
    assert begin.get_xlim() == begin_long.get_xlim() == (0, pytest.approx(measure_timeline(long)[0] * MOST / 400))
    for axes, ranks in ((end, short), (end_long, long)):
        total, length = measure_timeline(ranks)[0], begin.get_xlim()[1]
        assert axes.get_xlim() == (pytest.approx(total - length), pytest.approx(total)) and rows(axes)
    figure.draw_without_rendering()
    assert titles(begin)[0] == "planned" and "bubble" in titles(end)[1] and not rows(begin)


def test_a_number_lies_in_its_bar():
    figure = draw_schedule({"planned": planned("zb_v", 4, 16), "measured": planned("gpipe", 4, 16)})
    figure.draw_without_rendering()
    checked = 0
    for axes in figure.axes:
        boxes = [
            path.get_extents(axes.transData)
            for collection in axes.collections
            if collection.get_label() != "bubble"
            for path in collection.get_paths()
        ]
        for text in axes.texts:
            if text.get_text().isdigit():
                extent = text.get_window_extent()
                assert any(
                    box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.y0 <= extent.y0 and extent.y1 <= box.y1
                    for box in boxes
                ), text
                checked += 1
    assert checked >= 4 * 16 * 2


def test_chunks_are_shades_and_overlaps_share_a_row():
    def overlap(forward, backward):
        return Action(-1, "OVERLAP_F_B", None, (Action(*forward), Action(*backward)))

    ranks = [
        [
            ActionSpan(Action(0, "F", 0), 0, 1),
            ActionSpan(overlap((0, "F", 1), (3, "B", 0)), 1, 4),
            ActionSpan(Action(0, "REDUCE_GRAD"), 4, 5),
        ],
        [ActionSpan(Action(1, "F", 0), 1, 2), ActionSpan(Action(2, "I", 0), 2, 3), ActionSpan(Action(2, "W", 0), 3, 4)],
    ]
    (axes,) = draw_schedule({"measured": ranks}, seconds=False).axes
    found = {collection.get_gid(): collection for collection in axes.collections}
    # rank 0 computes 4 of 5, rank 1 3 of 5: reducing gradients is drawn, and is no computation
    assert titles(axes)[1] == "makespan 5, bubble 30.0%" and rows(axes) == ["20.0%", "40.0%"]
    assert times(found["rank0-other0"]) == [(4, 5)]
    above, below = (found[f"rank0-{half}-overlap"] for half in ("F0", "B1"))
    assert times(found["rank0-F0"]) == [(0, 1)] and times(above) == times(below) == [(1, 4)]
    above, below = (half.get_paths()[0].vertices[:, 1] for half in (above, below))
    assert (
        above.max() == pytest.approx(below.min())
        and above.min() == pytest.approx(-0.42)
        and below.max() == pytest.approx(0.42)
    )
    shades = [
        matplotlib.colors.rgb_to_hsv(found[gid].get_facecolor()[0][:3]) for gid in ("rank1-F0", "rank1-I1", "rank1-W1")
    ]
    assert len({round(float(hue), 2) for hue, _, _ in shades}) == 3


def luminance(colour):
    """Lightness (CIE L*, 0 to 100) that a colour has in grey print."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 116 * numpy.dot(linear, [0.2126, 0.7152, 0.0722]) ** (1 / 3) - 16


def test_kinds_are_told_apart_without_colour():
    base = sorted(luminance(pictures._colour(kind, 0, 1)) for kind in pictures.ACTION_STYLES)
    assert min(high - low for low, high in zip(base, base[1:])) > 15
    for kind, look in pictures.ACTION_STYLES.items():
        ink, shades = (
            luminance(matplotlib.colors.to_rgb(look.ink)),
            [luminance(pictures._colour(kind, chunk, 2)) for chunk in (0, 1)],
        )
        assert shades[1] - shades[0] > 6 and all(abs(ink - shade) > 35 for shade in shades)


@pytest.mark.parametrize("ranks, microbatches", [(2, 1), (16, 64)])
@pytest.mark.parametrize("suffix, start", [(".png", PNG), (".svg", b"<?xml")])
def test_pictures_are_written_at_every_size(ranks, microbatches, suffix, start, tmp_path):
    path = tmp_path / f"schedule{suffix}"
    save_figure(draw_schedule({"planned": planned("gpipe", ranks, microbatches)}), path)
    assert path.read_bytes().startswith(start)
    if suffix == ".svg":
        text = path.read_text()
        assert all(f'id="rank{rank}-F0"' in text and f'id="rank{rank}-bubble"' in text for rank in range(ranks))


spans = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=20).map(
    lambda pairs: [
        ActionSpan(Action(0, "F", index), start, start + length) for index, (start, length) in enumerate(pairs)
    ]
)


@given(spans, st.floats(0, 50))
def test_gaps_and_computation_fill_the_step(spans, more):
    makespan = max([span.end for span in spans], default=0.0) + more + 1
    gaps = idle_gaps(spans, makespan)
    grid = numpy.linspace(0, makespan, 997)[1:-1]
    busy = numpy.zeros(len(grid), bool)
    for span in spans:
        busy |= (grid > span.start) & (grid < span.end)
    for start, length in gaps:
        inside = (grid > start) & (grid < start + length)
        assert length > 0 and not busy[inside].any()
        busy |= inside
    assert (~busy).mean() <= 2 * (len(spans) + 1) / len(grid)  # the grid's points at the edges


@pytest.mark.parametrize("name", TEMPLATES)
def test_bubbles_are_those_of_the_simulator(name):
    schedule = build_schedule(name, 4, 12)
    step = simulate_schedule(
        schedule, StageCosts.uniform(schedule.stages, 0.3, 0.7, 0.2, b=0.8, transfer=0.05, unshard=0.1, reduce=0.4)
    )
    makespan, bubble, bubbles = measure_timeline(step.spans, step.makespan)
    assert makespan == step.makespan and bubble == pytest.approx(step.bubble) and bubbles == pytest.approx(step.bubbles)
    (axes,) = draw_schedule({name: step.spans}, makespans={name: step.makespan}).axes
    assert f"bubble {100 * step.bubble:.1f}%" in titles(axes)[1]
    assert axes.get_xlim()[1] == step.makespan > max(span.end for row in step.spans for span in row)


def test_timelines_survive_their_file(tmp_path):
    overlap = Action(-1, "OVERLAP_F_B", None, (Action(0, "F", 7), Action(1, "B", 3)))
    ranks = (
        tuple(planned("zb_v", 2, 6, 0.1 / 3)[0]),
        (ActionSpan(Action(1, "REDUCE_GRAD"), 0.0, 1e-3), ActionSpan(overlap, 0.5, 0.75)),
        (),
    )
    path = tmp_path / "schedule" / "measured.json"
    write_timeline(path, ranks)
    assert read_timeline(path) == (ranks, measure_timeline(ranks)[0])
    content = json.loads(path.read_text())
    assert (content["makespan"], content["bubble"]) == measure_timeline(ranks)[:2]
    assert content["ranks"][0][0] == {"action": "0F0", "start": 0.0, "end": 0.1 / 3}
    write_timeline(path, ranks, 9.0)
    assert (
        read_timeline(path) == (ranks, 9.0)
        and json.loads(path.read_text())["bubble"] == measure_timeline(ranks, 9.0)[1]
    )
    early = ((ActionSpan(Action(0, "F", 0), -1e-6, 1.0),),)  # ranks' clocks differ a little
    write_timeline(path, early, 0.5)
    assert read_timeline(path) == (early, 1.0) and measure_timeline(early) == (1.0, 0.0, (0.0,))
    assert [entry.name for entry in path.parent.iterdir()] == ["measured.json"]  # nothing half-written stays behind


GOOD = '{"makespan": 1, "bubble": 0, "ranks": [[{"action": "0F0", "start": 0, "end": 1}], [%s]]}'
DAMAGED = {
    "torn": (GOOD[:40], "not JSON"),
    "list": ("[]", "no actions under 'ranks'"),
    "empty": ('{"ranks": [[], []]}', "no actions"),
    "word": (GOOD % '{"action": "0X0", "start": 0, "end": 1}', "rank 1, action 0"),
    "missing": (GOOD % '{"action": "1F0", "start": 0}', "rank 1, action 0"),
    "backwards": (GOOD % '{"action": "1F0", "start": 0.5, "end": 0.25}', "1F0 from 0.5 to 0.25"),
    "nan": (GOOD % '{"action": "1F0", "start": 0, "end": NaN}', "rank 1, action 0"),
    "short": (GOOD % '{"action": "1F0", "start": 0, "end": 2}', "makespan 1, but the last action ends at 2"),
}


@pytest.mark.parametrize("text, words", DAMAGED.values(), ids=DAMAGED)
def test_damaged_timelines_are_refused(text, words, tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_timeline(path)
    assert str(path) in str(caught.value) and words in str(caught.value) and "damaged" in str(caught.value)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that the command saves, by file name; they are not rendered, which takes a second each."""
    figures = {}
    for module in (runs, templates):
        monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.update({path.name: figure}))
    return figures


def test_templates_are_compared_on_one_axis(drawn, tmp_path, capsys):
    out = tmp_path / "x.svg"
    arguments = ["--schedule", "1f1b", "interleaved", "--ranks", "4", "--microbatches", "8", "--out", str(out)]
    assert plot.main(arguments) == 0
    assert capsys.readouterr().out == f"{out}\n"
    plain, interleaved = drawn["x.svg"].axes
    # a rank works 8 x 3; the bubble of 3 x 3 is halved by two chunks
    assert titles(plain) == ("1f1b: 4 ranks, 8 micro-batches", "makespan 33, bubble 27.3%")
    assert titles(interleaved) == ("interleaved: 4 ranks x 2 chunks, 8 micro-batches", "makespan 28.5, bubble 15.8%")


def test_a_csv_file_is_drawn_as_it_says(drawn, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(format_schedule(build_schedule("zb_v", 2, 6)))
    assert plot.main(["--schedule", "mine.csv"]) == 0 and capsys.readouterr().out == "schedule.png\n"
    (axes,) = drawn["schedule.png"].axes
    assert titles(axes)[0] == "mine.csv: 2 ranks x 2 chunks, 6 micro-batches" and bars(axes)[1, "F"] == 12


def folder_of_run(folder, *names):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in (1, 2, 3))
    )
    for name, seconds in zip(names, (0.01, 0.015)):
        write_timeline(folder / "schedule" / f"{name}.json", planned("1f1b", 2, 4, seconds))
    return folder


def test_a_run_with_a_pipeline_has_a_picture(tmp_path, capsys):
    run = folder_of_run(tmp_path / "deep", "planned", "measured")
    assert plot.main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'schedule.png'}\n"
    assert (run / "schedule.png").read_bytes().startswith(PNG)


def test_the_panels_of_a_run(drawn, tmp_path, capsys):
    run = folder_of_run(tmp_path / "deep", "planned", "measured")
    write_timeline(run / "schedule" / "measured.json", planned("1f1b", 2, 4, 0.015), 0.25)
    assert plot.main([str(run), "--out", str(tmp_path / "pictures" / "x.svg")]) == 0
    figure = drawn["x.svg"]
    assert set(drawn) == {"x.svg"} and figure.get_suptitle() == "deep"
    assert [titles(axes) for axes in figure.axes] == [
        ("planned", "makespan 150 ms, bubble 20.0%"),
        ("measured", "makespan 250 ms, bubble 28.0%"),
    ]


def test_runs_that_have_only_a_plan_or_no_pipeline(drawn, tmp_path, capsys):
    young, plain = folder_of_run(tmp_path / "young", "planned"), folder_of_run(tmp_path / "plain")
    assert plot.main([str(plain)]) == 2 and not drawn
    assert plot.main([str(young)]) == 0 and [titles(axes)[0] for axes in drawn["schedule.png"].axes] == ["planned"]


@pytest.mark.parametrize(
    "words",
    [["plain"], ["plain/metrics.jsonl"], ["young", "plain"], ["young", "plain", "--out", "both.png"], ["sweep"]],
    ids=" ".join,
)
def test_curves_are_answered_with_the_command_that_draws_them(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder_of_run(tmp_path / "young", "planned")
    for name in ("plain", "sweep"):
        folder_of_run(tmp_path / name)
    before = set(tmp_path.rglob("*"))
    code = plot.main(words)
    runs = [word.removesuffix("/metrics.jsonl") for word in words if Path(word).exists()]
    [line] = [line for line in capsys.readouterr().err.splitlines() if "trainer report" in line]
    assert code == 2 and line.endswith(f"for curves use: trainer report {' '.join(runs)}")
    assert set(tmp_path.rglob("*")) == before


def test_a_damaged_timeline_of_a_run_is_said(tmp_path, capsys):
    run = folder_of_run(tmp_path / "deep", "planned", "measured")
    (run / "schedule" / "measured.json").write_text('{"makespan": 1, "ranks": [[{"act')
    assert plot.main([str(run)]) == 2
    shown = capsys.readouterr().err
    assert str(run / "schedule" / "measured.json") in shown and "damaged" in shown and "Traceback" not in shown


SIZE = ["--ranks", "4", "--microbatches", "8"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--schedule", "1f2b", *SIZE], ["--schedule 1f2b", "zb_v", ".csv"]),
        (["--schedule", "absent.csv"], ["--schedule absent.csv", "cannot read"]),
        (["--schedule", "bad.csv"], ["bad.csv, line 2, cell 2"]),
        (["--schedule", "bad.csv", *SIZE], ["--ranks, --microbatches", "bad.csv"]),
        (["--schedule", "stuck.csv"], ["stuck.csv: rank 1"]),
        (["--schedule", "1f1b"], ["--ranks", "--microbatches"]),
        (["--schedule", "1f1b", "--ranks", "0", "--microbatches", "8"], ["--ranks"]),
        (["--schedule", "1f1b", "--ranks", "4", "--microbatches", "0"], ["--microbatches"]),
        (["--schedule", "1f1b", "--ranks", "4", "--microbatches", "many"], ["microbatches=many must be"]),
        (["--schedule", "zb_v", *SIZE, "--chunks", "3"], ["--chunks"]),
        (["--schedule", "1f1b", *SIZE, "--smooth", "3"], ["--smooth is no option of trainer plot"]),
        (["run", "--what"], ["--what is no option of trainer plot"]),
        ([], ["give a RUN, or --schedule"]),
        (["absent"], ["absent", "no such folder", "runs/NAME"]),
        (["--schedule", "1f1b", *SIZE, "--out", "x.doc"], [".svg"]),
        (["run", "--schedule", "1f1b", *SIZE], ["not both"]),
        (["run", "--ranks", "4"], ["--ranks goes with --schedule"]),
        *((["run", f"--{name}", "0"], [f"--{name} goes with --schedule"]) for name in ("ranks", "chunks")),
    ],
)
def test_what_cannot_be_drawn_exits_with_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1F0,what\n")
    (tmp_path / "stuck.csv").write_text("0F0,0B0\n1B0,1F0\n")
    folder_of_run(tmp_path / "run")
    code = plot.main(arguments)
    shown = capsys.readouterr().err
    assert code == 2 and all(word in shown for word in words) and "Traceback" not in shown and "parallel." not in shown
