"""Text from a checkpoint: `trainer sample runs/NAME [prompt="def "] [tokens=100] [seed=0]`.

On several processes (`--gpus N`, `--processes N`), `tp` of them share each layer, and the others share parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.commands.grammar import Command, LaunchOptions, ModelOptions
from trainer.config import ConfigError, RunConfig
from trainer.config.fields import option


@dataclass
class SampleOptions(ModelOptions, LaunchOptions):
    prompt: str = option("", "text to continue; an empty one starts a new document")
    prompts: str = option("", "instead, a text file with a prompt in each line (\\n in it is a new line), all at once")
    chat: bool = option(
        False,
        "each prompt is a user's message, which the model's chat template writes; generation ends with the answer",
    )
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
    dtype: str = option("auto", "compute type; auto is bf16 on a GPU and fp32 else", ("auto", "fp32", "bf16", "fp16"))
    tp: int = option(
        1,
        "of several processes, those that share each layer's matrices; the rest shares parameters (ZeRO-3)",
        range="[1, inf)",
    )
    device: str = option("auto", "auto takes a GPU where there is one", ("auto", "cpu", "cuda"))
    imports: list[str] = option([], "modules of your own that register the model's blocks; they are run")

    def list_problems(self) -> Iterator[str]:
        """What nothing could be sampled with, on the processes that are to run."""
        if "" in self.stop:
            yield f"stop={self.stop}: every text begins with an empty one, so nothing would be generated; leave it out"
        if self.prompt and self.prompts:
            yield f"prompt={self.prompt} and prompts={self.prompts} exclude each other; leave one out"
        if self.chat and not (self.prompt or self.prompts):
            yield "chat=true makes a user's message of each prompt, and there is none; give prompt=TEXT or prompts=FILE"
        processes = int(os.environ.get("WORLD_SIZE", self.count()))
        if self.tp > 0 and processes % self.tp:
            from trainer.planning.plan import nearby_worlds

            counts = " or ".join(map(str, nearby_worlds(processes, self.tp, processes)))
            yield (
                f"tp={self.tp} needs a multiple of {self.tp} processes, but {processes} run; start {counts} with "
                f"--gpus or --processes, or set a tp that divides {processes}"
            )


def run(options: SampleOptions) -> None:
    # torch takes seconds to import, and `--help` needs none of it.
    import torch
    import torch.distributed as dist

    from trainer.checkpointing.loading import open_saved
    from trainer.config.compose import import_modules
    from trainer.data.tokenizer import load_tokenizer
    from trainer.distributed.mesh import local_device
    from trainer.generate.sampling import SamplingOptions
    from trainer.generate.sharded_model import place_saved
    from trainer.generate.text import print_continuations, read_prompts

    prompts = read_prompts(options.prompts) if options.prompts else [options.prompt]
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU; use device=cpu or device=auto")
    import_modules(options.imports)
    saved = open_saved(options.checkpoint, options.weights)
    if saved.tokenizer is None:
        raise ConfigError(
            f"checkpoint={options.checkpoint}: the run's folder has no tokenizer/ beside checkpoints/; restore it, or "
            "give the checkpoint in the folder of its run"
        )
    tokenizer = load_tokenizer(saved.tokenizer)
    if saved.begin is not None:
        tokenizer.begin_with(saved.begin)
    stop_ids = {*saved.generation.get("eos_token_id", [tokenizer.end_id])}
    if options.chat and tokenizer.turn_end_id is not None:
        stop_ids.add(tokenizer.turn_end_id)
    device = local_device(RunConfig(device=options.device))
    auto = "bf16" if device.type == "cuda" else "fp32"
    dtype = auto if options.dtype == "auto" else options.dtype
    alone = not dist.is_initialized()
    model = place_saved(saved, device, dtype, options.tp, int(os.environ.get("WORLD_SIZE", 1)))
    sampling = SamplingOptions(options.temperature, options.top_k, options.top_p, options.seed)
    print_continuations(
        model,
        tokenizer,
        prompts,
        options.tokens,
        sampling,
        options.stop,
        stop_ids,
        numbered=bool(options.prompts),
        chat=options.chat,
    )
    if alone and dist.is_initialized():
        dist.destroy_process_group()


main = Command(
    "sample",
    "Writes text with a trained model, from its newest checkpoint or the one that is named.",
    'trainer sample runs/demo prompt="def " tokens=50',
    SampleOptions,
    run,
    words=("checkpoint",),
    device="device=cuda",
)
