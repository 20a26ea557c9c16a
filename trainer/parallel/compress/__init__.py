"""Quantised gradients: codecs, the links they travel over, reductions, and the trial of codec=auto."""
