"""A run that goes on in another numeric type than it began with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import trainer

PRECISIONS = ("fp32", "bf16", "fp16")


def run(folder: Path, precision: str, steps: int, scale: float) -> list[dict]:
    """The metrics of a run that goes on in `folder`."""
    overrides = [
        *("+config=debug", "run.device=cpu", f"run.dir={folder}", f"run.steps={steps}", f"precision={precision}"),
        *("checkpoint.resume=auto", "checkpoint.at_end=true", "logging.console=plain", f"data.cache={folder}/../cache"),
        *("model.width=16", "model.depth=1", "model.vocab_size=260", "model.feed_forward.width=32"),
        *(
            "model.attention.heads=2",
            "model.attention.kv_heads=1",
            "batch.sequence_length=16",
            "batch.global_size=2",
            "lr.warmup=0",
        ),
        *(f"precision.loss_scale={scale}", "data.sources.stdlib.limit=5"),
    ]
    return trainer.run(trainer.compose(overrides, world_size=1)).metrics


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By precision, the folder of a run of one step, at the loss scale 1024 where it has one."""
    root = tmp_path_factory.mktemp("precisions")
    for precision in PRECISIONS:
        run(root / precision, precision, 1, 1024)
    return {precision: root / precision for precision in PRECISIONS}


@pytest.mark.parametrize("after", PRECISIONS)
@pytest.mark.parametrize("before", PRECISIONS)
def test_the_loss_scale_of_a_resumed_run(begun: dict[str, Path], before: str, after: str, tmp_path, capsys) -> None:
    """fp16 goes on with the checkpoint's scale, or begins with the configured one and says so; others have none."""
    shutil.copytree(begun[before], tmp_path / "run")
    (tmp_path / "cache").symlink_to(begun[before].parent / "cache")
    capsys.readouterr()
    _, last = run(tmp_path / "run", after, 2, 4096)
    assert last["step"] == 2 and last["grad_norm"] > 0
    assert last["loss_scale"] == {"fp16": 1024 if before == "fp16" else 4096}.get(after, 1)
    begins = "the checkpoint has no loss scale: it begins at precision.loss_scale=4096" in capsys.readouterr().out
    assert begins == (after == "fp16" != before)


def test_a_checkpoint_has_a_loss_scale_where_its_run_had_one(begun: dict[str, Path]) -> None:
    for precision, folder in begun.items():
        manifest = json.loads((folder / "checkpoints/step-00000001/manifest.json").read_text())
        assert manifest["scaler"].get("scale") == (1024 if precision == "fp16" else None)
