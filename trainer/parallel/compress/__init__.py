"""Quantised gradients: codecs, the links they travel over, and reductions."""
