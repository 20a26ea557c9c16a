"""The model: blocks, axes, linear layers, initial weights, loss, and the protocol of what a plan may ask of a model."""
