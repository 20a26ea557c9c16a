"""One page about runs: written to a file by `trainer report`, or served while they go on by `trainer watch`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.commands.grammar import Command
from trainer.config.fields import option
from trainer.util.lines import REPORT

HARDWARE = (
    "a file of configs/hardware or its path, such as one that trainer probe wrote, whose peaks the kernels are "
    "held against; '': that of the device"
)
"""What the option of both commands means."""


@dataclass
class ReportOptions:
    runs: list[str] = option(
        None, "folders of runs, or of sweeps and searches, whose trials are compared; of several, what differs is first"
    )
    hardware: str = option("", HARDWARE)
    out: str = option("", "the HTML file to write; '': report.html in the folder, or here for several")


def run(options: ReportOptions) -> None:
    from trainer.pages.page import write_page

    folders = [Path(folder) for folder in options.runs]
    out = Path(options.out) if options.out else (folders[0] if len(folders) == 1 else Path()) / REPORT
    write_page(folders, out, options.hardware)
    print(out)


main = Command(
    "report",
    "Writes one HTML page about runs, sweeps or searches: curves, time, memory, and what differs between them.",
    "trainer report runs/a runs/b out=both.html",
    ReportOptions,
    run,
    words=("runs",),
)


@dataclass
class WatchOptions:
    runs: list[str] = option(
        None, "folders of runs, sweeps and searches, which may still be empty; several runs are compared"
    )
    hardware: str = option("", HARDWARE)
    port: int = option(8765, "of localhost, where the page is served; 0: any that is free", range="[0, 65535]")
    every: float = option(3.0, "seconds after which an open page asks for what is new", range="[0.1, 3600]")

    def list_problems(self) -> Iterator[str]:
        for folder in self.runs:
            if not Path(folder).is_dir():
                yield f"{folder} is no folder; give a run folder like runs/NAME"


def serve_page(options: WatchOptions) -> None:
    from trainer.pages.page import PageRuns
    from trainer.pages.server import start_server

    shown = PageRuns([*map(Path, options.runs)], options.hardware)
    with start_server(shown, options.port, options.every) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://{server.address} shows {', '.join(options.runs)}; Ctrl-C ends", flush=True)
        server.serve_forever()


watch = Command(
    "watch",
    "Serves the page of runs while they go on, to this machine alone.",
    "trainer watch runs/demo port=8765",
    WatchOptions,
    serve_page,
    words=("runs",),
)
