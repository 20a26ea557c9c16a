"""A checkpoint as a transformers folder: `trainer export runs/NAME DIR [dtype=bf16]`."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.commands.grammar import DTYPES, Command, ModelOptions
from trainer.config.fields import option


@dataclass
class ExportOptions(ModelOptions):
    out: str = option(None, "new folder, which AutoModelForCausalLM and AutoTokenizer open with from_pretrained")
    dtype: str = option("bf16", "type of the exported weights", DTYPES)
    imports: list[str] = option([], "modules of your own that register the model's blocks; they are run")


def run(options: ExportOptions) -> None:
    # torch takes seconds to import, and no refusal of an option needs it.
    from trainer.checkpointing.loading import open_saved
    from trainer.config.compose import import_modules
    from trainer.hf import export_model
    from trainer.precision import products

    import_modules(options.imports)
    saved = open_saved(options.checkpoint, options.weights)
    export_model(
        saved.spec,
        saved.tensor,
        options.out,
        products.DTYPES[options.dtype],
        saved.tokenizer,
        generation=saved.generation,
        begin=saved.begin,
    )
    rounded = "" if options.dtype == "fp32" else " (dtype=fp32 keeps them as trained)"
    print(f"{options.out}: weights in {options.dtype}{rounded}")


main = Command(
    "export",
    "Writes a trained model as a folder that transformers opens.",
    "trainer export runs/demo demo-hf",
    ExportOptions,
    run,
    words=("checkpoint", "out"),
)
