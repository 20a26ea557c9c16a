"""Autoregressive generation from a trained model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.checkpointing.saved import SavedModel
from trainer.model.initial import fill
from trainer.model.transformer import Transformer

PAD = 64  # lengths are rounded up to a multiple, so that kernels are chosen and compiled for few lengths


def load_model(saved: SavedModel, device: torch.device) -> Transformer:
    """The model in fp32 on `device`, read from its checkpoint one parameter at a time."""
    with torch.device("meta"):
        model = Transformer(saved.spec)
    model.to_empty(device=device)
    fill(model, lambda name, info: saved.tensor(name))
    return model.eval()


@torch.inference_mode()
def generate_tokens(
    model: Transformer,
    tokens: list[int],
    count: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Generates up to `count` tokens after `tokens`, and ends before `stop`.

    The context is the last tokens, as many as the model's longest sequence has. There is no KV cache: every token costs
    a forward pass over the whole context, which is simple, and exact for any kind of attention."""
    generator, longest = torch.Generator().manual_seed(seed), model.spec.max_length
    device = next(model.parameters()).device
    tokens = list(tokens)
    for _ in range(count):
        context = tokens[-longest:]
        # Attention is causal: the padding behind the last token does not change its logits.
        padded = context + [0] * (min(-(-len(context) // PAD) * PAD, longest) - len(context))
        logits = model(torch.tensor([padded], device=device))[0, len(context) - 1]
        token = sample_token(logits.float().cpu(), temperature, top_k, generator)
        if token == stop:
            return
        tokens.append(token)
        yield token


def sample_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token id sampled from logits [vocab]; temperature 0 takes the most likely one."""
    if temperature == 0:
        return int(logits.argmax())
    values, ids = logits.topk(min(top_k or len(logits), len(logits)))
    return int(ids[torch.multinomial(torch.softmax(values / temperature, 0), 1, generator=generator)])
