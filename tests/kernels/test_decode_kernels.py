"""Attention to kept keys by Triton, without a GPU."""

from __future__ import annotations

from support.kernels import compare_kernels


def test_the_compiler_keeps_keys_coming_and_stores_before_signals(tmp_path):
    compare_kernels("decode_kernels.py", "sm_90", TRITON_CACHE_DIR=str(tmp_path))


def test_every_mask_on_one_rank_and_on_several_that_share_the_slots():
    compare_kernels("decode_kernels.py", "cpu", TRITON_INTERPRET="1")


def test_ranks_bring_their_slots_together():
    compare_kernels("sharded_kv.py", "cpu", TRITON_INTERPRET="1", WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="")
