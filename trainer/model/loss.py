"""The output projection and the cross-entropy in one step, with gradients of the logits written over the logits.

Plain autograd keeps the logits, their fp32 copy, the log-softmax and its gradient: 14 bytes for each token and vocabulary
entry. Here the logits exist once, in the compute type, and become their own gradient chunk by chunk.
"""
from __future__ import annotations

from functools import cache
from typing import Any, Callable

import torch
from torch import Tensor

IGNORE = -100


class LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of `hidden @ weight.T` against targets.

    hidden: [tokens, width]; weight: [vocab, width]; targets: int [tokens], IGNORE where there is none.
    Returns two fp32 scalars, both sums over the tokens that have a target: the objective (with z-loss), which is
    differentiable, and the cross-entropy alone. The gradients are exact, not recomputed.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, soft_cap: float, z_loss: float, chunk: int,
                compiled: bool) -> tuple[Tensor, Tensor]:
        differentiate = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        logits = hidden @ weight.t()
        step = compiled_chunk() if compiled else loss_chunk
        sums = torch.zeros(2, device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for start in range(0, logits.shape[0], chunk or logits.shape[0]):
            rows = slice(start, start + (chunk or logits.shape[0]))
            objective, entropy, gradient = step(logits[rows], targets[rows], soft_cap, z_loss)
            sums += torch.stack([objective, entropy])
            if differentiate:
                logits[rows] = gradient
        if differentiate:
            ctx.save_for_backward(hidden, weight, logits)
        objective, entropy = sums[0].clone(), sums[1].clone()
        ctx.mark_non_differentiable(entropy)
        return objective, entropy

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Any) -> tuple:
        hidden, weight, gradient = ctx.saved_tensors
        # The scalar (1 / valid tokens) is applied in fp32, or its rounding would be a factor on every gradient; and to the
        # small factor of the second product, which under fp16 then stays in range.
        to_hidden = ((gradient @ weight).to(scale.dtype) * scale).to(hidden.dtype) if ctx.needs_input_grad[0] else None
        to_weight = gradient.t() @ (hidden.to(scale.dtype) * scale).to(hidden.dtype) if ctx.needs_input_grad[1] else None
        return to_hidden, to_weight, None, None, None, None, None


def loss_chunk(logits: Tensor, targets: Tensor, soft_cap: float, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Objective, cross-entropy (sums) and the gradient of the objective with respect to `logits` [tokens, vocab]."""
    valid = targets != IGNORE
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    index = torch.where(valid, targets, 0)[:, None]
    normalizer = torch.logsumexp(scores, -1)
    entropy = torch.where(valid, normalizer - scores.gather(1, index)[:, 0], 0).sum()
    penalty = torch.where(valid, z_loss * normalizer.square(), 0).sum()
    gradient = torch.exp(scores - normalizer[:, None]) * (1 + 2 * z_loss * normalizer[:, None])
    gradient = torch.where(torch.arange(logits.shape[1], device=logits.device) == index, gradient - 1, gradient)
    if soft_cap:
        gradient = gradient * (1 - (scores / soft_cap).square())
    return entropy + penalty, entropy, torch.where(valid[:, None], gradient, 0).to(logits.dtype)


@cache
def compiled_chunk() -> Callable:
    return torch.compile(loss_chunk, dynamic=False)
