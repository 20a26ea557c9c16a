"""A run that starts from a transformers folder, and back."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import trainer
from trainer.commands import export
from trainer.config import ConfigError


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A tiny Llama with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        ["def one(): return 1\n", "import os\n"] * 20,
        trainers.BpeTrainer(
            vocab_size=290,
            special_tokens=["</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    return folder


def settings(pretrained, tmp_path, *more):
    return trainer.compose(
        [
            f"model.from_hf={pretrained}",
            "run.steps=2",
            "lr.warmup=0",
            "lr.schedule=constant",
            "run.device=cpu",
            f"run.dir={tmp_path}/run",
            f"data.cache={tmp_path}/cache",
            "data.sources.stdlib.limit=5",
            "batch.sequence_length=32",
            "batch.global_size=2",
            "logging.console=none",
            *more,
        ]
    )


def test_training_starts_from_the_weights_and_keeps_the_tokenizer(pretrained, tmp_path):
    frozen = trainer.run(settings(pretrained, tmp_path, "lr.peak=1e-30", "optimizer.weight_decay=0"))
    assert frozen.code == 0 and len(frozen.metrics) == 2
    assert export.main([f"checkpoint={tmp_path}/run", f"out={tmp_path}/out", "dtype=fp32"]) == 0
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (pretrained, tmp_path / "out")
    )
    for (name, a), b in zip(theirs.state_dict().items(), ours.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-20, msg=name)
    text = "def one(): import os"
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"]
        == AutoTokenizer.from_pretrained(pretrained)(text)["input_ids"]
    )


def test_a_head_stored_beside_a_tied_embedding_is_trained_by_itself(pretrained, tmp_path):
    """From the folder to a resumed run and its export. The log says so, and names a file that is not read."""
    folder = tmp_path / "in"
    shutil.copytree(pretrained, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    frozen = ["lr.peak=1e-30", "optimizer.weight_decay=0", "checkpoint.every=1"]
    for steps in (1, 2):
        done = trainer.run(settings(folder, tmp_path, *frozen, f"run.steps={steps}"))
        assert done.code == 0 and len(done.metrics) == steps
        log = (done.folder / "console.log").read_text()
        assert log.count("lm_head.weight is stored with other values than model.embed_tokens.weight") == steps
        assert log.count("not read: consolidated.safetensors") == steps
    assert export.main([f"checkpoint={tmp_path}/run", f"out={tmp_path}/out", "dtype=fp32"]) == 0
    exported = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in tensors.items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-20, msg=name)
    assert not AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.tie_word_embeddings


def test_a_folder_without_a_tokenizer_asks_for_one(pretrained, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((pretrained / name).read_bytes())
    with pytest.raises(ConfigError, match="data.tokenizer"):
        trainer.run(settings(bare, tmp_path))


def test_a_model_is_extended_to_longer_sequences(pretrained, tmp_path):
    """Trained at twice its length, written with the positions that it was trained with."""
    extend = "model.extend={max_length: 128, scaling: yarn, factor: 2.0, original_length: 64}"
    config = settings(pretrained, tmp_path, extend, "batch.sequence_length=128", "run.steps=1")
    assert trainer.run(config).code == 0
    assert export.main([f"checkpoint={tmp_path}/run", f"out={tmp_path}/out", "dtype=fp32"]) == 0
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).config
    assert opened.max_position_embeddings == 128
    assert {"rope_type": "yarn", "factor": 2.0}.items() <= opened.rope_parameters.items()


@pytest.mark.parametrize(
    "extend, word",
    [
        ("{scaling: yarm}", "model.extend.scaling=yarm"),
        ("{factr: 2.0}", "model.extend.factr"),
        ("{max_length: long}", "model.extend.max_length=long"),
        ("{scaling: longrope, short_factor: [1.0], long_factor: [1.0]}", "model.attention.rope.short_factor"),
        ("{factor: 0.5}", "model.extend.factor=0.5"),
    ],
)
def test_what_a_model_cannot_be_extended_with_is_refused_by_name(pretrained, tmp_path, extend, word):
    with pytest.raises(ConfigError, match=re.escape(word)):
        trainer.run(settings(pretrained, tmp_path, f"model.extend={extend}"))


def test_only_a_model_that_is_read_is_extended():
    with pytest.raises(ConfigError, match="model.extend=.*model.from_hf"):
        trainer.compose(["model.extend={factor: 2.0}"])
