"""`trainer train` and `trainer sweep`: a run, or one for each combination of values.

`planning.resolve.compose` turns groups, recipes and overrides into a checked configuration. Nothing here imports torch
before the configuration is known to be right.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from trainer.commands.grammar import Command, LaunchOptions, RecipeOptions, print_once
from trainer.config import Config, ConfigError
from trainer.config.fields import option
from trainer.util.exit_codes import FAILED, INTERRUPTED, STOPPED, process_rank, refuse_config
from trainer.util.machine import STOPPED_VARIABLE, SignalHandlers


@dataclass
class TrainOptions(LaunchOptions, RecipeOptions):
    cfg: str | None = option(None, "prints the composed configuration and stops", ("job",))
    resolve: bool = option(False, "with --cfg: as the run will see it")
    multirun: bool = option(False, "the same as trainer sweep")

    def count(self) -> int:
        """Pages and sweeps need one process."""
        count = super().count()
        return 1 if self.cfg or self.multirun else count

    def list_problems(self) -> Iterator[str]:
        if self.resolve and not self.cfg:
            yield "--resolve goes with --cfg job; add that, or leave --resolve out"
        for name in ("gpus", "processes"):
            if self.multirun and getattr(self, name):
                yield f"--multirun starts the processes of its trials; leave --{name} out"


def check_plan(options: TrainOptions, processes: int) -> None:
    """Composes the run for so many processes. Raises `ConfigError`."""
    from trainer.planning.resolve import compose

    compose(options.overrides, options.config_dir, processes)


def run(options: TrainOptions, own: bool = False) -> int:
    """The exit code: what `trainer.training.run.main` returns, or 1 for a crash. own: this process ends with it, so
    that a run may handle its signals from here to the end. Raises `ConfigError`."""
    try:
        if options.cfg and options.multirun:
            raise ConfigError(
                "--cfg shows the settings of one run; leave --multirun out, and give one value to each setting"
            )
        if options.cfg:
            return print_once(format_configuration(options))
        if options.multirun:
            return run_sweep(options)
        if STOPPED_VARIABLE in os.environ:  # before this rank was started again
            return STOPPED
        if own:
            SignalHandlers(leave_before_start, leave=lambda _: None, own=True).handle()
        from trainer.planning.resolve import compose

        return _train(compose(options.overrides, options.config_dir))
    except ConfigError:
        raise
    except KeyboardInterrupt:
        print_once("interrupted before a run had started", sys.stderr)
        return INTERRUPTED
    except Exception:
        if "RANK" in os.environ:
            # Before the first step, a rank that gets a stop signal exits, and a collective then fails on the other
            # ranks. This rank may be about to get the same signal, which ends it as stopped and not as failed.
            time.sleep(1.0)
        traceback.print_exc()
        return FAILED


def leave_before_start(what: str) -> None:
    """Ends a run that has not begun to train, from any thread. It has nothing to save, and the folder says what an
    earlier start left there."""
    if process_rank() == 0:
        with contextlib.suppress(OSError):
            os.write(2, f"stopped by {what} before the first step: nothing was trained, nothing is lost\n".encode())
    os._exit(STOPPED)


def format_configuration(options: TrainOptions) -> str:
    """The composed configuration as YAML, once it is checked: with its plan where WORLD_SIZE, --gpus or --processes
    says for how many processes."""
    from omegaconf import OmegaConf

    from trainer.config import typed
    from trainer.config.compose import gather_values
    from trainer.planning.resolve import check_values

    values, problems = gather_values(options.overrides, options.config_dir)
    world = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else options.gpus or options.processes
    config = check_values(values, problems, world)
    return (typed.to_yaml(config) if options.resolve else OmegaConf.to_yaml(OmegaConf.create(values))).rstrip()


def _train(config: Config) -> int:
    from torch.distributed.elastic.multiprocessing.errors import record

    from trainer.training import run
    from trainer.training.crashes import WholeErrorFile

    # Hands the traceback of a crash to torchrun; a refused configuration is no crash.
    @partial(record, error_handler=WholeErrorFile())
    def recorded() -> int:
        try:
            return run.main(config)
        except ConfigError as error:
            return refuse_config(error)

    return recorded()


def run_sweep(options: RecipeOptions) -> int:
    from trainer import sweep

    return sweep.main(options.overrides, options.config_dir)


main = Command(
    "train",
    "Trains a model: on one process, or on as many as --gpus or --processes says.",
    "trainer train --gpus 8 +config=llama3_8b run.steps=100",
    TrainOptions,
    run,
    bare=False,
    device="run.device=cuda",
    check=check_plan,
)

sweep = Command(
    "sweep",
    "Trains once for each combination of values (a trial), each in processes of its own, and compares the results; "
    "the settings of a sweep: trainer --help sweep.",
    "trainer sweep +config=debug lr.peak=1e-3,3e-4 'parallel=glob(zero*)'",
    RecipeOptions,
    run_sweep,
    bare=False,
)
