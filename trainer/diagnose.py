"""What bounds a run, and what to override: `python -m trainer.diagnose RUN [--live]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from trainer.config import ConfigError
from trainer.config.options import escape_unprintable
from trainer.diagnosis.time_breakdown import ACCOUNTS
from trainer.diagnosis.verdict import Diagnosis, print_diagnosis, to_json
from trainer.observe.diagnose_run import diagnose_run
from trainer.util.exit_codes import DONE, FAILED, refuse_config
from trainer.util.files import write_atomic
from trainer.util.run_folder import DIAGNOSIS, RUN_FILES
from trainer.util.tables import format_duration


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.diagnose",
        description="Say what bounds a run, what the step would take without it, and which setting to override; from "
        "what the run has written. Needs no GPU. With logging.profile, a run accounts for all of its steps' time.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--live", action="store_true", help="look again until the run ends")
    parser.add_argument("--every", metavar="SECONDS", type=float, default=10.0, help="how often --live looks (10)")
    parser.add_argument(
        "--patience",
        metavar="SECONDS",
        type=float,
        default=1800.0,
        help="how long a run may write nothing before --live takes it for dead, with exit code 1 (1800)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help=f"where to write all numbers (RUN/{DIAGNOSIS})")
    parser.add_argument(
        "--hardware", metavar="NAME", default="", help="a file of configs/hardware, or its path (that of the device)"
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="folder of your own; its hardware/NAME.yaml win over the shipped ones",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is 0, 1 where `--live` took the run for dead, or 2 after one message about what
    is wrong."""
    escape_unprintable()
    given = command_line().parse_args(arguments)
    console = Console(highlight=False)
    try:
        check_options(given)
        while True:
            diagnosis = diagnose_run(given.run, given.hardware, given.config_dir)
            write_diagnosis(given.json or given.run / DIAGNOSIS, diagnosis)
            if given.live:
                console.clear()
            print_diagnosis(diagnosis, console)
            if not given.live or diagnosis.evidence.status.get("status") != "running":
                return DONE
            if (silent := diagnosis.evidence.silent or 0.0) >= given.patience:
                print(
                    f"{given.run}: nothing has been written for {format_duration(silent)}, so the run is taken "
                    "for dead "
                    f"(--patience {given.patience:g}); its status.json still says running",
                    file=sys.stderr,
                )
                return FAILED
            time.sleep(max(0.1, given.every))
    except ConfigError as error:
        return refuse_config(error)
    except KeyboardInterrupt:
        return DONE


def check_options(given: argparse.Namespace) -> None:
    """Raises `ConfigError` for what cannot be looked at."""
    if not given.every > 0:
        raise ConfigError(f"--every {given.every:g} must be above 0 seconds")
    inside = sorted({path.parent for name in RUN_FILES for path in given.run.glob(f"*/{name}")})
    if inside and not any((given.run / name).exists() for name in (*RUN_FILES, ACCOUNTS)):
        more = ", ..." if len(inside) > 5 else ""
        raise ConfigError(f"{given.run} holds runs, and is none; name one: {', '.join(map(str, inside[:5]))}{more}")


def write_diagnosis(path: Path, diagnosis: Diagnosis) -> None:
    """All numbers. Raises `ConfigError` for a file that cannot be written."""
    try:
        write_atomic(path, json.dumps(to_json(diagnosis), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another file with --json FILE") from None


if __name__ == "__main__":
    sys.exit(main())
