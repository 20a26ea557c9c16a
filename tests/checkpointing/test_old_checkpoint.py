"""A checkpoint that version 0.1.0 wrote, before the rooms were laid out anew, resumes under another layout of code."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import trainer
from trainer.checkpointing.loading import read_tensors

RUN = Path(__file__).parents[1] / "fixtures" / "run_0_1_0.tar.xz"
"""Of four processes (dp2 x tp2, ZeRO-2, fp16): the checkpoint of step 2, and the metrics of four steps."""

MODEL = [
    *("model.width=16", "model.depth=2", "model.vocab_size=260", "model.feed_forward.width=32"),
    *("model.attention.heads=2", "model.attention.kv_heads=1", "batch.sequence_length=16", "batch.global_size=4"),
]


@pytest.fixture
def run(tmp_path) -> Path:
    with tarfile.open(RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_it_resumes_under_another_plan_with_the_same_numbers(run):
    before = [json.loads(line) for line in (run / "run_step2" / "metrics.jsonl").read_text().splitlines()]
    overrides = [
        "+config=debug",
        "data=text",
        f"data.sources.text.path={run}/corpus.txt",
        f"data.cache={run}/cache",
        "precision=fp16",
        "run.steps=4",
        "run.device=cpu",
        f"run.dir={run}/run_step2",
        "checkpoint.resume=auto",
        "logging.console=none",
        *MODEL,
    ]
    after = trainer.run(trainer.compose(overrides, world_size=1)).metrics
    assert [line["step"] for line in after] == [1, 2, 3, 4] and after[:2] == before[:2]
    for old, new in zip(before[2:], after[2:], strict=True):
        assert new["tokens"] == old["tokens"] and new["loss_scale"] == old["loss_scale"] == 65536
        assert new["loss"] == pytest.approx(old["loss"], abs=1e-3)
        assert new["grad_norm"] == pytest.approx(old["grad_norm"], rel=1e-2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_its_tensors_are_those_that_torch_reads(run):
    path = run / "run_step2" / "checkpoints" / "step-00000002"
    ours = read_tensors(path)
    theirs = {name: torch.zeros_like(tensor) for name, tensor in ours.items()}
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert len(ours) == 64 and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
