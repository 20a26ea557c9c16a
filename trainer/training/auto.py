"""A change under way: a run with schedule=auto goes over to the schedule that it has found best."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import yaml

from trainer.checkpointing.checkpointer import Checkpointer
from trainer.checkpointing.manifest import step_folder
from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec
from trainer.parallel.pipeline.plan import PipelinePlan, estimated_costs
from trainer.parallel.pipeline.timing import LayerProbe, MeasuredCosts
from trainer.planning.decide import SHARE
from trainer.planning.parameters import UpdateSettings
from trainer.planning.plan import BatchPlan, Plan
from trainer.planning.resolve import Layout
from trainer.planning.schedules import ir
from trainer.planning.schedules.costs import LayerCosts, Split, explicit_split, from_sizes
from trainer.planning.schedules.lower import validate_schedule
from trainer.planning.schedules.simulate import ActionSpan, simulate_schedule, write_timeline
from trainer.planning.states import constant_bytes
from trainer.precision.products import DTYPES
from trainer.training.metrics_tracker import MetricsTracker
from trainer.training.saving import DROPPED, restore_state
from trainer.training.state import TrainState
from trainer.util.reading import Shape, find_mismatch, read_yaml, write_atomic

# `parallel.pipeline.schedule=auto`: measure the layers while the first steps run, then choose schedule, split and
# micro-batches. Also what a run's folder says of its schedule: `schedule/schedule.csv` (torch's notation),
# `schedule/planned.json` and `schedule/measured.json` (for `trainer plot`); `schedule/choice.yaml` and
# `schedule/chosen.csv` (what auto chose).


if TYPE_CHECKING:
    from trainer.planning.schedules.search import ScheduleChoice

CHOSEN = "auto"
"""Name of a schedule that an earlier start of the run chose."""

WORTH_REBUILDING = 0.03
"""Predicted gain, as a share of the step, for which the layers are cut anew; a new order of the same stages is free."""

CHOICE: Shape = {"parallel": {"pipeline": {"split": [int]}}, "batch": {"micro_size": int, "accumulation": int}}
"""What has to stand in `schedule/choice.yaml`."""

USABLE = SHARE
"""Share of a GPU's memory that a schedule may plan with."""


PROBE_STEPS = 3
"""Steps that are measured before the choice."""


class AutoSchedule:
    """Probes the steps of a run, and chooses when enough have been measured. All ranks call it together."""

    def __init__(self, state: TrainState, batch: BatchPlan):
        self.state, self.batch, self.steps = state, batch, 0
        self.probe = LayerProbe(state.stages, state.world.device)
        state.runtime.probe = self.probe

    def ready(self) -> bool:
        """After each step: whether enough steps have been measured. The first is not: it compiles and allocates."""
        self.steps += 1
        if self.steps == 1:
            self.probe.measured()
        return self.steps > PROBE_STEPS

    def choose(self) -> ScheduleChoice:
        """Ends the measurement; the best choice, the same on every rank. Settings that the user gave are kept.

        Raises `ConfigError` on every rank where nothing fits the memory.
        """
        from trainer.planning.schedules.search import SearchSpace, reorder_actions, search_schedules

        state, batch, settings = self.state, self.batch, self.state.config.parallel.pipeline
        pipeline, plan, world = state.pipeline, state.plan, state.world
        mine = self.probe.measured(), state.runtime.finish(), transfer_seconds(state, batch), peak_bytes(world.device)
        everyone = world.gather(mine)
        self.probe.remove()
        state.runtime.probe = None

        def decide() -> ScheduleChoice:
            layers = replace(
                measured_layers(state, batch, [measured for measured, *_ in everyone]),
                transfer=max(seconds for _, _, seconds, _ in everyone),
            )
            layers = calibrate_costs(layers, pipeline, max(finish for _, finish, _, _ in everyone))
            element = DTYPES[state.config.precision.compute].itemsize
            seen = simulate_schedule(pipeline.schedule, layers.stage(pipeline.split))
            updates = UpdateSettings.of(state.config)
            states = constant_bytes(state.spec, plan, element, pipeline.split, pipeline.schedule.placement, updates)
            # What the formulas do not know: communication buffers, fragments, the compiler's workspaces.
            extra = max(0.0, max(peak for *_, peak in everyone) - max(a + b for a, b in zip(states, seen.memory)))
            limit = memory_limit(world.device)

            def constant(split: Split, placement: tuple[int, ...]) -> list[float]:
                sizes = constant_bytes(state.spec, plan, element, split, placement, updates)
                return [size + extra for size in sizes]

            if settings.memory_cap is not None:
                limit, constant = (
                    settings.memory_cap * layers.stage(pipeline.split).share(pipeline.schedule.placement),
                    None,
                )
            given = state.config.batch
            fixed = (batch.accumulation,) if given.accumulation or given.micro_size else None
            space = SearchSpace(
                microbatches=fixed,
                chunks=(settings.chunks,) if settings.chunks else (1, 2, 4),
                split=from_sizes(settings.split) if isinstance(settings.split, list) else None,
            )
            best = search_schedules(
                lambda micro: layers.scaled(micro / batch.micro_size),
                plan.pp,
                batch.micro_size * batch.accumulation,
                limit,
                constant,
                space,
            )
            try:
                here = reorder_actions(
                    layers,
                    pipeline.split,
                    pipeline.schedule.placement,
                    batch.accumulation,
                    batch.micro_size,
                    limit,
                    constant and constant(pipeline.split, pipeline.schedule.placement),
                )
            except ConfigError:  # only other cuts fit
                return best
            return best if best.predicted.makespan < (1 - WORTH_REBUILDING) * here.predicted.makespan else here

        return world.agree(decide)


def measured_layers(state: TrainState, batch: BatchPlan, ranks: list[MeasuredCosts]) -> LayerCosts:
    """Costs by unit of the model: medians over micro-batches, of the slowest rank where several hold a unit.

    The weight gradients of a stage are shared out to its layers by their matrix products; so are, where backward passes
    are not split, the input's and the weights' part of them, and the bytes of a stage's activations.
    """
    element = DTYPES[state.config.precision.compute].itemsize
    formula = estimated_costs(state.config, state.spec, state.plan, batch, element)
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    weights: dict[int, float] = defaultdict(float)
    held: dict[int, float] = defaultdict(float)
    for measured in ranks:
        for found, values in ((seconds, measured.seconds), (weights, measured.weights), (held, measured.bytes)):
            for key, samples in values.items():
                found[key] = max(found[key], statistics.median(samples))
    f, i, w, b = ([0.0] * len(formula.f) for _ in range(4))
    for stage, part in enumerate(state.pipeline.split):
        units = [
            *([0] if part.start == 0 else []),
            *(layer + 1 for layer in part),
            *([len(f) - 1] if part.stop == state.spec.depth else []),
        ]
        # The head's weight gradient is part of the input's: it would keep the logits.
        products = [0.0 if unit in (0, len(f) - 1) else formula.w[unit] for unit in units]
        for unit, product in zip(units, products):
            f[unit] = seconds[unit, "F"]
            share = product / ((formula.i[unit] + formula.w[unit]) or 1.0)
            if (unit, "I") in seconds:
                i[unit], w[unit] = seconds[unit, "I"], weights[stage] * product / sum(products)
            else:
                i[unit], w[unit] = seconds[unit, "B"] * (1 - share), seconds[unit, "B"] * share
            b[unit] = seconds[unit, "B"] if (unit, "B") in seconds else i[unit] + w[unit]
    expected = sum(formula.activation)
    scale = sum(held.values()) / expected if sum(held.values()) > 0 else 1.0
    return replace(
        formula,
        f=tuple(f),
        i=tuple(i),
        w=tuple(w),
        b=tuple(b),
        activation=tuple(scale * size for size in formula.activation),
    )


def calibrate_costs(layers: LayerCosts, pipeline: PipelinePlan, makespan: float) -> LayerCosts:
    """The costs with the host time of an action that makes the simulation of the probed steps last as long as they
    did."""

    def late(host: float) -> bool:
        return (
            simulate_schedule(pipeline.schedule, replace(layers, host=host).stage(pipeline.split)).makespan > makespan
        )

    low, high = 0.0, makespan / max(map(len, pipeline.schedule.orders))
    if late(low):
        return replace(layers, host=0.0)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if late(middle) else (middle, high)
    return replace(layers, host=low)


def transfer_seconds(state: TrainState, batch: BatchPlan, repeats: int = 5) -> float:
    """Time of one hidden state from the neighbour before this rank, with nothing else going on; zero on the first
    rank."""
    channels, device = state.channels, state.world.device
    shape = torch.Size((batch.micro_size * batch.sequence_length // state.plan.token_ranks, state.spec.width))
    dtype = DTYPES[state.config.precision.compute]
    taken = 0.0
    for sender in range(len(channels.ranks) - 1):
        edge = sender, sender + 1
        dist.barrier()
        if channels.rank == edge[0]:
            for _ in range(repeats):
                channels.send(torch.zeros(shape, dtype=dtype, device=device), edge[1])
            channels.flush()
        elif channels.rank == edge[1]:
            started = 0.0
            for number in range(repeats):
                channels.recv(shape, dtype, edge[0]).wait()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if number == 0:
                    started = time.perf_counter()
            taken = (time.perf_counter() - started) / (repeats - 1)
    return taken


def peak_bytes(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0.0


def memory_limit(device: torch.device) -> float | None:
    """Bytes that a schedule may plan with; unknown on a CPU."""
    return USABLE * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def write_schedule(run: Path, state: TrainState, batch: BatchPlan) -> None:
    """Writes the schedule of a run and two timelines by pipeline rank: of the last step as measured, and as simulated
    from the layers' operations, on the scale of what was measured. All ranks call it together."""
    everyone: list[tuple[ActionSpan, ...]] = state.world.gather(state.runtime.timeline)
    if state.world.rank != 0:
        return
    measured = [everyone[rank] for rank in state.world.pipeline]
    folder, schedule, split = run / "schedule", state.pipeline.schedule, state.pipeline.split
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "schedule.csv", ir.format_schedule(schedule))
    costs = estimated_costs(state.config, state.spec, state.plan, batch)
    work = sum(simulate_schedule(schedule, costs.stage(split)).busy)
    busy = sum(span.end - span.start for spans in measured for span in spans)
    plan = simulate_schedule(schedule, costs.scaled(busy / work).stage(split))
    write_timeline(folder / "planned.json", plan.spans, plan.makespan)
    write_timeline(folder / "measured.json", measured)


def save_choice(run: Path, choice: ScheduleChoice, config: Config, spec: ModelSpec, plan: Plan) -> None:
    """Writes what was chosen, beside the conditions under which a resumed run takes it again."""
    folder = run / "schedule"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conditions.yaml").unlink(missing_ok=True)  # it says that the other two belong together, so it comes last
    write_atomic(folder / "chosen.csv", ir.format_schedule(choice.schedule))
    write_atomic(folder / "choice.yaml", choice.to_yaml(str(folder / "chosen.csv")))
    write_atomic(folder / "conditions.yaml", yaml.safe_dump(choice_conditions(config, spec, plan), sort_keys=False))


def saved_choice(run: Path, config: Config, layout: Layout) -> Layout | None:
    """The layout with what auto chose earlier in this run under the same conditions, if it did."""
    folder = run / "schedule"
    if config.parallel.pipeline.schedule != "auto" or layout.plan.pp == 1:
        return None
    try:
        if read_yaml(folder / "conditions.yaml") != choice_conditions(config, layout.spec, layout.plan):
            return None
        settings = read_yaml(folder / "choice.yaml")
        schedule = ir.load_schedule(folder / "chosen.csv", name=CHOSEN)
        if find_mismatch(settings, CHOICE) or validate_schedule(schedule):
            return None
        split = explicit_split(settings["parallel"]["pipeline"]["split"], layout.spec.depth, schedule.stages)
    except (OSError, ConfigError):
        return None  # none, or damaged: it is measured again
    micro, accumulation = (settings["batch"][name] for name in ("micro_size", "accumulation"))
    before = layout.batch
    fits = micro > 0 and micro * accumulation == before.micro_size * before.accumulation
    if not fits or schedule.microbatches != accumulation or schedule.ranks != layout.plan.pp:
        return None
    batch = replace(before, micro_size=micro, accumulation=accumulation)
    return replace(layout, pipeline=PipelinePlan(schedule, split), batch=batch)


def choice_conditions(config: Config, spec: ModelSpec, plan: Plan) -> dict[str, Any]:
    """What a choice depends on."""
    settings = {name: asdict(getattr(config, name)) for name in ("parallel", "batch", "activation", "precision")}
    return {"processes": plan.world, "model": spec.to_dict(), "compile": config.compile, **settings}


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
