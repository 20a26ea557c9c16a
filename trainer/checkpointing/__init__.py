"""What a run writes to disk to go on later, and what its backward pass recomputes instead of keeping."""
