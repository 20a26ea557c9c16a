"""transformers' own code under plans, beside one process of transformers with eager attention: the gradient of every
parameter, of packed documents. tests/code_sweep.py does the same for all types."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.code_models import MODELS
from support.launch import launch, warm_python

SCHEDULES = ("zb_v", "1f1b", "interleaved", "zb_h1")
ADAPTER: dict[str, Any] = {"rank": 3, "alpha": 3.0}
ATTENTION = ADAPTER | {"targets": ["*.self_attn.*"]}
TWO: list[dict[str, Any]] = [
    *({"model": name, "pp": 2, "schedule": "zb_v"} for name in ("llama", "cohere2", "deepseek_v3")),
    *({"model": "gemma2", "stage": stage} for stage in range(3)),
    {"model": "gemma2", "stage": 3, "recompute": "full"},
    # Each micro-batch has other documents, and backward computes layers again when later ones have begun.
    {"model": "gemma2", "pp": 2, "schedule": "1f1b", "recompute": "full", "micro_batches": 4},
    {"model": "llama", "tp": 2, "recompute": "selective"},
    {"model": "mixtral", "tp": 2, "recompute": "selective"},
    {"model": "mixtral", "tp": 2, "recompute": "full"},
    {"model": "phi3", "pp": 2, "schedule": "1f1b", "recompute": "selective", "micro_batches": 4},
    {"model": "cohere2", "cp": 2, "recompute": "selective"},
    {"model": "exaone4", "cp": 2},
    {"model": "deepseek_v3", "cp": 2, "recompute": "full"},
    {"model": "exaone4", "stage": 3, "precision": "bf16"},
    {"model": "exaone4", "tp": 2, "precision": "fp16"},
    {"model": "cohere2", "stage": 3, "settings": {"parallel__zero__offload": True, "optimizer__ema__decay": 0.9}},
    {"model": "cohere2", "tp": 2, "settings": {"loss__tile": 5, "loss__chunk": 3}},
    {"model": "llama", "compile": 1, "stage": 3, "recompute": "selective"},
    {"model": "phi3", "compile": 1, "cp": 2, "recompute": "full"},
    {"model": "mamba2", "compile": 1, "stage": 3, "recompute": "selective"},
    {"model": "qwen3", "float8": "tensorwise", "gather": True, "stage": 3, "recompute": "full"},
    {
        "model": "qwen3",
        "float8": "rowwise",
        "compile": 1,
        "tp": 2,
        "changes": {"head_dim": 16, "intermediate_size": 64},
    },
    {"model": "qwen3", "float8": "rowwise_with_gw_hp", "pp": 2, "schedule": "zb_v"},
    # Experts that ranks share.
    {"model": "mixtral", "ep": 2, "recompute": "full"},
    {"model": "gpt_oss", "ep": 2, "tp": 2, "recompute": "selective"},
    {"model": "qwen3_moe", "ep": 2, "stage": 3, "settings": {"parallel__ep_dispatch": "alltoall"}},
    {"model": "deepseek_v3", "ep": 2, "cp": 2, "stage": 2, "settings": {"parallel__ep_dispatch": "allgather"}},
    {"model": "olmoe", "ep": 2, "stage": 1, "settings": {"parallel__ep_dispatch": "shared_memory"}},
    {"model": "gpt_oss", "ep": 2, "stage": 3, "precision": "bf16", "recompute": "full"},
    {"model": "gpt_oss", "pp": 2, "schedule": "zb_v"},
    # Adapters.
    {"model": "llama", "tp": 2, "recompute": "full", "adapter": ADAPTER | {"trained": ["*norm*", "embedding.weight"]}},
    {"model": "gemma2", "stage": 3, "recompute": "selective", "adapter": ADAPTER | {"scale": "root"}},
    {"model": "phi3", "pp": 2, "schedule": "zb_v", "adapter": ADAPTER},
    {
        "model": "deepseek_v3",
        "tp": 2,
        "ep": 2,
        "adapter": ADAPTER | {"targets": ["*.self_attn.*", "*.shared_experts.*"]},
    },
    {"model": "mixtral", "pp": 2, "schedule": "zb_v", "adapter": ATTENTION | {"trained": ["*.experts.*"]}},
    {"model": "cohere2", "collectives": "copy_engine", "stage": 3, "recompute": "selective"},
    {"model": "deepseek_v3", "collectives": "copy_engine", "stage": 1, "micro_batches": 4},
    {"model": "gemma2", "codec": "int8", "stage": 3},
    {"model": "mixtral", "engine": "deepspeed", "stage": 2, "recompute": "full"},
    {"model": "deepseek_v3", "engine": "deepspeed", "stage": 3},
    {"model": "phi3", "engine": "deepspeed", "stage": 1, "pp": 2, "schedule": "1f1b"},
    {"model": "phi", "tp": 2, "settings": {"loss__tile": 5}},
    *({"model": name, "stage": 3, "recompute": "full"} for name in ("gpt2", "falcon", "bart")),
    *({"model": name, "pp": 2, "schedule": "zb_v"} for name in ("gpt2", "roberta", "bart", "mamba2")),
    {"model": "falcon_h1", "pp": 2, "schedule": "zb_v"},
    {"model": "jamba", "tp": 2, "recompute": "full"},
    {"model": "qwen3_next", "ep": 2, "stage": 3, "recompute": "full"},
]
FOUR: list[dict[str, Any]] = [
    # Every type under tensor parallelism, which two ranks therefore do for some only.
    *(
        {"model": name, "tp": 2, "pp": 2, "schedule": SCHEDULES[place % 4], "recompute": ("none", "full")[place % 2]}
        for place, name in enumerate(MODELS)
    ),
    {"model": "mixtral", "tp": 2, "stage": 3},
    {"model": "qwen3_next", "tp": 2, "pp": 2, "schedule": "zb_v", "recompute": "full"},
    {"model": "phi", "tp": 2, "pp": 2, "schedule": "zb_v"},
    {"model": "lfm2_moe", "tp": 2, "stage": 3},
    {"model": "gemma2", "stage": 3, "shard": 2},
    {"model": "qwen3", "pp": 2, "stage": 2, "schedule": "interleaved", "micro_batches": 4},
    {"model": "deepseek_v3", "tp": 4},
    {"model": "cohere2", "cp": 2, "tp": 2},
    {"model": "cohere2", "compile": 2, "tp": 2, "stage": 3, "recompute": "selective", "precision": "bf16"},
    {"model": "gpt_oss", "ep": 2, "pp": 2, "schedule": "zb_v", "stage": 1, "recompute": "full"},
    {"model": "qwen3_moe", "ep": 4, "tp": 2, "stage": 3, "recompute": "selective"},
    {"model": "olmoe", "ep": 2, "tp": 2, "pp": 2, "schedule": "zb_h1", "optimizer": "muon"},
    {"model": "deepseek_v3", "ep": 2, "stage": 3, "shard": 2, "recompute": "full"},
    {"model": "gemma2", "tp": 2, "pp": 2, "schedule": "zb_v", "recompute": "full", "adapter": ADAPTER},
    {"model": "qwen3_moe", "ep": 2, "tp": 2, "stage": 3, "recompute": "selective", "adapter": ATTENTION},
]
"""compile: the number of kinds of layers, each of which makes one graph, however many micro-batches there are. Two
kinds under tensor parallelism are cohere2's, on four ranks; deepseek_v3's are compiled by tests/hf/test_code.py. The
scan of mamba2 is that of falcon_h1, whose graph is larger."""
LIMITS = {"fp32": (1e-6, 1e-5), "fp16": (2e-4, 3e-2), "bf16": (2e-3, 1.5e-1), "int8": (1e-6, 3e-2)}
"""The largest relative errors of the loss and of a gradient by the type that forward and backward compute in, or in
which gradients travel. Those of few bits are of rounding alone; the same code in one process has them too."""

SHARED = dict.fromkeys(("mixtral", "gpt_oss", "qwen3_moe", "olmoe", "qwen3_next"), 4)
SHARED |= {"deepseek_v3": 3, "lfm2_moe": 3, "jamba": 2}
"""Types with experts -> the number of layers that have some."""

LOSS_GRAPHS = 2
"""Forward and backward pass of the loss on the rank with the last stage are compiled too."""


@pytest.mark.parametrize("world, cases", [(2, TWO), (4, FOUR)])
def test_gradients_under_plans_are_those_of_transformers(world, cases, tmp_path):
    (tmp_path / "cases").write_text(json.dumps(cases))
    launch("code_plans.py", world, tmp_path / "out", tmp_path / "cases", forks=True)
    results = json.loads((tmp_path / "out").read_text())
    wrong = [result for result in results if not is_exact(result)]
    assert len(results) == len(cases) and not wrong, "\n".join(map(str, wrong))
    # Tokens of each expert, of every layer that has experts.
    loads: dict[str, set[tuple[float, ...]]] = {}
    for one in results:
        if one["case"].keys().isdisjoint(("precision", "adapter", "changes")) and one["case"]["model"] in SHARED:
            loads.setdefault(one["case"]["model"], set()).add(tuple(one["loads"]))
    assert loads.keys() == SHARED.keys() & {case["model"] for case in cases}
    for model, found in loads.items():
        (load,) = found
        assert sum(load) == 8 * 16 * 2 * SHARED[model], model  # tokens, choices and layers


@pytest.fixture
def sweep(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    import code_sweep

    yield code_sweep
    del sys.modules["code_sweep"]


def test_the_sweep_compares_a_type_and_names_one_that_has_no_copy(sweep, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm_python())
    assert sweep.main(str(tmp_path / "out"), "helium", "zaya") == 0
    results, printed = json.loads((tmp_path / "out").read_text()), capsys.readouterr().out
    verdicts = {name: [sweep.verdict(results[name][plan]) for plan in sweep.PLANS] for name in results}
    assert verdicts == {"helium": ["exact"] * 4 + ["refused"], "zaya": ["refused"] * 5}, results["helium"]
    assert "accepted, but not exact: none" in printed


@pytest.mark.parametrize(
    "broken", [{"gradient": 1e-3}, {"loss": 1e-3}, {"problems": ["no gradient"]}, {"error": "KeyError: 1"}, None]
)
def test_the_sweep_fails_where_an_accepted_type_is_not_exact(sweep, tmp_path, monkeypatch, broken):
    exact = {"gradient": 1e-6, "loss": 1e-8, "problems": [], "worst": "norm.weight"}
    plans = {plan: dict(exact) for plan in sweep.PLANS}
    monkeypatch.setattr(sweep, "compare", lambda names: {name: plans for name in names})
    assert sweep.main(str(tmp_path / "out"), "llama") == 0
    for plan in ("tp", "ep"):
        kept = plans[plan]
        if broken is None:
            del plans[plan]
        else:
            plans[plan] = broken if "error" in broken else exact | broken
        assert sweep.main(str(tmp_path / "out"), "llama") == 1
        plans[plan] = kept


def is_exact(result: dict[str, Any]) -> bool:
    loss, gradient = LIMITS[result["case"].get("codec") or result["case"].get("precision", "fp32")]
    if kinds := result["case"].get("compile"):
        if result.get("uncompiled") != [] or result["graphs"] != kinds + LOSS_GRAPHS:
            return False
    return "error" not in result and not result["problems"] and result["loss"] < loss and result["gradient"] < gradient
