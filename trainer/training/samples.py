"""Text that the model writes while it is trained (`eval.generate`)."""

from __future__ import annotations

from trainer.config import GenerateConfig
from trainer.data.tokenizer import Tokenizer
from trainer.generate.placed import PlacedModel, sharing
from trainer.generate.sampling import Sampling
from trainer.generate.text import continuations
from trainer.precision.dtypes import DTYPES
from trainer.training.state import TrainState


def placed(state: TrainState) -> PlacedModel:
    """The model in training, under its plan. Ranks that share sequences share the slots of a cache."""
    return PlacedModel(
        state.spec,
        state.runtime.stages,
        state.world.device,
        DTYPES[state.config.precision.compute],
        state.plan.tp,
        state.pipeline.schedule.placement,
        state.channels,
        state.world,
        sharing(state.world),
    )


def draw_samples(state: TrainState, settings: GenerateConfig, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Each prompt and its continuation. All ranks call it together, between steps, and none of what they train on
    changes: weights, gradients, and the state of random numbers.

    No backward pass follows that would drop the gathered parameters, so they are dropped here."""
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.seed)
    texts = continuations(placed(state), tokenizer, settings.prompts, settings.tokens, sampling, settings.stop)
    for stage in state.stages:
        state.runtime.sharding.reshard(stage)
    return list(zip(settings.prompts, texts))
