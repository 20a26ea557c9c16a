"""The plan, put onto a model: tensor and context parallelism, activation checkpointing, ZeRO by two engines, compressed
gradients, the pipeline's runtime."""
