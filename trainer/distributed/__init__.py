"""Processes, groups, collectives, transfers, and tensors of which a rank holds a part."""
