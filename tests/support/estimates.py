"""Configurations of published and measured runs, and their estimates, without Hydra."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from support.reference import changed

from trainer.config import Config
from trainer.config.fields import CONFIGS
from trainer.config.hardware import HardwareConfig
from trainer.config.model import AttentionSpec, FeedForwardSpec, ModelSpec, NormSpec, assign_fields
from trainer.diagnosis.evidence import RunEvidence, RunMachine
from trainer.diagnosis.suggestions import FREED, Suggestions
from trainer.parallel.pipeline.plan import resolve_pipeline
from trainer.planning import layer, states
from trainer.planning.estimate.rates import DeviceRates
from trainer.planning.estimate.step import StepEstimate, estimate_step
from trainer.planning.estimate.timing import REPEATED, step_seconds, step_terms, time_units
from trainer.planning.hardware import load_hardware
from trainer.planning.plan import build_plan, resolve_batch
from trainer.planning.resolve import Layout, resolve_layout


def shipped(name: str) -> ModelSpec:
    """A model of the configuration folder, with the files it builds on."""
    values = yaml.safe_load((CONFIGS / "model" / f"{name}.yaml").read_text())
    bases = [entry for entry in values.pop("defaults", []) if entry != "_self_"]
    spec = shipped(bases[0]) if bases else ModelSpec()
    assign_fields(spec, values, "model")
    return spec


def settings(spec: ModelSpec, **changes: Any) -> Config:
    """bf16, by NCCL as most runs were measured; `changes` by the setting's path with two underscores for a dot."""
    config = Config()
    config.parallel.zero.collectives = "nccl"
    config.model, config.precision.compute = spec, "bf16"  # type: ignore[assignment]
    return changed(config, changes)


def estimated(config: Config, world: int, hardware: HardwareConfig, node: int = 8) -> StepEstimate:
    return estimate_step(config, resolve_layout(config, world, config.model, min(node, world)), hardware)


def sums_apart() -> Any:
    """A context in which, as in programs that were measured so, kernels of their own add weight gradients to sums."""
    return patch.object(states, "sums_in_gemms", lambda *_: False)


def losses_of_others() -> Any:
    """A context in which the loss moves what it does in Megatron-LM and in torch's cross-entropy: a copy in fp32 (6
    bytes of a logit), the log-softmax (16), its gradient (24) and a cast back (6)."""
    return patch.object(layer, "LOSS_TRAFFIC", 52.0)


def seconds(config: Config, layout: Layout, hardware: HardwareConfig) -> float:
    """Of a step of Megatron-LM, without its memory."""
    pace = DeviceRates.of(hardware, config.precision)
    with losses_of_others():
        return step_seconds(config, layout, time_units(config, layout, hardware), pace)[1]


def megatron(
    width: int, heads: int, depth: int, length: int, *, tp: int, pp: int, dp: int, micro: int, size: int, full: bool,
    chunks: int | None = None,
) -> tuple[Config, Layout]:  # fmt: skip
    """A GPT as Megatron-LM trained it: 51,200 tokens, plain feed-forward, even stages, 1F1B or interleaved.

    full: whole layers are recomputed, their last product too, which ours leaves out; norms behind the blocks, whose
    backward pass reads it, stand for that. Else only attention's scores are, as flash attention does anyway.
    """
    spec = ModelSpec(
        vocab_size=51200,
        width=width,
        depth=depth,
        max_length=length,
        tied=True,
        learned_positions=True,
        attention=AttentionSpec(heads=heads, kv_heads=heads, head_dim=width // heads, bias=True, output_bias=True),
        feed_forward=FeedForwardSpec(kind="plain", width=4 * width, activation="gelu", bias=True),
        norm=NormSpec(kind="layer", placement="both" if full else "pre"),
    )
    config = settings(
        spec,
        batch__sequence_length=length,
        batch__global_size=size,
        batch__micro_size=micro,
        parallel__tp=tp,
        parallel__pp=pp,
        parallel__pipeline__schedule="interleaved" if chunks else "1f1b",
        parallel__pipeline__chunks=chunks,
        parallel__pipeline__split="even",
        activation__mode="full" if full else "none",
    )
    plan = build_plan(config.parallel, tp * pp * dp)  # known to be legal, which takes longest to find out
    batch = resolve_batch(config.batch, dp, tp, pp)
    return config, Layout(spec, plan, batch, resolve_pipeline(config, spec, plan, batch))


MEGATRON = ["achieved.attention=0.216"]
"""Megatron-LM of 2022 computes attention without a fused kernel: what it reaches is fitted to vTrain's points."""


def a100() -> HardwareConfig:
    """A100s that run Megatron-LM."""
    return load_hardware("a100", MEGATRON)


def h200() -> HardwareConfig:
    return load_hardware("h200")


SHARED = Path(__file__).parents[3] / "shared" / "data"
"""Data beside the checkout, which are not part of the project."""

FITTED = 48
"""Of vTrain's points, as they are shuffled here, the first ones: configs/hardware/a100.yaml was fitted to them."""


def vtrain() -> list[tuple[dict[str, int], float]]:
    """Settings and seconds of every measured run of vTrain (Bang et al., MICRO 2024), shuffled; skips the test if they
    are not there."""
    path = SHARED / "vtrain" / "ground_truth_single.csv"
    if not path.exists():
        pytest.skip(f"vTrain's measurements are not at {path}")
    names = ("gpus", "size", "micro", "width", "heads", "depth", "length", "tp", "dp", "pp")
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))[1:]
    points = [(dict(zip(names, map(int, row))), float(row[-1]) / 1e3) for row in rows]
    random.Random(0).shuffle(points)
    return points


def split_seconds(config: Config, layout: Layout, hardware: HardwareConfig) -> float:
    """Of a step whose gradients are reduced after the last backward pass, not behind it, as in Megatron-LM of 2022."""
    with losses_of_others():
        timing, pace = time_units(config, layout, hardware), DeviceRates.of(hardware, config.precision)
    simulation, whole = step_seconds(config, layout, timing, pace)
    return whole + step_terms(config, layout, timing, pace, simulation)[1]["replicate"]


def vtrain_seconds(points: Iterable[tuple[dict[str, int], float]]) -> list[float]:
    """What is predicted of vTrain's points. What Megatron-LM recomputes goes through no hooks of torch's."""
    hardware = a100()
    shapes = ({name: value for name, value in point.items() if name != "gpus"} for point, _ in points)
    with patch.dict(REPEATED, {False: 1.0}):
        return [seconds(*megatron(full=True, **shape), hardware) for shape in shapes]


def lacking(config: Config, world: int = 1, **more: Any) -> Suggestions:
    """Of a run that has ended for lack of memory."""
    status, model = {"status": "failed", "reason": "OutOfMemoryError: CUDA out of memory"}, Config().model
    assign_fields(model, config.model.to_dict(), "model")
    config.model = model  # as the command line has it
    layout, machine = resolve_layout(config, world, config.model, world), RunMachine(world, world, "NVIDIA H200")
    return Suggestions(
        RunEvidence(Path("x"), config=config, layout=layout, machine=machine, status=status, **more), None
    )


def every_way(config: Config, world: int = 1) -> list[str]:
    """Texts of all that is offered where nothing is predicted."""
    workshop = lacking(config, world)
    return [one.text for way in workshop.alternatives(*FREED) if (one := workshop.offer(way, *FREED))]
