"""Losses by source of a mixture, and on more sets, are those of a plain model; settings of evaluations that are
refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.corpora import texts, write_jsonl, write_texts
from torch import Tensor

import trainer
from trainer.config import Config, ConfigError
from trainer.data.batches import BatchLoader, eval_batches, source_of
from trainer.data.corpus import open_corpus
from trainer.model.initial import initialize_model
from trainer.model.loss import IGNORE
from trainer.model.transformer import Transformer
from trainer.planning.resolve import resolve_layout

CPU = torch.device("cpu")


def settings(folder: Path, **overrides: object) -> Config:
    write_jsonl(folder / "words.jsonl", texts(200))
    write_texts(folder / "digits", [f"{number**3}\n" * 9 for number in range(200)])
    write_jsonl(folder / "apart.jsonl", texts(20, "other"))
    values = {
        "data.sources": f"{{words: {{kind: jsonl, path: {folder}/words.jsonl, weight: 2}}}}",
        "data.sources.digits": f"{{kind: text, path: {folder}/digits}}",
        "eval.sets": f"{{apart: {{kind: jsonl, path: {folder}/apart.jsonl}}}}",
        "eval.every": 2,
        "eval.sequences": 7,
        "eval.at_start": "true",
        "data.eval_fraction": 0.3,
        "data.mask_documents": "true",
        "data.tokenizer": "bytes",
        "data.cache": folder / "cache",
        "data.workers": 1,
        "model": "tiny",
        "model.width": 32,
        "model.depth": 1,
        "model.vocab_size": 257,
        "batch.sequence_length": 32,
        "batch.global_size": 6,
        "batch.micro_size": 2,
        "run.steps": 3,
        "run.dir": folder / "run",
        "run.device": "cpu",
        "lr.warmup": 1,
        "logging.console": "none",
        **overrides,
    }
    return trainer.compose(["~data.sources.stdlib", *(f"{name}={value}" for name, value in values.items())])


def losses_of(model: Transformer, batches) -> tuple[Tensor, Tensor, list[str]]:
    """Summed loss and number of targets of each sequence, and its source."""
    sums, counts, sources = [], [], []
    for batch in batches:
        logits = model(batch.tokens, documents=batch.documents)
        for scores, targets, sample in zip(logits, batch.targets, batch.ids):
            sums.append(F.cross_entropy(scores, targets, ignore_index=IGNORE, reduction="sum").detach())
            counts.append((targets != IGNORE).sum())
            sources.append(source_of(sample))
    return torch.stack(sums), torch.stack(counts), sources


def by_source(model: Transformer, batches, kind: str) -> dict[str, float]:
    sums, counts, sources = losses_of(model, batches)
    found = {kind: (sums.sum() / counts.sum()).item()}
    for name in ("digits", "words"):
        mine = torch.tensor([source == name for source in sources])
        found[f"{kind}/{name}"] = (sums[mine].sum() / counts[mine].sum()).item()
        if kind == "loss":
            found[f"targets/{name}"] = int(counts[mine].sum())
    return found


def test_losses_are_those_of_a_plain_model(tmp_path):
    config = settings(tmp_path)
    result = trainer.run(config)
    start, first, *_ = result.metrics
    evaluations = [line["step"] for line in result.metrics if "eval_loss" in line]
    assert result.code == 0 and evaluations == [0, 2, 3] and start["tokens"] == 0

    model, corpus = Transformer(config.model), open_corpus(config)
    initialize_model(model, config.model, config.run.seed, CPU)
    layout = resolve_layout(config, 1, config.model)
    loader = BatchLoader(corpus.train, layout.batch, 0, 1, seed=config.run.seed, mask_documents=True)
    expected = by_source(model, next(loader), "loss")
    loader.close()
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert first["targets/words"] + first["targets/digits"] < 6 * 32, "some targets are masked"

    held = by_source(model, eval_batches(corpus.eval, 7, 2, 0, 1, mask_documents=True), "eval_loss")
    sums, counts, _ = losses_of(model, eval_batches(corpus.sets["apart"], 7, 2, 0, 1, mask_documents=True))
    held["eval_loss/apart"] = (sums.sum() / counts.sum()).item()
    assert {name: start[name] for name in start if "eval" in name} == pytest.approx(held, rel=1e-5)


def test_one_source_has_no_losses_by_source_and_sets_do_without_held_out_documents(tmp_path):
    config = settings(tmp_path, **{"data.eval_fraction": 0, "run.steps": 2})
    config.data.sources = {"words": config.data.sources["words"]}
    lines = trainer.run(config).metrics
    assert not any("/words" in name or "/digits" in name for line in lines for name in line)
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["eval_loss"] for line in evaluations] == [None, None] and all(
        line["eval_loss/apart"] > 0 for line in evaluations
    )


@pytest.mark.parametrize(
    "overrides, problem",
    [
        ({"eval.every": 0}, "eval.sets.apart is for evaluations, and eval.every=0 makes none; set eval.every"),
        ({"eval.every": 0, "eval.sets": "{}"}, "eval.at_start=true is for evaluations, and eval.every=0 makes none"),
        ({"eval.sets": "{words: {kind: text, path: x}}"}, "eval.sets.words and data.sources.words have one name"),
        ({"eval.sets": "{more: {kind: text}}"}, "eval.sets.more.kind=text needs eval.sets.more.path"),
        ({"eval.sets": "{more: {kind: text, weight: 2}}"}, "unknown setting 'eval.sets.more.weight'"),
        ({"eval.sets": "{}", "data.eval_fraction": 0}, "0.01 would do, or name a corpus in eval.sets"),
    ],
)
def test_evaluations_that_are_refused(tmp_path, overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        settings(tmp_path, **overrides)


def test_sets_that_cannot_be_read_are_named(tmp_path):
    config = settings(tmp_path)
    config.eval.sets["apart"].path = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="eval.sets.apart.path=.*nowhere finds no file"):
        open_corpus(config)
    config = settings(tmp_path)
    (tmp_path / "apart.jsonl").write_text('{"text": "short"}\n')
    with pytest.raises(ConfigError, match="eval.sets.apart holds 6 tokens, and one sequence of"):
        open_corpus(config)
