"""The page of runs, sweeps and searches: one HTML file with all that it needs in it.

What a run wrote is data of perhaps a stranger. The templates escape it, the script makes text nodes of it, and the
page's policy lets the browser run the page's own script alone, by its hash, and ask nobody for anything."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from trainer.config import ConfigError
from trainer.observe.metrics import METRICS, stands_for_many
from trainer.pages import sections
from trainer.pages.folder import RunFolder
from trainer.pages.sweeps import SweepFolder
from trainer.planning.hardware import load_hardware
from trainer.util import tables
from trainer.util.lines import RUN_FILES, STARTS, holds_trials, label_runs, of_sweeps
from trainer.util.reading import write_atomic
from trainer.util.tables import format_number

# Which curves are drawn together, and in which order.


@dataclass(frozen=True)
class CurvePanel:
    """A picture of curves. group: the heading that it stands under, if any. names: of metrics; one that ends in /NAME
    stands for all of its family. zero: whether the picture begins at zero."""

    group: str
    title: str
    unit: str
    names: tuple[str, ...]
    zero: bool = True


def _make_panel(title: str, unit: str, names: str, zero: bool = True) -> CurvePanel:
    return CurvePanel("hardware" * names.startswith("hardware/"), title, unit, tuple(names.split()), zero)


PANELS = (
    _make_panel("loss", "nats per token", "loss eval_loss", zero=False),
    _make_panel("loss by source", "nats per token", "loss/NAME", zero=False),
    _make_panel("evaluation loss by set", "nats per token", "eval_loss/NAME", zero=False),
    _make_panel("terms of the loss", "mean per token", "term/NAME", zero=False),
    _make_panel("gradient norm", "before clipping", "grad_norm"),
    _make_panel("learning rate", "", "lr"),
    _make_panel("throughput", "tokens per second, all ranks", "tokens_per_second"),
    _make_panel("step time", "seconds", "step_seconds step_seconds_p50 step_seconds_p95"),
    _make_panel("model FLOP utilisation", "share of the peak", "mfu mfu_full"),
    _make_panel("waiting for data", "seconds a step", "data_seconds"),
    _make_panel("evaluating and saving", "seconds a step", "evaluation_seconds checkpoint_seconds"),
    _make_panel("time between actions", "share of the schedule", "bubble"),
    _make_panel("exposed communication, late host", "share of a profiled step", "exposed/NAME host bubble_imbalance"),
    _make_panel("launch delay", "seconds", "launch_delay"),
    _make_panel("slowest rank", "multiple of the median", "straggler"),
    _make_panel("memory", "GiB, fullest rank", "memory_gib"),
    _make_panel("gradient traffic", "bytes a rank and step", "comm/bytes_inner comm/bytes_outer"),
    _make_panel("loss scale", "", "loss_scale", zero=False),
    _make_panel("steps without an update, and steps run again", "so far", "skipped repeated"),
    _make_panel("damaged rows", "left out so far", "damaged"),
    _make_panel("power", "watts a GPU", "hardware/power_watts"),
    _make_panel("clock", "MHz of the slowest GPU", "hardware/clock_mhz"),
    _make_panel("temperature", "degrees Celsius of the hottest GPU", "hardware/temperature"),
    _make_panel(
        "throttle",
        "reasons: 4 power, 32 and 64 heat, 8 and 128 hardware",
        "hardware/throttle hardware/throttle_of_rank",
    ),
    _make_panel("ranks whose clocks are held down", "number", "hardware/throttle_ranks"),
    _make_panel("emptied caches", "of the allocator, so far", "hardware/alloc_retries"),
    _make_panel("machine", "share in use", "hardware/host_cpu hardware/host_memory"),
    _make_panel("free disk", "GiB", "hardware/disk_free_gib"),
)
"""Other metrics, such as registered ones, have a panel each, behind these."""

OF_ONE_VALUE = (
    *("learned", "loss_scale", "skipped", "repeated", "damaged", "hardware/alloc_retries"),
    *("hardware/throttle", "hardware/throttle_of_rank", "hardware/throttle_ranks"),
)
"""Metrics that say nothing as long as they stay what they were."""

NOT_DRAWN = {
    *("step", "time", "tokens", "epoch", "eta_seconds"),
    *("straggler_rank", "profiled_step", "hardware/clock_rank", "hardware/throttle_rank"),
}


def drawn_as(names: Iterable[str], panel: CurvePanel) -> list[str]:
    """Those of `names` that belong into a panel."""
    families = tuple(name.removesuffix("NAME") for name in panel.names if stands_for_many(name))
    return [name for name in names if name in panel.names or families and name.startswith(families)]


def arrange_panels(names: Iterable[str]) -> list[CurvePanel]:
    """The panels of the metrics `names`, with the names that they show; empty ones are left out."""
    left = [name for name in dict.fromkeys(names) if name not in NOT_DRAWN and not name.startswith("targets/")]
    found = []
    for panel in PANELS:
        if shown := drawn_as(left, panel):
            order = {name: place for place, name in enumerate(panel.names)}
            found.append(replace(panel, names=tuple(sorted(shown, key=lambda name: order.get(name, 0)))))
            left = [name for name in left if name not in shown]
    return found + [
        CurvePanel(group_of(name), name.partition("/")[2] or name, metric_meaning(name), (name,), False)
        for name in left
    ]


def group_of(name: str) -> str:
    """The heading over a metric of no panel: the first part of its name."""
    first, slash, _ = name.partition("/")
    return {"user": "registered metrics"}.get(first, first) if slash else "others"


def metric_meaning(name: str) -> str:
    """What METRICS says of a metric, where it knows it."""
    family = f"{name.partition('/')[0]}/NAME"
    return METRICS.get(name, "" if name.startswith("user/") else METRICS.get(family, ""))


# What a page is about: runs, and the sweeps and searches whose trials they are.


@dataclass(frozen=True)
class PageRuns:
    """What stands in folders, each one of a run, a sweep or a search (`trainer tune`), whose trials count as runs."""

    folders: Sequence[Path]
    runs: list[RunFolder]
    sweeps: list[SweepFolder]

    @property
    def single(self) -> RunFolder | None:
        """The run of a page that is about one alone."""
        return self.runs[0] if len(self.runs) == 1 and not self.sweeps else None

    @property
    def title(self) -> str:
        if self.single:
            return self.single.label
        if len(self.folders) == len(self.sweeps) == 1:
            return f"{self.folders[0].resolve().name}: {format_number(len(self.runs), 'trial')}"
        return f"{len(self.runs)} runs compared"


def open_folders(folders: Sequence[Path], hardware: str = "") -> PageRuns:
    """What stands in these folders. hardware: see `RunFolder`. Raises `ConfigError` for a folder of which there is
    nothing to show, and for hardware that cannot be read."""
    if hardware:
        load_hardware(hardware)
    found = [folder for folder in of_sweeps(folders, RUN_FILES) if not holds_trials(folder)]
    shown = PageRuns(
        folders,
        [RunFolder(label, folder, hardware) for label, folder in zip(label_runs(found) if found else (), found)],
        [SweepFolder(folder) for folder in folders if holds_trials(folder)],
    )
    if wrong := [run for run in shown.runs if not run.exists]:
        raise ConfigError(
            [
                f"{run.folder}: no run has written there (no {STARTS}); give a run folder like runs/NAME, or that of a "
                "sweep or a search"
                for run in wrong
            ]
        )
    return shown


FILES = Path(__file__).parent
LIBRARY = ("vendor/chart.umd.min.js", "vendor/chartjs-plugin-zoom.min.js")
SCRIPTS = (LIBRARY, ("templates/charts.js", "templates/page.js"))
"""The files of each script element of the page: those of others, and our own."""
POINTS, FEWEST = 1500, 300
"""The most points of a curve in a page of one run, and in one of many."""
COLOURS = 7
"""Of curves, as in the style sheet."""


class PageSection(NamedTuple):
    id: str
    title: str
    present: bool


@cache
def template_environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FILES / "templates"),
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
def read_assets(*names: str) -> str:
    """Style and scripts of the page: with the sections made before, the only texts that are not escaped."""
    return "\n".join((FILES / name).read_text() for name in names)


@cache
def security_policy() -> str:
    """What the page may do, as a Content-Security-Policy: run its scripts, use its style."""
    digests = [base64.b64encode(hashlib.sha256(read_assets(*names).encode()).digest()).decode() for names in SCRIPTS]
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    rules = ("default-src 'none'", f"script-src {scripts}", "style-src 'unsafe-inline'", "img-src data:")
    return "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))


def drawn_panels(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """The panels of curves; a metric that never changes is left out where that says nothing."""
    names = dict.fromkeys(name for run in runs for name in run.curves.names)
    still = {
        name
        for name in OF_ONE_VALUE
        if len({value for run in runs for value in (run.curves.best(name, True), run.curves.best(name, False))}) <= 1
    }
    found = arrange_panels(name for name in names if name not in still)
    if len(runs) > COLOURS:  # dashes tell runs apart, and can not tell metrics apart as well
        found = [replace(panel, title=name, names=(name,)) for panel in found for name in panel.names]
    return [{"place": place, **dataclasses.asdict(panel)} for place, panel in enumerate(found)]


def data_of(shown: PageRuns) -> dict[str, Any]:
    """What the script draws: curves, timelines and rooflines of every run, and the plans of searches."""
    most = max(FEWEST, POINTS // max(1, len(shown.runs)))
    return {
        "panels": drawn_panels(shown.runs),
        "runs": [
            {
                "label": run.label,
                **run.curves.drawn(most, NOT_DRAWN),
                "timelines": run.timelines,
                "roofline": (sections.kernels_of(run, place) or {}).get("roofline"),
            }
            for place, run in enumerate(shown.runs)
        ],
        "searches": [sweep.drawn() for sweep in shown.sweeps],
    }


MEMORY = "memory", "peak"
"""Titles of the tables of a start that predict memory: of the states, and of the fullest moment."""


def run_context(run: RunFolder, place: int) -> dict[str, Any]:
    """What the templates say of a run. place: among those of the page."""
    table = run.start.get("table", {})
    return {
        "label": run.label,
        "place": place,
        "folder": str(run.folder),
        "status": run.status,
        "steps": run.steps,
        "about": sections.describe_run(run),
        "numbers": sections.run_numbers(run),
        "tables": {title: rows for title, rows in table.items() if title not in MEMORY},
        "memory": [table.get(title, []) for title in MEMORY],
        "settings": [
            (sections.format_value(name), sections.format_value(value)) for name, value in run.settings.items()
        ],
        "changed": sections.changed_settings(run),
        "starts": sections.list_starts(run),
        "command": sections.format_value(run.start.get("command", "")),
        "versions": [
            (name, sections.format_value(one)) for name, one in sections.as_mapping(run.start.get("versions")).items()
        ],
        "replaced": run.replaced,
        "earlier": run.earlier,
        "notices": run.notices,
        "timelines": run.timelines,
        "problems": run.problems,
    }


def content_of(shown: PageRuns, data: dict[str, Any]) -> str:
    """The page's sections as HTML. data: what the script will draw, with a place for each plot."""
    runs, texts = shown.runs, [run_context(run, place) for place, run in enumerate(shown.runs)]
    sweeps = [sweep.shown() for sweep in shown.sweeps]
    verdicts = [
        {"label": run.label, "place": place, **sections.verdict_context(run.diagnosis)}
        for place, run in enumerate(runs)
        if run.diagnosis
    ]
    account = sections.account_of(shown.single) if shown.single else None
    accounts = None if shown.single else sections.accounts_compared(runs)
    kernels = [found for place, run in enumerate(runs) if (found := sections.kernels_of(run, place))]
    differing, lacking = ([], []) if shown.single else sections.differing_settings(runs)
    columns = [run["numbers"] for run in texts]
    plans = [
        [(f"{title}: {label}", value) for title, rows in run["tables"].items() for label, value in rows]
        for run in texts
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for panel in data["panels"]:
        groups.setdefault(panel["group"], []).append(panel)
    present = [
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
        PageSection("memory", "Memory", any(any(run["memory"]) for run in texts)),
        PageSection("plan", "Plan and settings", any(run["tables"] or run["settings"] for run in texts)),
        PageSection("starts", "Starts, faults, notices", any(run["starts"] or run["notices"] for run in texts)),
    ]
    return template_environment().get_template("content.html").render(
        runs=texts,
        single=shown.single is not None,
        sweeps=sweeps,
        title=shown.title,
        sections=[section for section in present if section.present],
        verdicts=verdicts,
        account=account,
        accounts=accounts,
        kernels=kernels,
        differing=differing,
        lacking=lacking,
        memory=[*map(sections.merge_tables, zip(*[run["memory"] for run in texts]))],
        plans=sections.merge_tables(plans, alike=False),
        groups=groups,
        compared=[column[0].name for column in zip(*columns) if any(one.value is not None for one in column)],
        best=sections.best_of(columns),
        now=time.strftime("%Y-%m-%d %H:%M:%S"),
    )  # fmt: skip


def render_page(shown: PageRuns) -> str:
    """The whole page."""
    data = data_of(shown)
    return template_environment().get_template("page.html").render(
        title=shown.title,
        policy=security_policy(),
        style=read_assets("templates/style.css"),
        scripts=[read_assets(*names) for names in SCRIPTS],
        content=content_of(shown, data),
        data=data,
    )  # fmt: skip


def write_page(folders: Sequence[Path], out: Path, hardware: str = "") -> None:
    """Writes the page of what stands in these folders to a file; see `open_folders`. Raises `ConfigError`, also where
    the file cannot be written."""
    page = render_page(open_folders(folders, hardware))
    try:
        write_atomic(out, page)
    except OSError as error:
        raise ConfigError(f"{out}: cannot write ({error.strerror}); give another out=FILE") from None
