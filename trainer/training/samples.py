"""Text that the model writes while it is trained (`eval.generate`)."""

from __future__ import annotations

from trainer.config import GenerateConfig
from trainer.data.tokenizer import Tokenizer
from trainer.generate.sampling import SamplingOptions
from trainer.generate.sharded_model import ShardedModel, kv_group
from trainer.generate.text import continue_prompts
from trainer.precision.dtypes import DTYPES
from trainer.training.state import TrainState

TOP_K = 50
"""Samples during a run are chosen among so many most likely tokens, as `trainer sample` does by default."""


def sharded_model(state: TrainState) -> ShardedModel:
    """The model in training, under its plan. Ranks that share sequences share the slots of a cache."""
    return ShardedModel(
        state.spec,
        state.runtime.stages,
        state.world.device,
        DTYPES[state.config.precision.compute],
        state.plan.tp,
        state.pipeline.schedule.placement,
        state.channels,
        state.world,
        kv_group(state.world),
    )


def draw_samples(state: TrainState, settings: GenerateConfig, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Each prompt and its continuation. All ranks call it together, between steps, and none of what they train on
    changes: weights, gradients, and the state of random numbers.

    No backward pass follows that would drop the gathered parameters, so they are dropped here."""
    sampling = SamplingOptions(settings.temperature, TOP_K)
    texts = continue_prompts(sharded_model(state), tokenizer, settings.prompts, settings.tokens, sampling, [])
    for stage in state.stages:
        state.runtime.sharding.reshard(stage)
    return list(zip(settings.prompts, texts))
