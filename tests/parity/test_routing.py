"""Routing that 16-bit runs take over from the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.reference import random_batch, settings, tiny_spec

from trainer.model import experts
from trainer.parity.compare import TOLERANCES, Trajectory, compare_runs, judge_plan, print_comparison, train_reference
from trainer.parity.routing import RoutingReplay, known_choices

CPU = torch.device("cpu")
SPEC = tiny_spec(feed_forward={"width": 40, "experts": {"count": 16, "top_k": 2}}, init={"std": 0.05})


def trained(dtype: torch.dtype = torch.float32, choices=None) -> Trajectory:
    """Two steps, of one micro-batch and of two."""
    steps = [[random_batch(0, 16, 32, 61, False)], [random_batch(number, 8, 32, 61, False) for number in (1, 2)]]
    for number, batch in enumerate(steps[1]):
        batch.ids[:] = [f"{number} {name}" for name in batch.ids]
    return train_reference(settings(), SPEC, steps, CPU, compute=dtype, choices=choices)


def test_bf16_with_known_routing_is_within_the_limits_of_dense_models():
    """Some tokens would have gone to other experts, and none does."""
    expected = trained()
    assert len(expected.choices) == SPEC.depth * (16 + 16) and expected.differing is None
    seen = trained(torch.bfloat16, known_choices("bf16", expected.choices))
    assert 0 < seen.differing < 0.1 and not seen.choices
    errors = compare_runs(seen, expected, "bf16")
    assert all(error < limit for step in errors.steps for error, limit in zip(step[:3], TOLERANCES["bf16"]))
    assert known_choices("fp32", expected.choices) is None is known_choices("bf16", {})


def test_tokens_follow_what_is_known():
    known = {key: np.tile(np.int16([3, 5]), (len(rows), 1)) for key, rows in trained().choices.items()}
    seen = trained(choices=known)
    assert seen.differing > 0.5
    for gradients in seen.gradients:
        for name in [name for name in gradients if ".experts." in name]:
            used = gradients[name].flatten(1).any(1).nonzero().flatten().tolist()
            assert used == [3, 5], name
    assert trained(choices=trained().choices).differing == 0


def test_a_choice_outside_of_a_forward_pass_is_a_fault():
    replay, scores = RoutingReplay({}), torch.randn(4, 6)
    with replay.active():
        chosen = experts.choose_experts(scores, 2, 1, 1, 1)
    assert torch.equal(chosen, scores.topk(2).indices) and "outside of a forward pass" in replay.problems[0]
    assert experts.choose_experts(scores, 2, 1, 1, 1).shape == (4, 2) and len(replay.problems) == 1


@pytest.mark.parametrize(("differing", "words"), [(0.0312, "3.12% of tokens"), (None, "PASS")])
def test_the_table_has_the_share_of_choices_that_would_have_differed(differing, words, capsys):
    weights = {"a": torch.ones(2)}
    seen = Trajectory(weights, [4.0], [1.0], [weights], weights, differing=differing)
    result = judge_plan("plan", [], "bf16", seen, seen, None)
    print_comparison(seen, [result], {"bf16": None})
    told = " ".join(capsys.readouterr().out.split())
    assert words.split()[0] in told
    assert ("%" in told) == (differing is not None) and result.differing == differing
