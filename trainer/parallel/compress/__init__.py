"""Quantised gradients: codecs, and the reductions that send them."""
