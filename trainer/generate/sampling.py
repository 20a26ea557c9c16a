"""Text from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.checkpointing.saved import SavedModel
from trainer.model.initial import fill
from trainer.model.transformer import Transformer

PAD = 64  # lengths are rounded up to a multiple, so that kernels are chosen and compiled for few lengths


def load_model(saved: SavedModel, device: torch.device) -> Transformer:
    """The model in fp32, read parameter by parameter."""
    with torch.device("meta"):
        model = Transformer(saved.spec)
    model.to_empty(device=device)
    fill(model, lambda name, info: saved.tensor(name))
    return model.eval()


@torch.inference_mode()
def continuation(
    model: Transformer,
    tokens: list[int],
    count: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Up to `count` tokens that follow `tokens`, ending before `stop`.

    Beyond the model's longest sequence the oldest tokens are forgotten. Every token costs a pass over the whole
    context: simple, and exact for any kind of attention.
    """
    generator, longest = torch.Generator().manual_seed(seed), model.spec.max_length
    device = next(model.parameters()).device
    tokens = list(tokens)
    for _ in range(count):
        context = tokens[-longest:]
        # What stands behind the last token is invisible to it.
        padded = context + [0] * (min(-(-len(context) // PAD) * PAD, longest) - len(context))
        logits = model(torch.tensor([padded], device=device))[0, len(context) - 1]
        token = choose(logits.float().cpu(), temperature, top_k, generator)
        if token == stop:
            return
        tokens.append(token)
        yield token


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token id drawn from logits [vocab]."""
    if temperature == 0:
        return int(logits.argmax())
    values, ids = logits.topk(min(top_k or len(logits), len(logits)))
    return int(ids[torch.multinomial(torch.softmax(values / temperature, 0), 1, generator=generator)])
