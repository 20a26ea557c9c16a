"""Which experts tokens are sent to: recorded in the reference, and replayed in 16 bits.

Scores that are nearly equal are ordered otherwise in 16 bits than in fp32, and a token that goes to another expert
changes gradients by more than rounding does. With the reference's choices, what is left of the errors is rounding, and
is compared at the limits of dense models. How many choices would have differed is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.batches import MicroBatch
from trainer.model.experts import Router, replace_choices

Choices = dict[tuple[int, str, str], np.ndarray]
"""(step, layer, sample) -> the experts of each token of the sample: int16 [length, top_k]."""


def known_choices(kind: str, choices: Choices) -> Choices | None:
    """What tokens are to follow of a reference's choices in a numeric type (a key of `compare.TOLERANCES`), or None: in
    fp32 they find the same experts by themselves, and are to show it."""
    return None if kind == "fp32" or not choices else choices


class RoutingReplay:
    """Watches the routers of models in training.

    known: choices that tokens are to follow, or None, to record the models' own in `choices`. tokens, differing: how
    many tokens have chosen experts, once for each layer, and how many others than the known ones.
    """

    def __init__(self, known: Choices | None = None):
        self.known, self.choices = known, Choices()
        self.tokens = self.differing = 0
        self.problems: list[str] = []
        self._step, self._batches = 0, list[MicroBatch]()
        self._waiting: list[str] = []  # layers of the forward pass that have not chosen yet
        self._ids: list[str] = []
        self._places = torch.empty(0, dtype=torch.int64)

    def watch(self, model: nn.Module) -> None:
        """From now on follows the forward passes of a model, or of a stage."""
        model.register_forward_pre_hook(self._begin_forward)

    def begin_step(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """Before a step, also before each time that it is repeated. batches: what models are called with."""
        self._step, self._batches = step, list(batches)

    def active(self) -> AbstractContextManager[None]:
        """The context in which models train."""
        return replace_choices(self._choose)

    def _begin_forward(self, model: Any, arguments: tuple[Any, ...]) -> None:
        names = [name for name, module in model.named_modules() if isinstance(module, Router)]
        self._waiting = [name.removesuffix(".feed_forward.router") for name in names]
        if not names:
            return
        tokens = arguments[0]
        self._ids = next(one.ids for one in self._batches if one.tokens.data_ptr() == tokens.data_ptr())
        places = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
        if model.context is not None:
            places = places[:, model.context.own(tokens.shape[1], tokens.device)]
        self._places = places.flatten() if model.group is None else model.group.own(places.flatten())

    def _choose(self, chosen: Tensor) -> Tensor:
        """The experts that this rank's tokens of the next layer go to. chosen: the model's own choice, int64 [tokens,
        top_k]."""
        if not self._waiting:
            self.problems.append(f"step {self._step + 1}: experts were chosen outside of a forward pass")
            return chosen
        layer = self._waiting.pop(0)
        keys = [(self._step, layer, sample) for sample in self._ids]
        self.tokens += len(chosen)
        if self.known is None:
            rows = chosen.to("cpu", torch.int16).view(len(keys), -1, chosen.shape[1]).numpy()
            self.choices.update(zip(keys, rows))
            return chosen
        known = torch.from_numpy(np.concatenate([self.known[key] for key in keys])).to(chosen)[self._places]
        self.differing += int((known.sort(-1).values != chosen.sort(-1).values).any(-1).sum())
        return known
