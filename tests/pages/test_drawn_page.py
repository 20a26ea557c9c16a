"""The page of runs as a browser draws it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.browser import CHROMIUM, Browser
from support.runs import account, write_metrics, write_run, write_search

from trainer.pages.page import write_page
from trainer.planning.schedules.costs import StageCosts
from trainer.planning.schedules.ir import Action
from trainer.planning.schedules.simulate import ActionSpan, measure_timeline, simulate_schedule, write_timeline
from trainer.planning.schedules.templates import TEMPLATES, build_schedule


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("there is no chromium to look with: apt-get install chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of one run with everything, whose texts are hostile; of three runs, and of twenty."""
    folder = tmp_path_factory.mktemp("pages")
    hostile = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>"
    names = ("a", "b", f"{'long-' * 12}name")
    runs = [write_run(folder / name, 40, 1 + 0.2 * place) for place, name in enumerate(names)]
    write_metrics(runs[0], 40, **{f"user/{hostile}": 1.5, "__proto__": 2.0, "loss/constructor": 3.0})
    status = {"status": "failed", "step": 40, "steps": 50, "reason": f"{hostile} {'x' * 300}"}
    (runs[0] / "status.json").write_text(json.dumps(status))
    write_page(runs[:1], folder / "one.html")
    write_page(runs, folder / "three.html")
    many = [write_run(folder / f"many/run-{place}-of-a-sweep", 20, 1 + 0.1 * place) for place in range(20)]
    write_page(many, folder / "twenty.html")
    search = write_search(folder / "tune", f"{'long_' * 20}{hostile}", best="dp2_full", ended=hostile)
    write_page([search], folder / "search.html")
    return {name: folder / f"{name}.html" for name in ("one", "three", "twenty", "search")}


SEEN = """(() => {
  const all = (what) => [...document.querySelectorAll(what)], box = (one) => one.getBoundingClientRect();
  const far = all("main *").filter((one) => box(one).right > innerWidth + 1 && !one.closest(".scroll, nav"));
  const shown = all("figure").filter((one) => box(one).height), chart = (figure) => charts.get(figure).chart;
  const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const coloured = ({ canvas }) => {  // axes are grey
    [copy.canvas.width, copy.canvas.height] = [canvas.width, canvas.height];
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    return data.some((red, at) => at % 4 === 0 && data[at + 3] > 200 && Math.abs(red - data[at + 2]) > 40);
  };
  const points = (one) => one.data.datasets.flatMap((_, place) => one.getDatasetMeta(place).data);
  const drawn = (one) => points(one).filter((point) => !point.skip);
  const inside = ({ chartArea: area }, { x, y }) => x >= area.left - 1 && x <= area.right + 1 && y <= area.bottom + 1;
  return {
    wide: document.documentElement.scrollWidth - innerWidth,
    far: far.slice(0, 3).map((one) => one.outerHTML.slice(0, 200)),
    hit: window.hit ?? null,
    sections: all("section").filter((one) => box(one).height > 60).map((one) => one.id),
    plots: shown.length,
    drawn: shown.map(chart).filter((one) => coloured(one) && drawn(one).some((point) => inside(one, point))).length,
    broken: shown.map(chart).flatMap(drawn).filter((point) => !Number.isFinite(point.x + point.y)).length,
    paper: getComputedStyle(document.body).backgroundColor,
  };
})()"""


UNFOLDED = """(async () => {
  const folds = [...document.querySelectorAll("details.one")];
  if (!folds.length) return null;
  for (const one of folds) one.open = true;
  await new Promise((done) => setTimeout(done, 100));
  const plots = folds.flatMap((one) => [...one.querySelectorAll(".plot")]);
  const fills = (plot) => Math.abs(plot.querySelector("canvas").getBoundingClientRect().width - plot.clientWidth) < 2;
  return { whole: plots.length, drawn: plots.filter(fills).length };
})()"""
"""Opens what is told run by run: how many plots are there, and how many fill their width."""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_are_drawn_whole(browser, pages, width, dark):
    everything = ["bound", "account", "curves", "schedule", "kernels", "memory", "plan", "starts"]
    searched = ["best", "foretold", "trials", "compared", "curves"]
    for name, sections in (("one", everything), ("three", ["differ", *everything]), ("search", searched)):
        browser.open(pages[name].as_uri(), width, dark)
        seen = browser.evaluate(SEEN)
        assert not browser.complaints, browser.complaints
        assert seen["hit"] is None and seen["wide"] <= 0 and not seen["far"] and not seen["broken"], seen
        assert seen["sections"] == sections and seen["drawn"] == seen["plots"] >= 9, seen
        unfolded = browser.evaluate(UNFOLDED)
        assert unfolded is None or unfolded["drawn"] == unfolded["whole"] > 3, unfolded
        seen = browser.evaluate(SEEN)
        assert seen["wide"] <= 0 and not seen["far"] and not seen["broken"] and seen["drawn"] == seen["plots"] > 10, (
            seen
        )
        channels = [int(channel) for channel in seen["paper"].strip("rgb()").split(",")]
        assert max(channels) < 60 if dark else min(channels) > 230


CHART = "charts.get(document.querySelector('figure{}')).chart"


def move(browser: Browser, figure: str, *places: tuple[float, float], drag: bool = False) -> None:
    """Moves the pointer to places of a figure's canvas, in pixels, with its button held down if it drags."""
    canvas = f"document.querySelector('figure{figure} canvas')"
    browser.evaluate(f"{canvas}.scrollIntoView({{block: 'center'}})")
    left, top = browser.evaluate(f"(({{x, y}}) => [x, y])({canvas}.getBoundingClientRect())")
    kinds = (
        ["mousePressed", *["mouseMoved"] * (len(places) - 2), "mouseReleased"] if drag else ["mouseMoved"] * len(places)
    )
    for kind, (x, y) in zip(kinds, places, strict=True):
        button = {"button": "left", "buttons": 1, "clickCount": 1} if drag else {}
        browser.call("Input.dispatchMouseEvent", type=kind, x=left + x, y=top + y, **button)
    browser.evaluate("new Promise((done) => setTimeout(done, 50))")


def test_a_reader_chooses(browser, pages):
    browser.open(pages["three"].as_uri(), 1280)
    loss, norm = '[data-panel="0"]', '[data-panel="1"]'
    limits = "(({{min, max}}) => [min, max])(" + CHART + ".scales.x)"
    lines = f"{CHART.format(loss)}.data.datasets.length"
    whole, several = browser.evaluate(limits.format(loss)), browser.evaluate(lines)
    browser.evaluate("document.querySelector('[data-run=\"2\"]').click()")
    assert 0 < browser.evaluate(lines) < several, "a run that is put away is not drawn"
    chosen = [browser.evaluate(f"{CHART.format(loss)}.scales.x.getValueForPixel({x})") for x in (200, 330)]
    move(browser, loss, (200, 60), (250, 60), (330, 60), (330, 60), drag=True)
    for figure in (loss, norm):
        assert browser.evaluate(limits.format(figure)) == pytest.approx(chosen, abs=1e-6), "all curves are zoomed"
    assert browser.evaluate("choice.zooms.has('curves') && !document.getElementById('reset').hidden")
    browser.evaluate(
        f"document.querySelector('figure{norm} canvas').dispatchEvent(new Event('dblclick', {{bubbles: true}}))"
    )
    assert browser.evaluate(limits.format(loss)) == whole, "a double click shows all"
    move(browser, loss, (200, 60), (250, 60), (330, 60), (330, 60), drag=True)
    browser.evaluate("document.getElementById('reset').click()")
    assert browser.evaluate(limits.format(loss)) == whole
    move(browser, loss, (200, 60), (250, 60), (330, 60), (330, 60), drag=True)
    browser.evaluate("document.querySelector('[data-x=tokens]').click()")
    assert browser.evaluate(limits.format(loss)) == [2048 * step for step in whole]
    kind = f"{CHART.format(loss)}.options.scales.y.type"
    for expected in ("logarithmic", "linear"):
        browser.evaluate(f"document.querySelector('figure{loss} button').click()")
        assert browser.evaluate(kind) == expected
        if expected == "logarithmic":
            assert browser.evaluate(f"{CHART.format(loss)}.scales.y.ticks.map((one) => one.label)") == ["2", "5", "10"]
    before = browser.evaluate(lines)
    browser.evaluate(
        "(smooth => (smooth.value = 9, smooth.dispatchEvent(new Event('input', {bubbles: true}))))"
        "(document.getElementById('smooth'))"
    )
    assert browser.evaluate(lines) == before + 2, "the means of two runs, over the faint curves of their steps"
    paper, ink = "getComputedStyle(document.body).backgroundColor", f"{CHART.format(loss)}.options.scales.x.ticks.color"
    light = browser.evaluate(paper), browser.evaluate(ink)
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(paper) != light[0] and browser.evaluate(ink) != light[1] and not browser.complaints


def test_tables_of_twenty_runs_fit_a_window(browser, pages):
    wide = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1)"
    for name in ("three", "twenty"):
        browser.open(pages[name].as_uri(), 1300)
        assert browser.evaluate(f"{wide}.map((one) => one.outerHTML.slice(0, 300))") == []
        assert browser.evaluate("document.querySelectorAll('section .scroll > table').length") > 5


def test_names_of_many_runs_stand_once_above_all_charts(browser, pages):
    """A chart tells apart the run that the reader points at, by its name or its curve, and all others do the same."""
    named = "[...document.querySelectorAll('figure[data-panel]')].map((one) => one.querySelectorAll('.keys em').length)"
    browser.open(pages["three"].as_uri(), 1300)
    assert browser.evaluate(named)[0] == 6, "few runs are named in every chart, beside each metric"
    browser.open(pages["twenty"].as_uri(), 1300)
    assert set(browser.evaluate(named)) == {0}
    place = browser.evaluate("data.panels.findIndex((one) => one.title === `tokens_per_second`)")
    figure = f'[data-panel="{place}"]'
    told = "[...new Set([...document.querySelectorAll('.keys em')].map((one) => one.textContent))]"
    strong = (
        "[...charts].filter(([figure]) => figure.dataset.panel).map(([_, { chart }]) => "
        "chart.data.datasets.filter((set) => set.borderColor === colourOf(`c${set.run % 7}`)).map((set) => set.run))"
    )
    button = "document.querySelector('[data-run=\"{}\"]')"
    every = browser.evaluate(strong)
    assert len(every) > 5 and all(runs == list(range(20)) for runs in every)
    left, top = browser.evaluate(
        f"({button.format(11)}.scrollIntoView({{block: 'center'}}), (({{x, y}}) => [x + 5, y + 5])"
        f"({button.format(11)}.getBoundingClientRect()))"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)
    browser.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert browser.evaluate(told) == ["run-11-of-a-sweep"] and browser.evaluate(strong) == [[11]] * len(every)
    point = f"{CHART.format(figure)}.getDatasetMeta({{}}).data[9]"
    x, y = browser.evaluate(f"(({{x, y}}) => [x, y])({point.format(16)})")
    move(browser, figure, (x, y))
    assert browser.evaluate(told) == ["run-16-of-a-sweep"] and browser.evaluate(strong) == [[16]] * len(every)
    assert browser.evaluate(f"document.querySelector('figure{figure} .readout').textContent") == "step 10"
    move(browser, figure, (x, -300))
    assert browser.evaluate(told) == [] and browser.evaluate(strong) == every, "the pointer has left the chart"
    browser.evaluate(
        f"document.querySelector('figure{figure} canvas').dispatchEvent("
        "new KeyboardEvent('keydown', { key: 'Home', bubbles: true }))"
    )
    browser.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert len(browser.evaluate(told)) == 20, "keys point at no run, and so tell all"
    browser.evaluate("moveCursors(null)")
    browser.evaluate("new Promise((done) => setTimeout(done, 50))")
    for hidden in range(13):
        browser.evaluate(f"{button.format(hidden)}.click()")
        assert len(browser.evaluate(told)) == (7 if hidden == 12 else 0), "seven that are shown are few again"
    assert not browser.complaints


@given(low=st.floats(-300, 299), decades=st.floats(0, 300))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_logarithmic_axis_has_a_few_round_ticks(browser, pages, low, decades):
    if browser.evaluate("typeof logarithmic") != "function":
        browser.open(pages["one"].as_uri(), 1280)
    values = [10**low, 10 ** min(low + decades, 300)]
    ticks = browser.evaluate(f"""(() => {{
      const y = logarithmic("", {values}), canvas = element("canvas", {{ width: 400, height: 400 }});
      const chart = new Chart(canvas, {{ data: {{ datasets: [line([{{ x: 0, y: {values[0]} }}], "c0")] }}, options: {{
        responsive: false, scales: {{ x: axis(""), y }} }} }});
      const found = chart.scales.y.ticks.map((one) => one.value);
      chart.destroy();
      return found;
    }})()""")
    assert 2 <= len(ticks) <= 11 and all(f"{tick:.5e}"[:7] in ("1.00000", "2.00000", "5.00000") for tick in ticks)
    if decades < 2:
        assert min(ticks) <= values[0] <= 2.6 * min(ticks) and max(ticks) / 2.6 <= values[1] <= max(ticks)


def test_a_timeline_is_zoomed_alone_and_by_time(browser, pages):
    browser.open(pages["one"].as_uri(), 1280)
    first, second = '[data-timeline="0 0"]', '[data-timeline="0 1"]'
    limits = "((chart) => [chart.scales.x.max, chart.scales.y.max])(" + CHART + ")"
    whole = [browser.evaluate(limits.format(one)) for one in (first, second)]
    move(browser, first, (300, 30), (400, 30), (500, 30), (500, 30), drag=True)
    found = browser.evaluate(limits.format(first))
    assert found[0] < whole[0][0] and found[1] == whole[0][1] and browser.evaluate(limits.format(second)) == whole[1]
    browser.evaluate(
        f"document.querySelector('figure{first} canvas').dispatchEvent(new Event('dblclick', {{bubbles: true}}))"
    )
    assert browser.evaluate(limits.format(first)) == whole[0] and not browser.complaints


BARS = """(() => {
  const { chart } = charts.get(document.querySelector('figure[data-timeline="0 0"]')), { x } = chart.scales;
  const barOf = ({ base, x: end, y, height }, { rank, what }) => ({
    rank, what, start: x.getValueForPixel(base), end: x.getValueForPixel(end),
    left: base, right: end, top: y - height / 2, bottom: y + height / 2,
  });
  const barsOf = (set, place) => chart.getDatasetMeta(place).data.map((bar, index) => barOf(bar, set.data[index]));
  return chart.data.datasets.flatMap((set, place) => (set.silent ? [] : barsOf(set, place)));
})()"""
"""Every bar of the first timeline: its texts, its times by the axis, and its edges in pixels."""


def overlap(spans: Sequence[ActionSpan]) -> list[ActionSpan]:
    """The actions of a rank with each forward and the backward behind it as one overlap."""
    found: list[ActionSpan] = []
    for span in spans:
        if span.action.kind == "B" and found and found[-1].action.kind == "F":
            forward = found.pop()
            action = Action(-1, "OVERLAP_F_B", None, (forward.action, span.action))
            span = ActionSpan(action, forward.start, span.end)
        found.append(span)
    return found


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_bars_of_a_timeline_stand_at_their_times_and_apart(browser, tmp_path, name, overlapped):
    schedule = build_schedule(name, 3, 6)
    found = simulate_schedule(schedule, StageCosts.uniform(schedule.stages, 0.01, 0.02, 0.005))
    timeline = [overlap(spans) if overlapped else spans for spans in found.spans]
    folder = write_run(tmp_path / "run", 2)
    write_timeline(folder / "schedule/planned.json", timeline, found.makespan)
    write_page([folder], tmp_path / "page.html")
    browser.open((tmp_path / "page.html").as_uri(), 1280)
    bars = browser.evaluate(BARS)
    kinds = {"F": "forward", "B": "full backward", "I": "input gradient", "W": "weight gradient"}
    expected = {
        (rank, f"{kinds[one.kind]}, micro-batch {one.microbatch}, stage {one.stage}"): (span.start, span.end)
        for rank, spans in enumerate(timeline)
        for span in spans
        for one in span.action.parts or (span.action,)
    }
    drawn = {(bar["rank"], bar["what"]): (bar["start"], bar["end"]) for bar in bars}
    assert drawn.keys() == expected.keys() and len(bars) == len(drawn)
    labels = "(({{y, right}}) => [y, right].map(({{ticks}}) => ticks.map((one) => one.label)))(" + CHART + ".scales)"
    ranks, shares = browser.evaluate(labels.format('[data-timeline="0 0"]'))
    assert ranks == ["rank 0", "rank 1", "rank 2"]
    bubbles = measure_timeline(timeline, found.makespan)[2]
    assert [float(share.removesuffix("%")) for share in shares] == pytest.approx(
        [100 * one for one in bubbles], rel=5e-3
    )
    for action, times in expected.items():
        assert drawn[action] == pytest.approx(times, abs=found.makespan / 1000), "a pixel"
    for one, other in itertools.combinations(bars, 2):
        across = min(one["right"], other["right"]) - max(one["left"], other["left"])
        assert across < 1 or min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) < 0.1, (one, other)


def test_the_pointer_and_keys_go_from_point_to_point(browser, pages):
    browser.open(pages["one"].as_uri(), 1280)

    def press(figure: str, key: str) -> str:
        browser.evaluate(f"document.querySelector('figure{figure} canvas').focus()")
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key)
        browser.evaluate("new Promise(requestAnimationFrame)")
        return said(figure)

    def said(figure: str) -> str:
        return browser.evaluate(f"document.querySelector('figure{figure} .readout').textContent")

    def point_at(figure: str, dataset: int, index: int) -> None:
        """Moves the pointer onto a point, or the middle of a bar."""
        point = f"{CHART.format(figure)}.getDatasetMeta({dataset}).data[{index}].getCenterPoint()"
        move(browser, figure, tuple(browser.evaluate(f"(({{x, y}}) => [x, y])({point})")))

    loss = "data.runs[0].series.find((one) => one.name === 'loss').v"
    place = browser.evaluate("data.panels.findIndex((one) => one.title === `loss`)")
    figure = f'[data-panel="{place}"]'
    shown = f"document.querySelector('figure{figure} .keys b').textContent"
    for key, place in (("Home", 0), ("ArrowRight", 1), ("PageDown", 11), ("ArrowLeft", 10), ("End", 39)):
        assert press(figure, key) == f"step {place + 1}"
        assert browser.evaluate(shown) == browser.evaluate(f"number({loss}[{place}], 5)"), key
    point_at('[data-panel="1"]', 0, 6)
    assert said(figure) == "step 7" and browser.evaluate(shown) == browser.evaluate(f"number({loss}[6], 5)"), (
        "the cursor of one panel is that of all"
    )
    assert "rank 0: forward, micro-batch 0" in press("[data-timeline]", "ArrowRight")
    assert "rank 0: forward, micro-batch 1" in press("[data-timeline]", "ArrowRight")
    assert "rank 1: full backward, micro-batch 7, stage 1" in press("[data-timeline]", "End")
    point_at("[data-timeline]", 0, 0)
    assert said("[data-timeline]").startswith("rank 0: forward, micro-batch 0, stage 0: 10 ms, from 0 s to 10 ms")
    assert "TFLOP/s at" in press("[data-roofline]", "Home")
    point_at("[data-roofline]", 0, 1)
    assert said("[data-roofline]").startswith("flash_fwd_kernel: 50 ms in 24 calls, 240TFLOP/s at 300 FLOP per byte")
    browser.open(pages["search"].as_uri(), 1280)
    foretold = '[data-search="0 foretold"]'
    told = "tp2_none: measured 800 ms, 2560 tokens/s, 20 GiB allocated; expected 600 ms (480 ms to 750"
    press(foretold, "Home")
    assert press(foretold, "ArrowRight").startswith(told)
    point_at(foretold, 0, 2)
    assert said(foretold).startswith("dp2_full: measured 900 ms")
    assert not browser.complaints


TRIED = """(() => {
  const click = (one) => one.click(), all = (what) => [...document.querySelectorAll(what)], odd = [];
  const press = (canvas, key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const look = (figure) => {
    const points = charts.get(figure).chart.data.datasets.flatMap((set) => set.data);
    const numbers = points.flatMap((point) => Object.values(point)).flat();
    const wrong = numbers.filter((value) => typeof value === "number" && !Number.isFinite(value));
    if (wrong.length || /NaN|undefined|Infinity/.test(figure.textContent)) odd.push([figure.textContent, wrong]);
  };
  const then = (done) => all("figure").forEach(look);
  for (const x of ["hours", "tokens", "step"]) then(all(`[data-x=${x}]`).forEach(click));
  for (const smooth of [9, 1]) then(drawCurves(choice.smooth = smooth));
  for (const _ of [0, 1]) then(all("figcaption button").filter((one) => !one.hidden).forEach(click));
  for (const key of ["Home", "PageDown", "End", "ArrowLeft"]) then(all("canvas").forEach((one) => press(one, key)));
  for (const _ of [0, 1]) then(all("[data-run]").forEach(click));
  return odd;
})()"""
"""Does what a reader can do with charts, and returns texts and points that are no numbers on the way."""
TOLD = """(() => [...charts].map(([figure, { chart }]) => [
  "roofline" in figure.dataset ? "roofline" : Object.values(figure.dataset)[0],
  chart.data.datasets.flatMap((set, place) => (set.silent ? [] : chart.getDatasetMeta(place).data))
    .filter((one) => !one.skip).length,
]))()"""
"""By figure, how many points and bars are drawn that are told to the reader."""
GENERATED = (Phase.explicit, Phase.reuse, Phase.generate)  # a smaller case would take minutes to find
VALUE = st.one_of(
    st.sampled_from([None, 0.0, -1.0, 1.0, 1e-300, -1e300, 1e300, 5e-324]), st.floats(-1e6, 1e6), st.floats(1e-9, 1e18)
)
TIME = st.floats(1e-9, 1e9)


def is_sound(browser: Browser, page: Path) -> None:
    """Opens a page and does what a reader can do: the browser has no complaint, and every point a place."""
    browser.open(page.as_uri(), 1280)
    told = browser.evaluate(TRIED)
    seen = browser.evaluate(SEEN)
    assert not browser.complaints and not told and not seen["broken"], (browser.complaints, told, seen)


@given(
    lines=st.lists(
        st.tuples(st.integers(0, 3), st.floats(-9, 1e6), st.lists(VALUE, min_size=4, max_size=4)), max_size=30
    ),
    runs=st.integers(1, 2),
)
@settings(max_examples=6, deadline=None, phases=GENERATED, suppress_health_check=list(HealthCheck))
def test_any_curve_is_drawn(browser, tmp_path_factory, lines, runs):
    folder, step, text = tmp_path_factory.mktemp("curves"), 0, ""
    for more, seconds, values in lines:
        step += more
        line = dict(
            zip(("loss", "eval_loss", "grad_norm", "user/any"), values), step=step, tokens=step * 10, time=seconds
        )
        text += json.dumps(line) + "\n"
    for place in range(runs):
        (folder / f"run-{place}").mkdir()
        (folder / f"run-{place}" / "metrics.jsonl").write_text(text)
        (folder / f"run-{place}" / "status.json").write_text('{"status": "done", "step": 1, "steps": 2}')
    write_page([folder / f"run-{place}" for place in range(runs)], folder / "page.html")
    is_sound(browser, folder / "page.html")


@given(
    plans=st.lists(
        st.tuples(TIME, TIME, TIME, st.sampled_from(["done", "out_of_memory", "failed", "timeout", "other", None])),
        max_size=6,
    ),
    kernels=st.lists(st.tuples(TIME, st.floats(0, 1e18), st.floats(0, 1e18)), min_size=1, max_size=5),
    costs=st.tuples(st.floats(0, 1), st.floats(0, 1e-9), st.floats(0, 1e6)),
)
@settings(max_examples=6, deadline=None, phases=GENERATED, suppress_health_check=list(HealthCheck))
def test_any_search_roofline_and_timeline_is_drawn(browser, tmp_path_factory, plans, kernels, costs):
    folder = tmp_path_factory.mktemp("points")
    foretold = [
        {
            "plan": f"plan {place}",
            "predicted": predicted,
            "expected": expected,
            "low": expected / 2,
            "high": 2 * expected,
        }
        | {"memory_gib": memory, "tokens": 64}
        for place, (predicted, expected, memory, _) in enumerate(plans)
    ]
    search = write_search(folder / "tune", foretold=foretold)
    lines = [
        {"trial": f"plan {place}", "status": status, "step_seconds_p50": memory, "memory_gib": expected}
        for place, (_, expected, memory, status) in enumerate(plans)
        if status
    ]
    (search / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = write_run(folder / "run", 2)
    one = json.loads(account(0).dumps())
    one["kernels"] = [
        one["kernels"][0] | {"name": "k" * 60, "seconds": seconds, "flops": flops, "bytes": size}
        for seconds, flops, size in kernels
    ]
    (run / "accounts.jsonl").write_text(json.dumps(one) + "\n")
    schedule = build_schedule("zb_h1", 2, 2)
    found = simulate_schedule(schedule, StageCosts.uniform(schedule.stages, *costs))
    write_timeline(run / "schedule/measured.json", found.spans, found.makespan)
    for name in ("tune", "run"):
        write_page([folder / name], folder / f"{name}.html")
        is_sound(browser, folder / f"{name}.html")
        told = dict(browser.evaluate(TOLD))
        if name == "run":
            roofline = browser.evaluate("data.runs[0].roofline")
            assert told.get("roofline") == (roofline and len(roofline["kernels"]))
            assert told["0 1"] == sum(len(spans) for spans in found.spans)
        elif plans:
            assert told["0 foretold"] == sum(status not in (None, "other") for *_, status in plans)
            assert told["0 front"] == sum(status in (None, "other", "done") for *_, status in plans)
