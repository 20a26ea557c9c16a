"""Generation as tests ask for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainer.generate.sampling import SamplingOptions, TokenGenerator
from trainer.generate.sharded_model import ShardedModel


def generate_tokens(
    model: ShardedModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: SamplingOptions,
    stop_ids: Collection[int] = (),
) -> list[list[int]]:
    """What follows each of `prompts`, which are not empty: up to `count` tokens, or those before one of `stop_ids`."""
    generation = TokenGenerator(model, prompts, count, sampling, stop_ids)
    with model.inference():
        for _ in generation:
            pass
    return [tokens[len(prompt) :] for tokens, prompt in zip(generation.tokens, prompts)]
