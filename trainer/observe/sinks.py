"""Where metrics go: the console, metrics.jsonl, TensorBoard, Weights & Biases.

The first process owns all of them. A sink has `write(record)` for step and evaluation lines, and `close(status)`. When
a sink fails, a notice names it, the sink is dropped, and training goes on."""

from __future__ import annotations

import json
import netrc
import os
import queue
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from trainer.config import ConfigError, LoggingConfig, RunConfig, WandbConfig
from trainer.config.registry import SINKS
from trainer.observe import metrics
from trainer.util.exit_codes import DONE, STOPPED, requires_extra
from trainer.util.lines import LOG, METRICS_FILE, REPLACED, SAMPLES, STATUS, LineFile, read_lines, read_status
from trainer.util.reading import explain_errors, read_bytes, write_atomic
from trainer.util.tables import format_bytes, format_count, format_duration, format_percent

# samples.jsonl: what the model wrote while it was trained.


Sample = tuple[str, str]
"""A prompt and its continuation."""


class SamplesFile:
    """One JSON object a continuation. Every start appends: a step that is trained again has its lines twice."""

    def __init__(self, folder: Path):
        self.path = folder / SAMPLES

    def write(self, record: dict[str, Any]) -> None:
        """Metrics are in a file of their own."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        now = time.time()
        lines = [{"step": step, "time": now, "prompt": prompt, "text": text} for prompt, text in samples]
        with LineFile(self.path) as file:
            file.append("".join(json.dumps(line) + "\n" for line in lines))

    def close(self, status: str) -> None:
        pass


def format_sample(number: int, sample: Sample) -> str:
    """A continuation for people, with its prompt, indented."""
    return f"sample {number}:\n    " + escape_controls("".join(sample)).replace("\n", "\n    ")


def escape_controls(text: str) -> str:
    """A text without what a terminal would obey: a model writes anything."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


# Metrics as text: the lines of a run on the terminal, in a pipe and in console.log.


MetricsLine = dict[str, Any]


def _summary(record: MetricsLine) -> list[str]:
    """The parts of a step's line on the console, padded so that lines align; unknown values are left out."""
    learned = record["learned"]
    parts = [
        f"loss {'of no token' if learned == 0 else _number(record['loss'], '7.4f')}{_by_name(record, 'loss')}",
        f"{format_count(record['tokens_per_second']):>5} tokens/s" if record["tokens_per_second"] is not None else None,
        f"grad norm {_number(record['grad_norm'], '7.3g')}" if record["grad_norm"] is not None else None,
        f"lr {_number(record['lr'], '.2e')}" if record["lr"] is not None else None,
        f"MFU {format_percent(record['mfu']):>5}" if record["mfu"] is not None else None,
        f"bubble {format_percent(record['bubble']):>5}" if record["bubble"] is not None else None,
        f"memory {format_bytes(record['memory_gib'] * 2**30):>8}" if record["memory_gib"] is not None else None,
        # Masked documents alone leave out the token before each document, which is less than a percent.
        f"learned {format_percent(learned)}" if learned is not None and learned < 0.99 else None,
        f"skipped {record['skipped']}" if record["skipped"] else None,
        f"ETA {format_duration(record['eta_seconds'])}" if record["eta_seconds"] else None,
    ]
    return [part for part in parts if part]


def _by_name(record: MetricsLine, kind: str) -> str:
    """The values by source or set, in brackets; nothing where there are none."""
    values = metrics.of_names(record, kind).items()
    named = ", ".join(f"{name} {'-' if value is None else format(value, '.4f')}" for name, value in values)
    return f" ({named})" if named else ""


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _evaluation(record: MetricsLine, total: int) -> str:
    loss = f"{_number(record['eval_loss'], '.4f')}{_by_name(record, 'eval_loss')}"
    if record["eval_loss"] is None and metrics.of_names(record, "eval_loss"):  # nothing is held out
        loss = _by_name(record, "eval_loss").strip(" ()")
    return f"{format_step(record['step'], total)}  evaluation loss {loss}"


def format_step(step: int, total: int) -> str:
    return f"step {step:>{len(str(total))}}/{total}"


class PlainConsole:
    """One line a logged step, for logs and pipes."""

    def __init__(self, total: int):
        self.total = total

    def write(self, record: MetricsLine) -> None:
        self.event(
            _evaluation(record, self.total)
            if "eval_loss" in record
            else f"{format_step(record['step'], self.total)}  {'  '.join(_summary(record))}"
        )

    def event(self, text: str) -> None:
        print(text, flush=True)

    def close(self, status: str) -> None:
        pass


class LogFile(PlainConsole):
    """console.log: the plain lines with the time of day, whatever the console shows; every start appends to it."""

    def __init__(self, folder: Path, total: int):
        super().__init__(total)
        self.file = LineFile(folder / LOG)

    def event(self, text: str) -> None:
        self.file.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def close(self, status: str, reason: str | None = None) -> None:
        self.event(f"{status}: {reason}" if reason else status)
        self.file.close()


class _Bar(Progress):
    """The progress bar, with the newest step's numbers on a line of their own below it."""

    numbers = Text()

    def get_renderables(self):
        yield self.make_tasks_table(self.tasks)
        yield self.numbers


class RichConsole:
    """A progress bar for a terminal; evaluations and notices scroll above it."""

    REFRESH = 0.1  # seconds between redraws

    def __init__(self, name: str, total: int, resume_step: int):
        self.total = total
        self.bar = _Bar(
            TextColumn("[bold cyan]{task.description}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[eta]}"),
            console=Console(force_terminal=True, highlight=False),
            auto_refresh=False,
            expand=True,
        )
        self.task = self.bar.add_task(escape(name), total=total, completed=resume_step, eta="")
        self.drawn = 0.0
        self.bar.start()

    def write(self, record: MetricsLine) -> None:
        if "eval_loss" in record:
            return self.event(_evaluation(record, self.total))
        self.bar.update(
            self.task,
            completed=record["step"],
            eta="" if not record["eta_seconds"] else f"ETA {format_duration(record['eta_seconds'])}",
        )
        # 80 columns are full without the word, which the unit stands for.
        parts = [" ".join(part.removeprefix("memory").split()) for part in _summary(record | {"eta_seconds": None})]
        self.bar.numbers = Text("  ".join(parts), no_wrap=True, overflow="ellipsis")
        if time.monotonic() - self.drawn >= self.REFRESH:
            self.bar.refresh()
            self.drawn = time.monotonic()

    def event(self, text: str) -> None:
        self.bar.console.print(text, markup=False)

    def close(self, status: str) -> None:
        self.bar.refresh()
        self.bar.stop()


# The sinks, and the logger that writes to all of them.


Notify = Callable[[str], None]


class SinkPlace(NamedTuple):
    """What a registered sink is told. folder: the run's; name: of the run; resume_step: the step that training
    continues after, 0 for a new run; config: the resolved configuration as plain data; notify: shows a notice."""

    folder: Path
    name: str
    resume_step: int
    config: dict[str, Any]
    notify: Notify


class Logger:
    """Hands each logged step, evaluation and notice of a run to its sinks.

    folder: the run folder. resume_step: the step that training continues after, 0 for a new run. config: the resolved
    configuration, for Weights & Biases. enabled: True on the one rank that logs; on the others every method returns at
    once. Raises `ConfigError` and `FolderError` when the run folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        logging: LoggingConfig,
        run: RunConfig,
        resume_step: int,
        config: dict[str, Any],
        enabled: bool = True,
    ):
        self._listeners: list[LogFile | RichConsole | PlainConsole] = []
        self._sinks: list[Any] = []
        self._total = run.steps
        if not enabled:
            return
        folder = Path(folder)
        with explain_errors(folder):
            self._sinks += [JsonLines(folder, resume_step, self.event), SamplesFile(folder)]
            self._listeners.append(LogFile(folder, run.steps))
        if logging.console != "none":
            rich = logging.console == "rich" or logging.console == "auto" and sys.stdout.isatty()
            self._listeners.append(RichConsole(run.name, run.steps, resume_step) if rich else PlainConsole(run.steps))
        self._sinks += self._listeners
        if logging.tensorboard:
            self._open("TensorBoard", lambda: TensorBoard(folder, resume_step))
        if logging.wandb.enabled:
            self._open("wandb", lambda: Wandb(folder, logging.wandb, run.name, resume_step, config, self.event))
        place = SinkPlace(folder, run.name, resume_step, config, self.event)
        for name, given in logging.sinks.items():
            self._open(f"the sink '{name}'", partial(open_sink, name, given, place))
        self._open(
            "status.json", lambda: StatusFile(folder, resume_step, run.steps)
        )  # the last to open is the first to close

    def step(self, record: MetricsLine) -> None:
        """Logs a step: any of the names in `metrics.METRICS`, and `step`. Raises `ValueError` for another name."""
        self._write(record, metrics.STEP)

    def evaluation(self, record: MetricsLine) -> None:
        """Logs an evaluation: the names in `metrics.EVALUATION`."""
        self._write(record, metrics.EVALUATION)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Shows what the model wrote after a step, and hands it to the sinks that take texts."""
        for number, sample in enumerate(samples, start=1):
            self.event(f"{format_step(step, self._total)}  {format_sample(number, sample)}")
        for sink in list(self._sinks):
            if hasattr(sink, "samples"):
                self._try(sink, partial(sink.samples, step), samples)

    def event(self, text: str) -> None:
        """Shows a one-line notice, such as 'checkpoint saved', on the console and in its log."""
        for listener in list(self._listeners):
            self._try(listener, listener.event, text)

    def note_non_finite(self, first: int) -> None:
        """Has status.json tell that the run ends with steps that are not finite, from step `first` on."""
        for sink in self._sinks:
            if isinstance(sink, StatusFile):
                sink.non_finite = first

    def close(self, status: str = "done", reason: str | None = None) -> None:
        """Flushes and ends every sink. `status` is 'done', 'stopped' (saved, to be continued) or else a failure for
        `reason`."""
        for sink in reversed(list(self._sinks)):  # the console last: others may have notices for it
            tells = isinstance(sink, (StatusFile, LogFile))
            self._try(sink, partial(sink.close, reason=reason) if tells else sink.close, status)
        self._sinks, self._listeners = [], []

    def _open(self, name: str, make: Callable[[], Any]) -> None:
        try:
            self._sinks.append(make())
        except Exception as error:
            self.event(f"{name} is off: {reason_of(error)}")

    def _write(self, record: MetricsLine, names: tuple[str, ...]) -> None:
        if self._sinks:
            record = metrics.format_line({"time": time.time(), **record}, names)
        for sink in list(self._sinks):
            self._try(sink, sink.write, record)

    def _try(self, sink: Any, call: Callable[[Any], None], argument: Any) -> None:
        try:
            call(argument)
        except Exception as error:
            self._sinks.remove(sink)
            self._listeners = [listener for listener in self._listeners if listener is not sink]
            self.event(f"{type(sink).__name__} is off from here: {reason_of(error)}")


def open_sink(name: str, given: dict[str, Any], place: SinkPlace) -> Any:
    """A registered sink with its settings."""
    entry = SINKS[name]
    return entry.made(entry.of(given), place)


def reason_of(error: BaseException) -> str:
    """An error's kind and first line."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


class JsonLines:
    """metrics.jsonl: one JSON object a line, each written at once; NaN and infinities, which JSON lacks, are null.

    A run that resumes after step s first moves the lines beyond s, whose steps it will train again, to
    metrics-replaced.jsonl, and drops what is cut off. So the curve stays one curve. A new run (s = 0) moves all. On a
    full disk a line is lost, the run goes on, and the next line is tried again."""

    def __init__(self, folder: Path, resume_step: int, notify: Notify):
        folder.mkdir(parents=True, exist_ok=True)
        self.lines, self.notify, self.failing = LineFile(folder / METRICS_FILE), notify, False
        move_later_lines(self.lines, folder / REPLACED, resume_step)

    def write(self, record: MetricsLine) -> None:
        try:
            self.lines.append(json.dumps(record, allow_nan=False) + "\n")
            self.failing = False
        except OSError as error:
            if not self.failing:
                self.notify(f"{self.lines.path}: step {record['step']} not written ({error.strerror}); going on")
            self.failing = True

    def close(self, status: str) -> None:
        self.lines.close()


def move_later_lines(lines: LineFile, replaced: Path, step: int) -> None:
    """Moves the lines of metrics beyond `step` to the end of another file; all lines for step 0.

    Lines are in order of their steps, so the file is read backwards, as far as it is moved. The lines are on the disk
    in the other file before they are cut off here. Where a process is killed in between, the next call finds the lines
    at the end of the other file, and moves the rest."""
    begin = lines.size
    for place, text in lines.backwards():
        record = metrics.parse_line(text)
        if step and record is not None and record["step"] <= step:
            break
        begin = place
    if begin == lines.size:
        return
    with LineFile(replaced) as there:
        _, last = next(there.backwards(), (0, None))
        moved = place = begin
        for text in read_lines(lines.path, begin):
            place += len(text) + 1
            if text == last and there.ends_with(lines, begin, place):
                moved = place
        there.append_from(lines, moved)
    lines.cut(begin)


class StatusFile:
    """status.json: what has become of a run, for scripts that restart it.

    It holds the status, the last logged step and the number of steps. The status is 'running', 'done', 'stopped'
    (saved, to be continued) or 'failed' (with the reason, where one is known). A run that was killed stays
    'running'."""

    def __init__(self, folder: Path, resume_step: int, total: int):
        self.folder, self.step, self.total = folder, resume_step, total
        self.non_finite: int | None = None
        write_status(folder, "running", resume_step, total)

    def write(self, record: MetricsLine) -> None:
        self.step = record["step"]

    def close(self, status: str, reason: str | None = None) -> None:
        """A failure that another rank's watchdog has told of stays: what fails here is what it ended."""
        if status != "failed" or read_status(self.folder, reason=str).get("status") != "failed":
            write_status(self.folder, status, self.step, self.total, reason, self.non_finite)


def write_status(
    folder: Path, status: str, step: int, total: int, reason: str | None = None, non_finite: int | None = None
) -> None:
    """Writes a run's status.json, whole or not at all. non_finite: the first of the steps that were not finite and
    ended the run; a restart goes back to before them."""
    content = {"status": status, "step": step, "steps": total} | ({"reason": reason} if reason else {})
    content |= {"non_finite": non_finite} if non_finite is not None else {}
    write_atomic(folder / STATUS, json.dumps(content) + "\n")


class TensorBoard:
    """TensorBoard events in run_folder/tensorboard; steps beyond the resumed one are purged from the curves."""

    def __init__(self, folder: Path, resume_step: int):
        with requires_extra("tensorboard", "logging.tensorboard=true"):
            from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step and resume_step + 1)

    def write(self, record: MetricsLine) -> None:
        for name, value in record.items():
            if name not in ("step", "time") and value is not None:
                self.writer.add_scalar(name, value, record["step"], walltime=record["time"])

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for number, sample in enumerate(samples, start=1):
            self.writer.add_text(f"sample/{number}", "    " + "".join(sample).replace("\n", "\n    "), step)

    def close(self, status: str) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases, in a thread, so that neither its start nor a slow network delays a step.

    Without a key (WANDB_API_KEY, or netrc), and when the server cannot be reached, the run is kept in run_folder/wandb
    for `wandb sync`. WANDB_MODE, where it is set, decides instead. The run's id is kept in run_folder/wandb-id, so that
    a resumed run continues the same curves (offline: once its parts are synced). Weights & Biases ignores steps that it
    has already.

    The package is imported before the thread starts: two threads that import modules of protobuf at the same time can
    end the process by a segmentation fault."""

    START, FINISH = 20, 30  # seconds: to reach the server before going offline; to deliver the last lines in close()
    EXIT_CODES = {"done": DONE, "stopped": STOPPED}

    def __init__(
        self, folder: Path, settings: WandbConfig, name: str, resume_step: int, config: dict[str, Any], notify: Notify
    ):
        import wandb

        self.wandb = wandb
        self.folder, self.settings, self.name, self.config, self.notify = folder, settings, name, config, notify
        kept = folder / "wandb-id"
        self.id = saved_run_id(kept) if resume_step else None
        if self.id is None:
            self.id = uuid.uuid4().hex[:8]
            write_atomic(kept, self.id)
        self.lines: queue.Queue[MetricsLine | str] = queue.Queue(maxsize=10_000)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self.thread.start()

    def write(self, record: MetricsLine | str) -> None:
        if self.error is not None:
            raise self.error
        try:
            self.lines.put_nowait(record)
        except queue.Full:
            raise TimeoutError(f"{self.lines.maxsize} lines wait for the server") from None

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        texts = {f"sample/{number}": "".join(sample) for number, sample in enumerate(samples, start=1)}
        self.write({"step": step, **texts})

    def close(self, status: str) -> None:
        self.write(status)
        self.thread.join(self.FINISH)
        if self.error is not None:
            raise self.error
        if self.thread.is_alive():
            self.notify(
                f"wandb did not finish within {self.FINISH} s; `wandb sync` delivers what is in {self.folder / 'wandb'}"
            )

    def _work(self) -> None:
        try:
            run = self._start()
            while not isinstance(item := self.lines.get(), str):
                values = {
                    name: value for name, value in item.items() if value is not None and name not in ("step", "time")
                }
                run.log(values, step=item["step"])
            if item == "stopped":
                run.mark_preempting()
            run.finish(exit_code=self.EXIT_CODES.get(item, 1))
        except Exception as error:
            self.error = error

    def _start(self) -> Any:
        arguments = dict(
            project=self.settings.project,
            name=self.name,
            id=self.id,
            config=self.config,
            dir=str(self.folder),
            settings=self.wandb.Settings(console="off", silent=True, init_timeout=self.START),
        )
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        if mode != "online":
            return self.wandb.init(mode=mode, **arguments)
        try:
            return self.wandb.init(mode=mode, resume="allow", **arguments)
        except Exception as error:
            self.notify(f"wandb stays offline, `wandb sync` delivers the run later: {reason_of(error)}")
            self.wandb.teardown()  # its service still holds the run's id
            return self.wandb.init(mode="offline", **arguments)


def saved_run_id(path: Path) -> str | None:
    """The run's id as an earlier start has written it; None where there is none, or something else."""
    try:
        text = read_bytes(path, 200).decode().strip()
    except (OSError, ConfigError, UnicodeDecodeError):
        return None
    return text if re.fullmatch("[A-Za-z0-9_-]{1,100}", text) else None


def _has_key() -> bool:
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        return bool(os.environ.get("WANDB_API_KEY") or netrc.netrc(os.environ.get("NETRC")).authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False
