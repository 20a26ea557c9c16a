#!/usr/bin/env bash
# Adapters: Llama-3 8B on one GPU beside PEFT, and Llama-3 70B on two GPUs of 80 GB. See lease.py.
# Usage: [LEASE_SECONDS=590] bench/lora.sh OUT_FOLDER [CASE...] gpus=1|2 (one peft with gpus=1, two with gpus=2, or a case of these); a
# JSON line a case goes to OUT_FOLDER/results.jsonl when it ends, logs to OUT_FOLDER/logs.tar.gz.
set -u
bench=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
export PYTHONPATH=$(dirname "$bench"):${PYTHONPATH:-}
exec python3 "$bench/lease.py" lora "$@"
