"""The output projection and the cross-entropy in one step, with gradients of the logits written over the logits.

Plain autograd keeps the logits, their fp32 copy, the log-softmax and its gradient: 14 bytes for each token and
vocabulary entry. Here the logits exist once, in the compute type, and become their own gradient chunk by chunk; or,
for long sequences, those of a tile of tokens at a time. Where ranks share the vocabulary each computes its own logits,
and two numbers a token are exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.config import LossConfig
from trainer.config.registry import LOSS_TERMS
from trainer.distributed.collectives import TensorGroup
from trainer.model.compiled import compile_function
from trainer.model.tiles import split_rows
from trainer.planning.cost.parameters import head_rows
from trainer.precision.products import GEMMRole, matmul

IGNORE = -100

Term = Callable[[Tensor, Tensor], Tensor]
"""Scores [tokens, vocab] and targets [tokens] -> what is added to each token's loss [tokens]."""


@dataclass(frozen=True)
class LossSettings:
    """soft_cap: of the logits, 0 for none; z_loss: factor of the squared log-normaliser; chunk: tokens whose fp32
    logits exist at a time, 0 for all; compiled: whether chunks run compiled; tile: tokens of this rank whose logits
    exist at a time, 0 for all; terms: registered ones."""

    soft_cap: float = 0.0
    z_loss: float = 0.0
    chunk: int = 0
    compiled: bool = False
    tile: int = 0
    terms: Mapping[str, Term] = field(default_factory=dict)


def loss_terms(config: LossConfig) -> dict[str, Term]:
    """The registered terms that a configuration names, with their settings."""
    entries = {name: LOSS_TERMS[name] for name in config.terms}
    return {name: partial(entry.made, entry.chosen(config.terms)) for name, entry in entries.items()}


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: LossSettings, group: TensorGroup | None, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of `hidden @ weight.T` against targets.

    hidden: [tokens / t, width]; weight: [vocab / t, width], rows from `start` on of the whole; targets: int [tokens],
    IGNORE where there is none. Returns the objective, a differentiable fp32 scalar: the sum (with z-loss and registered
    terms) over the tokens that have a target; the cross-entropy of each token alone, fp32 [tokens], 0 where there is no
    target; both are equal on all ranks of `group`; and a vector, the sum of each term (zeros where nothing is
    differentiated). The gradients are exact, not recomputed."""
    loss = TiledCrossEntropy if settings.tile else LinearCrossEntropy
    return loss.apply(hidden, weight, targets, settings, group, start)


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`. The logits exist whole, and become their own gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        settings: LossSettings,
        group: TensorGroup | None,
        start: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = _logits(hidden, pad_vocabulary(weight), group)[0]
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        objective, entropy, added = _loss(logits, len(weight), targets, settings, group, start, wanted)
        if wanted:
            ctx.group = group
            ctx.save_for_backward(hidden, weight, logits)
        ctx.mark_non_differentiable(entropy, added)
        return objective, entropy, added

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple:
        hidden, weight, gradient = ctx.saved_tensors
        group = ctx.group
        whole = hidden if group is None else group.gather(hidden)
        # The scalar (1 / valid tokens) is applied in fp32, or its rounding would be a factor on every gradient; and to
        # the small factor of the second product, which under fp16 then stays in range.
        to_hidden = matmul(gradient, pad_vocabulary(weight), GEMMRole.INPUT_GRADIENT)
        to_hidden = (to_hidden.to(scale.dtype) * scale).to(hidden.dtype)
        if group is not None:
            whole, to_hidden = group.wait(whole), group.scatter_sum(to_hidden)
        to_weight = None
        if ctx.needs_input_grad[1]:
            whole = (whole.to(scale.dtype) * scale).to(hidden.dtype)
            to_weight = matmul(gradient, whole, GEMMRole.WEIGHT_GRADIENT)[: len(weight)]
        return to_hidden if group is None else group.wait(to_hidden), to_weight, None, None, None, None


class TiledCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`. Logits exist for a tile of this rank's tokens at a time: their gradient is multiplied
    on at once, in forward. Kept are the gradients of the hidden states, and of the weight in fp32, since that is added
    up over tiles; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        settings: LossSettings,
        group: TensorGroup | None,
        start: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, vocabulary, dtype = torch.promote_types(hidden.dtype, torch.float32), len(weight), weight.dtype
        weight = pad_vocabulary(weight)
        by_rank = targets.view(1 if group is None else group.size, -1)  # a tile's tokens are some of every rank's
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        to_hidden = torch.empty_like(hidden) if wanted else None
        to_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        objective, entropy = hidden.new_zeros((), dtype=wide), torch.empty_like(by_rank, dtype=wide)
        added = hidden.new_zeros((), dtype=wide)
        for rows in split_rows(len(hidden), settings.tile):
            logits, part = _logits(hidden[rows], weight, group)
            mine = by_rank[:, rows]
            of_tile = _loss(logits, vocabulary, mine.flatten(), settings, group, start, wanted)
            objective, added, entropy[:, rows] = objective + of_tile[0], added + of_tile[2], of_tile[1].view(mine.shape)
            if to_hidden is not None:
                gradient = matmul(logits, weight, GEMMRole.INPUT_GRADIENT)
                to_hidden[rows] = gradient if group is None else group.wait(group.scatter_sum(gradient))
            if to_weight is not None:
                to_weight += matmul(logits, part, GEMMRole.WEIGHT_GRADIENT)
        ctx.save_for_backward(to_hidden, None if to_weight is None else to_weight[:vocabulary])
        ctx.weight_dtype, ctx.tile = dtype, settings.tile
        entropy = entropy.flatten()
        ctx.mark_non_differentiable(entropy, added)
        return objective, entropy, added

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple:
        to_hidden, to_weight = ctx.saved_tensors
        result = torch.empty_like(to_hidden)
        for rows in split_rows(len(to_hidden), ctx.tile):  # in fp32, of a tile
            result[rows] = to_hidden[rows].to(scale.dtype) * scale
        to_weight = None if to_weight is None else (to_weight * scale).to(ctx.weight_dtype)
        return result, to_weight, None, None, None, None


def pad_vocabulary(weight: Tensor) -> Tensor:
    """Rows of the vocabulary with zeros behind them, up to `head_rows`. The loss sees nothing of their logits, whose
    gradient is zeros, and adds nothing to the products."""
    missing = int(head_rows(len(weight))) - len(weight)
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def _logits(hidden: Tensor, weight: Tensor, group: TensorGroup | None) -> tuple[Tensor, Tensor]:
    """Logits [tokens, rows of the weight], which is this rank's part of the head, and the hidden states of all ranks'
    tokens."""
    if group is None:
        return matmul(hidden, weight, GEMMRole.OUTPUT), hidden
    (logits,), whole = group.gather_matmul(hidden, [weight], GEMMRole.OUTPUT, keep=True)
    return logits, whole


def _loss(
    logits: Tensor,
    vocabulary: int,
    targets: Tensor,
    settings: LossSettings,
    group: TensorGroup | None,
    start: int,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Objective of the logits of `vocabulary` rows, what is behind them aside; cross-entropy of each token, and terms;
    where `wanted`, the logits become the objective's gradient, chunk by chunk."""
    statistics, to_gradient = (
        (compile_cached(loss_statistics), compile_cached(to_loss_gradient))
        if settings.compiled
        else (loss_statistics, to_loss_gradient)
    )
    chunks, index = list(split_rows(len(logits), settings.chunk or max(1, len(logits)))), targets - start
    normalizer, score = torch.cat(
        [statistics(logits[rows], vocabulary, index[rows], settings.soft_cap) for rows in chunks], 1
    ).unbind()
    if group is not None:
        parts = group.wait(group.gather(torch.stack([normalizer, score]))).view(group.size, 2, -1)
        normalizer, score = parts[:, 0].logsumexp(0), parts[:, 1].sum(0)
    valid = targets != IGNORE
    entropy = torch.where(valid, normalizer - score, 0)
    objective = entropy.sum() + settings.z_loss * torch.where(valid, normalizer, 0).square().sum()
    added = objective.new_zeros(len(settings.terms))
    for rows in chunks if wanted else ():
        chunk, terms = logits[rows], None
        if settings.terms:
            terms = term_gradients(chunk[:, :vocabulary], targets[rows], settings)
        to_gradient(chunk, vocabulary, index[rows], valid[rows], normalizer[rows], settings.soft_cap, settings.z_loss)
        if terms is not None:
            chunk[:, :vocabulary] += terms[0]
            added = added + terms[1]
    return objective + added.sum(), entropy, added


def term_gradients(logits: Tensor, targets: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """The gradient of all terms with respect to `logits` [tokens, vocab], in fp32, and the sum of each: [terms]. Tokens
    without a target do not count."""
    leaf = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
    with torch.enable_grad():
        scores = cap_logits(leaf, settings.soft_cap)
        values = [torch.where(targets != IGNORE, term(scores, targets), 0).sum() for term in settings.terms.values()]
        (gradient,) = torch.autograd.grad(sum(values[1:], values[0]), leaf)
    return gradient, torch.stack(values).detach()


def cap_logits(logits: Tensor, soft_cap: float) -> Tensor:
    """The scores of logits, in fp32 or wider."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores


def loss_statistics(logits: Tensor, vocabulary: int, index: Tensor, soft_cap: float) -> Tensor:
    """Of each token the log-normaliser over the first `vocabulary` of these logits [tokens, rows], and the score at
    `index` or 0 where that is not among them: [2, tokens]. Whole rows are read, which begin where loads of many numbers
    may."""
    scores, columns = cap_logits(logits, soft_cap), torch.arange(logits.shape[1], device=logits.device)
    here = columns == index[:, None]
    if logits.shape[1] > vocabulary:
        inside = columns < vocabulary
        scores, here = torch.where(inside, scores, -torch.inf), here & inside
    return torch.stack([torch.logsumexp(scores, -1), torch.where(here, scores, 0).sum(-1)])


def to_loss_gradient(
    logits: Tensor, vocabulary: int, index: Tensor, valid: Tensor, normalizer: Tensor, soft_cap: float, z_loss: float
) -> None:
    """Writes the gradient of the objective over the logits [tokens, rows] of its first `vocabulary` rows, and zeros
    over the others; normalizer: of the logits of all ranks."""
    scores, columns = cap_logits(logits, soft_cap), torch.arange(logits.shape[1], device=logits.device)
    gradient = torch.exp(scores - normalizer[:, None]) * (1 + 2 * z_loss * normalizer[:, None])
    gradient = torch.where(columns == index[:, None], gradient - 1, gradient)
    if soft_cap:
        gradient = gradient * (1 - (scores / soft_cap).square())
    seen = valid[:, None]
    if logits.shape[1] > vocabulary:
        seen = seen & (columns < vocabulary)
    logits.copy_(torch.where(seen, gradient, 0))


@cache
def compile_cached(function: Callable) -> Callable:
    return compile_function(function)
