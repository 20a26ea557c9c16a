"""The average of several trained models: `trainer merge A B ... OUT [weights=[0.5,0.5]] [dtype=fp32]`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.commands.grammar import DTYPES, Command
from trainer.config import ConfigError, ModelSpec
from trainer.config.fields import option

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.checkpointing.loading import SavedModel

UNTRAINED_FIELDS = ("name", "init", "attention", "feed_forward", "pattern", "overrides")
"""Fields of a spec that are no part of the trained model, or that its layers have."""


@dataclass
class MergeOptions:
    models: list[str] = option(
        None, "run folders (of each its newest checkpoint is taken), checkpoint folders or transformers folders"
    )
    out: str = option(None, "new transformers folder, which sample, export, eval and model.from_hf take")
    weights: list[float] = option([], "share of each model, divided by their sum; by default all have the same")
    dtype: str = option("fp32", "type of the merged weights", DTYPES)

    def list_problems(self) -> Iterator[str]:
        count = len(self.models)
        if count < 2:
            yield f"merging takes two models or more, and a new folder; there is {count} model"
        if self.weights and len(self.weights) != count:
            yield f"weights={self.weights} has {len(self.weights)} numbers for {count} models; give one for each"
        total = math.fsum(self.weights or [1.0])
        if not math.isfinite(total) or total == 0:
            yield f"weights={self.weights} add up to {total:g}; give finite shares with another sum"


def run(options: MergeOptions) -> None:
    # torch takes seconds to import, and no refusal of an option needs it.
    from trainer.checkpointing.loading import merge_adapters, open_saved
    from trainer.hf import export_model
    from trainer.precision import products

    shares = options.weights or [1.0] * len(options.models)
    total = math.fsum(shares)
    models = [merge_adapters(open_saved(model)) for model in options.models]
    check_alike(models, options.models)

    def merged(name: str) -> Tensor:
        value = models[0].tensor(name).float() * (shares[0] / total)
        for model, share in zip(models[1:], shares[1:]):
            value.add_(model.tensor(name).float(), alpha=share / total)
        return value

    first = models[0]
    for model, name in zip(models[1:], options.models[1:]):
        if (model.generation, model.begin) != (first.generation, first.begin):
            print(
                f"{name}: its stop ids, sampling defaults or BOS are not those of {options.models[0]}, which are taken"
            )
    export_model(
        first.spec,
        merged,
        options.out,
        products.DTYPES[options.dtype],
        first.tokenizer,
        generation=first.generation,
        begin=first.begin,
    )
    print(options.out)


def check_alike(models: list[SavedModel], names: list[str]) -> None:
    """Raises `ConfigError` for models whose parameters do not mean the same."""
    first = describe_weights(models[0].spec)
    for model, name in zip(models[1:], names[1:]):
        other = describe_weights(model.spec)
        differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if differing:
            key = differing[0]
            raise ConfigError(
                f"{name} is another model than {names[0]}: {key} is {other.get(key)} against {first.get(key)}; merge "
                "models of one architecture"
            )


def describe_weights(spec: ModelSpec) -> dict[str, Any]:
    """What a spec says of parameters and of what is computed with them, however it says so."""
    from trainer.config.model import LOSS_OF_EXPERTS
    from trainer.config.typed import flatten_values

    whole = {key: value for key, value in spec.to_dict().items() if key not in UNTRAINED_FIELDS}
    layers = {str(index): dataclasses.asdict(spec.layer(index)) for index in range(spec.depth)}
    facts = flatten_values(whole | {"layers": layers})
    # transformers' own code: the type in which a file stores weights, and ids that only generation reads.
    other = (*LOSS_OF_EXPERTS, ".config.dtype", "_token_id")
    return {name: value for name, value in facts.items() if not name.endswith(other)}


main = Command(
    "merge",
    "Averages the weights of several trained models of one architecture.",
    "trainer merge runs/a runs/b merged-hf weights=[0.7,0.3]",
    MergeOptions,
    run,
    words=("models", "out"),
)
