"""A checkpoint as a transformers folder: `trainer export runs/NAME DIR [dtype=bf16]`."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.commands.grammar import DTYPES, Command, ModelOptions
from trainer.config import ConfigError
from trainer.config.fields import option


@dataclass
class ExportOptions(ModelOptions):
    out: str = option(None, "new folder, which AutoModelForCausalLM and AutoTokenizer open with from_pretrained")
    form: str = option(
        "merged",
        "of a model with adapters: a model that has them in its weights, or the adapter alone, as PEFT opens it",
        ("merged", "adapter"),
    )
    dtype: str = option("auto", "type of the exported weights; auto is bf16, and fp32 for adapters", ("auto", *DTYPES))
    imports: list[str] = option([], "modules of your own that register the model's blocks; they are run")


def run(options: ExportOptions) -> None:
    # torch takes seconds to import, and no refusal of an option needs it.
    from trainer.checkpointing.loading import MergedWeights, merge_adapters, open_saved
    from trainer.config.compose import import_modules
    from trainer.hf import export_adapter, export_model
    from trainer.precision import products

    import_modules(options.imports)
    saved = open_saved(options.checkpoint, options.weights)
    name = {"merged": "bf16", "adapter": "fp32"}[options.form] if options.dtype == "auto" else options.dtype
    dtype = products.DTYPES[name]
    if options.form == "adapter":
        if not saved.spec.adapter.rank:
            raise ConfigError(
                f"form=adapter: {options.checkpoint} has no adapters; leave form out, which exports the model"
            )
        if saved.base is None:
            raise ConfigError(
                f"form=adapter: the adapters of {options.checkpoint} were trained on weights that the run drew, which "
                "no folder holds; set form=merged"
            )
        messages = export_adapter(
            saved.spec, saved.tensor, options.out, saved.base, dtype, saved.tokenizer, saved.begin
        )
        print(f"{options.out}: adapters of {saved.base} in {name}", *messages, sep="\n")
        if saved.spec.adapter.weights == "fp8":
            print("they were trained beside weights in fp8, and the folder belongs to the weights before that rounding")
        return
    model = merge_adapters(saved, dtype)
    export_model(
        model.spec, model.tensor, options.out, dtype, saved.tokenizer, generation=saved.generation, begin=saved.begin
    )
    rounded = "" if name == "fp32" else " (dtype=fp32 keeps them as trained)"
    print(f"{options.out}: weights in {name}{rounded}")
    if saved.spec.adapter.weights == "fp8":
        print("the adapters are added to the frozen weights as fp8 rounds them, beside which they were trained")
    if isinstance(model.tensor, MergedWeights) and name != "fp32":
        print(f"rounding to {name} takes {model.tensor.share_lost:.1%} of what the adapters add to the weights")


main = Command(
    "export",
    "Writes a trained model as a folder that transformers opens.",
    "trainer export runs/demo demo-hf",
    ExportOptions,
    run,
    words=("checkpoint", "out"),
)
