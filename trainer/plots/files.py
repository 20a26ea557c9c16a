"""Writes pictures and traces."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot
from matplotlib.figure import Figure

from trainer.config import ConfigError
from trainer.planning.schedules.timeline import Timeline
from trainer.plots.schedule import chrome_trace
from trainer.util.files import replace_file


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


def write_trace(timelines: dict[str, Timeline], path: Path | None) -> list[Path]:
    """Writes the Chrome trace that --trace asks for."""
    if path is None:
        return []
    try:
        chrome_trace(timelines, path)
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot write ({error.strerror})") from None
    return [path]
