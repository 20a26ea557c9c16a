"""The table that a run prints at its start, and the peaks that its metrics are measured against."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf, prod
from typing import Any

import torch
from rich.console import Console

from trainer.config import Config, ConfigError
from trainer.config.model import ModelSpec
from trainer.data.lengths import documents_in
from trainer.distributed.mesh import World
from trainer.observe.metrics import SpeedMeter
from trainer.optim.optimizer import parameter_policies
from trainer.parallel.compress.plan import describe_codecs
from trainer.parallel.context.plan import context_traffic
from trainer.planning.decide import MachineMemory, describe_measures, describe_recompute
from trainer.planning.documents import with_documents
from trainer.planning.estimate.memory import MemoryPeak, can_replay, find_peaks
from trainer.planning.estimate.report import memory_band, summarise_step
from trainer.planning.estimate.step import StepEstimate, estimate_within, fullest_rank
from trainer.planning.features import communication_table
from trainer.planning.float8 import float8_linears, numeric_types
from trainer.planning.hardware import load_hardware, peak_flops, product_type, shipped_for
from trainer.planning.layer import flops_per_token, model_programs, parameter_counts
from trainer.planning.parameters import Table, declare_parameters, layer_specs, layer_tables, outer_tables
from trainer.planning.plan import BatchPlan, node_size
from trainer.planning.recompute import left_by_recompute
from trainer.planning.resolve import Layout, collect_warnings
from trainer.planning.states import ELEMENT_BYTES, StateBytes
from trainer.util.tables import (
    Rows,
    format_bytes,
    format_count,
    format_flops,
    format_number,
    format_percent,
    format_sizes,
    print_rows,
    print_sections,
)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_memory_gib(device: torch.device) -> float:
    """Highest memory use of this process so far, in GiB: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30


def step_meter(config: Config, spec: ModelSpec, world: World, length: int) -> SpeedMeter:
    """The meter of a run: its FLOPs per token against the peak of its devices, where that is known."""
    kind = product_type(config.precision)
    peak = peak_flops(device_name(world.device), kind) if world.device.type == "cuda" else None
    return SpeedMeter(
        config.run.steps,
        flops_per_token(spec, length, causal=True),
        flops_per_token(spec, length, causal=False),
        peak,
        world.size,
    )


def describe_context(config: Config, layout: Layout) -> str:
    """How ranks share sequences, and what each receives for it in a step, for people."""
    batch, context, tp = layout.batch, layout.context, layout.plan.tp
    assert context is not None
    element = ELEMENT_BYTES[config.precision.compute]
    left = left_by_recompute(model_programs(layout.spec, batch.sequence_length, tp, element), config.activation)
    elements = (
        batch.micro_size
        * batch.accumulation
        * sum(
            context_traffic(layer.attention, context, batch.sequence_length, tp, rest.attends, config.compile).all
            for layer, rest in zip(layer_specs(layout.spec), left)
        )
    )
    received = format_bytes(element * elements / layout.plan.pp)
    return f"{context.describe()}; {received} a rank and step"


@dataclass(frozen=True)
class StartReport:
    """What a run says at its start. sections: of one table; more: other tables that are wanted, by title."""

    sections: dict[str, Rows]
    more: dict[str, list[dict[str, Any]]]

    def print(self, console: Console | None = None) -> None:
        print_sections(self.sections, console)
        for title, rows in self.more.items():
            print_rows(title, rows, console)


def describe_trained(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """How many parameters are trained, where some are not. counts: `parameter_counts`."""
    if counts["trained"] == counts["total"]:
        return []
    some, total = (format_count(counts[name]) for name in ("trained", "total"))
    return [("trained parameters", f"{some} of {total} ({counts['trained'] / counts['total']:.2%})")]


def start_report(
    config: Config, layout: Layout, states: StateBytes, memory: MachineMemory, corpus: Any, world: World, start: Any
) -> StartReport:
    """Model, plan, batch arithmetic, predicted memory of the states on the rank that holds most beside what there is,
    and of a step at its peak."""
    spec, plan, pipeline, batch = layout.spec, layout.plan, layout.pipeline, layout.batch
    counts, (labels, values) = parameter_counts(spec), zip(*states.rows())
    node = node_size(world.size)
    gradients = describe_codecs(config.parallel.grad_comm)
    found, moment = predict_run(config, layout, corpus, world, node), None
    if can_replay(plan):
        moment = found.fullest if found else fullest_rank(find_peaks(config, layout, lowered=False, node=node))
    return StartReport(
        {
            "model": [
                ("name", f"{spec.name} ({spec.family})"),
                ("parameters", format_count(counts["total"])),
                *describe_trained(counts),
                ("layers x width", f"{spec.depth} x {spec.width}"),
                ("FLOPs per token", format_flops(flops_per_token(spec, batch.sequence_length, causal=True))),
            ],
            "plan": [
                ("processes", f"{world.size} x {device_name(world.device)}"),
                ("plan", plan.describe()),
                *communication_table(config, layout.spec, plan),
                *([("sequences", describe_context(config, layout))] if layout.context else []),
                *([("pipeline", pipeline.describe())] if plan.pp > 1 else []),
                ("precision", numeric_types(config.precision)),
                *([("gradients", gradients)] if gradients else []),
                ("recompute", describe_recompute(config.activation)),
                *([("long sequences", long)] if (long := describe_measures(config, moment)) else []),
                ("compile", "each block" if config.compile else "off"),
                *(("note", text) for text in collect_warnings(config, layout, node)),
            ],
            "batch": [
                ("sequence", f"{batch.sequence_length} tokens"),
                (
                    "global batch",
                    f"{batch.global_size} sequences = {format_count(batch.global_size * batch.sequence_length)} tokens",
                ),
                (
                    "arithmetic",
                    f"{batch.micro_size} a micro-batch x "
                    f"{format_number(batch.accumulation, 'micro-batch', 'es')} x "
                    f"{format_number(plan.dp, 'rank')}",
                ),
                *(
                    [("length", f"{config.run.steps} steps, for run.tokens={config.run.tokens}")]
                    * bool(config.run.tokens)
                ),
                (
                    "corpus",
                    ("a stream" if corpus.train.endless else f"{format_count(len(corpus.train))} sequences an epoch")
                    + f", {format_count(len(corpus.eval))} held out",
                ),
                *mixture_rows(corpus.train, start, config.run.steps, batch),
                *([("learned", learned)] if (learned := describe_learned(corpus)) else []),
                ("documents", corpus.marks),
            ],
            "memory": [
                ("counts", "the states of one rank, predicted; activations come on top"),
                *zip(labels, format_sizes(values)),
                *([("the GPU has", format_bytes(memory.device))] if memory.device else []),
                ("the machine has", f"{format_bytes(memory.host)} for {format_number(node, 'process', 'es')}"),
            ],
            **({"peak": peak_rows(moment, plan.pp, found)} if moment else {}),
            **({"time": summarise_step(found)} if found else {}),
        },
        ({"the model": model_table(spec)} if "model" in config.logging.show else {})
        | ({"parameter types": types_table(config, spec)} if "types" in config.logging.show else {}),
    )


def mixture_rows(samples: Any, start: Any, steps: int, batch: BatchPlan) -> Rows:
    """How the sources are mixed over a run, where there are several, and how often each is read."""
    end = start.samples + (steps - start.step) * batch.global_size
    epochs = samples.count_epochs(start.mixture, end)
    rows = [("epochs of the run", ", ".join(f"{name} {count:.3g}" for name, count in epochs.items()))]
    if len(samples.names) > 1:
        for phase in start.mixture.phases:
            if phase.start < end:
                tokens = format_count(phase.start * batch.sequence_length)
                rows.append((f"from {tokens} tokens" if phase.start else "mixture", phase.describe()))
    return rows if epochs else rows[1:]


def describe_learned(corpus: Any) -> str:
    """The share of learned tokens of each source in which it is below 1; empty where there is none."""
    sources = corpus.train.sources
    named = [f"{format_percent(source.share)} of {source.name}" for source in sources if source.share < 1]
    return f"{', '.join(named)}; the other tokens are prompts and padding" if named else ""


def predict_run(config: Config, layout: Layout, corpus: Any, world: World, node: int) -> StepEstimate | None:
    """What `trainer estimate` says of the run on its devices; None where no file of hardware is for them. Masked
    documents are as long as those of the corpus."""
    name = device_name(world.device)
    hardware = load_hardware(shipped_for(name))
    if config.data.mask_documents and config.data.documents.mean is None:
        config = with_documents(config, documents_in(corpus.train))
    try:
        if config.activation.hardware:
            hardware = load_hardware(config.activation.hardware)
        known = replace(hardware, devices=node) if hardware.device == name else None
        return known and estimate_within(inf, config, layout, known, lowered=False)
    except ConfigError:  # a type of numbers whose peak is not known
        return None


def peak_rows(moment: MemoryPeak, ranks: int, found: StepEstimate | None) -> list[tuple[str, str]]:
    """The fullest moment of the fullest rank, predicted by category, as `trainer estimate` has it. ranks: of the
    pipeline; found: the estimate that it is from, whose band is told."""
    labels, values = zip(*moment.rows())
    where = f"pipeline rank {moment.rank} of {ranks}" if ranks > 1 else "every rank"
    return [
        ("counts", f"the predicted peak of a step, of {where}"),
        ("at", moment.where),
        *zip(labels, format_sizes(values)),
        *([("with what is outside", " to ".join(format_sizes(memory_band(found))))] if found else []),
    ]


def model_table(spec: ModelSpec) -> list[dict[str, Any]]:
    """The parameters of a model with their sizes, those of neighbouring layers that are equal once; below them the sum
    of a layer, and of all."""
    found, total = [], parameter_counts(spec)["total"]

    def row(name: str, shape: str, elements: int, times: int = 1) -> dict[str, Any]:
        in_all = times * elements
        return {
            "parameter": name,
            "shape": shape,
            "elements": format_count(elements),
            "in all": format_count(in_all),
            "share": format_percent(in_all / total),
        }

    def add(prefix: str, table: Table, times: int = 1) -> None:
        found.extend(
            row(prefix + name, "x".join(map(str, info.shape)), prod(info.shape), times) for name, info in table.items()
        )

    before, behind = outer_tables(spec, first=True, last=True)
    add("", before)
    for table, layers in groupby(range(spec.depth), key=layer_tables(spec).__getitem__):
        numbers = list(layers)
        name, times = f"layers.{numbers[0]}" + f"-{numbers[-1]}" * (len(numbers) > 1), len(numbers)
        add(f"{name}.", table, times)
        each = sum(prod(info.shape) for info in table.values())
        found.append(row(name, f"{times} layer{'s' * (times > 1)}", each, times))
    add("", behind)
    return [*found, row("all", "", total)]


def types_table(config: Config, spec: ModelSpec) -> list[dict[str, Any]]:
    """How each trained parameter is optimised."""
    infos = {name: info for name, info in declare_parameters(spec).items() if info.trained}
    policies = parameter_policies(infos, config.precision.types, config.optimizer)
    narrow = {f"{name}.weight": one.recipe for name, one in float8_linears(config.precision, spec).items()}
    return [
        {
            "parameter": name,
            "shape": "x".join(map(str, info.shape)),
            "type": info.role,
            "optimizer": policies[name].optimizer,
            "state": str(policies[name].state_dtype).removeprefix("torch."),
            "weight decay": policies[name].weight_decay,
            "lr scale": policies[name].lr_scale,
            **({"products": narrow.get(name, "")} if narrow else {}),
        }
        for name, info in infos.items()
    ]
