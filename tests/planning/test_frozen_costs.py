"""What is predicted of models with adapters: states, operations, and what a pipeline has to defer."""

from __future__ import annotations

import pytest

import trainer
from trainer.parallel.pipeline.plan import estimated_costs
from trainer.planning.estimate.memory import find_peaks
from trainer.planning.estimate.step import estimate_step
from trainer.planning.float8 import describe_float8
from trainer.planning.hardware import load_hardware
from trainer.planning.layer import flops_per_token, parameter_counts
from trainer.planning.resolve import collect_warnings, resolve_layout
from trainer.planning.states import state_bytes

ADAPTED = ("model.adapter.rank=16",)


def composed(world: int, *more: str) -> trainer.Config:
    return trainer.compose(
        ["+config=llama3_8b", "batch.sequence_length=4096", "activation=none", *more], world_size=world
    )


def test_operations_are_those_that_torch_counts() -> None:
    """Of torch's counter at these shapes, attention counted full: 51.5 GFLOP a token, and 36.7 with adapters of rank
    16 on all layers, 36.4 with rank 16 on the queries and values, 37.4 with rank 64 on all."""
    for expected, more in (
        (51.5e9, ()),
        (36.7e9, ADAPTED),
        (36.4e9, (*ADAPTED, "model.adapter.targets=['*.q','*.v']")),
        (37.4e9, ("model.adapter.rank=64",)),
    ):
        spec = composed(1, "parallel=ddp", *more).model
        assert flops_per_token(spec, 4096, causal=False) == pytest.approx(expected, rel=5e-3)
    assert parameter_counts(composed(1, "parallel=ddp", *ADAPTED).model)["trained"] == 41_943_040


@pytest.mark.parametrize("weights", ["compute", "fp8"])
@pytest.mark.parametrize(("stage", "frozen_ranks"), [(0, 1), (1, 1), (2, 1), (3, 8)])
def test_frozen_parameters_take_their_type_and_no_states(stage: int, frozen_ranks: int, weights: str) -> None:
    config = composed(8, f"parallel.zero.stage={stage}", *ADAPTED, f"model.adapter.weights={weights}")
    layout, counts = resolve_layout(config, 8, config.model), parameter_counts(config.model)
    states, trained = state_bytes(config.model, layout.plan, 2), counts["trained"]
    narrow = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) * (weights == "fp8")
    assert states.frozen == pytest.approx((2 * (counts["total"] - trained) - narrow) / frozen_ranks, rel=1e-6)
    ranks = 1 if stage == 0 else 8
    assert states.parameters == pytest.approx(4 * trained / ranks, rel=1e-6)
    assert states.optimizer == pytest.approx(8 * trained / ranks, rel=1e-6)
    whole = state_bytes(composed(8, f"parallel.zero.stage={stage}").model, layout.plan, 2)
    assert whole.frozen == 0 and states.total < whole.total / 2
    peaks = [
        find_peaks(one, resolve_layout(one, 8, one.model))[0].reserved
        for one in (config, composed(8, f"parallel.zero.stage={stage}"))
    ]
    assert peaks[0] < peaks[1]


def test_offloaded_shards_of_frozen_parameters_are_in_host_memory() -> None:
    config = composed(8, "parallel.zero.offload=true", "parallel.zero.stage=3", *ADAPTED)
    plan, counts = resolve_layout(config, 8, config.model).plan, parameter_counts(config.model)
    states = state_bytes(config.model, plan, 2)
    assert states.frozen == 0 and states.host >= 2 * (counts["total"] - counts["trained"]) / 8


def test_frozen_layers_have_nothing_to_defer() -> None:
    both = []
    for more in ((), ADAPTED, (*ADAPTED, "model.adapter.trained=['*.down.weight']")):
        config = composed(1, "parallel=ddp", *more)
        layout = resolve_layout(config, 1, config.model)
        both.append(estimated_costs(config, config.model, layout.plan, layout.batch, 2))
    whole, adapted, some = both
    assert sum(adapted.w) == adapted.kept == 0 < sum(some.w) < sum(whole.w)
    assert adapted.i == whole.i and adapted.f == whole.f


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min"])
def test_schedules_without_a_point_are_named(schedule: str) -> None:
    """The simulated step of the schedule that is named instead is shorter."""
    plan = "parallel=pp2", "parallel.pp=4", f"parallel.pipeline.schedule={schedule}", "batch.accumulation=16"
    for more, frozen in ((ADAPTED, True), ((*ADAPTED, "model.adapter.trained=['*.down.weight']"), False), ((), False)):
        config = composed(4, *plan, *more)
        layout = resolve_layout(config, 4, config.model)
        notes = [note for note in collect_warnings(config, layout, 4) if "weight gradients" in note]
        assert bool(notes) == (frozen and schedule in ("zb_h1", "v_half", "v_min"))
        if not notes:
            continue
        other = composed(4, *plan, *more, notes[0].split("; ")[1].split()[0])
        hardware, seconds = load_hardware("h100"), []
        for one in (other, config):
            seconds.append(estimate_step(one, resolve_layout(one, 4, one.model), hardware).seconds)
        assert seconds[0] < seconds[1]


def test_matrices_in_fp8_are_predicted_smaller_and_slower() -> None:
    """Each pass converts them."""
    found = []
    for weights in ("compute", "fp8"):
        config = composed(1, "parallel=ddp", "batch.micro_size=1", *ADAPTED, f"model.adapter.weights={weights}")
        layout = resolve_layout(config, 1, config.model)
        assert ("frozen matrices", "in fp8") in describe_float8(config, config.model, layout.plan) or weights != "fp8"
        found.append(estimate_step(config, layout, load_hardware("h100")))
    assert found[1].seconds > found[0].seconds
    assert 5 * 2**30 < found[0].memory - found[1].memory < 7 * 2**30


def test_a_step_with_adapters_is_predicted_faster() -> None:
    seconds = []
    for more in ((), ADAPTED, (*ADAPTED, "model.adapter.targets=['*.q','*.v']")):
        config = composed(8, "batch.micro_size=2", *more)
        seconds.append(estimate_step(config, resolve_layout(config, 8, config.model), load_hardware("h100")).seconds)
    assert seconds[0] > seconds[1] > seconds[2] > seconds[0] / 2
