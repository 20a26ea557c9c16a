"""Text from a checkpoint: `python -m trainer.sample checkpoint=runs/NAME [prompt="def "] [tokens=100] [seed=0]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from trainer.checkpointing.saved import WEIGHTS, open_saved
from trainer.config import ConfigError
from trainer.config.fields import option
from trainer.config.imports import load
from trainer.config.options import run_command
from trainer.data.tokenizer import load_tokenizer
from trainer.generate.sampling import generate_tokens, load_model


@dataclass
class SampleOptions:
    checkpoint: str = option(
        None, "run folder (its newest checkpoint is taken), checkpoint folder, or transformers folder"
    )
    prompt: str = option("", "text to continue; an empty one starts a new document")
    tokens: int = option(100, "most tokens to generate")
    temperature: float = option(0.8, "divides the logits; 0 takes the most likely token")
    top_k: int = option(50, "choose among this many most likely tokens; 0 means all")
    seed: int = option(0, "seeds the choice")
    weights: str = option("trained", "the weights as trained, or their average (optimizer.ema.decay)", WEIGHTS)
    device: str = option("auto", "auto takes a GPU where there is one", ("auto", "cpu", "cuda"))
    imports: list[str] = option([], "modules of your own that register the model's blocks; they are run")


def run(options: SampleOptions) -> None:
    ranges = {"tokens": 1, "temperature": 0, "top_k": 0}
    problems = [
        f"{name}={getattr(options, name)} must be at least {least}"
        for name, least in ranges.items()
        if not getattr(options, name) >= least
    ]
    if options.device == "cuda" and not torch.cuda.is_available():
        problems.append("device=cuda, but torch sees no GPU; use device=cpu or device=auto")
    if problems:
        raise ConfigError(problems)
    load(options.imports)
    saved = open_saved(options.checkpoint, options.weights)
    if saved.tokenizer is None:
        raise ConfigError(
            f"checkpoint={options.checkpoint}: the run's folder has no tokenizer/ beside checkpoints/; restore it, or "
            "give the checkpoint in the folder of its run"
        )
    tokenizer = load_tokenizer(saved.tokenizer)
    tokens = tokenizer.encode(options.prompt)
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    more = generate_tokens(
        load_model(saved, device),
        tokens or [tokenizer.end_id],
        options.tokens,
        options.temperature,
        options.top_k,
        options.seed,
        stop=tokenizer.end_id,
    )
    print(tokenizer.decode([*tokens, *more]))


def main(arguments: list[str] | None = None) -> int:
    return run_command(SampleOptions, run, "trainer.sample", arguments)


if __name__ == "__main__":
    sys.exit(main())
