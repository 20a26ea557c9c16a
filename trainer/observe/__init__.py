"""What a run shows of itself: metrics and their sinks, the start-up table, the watchdog and its diagnosis of hangs."""
