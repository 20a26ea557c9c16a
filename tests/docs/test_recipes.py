"""The recipes for pre-training: legal and within memory on the GPUs that docs/recipes.md names, without a GPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import trainer
from trainer.config import ConfigError
from trainer.config.fields import CONFIGS
from trainer.planning import neighbours
from trainer.planning.resolve import check_config, compose

ROOT = Path(__file__).parents[2]
NAMED = {
    match[0]: (match[1], int(match[2]))
    for path in CONFIGS.glob("config/*.yaml")
    if (match := re.fullmatch(r".+_([a-z]\d+)x(\d+)", path.stem))
}


@pytest.fixture(scope="module")
def generate():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generate
    finally:
        del sys.path[0]
    return generate


def test_each_fits_the_gpus_that_it_is_named_for(generate):
    """Legality is checked on the way; `yes` leaves the band of the prediction free."""
    first = {name: next(iter(kinds.items())) for name, kinds in generate.RECEIPTS.items()}
    assert {name: (kind, counts[0]) for name, (kind, counts) in first.items()} == NAMED
    found = generate.predicted()
    assert len(found) >= 20 and {one.fits for one in found.values()} == {"yes"}
    assert {one.layout.batch.tokens for (name, _, _), one in found.items() if "llama3_" in name} == {2**22}


def test_the_recipe_that_copies_runs_in_fp8_too_and_on_one_process():
    """As the table of measurements has it, and as a laptop does; across nodes it is refused."""
    for world, node, words in ((2, 2, ["precision=fp8"]), (1, 1, []), (16, 8, [])):
        config = neighbours.compose_variant(["+config=llama3_8b_h200x2", *words], None, world, corpus=False)
        problems = check_config(config, world, node)
        assert bool(problems) == (world > node) and all("collectives=nccl" in one for one in problems), problems


def test_the_recipe_whose_products_copy_runs_in_fp8_too_and_over_nodes():
    """Tensor-parallel ranks are neighbours within a node."""
    for world, node, words in ((2, 2, ["precision=fp8"]), (16, 8, [])):
        config = neighbours.compose_variant(["+config=llama3_8b_tp2_h200x2", *words], None, world, corpus=False)
        assert config.parallel.tp_overlap == "copy_engine" and not check_config(config, world, node)


def test_what_is_called_measured_was(generate):
    for place, said in generate.MEASURED.items():
        (page,) = re.findall(r"]\(([\w./-]+\.md)#", said)
        assert place in generate.predicted() and f"**{said.split()[0]}**" in (ROOT / "docs" / page).read_text()


def test_a_corpus_has_to_be_given():
    with pytest.raises(ConfigError) as refusal:
        compose(["+config=llama3_8b_h100x8"], world_size=8)
    assert refusal.value.problems == [
        f"data.{name} has no value; set data.{name}=VALUE" for name in ("sources.tokens.path", "tokenizer")
    ]
    given = ["data.sources.tokens.path=a/*.bin", "data.tokenizer=b"]
    assert compose(["+config=llama3_8b_h100x8", *given], world_size=8).batch.global_tokens == 2**22
    text = ["data=parquet", "data.sources.parquet.path=a", "data.tokenizer=b"]
    assert list(compose(["+config=llama3_8b_h100x8", *text], world_size=8).data.sources) == ["parquet"]


def test_what_all_have_in_common_trains(tmp_path):
    """Two steps of a tiny model, with an evaluation and a checkpoint."""
    small = ["model=tiny", "model.vocab_size=257", "data=stdlib", "data.tokenizer=bytes", "compile=false"]
    small += ["batch.sequence_length=64", "batch.global_tokens=256", "run.steps=2", "lr.warmup=1", "eval.sequences=4"]
    config = trainer.compose(["+config=pretrain", *small, f"run.dir={tmp_path}", "logging=quiet"])
    result = trainer.run(config)
    assert result.code == 0 and result.metrics[-1]["eval_loss"] > 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
