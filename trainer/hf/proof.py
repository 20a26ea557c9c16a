"""A type of transformers that nobody has compared yet: a small copy of its configuration, computed by transformers and
here, before a run with it begins."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import ConfigError
from trainer.config.model import CodeSpec
from trainer.hf.accepted import CodeFacts, describe_code, plain_values
from trainer.hf.code import CodeStage
from trainer.hf.code_weights import code_name
from trainer.hf.small import shrink_config
from trainer.model.initial import fill_parameters, name_seed
from trainer.model.loss import IGNORE
from trainer.planning.parameters import ParameterInfo, declare_parameters
from trainer.util.reading import shorten_foreign

EXACT = 5e-5
"""The largest relative error of a gradient of code that computes the same. Rounding makes up to 1e-5."""

MOST = 20_000_000
"""Parameters of a small copy: where sizes have other names than usual, it may be large."""

SEQUENCES, LENGTH, FIRST = 4, 16, 3
"""Of the compared batch. FIRST: its smallest token, behind those that are padding."""


def guess_facts(values: dict[str, Any]) -> CodeFacts:
    """`CodeFacts` of a type by the names of its options."""
    names: dict[str, Any] = {"head_factor": "logit_scale", "head_divisor": "logits_scaling"}
    names["soft_cap"] = "final_logit_softcapping"
    return replace(
        CodeFacts(packed=None), **{fact: name for fact, name in names.items() if values.get(name) is not None}
    )


def prove_code(values: dict[str, Any]) -> CodeFacts:
    """The facts of a type that is not in `ACCEPTED`, by the gradients of a small copy of a complete config.json: here,
    in one stage and in two, and in one process of transformers. It is computed on the CPU in seconds, and once in a
    process. Raises `ConfigError` where they differ."""
    return prove_text(json.dumps(values, sort_keys=True))


@lru_cache(8)
def prove_text(text: str) -> CodeFacts:
    values = json.loads(text)
    name = values.get("model_type")
    refused = f"model.code_unproven=true: the comparison of model_type={name} with transformers"
    try:
        small = plain_values(shrink_config(values))
        facts = replace(guess_facts(values), tp=False)
        spec = describe_code(small, facts)
        size = sum(info.size for info in declare_parameters(spec).values())
        if size > MOST:
            raise ConfigError(f"a small copy of it would have {size} parameters")
        with torch.random.fork_rng(devices=[]):
            whole, halves = compare_code(spec, [range(spec.depth)]), None
            if whole <= EXACT and spec.depth > 1:
                halves = compare_code(spec, [range(spec.depth // 2), range(spec.depth // 2, spec.depth)])
    except ConfigError as error:
        raise ConfigError([f"{refused} is not possible: {problem}" for problem in error.problems]) from error
    except Exception as error:  # whatever code raises for sizes that are not its own
        raise ConfigError(f"{refused} is not possible: {shorten_foreign(error)}; take another model") from error
    if not whole <= EXACT:
        raise ConfigError(
            f"{refused} has failed: a gradient differs by {whole:.1e} of its norm, more than {EXACT:.0e}; take another "
            "model, or train this one with transformers"
        )
    return replace(facts, pp=halves is not None and halves <= EXACT)


def compare_code(spec: CodeSpec, split: list[range]) -> float:
    """The largest relative error of a gradient of stages with the layers of `split`, infinite where one is missing. The
    loss is compared as well."""
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(FIRST, spec.vocab_size, (SEQUENCES, LENGTH + 1), generator=generator)
    borders = torch.arange(2, 2 + 3 * SEQUENCES, 3)[:, None] % LENGTH
    documents = (torch.arange(LENGTH) >= borders).int() + (torch.arange(LENGTH) >= borders + 5).int()
    given = documents if spec.transformers["outer"]["packed"] else None
    loss, expected = train_transformers(spec, tokens[:, :-1], tokens[:, 1:], given)
    stages = []
    for layers in split:
        with torch.device("meta"):
            stage = CodeStage(spec, layers)
        stage.to_empty(device=device)
        for module in stage.modules():  # in fp32, as a run keeps them
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.float() if buffer.is_floating_point() else buffer)
        fill_parameters(stage, drawn_weight)
        stages.append(stage)
    hidden: Any = None
    for stage in stages:
        hidden = stage(tokens[:, :-1], tokens[:, 1:] if stage.last else None, given, hidden)
    objective = hidden[0] / (SEQUENCES * LENGTH)
    objective.backward()
    found: dict[str, Tensor] = {}
    for stage in stages:  # a tied head has a copy of the embedding on the last stage
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    wanted = {name: one for name, one in expected.items() if one is not None}
    floor = 1e-3 * torch.stack([one.norm() for one in wanted.values()]).norm()
    errors = [
        ((found[name] - one).norm() / torch.maximum(one.norm(), floor)).item() if name in found else float("inf")
        for name, one in wanted.items()
    ]
    error = max(
        [*errors, abs(objective.item() - loss) / abs(loss)], key=lambda one: one if one == one else float("inf")
    )
    return error if error == error and found.keys() == wanted.keys() else float("inf")


def drawn_weight(name: str, info: ParameterInfo) -> Tensor:
    """A whole parameter of a small model, by its name."""
    value = torch.randn(info.shape, generator=torch.Generator().manual_seed(name_seed(0, name)))
    return 1 + 0.1 * value if info.role == "norm" and not name.endswith("bias") else 0.1 * value


def train_transformers(
    spec: CodeSpec, tokens: Tensor, targets: Tensor, documents: Tensor | None
) -> tuple[float, dict[str, Tensor | None]]:
    """Loss and gradient of each parameter, by our names, of one process of transformers with eager attention. Documents
    are computed one by one, so that they need no mask. tokens, targets, documents: [batch, length]."""
    config = AutoConfig.for_model(**spec.transformers["config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().train()
    infos, own = declare_parameters(spec), dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, info in infos.items():
            own[code_name(name, spec)].copy_(drawn_weight(name, info))
    valid, total = int((targets != IGNORE).sum()), 0.0
    for row in range(len(tokens)):
        numbers = torch.zeros_like(tokens[row]) if documents is None else documents[row]
        for document in numbers.unique():
            here = numbers == document
            logits = model(input_ids=tokens[row][here][None], use_cache=False).logits[0].float()
            loss = F.cross_entropy(logits, targets[row][here], ignore_index=IGNORE, reduction="sum") / valid
            loss.backward()
            total += loss.item()
    return total, {name: own[code_name(name, spec)].grad for name in infos}
