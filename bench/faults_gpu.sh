#!/usr/bin/env bash
# Faults on 2 GPUs with NCCL: a killed rank, a stopped rank, the preflight. About 4 minutes; runs train for TRAINED (10) seconds each.
# Usage: bench/faults_gpu.sh OUT_FOLDER [CASE...] (calm killed stopped1 stopped0 preflight; all are compared with calm). A JSON line a case
# goes to OUT_FOLDER/faults.jsonl, logs beside it. Exit code 1 if one failed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$1"; out=$(realpath "$1"); shift
export PYTHONPATH=$PWD:${PYTHONPATH:-} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
exec python3 bench/faults_gpu.py "$out" "$@"
