"""Stages, limits and changed weights in whole runs."""

import json
import re

import pytest
from support.corpora import texts, write_jsonl

import trainer
from trainer.checkpointing.manifest import list_checkpoints, read_manifest
from trainer.config import ConfigError
from trainer.training.run import run


def compose(folder, **overrides):
    for number, name in enumerate(("a", "b")):
        if not (folder / f"{name}.jsonl").exists():
            write_jsonl(folder / f"{name}.jsonl", texts(120, f"{name}{number}"))
    values = {
        "data.sources": f"{{a: {{kind: jsonl, path: {folder}/a.jsonl}}, b: {{kind: jsonl, path: {folder}/b.jsonl}}}}",
        "eval.every": 0,
        "data.tokenizer": "bytes",
        "data.cache": folder / "cache",
        "data.workers": 1,
        "model": "tiny",
        "model.width": 16,
        "model.depth": 1,
        "model.vocab_size": 257,
        "batch.sequence_length": 16,
        "batch.global_size": 4,
        "batch.micro_size": 4,
        "run.steps": 6,
        "run.dir": folder / "run",
        "run.device": "cpu",
        "lr.warmup": 1,
        "logging.every": 1,
        "logging.console": "none",
        **overrides,
    }
    return trainer.compose(["~data.sources.stdlib", *(f"{name}={value}" for name, value in values.items())])


def drawn(folder):
    """Samples of each source in every step: its targets, of which a sequence has 16."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {
        line["step"]: tuple((line.get(f"targets/{name}") or 0) // 16 for name in ("a", "b"))
        for line in lines
        if "loss" in line
    }


def test_stages_limits_and_other_weights(tmp_path):
    stages = {"data.stages": "{late: {start: 128, weights: {b: 1}}}", "data.sources.b.max_tokens": 320}
    assert run(compose(tmp_path, **stages)).code == 0
    log = (tmp_path / "run" / "console.log").read_text()
    assert re.search("from 128 tokens +b 100.0%", log) and "epochs of the run" in log
    # 128 tokens are two steps; then b alone.
    assert drawn(tmp_path) == {1: (2, 2), 2: (2, 2), **dict.fromkeys(range(3, 7), (0, 4))}
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    manifest = read_manifest(list_checkpoints(tmp_path / "run" / "checkpoints")[6])
    assert [phase[0] for phase in manifest["mixture"]] == [0, 8]
    assert line["epochs/b"] == pytest.approx(line["epochs/a"] * 5)  # 20 samples, and 4
    # All 20 samples that b may give are used.
    with pytest.raises(
        ConfigError, match=r"max_tokens and max_epochs .* before step 7 of run.steps=8; set run.steps=6"
    ):
        run(compose(tmp_path, **stages, **{"run.steps": 8}))
    # Other weights take both sources on, and the limit of b leaves a alone from step 8 on.
    more = {"run.steps": 9, "data.sources.b.max_tokens": 352, "data.sources.b.weight": 1, "data.stages": "{}"}
    assert run(compose(tmp_path, **more)).code == 0
    assert [drawn(tmp_path)[step] for step in (6, 7, 8, 9)] == [(0, 4), (2, 2), (4, 0), (4, 0)]
    log = (tmp_path / "run" / "console.log").read_text()
    assert "the mixture changes at sample 24 to a 50.0%, b 50.0%; sources go on where they stood (a after" in log


def test_changed_content_is_refused_and_new_sources_begin(tmp_path):
    assert run(compose(tmp_path, **{"run.steps": 2})).code == 0
    renamed = f"{{a: {{kind: jsonl, path: {tmp_path}/a.jsonl}}, c: {{kind: jsonl, path: {tmp_path}/b.jsonl}}}}"
    with pytest.raises(ConfigError, match=r"data\.sources\.c \(the source b under another name\)"):
        run(compose(tmp_path, **{"data.sources": renamed, "run.steps": 4}))
    write_jsonl(tmp_path / "c.jsonl", texts(60, "third"))
    with_c = f"{{a: {{kind: jsonl, path: {tmp_path}/a.jsonl}}, c: {{kind: jsonl, path: {tmp_path}/c.jsonl}}}}"
    assert run(compose(tmp_path, **{"data.sources": with_c, "run.steps": 4})).code == 0
    assert [drawn(tmp_path)[step][0] for step in (3, 4)] == [2, 2]
    write_jsonl(tmp_path / "a.jsonl", texts(100, "changed"))
    with pytest.raises(ConfigError, match=r"the data differ from the checkpoint's in data\.sources\.a"):
        run(compose(tmp_path, **{"data.sources": with_c, "run.steps": 6}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data.stages": "{x: {start: 100, weights: {nobody: 1}}}"}, "data.stages.x.weights names nobody"),
        ({"data.stages": "{x: {start: 100, weights: {}}}"}, "data.stages.x.weights"),
        ({"data.stages": "{x: {start: 100, weights: {a: -1}}}"}, "data.stages.x.weights"),
        ({"data.stages": "{x: {start: 9, weights: {a: 1}}, y: {start: 9, weights: {b: 1}}}"}, "data.stages.y.start=9"),
        ({"data.sources.a.max_tokens": 3}, "data.sources.a.max_tokens=3 is less than one sequence"),
        ({"data.sources.a.max_epochs": 0}, "data.sources.a.max_epochs"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError) as refused:
        run(compose(tmp_path, **overrides))
    assert message in str(refused.value)
