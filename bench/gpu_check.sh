#!/usr/bin/env bash
# What the CPU tests cannot see, on all GPUs of this machine, or the first GPU_CHECK_GPUS of them, in at most 10 minutes:
# tests marked for GPUs, the matrix of plans over NCCL against one process, pipelines whose ranks wait for every transfer,
# DeepSpeed's plans, the kernels of quantised gradients and of the optimizer bit by bit, products beside their collectives
# (tp_overlap), gathers in fp8 (on a machine of one GPU between two ranks that share it), steps that the host queues
# ahead and CUDA graphs, whole runs by the command line, faults.
# Usage: [GPU_CHECK_GPUS=2] bench/gpu_check.sh OUT_FOLDER [CASE...]
# More ranks than GPUs share them: GPU_CHECK_GPUS=2 GPU_CHECK_SECONDS=1200 checks two ranks on one GPU over NCCL, without
# faults, in about 15 minutes.
# Every case has a time limit and a log in OUT_FOLDER/logs (also packed, as logs.tar.gz); one that hangs says where. The
# last line is the verdict, and the exit code 0 if all passed; OUT_FOLDER/verdict.json holds the numbers.
set -u
exec python3 "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
