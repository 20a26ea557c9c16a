"""The scans that keep documents of a sequence apart, beside transformers' own on each document alone."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.hf.scans import SCANS, replace_scans

BATCH, HEADS, WIDTH = 2, 4, 3


def draw_inputs(name: str, length: int) -> dict[str, Any]:
    """Arguments of a function; tensors [batch, length, ...] that are computed for each document alone are those with
    `length` as their second dimension."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    if name == "causal_conv1d_fn":
        return {"hidden_states": draw(BATCH, length, 5), "weight": draw(5, 4), "bias": draw(5), "activation": "silu"}
    if name == "mamba2_chunk_scan":
        groups = {part: draw(BATCH, length, 2, WIDTH) for part in "BC"}
        sizes = {"chunk_size": 4, "dt_softplus": True, "dt_limit": (0.01, 5.0)}
        given = {"hidden_states": draw(BATCH, length, HEADS, 5), "dt": draw(BATCH, length, HEADS), **groups, **sizes}
        return given | {"A": -torch.rand(HEADS) - 0.1, "D": draw(HEADS), "dt_bias": draw(HEADS)}
    if name == "mamba_selective_scan":
        parts = {part: draw(BATCH, length, WIDTH) for part in "BC"}
        given = {part: draw(BATCH, length, 5) for part in ("hidden_states", "dt", "z")} | parts
        given |= {"A": (-torch.rand(5, WIDTH) - 0.01).requires_grad_(), "D": draw(5), "delta_bias": draw(5)}
        return given | {"delta_softplus": True}
    channels = [WIDTH] if name == "chunk_kimi_delta_attention" else []
    keys = HEADS if channels else HEADS // 2
    return {
        **{part: draw(BATCH, length, keys, WIDTH) for part in ("query", "key")},
        "value": draw(BATCH, length, HEADS, 5),
        "g": (-torch.rand(BATCH, length, HEADS, *channels)).requires_grad_(),
        "beta": torch.rand(BATCH, length, HEADS).requires_grad_(),
        "chunk_size": 4,
        "use_qk_l2norm_in_kernel": True,
    }


def call(function: Any, name: str, given: dict[str, Any]) -> Tensor:
    """The result [batch, length, ...]. A convolution has its length last."""
    if name == "causal_conv1d_fn":
        given = given | {"hidden_states": given["hidden_states"].transpose(1, 2)}
        return function(given.pop("hidden_states"), given.pop("weight"), given.pop("bias"), **given).transpose(1, 2)
    if name == "mamba_selective_scan":
        given = {key: part.transpose(1, 2) if key in ALONG else part for key, part in given.items()}
        order = [given.pop(part) for part in ("hidden_states", "dt", "A", "B", "C")]
        return function(*order, **given).transpose(1, 2)
    if name == "mamba2_chunk_scan":
        order = [given.pop(part) for part in ("hidden_states", "dt", "A", "B", "C")]
        return function(*order, **given)
    return function(given.pop("query"), given.pop("key"), given.pop("value"), **given)[0]


MODULES = {
    "causal_conv1d_fn": "lfm2",
    "torch_chunk_gated_delta_rule": "qwen3_next",
    "chunk_kimi_delta_attention": "kimi_linear",
    "mamba2_chunk_scan": "bamba",
    "mamba_selective_scan": "mamba",
}
ALONG = ("hidden_states", "dt", "B", "C", "z")
"""Arguments of `mamba_selective_scan` that have their length last."""


@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=6)
@example(length=1, seed=0)
@example(length=22, seed=1)
@given(length=st.integers(5, 22), seed=st.integers(0, 99))
def test_documents_are_those_that_are_computed_alone(name, length, seed):
    """Results and gradients, of documents of any length that begin anywhere in chunks."""
    torch.manual_seed(seed)
    module = import_module(f"transformers.models.{MODULES[name]}.modeling_{MODULES[name]}")
    original = getattr(module, name)
    documents = (torch.rand(BATCH, length) < 0.3).int().cumsum(1)
    inputs = draw_inputs(name, length)
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad}
    along = {key for key, value in tensors.items() if value.dim() > 2 and value.shape[:2] == (BATCH, length)}
    place = ModuleType("place")
    setattr(place, name, original.__wrapped__ if hasattr(original, "replaced") else original)
    mixing = SimpleNamespace(documents=documents, calls=0, recurrent=False)
    replace_scans(place, lambda: mixing)
    result = call(getattr(place, name), name, dict(inputs))
    assert mixing.calls == 1 and mixing.recurrent
    expected = torch.zeros_like(result)
    for row in range(BATCH):
        for document in documents[row].unique():
            here = documents[row] == document
            own = {key: value[row : row + 1, here] if key in along else value for key, value in inputs.items()}
            expected = expected.index_put(
                (torch.tensor([row]), here.nonzero().flatten()), call(original, name, own)[0].to(result.dtype)
            )
    weights = torch.randn_like(result)
    assert torch.allclose(result, expected, atol=1e-5)
    ours, theirs = (torch.autograd.grad((one * weights).sum(), list(tensors.values())) for one in (result, expected))
    for key, one, other in zip(tensors, ours, theirs):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-4), key


def test_a_function_is_what_it_was_without_documents_and_outside_of_a_pass():
    calls: list[str] = []
    place = ModuleType("place")
    for name in SCANS:
        setattr(place, name, lambda x, name=name: calls.append(name) or x)
    passes: list[Any] = [None]
    replace_scans(place, lambda: passes[0])
    replace_scans(place, lambda: passes[0])  # once
    for name in SCANS:
        assert getattr(place, name)(3) == 3
    passes[0] = SimpleNamespace(documents=None, calls=0, recurrent=False)
    for name in SCANS:
        assert getattr(place, name)(4) == 4
    assert calls == [*SCANS, *SCANS]
    passes[0].documents = torch.zeros(1, 2)
    # A kernel of a whole mixer says that there is none, so that the code takes the functions above.
    assert place.mamba2_split_conv1d_scan_combined(6) is None and place.mamba_inner_fn(6) is None
