"""The cost model as a planner uses it: without torch, quick, and never stale."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

from trainer.config.model import AttentionSpec, FeedForwardSpec, ModelSpec
from trainer.parallel.pipeline.plan import layer_costs
from trainer.planning.layer import flops_per_token, gemm_flops, parameter_counts
from trainer.planning.parameters import ParameterInfo
from trainer.planning.plan import Plan
from trainer.planning.states import ELEMENT_BYTES, state_bytes
from trainer.precision.products import DTYPES

SEARCH = """
import sys, time
from trainer.config.model import AttentionSpec, FeedForwardSpec, ModelSpec
from trainer.parallel.pipeline.plan import layer_costs
from trainer.planning.states import constant_bytes
from trainer.planning.plan import Plan
from trainer.planning.schedules.search import search_schedules

spec = ModelSpec(width=8192, depth=80, vocab_size=128256)
spec.attention, spec.feed_forward = AttentionSpec(heads=64, kv_heads=8), FeedForwardSpec(width=28672)
plan = Plan(pp=4, replicate=1, shard=8, tp=1, stage=1, offload=False)
splits = set()

def constant(split, placement):
    splits.add(split)
    return constant_bytes(spec, plan, 2, split, placement)

started = time.process_time()
layers = layer_costs(spec, 4096, 1, plan.tp)
choice = search_schedules(layers.scaled, plan.pp, 16, 2e12, constant)
print(len(splits), time.process_time() - started, "torch" in sys.modules)
"""
"""The search of `parallel.pipeline.schedule=auto`, as `training/auto.py` calls it."""

SECONDS = 4.0
"""Of processor time, for a search that takes less than one, and takes nine or more where it builds modules."""


def spec(**changes: object) -> ModelSpec:
    values = {"vocab_size": 61, "width": 32, "depth": 4} | changes
    return ModelSpec(attention=AttentionSpec(heads=4), feed_forward=FeedForwardSpec(width=44), **values)


def test_a_search_over_eighty_layers_builds_no_modules() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SEARCH], cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True
    )
    splits, seconds, torch = run.stdout.split()
    assert torch == "False"
    assert int(splits) > 10 and float(seconds) < SECONDS


def test_costs_follow_a_spec_that_is_changed() -> None:
    """They are cached, and a spec is no constant."""
    changed, plan = spec(), Plan(pp=1, replicate=1, shard=1, tp=1, stage=0, offload=False)

    def costs(of: ModelSpec) -> tuple:
        return (
            parameter_counts(of),
            flops_per_token(of, 24, True),
            state_bytes(of, plan, 2),
            layer_costs(of, 24, 1, 1),
        )

    before = costs(changed)
    changed.feed_forward.width = 20
    assert costs(changed) == costs(copy.deepcopy(changed))
    assert all(new != old for new, old in zip(costs(changed), before, strict=True))
    changed.feed_forward.width = 44
    assert costs(changed) == before == costs(spec())


def test_flops_count_what_is_active() -> None:
    """Of the matrices of eight experts each token meets two."""
    experts = ParameterInfo((8, 44, 32), ("experts", "mlp", "embed"), "matrix", active=2 / 8)
    assert gemm_flops(experts) == 2 * 2 * 44 * 32
    assert gemm_flops(experts, ranks=4) == 2 * 2 * 11 * 32
    assert experts.size == 8 * 44 * 32 and experts.held(4) == experts.size / 4


def test_sizes_of_elements() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ELEMENT_BYTES
