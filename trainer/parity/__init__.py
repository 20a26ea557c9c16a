"""Whether plans give the numbers of one process: `torchrun --nproc-per-node N -m trainer.parity +config=NAME
'plans=[...]'`.

Every plan trains on the same global batches as the reference, and what is compared is each parameter's gradient,
besides losses, norms and updated weights: loss alone proves little."""
