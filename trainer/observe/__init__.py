"""What a run shows of itself: metric names, step bookkeeping, sinks, start-up tables."""
