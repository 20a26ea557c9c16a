"""A run goes on with the BOS that it began with, and so do its samples and exports; earlier versions knew none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpora import write_jsonl
from tokenizers import AddedToken, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import trainer
from trainer.checkpointing.manifest import read_manifest, write_manifest
from trainer.commands import export, merge, sample
from trainer.config import ConfigError
from trainer.data.tokenizer import byte_tokenizer

END, BOS = 256, 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer of bytes, as transformers saves it, that begins every text with BOS."""
    folder = tmp_path_factory.mktemp("tokenizer") / "its"
    backend = byte_tokenizer().backend
    backend.encode_special_tokens = False
    backend.add_special_tokens([AddedToken("<bos>", special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", BOS)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<bos>").save_pretrained(
        folder
    )
    write_jsonl(folder.parent / "a.jsonl", [f"number {i} of many" for i in range(60)])
    return folder


def train(folder: Path, tokenizer: Path, steps: int, *more: str) -> str:
    """What the start of the run in `folder` says of documents."""
    overrides = [
        "+config=debug",
        "data=jsonl",
        f"data.sources.jsonl.path={tokenizer.parent / 'a.jsonl'}",
        f"data.tokenizer={tokenizer}",
        f"data.cache={tokenizer.parent / 'cache'}",
        "data.eval_fraction=0.1",
        "data.workers=1",
        "model.vocab_size=258",
        "model.max_length=64",
        "batch.sequence_length=32",
        "checkpoint.at_end=true",
        "lr.warmup=0",
        "run.device=cpu",
        "logging.console=none",
        f"run.steps={steps}",
        f"run.dir={folder}",
    ]
    assert trainer.run(trainer.compose([*overrides, *more])).code == 0
    start = json.loads((folder / "starts.jsonl").read_text().splitlines()[-1])
    return dict(start["table"]["batch"])["documents"]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / f"checkpoints/step-{step:08d}"


def exported(folder: Path, out: Path, capsys: pytest.CaptureFixture) -> list[int]:
    """How the exported tokenizer begins a text. What `trainer sample` writes is what transformers generates from it."""
    assert export.main([str(folder), str(out), "dtype=fp32"]) == 0
    its, model = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out).eval()
    capsys.readouterr()
    assert sample.main([str(folder), "prompt=number", "tokens=12", "temperature=0", "dtype=fp32", "device=cpu"]) == 0
    encoded = its("number", return_tensors="pt")
    with torch.no_grad():
        found = model.generate(**encoded, do_sample=False, max_new_tokens=12)[0].tolist()
    assert capsys.readouterr().out == its.decode([token for token in found if token < END]) + "\n"
    return its("").input_ids


def make_old(folder: Path, tokenizer: Path, step: int) -> None:
    """Makes of a run without BOS what an earlier version would have left: neither its checkpoint nor its tokenizer says
    how documents begin or what generation stops at."""
    content = read_manifest(checkpoint(folder, step))
    del content["generation"]
    assert "data.bos" not in content["data"]
    write_manifest(checkpoint(folder, step), content)
    shutil.rmtree(folder / "tokenizer")
    shutil.copytree(tokenizer, folder / "tokenizer")
    lines = [line for line in (folder / "config.yaml").read_text().splitlines() if "  bos:" not in line]
    (folder / "config.yaml").write_text("\n".join(lines) + "\n")


def test_a_run_with_bos_has_it_in_samples_exports_and_when_it_goes_on(tmp_path, tokenizer, capsys) -> None:
    run = tmp_path / "run"
    assert train(run, tokenizer, 2) == "<bos> text <|endoftext|>"
    assert read_manifest(checkpoint(run, 2))["data"]["data.bos"] == [BOS]
    assert exported(run, tmp_path / "out", capsys) == [BOS]
    with pytest.raises(ConfigError, match="differ from the checkpoint's in .*data.bos"):
        train(run, tokenizer, 3, "data.bos=false")
    assert train(run, tokenizer, 3) == "<bos> text <|endoftext|>"
    assert merge.main([str(run), str(tmp_path / "out"), str(tmp_path / "merged")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("").input_ids == [BOS]


def test_a_run_of_an_earlier_version_goes_on_without_bos(tmp_path, tokenizer, capsys) -> None:
    """Twice, and as the start of another run; a new run has it. Samples and exports are those of its training."""
    old = tmp_path / "old"
    without = "text <|endoftext|> (as the run has begun; the tokenizer itself begins with <bos>)"
    train(old, tokenizer, 2, "data.bos=false")
    make_old(old, tokenizer, 2)
    assert exported(old, tmp_path / "first", capsys) == []
    assert AutoTokenizer.from_pretrained(old / "tokenizer")("").input_ids == [BOS]  # nothing of the run has changed
    for steps in (3, 4):
        assert train(old, tokenizer, steps) == without
    assert exported(old, tmp_path / "second", capsys) == []
    for place in (str(old), str(checkpoint(old, 4))):
        assert train(tmp_path / "on", tokenizer, 5, f"checkpoint.resume={place}") == without
        shutil.rmtree(tmp_path / "on")
    with pytest.raises(ConfigError, match="data.bos"):
        train(old, tokenizer, 5, "data.bos=true")
    restarted = train(old, tokenizer, 5, "data.bos=true", "checkpoint.data=restart")
    assert restarted == train(tmp_path / "new", tokenizer, 1) == "<bos> text <|endoftext|>"
    assert train(old, tokenizer, 6) == "<bos> text <|endoftext|>"
    assert train(old, tokenizer, 1, "checkpoint.resume=none") == "<bos> text <|endoftext|>"


def test_damaged_notes_of_bos_and_stop_ids_are_refused(tmp_path, tokenizer, capsys) -> None:
    run = tmp_path / "run"
    train(run, tokenizer, 1)
    whole = read_manifest(checkpoint(run, 1))
    wrong: list[tuple[str, Any]] = [("data.bos", begin) for begin in (7, [1.5], ["a"], [-1], {}, [999])]
    wrong += [("generation", generation) for generation in (7, {}, {"eos_token_id": 3}, {"eos_token_id": [-1]})]
    for name, value in wrong:
        changed = {"data": {**whole["data"], name: value}} if name == "data.bos" else {name: value}
        write_manifest(checkpoint(run, 1), whole | changed)
        capsys.readouterr()
        assert sample.main([str(run), "tokens=1", "device=cpu"]) == 2, (name, value)
        error = capsys.readouterr().err
        assert (name in error or "begin with token 999" in error) and "Traceback" not in error, error
