"""Checks that plans give the numbers of one process.

    torchrun --nproc-per-node N -m trainer.parity +config=NAME 'plans=[...]'

Every plan trains on the same global batches as a reference of one process. Losses, gradient norms, each parameter's
gradient and the updated weights are compared: the loss alone proves little."""
