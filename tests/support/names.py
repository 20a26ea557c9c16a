"""What is said of `disturbance.py` by those who must not import it: that registers a loss term."""

TERM = "loss.terms.disturbance"
LACKING = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free"
