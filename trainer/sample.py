"""Text from a checkpoint: `trainer sample runs/NAME [prompt="def "] [tokens=100] [seed=0]`.

On several processes (`--gpus N`, `--processes N`), `tp` of them share each layer, `cp` share the kept keys of every
sequence, and the others share parameters."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import ConfigError, RunConfig
from trainer.config.fields import option
from trainer.config.options import WEIGHTS, run_command
from trainer.config.typed import out_of_range
from trainer.planning.checks import empty_stop
from trainer.planning.plan import near
from trainer.util.exit_codes import give_way, rank
from trainer.util.reading import read_bytes

if TYPE_CHECKING:
    from trainer.data.tokenizer import Tokenizer
    from trainer.generate.placed import PlacedModel
    from trainer.generate.sampling import Sampling

LARGEST, WORDS = 1 << 24, ("checkpoint",)
"""Bytes of a file of prompts; options that need no key."""


@dataclass
class SampleOptions:
    checkpoint: str = option(
        None, "run folder (its newest checkpoint is taken), checkpoint folder, or transformers folder"
    )
    prompt: str = option("", "text to continue; an empty one starts a new document")
    prompts: str = option("", "instead, a text file with a prompt in each line (\\n in it is a new line), all at once")
    tokens: int = option(100, "most tokens to generate of each prompt", range="[1, inf)")
    temperature: float = option(0.8, "divides the logits; 0 takes the most likely token", range="[0, inf)")
    top_k: int = option(50, "choose among this many most likely tokens; 0 means all", range="[0, inf)")
    top_p: float = option(
        1.0,
        "choose among the fewest most likely tokens whose probabilities add up to this; 1 means all",
        range="(0, 1]",
    )
    stop: list[str] = option([], "end before any of these texts (\\n in one is a new line)")
    seed: int = option(0, "seeds the choice", range="[0, inf)")
    weights: str = option("trained", "the weights as trained, or their average (optimizer.ema.decay)", WEIGHTS)
    dtype: str = option("auto", "compute type; auto is bf16 on a GPU and fp32 else", ("auto", "fp32", "bf16", "fp16"))
    tp: int = option(1, "of several processes, those that share each layer's matrices", range="[1, inf)")
    cp: int = option(
        1,
        "those that share the kept keys of each sequence, and have the same part of the model each; what is left of "
        "processes / (tp x cp) shares parameters (ZeRO-3)",
        range="[1, inf)",
    )
    device: str = option("auto", "auto takes a GPU where there is one", ("auto", "cpu", "cuda"))
    imports: list[str] = option([], "modules of your own that register the model's blocks; they are run")


def check(options: SampleOptions, processes: int = 1) -> None:
    """Raises `ConfigError` for options that nothing could be sampled with on so many processes."""
    problems = [*out_of_range(options), *empty_stop("stop", options.stop)]
    if options.prompt and options.prompts:
        problems.append(f"prompt={options.prompt} and prompts={options.prompts} exclude each other; leave one out")
    together = options.tp * options.cp
    if min(options.tp, options.cp) > 0 and processes % together:
        counts = " or ".join(map(str, near(processes, together, processes)))
        problems.append(
            f"tp={options.tp} x cp={options.cp} needs a multiple of {together} processes, but {processes} run; start "
            f"{counts} with --gpus or --processes, or set tp and cp such that tp x cp divides {processes}"
        )
    if problems:
        raise ConfigError(problems)


def read_prompts(options: SampleOptions) -> list[str]:
    """The texts to continue."""
    if not options.prompts:
        return [options.prompt]
    try:
        lines = read_bytes(Path(options.prompts).expanduser(), LARGEST).splitlines()
        prompts = [new_lines(line.decode()) for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompts={options.prompts} cannot be read ({error}); give a text file with a prompt in each line"
        ) from None
    if not prompts:
        raise ConfigError(f"prompts={options.prompts} is empty; write a prompt into each line, or use prompt=TEXT")
    return prompts


def new_lines(text: str) -> str:
    return text.replace("\\n", "\n")


def run(options: SampleOptions) -> None:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    check(options, processes)
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
    alone = not dist.is_initialized()
    model = place_saved(saved, device, dtype, options.tp, processes, options.cp)
    show(options, model, tokenizer, prompts, Sampling(options.temperature, options.top_k, options.top_p, options.seed))
    if alone and dist.is_initialized():
        dist.destroy_process_group()


def show(
    options: SampleOptions, model: PlacedModel, tokenizer: Tokenizer, prompts: list[str], sampling: Sampling
) -> None:
    """Prints each prompt and what follows it, as it comes; of several prompts, which are computed together, one behind
    the other."""
    from trainer.generate.text import generate_text, in_order
    from trainer.observe.samples import printable

    def say(text: str) -> None:
        if rank() == 0:
            print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)

    def begin(row: int) -> None:
        say(f"--- {row + 1}\n" * bool(options.prompts) + tokenizer.decode(tokenizer.encode(prompts[row])))

    stops = [new_lines(text) for text in options.stop]
    if rank() == 0:
        warn_of_length(options, model.spec.max_length, [len(tokenizer.encode(prompt)) for prompt in prompts])
    begin(0)
    with model.inference():
        pieces = generate_text(model, tokenizer, prompts, options.tokens, sampling, stops)
        for row, text, last in in_order(pieces):
            say(text + "\n" * last)
            if last and row + 1 < len(prompts):
                begin(row + 1)


def warn_of_length(options: SampleOptions, longest: int, lengths: list[int]) -> None:
    """Says where a prompt is longer than the model sees, or becomes so. lengths: tokens of each prompt."""
    if max(lengths) > longest:
        row = lengths.index(max(lengths))
        what = f"prompt {row + 1} has {lengths[row]:,} tokens"
    elif max(lengths) + options.tokens > longest:
        what = f"a prompt of {max(lengths):,} tokens and tokens={options.tokens} can grow longer"
    else:
        return
    print(
        f"the model sees {longest:,} tokens (model.max_length), and {what}: it then continues the last {longest:,}, "
        "all computed anew for each token",
        file=sys.stderr,
        flush=True,
    )


def action(options: SampleOptions) -> None:
    try:
        run(options)
    except ConfigError:
        give_way()
        raise


def refused(arguments: list[str], processes: int) -> int:
    """The exit code that so many processes would end with for their options alone, told of once."""
    return run_command(SampleOptions, lambda options: check(options, processes), "trainer.sample", arguments, WORDS)


def main(arguments: list[str] | None = None) -> int:
    return run_command(SampleOptions, action, "trainer.sample", arguments, WORDS)


if __name__ == "__main__":
    sys.exit(main())
