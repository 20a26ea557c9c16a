"""The plan, put onto a model: tensor parallelism, ZeRO by two engines, compressed gradients, the pipeline's runtime."""
