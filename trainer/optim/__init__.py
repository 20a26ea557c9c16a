"""Updates: the optimizer on local shards, parameter groups by type, learning-rate schedules."""
