"""Machines: what the preflight and the probe look at, what a job of Slurm does next, where its processes meet."""
