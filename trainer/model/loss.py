"""Output projection and cross-entropy in one step, in which the gradient of the logits overwrites the logits.

Plain autograd keeps the logits, their fp32 copy, the log-softmax and its gradient: 14 bytes for each token and
vocabulary entry. Here the logits exist once, in the compute type, and become their own gradient chunk by chunk. For
long sequences only those of a tile of tokens exist at a time. Where ranks share the vocabulary, each computes its own
columns of the logits, and two numbers for each token are exchanged.
"""

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
from trainer.model.layers import split_rows
from trainer.model.stage import compile_function
from trainer.planning.parameters import head_rows
from trainer.precision.products import GEMMRole, GradientSum, matmul

IGNORE = -100

Term = Callable[[Tensor, Tensor], Tensor]
"""A registered loss term: scores [tokens, vocab] and targets [tokens] -> what is added to each token's loss
[tokens]."""


@dataclass(frozen=True)
class LossSettings:
    """soft_cap: of the logits, 0 for none. z_loss: factor of the squared log-normaliser. chunk: number of tokens whose
    fp32 logits exist at a time, 0 for all. compiled: whether chunks run compiled. tile: number of this rank's tokens
    whose logits exist at a time, 0 for all. terms: registered terms by name."""

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
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    settings: LossSettings,
    group: TensorGroup | None,
    start: int,
    gradient_sum: GradientSum | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of the logits `hidden @ weight.T` against targets.

    hidden: [tokens / t, width]. weight: [vocab / t, width], the rows from `start` on of the whole. targets: int
    [tokens], IGNORE where there is none. gradient_sum: to which backward adds the weight's gradient, unless logits are
    tiled; autograd then does not see it.

    Returns three tensors. The objective is a differentiable fp32 scalar: the sum over tokens with a target, with z-loss
    and registered terms. The cross-entropy of each token alone is fp32 [tokens], 0 where there is no target. Both are
    equal on all ranks of `group`. The third is the sum of each registered term [terms], zeros where nothing is
    differentiated. Gradients are exact and nothing is recomputed.
    """
    if settings.tile:
        return TiledCrossEntropy.apply(hidden, weight, targets, settings, group, start)
    return LinearCrossEntropy.apply(hidden, weight, targets, settings, group, start, gradient_sum)


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`. The logits of all tokens exist, and become their own gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        settings: LossSettings,
        group: TensorGroup | None,
        start: int,
        gradient_sum: GradientSum | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = _logits(hidden, pad_vocabulary(weight), group)[0]
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        objective, entropy, added = _loss(logits, len(weight), targets, settings, group, start, wanted)
        if wanted:
            ctx.group, ctx.gradient_sum = group, gradient_sum
            # `_loss` has overwritten the logits by their gradient (d objective / d logits). Backward only multiplies
            # it.
            ctx.save_for_backward(hidden, weight, logits)
        # The entropies are for reports. The gradient belongs to the objective alone.
        ctx.mark_non_differentiable(entropy, added)
        return objective, entropy, added

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple:
        hidden, weight, gradient = ctx.saved_tensors
        group = ctx.group
        # Started early: the gather overlaps with the first product, the reduce-scatter below with the second.
        whole = hidden if group is None else group.gather(hidden)
        # The scalar (loss scale / valid tokens) is applied in fp32, because its rounding would be a factor on every
        # gradient. In the second product it is applied to the hidden states, which keeps the product in fp16's range.
        to_hidden = matmul(gradient, pad_vocabulary(weight), GEMMRole.INPUT_GRADIENT)
        to_hidden = (to_hidden.to(scale.dtype) * scale).to(hidden.dtype)
        if group is not None:
            whole, to_hidden = group.wait(whole), group.scatter_sum(to_hidden)
        to_weight = None
        if ctx.needs_input_grad[1]:
            whole = (whole.to(scale.dtype) * scale).to(hidden.dtype)
            if ctx.gradient_sum is None:
                to_weight = matmul(gradient, whole, GEMMRole.WEIGHT_GRADIENT)[: len(weight)]
            else:
                ctx.gradient_sum.add(gradient[:, : len(weight)], whole)
        return to_hidden if group is None else group.wait(to_hidden), to_weight, None, None, None, None, None


class TiledCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`. The logits of one tile of this rank's tokens exist at a time. Their gradient is
    multiplied by weight and hidden states at once, in forward. Kept for backward are the gradients of the hidden
    states, and that of the weight in fp32, because it is summed over tiles. Backward only scales them."""

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
        # A tile takes the same rows of every rank's tokens, so all ranks run the same collectives.
        by_rank = targets.view(1 if group is None else group.size, -1)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        to_hidden = torch.empty_like(hidden) if wanted else None
        to_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        objective, entropy = hidden.new_zeros((), dtype=wide), torch.empty_like(by_rank, dtype=wide)
        added = hidden.new_zeros((), dtype=wide)
        for rows in split_rows(len(hidden), settings.tile):
            # With a group, logits and `part` cover these rows of all ranks: [ranks x tile, ...].
            logits, part = _logits(hidden[rows], weight, group)
            mine = by_rank[:, rows]
            terms = _loss(logits, vocabulary, mine.flatten(), settings, group, start, wanted)
            objective, added, entropy[:, rows] = objective + terms[0], added + terms[2], terms[1].view(mine.shape)
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
        for rows in split_rows(len(to_hidden), ctx.tile):  # the fp32 copy is of one tile
            result[rows] = to_hidden[rows].to(scale.dtype) * scale
        to_weight = None if to_weight is None else (to_weight * scale).to(ctx.weight_dtype)
        return result, to_weight, None, None, None, None


def pad_vocabulary(weight: Tensor) -> Tensor:
    """The weight with rows of zeros behind it, up to `head_rows`, a size at which GEMMs are fast. The loss ignores
    their logits and sets their gradient to zero, so they add nothing to the products."""
    missing = int(head_rows(len(weight))) - len(weight)
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def _logits(hidden: Tensor, weight: Tensor, group: TensorGroup | None) -> tuple[Tensor, Tensor]:
    """This rank's columns of the logits [tokens, rows of the weight], and the hidden states of all ranks' tokens."""
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
    """Objective, cross-entropy of each token and sums of the terms, for logits whose first `vocabulary` columns count.
    With `wanted`, the logits are overwritten by the objective's gradient, chunk by chunk."""
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
        # All that ranks exchange: log-normaliser and target's score over each rank's part of the vocabulary.
        # log-sum-exp joins normalisers exactly, and only one rank has a score that is not zero.
        parts = group.wait(group.gather(torch.stack([normalizer, score]))).view(group.size, 2, -1)
        normalizer, score = parts[:, 0].logsumexp(0), parts[:, 1].sum(0)
    valid = targets != IGNORE
    entropy = torch.where(valid, normalizer - score, 0)
    objective = entropy.sum() + settings.z_loss * torch.where(valid, normalizer, 0).square().sum()
    added = objective.new_zeros(len(settings.terms))
    # A second pass over the chunks, since the gradient needs the normaliser over the whole vocabulary. Terms read the
    # logits before they are overwritten.
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
    """The gradient of all terms by `logits` [tokens, vocab], in fp32, and the sum of each: [terms]. Tokens without a
    target do not count."""
    # Registered terms are arbitrary functions, so autograd differentiates them, for one chunk at a time.
    leaf = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).requires_grad_()
    with torch.enable_grad():
        scores = cap_logits(leaf, settings.soft_cap)
        values = [torch.where(targets != IGNORE, term(scores, targets), 0).sum() for term in settings.terms.values()]
        (gradient,) = torch.autograd.grad(sum(values[1:], values[0]), leaf)
    return gradient, torch.stack(values).detach()


def cap_logits(logits: Tensor, soft_cap: float) -> Tensor:
    """The scores of logits, in fp32 or wider: the logits, or with a soft cap cap * tanh(logits / cap)."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores


def loss_statistics(logits: Tensor, vocabulary: int, index: Tensor, soft_cap: float) -> Tensor:
    """For each token the log-normaliser over the first `vocabulary` of these logits [tokens, rows], and the score at
    `index`, 0 where that is not among them: [2, tokens]. Whole rows are read and masked, so that loads stay aligned."""
    scores, columns = cap_logits(logits, soft_cap), torch.arange(logits.shape[1], device=logits.device)
    here = columns == index[:, None]
    if logits.shape[1] > vocabulary:
        inside = columns < vocabulary
        scores, here = torch.where(inside, scores, -torch.inf), here & inside
    return torch.stack([torch.logsumexp(scores, -1), torch.where(here, scores, 0).sum(-1)])


def to_loss_gradient(
    logits: Tensor, vocabulary: int, index: Tensor, valid: Tensor, normalizer: Tensor, soft_cap: float, z_loss: float
) -> None:
    """Overwrites the logits [tokens, rows] by the gradient of the objective: softmax minus one-hot, plus that of the
    z-loss; zeros in columns from `vocabulary` on and for tokens without a target. normalizer: over the logits of all
    ranks."""
    scores, columns = cap_logits(logits, soft_cap), torch.arange(logits.shape[1], device=logits.device)
    # d/dx (lse - x_target + z lse^2) = softmax (1 + 2 z lse) - onehot.
    gradient = torch.exp(scores - normalizer[:, None]) * (1 + 2 * z_loss * normalizer[:, None])
    gradient = torch.where(columns == index[:, None], gradient - 1, gradient)
    if soft_cap:
        # The derivative of the soft cap, cap * tanh(x / cap).
        gradient = gradient * (1 - (scores / soft_cap).square())
    seen = valid[:, None]
    if logits.shape[1] > vocabulary:
        seen = seen & (columns < vocabulary)
    logits.copy_(torch.where(seen, gradient, 0))


@cache
def compile_cached(function: Callable) -> Callable:
    return compile_function(function)
