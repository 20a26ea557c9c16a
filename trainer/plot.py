"""Pictures of pipeline schedules: of a run, `python -m trainer.plot RUN`, or without one, `python -m trainer.plot
--schedule NAME...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.config import ConfigError
from trainer.config.options import escape_unprintable
from trainer.planning.schedules.templates import TEMPLATES
from trainer.util.exit_codes import REFUSED, refuse_config

try:
    from trainer.plots.runs import draw_run, report_hint
    from trainer.plots.templates import SCHEDULE_OPTIONS, draw_templates
except ConfigError as error:  # without matplotlib there is nothing that this command can do
    sys.exit(refuse_config(error))

OF_CURVES = ("--x", "--smooth")
"""Options of the curves that this command drew before `trainer report` did."""


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.plot",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s RUN [--out FILE] [--trace FILE]\n"
        "       %(prog)s --schedule NAME|CSV [...] [--ranks N] [--microbatches N] [--chunks N] [--costs "
        "F,I,W]\n                              [--out FILE] [--trace FILE]",
        description="Draw the pipeline schedule of a run, planned above measured, or pipeline schedules without a "
        "run.\nCurves of runs and sweeps are in the page that `trainer report RUN...` writes.",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="picture to write, .png, .svg, .pdf, ... (default: RUN/schedule.png, or ./schedule.png)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="also write the timelines as a trace for ui.perfetto.dev or chrome://tracing (.json)",
    )
    runs = parser.add_argument_group("the schedule of a run")
    runs.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="folder of a run with a pipeline")
    schedules = parser.add_argument_group("schedules without a run")
    schedules.add_argument(
        "--schedule",
        metavar="NAME|CSV",
        nargs="+",
        help=f"one panel each: a template ({', '.join(TEMPLATES)}), greedy (planned for --costs), or a file in the CSV "
        "format of torch.distributed.pipelining, such as RUN/schedule/schedule.csv",
    )
    schedules.add_argument("--ranks", metavar="N", type=int, help="pipeline ranks of the templates")
    schedules.add_argument("--microbatches", metavar="N", type=int, help="micro-batches of the templates")
    schedules.add_argument("--chunks", metavar="N", type=int, help="stages on a rank (default: the template's)")
    schedules.add_argument(
        "--costs",
        metavar="F,I,W",
        help="time that a rank takes for one micro-batch's forward, input gradient and weight gradient, shared by its "
        "chunks; a full backward takes I + W (default: 1,1,1)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is 0, or 2 after one message about what cannot be drawn."""
    escape_unprintable()
    parser = command_line()
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        of_curves = unknown[0].split("=")[0] in OF_CURVES
        parser.error(f"unknown option {unknown[0]}" + f"; {report_hint(given.runs or [Path('RUN')])}" * of_curves)
    if bool(given.runs) == bool(given.schedule):
        parser.error("give a RUN or --schedule, not both" if given.runs else "give a RUN, or --schedule")
    for option in () if given.schedule else SCHEDULE_OPTIONS:
        if getattr(given, option) is not None:
            parser.error(f"--{option} goes with --schedule")
    try:
        written = (draw_templates if given.schedule else draw_run)(given)
    except ConfigError as error:
        print(f"trainer.plot: {error}", file=sys.stderr)
        return REFUSED
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
