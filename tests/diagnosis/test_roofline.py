"""Kernels under the roofline, by numbers that are known."""

from __future__ import annotations

import pytest

from trainer.diagnosis.time_breakdown import KernelTotal
from trainer.diagnosis.verdict import RooflineCeilings, kernel_point


def test_a_kernel_is_bound_by_the_nearer_roof():
    roof = RooflineCeilings(peak=1000e12, products=800e12, bandwidth=4e12, memory=3.2e12)
    large = kernel_point("gemm", [KernelTotal("gemm", "products", 1, 1.0, 600e12, 1e12)], roof)
    assert (large.bound, large.reached) == ("arithmetic", pytest.approx(0.75))
    thin = kernel_point("gemv", [KernelTotal("gemv", "products", 1, 1.0, 100e12, 1.6e12)], roof)
    assert (thin.bound, thin.reached) == ("memory", pytest.approx(0.5))
    unknown = kernel_point("odd", [KernelTotal("odd", "products", 1, 1.0)], roof)
    assert unknown.reached is None and unknown.flops is None
