"""An exponential moving average of the weights, beside them: in fp32, and sharded as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.distributed.tensors import Fragment, local_values, with_values

PREFIX = "ema."
"""Before a parameter's name, the name of its average in checkpoints."""


class WeightAverage:
    """average <- decay x average + (1 - decay) x weight after every update, beginning with the weights as they are.

    parameters: global name -> this rank's part of the fp32 parameter. A step that was skipped changes nothing."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | Fragment], decay: float):
        self.parameters, self.decay = parameters, decay
        self.values = {name: local_values(parameter).detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """After the optimizer's step. found_inf: a scalar, one where that was skipped."""
        for name, value in self.values.items():
            value.lerp_(local_values(self.parameters[name]), (1 - self.decay) * (1 - found_inf.to(value.device)))

    @torch.no_grad()
    def begin(self) -> None:
        """Begins anew with the weights as they are."""
        for name, value in self.values.items():
            value.copy_(local_values(self.parameters[name]))

    @torch.no_grad()
    def swap(self) -> None:
        """Puts the average where the weights are, and the weights where the average is."""
        for name, value in self.values.items():
            weight = local_values(self.parameters[name])
            kept = weight.clone()
            weight.copy_(value)
            value.copy_(kept)

    def tensors(self) -> dict[str, Tensor | Fragment]:
        """What a checkpoint holds of it: tensors in the layout of the parameters."""
        return {PREFIX + name: with_values(self.parameters[name], value) for name, value in self.values.items()}
