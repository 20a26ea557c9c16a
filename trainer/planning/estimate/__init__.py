"""What a plan will take before it runs: memory by category, seconds by term, and the best of many plans."""
