"""From the configuration to a schedule and a split of the layers: what the pipeline of a run is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config import ActivationConfig, Config, ConfigError, ParallelConfig, PipelineConfig
from trainer.config.model import ModelSpec
from trainer.planning.layer import (
    ATTENTION_BACKWARD,
    embedding_program,
    find_frozen_gemms,
    head_program,
    model_programs,
    trains_head,
)
from trainer.planning.parameters import ParameterInfo, head_rows, layer_tables
from trainer.planning.plan import OVERLAPPED, BatchPlan, Feature, Plan
from trainer.planning.recompute import left_by_recompute
from trainer.planning.schedules import ir
from trainer.planning.schedules.costs import LayerCosts, even_split, explicit_split, partition_layers
from trainer.planning.schedules.ir import Schedule
from trainer.planning.schedules.lower import find_blocked_ranks, lower_all, validate_schedule
from trainer.planning.schedules.templates import TEMPLATES, build_greedy, build_schedule, pair_passes, place_stages


@dataclass(frozen=True)
class PipelinePlan:
    """Who computes what, and when. split: by stage, the layers it holds."""

    schedule: Schedule
    split: tuple[range, ...]

    def stages(self, rank: int) -> dict[int, range]:
        """The stages on a pipeline rank, with their layers."""
        return {stage: layers for stage, layers in enumerate(self.split) if self.schedule.placement[stage] == rank}

    def describe(self) -> str:
        sizes = "-".join(str(len(layers)) for layers in self.split)
        return (
            f"{self.schedule.name}, {self.schedule.microbatches} micro-batches, layers {sizes} over "
            f"{self.schedule.ranks} ranks"
        )

    @property
    def splits_backward(self) -> bool:
        """Whether some weight gradients are computed apart from the rest of backward."""
        return any(action.kind == "W" for order in self.schedule.orders for action in order)


def resolve_pipeline(config: Config, spec: ModelSpec, plan: Plan, batch: BatchPlan) -> PipelinePlan:
    """The pipeline that the configuration asks for. Raises `ConfigError`."""
    settings = config.parallel.pipeline
    placement, schedule = check_pipeline(config, spec.depth, plan, batch)
    costs = estimated_costs(config, spec, plan, batch)
    split = resolve_split(settings.split, costs, placement)
    if schedule is None:
        stages = costs.stage(split)
        schedule = build_greedy(
            stages, placement, batch.accumulation, (settings.memory_cap or plan.pp) * stages.share(placement)
        )
    return PipelinePlan(schedule, split)


def check_pipeline(config: Config, depth: int, plan: Plan, batch: BatchPlan) -> tuple[tuple[int, ...], Schedule | None]:
    """Placement and schedule as far as they do not depend on costs; needs no torch. Raises `ConfigError`."""
    settings = config.parallel.pipeline
    problems = unread_settings(settings) if plan.pp > 1 else []
    if not (settings.schedule in (*TEMPLATES, "greedy", "auto") or settings.schedule.endswith(".csv")):
        problems.append(
            f"parallel.pipeline.schedule={settings.schedule} is unknown; legal: {', '.join(TEMPLATES)}, greedy, auto, "
            "or the path of a .csv file"
        )
    if not isinstance(settings.split, list) and settings.split not in ("balanced", "even"):
        problems.append(
            f"parallel.pipeline.split={settings.split} is unknown; legal: balanced, even, or the number of layers of "
            "each stage"
        )
    if problems:
        raise ConfigError(problems)
    if plan.pp == 1:  # the order of one rank's micro-batches is not worth a choice
        schedule = build_schedule("1f1b", 1, batch.accumulation)
        if plan.overlaps:
            check_pairs(schedule := pair_passes(schedule), settings, plan, batch)
        return (0,), schedule
    if settings.schedule in ("interleaved", "greedy"):  # before all stages are built, which takes long for many
        check_stages(plan.pp * (settings.chunks or 1), plan, depth)
    if settings.schedule == "greedy":
        schedule, placement = None, place_stages(plan.pp, settings.chunks or 1, "v")
    else:
        schedule = named_schedule(settings, depth, plan, batch)
        placement = schedule.placement
    if plan.overlaps:
        check_pairs(schedule, settings, plan, batch)
    check_stages(len(placement), plan, depth)
    if isinstance(settings.split, list):
        explicit_split(settings.split, depth, len(placement))
    return placement, schedule


def check_pairs(schedule: Schedule | None, settings: PipelineConfig, plan: Plan, batch: BatchPlan) -> None:
    """Raises `ConfigError` where a schedule has no pairs of passes that can run in turns."""
    way, others = f"parallel.ep_dispatch={OVERLAPPED}", "or parallel.ep_dispatch=alltoall"
    named = f"{way}: parallel.pipeline.schedule={settings.schedule}"
    if plan.pp == batch.accumulation == 1:
        raise ConfigError(
            f"{way}: batch.accumulation=1 has no second micro-batch, whose forward pass could run beside a backward "
            f"pass; set batch.accumulation=2 or more, {others}"
        )
    if schedule is None or not any(action.parts for order in schedule.orders for action in order):
        raise ConfigError(
            f"{named} with batch.accumulation={batch.accumulation} pairs no forward pass with a backward pass; set "
            f"parallel.pipeline.schedule=dualpipe_v and batch.accumulation={2 * plan.pp + 1} or more, {others}"
        )
    if blocked := find_blocked_ranks(lower_all(schedule, overlaps=True), schedule.placement):
        raise ConfigError(
            f"{named}: ranks {', '.join(map(str, blocked))} wait for ever where both passes of an OVERLAP_F_B begin "
            f"together; change the file, {others}"
        )


def check_stages(stages: int, plan: Plan, depth: int) -> None:
    """Raises `ConfigError` where there are more stages than layers."""
    if stages > depth:
        raise ConfigError(
            f"parallel.pp={plan.pp} x {stages // plan.pp} stages a rank needs {stages} layers, and the model has "
            f"{depth}; set parallel.pipeline.chunks or parallel.pp lower, or parallel.pipeline.schedule=1f1b"
        )


def unread_settings(settings: PipelineConfig) -> list[str]:
    """Settings that the schedule has no use for."""
    name = settings.schedule
    unread = {"chunks": name.endswith(".csv"), "memory_cap": name not in ("greedy", "auto")}
    problems = [
        f"parallel.pipeline.{setting}={getattr(settings, setting)} has no meaning for "
        f"parallel.pipeline.schedule={name}; leave it out"
        for setting, useless in unread.items()
        if useless and getattr(settings, setting) is not None
    ]
    if name == "auto" and settings.split == "even":
        problems.append(
            "parallel.pipeline.split=even: parallel.pipeline.schedule=auto chooses the split itself; leave it at "
            "balanced, or give the number of layers of each stage"
        )
    return problems


def named_schedule(settings: PipelineConfig, depth: int, plan: Plan, batch: BatchPlan) -> Schedule:
    """A template's schedule, that of a CSV file, or the one under which auto measures."""
    name, chunks = settings.schedule, settings.chunks
    if name == "auto":
        # As many stages as the user wants; else two on a rank, where there are layers for them.
        chunks = chunks or (
            max(1, len(settings.split) // plan.pp)
            if isinstance(settings.split, list)
            else 2
            if 2 * plan.pp <= depth
            else 1
        )
        name = {1: "zb_h1", 2: "zb_v"}.get(chunks, "interleaved")
    if name in TEMPLATES:
        return build_schedule(name, plan.pp, batch.accumulation, chunks)
    path = Path(name)
    try:
        schedule = ir.load_schedule(path, name=f"parallel.pipeline.schedule={name}")
    except OSError as error:
        raise ConfigError(f"parallel.pipeline.schedule={name}: cannot read it ({error.strerror})") from None
    problems = []
    if schedule.ranks != plan.pp:
        problems.append(f"it has {schedule.ranks} lines, one a rank, for parallel.pp={plan.pp}")
    if schedule.microbatches != batch.accumulation:
        problems.append(f"it orders {schedule.microbatches} micro-batches, and batch.accumulation={batch.accumulation}")
    problems = problems or validate_schedule(schedule)
    if problems:
        raise ConfigError([f"parallel.pipeline.schedule={name}: {problem}" for problem in problems[:5]])
    return replace(schedule, name=name)


def estimated_costs(
    config: Config, spec: ModelSpec, plan: Plan, batch: BatchPlan, element_bytes: int = 2
) -> LayerCosts:
    """Costs of the layers of a configured model; as of `layer_costs`."""
    return layer_costs(
        spec,
        batch.sequence_length,
        batch.micro_size,
        plan.tp,
        recompute=config.activation,
        loss_tile=config.loss.tile,
        element_bytes=element_bytes,
        cp=plan.cp,
        tp_overlap=config.parallel.tp_overlap,
        compiled=config.compile,
        room=config.parallel.ep_capacity,
    )


def layer_costs(
    spec: ModelSpec,
    length: int,
    micro_size: float,
    tp: int,
    *,
    recompute: ActivationConfig | None = None,
    loss_tile: int | None = 0,
    element_bytes: int = 2,
    cp: int = 1,
    tp_overlap: str = "off",
    compiled: bool = False,
    room: float = 0.0,
) -> LayerCosts:
    """Costs of a model from its operations, in FLOPs, on one of the `tp` ranks that share a layer.

    length: tokens of a sequence. micro_size: sequences of a micro-batch. recompute: settings of activation
    checkpointing; None keeps everything. loss_tile: `loss.tile`. element_bytes: of an element of the compute type. cp:
    ranks that share each sequence, attention evenly too. tp_overlap: `parallel.tp_overlap`, by which it depends what
    recompute can keep. compiled: of compiled layers. room: `parallel.ep_capacity`.

    Counted are GEMMs and attention (causal, within its window), and saved activations of a layer with sequence
    parallelism that gathers its inputs again in backward; not communication, nor element-wise operations.
    """
    tokens = length * micro_size / cp
    head, embedding = head_program(spec, tp, element_bytes), embedding_program(spec, tp, element_bytes)
    layers = model_programs(spec, length, tp, element_bytes, tp_overlap, room=room)
    remaining = left_by_recompute(layers, recompute, compiled)
    tiled = recompute is not None and bool(recompute.tile)
    f, i, w, activation = [0.0], [0.0], [0.0], [tokens * embedding.saved]
    known: dict[tuple, tuple[float, float, float]] = {}  # of layers that are equal
    for layer, left, frozen in zip(layers, remaining, find_frozen_gemms(spec), strict=True):
        if (key := (id(layer), id(left), frozen)) not in known:
            again = sum(share * layer.computed[name].flops for name, share in left.again.items())
            gemms, attention = layer.total("flops", "gemm"), layer.total("flops", "attention")
            trained = gemms - sum(gemm.flops for name, gemm in layer.gemms.items() if name in frozen)
            known[key] = layer.flops, gemms + ATTENTION_BACKWARD * attention + again, trained
        for times, flops in zip((f, i, w), known[key]):
            times.append(tokens * flops)
        activation.append(tokens * left.saved)
    logits = tokens * head.flops
    tiles = bool(loss_tile)  # with which the gradients are computed in the forward pass
    f.append(logits * (3 if tiles else 1))
    i.append(0.0 if tiles else logits)
    w.append(0.0 if tiles or not trains_head(spec) else logits)
    # What the loss saves is the logits, which become their own gradient, or with tiles the head's gradient in fp32.
    rows, columns = head.gemms["head"].shape
    loss = 4.0 * head_rows(rows) * columns if tiles else tokens * head.total("saved", "loss")
    activation.append(tokens * head.total("saved", "norm") + loss)
    deferred = sum(layer.deferred - layer.second_half.deferred * tiled for layer in layers)
    kept = 0.0 if spec.adapter.rank else deferred / sum(left.saved for left in remaining)
    return LayerCosts(f=tuple(f), i=tuple(i), w=tuple(w), activation=tuple(activation), kept=kept)


def resolve_split(setting: object, costs: LayerCosts, placement: tuple[int, ...]) -> tuple[range, ...]:
    """The layers of each stage, of a checked setting."""
    if isinstance(setting, list):
        return explicit_split(setting, costs.depth, len(placement))
    return (
        even_split(costs.depth, len(placement))
        if setting == "even"
        else partition_layers(costs, len(placement), placement)
    )


def check_depth(parallel: ParallelConfig, spec: ModelSpec | None, world: int, node: int) -> list[str]:
    """Whether each pipeline rank gets a layer."""
    if spec is None or parallel.pp <= spec.depth:
        return []
    return [f"parallel.pp={parallel.pp} exceeds the {spec.depth} layers of the model; legal: up to {spec.depth}"]


FILLED = ("zb_h1", "v_half", "v_min")
"""Schedules whose bubbles are small because weight gradients fill them."""


def warn_of_frozen(config: Config, spec: ModelSpec, plan: Plan, node: int) -> Iterator[str]:
    """A schedule that loses its point where weights are frozen."""
    name, possible = config.parallel.pipeline.schedule, spec.depth >= 2 * plan.pp > 2
    if name in FILLED and possible and not any(info.trained for info in list_matrices(spec)):
        yield (
            f"parallel.pipeline.schedule={name} fills its bubbles with weight gradients, and frozen layers have none; "
            "parallel.pipeline.schedule=zb_v may be faster"
        )


def list_matrices(spec: ModelSpec) -> Iterator[ParameterInfo]:
    """The matrices of all layers, without those of adapters."""
    infos = (info for table in layer_tables(spec) for info in table.values())
    return (info for info in infos if info.role == "matrix" and not info.adapter)


FEATURE = Feature("pipeline", check_model=check_depth, collect_warnings=warn_of_frozen)
