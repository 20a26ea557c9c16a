"""Numeric types, the matrix products of linear layers, and the loss scale of fp16."""
