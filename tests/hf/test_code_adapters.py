"""Adapters on transformers' own code: PEFT folders in and out, merged weights, runs, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.code_models import MIXTURES, MODELS, guess_values, small_values
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.checkpointing.loading import merge_adapters, open_saved
from trainer.config import ConfigError
from trainer.config.model import AdapterSpec, CodeSpec
from trainer.hf import export_adapter, open_weights, spec_from_hf
from trainer.hf.accepted import code_spec, plain_values
from trainer.hf.adapters import ADAPTER, TENSORS, PeftWeights
from trainer.hf.code import CodeStage
from trainer.hf.folder import export_model
from trainer.hf.proof import drawn_weight
from trainer.model.initial import AdaptedWeights, fill_parameters
from trainer.parallel.parallelize import check_declared, keep_buffers
from trainer.planning.layer import parameter_counts
from trainer.planning.parameters import declare_parameters, find_adapter_problems
from trainer.planning.resolve import compose
from trainer.training.run import run

TOKENS = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(1))
ATTENTION = {name: ["*.self_attn.*"] for name in ("mixtral", *MIXTURES)}
ATTENTION["deepseek_v3"] = ["*.self_attn.*", "*.shared_experts.*"]


def adapter_of(name: str, **changes: Any) -> AdapterSpec:
    return AdapterSpec(3, 5.0, targets=ATTENTION.get(name, ["*"]), **changes)


def saved_folder(path: Path, name: str, **changes: Any) -> Path:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small_values(name, **changes)))
    model.save_pretrained(path)
    return path


@torch.no_grad()
def our_logits(spec: CodeSpec, weights: Any) -> Tensor:
    with torch.device("meta"):
        stage = CodeStage(spec)
    check_declared(stage, spec)
    stage.to_empty(device="cpu")
    keep_buffers(stage, torch.device("cpu"))
    fill_parameters(stage, weights)
    return stage.eval()(TOKENS)


@torch.no_grad()
def their_logits(folder: Path, adapter: Path | None = None) -> Tensor:
    """Those of the model in a folder, with the adapters of a PEFT folder added to its weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    if adapter is not None:
        options, tensors = json.loads((adapter / ADAPTER).read_text()), load_file(adapter / TENSORS)
        for name, module in model.named_modules():
            stacked = [target.removesuffix(".weight") for target in options.get("target_parameters") or ()]
            if any(f".{name}".endswith(f".{target}") for target in [*options["target_modules"], *stacked]):
                down, up = (tensors.pop(f"base_model.model.{name}.lora_{letter}.weight") for letter in "AB")
                module.weight += up @ down * (options["lora_alpha"] / options["r"])
            for own, parameter in module.named_parameters(recurse=False):
                if name in (options["modules_to_save"] or ()):
                    parameter.copy_(tensors.pop(f"base_model.model.{name}.{own}"))
        assert not tensors, f"PEFT would not load {list(tensors)}"
    return model(TOKENS, use_cache=False).logits


@pytest.mark.parametrize("name", [*MODELS, *MIXTURES])
def test_adapters_go_into_a_peft_folder_and_come_back(name, tmp_path):
    base = saved_folder(tmp_path / "base", name)
    plain = spec_from_hf(base, code="transformers")
    spec = replace(plain, adapter=adapter_of(name, trained=["norm.weight"]))
    infos = declare_parameters(spec)
    stored, _ = open_weights(base, plain)
    weights = AdaptedWeights(stored, lambda name, info: 0.3 * drawn_weight(name, info), ["norm.weight"])
    export_adapter(spec, lambda name: weights(name, infos[name]), tmp_path / "out", base)
    expected = our_logits(spec, weights)
    assert (expected - their_logits(base)).abs().max() > 1e-3
    torch.testing.assert_close(their_logits(base, tmp_path / "out"), expected, rtol=1e-5, atol=3e-5)
    read = PeftWeights(tmp_path / "out", plain)
    assert declare_parameters(replace(plain, adapter=read.adapter)) == infos
    assert all(torch.equal(read.values[key], weights(key, info)) for key, info in infos.items() if info.adapter)
    assert parameter_counts(spec)["trained"] == sum(one.numel() for one in read.values.values())


def test_a_run_trains_adapters_resumes_and_exports_both_forms(tmp_path):
    base = saved_folder(tmp_path / "base", "deepseek_v3", vocab_size=300)

    def settings(name: str, *more: str) -> list[str]:
        return [
            *(f"model.from_hf={base}", "model.code=transformers", f"run.dir={tmp_path / name}", "run.device=cpu"),
            *("batch.sequence_length=32", "batch.global_size=2", "run.steps=2", "lr.warmup=0", "lr.schedule=constant"),
            *(f"data.cache={tmp_path / 'cache'}", "data.tokenizer=bytes", "data.sources.stdlib.limit=5"),
            *("logging.console=none", "checkpoint.at_end=true", "lr.peak=0.05", *more),
        ]

    adapter = "model.adapter.rank=3", "model.adapter.targets=[*.self_attn.*]"
    assert run(compose(settings("run", *adapter))).code == 0
    assert run(compose(settings("run", *adapter, "run.steps=4"))).code == 0
    assert run(compose(settings("whole", *adapter, "run.steps=4"))).code == 0
    saved, whole = (open_saved(str(tmp_path / name)) for name in ("run", "whole"))
    [path] = (tmp_path / "whole/checkpoints").glob("step-*")
    tensors = json.loads((path / "manifest.json").read_text())["tensors"]
    held = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    infos = declare_parameters(saved.spec)
    assert {name for name in held if name in infos} == {name for name, info in infos.items() if info.trained}
    for name in held:
        assert torch.equal(saved.tensor(name), whole.tensor(name)), name
    merged = merge_adapters(saved)
    export_model(merged.spec, merged.tensor, tmp_path / "merged", torch.float32)
    export_adapter(saved.spec, saved.tensor, tmp_path / "adapter", base)
    expected = our_logits(saved.spec, lambda name, info: saved.tensor(name))
    assert (expected - their_logits(base)).abs().max() > 1e-3
    for logits in (their_logits(tmp_path / "merged"), their_logits(base, tmp_path / "adapter")):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=3e-5)
    # Training goes on from the adapter.
    shape = f"model.from_hf={tmp_path / 'adapter'}"
    assert run(compose([*settings("more", "run.steps=1")[1:], shape])).code == 0
    assert open_saved(str(tmp_path / "more")).spec.adapter.rank == 3


def test_adapters_need_weights_to_stand_beside(tmp_path):
    AutoConfig.for_model(**small_values("cohere2", vocab_size=300)).save_pretrained(tmp_path / "in")
    with pytest.raises(ConfigError, match="model.adapter.rank=4: there are no weights in model.from_hf"):
        run(compose([f"model.from_hf={tmp_path / 'in'}", "model.adapter.rank=4", f"run.dir={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "afmoe", "ernie4_5_moe", "qwen2_moe", "llama"])
def test_the_way_out_of_a_refusal_is_accepted(name):
    spec = code_spec(plain_values(guess_values(name)))
    problems = list(find_adapter_problems(replace(spec, adapter=AdapterSpec(4))))
    assert len(problems) == (name != "llama")
    for problem in problems:
        patterns = problem.split("set model.adapter.targets=[")[1].split("]")[0].split(",")
        assert not list(find_adapter_problems(replace(spec, adapter=AdapterSpec(4, targets=patterns))))


def test_every_matrix_that_can_have_an_adapter_is_a_linear_layer():
    for name in [*MODELS, *MIXTURES, "afmoe", "apertus", "bitnet", "gemma4_text", "hunyuan_v1_moe", "jetmoe"]:
        spec = code_spec(plain_values(guess_values(name)))
        problems = list(find_adapter_problems(replace(spec, adapter=AdapterSpec(2))))
        targets = problems[0].split("set model.adapter.targets=[")[1].split("]")[0].split(",") if problems else ["*"]
        spec.adapter = AdapterSpec(2, targets=targets)
        with torch.device("meta"):
            check_declared(CodeStage(spec), spec)
