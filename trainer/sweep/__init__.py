"""`trainer sweep`: many runs (trials), each in processes of its own, and one table of their results.

Every trial is composed and checked before the first one starts. That a trial is refused, or runs out of memory, is a
result too.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from trainer.config import ConfigError
from trainer.sweep import local
from trainer.sweep.plan import SweepConfig, Trial, expand_sweep, make_trials
from trainer.sweep.results import FINISHED, SweepResults, changed_since_start, print_results, read_start
from trainer.util.exit_codes import DONE, FAILED, STOPPED
from trainer.util.lines import refuse_links
from trainer.util.reading import lock_folder
from trainer.util.tables import format_count


def main(arguments: Sequence[str], config_dir: str | os.PathLike | None = None) -> int:
    """Runs a sweep and prints its table. The exit code: 0 all trials have a result, 1 some failed, 75 it was stopped.

    Raises `ConfigError` before anything starts where no trial can run.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        raise ConfigError(
            "--multirun starts the processes of every trial itself; say trainer sweep, and sweep.processes=N"
        )
    sweep, common, swept = expand_sweep(arguments, config_dir)
    gpus = local.visible_gpus()
    trials = make_trials(sweep, common, swept, config_dir, len(gpus))
    folder = Path(sweep.dir)
    descriptor = lock_folder("sweep.dir", folder, "sweep", "sweep.name")
    try:
        results = SweepResults(folder)
        waiting = to_run(trials, results)
        print_line(f"sweep {sweep.name}: {_counted(trials, results, waiting)}; results in {results.path}")
        run_trials(waiting, sweep, config_dir, gpus, results)
        mine = [results.lines[trial.name] for trial in trials]
        print_results(mine, sweep.sort)
    finally:
        os.close(descriptor)
    statuses = {line["status"] for line in mine}
    return FAILED if "failed" in statuses else STOPPED if statuses & {"stopped", "not_started"} else DONE


def run_trials(
    waiting: list[Trial],
    sweep: SweepConfig,
    config_dir: str | os.PathLike | None,
    gpus: list[str],
    results: SweepResults,
) -> None:
    """Runs trials to their ends, and records what becomes of each."""
    reached = set()

    def on_end(trial: Trial, status: str, reason: str | None) -> None:
        reached.add(trial.name)
        line = results.put(trial, status, reason)
        numbers = [f"loss {line['loss']:.4f}"] if line["loss"] is not None else []
        numbers += (
            [f"{format_count(line['tokens_per_second'])} tokens/s"] if line["tokens_per_second"] is not None else []
        )
        print_line(
            f"trial {trial.name}: {', '.join([status.replace('_', ' '), *numbers])}"
            + (f" - {reason}" if reason else "")
        )

    local.run_locally(waiting, sweep, config_dir, gpus, on_end, print_line)
    for trial in waiting:
        if trial.name not in reached:
            results.put(trial, "not_started")


def to_run(trials: list[Trial], results: SweepResults) -> list[Trial]:
    """The trials that earlier starts of the sweep have not finished. Trials that cannot run are recorded as refused.
    Raises `ConfigError` where a folder holds the results of other settings."""
    waiting, problems = [], []
    for trial in trials:
        before, started = results.lines.get(trial.name, {}), read_start(trial)
        changed = changed_since_start(trial, started) if started else []
        if changed and before.get("status") in (*FINISHED, "stopped", "timeout"):
            problems.append(
                f"{trial.folder} holds this trial with other settings ({'; '.join(changed[:3])}); set another "
                "sweep.name, or remove it"
            )
        elif not (started and before.get("status") in FINISHED):
            if started:  # it resumes what it has saved, whatever the recipe says, but not under other settings
                trial.overrides.append(f"checkpoint.resume={'none' if changed else 'auto'}")
            waiting.append(trial)
        try:
            refuse_links(trial.folder)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    for trial in trials:
        if trial.refusal:
            results.put(trial, "refused", "; ".join(trial.refusal))
    return [trial for trial in waiting if not trial.refusal]


def _counted(trials: list[Trial], results: SweepResults, waiting: list[Trial]) -> str:
    left = {trial.name for trial in waiting}
    before = Counter(
        results.lines[trial.name]["status"].replace("_", " ") for trial in trials if trial.name not in left
    )
    known = [f"{number} {status}" for status, number in before.items()]
    return ", ".join([f"{len(trials)} trial{'s' * (len(trials) > 1)}", *known, f"{len(waiting)} to run"])


def print_line(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal must not end the trials
        print(text, flush=True)
