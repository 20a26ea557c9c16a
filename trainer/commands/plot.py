"""Pictures of pipeline schedules: of a run, `trainer plot RUN`, or without one, `trainer plot --schedule NAME...`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.commands.grammar import Command
from trainer.config.fields import option
from trainer.util.exit_codes import requires_extra


@dataclass
class PlotOptions:
    runs: list[str] = option([], "folder of a run with a pipeline, whose schedule is drawn, planned above measured")
    schedule: list[str] = option(
        [],
        "without a run, one panel each: a template (1f1b, interleaved, zb_v, ...), greedy, or a "
        "file in the CSV format of torch.distributed.pipelining, such as RUN/schedule/schedule.csv",
    )
    ranks: int | None = option(None, "pipeline ranks of the templates")
    microbatches: int | None = option(None, "micro-batches of the templates")
    chunks: int | None = option(None, "stages on a rank; by default the template's")
    out: str = option("", "picture to write, .png, .svg, .pdf, ...; '': RUN/schedule.png, or ./schedule.png")

    def list_problems(self) -> Iterator[str]:
        if bool(self.runs) == bool(self.schedule):
            yield "give a RUN or --schedule, not both" if self.runs else "give a RUN, or --schedule"
        for name in () if self.schedule else ("ranks", "microbatches", "chunks"):
            if getattr(self, name) is not None:
                yield f"--{name} goes with --schedule"


def run(options: PlotOptions) -> None:
    with requires_extra("plots", "trainer plot"):
        from trainer.plots.runs import draw_run
        from trainer.plots.templates import draw_templates

    out = Path(options.out) if options.out else None
    if options.schedule:
        print(draw_templates(options.schedule, options.ranks, options.microbatches, options.chunks, out))
    else:
        print(draw_run([Path(run) for run in options.runs], out))


main = Command(
    "plot",
    "Draws the pipeline schedule of a run, or schedules without a run. Curves are in the page of trainer report.",
    "trainer plot --schedule 1f1b zb_v --ranks 4 --microbatches 8 --out schedules.png",
    PlotOptions,
    run,
    words=("runs",),
)
