"""Models that run by transformers' own code, as they are planned: what plans and settings such code cannot go with."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import Config, ParallelConfig
from trainer.config.fields import list_divisors
from trainer.config.model import CodeSpec, ModelSpec
from trainer.planning.parameters import layer_specs
from trainer.planning.plan import Feature, Plan
from trainer.planning.recompute import MATMULS, SaveEntry, parse_entry

WAITING = ("falcon", "gpt_neo", "jetmoe")
"""Types whose code waits for the device in every pass, to copy indices, a number or the choice of experts."""


def check_code(parallel: ParallelConfig, spec: ModelSpec | None, world: int, node: int) -> Iterator[str]:
    """What keeps the code of a model from being divided."""
    if not isinstance(spec, CodeSpec):
        return
    facts = spec.transformers
    name = facts["config"]["model_type"]
    for axis, degree in (("tp", parallel.tp), ("pp", parallel.pp)):
        if degree > 1 and not facts[axis]:
            yield (
                f"parallel.{axis}={degree}: transformers' code of model_type={name} has no plan for it, or its results "
                f"under one differ; set parallel.{axis}=1"
            )
    layers = [layer.attention for layer in layer_specs(spec)]
    if wrong := next((one for one in layers if one.kv_heads % parallel.tp), None):
        legal = [n for n in list_divisors(wrong.kv_heads) if not any(one.kv_heads % n for one in layers)]
        yield (
            f"parallel.tp={parallel.tp} does not divide num_key_value_heads={wrong.kv_heads}, which transformers' code "
            f"cannot share; legal: {', '.join(map(str, legal))}"
        )
    if parallel.cp > 1 and (facts["masks"] or not facts["outer"]["attends"]):
        yield (
            f"parallel.cp={parallel.cp}: layers of model_type={name} mix tokens outside of the attention function of "
            "transformers, so sequences cannot be divided; set parallel.cp=1"
        )
    if parallel.ep > 1 and any(not table.get("shared", True) for table in facts["tables"]):
        yield (
            f"parallel.ep={parallel.ep}: transformers' code of model_type={name} does not run its experts through the "
            "experts interface of transformers, or they have parameters in common; set parallel.ep=1, and "
            "parallel.zero.stage=3 for parameters that do not fit"
        )
    if parallel.ep > 1 and parallel.ep_capacity:
        yield (
            f"parallel.ep_capacity={parallel.ep_capacity:g}: transformers' code does not report the tokens that "
            "there is no room for; set parallel.ep_capacity=0"
        )
    if parallel.tp_overlap != "off":
        yield (
            f"parallel.tp_overlap={parallel.tp_overlap} is for products of this project's blocks, and the model "
            "runs by transformers' code; set parallel.tp_overlap=off"
        )


def check_code_settings(config: Config, spec: ModelSpec | None, plan: Plan, node: int) -> Iterator[str]:
    """Settings of the rest of the configuration that the code cannot follow."""
    if not isinstance(spec, CodeSpec):
        return
    facts, name = spec.transformers, spec.family
    if config.data.mask_documents and not facts["outer"]["packed"]:
        yield (
            f"data.mask_documents=true: transformers' code of model_type={name} cannot keep the documents of a "
            "sequence apart; set data.mask_documents=false"
        )
    positions = facts["config"].get("max_position_embeddings") or facts["config"].get("n_positions")
    rotary = any("rotary" in name for name in facts["outer"]["shared"])
    if positions and not rotary and config.batch.sequence_length > positions:
        yield (
            f"batch.sequence_length={config.batch.sequence_length} exceeds the {positions} positions of "
            f"model_type={name}; set batch.sequence_length={positions}"
        )
    activation, weights = config.activation, spec.adapter.weights
    if activation.mode == "auto" and (facts["masks"] or not facts["outer"]["attends"]):
        yield (
            f"activation.mode=auto: layers of model_type={name} mix tokens outside of the attention function of "
            "transformers, and what they keep there is not known; set activation=full, or activation=selective"
        )
    given = {
        f"model.adapter.weights={weights}": (weights != "compute", "model.adapter.weights=compute"),
        f"activation.tile={activation.tile}": (bool(activation.tile), "activation.tile=0"),
        f"run.cuda_graphs=true for model_type={name}": (
            config.run.cuda_graphs and name in WAITING,
            "run.cuda_graphs=false",
        ),
    }
    if activation.mode == "selective":
        for entry in activation.save:
            given[f"activation.save={entry}"] = (
                names_product(parse_entry(entry), spec),
                "activation.save=[attention,matmul/2], or operators such as aten.mm",
            )
    for setting, (wrong, remedy) in given.items():
        if wrong:
            yield f"{setting} is not supported for a model that runs by transformers' own code; set {remedy}"


def names_product(entry: SaveEntry, spec: CodeSpec) -> bool:
    """Whether an entry of `activation.save` means single products by their names. How often and in what order the code
    computes them is not known."""
    names = {name for index in range(spec.depth) for name in spec.layer(index).code["parameters"]}
    matrices = [name.removesuffix(".weight") for name in names]
    return entry.name not in MATMULS and bool(entry.products(matrices))


FEATURE = Feature("code", check_model=check_code, check_plan=check_code_settings)
