"""The page of runs, sweeps and searches: one HTML file with all that it needs in it.

What a run wrote is data of perhaps a stranger. The templates escape it, the script makes text nodes of it, and the
page's policy lets the browser run the page's own script alone, by its hash, and ask nobody for anything."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from trainer.config import ConfigError
from trainer.pages import numbers, settings, steps
from trainer.pages.folder import RunFolder
from trainer.pages.panels import NOT_DRAWN, OF_ONE_VALUE, arrange_panels
from trainer.pages.shown import PageRuns, open_folders
from trainer.pages.verdict import verdict_context
from trainer.util import tables
from trainer.util.files import write_atomic

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("base.js", "curves.js", "timeline.js", "roofline.js", "search.js", "page.js")
POINTS, FEWEST = 1500, 300
"""The most points of a curve in a page of one run, and in one of many."""


class PageSection(NamedTuple):
    id: str
    title: str
    present: bool


@cache
def template_environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    made.filters |= {"count": tables.format_count, "duration": tables.format_duration, "percent": tables.format_percent}
    made.filters["si"] = lambda value: tables.format_count(value).replace("B", "G")  # what units are counted in
    return made


@cache
def own_assets(*names: str) -> str:
    """Style and script of the page: with the sections made before, the only texts that are not escaped."""
    return "\n".join((TEMPLATES / name).read_text() for name in names)


@cache
def security_policy(live: bool) -> str:
    """What the page may do, as a Content-Security-Policy: run its script, use its style."""
    digest = base64.b64encode(hashlib.sha256(own_assets(*SCRIPTS).encode()).digest()).decode()
    rules = ("default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'", "img-src data:")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'", *["connect-src 'self'"] * live))


def drawn_panels(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """The panels of curves; a metric that never changes is left out where that says nothing."""
    names = dict.fromkeys(name for run in runs for name in run.curves.names)
    still = {
        name
        for name in OF_ONE_VALUE
        if len({value for run in runs for value in (run.curves.best(name, True), run.curves.best(name, False))}) <= 1
    }
    found = arrange_panels(name for name in names if name not in still)
    return [{"place": place, **dataclasses.asdict(panel)} for place, panel in enumerate(found)]


def data_of(shown: PageRuns) -> dict[str, Any]:
    """What the script draws: curves, timelines and rooflines of every run, and the plans of searches."""
    runs = shown.runs
    most, found = (
        max(FEWEST, POINTS // max(1, len(runs))),
        [steps.kernels_of(run, place) for place, run in enumerate(runs)],
    )
    return {
        "panels": drawn_panels(runs),
        "runs": [
            {
                "label": run.label,
                **run.curves.drawn(most, NOT_DRAWN),
                "timelines": run.timelines,
                "roofline": kernels and kernels["roofline"],
            }
            for run, kernels in zip(runs, found)
        ],
        "searches": [sweep.drawn() for sweep in shown.sweeps],
    }


def run_context(run: RunFolder, place: int) -> dict[str, Any]:
    """What the templates say of a run. place: among those of the page."""
    return {
        "label": run.label,
        "place": place,
        "folder": str(run.folder),
        "status": run.status,
        "steps": run.steps,
        "about": settings.describe_run(run),
        "numbers": numbers.run_numbers(run),
        "tables": {title: rows for title, rows in run.start.get("table", {}).items() if title != "memory"},
        "memory": run.start.get("table", {}).get("memory", []),
        "settings": settings.all_settings(run),
        "changed": settings.changed_settings(run),
        "starts": settings.list_starts(run),
        "command": settings.format_value(run.start.get("command", "")),
        "versions": [
            (name, settings.format_value(one)) for name, one in settings.as_mapping(run.start.get("versions")).items()
        ],
        "replaced": run.replaced,
        "earlier": run.earlier,
        "notices": run.notices,
        "timelines": run.timelines,
        "problems": run.problems,
    }


def plan_of(run: dict[str, Any]) -> list[tuple[str, str]]:
    """The rows of a run's tables but for its memory, each with its table's title."""
    return [
        (f"{title}: {label}", value)
        for title, rows in run["tables"].items()
        if title != "peak"
        for label, value in rows
    ]


def content_of(shown: PageRuns, data: dict[str, Any]) -> str:
    """The page's sections as HTML. data: what the script will draw, with a place for each plot."""
    runs, texts = shown.runs, [run_context(run, place) for place, run in enumerate(shown.runs)]
    sweeps = [sweep.shown() for sweep in shown.sweeps]
    verdicts = [
        {"label": run.label, "place": place, **verdict_context(run.diagnosis)}
        for place, run in enumerate(runs)
        if run.diagnosis
    ]
    account = steps.account_of(shown.single) if shown.single else None
    accounts = None if shown.single else steps.accounts_compared(runs)
    kernels = [found for place, run in enumerate(runs) if (found := steps.kernels_of(run, place))]
    differing, lacking = ([], []) if shown.single else settings.differing_settings(runs)
    columns = [run["numbers"] for run in texts]
    groups: dict[str, list[dict[str, Any]]] = {}
    for panel in data["panels"]:
        groups.setdefault(panel["group"], []).append(panel)
    sections = [
        PageSection("best", "The fastest plan", any(sweep["recipe"] for sweep in sweeps)),
        PageSection("foretold", "Foretold and measured", any(data["searches"])),
        PageSection("trials", "Trials", any(sweep["trials"] for sweep in sweeps)),
        PageSection("compared", "Trials as runs", bool(sweeps and runs)),
        PageSection("differ", "Settings that differ", bool(differing or lacking)),
        PageSection("bound", "What bounds the run" if shown.single else "What bounds the runs", bool(verdicts)),
        PageSection("account", "Where the step goes", bool(account or accounts)),
        PageSection("curves", "Curves", bool(groups)),
        PageSection("schedule", "Pipeline schedule", any(run["timelines"] for run in texts)),
        PageSection("kernels", "Kernels", bool(kernels)),
        PageSection("memory", "Memory", any(run["memory"] for run in texts)),
        PageSection("plan", "Plan and settings", any(run["tables"] or run["settings"] for run in texts)),
        PageSection("starts", "Starts, faults, notices", any(run["starts"] or run["notices"] for run in texts)),
    ]
    return template_environment().get_template("content.html").render(
        runs=texts,
        single=shown.single is not None,
        sweeps=sweeps,
        title=shown.title,
        sections=[section for section in sections if section.present],
        verdicts=verdicts,
        account=account,
        accounts=accounts,
        kernels=kernels,
        differing=differing,
        lacking=lacking,
        memory=settings.merge_tables([run["memory"] for run in texts]),
        plans=settings.merge_tables([plan_of(run) for run in texts], alike=False),
        groups=groups,
        compared=[column[0].name for column in zip(*columns) if any(one.value is not None for one in column)],
        best=numbers.best_of(columns),
        now=time.strftime("%Y-%m-%d %H:%M:%S"),
    )  # fmt: skip


def render_page(shown: PageRuns, version: str | None = None, seconds: float = 0.0) -> str:
    """The whole page. version: of one that is served while its runs go on, and asks for what is new every `seconds`."""
    data = data_of(shown)
    return template_environment().get_template("page.html").render(
        title=shown.title,
        policy=security_policy(version is not None),
        style=own_assets("style.css"),
        script=own_assets(*SCRIPTS),
        content=content_of(shown, data),
        data=data,
        version=version,
        seconds=seconds,
    )  # fmt: skip


def write_page(folders: Sequence[Path], out: Path, hardware: str = "") -> None:
    """Writes the page of what stands in these folders to a file; see `open_folders`. Raises `ConfigError`, also where
    the file cannot be written."""
    page = render_page(open_folders(folders, hardware))
    try:
        write_atomic(out, page)
    except OSError as error:
        raise ConfigError(f"{out}: cannot write ({error.strerror}); give another out=FILE") from None
