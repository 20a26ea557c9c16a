"""One page about runs, also while they go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.commands.grammar import Command
from trainer.config.fields import option
from trainer.util.lines import REPORT


@dataclass
class ReportOptions:
    runs: list[str] = option(
        None, "folders of runs, or of sweeps and searches, whose trials are compared; of several, what differs is first"
    )
    hardware: str = option(
        "",
        "a file of configs/hardware or its path, such as one that trainer probe wrote, whose peaks the kernels are "
        "held against; '': that of the device",
    )
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
