"""Ways of `parallel.tp_overlap`: their times beside what two H200 measured, and what must hold of every prediction."""

from __future__ import annotations

from statistics import mean

import pytest
from support.estimates import estimated, h200, settings, shipped

from trainer.config import ActivationConfig
from trainer.config.fields import CONFIGS
from trainer.planning.decide import MemoryLimit, decide
from trainer.planning.estimate.plans import rank_plans
from trainer.planning.estimate.rates import OVERLAP_MODELS, TensorGroupLink, layer_passes
from trainer.planning.estimate.step import StepEstimate
from trainer.planning.estimate.timing import time_units
from trainer.planning.features import communication_table
from trainer.planning.hardware import load_hardware
from trainer.planning.layer import model_programs
from trainer.planning.neighbours import compose_variant
from trainer.planning.recompute import recompute_effect
from trainer.planning.resolve import check_config, resolve_layout

PRODUCTS = {
    # bench/results/2026-11-tensor-parallel-h200-h100.md, 8,192 tokens, forward: milliseconds of the
    # product and of the collective; how many times as fast as `off` the bound and copies are. Of gathered products,
    # then of reduced ones.
    "8B q, k, v": (0.273, 0.158, 1.58, 1.50),
    "8B gate, up": (1.247, 0.184, 1.15, 1.11),
    "70B q, k, v": (0.888, 0.288, 1.32, 1.31),
    "70B gate, up": (4.931, 0.300, 1.06, 1.05),
    "8B o": (0.190, 0.166, 1.87, 1.50),
    "8B down": (0.617, 0.166, 1.27, 1.20),
    "70B o": (0.737, 0.306, 1.42, 1.37),
    "70B down": (2.503, 0.307, 1.12, 1.12),
}


def faster(name: str, way: str, **changes: float) -> float:
    product, collective = (1e-3 * milliseconds for milliseconds in PRODUCTS[name][:2])
    link = {"collective": collective, "copied": collective, "call": 0.0, "adding": 0.0, "hidden": 1.0} | changes
    ways = [OVERLAP_MODELS[one](TensorGroupLink(ranks=2, **link)) for one in ("off", way)]
    reduced = name.split()[1] in ("o", "down")
    off, other = (way.reduced(product) if reduced else way.gathered(product) for way in ways)
    return sum(off) / sum(other)


def test_nothing_is_faster_than_the_bound_and_copies_come_near_it():
    """Half of two ranks' product hides the gather; half of the reduction is open where it takes longer than that."""
    for name, (product, collective, bound, *_) in PRODUCTS.items():
        assert bound == pytest.approx((1 + collective / product) / max(1, collective / product), abs=0.01)
        assert 0.7 * bound < faster(name, "copy_engine") <= bound + 0.01, name
        assert 1 < faster(name, "copy_engine", hidden=0.95, call=3e-5) < faster(name, "copy_engine"), name


def test_products_beside_those_of_two_gpus():
    errors = {name: faster(name, "copy_engine") / row[3] - 1 for name, row in PRODUCTS.items()}
    assert max(map(abs, errors.values())) < 0.1 and abs(mean(errors.values())) < 0.06, errors


STEP = {"activation__mode": "selective", "compile": True, "batch__sequence_length": 8192, "batch__micro_size": 2}
STEP |= {"parallel__zero__stage": 3, "parallel__tp": 2, "batch__accumulation": 1}
MEASURED = {
    # The same page, whole steps: what is kept beside attention, parallel.tp_overlap, times as fast as `off`.
    ("attention", "copy_engine"): 1.050
}
OFF = {"attention": (8119, 0.096), "matmul/2": (8422, 0.122)}
"""tokens/s of a GPU, exposed."""

COPIES = 0.029 + 0.031 - 0.012
"""Exposed by copy engines, and idle beyond `off`: a stream that waits for a flag counts as idle."""


def step(kept: str, tp_overlap: str):
    """Llama-3 8B over two H200."""
    save = ["attention"] if kept == "attention" else ["attention", kept]
    changes = STEP | {"activation__save": save, "parallel__tp_overlap": tp_overlap}
    return estimated(settings(shipped("llama3_8b"), **changes), 2, h200())


def as_then(kept: str, tp_overlap: str) -> tuple[float, float]:
    """Seconds of a step and what communication takes of it, with the backward pass of the measurements: the compiler
    left two gathers a layer open that are behind products since, under each way alike."""
    one = step(kept, tp_overlap)
    config = one.config
    timer = time_units(config, resolve_layout(config, 2, config.model, 2), h200())
    collective = timer.units[0].forward["tensor collectives"]
    more = 2 * config.model.depth * collective
    return one.seconds + more, (sum(one.exposed.values()) + more) / (one.seconds + more)


def test_steps_beside_those_of_two_gpus():
    """Copies within one percent."""
    ratios, shares = {}, {}
    for kept, (speed, exposed) in OFF.items():
        seconds, share = as_then(kept, "off")
        assert 2 * 8192 / 2 / seconds == pytest.approx(speed, rel=0.025) and share == pytest.approx(exposed, abs=0.025)
        for tp_overlap in OVERLAP_MODELS:
            other, shares[kept, tp_overlap] = as_then(kept, tp_overlap)
            ratios[kept, tp_overlap] = seconds / other
    copied = "attention", "copy_engine"
    assert ratios[copied] == pytest.approx(MEASURED[copied], abs=0.01), ratios
    assert shares[copied] == pytest.approx(COPIES, abs=0.01)


SMALL = ["model=tiny", "batch.sequence_length=256"]


def plans_of(*overrides: str, world: int = 4, device: str = "h200", most: int = 1000) -> list[StepEstimate]:
    config = compose_variant(["+config=llama3_8b", *SMALL, *overrides], None, 1, corpus=False)
    return list(rank_plans(config, load_hardware(device, []), world, 16, most).best)


def test_all_plans_try_copies_where_they_are_legal():
    """In groups of two, and as the settings say; each is a plan that a run takes."""
    found = plans_of()
    tried = {(one.config.parallel.tp_overlap, one.layout.plan.tp > 1) for one in found}
    assert tried == {("off", False), ("off", True), ("copy_engine", True)}
    shared = {one.layout.plan.shard for one in found if one.config.parallel.zero.collectives == "copy_engine"}
    assert shared == {2}
    for one in found[:40]:
        assert resolve_layout(one.config, 4, one.config.model, 4).plan == one.layout.plan


@pytest.mark.parametrize(
    "overrides, world, device",
    [
        (["precision.float8.recipe=tensorwise", "precision.float8.gather=true"], 4, "h200"),
        (["parallel.zero.offload=true", "parallel.tp_across_nodes=true"], 4, "h200"),
        ([], 2, "cpu"),
    ],
)
def test_all_plans_try_copies_nowhere_else(overrides, world, device):
    found = plans_of(*overrides, world=world, device=device)
    assert {(one.config.parallel.tp_overlap, one.config.parallel.zero.collectives) for one in found} == {
        ("off", "nccl")
    }


def decided(world: int, *overrides: str, reachable: bool | None = None, device: str = "h200") -> str:
    """What `parallel.zero.collectives=auto` becomes."""
    config = compose_variant(["+config=llama3_8b", *overrides], None, world, corpus=False)
    layout, node = resolve_layout(config, world, config.model, min(world, 8)), min(world, 8)
    found = decide(config, layout, MemoryLimit(None, 1e15), node, load_hardware(device), reachable)
    assert check_config(found.config, world, node) == []
    return found.config.parallel.zero.collectives


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_gpus_of_a_node_copy_states_where_nothing_refuses_it(stage):
    zero = f"parallel.zero.stage={stage}"
    assert decided(2, zero) == decided(4, zero, "parallel.tp=2") == decided(4, zero, "parallel.pp=2") == "copy_engine"
    assert decided(16, zero, "parallel.shard=2") == "copy_engine"
    assert decided(2, zero, reachable=False) == decided(2, zero, device="cpu") == "nccl"
    assert decided(4, zero) == decided(1, zero) == decided(2, zero, "parallel.zero.collectives=nccl") == "nccl"
    assert decided(2, zero, "parallel.zero.collectives=copy_engine", reachable=False) == "copy_engine"
    for refusing in (
        ["parallel.zero.offload=true"],
        ["parallel.zero.engine=deepspeed", "compile=false"],
        ["parallel.grad_comm.inner.codec=int8"],
        ["precision.float8.recipe=tensorwise", "precision.float8.gather=true"],
        ["run.cuda_graphs=true"],
        ["model=qwen3_30b_a3b", "parallel.ep=2"],
    ):
        assert decided(2, zero, *refusing) == "nccl", refusing


def test_ranks_of_other_nodes_share_states_by_nccl():
    assert decided(16, "parallel.zero.stage=3", "parallel.tp=8") == "nccl"


def test_what_a_run_says_of_its_ways():
    """At its start; a setting for more ranks than there are is not refused, and said."""
    recipe = ["+config=llama3_8b", "parallel=zero3", "parallel.zero.collectives=copy_engine"]

    def said(world: int, *more: str) -> dict[str, str]:
        config = compose_variant([*recipe, *more], None, world, corpus=False)
        return dict(communication_table(config, config.model, resolve_layout(config, world, config.model, world).plan))

    assert said(2) == {"shared states": "parallel.zero.collectives=copy_engine"}
    assert said(1) == {"without effect": "parallel.zero.collectives=copy_engine: no ranks share states"}
    assert said(4, "parallel.tp=2", "parallel.tp_overlap=copy_engine").keys() == {"tensor products", "shared states"}
    narrow = ["parallel.zero.collectives=nccl", "precision.float8.recipe=tensorwise", "precision.float8.gather=true"]
    assert said(2, *narrow) == {"weights": "cast to fp8 at each use"}
    assert "gather=true" in said(1, *narrow)["without effect"]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b", "qwen15_moe_a2_7b", "deepseek_v2_lite", "deepseek_v3"])
def test_each_product_of_a_layer_is_counted_in_each_pass(name, tp, apart):
    """Those of experts and to latent vectors too, which have no collective."""
    link = TensorGroupLink(ranks=tp, collective=1.0, copied=1.0, call=0.0, adding=0.0, hidden=1.0)
    for layer in model_programs(shipped(name), 8192, tp, 2):
        products, for_weights = dict.fromkeys(layer.gemms, 5.0), dict.fromkeys(layer.gemms, 3.0)
        again = recompute_effect(layer, 0, ActivationConfig(mode="full"), compiled=True).again
        took = layer_passes(lambda _: OVERLAP_MODELS["off"](link), layer, products, for_weights, again, apart)
        assert took.forward.products == 5 * len(layer.gemms) and took.backward.products == 8 * len(layer.gemms)
        assert took.again.products == 5 * sum(name in layer.gemms for name in again)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", [path.stem for path in sorted((CONFIGS / "model").glob("*.yaml"))])
def test_each_shipped_model_has_a_predicted_time(name, shared):
    tp = (5 if name == "gpt2_xl" else 2) if shared else 1  # 25 heads
    config = settings(shipped(name), batch__sequence_length=320, batch__micro_size=1, parallel__tp=tp)
    units = time_units(config, resolve_layout(config, tp, config.model), h200()).units
    passes = [one for unit in units for one in (unit.forward, unit.input, unit.weight)]
    assert all(seconds >= 0 for one in passes for seconds in one.values())


@pytest.mark.parametrize("apart, backward, calls", [(False, 2, 10), (True, 4, 12)])
def test_what_is_open_of_a_layer(apart, backward, calls):
    """Without tp_overlap, in collectives: all four forward; backward the two gathers before the products of gradients,
    and where weights' gradients wait, both reductions. Of what recompute repeats each gather, and of the sums none."""
    layer = model_programs(shipped("llama3_8b"), 8192, 2, 2)[0]
    products, hides = dict.fromkeys(layer.gemms, 5.0), {"call": 0.0, "adding": 0.0, "hidden": 1.0}
    link = TensorGroupLink(ranks=2, collective=1.0, copied=1.0, **hides)
    again = recompute_effect(layer, 0, ActivationConfig(mode="selective", save=["attention"]), compiled=True).again
    took = layer_passes(lambda _: OVERLAP_MODELS["off"](link), layer, products, products, again, apart)
    assert (took.forward.exposed, took.backward.exposed, took.again.exposed) == (4, backward, 2)
    assert took.moved == calls + 2 and took.again.products == 5 * 5  # q, k, v, gate, up
    assert took.backward.products == 2 * took.forward.products == 2 * 7 * 5
