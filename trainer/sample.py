"""Text from a checkpoint: `trainer sample checkpoint=runs/NAME [prompt="def "] [tokens=100] [seed=0]`.

On several processes (`--gpus N`, `--processes N`), `tp` of them share each layer, and the others share parameters."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import ConfigError, RunConfig
from trainer.config.fields import option
from trainer.config.options import WEIGHTS, run_command
from trainer.util.exit_codes import give_way, rank
from trainer.util.reading import read_bytes

if TYPE_CHECKING:
    from trainer.data.tokenizer import Tokenizer
    from trainer.generate.placed import PlacedModel
    from trainer.generate.sampling import Sampling

LARGEST = 1 << 24
"""Bytes of a file of prompts."""


@dataclass
class SampleOptions:
    checkpoint: str = option(
        None, "run folder (its newest checkpoint is taken), checkpoint folder, or transformers folder"
    )
    prompt: str = option("", "text to continue; an empty one starts a new document")
    prompts: str = option("", "instead, a text file with a prompt in each line (\\n in it is a new line), all at once")
    tokens: int = option(100, "most tokens to generate of each prompt")
    temperature: float = option(0.8, "divides the logits; 0 takes the most likely token")
    top_k: int = option(50, "choose among this many most likely tokens; 0 means all")
    top_p: float = option(1.0, "choose among the fewest most likely tokens whose probabilities add up to this")
    stop: list[str] = option([], "end before any of these texts (\\n in one is a new line)")
    seed: int = option(0, "seeds the choice")
    weights: str = option("trained", "the weights as trained, or their average (optimizer.ema.decay)", WEIGHTS)
    dtype: str = option("auto", "compute type; auto is bf16 on a GPU and fp32 else", ("auto", "fp32", "bf16", "fp16"))
    tp: int = option(1, "of several processes, those that share each layer; what is left shares parameters (ZeRO-3)")
    device: str = option("auto", "auto takes a GPU where there is one", ("auto", "cpu", "cuda"))
    imports: list[str] = option([], "modules of your own that register the model's blocks; they are run")


def check(options: SampleOptions) -> None:
    """Raises `ConfigError` for options that nothing could be sampled with."""
    ranges = {"tokens": 1, "temperature": 0, "top_k": 0, "tp": 1}
    problems = [
        f"{name}={getattr(options, name)} must be at least {least}"
        for name, least in ranges.items()
        if not getattr(options, name) >= least
    ]
    if not 0 < options.top_p <= 1:
        problems.append(f"top_p={options.top_p} must lie in (0, 1]; 1 means all tokens")
    if options.prompt and options.prompts:
        problems.append(f"prompt={options.prompt} and prompts={options.prompts} exclude each other; leave one out")
    if problems:
        raise ConfigError(problems)


def read_prompts(options: SampleOptions) -> list[str]:
    """The texts to continue."""
    if not options.prompts:
        return [options.prompt]
    try:
        lines = read_bytes(Path(options.prompts).expanduser(), LARGEST).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompts={options.prompts} cannot be read ({error}); give a text file with a prompt in each line"
        ) from None
    if not lines:
        raise ConfigError(f"prompts={options.prompts} is empty; write a prompt into each line, or use prompt=TEXT")
    return [new_lines(line) for line in lines]


def new_lines(text: str) -> str:
    return text.replace("\\n", "\n")


def run(options: SampleOptions) -> None:
    check(options)
    prompts = read_prompts(options)
    # torch takes seconds to import, and `--help` needs none of it.
    import torch
    import torch.distributed as dist

    from trainer.checkpointing.saved import open_saved
    from trainer.config.imports import load
    from trainer.data.tokenizer import load_tokenizer
    from trainer.distributed.world import local_device
    from trainer.generate.placed import place_saved
    from trainer.generate.sampling import Sampling

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU; use device=cpu or device=auto")
    load(options.imports)
    saved = open_saved(options.checkpoint, options.weights)
    if saved.tokenizer is None:
        raise ConfigError(
            f"checkpoint={options.checkpoint}: the run's folder has no tokenizer/ beside checkpoints/; restore it, or "
            "give the checkpoint in the folder of its run"
        )
    tokenizer = load_tokenizer(saved.tokenizer)
    device = local_device(RunConfig(device=options.device))
    auto = "bf16" if device.type == "cuda" else "fp32"
    dtype = auto if options.dtype == "auto" else options.dtype
    processes, alone = int(os.environ.get("WORLD_SIZE", 1)), not dist.is_initialized()
    model = place_saved(saved, device, dtype, options.tp, processes)
    show(options, model, tokenizer, prompts, Sampling(options.temperature, options.top_k, options.top_p, options.seed))
    if alone and dist.is_initialized():
        dist.destroy_process_group()


def show(
    options: SampleOptions, model: PlacedModel, tokenizer: Tokenizer, prompts: list[str], sampling: Sampling
) -> None:
    """Prints what is generated: of one prompt as it comes, of several when all is there."""
    from trainer.generate.text import continuations, generate_text

    stops = [new_lines(text) for text in options.stop]
    say = print if rank() == 0 else lambda *_, **__: None
    if options.prompts:
        texts = continuations(model, tokenizer, prompts, options.tokens, sampling, stops)
        for number, (prompt, text) in enumerate(zip(prompts, texts), start=1):
            say(f"--- {number}", prompt + text, sep="\n", flush=True)
        return
    (prompt,) = prompts
    say(tokenizer.decode(tokenizer.encode(prompt)), end="", flush=True)
    with model.inference():
        for _, text in generate_text(model, tokenizer, prompts, options.tokens, sampling, stops):
            say(text, end="", flush=True)
    say()


def action(options: SampleOptions) -> None:
    try:
        run(options)
    except ConfigError:
        give_way()
        raise


def main(arguments: list[str] | None = None) -> int:
    return run_command(SampleOptions, action, "trainer.sample", arguments)


if __name__ == "__main__":
    sys.exit(main())
