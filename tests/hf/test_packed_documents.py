"""Documents that are packed into one sequence and do not see each other, beside each document alone in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import DECODER, DEEPSEEK, GROUPED, VOCAB, close, their_logits, theirs

from trainer.hf import HFWeights
from trainer.hf.config import ROPE_TYPES, spec_from_config
from trainer.hf.families import FAMILIES
from trainer.model.initial import fill_parameters, parameter_infos
from trainer.model.transformer import Transformer

LIMIT = 12
"""The length of a document from which frequencies depend on it, where they do."""

OPTIONS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.1},
    "longrope": {"factor": 4.0, "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.0, 3.0, 4.0]},
}
CASES = [
    (family, kind)
    for place, family in enumerate(FAMILIES)
    for number, kind in enumerate(ROPE_TYPES)
    # GPT-2 has learned positions; Phi 3 in transformers has no other scaling.
    if (family != "gpt2" and (family != "phi3" or kind == "longrope") and (place + number) % 3 == 0)
    or kind == "default"
    or family == "llama"
]
"""Every family with its default, every kind with Llama, and of the other pairs each third: the code of a kind is the
same for all families."""


def pair(folder: Path, family: str, kind: str) -> tuple[torch.nn.Module, Transformer]:
    """A random model of transformers and ours of the same weights."""
    rope = {"rope_type": kind, "rope_theta": 500.0, "original_max_position_embeddings": LIMIT, **OPTIONS[kind]}
    options = {
        **(DECODER if family == "gpt_neox" else DEEPSEEK if family.startswith("deepseek") else GROUPED),
        "max_position_embeddings": LIMIT if kind == "dynamic" else 64,
    }
    options |= {
        "rope_parameters": rope,
        "original_max_position_embeddings": LIMIT,
        "head_dim": 8,
        "num_hidden_layers": 2,
    }
    if family == "gemma2":
        options |= {"sliding_window": 8}
    if family == "gpt_neox" or family.startswith("deepseek"):
        del options["head_dim"]
        rope["partial_rotary_factor"] = 1.0
    if family == "gpt2":
        options = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    reference = theirs(family, options)
    reference.save_pretrained(folder)
    spec = spec_from_config(reference.config.to_dict())
    model = Transformer(spec)
    fill_parameters(model, HFWeights(folder, spec))
    for rotary in model.rotaries:
        rotary.reset_buffers()
    return reference, model.eval()  # in training a mixture reports besides


@pytest.mark.parametrize("family, kind", CASES)
def test_a_packed_document_is_computed_like_the_document_alone(family: str, kind: str, tmp_path: Path) -> None:
    """Logits of documents on both sides of the limit, and of the sequence; then the gradient of every parameter."""
    reference, model = pair(tmp_path / "in", family, kind)

    def alone(tokens: torch.Tensor) -> torch.Tensor:
        # A short sequence makes transformers forget the frequencies of a longer one (dynamic scaling).
        their_logits(reference, tokens[None, :1])
        return their_logits(reference, tokens[None])[0]

    def compare(rows: list[list[int]]) -> tuple[torch.Tensor, ...]:
        width = max(map(sum, rows))
        rows = [row + [width - sum(row)] * (sum(row) < width) for row in rows]
        generator = torch.Generator().manual_seed(sum(map(len, rows)))
        tokens, targets = torch.randint(0, VOCAB, (2, len(rows), width), generator=generator)
        documents = torch.stack(
            [torch.repeat_interleave(torch.arange(len(row), dtype=torch.int32), torch.tensor(row)) for row in rows]
        )
        parts = [document for row, lengths in zip(tokens, rows) for document in row.split(lengths)]
        expected = torch.cat([alone(document) for document in parts])
        assert close(model(tokens, documents=documents).flatten(0, 1), expected)
        return tokens, targets, documents, expected

    @settings(deadline=None, max_examples=4, database=None)
    @given(st.lists(st.lists(st.integers(1, 2 * LIMIT), min_size=1, max_size=2), min_size=1, max_size=2))
    def any_lengths(rows: list[list[int]]) -> None:
        with torch.no_grad():
            compare(rows)

    any_lengths()
    tokens, targets, documents, expected = compare([[LIMIT, 1, LIMIT + 1], [2 * LIMIT, 2]])
    F.cross_entropy(expected, targets.flatten(), reduction="sum").backward()
    model(tokens, targets, documents)[0].backward()
    for parameter in reference.parameters():
        parameter.data = parameter.grad
    reference.save_pretrained(tmp_path / "gradients")
    gradients, infos = HFWeights(tmp_path / "gradients", model.spec), parameter_infos(model)
    for name, parameter in model.named_parameters():
        found, value = parameter.grad, gradients(name, infos[name])
        # A key's bias adds the same to all scores without rotation: its gradient is zero but for rounding.
        assert close(found, value) or max(found.abs().max(), value.abs().max()) < 1e-5, name
