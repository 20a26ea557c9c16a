"""A feed-forward block, down(relu(up(x))^2) (Primer, So et al., arXiv 2109.08668), with a threshold to play with:

    trainer train +config=debug imports=[examples.squared_relu] model.feed_forward.kind=squared_relu

Its matrices are our own `Linear`s with our axes, so every plan can cut and shard them, tensor parallelism included.
"""

from dataclasses import dataclass

from trainer import option, register
from trainer.model.layers import Block, Linear
from trainer.planning.parameters import join_tables, linear_table


@dataclass
class Settings:
    power: float = option(2.0, "exponent of the positive part", range="[1, inf)")


def parameters(settings, spec, width):
    """What the block declares, without modules: memory, FLOPs and checkpoints follow from it."""
    up = linear_table(width, spec.width, ("mlp", "embed"), spec.bias)
    return join_tables(
        [("up", up), ("down", linear_table(spec.width, width, ("embed", "mlp"), spec.bias, residual=True))]
    )


@register.feed_forward("squared_relu", Settings, parameters=parameters, tensor_parallel=True)
class SquaredRelu(Block):
    def __init__(self, settings, spec, width):
        super().__init__()
        self.power = settings.power
        self.up = Linear(width, spec.width, ("mlp", "embed"), spec.bias)
        self.down = Linear(spec.width, width, ("embed", "mlp"), spec.bias, residual=True)

    def forward(self, x):  # [tokens, width], as the result
        return self.down(self.up(x).relu() ** self.power)
