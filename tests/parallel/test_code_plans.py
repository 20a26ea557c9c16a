"""transformers' own code under plans, beside one process of transformers with eager attention: the gradient of every
parameter, of packed documents. tests/code_sweep.py does the same for all types."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.code_models import MODELS
from support.launch import launch

SCHEDULES = ("zb_v", "1f1b", "interleaved", "zb_h1")
TWO: list[dict[str, Any]] = [
    *({"model": name, "tp": 2} for name in MODELS),
    *({"model": name, "pp": 2, "schedule": "zb_v"} for name in ("llama", "cohere2", "deepseek_v3")),
    *({"model": "gemma2", "stage": stage} for stage in range(4)),
    {"model": "gemma2", "stage": 3, "recompute": "full"},
    # Each micro-batch has other documents, and backward computes layers again when later ones have begun.
    {"model": "gemma2", "pp": 2, "schedule": "1f1b", "recompute": "full", "micro_batches": 4},
    {"model": "llama", "tp": 2, "recompute": "selective"},
    {"model": "mixtral", "tp": 2, "recompute": "modules"},
    {"model": "mixtral", "tp": 2, "recompute": "full"},
    {"model": "gemma2", "tp": 2, "recompute": "attention", "micro_batches": 4},
    {"model": "phi3", "pp": 2, "schedule": "1f1b", "recompute": "attention", "micro_batches": 4},
    {"model": "cohere2", "cp": 2, "recompute": "attention"},
    {"model": "exaone4", "cp": 2},
    {"model": "deepseek_v3", "cp": 2, "recompute": "full"},
    {"model": "exaone4", "stage": 3, "precision": "bf16"},
    {"model": "exaone4", "tp": 2, "precision": "fp16"},
    {"model": "cohere2", "stage": 3, "settings": {"parallel__zero__offload": True, "optimizer__ema__decay": 0.9}},
    {"model": "cohere2", "tp": 2, "settings": {"loss__tile": 5, "loss__chunk": 3}},
    {"model": "phi", "tp": 2, "settings": {"loss__tile": 5}},
    *({"model": name, "stage": 3, "recompute": "full"} for name in ("gpt2", "falcon", "bart")),
    *({"model": name, "pp": 2, "schedule": "zb_v"} for name in ("gpt2", "roberta", "bart", "mamba2")),
    {"model": "qwen3_next", "tp": 2},
]
FOUR: list[dict[str, Any]] = [
    *(
        {"model": name, "tp": 2, "pp": 2, "schedule": SCHEDULES[place % 4], "recompute": ("none", "full")[place % 2]}
        for place, name in enumerate(MODELS)
    ),
    {"model": "mixtral", "tp": 2, "stage": 3},
    {"model": "qwen3_next", "tp": 2, "pp": 2, "schedule": "zb_v", "recompute": "full"},
    {"model": "phi", "tp": 2, "pp": 2, "schedule": "zb_v"},
    {"model": "lfm2_moe", "tp": 2, "stage": 3},
    {"model": "llama", "tp": 2, "stage": 3},
    {"model": "gemma2", "stage": 3, "shard": 2},
    {"model": "qwen3", "pp": 2, "stage": 2, "schedule": "interleaved", "micro_batches": 4},
    {"model": "deepseek_v3", "tp": 4},
    {"model": "cohere2", "cp": 2, "tp": 2},
]
LIMITS = {"fp32": (1e-6, 1e-5), "fp16": (2e-4, 3e-2), "bf16": (2e-3, 1.5e-1)}
"""The largest relative errors of the loss and of a gradient by the type that forward and backward compute in. Those of
16 bits are of rounding alone; the same code in one process has them too."""


@pytest.mark.parametrize("world, cases", [(2, TWO), (4, FOUR)])
def test_gradients_under_plans_are_those_of_transformers(world, cases, tmp_path):
    (tmp_path / "cases").write_text(json.dumps(cases))
    launch("code_plans.py", world, tmp_path / "out", tmp_path / "cases", forks=True)
    results = json.loads((tmp_path / "out").read_text())
    wrong = [result for result in results if not is_exact(result)]
    assert len(results) == len(cases) and not wrong, "\n".join(map(str, wrong))


@pytest.fixture
def sweep(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    import code_sweep

    yield code_sweep
    del sys.modules["code_sweep"]


def test_the_sweep_compares_a_type_and_names_one_that_has_no_copy(sweep, tmp_path, capsys):
    assert sweep.main(str(tmp_path / "out"), "helium", "zaya") == 0
    results, printed = json.loads((tmp_path / "out").read_text()), capsys.readouterr().out
    assert [sweep.verdict(results["helium"][plan]) for plan in sweep.PLANS] == ["exact"] * 3, results["helium"]
    assert [sweep.verdict(results["zaya"][plan]) for plan in sweep.PLANS] == ["refused"] * 3
    assert "accepted, but not exact: none" in printed


@pytest.mark.parametrize(
    "broken", [{"gradient": 1e-3}, {"loss": 1e-3}, {"problems": ["no gradient"]}, {"error": "KeyError: 1"}, None]
)
def test_the_sweep_fails_where_an_accepted_type_is_not_exact(sweep, tmp_path, monkeypatch, broken):
    exact = {"gradient": 1e-6, "loss": 1e-8, "problems": [], "worst": "norm.weight"}
    plans = {plan: dict(exact) for plan in sweep.PLANS}
    monkeypatch.setattr(sweep, "compare", lambda names: {name: plans for name in names})
    assert sweep.main(str(tmp_path / "out"), "llama") == 0
    if broken is None:
        del plans["tp"]
    else:
        plans["tp"] = broken if "error" in broken else exact | broken
    assert sweep.main(str(tmp_path / "out"), "llama") == 1


def is_exact(result: dict[str, Any]) -> bool:
    loss, gradient = LIMITS[result["case"].get("precision", "fp32")]
    return "error" not in result and not result["problems"] and result["loss"] < loss and result["gradient"] < gradient
