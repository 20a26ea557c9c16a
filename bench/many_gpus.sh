#!/usr/bin/env bash
# What needs four or eight GPUs of one host: plans against one process, Llama-3 8B and Qwen3-30B-A3B beside torchtitan, tensor
# parallelism by the method of its overlap, adapters, killed ranks. See lease.py.
# Usage: [LEASE_SECONDS=590] bench/many_gpus.sh OUT_FOLDER [CASE...] (check plans llama qwen3 tensor adapters killed, or a case of
# these); a JSON line a case goes to OUT_FOLDER/results.jsonl when it ends, logs to OUT_FOLDER/logs.tar.gz.
set -u
bench=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
export PYTHONPATH=$(dirname "$bench"):${PYTHONPATH:-}
exec python3 "$bench/lease.py" many_gpus "$@"
