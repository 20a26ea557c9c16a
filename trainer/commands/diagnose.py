"""What bounds a run, and what to override: `trainer diagnose RUN [--live]`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.commands.grammar import Command
from trainer.config import ConfigError
from trainer.config.fields import option
from trainer.util.exit_codes import DONE, FAILED
from trainer.util.lines import DIAGNOSIS, RUN_FILES
from trainer.util.reading import write_atomic

if TYPE_CHECKING:
    from trainer.diagnosis.verdict import Diagnosis


@dataclass
class DiagnoseOptions:
    run: str = option(None, "run folder")
    live: bool = option(False, "look again until the run ends")
    every: float = option(10.0, "seconds after which --live looks again", range="(0, inf)")
    patience: float = option(
        1800.0, "seconds that a run may write nothing before --live takes it for dead, with exit code 1"
    )
    json: str = option("", f"where to write all numbers; '': RUN/{DIAGNOSIS}")
    hardware: str = option("", "a file of configs/hardware, or its path; '': that of the device")
    config_dir: str | None = option(None, "folder of your own; its hardware/NAME.yaml win over the shipped ones")


def run(options: DiagnoseOptions) -> int:
    """The exit code: 1 where `--live` took the run for dead."""
    from rich.console import Console

    from trainer.diagnosis.verdict import print_diagnosis
    from trainer.observe.diagnose_run import diagnose_run
    from trainer.util.tables import format_duration

    folder, console = Path(options.run), Console(highlight=False)
    check_folder(folder)
    try:
        while True:
            diagnosis = diagnose_run(folder, options.hardware, options.config_dir)
            write_diagnosis(Path(options.json or folder / DIAGNOSIS), diagnosis)
            if options.live:
                console.clear()
            print_diagnosis(diagnosis, console)
            if not options.live or diagnosis.evidence.status.get("status") != "running":
                return DONE
            if (silent := diagnosis.evidence.silent or 0.0) >= options.patience:
                print(
                    f"{folder}: nothing has been written for {format_duration(silent)}, so the run is taken "
                    "for dead "
                    f"(--patience {options.patience:g}); its status.json still says running",
                    file=sys.stderr,
                )
                return FAILED
            time.sleep(max(0.1, options.every))
    except KeyboardInterrupt:
        return DONE


def check_folder(folder: Path) -> None:
    """Raises `ConfigError` for a folder of runs, which is none itself."""
    from trainer.diagnosis.time_breakdown import ACCOUNTS

    inside = sorted({path.parent for name in RUN_FILES for path in folder.glob(f"*/{name}")})
    if inside and not any((folder / name).exists() for name in (*RUN_FILES, ACCOUNTS)):
        more = ", ..." if len(inside) > 5 else ""
        raise ConfigError(f"{folder} holds runs, and is none; name one: {', '.join(map(str, inside[:5]))}{more}")


def write_diagnosis(path: Path, diagnosis: Diagnosis) -> None:
    """All numbers. Raises `ConfigError` for a file that cannot be written."""
    from trainer.diagnosis.verdict import to_json

    try:
        write_atomic(path, json.dumps(to_json(diagnosis), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another file with --json FILE") from None


main = Command(
    "diagnose",
    "Says what bounds a run, what the step would take without it, and which setting to override; needs no GPU.",
    "trainer diagnose runs/demo --live",
    DiagnoseOptions,
    run,
    words=("run",),
)
