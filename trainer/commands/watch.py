"""The page of runs while they go on, on this machine alone: `trainer watch RUN [RUN...] [port=8765]`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.commands.grammar import Command
from trainer.commands.report import HARDWARE
from trainer.config.fields import option


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


def run(options: WatchOptions) -> None:
    from trainer.pages.page import PageRuns
    from trainer.pages.server import start_server

    shown = PageRuns([*map(Path, options.runs)], options.hardware)
    with start_server(shown, options.port, options.every) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://{server.address} shows {', '.join(options.runs)}; Ctrl-C ends", flush=True)
        server.serve_forever()


main = Command(
    "watch",
    "Serves the page of runs while they go on, to this machine alone.",
    "trainer watch runs/demo port=8765",
    WatchOptions,
    run,
    words=("runs",),
)
