"""The page of runs while they go on: what is new arrives, and nothing else can be asked for."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import CHROMIUM, Browser
from support.runs import step_line, write_metrics, write_run, write_search

from trainer.commands import watch
from trainer.pages.page import PageRuns
from trainer.pages.server import PageServer, start_server


@contextlib.contextmanager
def serving(*folders: Path, seconds: float = 0.2) -> Iterator[PageServer]:
    with start_server(PageRuns(folders), 0, seconds) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    with contextlib.closing(connection):
        return answer.status, dict(answer.headers), answer.read().decode()


def add(folder: Path, step: int, **more: float) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(step_line(step, **more)) + "\n")


def losses(text: str) -> list[float]:
    (series,) = (one for one in json.loads(text)["data"]["runs"][0]["series"] if one["name"] == "loss")
    return series["v"]


def test_new_lines_arrive_as_they_come(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with serving(folder) as server:
        assert ask(server, "/")[0] == 200, "a run that has not begun"
        write_metrics(folder, 3)
        version = json.loads(ask(server, "/live?version=")[2])["version"]
        assert ask(server, f"/live?version={version}")[0] == 204
        add(folder, 4, loss=1.25)
        status, _, text = ask(server, f"/live?version={version}")
        assert status == 200 and losses(text)[-1] == 1.25 and len(losses(text)) == 4
        assert "step 4" in json.loads(text)["content"] and json.loads(text)["version"] > version
        (folder / "status.json").write_text('{"status": "stopped", "step": 4, "steps": 9}')
        assert "stopped" in ask(server, f"/live?version={json.loads(text)['version']}")[2]
        shutil.rmtree(folder)
        assert ask(server, "/live?version=")[0] == 200, "what was read is still shown"


def test_trials_arrive_as_they_begin(tmp_path):
    """Of a sweep and of a search, from an empty folder on."""
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    with serving(sweep) as server:
        assert "no step done yet" in ask(server, "/")[2]
        for place, trial in enumerate(("b", "a")):
            version = json.loads(ask(server, "/live?version=")[2])["version"]
            write_metrics(sweep / trial, 2)
            (sweep / trial / "trial.json").write_text("{}")
            fresh = json.loads(ask(server, f"/live?version={version}")[2])
            assert [run["label"] for run in fresh["data"]["runs"]] == sorted("ba"[: place + 1])
        write_search(sweep)
        fresh = json.loads(ask(server, f"/live?version={fresh['version']}")[2])
        assert len(fresh["data"]["runs"]) == 4 and len(fresh["data"]["searches"][0]) == 8
        assert "out of memory" in fresh["content"] and fresh["title"] == "sweep: 4 trials"


@pytest.mark.parametrize(
    "path", ["/metrics.jsonl", "/../status.json", "//etc/passwd", "/run/", "/%2e%2e/status.json", "/live/", "/page.js"]
)
def test_there_is_nothing_but_the_page(tmp_path, path):
    write_metrics(tmp_path / "run", 1)
    with serving(tmp_path / "run") as server:
        assert ask(server, path)[0] == 404 and ask(server, path)[2] == "there is only the page, at /\n"


def test_others_cannot_ask(tmp_path):
    write_metrics(tmp_path / "run", 1)
    with serving(tmp_path / "run") as server:
        assert server.server_address[0] == "127.0.0.1"
        for name, status in {
            "localhost:1": 200,
            "127.0.0.1": 200,
            "[::1]:9": 200,
            "evil.example:8765": 403,
            "": 403,
        }.items():
            assert ask(server, "/", Host=name)[0] == status, name
        assert ask(server, "/", "POST")[0] == 501
        status, headers, text = ask(server, "/", "HEAD")
        assert status == 200 and not text and int(headers["Content-Length"]) > 10_000
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers and headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_what_cannot_be_served_is_said_once(tmp_path, capsys):
    assert watch.main([str(tmp_path / "no"), "port=99999", "every=0"]) == 2
    told = capsys.readouterr().err
    assert "port=99999 must lie in [0, 65535]" in told and "every=0.0 must lie" in told and "no is no folder" in told
    with serving(tmp_path) as server:
        assert watch.main([str(tmp_path), f"port={server.server_port}"]) == 2
    assert "cannot be used (Address already in use); give another one, or 0" in capsys.readouterr().err


def test_the_command_serves_until_ctrl_c(tmp_path):
    write_metrics(tmp_path / "run", 2)
    command = [sys.executable, "-m", "trainer", "watch", str(tmp_path / "run"), "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address, *_ = process.stdout.readline().split()
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
        connection.request("GET", "/")
        assert b"2 of" not in (page := connection.getresponse().read()) and b"step 2" in page
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0 and process.stderr.read() == ""


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("there is no chromium to look with: apt-get install chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of one run with everything, whose texts are hostile; and of three runs."""
    from trainer.pages.page import write_page

    folder = tmp_path_factory.mktemp("pages")
    hostile = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>"
    names = ("a", "b", f"{'long-' * 12}name")
    runs = [write_run(folder / name, 40, 1 + 0.2 * place) for place, name in enumerate(names)]
    write_metrics(runs[0], 40, **{f"user/{hostile}": 1.5, "__proto__": 2.0, "loss/constructor": 3.0})
    status = {"status": "failed", "step": 40, "steps": 50, "reason": f"{hostile} {'x' * 300}"}
    (runs[0] / "status.json").write_text(json.dumps(status))
    write_page(runs[:1], folder / "one.html")
    write_page(runs, folder / "three.html")
    search = write_search(folder / "tune", f"{'long_' * 20}{hostile}", best="dp2_full", ended=hostile)
    write_page([search], folder / "search.html")
    return {name: folder / f"{name}.html" for name in ("one", "three", "search")}


SEEN = """(() => {
  const all = (what) => [...document.querySelectorAll(what)], box = (one) => one.getBoundingClientRect();
  const far = all("main *").filter((one) => box(one).right > innerWidth + 1 && !one.closest(".scroll, nav, svg"));
  return {
    wide: document.documentElement.scrollWidth - innerWidth,
    far: far.slice(0, 3).map((one) => one.outerHTML.slice(0, 200)),
    hit: window.hit ?? null,
    sections: all("section").filter((one) => box(one).height > 60).map((one) => one.id),
    plots: all("figure").length,
    drawn: all("figure .plot").filter((one) => one.querySelector("svg path[d^=M], svg circle")).length,
    broken: all("svg *").filter((one) => /NaN|undefined|Infinity/.test(one.cloneNode().outerHTML)).length,
    paper: getComputedStyle(document.body).backgroundColor,
  };
})()"""


UNFOLDED = """(async () => {
  const folds = [...document.querySelectorAll("details.one")];
  if (!folds.length) return null;
  for (const one of folds) one.open = true;
  await new Promise((done) => setTimeout(done, 50));
  const plots = folds.flatMap((one) => [...one.querySelectorAll(".plot")]);
  const fills = (plot) => Math.abs(plot.querySelector("svg").getBoundingClientRect().width - plot.clientWidth) < 2;
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
        assert seen["sections"] == sections and seen["drawn"] == seen["plots"] > 10, seen
        unfolded = browser.evaluate(UNFOLDED)
        assert unfolded is None or unfolded["drawn"] == unfolded["whole"] > 3, unfolded
        seen = browser.evaluate(SEEN)
        assert seen["wide"] <= 0 and not seen["far"] and seen["drawn"] == seen["plots"], seen
        channels = [int(channel) for channel in seen["paper"].strip("rgb()").split(",")]
        assert max(channels) < 60 if dark else min(channels) > 230


def test_a_reader_chooses(browser, pages):
    browser.open(pages["three"].as_uri(), 1280)
    path = "document.querySelector('figure[data-panel=\"0\"] .plot path.curve').getAttribute('d')"
    lines = "document.querySelectorAll('figure[data-panel=\"0\"] .plot path.curve:not(.faint)').length"
    before, several = browser.evaluate(path), browser.evaluate(lines)
    browser.evaluate("document.querySelector('[data-run=\"2\"]').click()")
    assert 0 < browser.evaluate(lines) < several, "a run that is put away is not drawn"
    picture = "document.querySelector('figure[data-panel=\"0\"] .plot svg')"
    browser.evaluate(f"{picture}.scrollIntoView({{block: 'center'}})")
    box = browser.evaluate(f"(({{x, y}}) => [x, y])({picture}.getBoundingClientRect())")
    for kind, x in (("mousePressed", 200), ("mouseMoved", 330), ("mouseReleased", 330)):
        place = {"x": box[0] + x, "y": box[1] + 60}
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)
    assert browser.evaluate("choice.zoom !== null && !document.getElementById('reset').hidden")
    assert browser.evaluate(path) != before
    browser.evaluate("document.getElementById('reset').click()")
    browser.evaluate("document.querySelector('[data-x=tokens]').click()")
    assert browser.evaluate(
        "choice.x === 'tokens' && choice.zoom === null && !document.querySelectorAll('svg [d*=NaN]').length"
    )
    paper = "getComputedStyle(document.body).backgroundColor"
    light = browser.evaluate(paper)
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(paper) != light and not browser.complaints


def test_keys_go_from_point_to_point(browser, pages):
    browser.open(pages["one"].as_uri(), 1280)

    def press(figure: str, key: str) -> str:
        browser.evaluate(f"document.querySelector('{figure} svg[tabindex]').focus()")
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key=key)
        browser.evaluate("new Promise(requestAnimationFrame)")
        return browser.evaluate(f"document.querySelector('{figure}').textContent")

    loss = "data.runs[0].series.find((one) => one.name === 'loss').v"
    keys = f'figure[data-panel="{browser.evaluate("data.panels.findIndex((one) => one.title === `loss`)")}"] .keys'
    figure = keys.removesuffix(" .keys")
    for key, place in (("Home", 0), ("ArrowRight", 1), ("PageDown", 11), ("ArrowLeft", 10), ("End", 39)):
        press(figure, key)
        shown = browser.evaluate(f"document.querySelector('{keys} b').textContent")
        assert shown == browser.evaluate(f"exact({loss}[{place}])"), key
    assert "step" in press(figure, "Home"), "the axis has a name"
    assert "rank 0: forward, micro-batch 0" in press("figure[data-timeline]", "ArrowRight")
    assert "rank 0: forward, micro-batch 1" in press("figure[data-timeline]", "ArrowRight")

    def focus(figure: str, point: str) -> str:
        found = f"document.querySelector('{figure} {point}').focus()"
        return browser.evaluate(f"({found}, document.querySelector('{figure} .readout').textContent)")

    assert "TFLOP/s at" in focus("[data-roofline]", "circle")
    browser.open(pages["search"].as_uri(), 1280)
    text = focus('[data-search="0 foretold"]', "g[tabindex] + g")
    assert text.startswith(
        "tp2_none: measured 800 ms, 2.56k tokens/s, 20 GiB allocated; expected 600 ms (480 ms to 750"
    )
    assert not browser.complaints


def test_an_open_page_shows_new_steps(browser, tmp_path):
    folder = write_run(tmp_path / "run", 20)
    with serving(folder) as server:
        browser.open(f"http://{server.address}/", 1280)
        browser.evaluate(
            "document.querySelector('[data-x=hours]').click(); document.getElementById('settings').open = true"
        )
        for step in range(21, 26):
            add(folder, step)
        newest = "Math.max(...data.runs[0].x.step)"
        deadline = time.monotonic() + 20
        while browser.evaluate(newest) < 25 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert browser.evaluate(newest) == 25 and "step 25" in browser.evaluate(
            "document.querySelector('header').textContent"
        )
        assert browser.evaluate("choice.x === 'hours' && document.getElementById('settings').open"), (
            "what is chosen stays"
        )
        assert browser.evaluate(SEEN)["drawn"] == browser.evaluate(SEEN)["plots"] and not browser.complaints
    deadline = time.monotonic() + 20
    lost = "document.getElementById('live').className === 'lost'"
    while not browser.evaluate(lost) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert browser.evaluate(lost)
    browser.complaints.clear()  # that it cannot connect is what was asked for
