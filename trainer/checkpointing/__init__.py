"""Checkpoints on disk and in the memory of hosts, from which a run resumes."""
