"""What multi-process tests train: a tiny model with all kinds of parameters, and batches of random tokens."""

from __future__ import annotations

from typing import Any

import torch

from trainer.config import Config
from trainer.config.model import ModelSpec, assign_fields
from trainer.data.batches import MicroBatch


def tiny_spec(**changes: Any) -> ModelSpec:
    """A model with all kinds of parameters whose sizes no number of ranks divides."""
    spec = ModelSpec(vocab_size=61, width=24, depth=3, max_length=32)
    spec.attention.heads, spec.attention.kv_heads, spec.attention.bias, spec.attention.qk_norm = 4, 2, True, "head"
    spec.feed_forward.width = 38
    assign_fields(spec, changes, "model")
    return spec


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """`config` with `changes` by the setting's path with two underscores for a dot."""
    for path, value in changes.items():
        target = config
        *parents, last = path.split("__")
        for parent in parents:
            target = getattr(target, parent)
        assert hasattr(target, last), path
        setattr(target, last, value)
    return config


def settings(**changes: Any) -> Config:
    """A short run; `changes` by the setting's path with two underscores for a dot.

    Adam's eps is as large as typical gradients: else its division makes steps of one size from them, which would hide a
    wrong scale and blow up the rounding of tiny ones."""
    config = Config()
    config.run.steps, config.lr.warmup, config.lr.peak, config.optimizer.clip_norm, config.optimizer.eps = (
        10,
        2,
        1e-3,
        0.5,
        1e-3,
    )
    return changed(config, changes)


def random_batch(
    step: int, sequences: int, length: int, vocab: int, documents: bool, device: str | torch.device = "cpu"
) -> MicroBatch:
    """The global batch of a step; rows have different numbers of valid targets."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab, (sequences, length), generator=generator)
    targets = torch.randint(0, vocab, (sequences, length), generator=generator)
    for row in range(sequences):
        targets[row, : row * 3 % length] = -100
    index = (torch.arange(length) // 7).expand(sequences, length).int()
    return MicroBatch(
        tokens, targets, index if documents else None, [f"random:{step * sequences + row}" for row in range(sequences)]
    ).to(device)


def rows(batch: MicroBatch, start: int, stop: int) -> MicroBatch:
    """Some sequences of a batch."""
    part = slice(start, stop)
    return MicroBatch(
        batch.tokens[part],
        batch.targets[part],
        None if batch.documents is None else batch.documents[part],
        batch.ids[part],
    )
