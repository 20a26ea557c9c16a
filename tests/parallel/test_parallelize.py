"""What is refused before a model is built."""

from __future__ import annotations

import contextlib

import pytest
import torch

import trainer
from trainer.config import ConfigError
from trainer.parallel.parallelize import check_model
from trainer.training.run import starting_point


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="meshes are not saved")
@pytest.mark.parametrize(
    "refused, recompute",
    [
        (True, ["mode=full"]),
        (True, ["mode=selective", "save=[matmul]"]),
        (False, ["mode=selective"]),
        (False, ["mode=none"]),
    ],
)
def test_compiled_recompute_of_attention_under_tensor_parallelism_on_a_cpu(refused: bool, recompute: list[str]) -> None:
    settings = ["+config=debug", "compile=true", *(f"activation.{setting}" for setting in recompute)]
    for tp, device in ((2, "cpu"), (2, "cuda"), (1, "cpu")):
        config = trainer.compose([*settings, f"parallel.tp={tp}"], world_size=tp)
        expected = contextlib.nullcontext()
        if refused and (tp, device) == (2, "cpu"):
            expected = pytest.raises(ConfigError, match=f"activation.{recompute[0]}.*parallel.tp=2.*compile=false")
        with expected:
            check_model(config, starting_point(config)[0], torch.device(device))
