"""Predictions of what is not known before a run, the lengths of masked documents; and of quantised gradients."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from support.estimates import estimated, h200, settings, shipped

import trainer
from trainer.commands.estimate import main
from trainer.data.corpus import open_corpus
from trainer.data.lengths import documents_in, with_lengths
from trainer.observe.report import predict_run
from trainer.planning.documents import USUAL, computed_keys
from trainer.planning.estimate.step import SHORTEST
from trainer.planning.hardware import load_hardware
from trainer.planning.resolve import resolve_layout

LLAMA = {"activation__mode": "selective", "compile": True, "batch__sequence_length": 8192}
HSDP = {"parallel__shard": 8}
LLAMA |= {"batch__micro_size": 1, "batch__accumulation": 1, "parallel__zero__stage": 2}


def codecs(inner: str = "none", outer: str = "none", feedback: str = "none", **changes: object) -> dict:
    names = {"inner__codec": inner, "outer__codec": outer}
    names |= {"outer__error_feedback": feedback} if outer != "none" else {}
    return LLAMA | {f"parallel__grad_comm__{name}": value for name, value in names.items()} | changes


def of(world: int, hardware=None, **changes: object):
    return estimated(settings(shipped("llama3_8b"), **changes), world, hardware or h200())


MEASURED = {
    # bench/results/2026-11-sharding-h200-2-cores.md, NVLink, four H200: ranks that share states -> seconds by codec of
    # a hop.
    -1: {"none": 0.887, "inner": 0.874},
    2: {"none": 0.927, "inner": 0.911, "outer": 0.908},
}


@pytest.mark.parametrize("shard", MEASURED)
def test_steps_with_quantised_gradients_beside_measured_ones(shard):
    times = {name: seconds for name, seconds in MEASURED[shard].items() if name != "none"}
    plain = of(4, **codecs(), parallel__shard=shard)
    assert plain.seconds == pytest.approx(MEASURED[shard]["none"], rel=0.03)
    for hop, seconds in times.items():
        coded = of(4, **codecs(**{hop: "int8"}), parallel__shard=shard)
        assert coded.seconds == pytest.approx(seconds, rel=0.03)
        assert coded.seconds / plain.seconds == pytest.approx(seconds / MEASURED[shard]["none"], abs=0.02)


def test_int8_pays_on_a_slow_network_and_not_on_a_fast_one():
    """And its error feedback is in the peak."""

    def seconds(bandwidth: int, outer: str) -> float:
        return of(16, load_hardware("h200", [f"network.bandwidth={bandwidth}"]), **codecs(outer=outer), **HSDP).seconds

    assert seconds(1, "int8") < 0.9 * seconds(1, "none") and seconds(50, "int8") > 0.97 * seconds(50, "none")
    plain, kept = (of(16, **codecs(outer="int8", feedback=one), **HSDP) for one in ("none", "classic"))
    assert plain.fullest.categories["error feedback"] == 0
    assert kept.fullest.categories["error feedback"] > 10 * 2**30 and kept.memory > plain.memory


def test_band_of_documents_of_which_nothing_is_known():
    """From short ones to one a sequence; what is taken lies between, and is as if it were given."""
    changes = LLAMA | {"batch__sequence_length": 65536, "activation__mode": "full", "data__mask_documents": True}
    unknown = of(2, **changes)
    known = (SHORTEST, SHORTEST), USUAL, (65536.0, 65536.0)
    lengths = {m: of(2, **changes, data__documents__mean=m, data__documents__median=n) for m, n in known}
    assert unknown.seconds == lengths[USUAL.mean].seconds and not lengths[USUAL.mean].assumptions
    low, high = unknown.band.of(unknown.seconds)
    assert low == pytest.approx(0.94 * lengths[SHORTEST].seconds, rel=0.01)
    assert high == pytest.approx(1.06 * lengths[65536].seconds, rel=0.01)
    assert (
        unknown.band_of("matrix products") == pytest.approx((0.06, 0.06)) and unknown.band_of("attention").above > 0.5
    )
    assert ["data.documents.mean" in text for text in unknown.assumptions] == [True]


def words(tmp_path, *more: str) -> list[str]:
    corpus = [f"data.cache={tmp_path / 'cache'}", "data=text", f"data.sources.text.path={tmp_path / 'texts'}"]
    return ["+config=debug", "data.mask_documents=true", "batch.sequence_length=4096", *corpus, *more]


@pytest.fixture
def texts(tmp_path):
    """Documents of 100 and of 1,000 bytes, nine in ten of them short."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(400):
        text = chr(97 + number % 26) * (1000 if number % 10 == 0 else 100)
        (folder / f"{number:03d}.txt").write_text(text)
    return tmp_path


def test_a_corpus_at_hand_is_measured(texts):
    """An end mark each: 101 and 1,001 tokens. Nothing is prepared for it."""
    config = trainer.compose(words(texts, "data.tokenizer=bytes", "data.eval_fraction=0"))
    assert with_lengths(config) is config and not (texts / "cache").exists()
    found = documents_in(open_corpus(config).train)
    mean = 0.9 * 101 + 0.1 * 1001
    seen = (0.9 * 101**2 + 0.1 * 1001**2) / mean / 2
    assert found.mean == pytest.approx(mean, rel=0.02)
    assert 0.85 * seen < computed_keys(4096, 0, found, 1) < seen  # those that sequences end in are cut
    measured = with_lengths(config).data.documents
    assert (measured.mean, measured.median) == tuple(found)
    world = SimpleNamespace(device=torch.device("cpu"))
    at_start = predict_run(config, resolve_layout(config, 1, config.model), open_corpus(config), world, 1)
    assert at_start.config.data.documents == measured and not at_start.assumptions
    config.data.documents.mean = 7.0
    assert with_lengths(config) is config  # what is given counts


@pytest.mark.parametrize("more", [[], ["plans=all"]])
def test_lengths_without_a_meaning_are_refused(more, capsys):
    given = ["+config=debug", "data.mask_documents=true", "data.documents.mean=10", "data.documents.median=20"]
    assert main([*given, "processes=2", *more]) == 2
    assert "data.documents.median=20 must not be above data.documents.mean=10" in capsys.readouterr().err


def test_the_command_says_what_it_does_not_know(texts, capsys):
    out = texts / "all.json"
    given = words(texts, "data.tokenizer=bytes", "data.eval_fraction=0", "hardware=h200", "processes=2", f"json={out}")
    assert main(given) == 0
    assert "set data.documents.mean" in " ".join(capsys.readouterr().out.split())
    [plan] = json.loads(out.read_text())
    assert plan["not_known"] and plan["range"]["terms"]["attention"][0] < 0.7 * plan["terms"]["attention"]
    open_corpus(trainer.compose([word for word in given if word.startswith(("+", "data", "batch"))]))
    assert main(given) == 0
    assert "set data.documents.mean" not in " ".join(capsys.readouterr().out.split())
    assert json.loads(out.read_text())[0]["not_known"] == []
