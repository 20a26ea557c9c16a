"""What the files of a transformers folder hold, and what transformers reads of them: tied heads, and files beside those
that are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_families import DECODER, DEEPSEEK, GPT2, GROUPED, VOCAB, close, edit_config, their_logits, theirs
from torch import Tensor

from trainer.commands import export, merge
from trainer.config import ConfigError
from trainer.data.tokenizer import byte_tokenizer
from trainer.hf import HFWeights, spec_from_hf
from trainer.hf.families import FAMILIES
from trainer.hf.folder import copy_tokenizer
from trainer.hf.weights import INDEX, SINGLE, dequantise_mxfp4, format_names
from trainer.model.initial import fill_parameters
from trainer.model.transformer import Transformer

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(2 * 16).view(2, 16) * 7 % VOCAB


@pytest.fixture(autouse=True)
def only_files(monkeypatch) -> None:
    """Other tests compare a small model of each config.json with transformers, which takes longer than all of this."""
    monkeypatch.setattr("trainer.hf.folder.check_import", lambda *_: None)


def saved(folder: Path, family: str = "llama", tied: bool = False, seed: int = 0, **more: object) -> Path:
    options = {"gpt2": GPT2, "gpt_neox": DECODER, "deepseek_v2": DEEPSEEK, "deepseek_v3": DEEPSEEK}.get(family, GROUPED)
    model = theirs(family, {**options, "tie_word_embeddings": tied})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + seed)
    model.save_pretrained(folder, **more)
    return folder


def transformers_logits(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return their_logits(model.eval(), TOKENS)


def opened(folder: Path) -> tuple[Transformer, list[str]]:
    notes: list[str] = []
    spec = spec_from_hf(folder, notes)
    weights = HFWeights(folder, spec)
    model = Transformer(spec).eval()
    fill_parameters(model, weights)
    return model, [*notes, *weights.notes]


def our_logits(folder: Path) -> tuple[Tensor, list[str]]:
    model, notes = opened(folder)
    with torch.no_grad():
        return model(TOKENS), notes


def shard(folder: Path, tensors: dict[str, Tensor], count: int) -> dict[str, str]:
    """Writes `tensors` in so many files and an index, and returns the map of the index."""
    files = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    names = sorted(tensors)
    for number, file in enumerate(files):
        save_file({name: tensors[name] for name in names[number::count]}, folder / file, {"format": "pt"})
    return write_index(folder, {name: files[number % count] for number, name in enumerate(names)})


def write_index(folder: Path, listed: dict[str, str]) -> dict[str, str]:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return listed


STORED = ["embedding", "head", "equal", "nearly equal", "different"]
TIED = [
    (family, stored)
    for place, family in enumerate(FAMILIES)
    for number, stored in enumerate(STORED)
    if family in ("llama", "gpt2") or (number - place) % len(STORED) in (0, 2)
]
"""All files of two families, and of the others two in turn: families differ in names alone."""


@pytest.mark.parametrize("family, stored", TIED)
def test_a_tied_head_is_what_transformers_makes_of_the_files(family: str, stored: str, tmp_path: Path) -> None:
    """In one file, or in several for every other family. An export of it is the same model."""
    folder = saved(tmp_path / "in", family)
    edit_config(folder, tie_word_embeddings=True)
    names = {rule.ours[0]: f"{rule.theirs}.weight" for rule in FAMILIES[family].rules}
    tensors = load_file(folder / SINGLE)
    if stored in ("equal", "nearly equal"):
        tensors[names["head"]] = tensors[names["embedding"]].clone()
    if stored == "nearly equal":
        tensors[names["head"]][-1, -1] += 1e-6
    if stored in ("embedding", "head"):
        del tensors[names["head" if stored == "embedding" else "embedding"]]
    (folder / SINGLE).unlink()
    if list(FAMILIES).index(family) % 2:
        shard(folder, tensors, 3)
    else:
        save_file(tensors, folder / SINGLE, {"format": "pt"})

    expected = transformers_logits(folder)
    model, notes = opened(folder)
    assert close(model(TOKENS), expected)
    own = stored in ("nearly equal", "different")
    assert model.spec.tied != own
    assert own == any(names["head"] in note and "tie_word_embeddings=true" in note for note in notes)
    assert len(notes) == own
    if stored in ("embedding", "equal"):
        return
    out = tmp_path / "out"
    assert export.main([f"checkpoint={folder}", f"out={out}", "dtype=fp32"]) == 0
    assert close(transformers_logits(out), expected)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] != own


def test_merged_models_keep_heads_of_their_own(tmp_path: Path, capsys) -> None:
    folders = [saved(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    for folder in folders:
        edit_config(folder, tie_word_embeddings=True)
    assert merge.main([*map(str, folders), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err.count("tie_word_embeddings=true") == 2
    merged, *parts = (load_file(folder / SINGLE) for folder in (tmp_path / "out", *folders))
    for name, value in merged.items():
        torch.testing.assert_close(value, (parts[0][name] + parts[1][name]) / 2, msg=name)
    assert merged.keys() == parts[0].keys()


BESIDE = {
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model-00001-of-00009.safetensors",
    "model.fp16.safetensors",
    "consolidated.safetensors",
    "adapter_model.safetensors",
    "model.gguf",
    "tf_model.h5",
    "flax_model.msgpack",
    "training_args.bin",
    "original/consolidated.00.pth",
    "onnx/model.onnx",
    "checkpoint-10/model.safetensors",
}
"""Files that lie beside weights, none of which transformers reads."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[tuple[Path, Path, Tensor, Tensor]]:
    """Two models of one configuration, and their logits."""
    root = tmp_path_factory.mktemp("models")
    folders = [saved(root / str(seed), seed=seed) for seed in (0, 1)]
    return *folders, *map(transformers_logits, folders)


@settings(deadline=None, max_examples=12, database=None)
@given(beside=st.sets(st.sampled_from(sorted(BESIDE))), single=st.booleans(), shards=st.sampled_from([0, 1, 3]))
def test_the_files_that_transformers_reads_are_read_and_others_named(
    models, tmp_path_factory, beside: set[str], single: bool, shards: int
) -> None:
    """A single file of one model, shards of another, and other files."""
    first, second, *logits = models
    if not single and not shards:
        return
    folder = tmp_path_factory.mktemp("folder")
    shutil.copy(first / "config.json", folder)
    unread = set(beside)
    if single:
        shutil.copy(first / SINGLE, folder)
    if shards:
        listed = shard(folder, load_file(second / SINGLE), shards)
        unread |= {INDEX, *listed.values()} if single else set()
    for name in beside:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(second / SINGLE, folder / name)
    found, notes = our_logits(folder)
    assert torch.equal(transformers_logits(folder), logits[0 if single else 1])
    assert close(found, logits[0 if single else 1])
    assert len(notes) == bool(unread)
    byte_tokenizer().save(folder)
    copy_tokenizer(folder, exported := tmp_path_factory.mktemp("exported"), "llama")
    assert {path.name for path in exported.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    for note in notes:
        assert note.endswith(
            f"the weights are those of {SINGLE if single else INDEX}; not read: {format_names(sorted(unread))}"
        )


@settings(deadline=None, max_examples=12, database=None)
@given(data=st.data())
def test_an_index_that_contradicts_its_files_is_told(models, tmp_path_factory, data) -> None:
    """Tensors that it lists in another file, or not at all, or that no file has: read like transformers, by content."""
    first, _, logits, _ = models
    folder = tmp_path_factory.mktemp("folder")
    shutil.copy(first / "config.json", folder)
    right = shard(folder, load_file(first / SINGLE), 3)
    kept = {file: name for name, file in right.items()}.values()  # else a file would not be read at all
    moved = data.draw(st.sets(st.sampled_from(sorted({*right} - {*kept}))))
    dropped = {name for name in moved if data.draw(st.booleans())}
    invented = {"model.layers.9.mlp.up_proj.weight"} if data.draw(st.booleans()) else set()
    files = sorted({*right.values()})
    listed = {
        name: files[(files.index(file) + (name in moved)) % 3] for name, file in right.items() if name not in dropped
    }
    write_index(folder, {**listed, **dict.fromkeys(invented, files[0])})
    found, notes = our_logits(folder)
    assert close(transformers_logits(folder), logits) and close(found, logits)
    assert len(notes) == bool(moved | invented)
    for note in notes:
        assert INDEX in note and any(name in note for name in moved | invented)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(folder)
    assert all(word in str(caught.value) for word in (f"model.from_hf={folder}", *words)), caught.value


def test_a_model_can_be_described_before_its_weights_are_there(tmp_path: Path) -> None:
    """As `trainer estimate` does. Whoever reads the weights is told what is missing."""
    folder = saved(tmp_path, tied=True, max_shard_size="20KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    assert spec_from_hf(folder).tied
    refused(folder, lost.name, "it is missing")


def test_what_weights_alone_do_not_say_is_refused(tmp_path: Path) -> None:
    """By the name of the file, tensor or option."""
    folder = saved(tmp_path / "in")
    tensors, name = load_file(folder / SINGLE), "model.layers.1.mlp.up_proj.weight"
    config = (folder / "config.json").read_text()
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "remove adapter_config.json where the weights have the adapter already")
    (folder / "config.json").unlink()  # as the folder of an adapter is
    refused(folder, "adapter_config.json")
    (folder / "adapter_config.json").unlink()
    (folder / "config.json").write_text(config)
    edit_config(folder, transformers_weights="other.safetensors")
    refused(folder, "transformers_weights", "rename")
    (folder / "config.json").write_text(config)
    for kind, label in {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint8: "U8"}.items():
        save_file({**tensors, name: tensors[name].to(kind)}, folder / SINGLE)
        refused(folder, name, label, "supported: F32")
    save_file({**tensors, f"{name}_scale_inv": torch.ones(1)}, folder / SINGLE)
    refused(folder, f"{name}_scale_inv", "not part of the model")
    edit_config(folder, tie_word_embeddings=True)
    scalars = dict.fromkeys(("lm_head.weight", "model.embed_tokens.weight"), torch.tensor(1.0))
    save_file({**tensors, **{key: value.clone() for key, value in scalars.items()}}, folder / SINGLE)
    refused(folder, "lm_head.weight", "has shape []")
    (folder / SINGLE).unlink()
    listed = shard(folder, tensors, 2)
    first, last = sorted({*listed.values()})
    save_file({**load_file(folder / last), **load_file(folder / first)}, folder / last, {"format": "pt"})
    refused(folder, first, last, "is in")


# Weights in MXFP4, as GPT-OSS is published.


def their_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """What transformers makes of blocks [experts, outputs, blocks, 16]: [experts, inputs, outputs]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_mxfp4_is_what_transformers_makes_of_it(rows, count, seed):
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (2, rows, count, 16), generator=generator).byte()
    scales = torch.randint(0, 256, (2, rows, count), generator=generator).byte()
    found, wanted = dequantise_mxfp4(blocks, scales).mT, their_values(blocks, scales)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def packed(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """A folder of GPT-OSS with experts in MXFP4, its tensors, and the tensors of the same model in fp32."""
    options = {"num_local_experts": 3, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 32}
    model = theirs("gpt_oss", {**GROUPED, **options, "head_dim": 8})
    model.save_pretrained(folder)
    plain, stored = load_file(folder / SINGLE), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in plain.items():
        if name.endswith("_proj") and tensor.dim() == 3:
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).byte()
            scales = torch.randint(120, 126, (experts, outputs, inputs // 32), generator=generator).byte()
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = their_values(blocks, scales)
        else:
            stored[name] = tensor.bfloat16()
            plain[name] = stored[name].float()
    save_file(stored, folder / SINGLE, {"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder, stored, plain


def test_packed_experts_are_read_as_those_of_the_unpacked_model(tmp_path: Path) -> None:
    folder, _, plain = packed(tmp_path / "packed")
    model, notes = opened(folder)
    assert not notes
    shutil.copytree(folder, tmp_path / "plain")
    edit_config(tmp_path / "plain", quantization_config=None)
    save_file(plain, tmp_path / "plain" / SINGLE, {"format": "pt"})
    with torch.no_grad():
        assert close(model(TOKENS), transformers_logits(tmp_path / "plain"))
    for (name, one), two in zip(model.named_parameters(), opened(tmp_path / "plain")[0].parameters()):
        assert torch.equal(one, two), name


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda stored, name: stored.pop(f"{name}_scales"), ["mlp.experts.gate_up_proj_scales", "missing"]),
        (lambda stored, name: stored.update({f"{name}_scales": torch.zeros(3, 64, 1).byte()}), ["[3, 64, 2]"]),
        (lambda stored, name: stored.update({f"{name}_blocks": torch.zeros(3, 64, 2, 16)}), ["F32", "U8"]),
        (lambda stored, name: stored.update({name: torch.zeros(3, 64, 64)}), ["gate_up_proj", "not part of"]),
    ],
)
def test_damaged_packed_experts_are_refused(damage, words, tmp_path: Path) -> None:
    folder, stored, _ = packed(tmp_path / "packed")
    damage(stored, "model.layers.1.mlp.experts.gate_up_proj")
    save_file(stored, folder / SINGLE, {"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        HFWeights(folder, spec_from_hf(folder))
    assert all(word in str(caught.value) for word in words), caught.value


def test_packed_rows_of_other_lengths_are_refused(tmp_path: Path) -> None:
    folder, _, _ = packed(tmp_path)
    edit_config(folder, intermediate_size=40)
    with pytest.raises(ConfigError, match="down_proj_blocks holds blocks of 32 numbers, but .* rows of 40"):
        HFWeights(folder, spec_from_hf(folder))


@pytest.mark.parametrize("family, method", [("gpt_oss", "gptq"), ("llama", "mxfp4"), ("llama", "")])
def test_other_quantised_weights_are_refused(family, method, tmp_path: Path) -> None:
    folder = packed(tmp_path)[0] if family == "gpt_oss" else saved(tmp_path)
    edit_config(folder, quantization_config={"quant_method": method})
    with pytest.raises(ConfigError, match="quantization_config"):
        spec_from_hf(folder)
