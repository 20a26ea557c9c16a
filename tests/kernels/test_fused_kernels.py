"""The kernels that multiply while ranks send, on processes that share memory."""

from __future__ import annotations

from support.kernels import compare_kernels


def test_they_compile_for_hopper_without_spills(tmp_path):
    compare_kernels("fused_kernels.py", "sm_90", TRITON_CACHE_DIR=str(tmp_path))


def test_they_equal_plain_products_and_miss_every_wait_and_signal():
    compare_kernels("fused_kernels.py", "cpu", TRITON_INTERPRET="1")


def test_a_model_of_them_has_the_usual_gradients():
    compare_kernels("fused_backend.py", "cpu", TRITON_INTERPRET="1", WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="")
