"""A change under way: a run with schedule=auto goes over to the schedule that it has found best."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.manifest import step_folder
from trainer.config import ConfigError
from trainer.planning.batch import BatchPlan
from trainer.planning.pipeline import PipelinePlan
from trainer.planning.schedules.search import ScheduleChoice
from trainer.training.auto_schedule import CHOSEN, AutoSchedule, save_choice
from trainer.training.ledger import MetricsTracker
from trainer.training.saving import DROPPED, restore_state
from trainer.training.state import TrainState


class Adaptation:
    """The measurement of a run with schedule=auto, and the change to what it chooses. All ranks call its methods
    together."""

    def __init__(self, state: TrainState, batch: BatchPlan, ledger: MetricsTracker):
        self.ledger = ledger
        wanted = state.config.parallel.pipeline.schedule == "auto" and state.plan.pp > 1
        # A schedule that was chosen earlier in this run has a name of its own; see `saved_choice`.
        self.auto = AutoSchedule(state, batch) if wanted and state.pipeline.schedule.name != CHOSEN else None

    def schedule_due(self) -> bool:
        """After each step: whether enough of them have been measured to choose a schedule."""
        return self.auto is not None and self.auto.ready()

    def change_schedule(
        self, state: TrainState, batch: BatchPlan, save: Callable[[], bool], checkpointer: Checkpointer
    ) -> tuple[TrainState, BatchPlan]:
        """Ends the measurement for schedule=auto and takes up what it found best. Returns the state and the batch to go
        on with. save: makes sure that `checkpointer` has a checkpoint of the present step, and says whether it has."""
        auto, self.auto = self.auto, None
        try:
            choice = auto.choose()
        except ConfigError as error:
            self.ledger.log.event(f"schedule auto keeps {state.pipeline.describe()}: {error}")
        else:
            state, batch = self._adopt(choice, state, batch, save, checkpointer)
        return state, batch

    def _adopt(
        self,
        choice: ScheduleChoice,
        state: TrainState,
        batch: BatchPlan,
        save: Callable[[], bool],
        checkpointer: Checkpointer,
    ) -> tuple[TrainState, BatchPlan]:
        config, before, after = state.config, state.pipeline, PipelinePlan(choice.schedule, choice.split)
        if state.world.rank == 0:
            try:
                save_choice(Path(config.run.dir), choice, config, state.spec, state.plan)
            except OSError as error:  # on rank 0 alone, which must not leave the others
                self.ledger.log.event(f"the choice was not written, and the next start measures anew: {error}")
        if (after.split, after.schedule.placement, choice.microbatches) == (
            before.split,
            before.schedule.placement,
            batch.accumulation,
        ):
            state.use_schedule(choice.schedule)
        elif save():
            if state.compression.feedback_bytes:
                self.ledger.log.event(DROPPED)
            batch = replace(batch, micro_size=choice.micro_size, accumulation=choice.microbatches)
            state = rebuild_state(state, after, checkpointer)
        else:
            self.ledger.log.event(
                "schedule auto keeps the present stages: the checkpoint to cut them anew from could not be written"
            )
            return state, batch
        self.ledger.expect(choice.predicted, state.step + 2)
        self.ledger.slowdown.restart()
        self.ledger.log.event(f"schedule auto chose {after.describe()} of {len(choice.table)} candidates")
        return state, batch


def rebuild_state(old: TrainState, pipeline: PipelinePlan, checkpointer: Checkpointer) -> TrainState:
    """The state with the model cut anew: through the checkpoint of the present step, the way any other plan would
    resume the run. `old` is freed."""
    gc.unfreeze()  # or nothing of the old state would ever be collected
    old.free()
    state = TrainState.build(old.config, old.spec, old.plan, pipeline, old.world)
    path = step_folder(checkpointer.folder, old.step)
    restore_state(state, path, old.step, old.scaler.state_dict())
    if not old.config.checkpoint.every and not old.config.checkpoint.at_end:  # a run that is to leave no checkpoint
        dist.barrier()
        checkpointer.forget(path)
    gc.freeze()
    return state
