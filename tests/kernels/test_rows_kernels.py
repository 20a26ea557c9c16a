"""Rows of experts by Triton, without a GPU."""

from __future__ import annotations

from support.kernels import compare_kernels


def test_tokens_reach_their_rows_and_sums_the_token():
    compare_kernels("rows_kernels.py", "cpu", TRITON_INTERPRET="1")
