"""The page of runs while they go on, on this machine alone: `trainer watch RUN [RUN...] [port=8765]`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from trainer.commands.grammar import Command
from trainer.commands.report import HARDWARE
from trainer.config import ConfigError
from trainer.config.fields import option


@dataclass
class WatchOptions:
    runs: list[str] = option(
        None, "folders of runs, sweeps and searches, which may still be empty; several runs are compared"
    )
    hardware: str = option("", HARDWARE)
    port: int = option(8765, "of localhost, where the page is served; 0: any that is free")
    every: float = option(3.0, "seconds after which an open page asks for what is new")


def run(options: WatchOptions) -> None:
    problems = [] if 0 <= options.port < 1 << 16 else [f"port={options.port} is no port; legal: 0 to 65535"]
    problems += [] if 0.1 <= options.every <= 3600 else [f"every={options.every:g} must be 0.1 to 3600 seconds"]
    folders = [Path(folder) for folder in options.runs]
    problems += [
        f"{folder} is no folder; give a run folder like runs/NAME" for folder in folders if not folder.is_dir()
    ]
    if problems:
        raise ConfigError(problems)
    from trainer.pages.page import PageRuns
    from trainer.pages.server import start_server

    shown = PageRuns(folders, options.hardware)
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
