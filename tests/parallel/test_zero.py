"""The ZeRO stages differ as they should: bytes held per rank, and collectives per step."""

from __future__ import annotations

import json

import pytest
from support.launch import launch

RANKS, MICRO_BATCHES = 4, 3


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("stages") / "results.json"
    launch("stages.py", RANKS, out, forks=True)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def stages(results):
    """Stage and ranks that share -> what was seen, of plans without anything else."""
    return {(r["stage"], r["shard"]): r for r in results if not r["more"]}


def share(result, kind: str, of: float = 1.0) -> float:
    """Bytes held, as a share of what one whole copy takes; rows that the ranks do not divide leave a little padding."""
    return result[kind] / (result["total"] * of)


@pytest.mark.parametrize(
    "key, parameters, accumulated, gradients",
    [
        ((0, 1), 1, 1, 1),
        ((1, 4), 1 / 4, 1, 1 / 4),
        ((2, 4), 1 / 4, 1 / 4, 1 / 4),
        ((3, 4), 1 / 4, 1 / 4, 1 / 4),
        ((1, 2), 1 / 2, 1, 1 / 2),
        ((3, 2), 1 / 2, 1 / 2, 1 / 2),
        ((2, 1), 1, 1, 1),
        ((3, 1), 1, 1, 1),
    ],
)
def test_bytes_held(stages, key, parameters, accumulated, gradients):
    result = stages[key]
    assert share(result, "parameters") == pytest.approx(parameters, rel=0.05)
    assert share(result, "inside") + share(result, "outside") == pytest.approx(accumulated, rel=0.05)
    assert share(result, "gradients") == pytest.approx(gradients, rel=0.05)
    assert share(result, "optimizer", of=2) == pytest.approx(parameters, rel=0.05)


def test_collectives_per_step(stages):
    units = stages[0, 1]["units"]
    blocks = units - 1
    # Stage 3 gathers each block for every forward and backward; the root unit (embedding, norm, head) once a
    # micro-batch.
    gathers = MICRO_BATCHES * (2 * blocks + 1)
    assert stages[0, 1]["collectives"] == {"reduce": units}
    assert stages[1, 4]["collectives"] == {"gather": units, "scatter": units}
    assert stages[2, 4]["collectives"] == {"gather": units, "scatter": units * MICRO_BATCHES}
    assert stages[3, 4]["collectives"] == {"gather": gathers, "scatter": units * MICRO_BATCHES}
    # HSDP: the replicas are summed once a step, whatever the stage.
    assert stages[1, 2]["collectives"] == {"gather": units, "scatter": units, "reduce": units}
    assert stages[3, 2]["collectives"] == {"gather": gathers, "scatter": units * MICRO_BATCHES, "reduce": units}
    assert stages[2, 1]["collectives"] == stages[3, 1]["collectives"] == {"reduce": units}  # as without ZeRO


def test_collectives_and_their_bytes_are_those_that_are_planned(results):
    """To the byte, padding included; quantised reductions travel by others."""
    plain = [result for result in results if "grad_comm__min_size" not in result["more"]]
    for result in plain:
        alone = {"reduce"} if result["shard"] == RANKS else set()  # offloaded ones get a dimension of one rank
        kinds = result["collectives"].keys() - alone
        seen = {kind: [result["collectives"][kind], result["moved"][kind]] for kind in kinds}
        assert seen == result["planned"], result
    assert len(plain) == 12
    for result in results:
        if result not in plain:
            assert result["collectives"]["gather"] == result["planned"]["gather"][0]


def test_offloaded_gradients_leave_the_device_once_a_step(results):
    offloaded = [result for result in results if result["more"].get("zero__offload")]
    assert len(offloaded) == 4
    for result in offloaded:
        kept = 1 if result["stage"] == 1 else 1 / result["shard"]
        assert share(result, "outside") == 0 and share(result, "inside") == pytest.approx(kept, rel=0.05)


def test_no_message_of_a_backward_pass_is_in_memory_while_the_next_computes(results):
    for result in results:
        assert result["sent"] == [0] * MICRO_BATCHES, result


def test_the_memory_that_a_run_expects_is_what_it_holds(results):
    for result in results:
        expected, between = result["expected"], result["inside"] + result["outside"]
        assert result["parameters"] == pytest.approx(expected["parameters"], rel=0.05), result
        assert result["optimizer"] == pytest.approx(expected["optimizer"], rel=0.05), result
        assert result["feedback"] == expected["feedback"] and bool(result["feedback"]) == (
            "grad_comm__min_size" in result["more"]
        ), result
        assert max(between, result["gradients"]) == pytest.approx(
            expected["sums"] or expected["gradients"], rel=0.05
        ), result
        if expected["offloaded"]:
            assert result["inside"] == pytest.approx(expected["sums"], rel=0.05) and result[
                "gradients"
            ] == pytest.approx(expected["gradients"], rel=0.05), result
