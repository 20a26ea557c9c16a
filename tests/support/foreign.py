"""A model that is not ours, and a block that is not: what the members of `Stage` and the table of blocks are for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.model import FeedForwardSpec, ModelSpec
from trainer.model import layers
from trainer.model.initial import DeclaredModule
from trainer.model.layers import ACTIVATIONS, FeedForward, apply_tiled
from trainer.model.stage import BlockReport, ReportedOutput, keep_here
from trainer.planning import layer as costs
from trainer.planning import parameters

GROUPS = 4


class WatchedFeedForward(FeedForward):
    """A plain feed-forward block that wants its input and its hidden units small, and counts them."""

    def __init__(self, spec: FeedForwardSpec, width: int):
        super().__init__(spec, width)
        self.reports = {"penalty": 1, "tokens": 1, "positive": GROUPS}

    def forward(self, x: Tensor) -> Any:
        """x: [tokens / t, width]; its hidden units are [tokens, width / t]."""
        hidden = ACTIVATIONS[self.activation](self.up(x))
        penalty = 0.5 * x.float().square().sum() + 2.0 * hidden.float().square().sum()
        positive = (x > 0).sum(0).view(GROUPS, -1).sum(1)
        statistics = {
            "penalty": penalty.detach()[None],
            "tokens": positive.new_full((1,), len(x)),
            "positive": positive,
        }
        return ReportedOutput(self.down(hidden), BlockReport(penalty, statistics))


def register() -> None:
    """Makes `feed_forward.kind=watched` a kind of block: a line in each table."""
    layers.FEED_FORWARD["watched"] = WatchedFeedForward
    parameters.FEED_FORWARD["watched"] = parameters.FEED_FORWARD["plain"]
    costs.INNER_OPS["watched"] = costs.INNER_OPS["plain"]


class Matrix(DeclaredModule):
    def __init__(self, rows: int, columns: int, role: str = "matrix"):
        super().__init__()
        self.declare("weight", (rows, columns), ("mine", "mine"), role)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.local("weight"))


class ForeignLayer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.into, self.out = Matrix(2 * width, width), Matrix(width, 2 * width)
        self.recompute, self.run, self.tile, self.run_tile, self.keep = None, self.run_body, 0, self.body, keep_here

    def forward(self, hidden: Tensor) -> Tensor:
        with self.keep(hidden):
            if self.tile:  # all of it treats tokens alone
                return apply_tiled(self.run_tile, lambda: list(self.parameters()), self.tile, hidden)
            return self.run(hidden)

    def run_body(self, hidden: Tensor) -> Tensor:
        return self.body(hidden) if self.recompute is None else self.recompute(self.body, hidden)

    def body(self, hidden: Tensor) -> Tensor:
        return hidden + self.out(torch.tanh(self.into(hidden)))


class ForeignModel(nn.Module):
    """Two layers that see single tokens: every member of `Stage`, and none of `Transformer`'s."""

    def __init__(self, spec: ModelSpec, part: range | None = None):
        super().__init__()
        part = range(spec.depth) if part is None else part
        self.depth, self.first, self.last = spec.depth, part.start == 0, part.stop == spec.depth
        self.group, self.context, self.rotaries, self.reports, self.z_loss = None, None, (), {}, 0.0
        if self.first:
            self.table = Matrix(spec.vocab_size, spec.width, "embedding")
        self.layers = nn.ModuleDict({str(index): ForeignLayer(spec.width) for index in part})
        if self.last:
            self.scores = Matrix(spec.vocab_size, spec.width, "head")

    def set_loss(self, z_loss: float, chunk: int, compiled: bool, tile: int = 0, terms: object = None) -> None:
        self.z_loss = z_loss

    def defer(self, deferred: Any) -> None:
        """Its weight gradients never wait."""

    def tie(self) -> None:
        """Nothing is tied."""

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Any:
        x = F.embedding(tokens.flatten(), self.table.local("weight")) if self.first else hidden
        for layer in self.layers.values():
            x = layer(x)
        if not self.last:
            return x
        logits = self.scores(x).float()
        entropy = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="none")
        normalizers = logits.logsumexp(-1)[targets.flatten() != -100]
        objective = entropy.sum() + self.z_loss * normalizers.square().sum()
        return objective, entropy.detach().view(targets.shape).sum(1)
