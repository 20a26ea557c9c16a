"""The command `trainer`: one word for what to do, then what that takes. `python -m trainer` is the same.

`trainer train --gpus 8 +config=...` starts a run's processes on this machine by itself, checks their plan before, and
says no more of them than is to be known. What begins with no such word is a run's own process, as torchrun starts them.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from trainer import cli
from trainer.config import ConfigError
from trainer.planning.resolve import compose
from trainer.util.exit_codes import refuse_config

OTHERS = {
    "estimate": "trainer.estimate",
    "probe": "trainer.probe",
    "tune": "trainer.tune",
    "diagnose": "trainer.diagnose",
    "plot": "trainer.plot",
    "report": "trainer.report",
    "watch": "trainer.watch",
    "sample": "trainer.sample",
    "export": "trainer.export",
    "merge": "trainer.merge",
    "eval": "trainer.evaluate",
    "parity": "trainer.parity.cli",
    "preflight": "trainer.preflight",
}
"""Words whose commands are modules with a `main`."""


ON_GPUS = {"train": "run.device=cuda", "sample": "device=cuda"}
"""Words whose commands start several processes, and what these are told with `--gpus`."""


def main(arguments: Sequence[str] | None = None, own: bool = False) -> int:
    """Runs the command line. The exit code is that of what was run. own: as for `cli.main`."""
    first, *rest = arguments = [*(sys.argv[1:] if arguments is None else arguments)] or [""]
    if first == "train":
        return start_training(rest, own)
    if first == "sample":
        return start_sampling(rest)
    if first == "sweep":
        return cli.main(["--multirun", *rest])
    if first in OTHERS:
        return importlib.import_module(OTHERS[first]).main(rest)
    return cli.main(list(filter(None, arguments)), own)


def start_sampling(arguments: Sequence[str]) -> int:
    """Text from a checkpoint on one process, or on several likewise."""
    try:
        processes, rest = _launch(arguments, "sample")
    except ConfigError as error:
        return refuse_config(error)
    module = importlib.import_module(OTHERS["sample"])
    if processes == 1:
        return module.main(rest)
    return module.refuse_options(rest, processes) or start_processes(processes, OTHERS["sample"], rest)


def start_training(arguments: Sequence[str], own: bool = False) -> int:
    """A run on one process, or on as many as `--gpus N` or `--processes N` says. The exit code: of the process that
    failed first."""
    try:
        processes, rest = _launch(arguments)
        if processes == 1:
            return cli.main(rest, own)
        options = cli._parse(rest)
        compose(options.overrides, options.config_dir, processes)
    except ConfigError as error:
        return refuse_config(error)
    print(f"starting {processes} processes; Ctrl-C saves and stops them", flush=True)
    return start_processes(processes, "trainer", rest)


def start_processes(processes: int, module: str, arguments: Sequence[str]) -> int:
    """Runs a module on several processes of this machine. The exit code: of the one that failed first."""
    from trainer import torchrun

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun sets with a warning
    logging.disable(logging.CRITICAL)  # torchrun's own lines: the processes have said what there is to say
    return torchrun.main(["--standalone", "--nproc-per-node", str(processes), "-m", module, *arguments], brief=True)


def _launch(arguments: Sequence[str], word: str = "train") -> tuple[int, list[str]]:
    """How many processes of a command are to be started, and what they are given. Pages need none. Raises
    `ConfigError`."""
    parser = cli.ArgumentParser(prog="trainer", add_help=False, allow_abbrev=False)
    counts = parser.add_mutually_exclusive_group()
    counts.add_argument("--gpus", type=_count)
    counts.add_argument("--processes", type=_count)
    given, rest = parser.parse_known_args(arguments)
    if {"RANK", "TORCHELASTIC_RUN_ID"} & os.environ.keys() and (given.gpus or given.processes):
        raise ConfigError("--gpus and --processes start processes, and torchrun has done so; leave them out")
    pages = {"--help", "-h", "--cfg", "--schema", "--multirun"} & set(rest)
    return 1 if pages else given.gpus or given.processes or 1, [ON_GPUS[word]] * bool(given.gpus) + rest


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of processes")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
