"""Adapters and transformers: folders as PEFT reads and writes them, merged weights, and runs that start from a model,
resume, are exported and go on from an adapter."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.reference import tiny_spec
from torch import Tensor

import trainer
from trainer.checkpointing.loading import SavedModel, merge_adapters, open_saved
from trainer.checkpointing.manifest import read_manifest, write_manifest
from trainer.commands import export, merge, sample
from trainer.config import ConfigError
from trainer.config.model import AdapterSpec, ModelSpec
from trainer.hf import HFWeights, export_adapter, spec_from_hf
from trainer.hf.adapters import ADAPTER, TENSORS, PeftWeights, write_adapter
from trainer.model.initial import AdaptedWeights, InitialWeights, fill_parameters
from trainer.model.stage import split_report
from trainer.model.transformer import Transformer
from trainer.parity.compare import StartedAdapters
from trainer.planning.parameters import declare_parameters
from trainer.precision.products import round_rows

transformers = pytest.importorskip("transformers")

VOCAB = 61
MARKS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    **MARKS,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 12},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 8},
    "phi3": GROUPED,
    "gpt_neox": DECODER,
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **MARKS},
    "qwen2_moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 16}
    | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"head_dim": 12, "mlp_only_layers": [0]},
    "mixtral": {**GROUPED, "num_local_experts": 4, "intermediate_size": 24},
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "head_dim": 8},
    "deepseek_v3": {**DECODER, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16}
    | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4},
}
MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
FUSED = ("phi3", "gpt_neox", "gpt2")
TARGETS = {
    "attention": ["*.attention.*"],
    "some": ["*.attention.[qv]", "layers.1.attention.o"],
    "dense": ["*"],
    "shared": ["*.shared.*", "layers.0.attention.k"],
    "experts": ["*.attention.*", "*.experts.*", "*.shared.*", "layers.?.feed_forward.[gud]*"],
    "stacks": ["layers.0.*.experts.down", "layers.1.*.experts.gate"],
}
CASES = [
    (family, targets)
    for family in FAMILIES
    for targets in TARGETS
    if (targets in ("attention", "some", "shared")) <= (family not in MIXTURES[1:])
    and (targets == "shared") <= (family == "qwen2_moe")
    and (targets == "dense") <= (family not in MIXTURES)
    and (targets in ("experts", "stacks")) <= (family in MIXTURES)
]
PEFT = importlib.util.find_spec("peft") is not None
"""Whether PEFT reads the folders here, and not `merge_peft`."""
TOKENS = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family."""
    home, found = tmp_path_factory.mktemp("models"), {}
    for family, options in FAMILIES.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **options)
        found[family] = home / family
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(found[family])
    return found


def adapted(folder: Path, adapter: AdapterSpec) -> tuple[ModelSpec, Any]:
    """The model in a folder with random adapters: its spec, and its weights."""
    spec = replace(spec_from_hf(folder), adapter=adapter)
    drawn = InitialWeights(spec, 3, torch.device("cpu"))
    return spec, StartedAdapters(AdaptedWeights(HFWeights(folder, spec), drawn), 3)


def reader(spec: ModelSpec, weights: Any) -> Any:
    infos = declare_parameters(spec)
    return lambda name: weights(name, infos[name])


@torch.no_grad()
def our_logits(spec: ModelSpec, weights: Any) -> Tensor:
    model = Transformer(spec)
    fill_parameters(model, weights)
    return split_report(model.eval()(TOKENS))[0]


@torch.no_grad()
def their_logits(folder: Path, adapter: Path | None = None) -> Tensor:
    """Those of the model in a folder, in which an adapter is merged as PEFT's documentation says."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    if adapter is not None and PEFT:
        from peft import PeftModel

        # The suite makes warnings errors, and PEFT warns of ranks of parameters: it compares them with modules.
        with warnings.catch_warnings(action="ignore"):
            model = PeftModel.from_pretrained(model, adapter).eval()
    elif adapter is not None:
        merge_peft(model, json.loads((adapter / ADAPTER).read_text()), load_file(adapter / TENSORS))
    return model(TOKENS, use_cache=False).logits


def merge_peft(model: torch.nn.Module, options: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Reads a PEFT folder independently of the code that is tested."""

    def number(patterns: dict[str, float], module: str, default: float) -> float:
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)

    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        ends = tuple(f".{end}" for end in options["target_parameters"] or ())
        keys = [key for key in own if f".{name}.{key}".endswith(ends)]
        for depth, key in enumerate(reversed(keys)):
            place = f"base_model.model.{name}" + ".base_layer" * depth
            experts = len(own[key]) if own[key].dim() == 3 else 1
            down, up = (tensors.pop(f"{place}.lora_{letter}.weight") for letter in "AB")
            rank = number(options["rank_pattern"], f"{name}.{key}", options["r"])
            assert len(down) == up.shape[1] == rank * experts
            alpha = number(options["alpha_pattern"], f"{name}.{key}", options["lora_alpha"])
            down, up = down.reshape(experts, rank, -1), up.reshape(len(up), rank, experts)
            change = torch.einsum("ore,eri->eoi", up, down) * (alpha / (rank**0.5 if options["use_rslora"] else rank))
            own[key] += (change.mT if getattr(module, "is_transposed", False) else change).view(own[key].shape)
        if any(name == target or name.endswith(f".{target}") for target in options["target_modules"]):
            down, up = (tensors.pop(f"base_model.model.{name}.lora_{letter}.weight") for letter in "AB")
            rank = number(options["rank_pattern"], name, options["r"])
            assert down.shape[0] == up.shape[1] == rank
            alpha = number(options["alpha_pattern"], name, options["lora_alpha"])
            change = up @ down * (alpha / (rank**0.5 if options["use_rslora"] else rank))
            module.weight += change.t() if options["fan_in_fan_out"] else change
        if name in (options["modules_to_save"] or ()):
            for own, parameter in module.named_parameters():
                if (value := tensors.pop(f"base_model.model.{name}.{own}", None)) is not None:
                    parameter.copy_(value)
    assert not tensors, f"PEFT would not load {list(tensors)}"


@pytest.mark.parametrize(("family", "targets"), CASES)
def test_an_exported_adapter_moves_their_model_as_ours(
    family: str, targets: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    scale = "root" if targets == "some" else "rank"
    spec, weights = adapted(folders[family], AdapterSpec(8, 5.0, scale, TARGETS[targets]))
    export_adapter(spec, reader(spec, weights), tmp_path / "out", folders[family])
    expected, plain = our_logits(spec, weights), their_logits(folders[family])
    assert (expected - plain).abs().max() > 1e-3
    torch.testing.assert_close(their_logits(folders[family], tmp_path / "out"), expected, rtol=1e-5, atol=2e-5)
    # What was written reads back as what it was.
    again = spec_from_hf(tmp_path / "out")
    before, after = declare_parameters(spec), declare_parameters(again)
    assert before == after and again.adapter.factor == pytest.approx(spec.adapter.factor)
    values = PeftWeights(tmp_path / "out", spec_from_hf(folders[family])).values
    for name, info in before.items():
        if info.adapter:
            assert torch.equal(values[name], weights(name, info)), name


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_parameters_trained_beside_adapters_are_saved_whole(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    trained = ["*norm*", "layers.1.feed_forward.up.weight", "positions.weight"[: 20 * (family == "gpt2")] or "norm.*"]
    spec, weights = adapted(folders[family], AdapterSpec(4, targets=["*.attention.*"], trained=trained))
    names = {name for name, info in declare_parameters(spec).items() if info.trained and not info.adapter}

    def read(name: str) -> Tensor:
        value = weights(name, declare_parameters(spec)[name])
        return value + 0.1 if name in names else value

    messages = export_adapter(spec, read, tmp_path / "out", folders[family])
    assert "modules_to_save" in messages[0]
    expected = our_logits(spec, lambda name, info: read(name))
    torch.testing.assert_close(their_logits(folders[family], tmp_path / "out"), expected, rtol=1e-5, atol=2e-5)
    base = spec_from_hf(folders[family])
    found = PeftWeights(tmp_path / "out", base)
    fused = {"layers.1.feed_forward.gate.weight"} if family == "phi3" else set()
    assert set(found.adapter.trained) == names | fused
    assert all(torch.equal(found.values[name], read(name)) for name in names)


def test_what_a_peft_folder_cannot_hold_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    for adapter, said in (
        (AdapterSpec(4, trained=["*.q.weight"]), "layers.0.attention.q.weight is trained and has an adapter"),
        (AdapterSpec(4, trained=["*.q.bias"]), "layers.0.attention.q.bias is trained and has an adapter"),
        (AdapterSpec(4, trained=["embedding.weight"]), "embedding.weight is trained and tied to the head"),
    ):
        spec, weights = adapted(folders["llama"], adapter)
        with pytest.raises(ConfigError, match=said):
            export_adapter(spec, reader(spec, weights), tmp_path / "out", folders["llama"])
        assert not (tmp_path / "out").exists()


OPTIONS = [
    ("peft_type", "LOHA", "peft_type=LOHA is not supported"),
    ("task_type", "SEQ_CLS", "task_type=SEQ_CLS"),
    ("use_dora", True, "use_dora=True is not supported"),
    ("bias", "all", "bias=all"),
    ("lora_bias", True, "lora_bias=True"),
    ("init_lora_weights", "pissa", "init_lora_weights=pissa"),
    ("target_parameters", "mlp.experts.down_proj", "target_parameters is mlp.experts.down_proj instead of list"),
    ("trainable_token_indices", [3], "trainable_token_indices"),
    ("layer_replication", [[0, 1]], "layer_replication"),
    ("alora_invocation_tokens", [1, 2], "alora_invocation_tokens"),
    ("an_option_of_a_later_version", 7, "an_option_of_a_later_version=7"),
    ("r", 5, "rank 5"),
    ("r", 0, "r=0 is no rank"),
    ("r", "many", "r is many instead of int"),
    ("rank_pattern", {"q_proj": 8}, "rank 8"),
    ("alpha_pattern", {"q_proj": 50.0}, "supported: one rank and one scale for all"),
    ("alpha_pattern", {".*_proj": 50.0}, "alpha_pattern has .*_proj; supported: names of modules"),
    ("alpha_pattern", {r"^model\.layers\.\d+\..*": 50.0}, "; supported: names of modules, and what they end in"),
    ("base_model_name_or_path", "meta-llama/Llama-3.1-8B", "hf download"),
    ("base_model_name_or_path", 3, "base_model_name_or_path"),
]


@pytest.mark.parametrize(("name", "value", "said"), OPTIONS)
def test_other_options_of_peft_are_refused_by_name(
    name: str, value: Any, said: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = written(folders["llama"], tmp_path)
    change_options(folder, **{name: value})
    with pytest.raises(ConfigError, match=re.escape(said)):
        spec_from_hf(folder)


OF_PEFT = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config")),
    **dict.fromkeys(("exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform")),
    **dict.fromkeys(("lora_ga_config", "megatron_config", "monteclora_config", "target_parameters", "use_bdlora")),
    **dict.fromkeys(("trainable_token_indices", "velora_config", "revision", "modules_to_save")),
    **dict.fromkeys(("ensure_weight_tying", "lora_bias", "use_dora", "use_qalora"), False),
    **{"init_lora_weights": True, "loftq_config": {}, "megatron_core": "megatron.core", "peft_version": "0.21.2"},
    "qalora_group_size": 16,
}
"""What PEFT 0.21.2 writes of an adapter without anything special."""


def test_options_that_change_nothing_are_accepted(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = written(folders["llama"], tmp_path)
    change_options(folder, **OF_PEFT, lora_dropout=0.1)
    found = PeftWeights(folder, spec_from_hf(folders["llama"]))
    assert found.adapter.rank == 4 and "lora_dropout=0.1 is left out" in found.notes[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"), "has one of"),
        (lambda tensors: tensors.clear(), "there is no lora_A and lora_B"),
        (
            lambda tensors: tensors.update({"base_model.model.model.embed_tokens.weight": torch.ones(VOCAB, 32)}),
            "an embedding of its own",
        ),
        (lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.ones(1)}), "no such modules"),
        (lambda tensors: tensors.update({"x": torch.ones(1)}), "x: the model has no such modules"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: Any, said: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = written(folders["llama"], tmp_path)
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)
    with pytest.raises(ConfigError, match=said):
        spec_from_hf(folder)


def written(model: Path, tmp_path: Path) -> Path:
    spec, weights = adapted(model, AdapterSpec(4, 8.0))
    export_adapter(spec, reader(spec, weights), tmp_path / "out", model)
    return tmp_path / "out"


def change_options(folder: Path, **changes: Any) -> None:
    options = json.loads((folder / ADAPTER).read_text())
    (folder / ADAPTER).write_text(json.dumps({**options, **changes}))


def test_a_foreign_adapter_of_fused_projections_is_that_of_each(folders: dict[str, Path], tmp_path: Path) -> None:
    """PEFT itself gives a fused projection one A and a dense B."""
    folder = written(folders["phi3"], tmp_path)
    tensors = load_file(folder / TENSORS)
    torch.manual_seed(0)
    for name, value in tensors.items():
        shape = list(value.shape)
        shape[int("lora_B" in name)] = 4
        tensors[name] = torch.randn(shape) * 0.1
    save_file(tensors, folder / TENSORS)
    change_options(folder, rank_pattern={}, alpha_pattern={})
    saved = open_saved(str(folder))
    logits = our_logits(saved.spec, lambda name, info: saved.tensor(name))
    torch.testing.assert_close(their_logits(folders["phi3"], folder), logits, rtol=1e-5, atol=2e-5)
    assert saved.spec.adapter.rank == 4


# Runs.


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("base") / "model"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**GROUPED, "vocab_size": 257, "tie_word_embeddings": True})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(tmp_path: Path, base: Path, *more: str, name: str = "run") -> trainer.RunResult:
    return trainer.run(
        trainer.compose(
            [
                *(f"model.from_hf={base}", "data.tokenizer=bytes", "run.device=cpu", "logging.console=none"),
                *(f"run.dir={tmp_path}/{name}", f"data.cache={tmp_path}/cache", "data.sources.stdlib.limit=5"),
                *("batch.sequence_length=32", "batch.global_size=2", "run.steps=2", "lr.peak=0.01", "lr.warmup=0"),
                "lr.schedule=constant",
                *more,
            ]
        )
    )


ADAPTED = ("model.adapter.rank=4", "model.adapter.trained=[norm.weight]")


@pytest.fixture(scope="module")
def trained(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert run(folder, pretrained, *ADAPTED).code == 0
    return folder


def test_a_checkpoint_holds_what_is_trained_and_names_its_base(trained: Path, pretrained: Path) -> None:
    [path] = (trained / "run/checkpoints").glob("step-*")
    manifest = json.loads((path / "manifest.json").read_text())
    held = {name.removeprefix("model.") for name in manifest["tensors"] if name.startswith("model.")}
    spec = open_saved(str(trained / "run")).spec
    assert held == {name for name, info in declare_parameters(spec).items() if info.trained}
    assert "norm.weight" in held and "embedding.weight" not in held
    assert manifest["base"]["from_hf"] == str(pretrained.resolve()) and len(manifest["base"]["sha256"]) == 64


def test_a_run_resumes_and_refuses_another_base(trained: Path, pretrained: Path, tmp_path: Path) -> None:
    whole = run(tmp_path, pretrained, *ADAPTED, "run.steps=4", name="whole")
    base = tmp_path / "base"
    shutil.copytree(pretrained, base)
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copytree(trained / "cache", tmp_path / "cache", dirs_exist_ok=True)
    done = run(tmp_path, base, *ADAPTED, "run.steps=4")  # a copy of the base is the same base
    assert [line["loss"] for line in done.metrics] == pytest.approx([line["loss"] for line in whole.metrics], rel=1e-6)
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="belong to model.from_hf=.*whose weights have changed since"):
        run(tmp_path, base, *ADAPTED, "run.steps=6")
    with pytest.raises(ConfigError, match=r"model.adapter.rank=8 but the checkpoint has 4"):
        run(tmp_path, pretrained, "model.adapter.rank=8", "run.steps=6")
    with pytest.raises(ConfigError, match=r"model.adapter.rank=0 but the checkpoint has 4"):
        run(tmp_path, pretrained, "run.steps=6")
    with pytest.raises(ConfigError, match="whose weights have changed since"):
        open_saved(str(tmp_path / "run"))
    shutil.rmtree(base)
    with pytest.raises(ConfigError, match="which is gone"):
        open_saved(str(tmp_path / "run"))


@pytest.mark.parametrize("base", [None, [], {}, {"from_hf": 3, "sha256": ""}, {"seed": "x", "device": "cpu"}])
def test_a_checkpoint_that_does_not_name_its_base_is_refused(
    base: Any, trained: Path, pretrained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    [path] = (tmp_path / "run/checkpoints").glob("step-*")
    manifest = read_manifest(path)
    write_manifest(path, {**manifest, "base": base})
    with pytest.raises(ConfigError, match="base is .* which is not the model that adapters belong to"):
        run(tmp_path, pretrained, *ADAPTED, "run.steps=4", f"data.cache={trained}/cache")
    with pytest.raises(ConfigError, match="does not name the model"):
        open_saved(str(tmp_path / "run"))


def test_merged_and_unmerged_exports_compute_the_same(
    trained: Path, pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tokens, logits = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(2)), {}
    saved = open_saved(str(trained / "run"))
    unmerged, merged = Transformer(saved.spec), Transformer((plain := merge_adapters(saved)).spec)
    fill_parameters(unmerged, lambda name, info: saved.tensor(name))
    fill_parameters(merged, lambda name, info: plain.tensor(name))
    with torch.no_grad():
        logits = [model.eval()(tokens) for model in (unmerged, merged)]
        torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
        assert export.main([f"checkpoint={trained}/run", f"out={tmp_path}/hf", "dtype=fp32"]) == 0
        opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        torch.testing.assert_close(opened(tokens).logits, logits[0], rtol=1e-5, atol=1e-5)
        before = transformers.AutoModelForCausalLM.from_pretrained(pretrained)(tokens).logits
        assert (before - logits[0]).abs().max() > 1e-3
    assert export.main([f"checkpoint={trained}/run", f"out={tmp_path}/bf16"]) == 0
    share = re.search(r"rounding to bf16 takes ([\d.]+)% of what the adapters add", capsys.readouterr().out)
    assert share is not None and 0 < float(share[1]) < 50
    assert merge.main([f"{trained}/run", f"{tmp_path}/hf", f"{tmp_path}/average", "dtype=fp32"]) == 0
    for name, value in load_file(tmp_path / "average/model.safetensors").items():
        torch.testing.assert_close(value, load_file(tmp_path / "hf/model.safetensors")[name], rtol=1e-5, atol=1e-6)
    assert sample.main([f"checkpoint={trained}/run", "prompt=def", "tokens=3", "device=cpu"]) == 0


def test_a_run_goes_on_from_an_adapter(
    trained: Path, pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    adapter = tmp_path / "adapter"
    assert export.main([f"checkpoint={trained}/run", f"out={adapter}", "form=adapter"]) == 0
    assert "in fp32" in capsys.readouterr().out
    with safe_open(adapter / TENSORS, "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}
    frozen = ("lr.peak=1e-30", "optimizer.weight_decay=0")
    assert run(tmp_path, adapter, *frozen, name="again").code == 0
    before, after = open_saved(str(trained / "run")), open_saved(str(tmp_path / "again"))
    for name in declare_parameters(before.spec):
        torch.testing.assert_close(after.tensor(name), before.tensor(name), rtol=0, atol=1e-20, msg=name)
    assert after.base == pretrained.resolve()
    with pytest.raises(ConfigError, match="are not those of the adapter that model.from_hf names"):
        run(tmp_path, adapter, "model.adapter.rank=8", name="other")
    assert export.main([f"checkpoint={adapter}", f"out={tmp_path}/merged", "dtype=fp32"]) == 0


def test_adapters_of_drawn_weights_are_exported_merged_only(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = [
        "+config=debug",
        "run.steps=1",
        "lr.warmup=0",
        "checkpoint.at_end=true",
        f"run.dir={tmp_path}/run",
        f"data.cache={tmp_path}/cache",
    ]
    assert trainer.run(trainer.compose([*config, "run.device=cpu", "model.adapter.rank=2"])).code == 0
    assert export.main([f"checkpoint={tmp_path}/run", f"out={tmp_path}/hf", "dtype=fp32"]) == 0
    assert export.main([f"checkpoint={tmp_path}/run", f"out={tmp_path}/a", "form=adapter"]) == 2
    assert "set form=merged" in capsys.readouterr().err


def test_adapters_beside_fp8_weights_are_merged_into_these(
    pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    narrow = (*ADAPTED, "model.adapter.weights=fp8")
    whole = run(tmp_path, pretrained, *narrow, "run.steps=4", name="whole")
    assert run(tmp_path, pretrained, *narrow).code == 0
    with pytest.raises(ConfigError, match="model.adapter.weights=compute but the checkpoint has fp8"):
        run(tmp_path, pretrained, *ADAPTED, "run.steps=4")
    done = run(tmp_path, pretrained, *narrow, "run.steps=4")
    assert [line["loss"] for line in done.metrics] == pytest.approx([line["loss"] for line in whole.metrics], rel=1e-6)
    saved = open_saved(f"{tmp_path}/run")
    merged, base = merge_adapters(saved), HFWeights(pretrained, saved.spec).tensor
    for name, info in declare_parameters(merged.spec).items():
        expected = saved.tensor(name) if name == "norm.weight" else base(name).float()
        if info.role == "matrix":
            up, down = (saved.tensor(name.replace("weight", part)).float() for part in ("lora_b", "lora_a"))
            assert not torch.equal(round_rows(expected), expected)
            expected = round_rows(expected) + up @ down * saved.spec.adapter.factor
        torch.testing.assert_close(merged.tensor(name).float(), expected, rtol=1e-6, atol=1e-7)
    assert export.main([f"checkpoint={tmp_path}/run", f"out={tmp_path}/hf", "dtype=fp32"]) == 0
    assert "added to the frozen weights as fp8 rounds them" in capsys.readouterr().out
    assert export.main([f"checkpoint={tmp_path}/run", f"out={tmp_path}/adapter", "form=adapter"]) == 0
    assert "weights before that rounding" in capsys.readouterr().out
    assert sample.main([f"checkpoint={tmp_path}/run", "prompt=def", "tokens=3", "device=cpu"]) == 0
    again = run(tmp_path, tmp_path / "adapter", "model.adapter.weights=fp8", name="again")
    assert again.metrics[0]["loss"] == pytest.approx(done.metrics[-1]["loss"], rel=0.3)
    assert open_saved(f"{tmp_path}/again").spec.adapter.weights == "fp8"
    with pytest.raises(ConfigError, match="model.adapter.alpha=8.0 has no effect with model.adapter.rank=0"):
        run(tmp_path, tmp_path / "adapter", "model.adapter.alpha=8", name="other")


def test_adapters_of_experts_are_added_to_the_matrix_of_each(tmp_path: Path) -> None:
    experts = {"kind": "gated", "width": 40, "experts": {"count": 3, "top_k": 2}}
    adapter = {"rank": 8, "alpha": 4.0, "targets": ["*.experts.*"]}
    spec = tiny_spec(family="mixtral", feed_forward=experts, adapter=adapter)
    infos = declare_parameters(spec)
    values = {name: torch.randn(info.shape) for name, info in infos.items()}
    merged = merge_adapters(SavedModel(tmp_path, spec, values.__getitem__, None, None))
    for name in declare_parameters(merged.spec):
        expected = values[name]
        if ".experts." in name:
            pairs = zip(*(values[name.replace("weight", part)] for part in ("lora_b", "lora_a")))
            expected = expected + 0.5 * torch.stack([up @ down for up, down in pairs])
        torch.testing.assert_close(merged.tensor(name), expected)
    # PEFT would save the whole block of experts beside the adapter of one of its parameters.
    spec = replace(spec, adapter=replace(spec.adapter, targets=["*.experts.down"], trained=["*.experts.up.weight"]))
    with pytest.raises(ConfigError, match=r"layers.0.feed_forward.experts.up.weight is trained and has an adapter"):
        write_adapter(tmp_path, spec, values.__getitem__, tmp_path)
