"""A base model is fine-tuned on conversations: its losses are transformers' own, on one process and on two."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.corpora import MARKED, chat_tokenizer, conversations, write_conversations
from support.launch import ROOT, warm_python
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import trainer
from trainer.commands import export
from trainer.observe import metrics

ROWS = conversations(30)


def command(folder: Path, name: str) -> list[str]:
    """A run of which a step reads all conversations, which are evaluated too, as a set."""
    return [
        "data=chat",
        f"data.sources.chat.path={folder / 'chat.jsonl'}",
        f"eval.sets.all={{kind: chat, path: {folder / 'chat.jsonl'}}}",
        "data.eval_fraction=0",
        "eval.every=2",
        "eval.at_start=true",
        f"model.from_hf={folder / 'base'}",
        "run.steps=4",
        "lr=constant",
        "lr.warmup=0",
        "lr.peak=0.03",
        "run.device=cpu",
        f"run.dir={folder / name}",
        f"data.cache={folder / 'cache'}",
        "data.workers=1",
        "batch.sequence_length=200",
        "batch.global_size=18",
        "batch.micro_size=3",
        "logging.console=none",
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder of the same run on one process and on two."""
    folder = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes)).save_pretrained(folder / "base")
    chat_tokenizer(folder / "base", MARKED)
    write_conversations(folder / "chat.jsonl", ROWS)
    assert trainer.run(trainer.compose(command(folder, "one"))).code == 0
    torchrun = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": warm_python()}
    subprocess.run([*torchrun, "-m", "trainer", *command(folder, "two")], env=environment, check=True)
    return folder


def plain_loss(folder: Path) -> float:
    """Of the base model on each conversation by itself, by transformers."""
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for row in ROWS:
        seen = tokenizer.apply_chat_template(
            row, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        mask = torch.as_tensor(seen["assistant_masks"]).bool().flatten()[1:]
        logits = model(seen["input_ids"]).logits[0, :-1]
        total += F.cross_entropy(logits[mask], seen["input_ids"][0, 1:][mask], reduction="sum").item()
        count += int(mask.sum())
    return total / count


def test_losses_are_those_of_each_conversation_by_itself(runs):
    before, first, *_, after = metrics.read_metrics(runs / "one")
    assert (before["step"], before["eval_loss"], first["step"]) == (0, None, 1)
    assert first["epoch"] == 1, "the step has read every conversation once"
    assert before["eval_loss/all"] == pytest.approx(plain_loss(runs / "base"), rel=1e-5)
    assert first["loss"] == pytest.approx(before["eval_loss/all"], rel=1e-6)
    assert after["eval_loss/all"] < 0.8 * before["eval_loss/all"], "it learns"


def test_two_processes_compute_the_same(runs):
    one, two = metrics.read_metrics(runs / "one"), metrics.read_metrics(runs / "two")
    assert len(one) == len(two) == 7
    for mine, theirs in zip(one, two):
        names = [name for name in ("loss", "grad_norm", "eval_loss/all", "tokens") if name in mine]
        assert [mine[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-5)


@pytest.mark.parametrize("weights", ["compute", "fp8"])
def test_adapters_go_from_conversations_to_an_export(runs: Path, weights: str) -> None:
    """By the recipe for a laptop. transformers computes with the export the loss that the run ended with."""
    more = [f"model.adapter.weights={weights}", "precision.compute=fp32", "checkpoint.at_end=true"]
    assert trainer.run(trainer.compose(["+config=lora", *command(runs, weights), *more])).code == 0
    before, *_, after = metrics.read_metrics(runs / weights)
    plain, out = plain_loss(runs / "base"), runs / f"{weights}_export"
    assert before["eval_loss/all"] == pytest.approx(plain, rel=1e-5 if weights == "compute" else 1e-2)
    assert after["eval_loss/all"] < 0.98 * plain, "it learns"
    assert export.main([str(runs / weights), str(out), "dtype=fp32"]) == 0
    assert plain_loss(out) == pytest.approx(after["eval_loss/all"], rel=1e-5)
