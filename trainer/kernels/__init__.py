"""Triton kernels on plain tensors and numbers. They import nothing of the project."""
