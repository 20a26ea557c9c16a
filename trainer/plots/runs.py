"""The picture of a run's pipeline schedule, as planned and as measured."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot
from matplotlib.figure import Figure

from trainer.config import ConfigError
from trainer.planning.schedules.simulate import read_timeline
from trainer.plots.schedule import draw_schedule
from trainer.util.lines import label_runs
from trainer.util.reading import replace_file


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the figure, in the format of the suffix, and closes it. Raises `ConfigError` when that cannot be done."""
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise ConfigError(f"{path}: unknown format; legal: {', '.join('.' + name for name in sorted(formats))}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as part:
            figure.savefig(part, format=path.suffix[1:])
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot write ({error.strerror})") from None
    finally:
        pyplot.close(figure)


TIMELINES = ("planned", "measured")
"""Files RUN/schedule/NAME.json of a run with a pipeline, in the order of the panels."""


def draw_run(runs: list[Path], out: Path | None) -> Path:
    """Draws the timelines that a run has written. Returns the file written. Raises `ConfigError` that names the
    command for curves where there is no timeline to draw, or more than one run."""
    if len(runs) > 1:
        raise ConfigError(f"give one run to draw its schedule, not {len(runs)}; {report_hint(runs)}")
    run = runs[0].parent if runs[0].is_file() else runs[0]
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such folder; give the folder of a run, such as runs/NAME")
    paths = {name: run / "schedule" / f"{name}.json" for name in TIMELINES}
    read = {name: read_timeline(path) for name, path in paths.items() if path.exists()}
    if not read:
        raise ConfigError(f"{run} has no pipeline schedule (schedule/measured.json); {report_hint([run])}")
    timelines = {name: ranks for name, (ranks, _) in read.items()}
    makespans = {name: makespan for name, (_, makespan) in read.items()}
    out = out or run / "schedule.png"
    save_figure(draw_schedule(timelines, label_runs([run])[0], makespans=makespans), out)
    return out


def report_hint(runs: list[Path]) -> str:
    """The command that draws loss, throughput and the other curves of these runs."""
    return f"for curves use: trainer report {' '.join(map(str, runs))}"
