"""Checkpoints on disk, from which a run resumes; and activation checkpointing: what backward recomputes."""
