"""Products by copies over memory that ranks share: the usual numbers, and none without a part of the protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launch import launch


@pytest.mark.parametrize("size", [2, 3])
def test_they_equal_the_usual_ones_and_miss_waits_and_halves(tmp_path: Path, size: int) -> None:
    launch("copied.py", size, tmp_path / "out.json", forks=True)
    errors = json.loads((tmp_path / "out.json").read_text())
    assert errors.pop("nothing torch.float32") < 1e-5
    # Sums of two are rounded as gloo's, those of three once instead of twice.
    assert errors.pop("nothing torch.bfloat16") < (1e-2 if size > 2 else 5e-3)
    assert len(errors) == 4 and all(error > 0.1 for error in errors.values()), errors
