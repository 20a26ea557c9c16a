"""A checkpoint as a transformers folder: `trainer export runs/NAME DIR [dtype=bf16]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from trainer.checkpointing.loading import open_saved
from trainer.config.compose import import_modules
from trainer.config.fields import option
from trainer.config.options import WEIGHTS, run_command
from trainer.hf import export_model
from trainer.precision.dtypes import DTYPES

WORDS = ("checkpoint", "out")
"""Options that need no key."""


@dataclass
class ExportOptions:
    checkpoint: str = option(
        None, "run folder (its newest checkpoint is taken), checkpoint folder, or transformers folder"
    )
    out: str = option(None, "new folder, which AutoModelForCausalLM and AutoTokenizer open with from_pretrained")
    dtype: str = option("bf16", "type of the exported weights", tuple(DTYPES))
    weights: str = option("trained", "the weights as trained, or their average (optimizer.ema.decay)", WEIGHTS)
    imports: list[str] = option([], "modules of your own that register the model's blocks; they are run")


def run(options: ExportOptions) -> None:
    import_modules(options.imports)
    saved = open_saved(options.checkpoint, options.weights)
    export_model(saved.spec, saved.tensor, options.out, DTYPES[options.dtype], saved.tokenizer)
    rounded = "" if options.dtype == "fp32" else " (dtype=fp32 keeps them as trained)"
    print(f"{options.out}: weights in {options.dtype}{rounded}")


def main(arguments: list[str] | None = None) -> int:
    return run_command(ExportOptions, run, "trainer.export", arguments, WORDS)


if __name__ == "__main__":
    sys.exit(main())
