"""What train.sbatch asks: with which settings to start a run, and what to do when it has ended.

    python -m trainer.cluster.job begin NODES PROCESSES OVERRIDE...
        prints shell assignments: run_dir, cache, free_gib, args
    python -m trainer.cluster.job end RUN_DIR CODE TOLD STATE
        prints what to do and why: again, requeue, or exit=CODE

The run's own state decides, since exit codes do not: torchrun and srun pass on those of some process, and a process
that has saved may be killed while it ends. run.dir holds `status.json`, which the run writes, its checkpoints, and
`slurm/JOB.json`, the record of a job, which says what was there at its present start: what differs came of that. No
clock decides, since clocks of nodes and file servers differ and may go back.
A second job that is given the same run.dir meanwhile, which the run itself will refuse, thus changes nothing that the
first will read. `slurm/JOB-end.json` says how a job has ended for good, for a sweep that asks later than Slurm knows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from trainer.checkpointing.manifest import list_checkpoints, read_digest
from trainer.config import ConfigError
from trainer.config.compose import quote_value
from trainer.planning.resolve import compose
from trainer.util.exit_codes import DONE, FAILED, LOST, REFUSED, UNFIT
from trainer.util.lines import refuse_links
from trainer.util.machine import lacks_memory
from trainer.util.reading import Malformed, make_printable, read_bytes, read_json, shorten_foreign, write_atomic

CANCELLED = 128 + signal.SIGTERM
"""Exit code of a job that Slurm ends."""


@dataclass(frozen=True)
class JobRecord:
    """What a job has come to by its present start. idle: starts in a row, before this one, without a new checkpoint;
    saved: whether any start left one; known: digests of the checkpoints that were there at the start; status: time of
    change of the status.json that was there, in nanoseconds, 0 if there was none."""

    idle: int = 0
    saved: bool = False
    known: list[str] = field(default_factory=list)
    status: int = 0


def expand_task(arguments: list[str], task: int | None) -> list[str]:
    """The overrides of one task of an array, or of a job without (`task` None).

    `@FILE` becomes the overrides in FILE, quoted as in a shell: of an array's task N those of line N, counted from 1
    without comments and empty lines, else all. `{task}` becomes N. Raises `ConfigError`."""
    expanded = []
    for argument in arguments:
        if not argument.startswith("@"):
            expanded.append(argument)
            continue
        try:
            lines = read_lines(argument[1:])
        except (OSError, ValueError, Malformed) as error:
            raise ConfigError(f"{argument} cannot be read as lines of overrides: {shorten_foreign(error)}") from None
        if task is not None and not 1 <= task <= len(lines):
            raise ConfigError(
                f"{argument} has {len(lines)} lines, and none for task {task}; set --array 1-{len(lines)}"
            )
        expanded += sum(lines, []) if task is None else lines[task - 1]
    return expanded if task is None else [argument.replace("{task}", str(task)) for argument in expanded]


def list_digests(run_dir: Path) -> list[str]:
    """A digest of each checkpoint of a run."""
    return [digest for path in list_checkpoints(run_dir / "checkpoints").values() if (digest := read_digest(path))]


def read_change(path: Path) -> int:
    """When a file was changed, in nanoseconds; 0 if it is not there. Only equality with another reading means
    something."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def read_lines(path: str) -> list[list[str]]:
    """The overrides in each line of a file that has any. Raises `OSError`, `Malformed`, and `ValueError` that names
    the line, and not what stands in it: the file may be another one than was meant."""
    lines = []
    for number, line in enumerate(read_bytes(path).decode().splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if any("=" not in word and not word.startswith("~") for word in words):
            raise ValueError(f"line {number} has a word that is not SETTING=VALUE, GROUP=OPTION or +config=RECIPE")
        if words:
            lines.append(words)
    return lines


def record_of(run_dir: Path, job: str) -> Path:
    return run_dir / "slurm" / f"{job}.json"


def read_record(path: Path) -> JobRecord | None:
    """A job's record, if it has one."""
    shape = {"idle": int, "saved": bool, "known": [str], "status": int}
    try:
        found = read_json(path, shape, "it is left out")
    except (OSError, ConfigError):
        return None
    return JobRecord(**{name: found[name] for name in shape})


def next_record(before: JobRecord | None, progress: bool) -> JobRecord:
    """The record of a new start, given the one before and whether that left a checkpoint."""
    if before is None:
        return JobRecord()
    return replace(before, idle=0 if progress else before.idle + 1, saved=before.saved or progress)


def decide_restart(
    status: str | None, code: int, told: bool, state: str, record: JobRecord, progress: bool, retries: int, reason: str
) -> str:
    """What to do after a start has ended.

    status, reason: of the run's status.json, None if it never got so far; code: srun's, or `LOST`; told: whether the
    time limit is near; state: the job's, as Slurm has it, empty if it did not answer; progress: whether a checkpoint
    was written.
    A stop that nobody asked this script for was a preemption, or a signal from a person, who else would have used
    scancel: the job is requeued."""
    if status == "done" or status is None and code == DONE:  # a run that was done before says nothing anew
        return "exit=0 the run is done"
    if state not in ("RUNNING", ""):  # cancelled; or a node is lost, and Slurm itself requeues the job
        return f"exit={CANCELLED} Slurm ends this job ({state}); the same command goes on from the newest checkpoint"
    if code == REFUSED:
        return f"exit={REFUSED} the settings were refused, see above"
    if code == UNFIT and not told:
        return (
            f"exit={UNFIT} a node is not fit, see above; leave it out with sbatch --exclude, or mend it, and submit "
            "again"
        )
    if not progress and lacks_memory(reason):  # and would again
        return f"exit={FAILED} the run found no memory, see above for what needs less"
    if not progress and record.idle + 1 >= retries:
        return (
            f"exit={FAILED} {record.idle + 1} starts in a row ended without a new checkpoint "
            f"(TRAINER_RETRIES={retries}): giving up"
        )
    if status == "stopped" or told:
        return "requeue the run stopped " + ("after saving" if progress else "with nothing new to save")
    if code == LOST:
        return "requeue a node does not answer, see above"
    return f"again the run ended with code {code} and status {status or 'none'}: starting it on the same nodes"


def parse_count(name: str, text: str) -> int:
    """A count from the environment. Raises `ConfigError`."""
    if not re.fullmatch("[1-9][0-9]*", text):
        raise ConfigError(f"{name}={text} must be a whole number of at least 1")
    return int(text)


def max_retries(environment: dict[str, str]) -> int:
    return parse_count("TRAINER_RETRIES", environment.get("TRAINER_RETRIES") or "3")


def begin_job(
    nodes: int, processes: int, arguments: list[str], environment: dict[str, str]
) -> dict[str, str | list[str]]:
    """Checks the settings for these processes, opens the job's record in run.dir, and returns what the script has to
    know."""
    max_retries(environment)  # asked for at the end, which may be hours away
    parser = argparse.ArgumentParser(prog="train.sbatch", allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    task = int(environment["SLURM_ARRAY_TASK_ID"]) if "SLURM_ARRAY_TASK_ID" in environment else None
    overrides, world = expand_task(options.overrides, task), nodes * processes
    config = compose(overrides, options.config_dir, world)
    if task is not None:
        own = [argument for argument in overrides if argument not in options.overrides]
        if not any(argument.lstrip("+").startswith(("run.name=", "run.dir=")) for argument in own):
            overrides.append(f"run.name={quote_value(f'{config.run.name}-{task}')}")
            shared, config = config.run.dir, compose(overrides, options.config_dir, world)
            if config.run.dir == shared:
                raise ConfigError(
                    f"run.dir={shared} is the same for every task of the array; put {{task}} into it, or leave it out"
                )
    run_dir = Path(config.run.dir)
    try:
        refuse_links(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = record_of(run_dir, environment["SLURM_JOB_ID"])
        path.parent.mkdir(exist_ok=True)
        before, known = read_record(path), list_digests(run_dir)
        progress = before is not None and not set(known) <= set(before.known)
        record = replace(next_record(before, progress), known=known, status=read_change(run_dir / "status.json"))
        write_atomic(path, json.dumps(asdict(record)) + "\n")
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir} cannot be written ({error.strerror}); set another run.dir") from None
    if (
        record.saved and config.checkpoint.resume != "auto"
    ):  # none, or another run's checkpoint: right for the first start only
        overrides.append("checkpoint.resume=auto")
    folder = ["--config-dir", options.config_dir] if options.config_dir else []
    return {
        "run_dir": str(run_dir),
        "cache": os.path.expanduser(config.data.cache),
        "args": [*folder, *overrides],
        "free_gib": environment.get("TRAINER_FREE_GIB") or f"{free_wanted(run_dir):.3f}",
    }


def free_wanted(run_dir: Path) -> float:
    """GiB that a run needs on its disk to go on: two of its checkpoints (one more is written before one goes), or
    20."""
    newest = next(iter(list_checkpoints(run_dir / "checkpoints").values()), None)
    return 2 * sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) / 2**30 if newest else 20.0


def format_shell(values: dict[str, str | list[str]]) -> str:
    """The values as assignments in bash, lists as arrays."""
    return "\n".join(
        f"{name}=({shlex.join(value)})" if isinstance(value, list) else f"{name}={shlex.quote(value)}"
        for name, value in values.items()
    )


def end_job(run_dir: Path, job: str, code: int, told: bool, state: str, retries: int) -> str:
    """What to do now that a job's start of the run in `run_dir` has ended; see `decide_restart`."""
    record = read_record(record_of(run_dir, job))
    found = read_status(run_dir / "status.json", record.status if record else 0)
    progress = record is not None and not set(list_digests(run_dir)) <= set(record.known)
    return decide_restart(
        found.get("status"), code, told, state, record or JobRecord(), progress, retries, found.get("reason", "")
    )


def read_status(path: Path, before: int) -> dict[str, str]:
    """`status` and `reason` of a run's status.json; empty if it is still that of an earlier start, which was changed at
    `before` (`read_change`)."""
    try:
        found = read_json(path, {"status": str}, "it is left out") if read_change(path) != before else {}
    except (OSError, ConfigError):
        return {}
    return {name: make_printable(str(found[name])) for name in ("status", "reason") if name in found}


def take_stdout() -> BinaryIO:
    """The standard output of this process, for what the script evaluates. Whatever else prints from now on, such as a
    module that `imports` names or a program that it starts, prints to the standard error instead."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def main(arguments: list[str]) -> int:
    answers = take_stdout()
    try:
        if arguments[0] == "begin":
            processes = parse_count("TRAINER_PROCESSES", arguments[2])
            os.environ["LOCAL_WORLD_SIZE"] = str(processes)  # what the plan's check takes for the size of a node
            answer = format_shell(begin_job(int(arguments[1]), processes, arguments[3:], dict(os.environ)))
        else:
            folder, code, told, state = arguments[1:]
            job = os.environ["SLURM_JOB_ID"]
            answer = end_job(Path(folder), job, int(code), told == "1", state, max_retries(os.environ))
    except ConfigError as error:
        print("\n  - ".join(["configuration error:", *error.problems]), file=sys.stderr)
        return REFUSED
    with answers:
        answers.write(os.fsencode(f"{answer}\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
