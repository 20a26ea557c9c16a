"""One page about runs: `trainer report RUN [RUN...] [out=FILE]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.fields import option
from trainer.config.options import run_command
from trainer.pages.page import HARDWARE, write_page
from trainer.util.run_folder import REPORT

WORDS = ("runs",)
"""Options that need no key."""


@dataclass
class ReportOptions:
    runs: list[str] = option(
        None, "folders of runs, or of sweeps and searches, whose trials are compared; of several, what differs is first"
    )
    hardware: str = option("", HARDWARE)
    out: str = option("", "the HTML file to write; '': report.html in the folder, or here for several")


def run(options: ReportOptions) -> None:
    folders = [Path(folder) for folder in options.runs]
    out = Path(options.out) if options.out else (folders[0] if len(folders) == 1 else Path()) / REPORT
    write_page(folders, out, options.hardware)
    print(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is 0, or 2 after one message about what cannot be shown."""
    return run_command(ReportOptions, run, "trainer.report", arguments, WORDS)


if __name__ == "__main__":
    sys.exit(main())
