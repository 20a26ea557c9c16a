"""Pictures of runs, `python -m trainer.plot RUN...`, and of pipeline schedules, `python -m trainer.plot --schedule
NAME...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.config import ConfigError
from trainer.config.options import escape_unprintable
from trainer.planning.schedules.templates import TEMPLATES
from trainer.sweep.plan import setting_of
from trainer.sweep.results import Results
from trainer.util.exit_codes import REFUSED, refuse

try:
    from trainer.plots.runs import RUN_OPTIONS, X_LABELS, draw_runs
    from trainer.plots.sweep import MEASURES, Trial, draw_sweep
    from trainer.plots.templates import SCHEDULE_OPTIONS, draw_templates
except ConfigError as error:  # without matplotlib there is nothing that this command can do
    sys.exit(refuse(error))


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.plot",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s RUN [RUN ...] [--x step|tokens|hours] [--smooth N] [--out FILE] [--trace FILE]\n"
        "       %(prog)s --schedule NAME|CSV [...] [--ranks N] [--microbatches N] [--chunks N] [--costs "
        "F,I,W]\n                              [--out FILE] [--trace FILE]",
        description="Draw loss, learning rate, gradient norm and throughput of one or more runs, and the pipeline "
        "schedule of\none run, planned above measured; of a sweep also loss and speed over each swept setting; or "
        "pipeline schedules\nwithout a run.",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="picture to write, .png, .svg, .pdf, ... (default: RUN/metrics.png, or ./metrics.png for several runs, "
        "or ./schedule.png); a run's schedule goes to RUN/schedule.png, or beside FILE as NAME-schedule, and a sweep's "
        "settings to SWEEP/sweep.png, or NAME-sweep",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="also write the timelines as a trace for ui.perfetto.dev or chrome://tracing (.json)",
    )
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        type=Path,
        help="run folder, a metrics.jsonl, or the folder of a sweep, whose trials are drawn together",
    )
    runs.add_argument("--x", choices=tuple(X_LABELS), help="horizontal axis (default: step)")
    runs.add_argument("--smooth", metavar="N", type=int, help="running mean over N logged steps (default: 1, none)")
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


def draw_folders(given: argparse.Namespace) -> list[Path]:
    """Draws runs, and of a single sweep its settings; returns the files written."""
    written = draw_runs(given)
    folder = given.runs[0]
    if len(given.runs) > 1 or not folder.is_dir():
        return written
    trials = [
        Trial(dict(map(setting_of, line["overrides"])), {name: line[name] for name in MEASURES})
        for line in Results(folder).lines.values()
    ]
    out = given.out.with_name(f"{given.out.stem}-sweep{given.out.suffix}") if given.out else folder / "sweep.png"
    if draw_sweep(trials, out):
        written.append(out)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is 0, or 2 after one message about what cannot be drawn."""
    escape_unprintable()
    parser = command_line()
    given = parser.parse_args(arguments)
    if bool(given.runs) == bool(given.schedule):
        parser.error("give a RUN or --schedule, not both" if given.runs else "give a RUN, or --schedule")
    for option in RUN_OPTIONS if given.schedule else SCHEDULE_OPTIONS:
        if getattr(given, option) is not None:
            parser.error(f"--{option} goes with {'a RUN' if given.schedule else '--schedule'}")
    try:
        written = (draw_templates if given.schedule else draw_folders)(given)
    except ConfigError as error:
        print(f"trainer.plot: {error}", file=sys.stderr)
        return REFUSED
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
