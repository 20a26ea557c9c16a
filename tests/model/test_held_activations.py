"""What a layer holds from its forward to its backward pass, beside what the cost model plans with."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from math import inf

import pytest
import torch
from support.estimates import h200, settings, shipped
from support.launch import CAN_COMPILE
from torch.profiler import ProfilerActivity, profile

from trainer.config import ActivationConfig
from trainer.config.fields import CONFIGS
from trainer.config.model import LatentSpec, ModelSpec, NormSpec, RopeSpec
from trainer.model.initial import initialize_model
from trainer.model.stage import split_report
from trainer.model.transformer import Transformer
from trainer.parallel.parallelize import compile_layers
from trainer.parallel.pipeline.plan import layer_costs
from trainer.parallel.recompute import apply_recompute
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.estimate.recompute import RecomputeChoice, decide_recompute, measure_choice
from trainer.planning.layer import has_experts, model_programs
from trainer.planning.recompute import left_by_recompute, saved_in
from trainer.planning.resolve import resolve_layout

LENGTH, SEQUENCES, WIDTH = 32, 2, 64
POLICIES = {
    "none": {},
    "full": {"mode": "full"},
    "attention and every second product": {"mode": "selective"},
    "products by name": {"mode": "selective", "save": ["attention", "attention.*", "feed_forward.up"]},
    "feed-forward in tiles": {"tile": 16},
    "attention and every second product, in tiles": {"mode": "selective", "tile": 16},
    "full, in tiles": {"mode": "full", "tile": 16},
    "full, on the host": {"mode": "full", "offload": True},
    "full, in tiles, on the host": {"mode": "full", "tile": 16, "offload": True},
}


def layer_of(name: str) -> ModelSpec:
    """The layer of a shipped model, small, without what keeps more in eager mode on a CPU: RMSNorm in several
    operations, copies of shared key-value heads."""
    spec = shipped(name)
    spec.pattern, spec.overrides, spec.depth, spec.width, spec.vocab_size = [], {}, 1, WIDTH, 61
    spec.attention.heads = spec.attention.kv_heads = 4
    spec.attention.head_dim, spec.feed_forward.width = 16, 160
    spec.attention.window, spec.attention.soft_cap, spec.attention.sinks = 0, 0, False
    if spec.attention.kind == "latent":  # values of the size of keys, since a CPU pads them
        rank = spec.attention.latent.q_rank
        spec.attention.latent = LatentSpec(min(rank, 48), kv_rank=40, nope_dim=16, rope_dim=16, value_dim=32)
        spec.attention.head_dim = 0
    spec.learned_positions, spec.norm = False, NormSpec(kind="layer", placement=spec.norm.placement)
    spec.attention.rope = RopeSpec()
    return spec


def held(model: Transformer) -> int:
    """Bytes that the layers' forward pass has allocated and not freed. Its output stands for its input, of that
    size."""
    x, angles = torch.randn(SEQUENCES * LENGTH, WIDTH, requires_grad=True), torch.randn(1, LENGTH, 1, 8)
    rotation = angles.cos(), angles.sin()
    sequences = model.number_sequences((SEQUENCES, LENGTH), x.device)
    gc.disable()  # what others left behind is freed before or after, not meanwhile
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            kept, objectives = x, []
            for layer in model.layers.values():
                more = [sequences] if layer.feed_forward.by_sequence else []
                kept, report = split_report(layer(kept, (SEQUENCES, LENGTH), rotation, None, *more))
                # Statistics are the same for any number of tokens, of which there are few here.
                objectives.append(report and report.objective)
                del report
    finally:
        gc.enable()
    assert kept.shape == x.shape
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())


def policies_of(spec: ModelSpec) -> dict[str, dict]:
    """Those that a model can have: experts have no tiles, and products of their own."""
    if not has_experts(spec):
        return POLICIES
    products = {"mode": "selective", "save": ["attention", "feed_forward.experts.up", "feed_forward.router"]}
    return {label: options for label, options in POLICIES.items() if "tile" not in options} | {
        "products by name": products,
        "matmul": {"mode": "selective", "save": ["attention", "matmul"]},
    }


KINDS = {str(layer_of(path.stem).layer(0)): path.stem for path in sorted((CONFIGS / "model").glob("*.yaml"))}
"""One model of each kind of layer."""


BALANCED = {"balance": 0.1, "z_loss": 0.1}


@pytest.mark.parametrize("name", [*KINDS.values(), "qwen3_30b_a3b with losses"])
def test_layers_of_shipped_models_hold_what_is_planned(name):
    name, losses, _ = name.partition(" with losses")
    spec, found = layer_of(name), {}
    if losses:
        spec.feed_forward.experts = replace(spec.feed_forward.experts, **BALANCED)
    policies = policies_of(spec)
    for label, options in policies.items():
        config, model = ActivationConfig(**options), Transformer(spec)
        initialize_model(model, spec, 0, torch.device("cpu"))
        apply_recompute(model, config)
        (left,) = left_by_recompute(model_programs(spec, LENGTH, 1, 4), config)
        tokens = LENGTH * SEQUENCES
        planned = layer_costs(spec, LENGTH, SEQUENCES, 1, recompute=config, element_bytes=4).activation[1]
        if config.offload:  # a CPU's memory has the copies, and the last input itself, which has not been pushed out
            planned += tokens * left.host + (tokens * 4 * WIDTH if config.tile and left.host > 4 * WIDTH else 0)
            planned += tokens * 4 * WIDTH  # the output stands for no input here
        found[label] = planned / held(model)
    assert found == pytest.approx(dict.fromkeys(policies, 1.0), abs=0.05)
    assert not losses or found["none"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_what_auto_keeps_of_each_layer_is_what_is_planned(share):
    """Of a limit between the predicted peaks of two uniform choices."""
    spec = layer_of("llama3_8b")
    spec.depth = 6

    def choice(mode: str, limit: float = inf) -> RecomputeChoice:
        batch = {"batch__sequence_length": LENGTH, "batch__micro_size": SEQUENCES, "activation__tile": 0}
        config = settings(spec, precision__compute="fp32", activation__mode=mode, **batch)
        layout = resolve_layout(config, 1, spec, 1)
        return (
            decide_recompute(config, layout, h200(), limit, node=1)
            if mode == "auto"
            else measure_choice(config, layout, h200(), 1)
        )

    least, most = choice("full").peak, choice("none").peak
    chosen = choice("auto", least + share * (most - least)).config
    costs = layer_costs(spec, LENGTH, SEQUENCES, 1, recompute=chosen.activation, element_bytes=4)
    model = Transformer(spec)
    initialize_model(model, spec, 0, torch.device("cpu"))
    apply_recompute(model, chosen.activation)
    assert sum(costs.activation[1:-1]) / held(model) == pytest.approx(1.0, abs=0.05)
    kinds = {saved_in(chosen.activation.save, layer) for layer in range(spec.depth)}
    assert (chosen.activation.mode, len(kinds)) == (("full", 1) if share == 0 else ("selective", 2))


GRAPHS = "aot_eager_decomp_partition"
"""A backend that decides as the default one what a backward pass is given, and compiles no kernel."""


@pytest.mark.skipif(not CAN_COMPILE, reason="needs a compiler")
@pytest.mark.parametrize(
    "name, backend", [("qwen3_8b", "inductor"), *((name, GRAPHS) for name in ("olmoe_1b_7b", "gpt_oss_20b"))]
)
def test_compiled_layers_hold_what_is_planned(name, backend, monkeypatch):
    """Not what a gated block's non-linearity gives, which is a part of the kernel that needs it again."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    spec, model = layer_of(name), Transformer(layer_of(name))
    initialize_model(model, spec, 0, torch.device("cpu"))
    compile_layers(model, deferring=False)
    held(model)  # compiles
    config = settings(spec, compile=True, batch__sequence_length=LENGTH, batch__micro_size=SEQUENCES)
    planned = {}
    for compiled in (True, False):
        config.compile, config.precision.compute = compiled, "fp32"
        (peak,) = find_peaks(config, resolve_layout(config, 1, spec, 1))
        planned[compiled] = peak.categories["activations"]
    (layer,) = model_programs(spec, LENGTH, 1, 4)
    assert planned[False] - planned[True] == layer.total("fused") * LENGTH * SEQUENCES > 0
    assert LENGTH * SEQUENCES * (layer.saved - layer.total("fused")) == pytest.approx(held(model), rel=0.03)


@pytest.mark.skipif(not CAN_COMPILE, reason="needs a compiler")
@pytest.mark.parametrize("name", ["llama3_8b", "olmo2_7b"])
def test_compiled_layers_hold_what_backward_reads_of_what_they_are_told_to_keep(name, monkeypatch):
    """The last product of a block is only added to, unless a norm follows it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=GRAPHS))
    spec, config = layer_of(name), ActivationConfig(mode="selective", save=["attention", "matmul"])
    model, programs = Transformer(spec), model_programs(spec, LENGTH, 1, 4)
    initialize_model(model, spec, 0, torch.device("cpu"))
    apply_recompute(model, config)
    compile_layers(model, deferring=False)
    held(model)  # compiles
    (eager,), (compiled,) = (left_by_recompute(programs, config, kind) for kind in (False, True))
    spared = programs[0].gemms["feed_forward.down"].result * (name == "llama3_8b")
    assert eager.saved - compiled.saved == spared
    assert LENGTH * SEQUENCES * compiled.saved == pytest.approx(held(model), rel=0.03)
