"""Shapes that do not fill tiles, and kernels under the roofline, by numbers that are known."""

from __future__ import annotations

import pytest
from support.estimates import settings, shipped

from trainer.diagnosis.suggestions import advise_shapes, list_gemms
from trainer.diagnosis.time_breakdown import KernelTotal
from trainer.diagnosis.verdict import RooflineCeilings, kernel_point
from trainer.planning.hardware import _BY_NAME, multiprocessor_count
from trainer.planning.layer import flops_per_token
from trainer.planning.resolve import resolve_layout


def advised(model: str, world: int = 1, device: str = "NVIDIA H200", **changes: object) -> dict[str, str]:
    spec = shipped(model)
    config = settings(spec, **{"batch__sequence_length": 1024, "batch__micro_size": 8, **changes})
    return {one.setting: one.text for one in advise_shapes(config, resolve_layout(config, world, spec, world), device)}


def test_vocabularies_and_heads():
    assert "model.vocab_size" not in advised("gpt2")  # 50,257, of which products take 50,304
    llama = advised("llama3_8b")
    assert not {"model.vocab_size", "model.attention.head_dim", "parallel.tp"} & llama.keys()
    cut = advised("llama3_8b", 16, parallel__tp=16)
    assert "2 ranks each compute the same keys" in cut["parallel.tp"]
    narrow = advised("llama3_8b", model__attention__head_dim=80)
    assert "padded to 96" in narrow["model.attention.head_dim"]


def test_waves_are_those_of_the_device():
    """8,192 tokens and 4,096 columns are 64 x 32 tiles: 15.5 waves on 132 multiprocessors, 16 whole ones."""
    few = advised("llama3_8b", batch__micro_size=1, batch__sequence_length=512)
    assert "tiles of 512 tokens on 132 multiprocessors" in few["batch.micro_size"]
    assert "batch.micro_size" not in advised("llama3_8b")
    assert "batch.micro_size" not in advised("llama3_8b", device="unheard of", batch__sequence_length=512)
    assert {multiprocessor_count(name) for name in ("H200", "NVIDIA A100-SXM4-80GB", "nothing")} == {132, 108, None}
    assert all(multiprocessor_count(name) is None or 40 <= multiprocessor_count(name) <= 200 for name in _BY_NAME)


@pytest.mark.parametrize("model", ["llama3_8b", "gpt2"])
def test_products_are_the_whole_arithmetic(model):
    spec = shipped(model)
    config = settings(spec, batch__sequence_length=1024, batch__micro_size=8)
    parts, attention = list_gemms(spec, resolve_layout(config, 1, spec, 1).plan, 1024, 2)
    assert sum(part.share for part in parts) + attention == pytest.approx(1)
    total = flops_per_token(spec, 1024, causal=True) / 3
    assert parts[-1].share == pytest.approx(2 * spec.vocab_size * spec.width / total)


def test_a_kernel_is_bound_by_the_nearer_roof():
    roof = RooflineCeilings(peak=1000e12, products=800e12, bandwidth=4e12, memory=3.2e12)
    large = kernel_point("gemm", [KernelTotal("gemm", "products", 1, 1.0, 600e12, 1e12)], roof)
    assert (large.bound, large.reached) == ("arithmetic", pytest.approx(0.75))
    thin = kernel_point("gemv", [KernelTotal("gemv", "products", 1, 1.0, 100e12, 1.6e12)], roof)
    assert (thin.bound, thin.reached) == ("memory", pytest.approx(0.5))
    unknown = kernel_point("odd", [KernelTotal("odd", "products", 1, 1.0)], roof)
    assert unknown.reached is None and unknown.flops is None
