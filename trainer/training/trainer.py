"""The training loop."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from rich.console import Console
from torch.profiler import record_function

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.manifest import step_folder
from trainer.config import Config
from trainer.data.batches import Loader, eval_batches
from trainer.data.corpus import Corpus, Samples
from trainer.diagnosis import traces
from trainer.distributed.world import World
from trainer.model.initial import Weights, name_seed
from trainer.observe.pauses import Pauses
from trainer.observe.report import start_report
from trainer.observe.sinks import reason_of
from trainer.observe.watchdog import DATA, ENDING, EVALUATING, SAVING, SCHEDULE, STEP, Watchdog
from trainer.planning.fit import kept
from trainer.planning.plan import node_size
from trainer.planning.resolve import Layout
from trainer.training import history
from trainer.training.adapt import Adaptation
from trainer.training.auto_schedule import write_schedule
from trainer.training.hooks import Hooks
from trainer.training.ledger import Ledger
from trainer.training.profiling import Profiling
from trainer.training.recorded import RecordedStep
from trainer.training.samples import draw_samples
from trainer.training.saving import Progress, Start, contents
from trainer.training.session import Clock, memory_of, stop_signals
from trainer.training.state import TrainState
from trainer.training.step import Ask, evaluate, train_step
from trainer.util.exit_codes import DONE, FAILED, STOPPED
from trainer.util.run_folder import LOG


class Trainer:
    """A run in progress: what is trained (`state`), on what (`loader`), and the loop. All ranks call its methods
    together.

    opening: what rank 0 says at the start; tokens: trained on so far; stop_wanted: this rank's wish to end the run, of
    which the next step tells all ranks.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        weights: Weights | None,
        corpus: Corpus,
        world: World,
        watchdog: Watchdog,
        start: Start,
        clock: Clock,
    ):
        self.config, self.corpus, self.world, self.watchdog = config, corpus, world, watchdog
        self.batch, self.folder, self.stop_wanted, self.start = layout.batch, Path(config.run.dir), False, start
        self.clock, self.hooks = clock, Hooks(config, world)
        if world.rank == 0:
            states, memory = kept(config, layout, node_size(world.size)), memory_of(world.device)
            self.opening = start_report(config, layout, states, memory, corpus, world)
            if config.logging.console != "none":
                self.opening.print()
        self.state = TrainState.build(config, layout.spec, layout.plan, layout.pipeline, world, weights)
        progress, messages = self.start.resume(self.state)
        self.tokens, self.loader = progress.tokens, self.load_from(progress.samples)
        messages = [*corpus.notes, *messages, *self.open_folder()]
        self.checkpointer = Checkpointer(self.folder / "checkpoints", config.checkpoint)
        self.pauses = Pauses()
        self.profiling = Profiling(config, world, self.state.step, self.pauses)
        self.ledger = Ledger(self.state, self.batch, progress.skipped, corpus, self.profiling.metrics, self.pauses)
        self.adaptation = Adaptation(self.state, self.batch, self.ledger)
        for text in messages:
            self.ledger.log.event(text)
        self.recorded = RecordedStep(self.state) if config.run.cuda_graphs else None
        self.hooks.load(progress.callbacks)
        self.hooks.run.begin(self.state, self.tokens, self.ledger.latest, self.ledger.log)

    def train(self) -> int:
        """The loop. Returns the exit code."""
        steps, first, status, code, reason = self.config.run.steps, self.state.step, "failed", FAILED, None
        try:
            with stop_signals(self.wish_stop):
                gc.collect()
                gc.freeze()  # what exists now lives to the end: the collector need not look at it again
                self.hooks.call("start")
                if self.config.eval.at_start and self.state.step == 0:
                    self.evaluate()
                while self.state.step < steps and not self.ledger.stop:
                    slow = self.ledger.latest.get("straggler_rank")
                    with self.profiling.step(self.state.step + 1, self.state.runtime, slow):
                        self.one_step()
                        self.ledger.read_back()
                        self.hooks.call("step")
                    self.adapt()
                    self.evaluate_if_due()
                    self.sample_if_due()
                    self.save_if_due()
                    self.report_saves()
                self.ledger.read_back(everything=True)
                self.watchdog.enter(ENDING, self.state.step)
                if self.save_at_end():
                    self.hooks.call("end")
                    code = DONE if self.state.step >= steps or self.ledger.finished else STOPPED
                    status = "stopped" if code == STOPPED else "done"
                    ended = f"run.hours={self.config.run.hours:g}" if self.clock.over else "a signal"
                    self.ledger.log.event(self.ledger.summary(first, self.state.step, code, ended))
                if self.state.plan.pp > 1:
                    write_schedule(self.folder, self.state, self.batch)
            self.checkpointer.close()
            self.state.close()
        except BaseException as error:
            reason = reason_of(error)
            raise
        finally:
            gc.unfreeze()
            self.profiling.close()
            self.loader.close()
            self.ledger.close(status, reason)
            if self.config.logging.report and self.world.rank == 0:
                history.write_report(self.folder)
        return code

    def one_step(self) -> None:
        """Fetches the batch, trains on it, and queues what is to be known of the step."""
        state, number = self.state, self.state.step + 1
        self.clock.next_pass()
        self.ledger.begin_step()
        self.watchdog.enter(DATA, number)
        with record_function(traces.DATA):
            batches = next(self.loader)
        self.watchdog.enter(STEP, number)
        torch.manual_seed(name_seed(self.config.run.seed, f"step {state.step} rank {self.world.data.get_local_rank()}"))
        asked = self.hooks.run.take_asked() | (Ask.STOP if self.stop_wanted or self.time_is_up() else Ask(0))
        scalars = self.recorded(batches, asked) if self.recorded else train_step(state, batches, asked)
        self.tokens += self.batch.tokens
        self.hooks.run.advance(state, scalars, self.tokens)
        if self.ledger.due(number):
            scalars |= self.hooks.measure()
        self.ledger.add(state, scalars, batches, self.tokens, self.loader)

    def adapt(self) -> None:
        """Takes up another schedule, where its measurement has come so far."""
        if self.adaptation.schedule_due() and self.state.step < self.config.run.steps and not self.ledger.stop:
            self.watchdog.enter(SCHEDULE, self.state.step)
            self.ledger.read_back(everything=True)
            before = self.batch
            self.state, self.batch = self.adaptation.change_schedule(
                self.state, before, self.save_now, self.checkpointer
            )
            if self.batch != before:
                self.loader.close()
                self.loader = self.load_from(self.loader.position)

    def evaluate_if_due(self) -> None:
        """Evaluates every `eval.every` steps and after the last."""
        step, every = self.state.step, self.config.eval.every
        due = every and (step % every == 0 or step >= self.config.run.steps)
        if not (self.ledger.take(Ask.EVALUATE) or due) or self.ledger.stop:
            return
        if not len(self.corpus.eval) and not self.corpus.sets:
            self.ledger.log.event("an evaluation was asked for, and nothing is held out: set data.eval_fraction")
            return
        self.ledger.read_back(everything=True)  # or the pause would begin with the end of a step
        with self.pauses.spent("evaluation"):
            self.evaluate()

    def evaluate(self) -> None:
        """Mean loss on the held-out sequences, the same ones every time and under every plan, by source where there are
        several; and on every set."""
        self.ledger.read_back(everything=True)
        self.watchdog.enter(EVALUATING, self.state.step)
        record: dict[str, float | None] = {"step": self.state.step, "tokens": self.tokens, "eval_loss": None}
        held, sources = self.corpus.eval, self.ledger.sources
        if len(held):
            record["eval_loss"], *losses = self.losses_on(held, sources)
            record |= {f"eval_loss/{name}": loss for name, loss in zip(sources, losses)}
        for name, samples in self.corpus.sets.items():
            (record[f"eval_loss/{name}"],) = self.losses_on(samples)
        self.ledger.evaluated(record)
        self.hooks.call("evaluation")

    def sample_if_due(self) -> None:
        """Has the model continue the prompts every `eval.generate.every` steps and after the last."""
        step, settings = self.state.step, self.config.eval.generate
        due = settings.every and (step % settings.every == 0 or step >= self.config.run.steps)
        if not due or self.ledger.stop:
            return
        self.ledger.read_back(everything=True)
        self.watchdog.enter(EVALUATING, step)
        with self.pauses.spent("evaluation"), self.weights_to_evaluate():
            samples = draw_samples(self.state, settings, self.corpus.tokenizer)
        self.ledger.log.samples(step, samples)

    def weights_to_evaluate(self) -> AbstractContextManager[None]:
        """The weights as trained, or with `eval.ema` their average in their place."""
        return self.state.averaged() if self.config.eval.ema else nullcontext()

    def losses_on(self, samples: Samples, sources: Sequence[str] = ()) -> list[float]:
        """Mean loss on sequences that are not trained on, and by source."""
        batches = eval_batches(
            samples,
            self.config.eval.sequences,
            self.batch.micro_size,
            self.world.data.get_local_rank(),
            self.state.plan.dp,
            mask_documents=self.config.data.mask_documents,
            device=self.world.device,
        )
        with self.weights_to_evaluate():
            return evaluate(self.state, batches, sources).tolist()

    def save_if_due(self) -> None:
        """Saves every `checkpoint.every` steps, and where a callback asks; the last step is saved at the end."""
        step, every = self.state.step, self.config.checkpoint.every
        if step < self.config.run.steps and not self.ledger.stop:
            if self.ledger.take(Ask.SAVE) or every and step % every == 0:
                self.ledger.read_back(everything=True)
                with self.pauses.spent("checkpoint"):
                    self.save()

    def save(self, wait: bool = False) -> None:
        """Hands the state to the checkpointer, which writes while training goes on, unless it is to `wait`."""
        self.ledger.read_back(everything=True)
        self.watchdog.enter(SAVING, self.state.step)
        progress = Progress(self.loader.position, self.tokens, self.ledger.skipped, self.hooks.states())
        self.checkpointer.save(self.state.step, *contents(self.state, self.batch, progress, self.start), wait=wait)
        self.hooks.run.checkpoint = step_folder(self.checkpointer.folder, self.state.step)
        self.hooks.call("save")

    def save_now(self) -> bool:
        """Saves the present step, unless that has been done, and says whether its checkpoint is there."""
        self.checkpointer.wait()
        if self.checkpointer.saved_step != self.state.step:
            self.save(wait=True)
        self.report_saves()
        return self.checkpointer.saved_step == self.state.step

    def save_at_end(self) -> bool:
        """The last save, where one is wanted; False where it failed."""
        ledger = self.ledger
        wanted = self.config.checkpoint.at_end or ledger.stop and not ledger.finished or ledger.take(Ask.SAVE)
        if not wanted or self.save_now():
            return True
        text = f"{self.folder}: the last checkpoint, of step {self.state.step}, could not be written"
        print(text, file=sys.stderr, flush=True)
        return False

    def report_saves(self) -> None:
        """Prints what became of saves in the background."""
        for text in self.checkpointer.poll():
            self.ledger.log.event(text)

    def wish_stop(self) -> None:
        """Lets the run end after the present step, with a checkpoint. Called between any two lines of the loop."""
        self.stop_wanted = True

    def time_is_up(self) -> bool:
        """Whether `run.hours` end the run. The clock of the first rank alone decides, for all."""
        return self.world.rank == 0 and self.clock.up(self.checkpointer.longest)

    def load_from(self, position: int) -> Loader:
        """The training data from sample `position` on."""
        return Loader(
            self.corpus.train,
            self.batch,
            self.world.data.get_local_rank(),
            self.state.plan.dp,
            seed=self.config.run.seed,
            position=position,
            mask_documents=self.config.data.mask_documents,
            prefetch=self.config.data.prefetch,
            device=self.world.device,
        )

    def open_folder(self) -> list[str]:
        """Makes the run folder that of this start: sets an earlier run aside, and notes what is about to be trained,
        with which settings, by whom. Returns what is to be said."""
        places = self.world.gather(history.place(self.world))
        return self.world.agree(lambda: self._open_folder(places))

    def _open_folder(self, places: list[tuple[str, str]]) -> list[str]:
        folder, resumed, step = self.folder, self.start.path, self.start.step
        aside = history.set_aside(folder, resumed, step)
        changed = history.note_start(self.config, step, resumed, aside, places, self.opening.sections)
        self.corpus.tokenizer.save(folder / "tokenizer")
        with open(folder / LOG, "a", encoding="utf-8") as log:
            self.opening.print(Console(file=log))
        return [
            *([f"what an earlier run left in {folder} is now in {aside}"] if aside else []),
            *([f"settings changed since: {history.shown(changed)}"] if changed else []),
        ]
