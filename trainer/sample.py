"""Text from a checkpoint: `python -m trainer.sample checkpoint=runs/NAME [prompt="def "] [tokens=100] [seed=0]`."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config.options import run_command
from trainer.config import ConfigError
from trainer.data.tokenizer import load_tokenizer
from trainer.model.initial import fill
from trainer.config.fields import option
from trainer.model.transformer import Transformer
from trainer.checkpointing.saved import SavedModel, open_saved

PAD = 64  # lengths are rounded up to a multiple, so that kernels are chosen and compiled for few lengths


@dataclass
class SampleOptions:
    checkpoint: str = option(None, "run folder (its newest checkpoint is taken) or checkpoint folder")
    prompt: str = option("", "text to continue; an empty one starts a new document")
    tokens: int = option(100, "most tokens to generate")
    temperature: float = option(0.8, "divides the logits; 0 takes the most likely token")
    top_k: int = option(50, "choose among this many most likely tokens; 0 means all")
    seed: int = option(0, "seeds the choice")
    device: str = option("auto", "auto takes a GPU where there is one", ("auto", "cpu", "cuda"))


def load_model(saved: SavedModel, device: torch.device) -> Transformer:
    """The model in fp32, read parameter by parameter."""
    with torch.device("meta"):
        model = Transformer(saved.spec)
    model.to_empty(device=device)
    fill(model, lambda name, info: saved.tensor(name))
    return model.eval()


@torch.inference_mode()
def continuation(model: Transformer, tokens: list[int], count: int, temperature: float = 0.0, top_k: int = 0,
                 seed: int = 0, stop: int | None = None) -> Iterator[int]:
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


def run(options: SampleOptions) -> None:
    ranges = {"tokens": 1, "temperature": 0, "top_k": 0}
    problems = [f"{name}={getattr(options, name)} must be at least {least}" for name, least in ranges.items()
                if not getattr(options, name) >= least]
    if options.device == "cuda" and not torch.cuda.is_available():
        problems.append("device=cuda, but torch sees no GPU; use device=cpu or device=auto")
    if problems:
        raise ConfigError(problems)
    saved = open_saved(options.checkpoint)
    if saved.tokenizer is None:
        raise ConfigError(f"checkpoint={options.checkpoint}: the run's folder has no tokenizer/ beside checkpoints/; "
                          "restore it, or give the checkpoint in the folder of its run")
    tokenizer = load_tokenizer(saved.tokenizer)
    tokens = tokenizer.encode(options.prompt)
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    more = continuation(load_model(saved, device), tokens or [tokenizer.end_id], options.tokens, options.temperature,
                        options.top_k, options.seed, stop=tokenizer.end_id)
    print(tokenizer.decode([*tokens, *more]))


def main(arguments: list[str] | None = None) -> int:
    return run_command(SampleOptions, run, "trainer.sample", arguments)


if __name__ == "__main__":
    sys.exit(main())
