"""The ZeRO stages differ as they should: bytes held per rank, and collectives per step."""
from __future__ import annotations

import json

import pytest

from distributed import launch

RANKS, MICRO_BATCHES = 4, 3


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    out = tmp_path_factory.mktemp("stages") / "results.json"
    launch("stages.py", RANKS, out)
    return {(r["stage"], r["shard"]): r for r in json.loads(out.read_text())}


def share(result, kind: str, of: float = 1.0) -> float:
    """Bytes held, as a share of what one whole copy takes; rows that the ranks do not divide leave a little padding."""
    return result[kind] / (result["total"] * of)


@pytest.mark.parametrize("key, parameters, accumulated, gradients", [
    ((0, 1), 1, 1, 1), ((1, 4), 1 / 4, 1, 1 / 4), ((2, 4), 1 / 4, 1 / 4, 1 / 4), ((3, 4), 1 / 4, 1 / 4, 1 / 4),
    ((1, 2), 1 / 2, 1, 1 / 2), ((3, 2), 1 / 2, 1 / 2, 1 / 2)])
def test_bytes_held(stages, key, parameters, accumulated, gradients):
    result = stages[key]
    assert share(result, "parameters") == pytest.approx(parameters, rel=0.05)
    assert share(result, "accumulated") == pytest.approx(accumulated, rel=0.05)
    assert share(result, "gradients") == pytest.approx(gradients, rel=0.05)
    assert share(result, "optimizer", of=2) == pytest.approx(parameters, rel=0.05)


def test_collectives_per_step(stages):
    units = stages[0, 1]["units"]
    blocks = units - 1
    # Stage 3 gathers each block for every forward and backward; the root unit (embedding, norm, head) once a micro-batch.
    gathers = MICRO_BATCHES * (2 * blocks + 1)
    assert stages[0, 1]["collectives"] == {"reduce": units}
    assert stages[1, 4]["collectives"] == {"gather": units, "scatter": units}
    assert stages[2, 4]["collectives"] == {"gather": units, "scatter": units * MICRO_BATCHES}
    assert stages[3, 4]["collectives"] == {"gather": gathers, "scatter": units * MICRO_BATCHES}
    # HSDP: the replicas are summed once a step, whatever the stage.
    assert stages[1, 2]["collectives"] == {"gather": units, "scatter": units, "reduce": units}
    assert stages[3, 2]["collectives"] == {"gather": gathers, "scatter": units * MICRO_BATCHES, "reduce": units}
