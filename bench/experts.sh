#!/usr/bin/env bash
# Mixtures of experts on all GPUs of this machine (2 for the published shapes), beside torchtitan and beside transformers under
# DeepSpeed's ZeRO-3; and the loss of a small mixture beside that of a dense model. See lease.py.
# Usage: [LEASE_SECONDS=590] bench/experts.sh OUT_FOLDER [CASE...] (qwen3 deepseek qwen3_12 zero3 convergence, or a case of these);
# a JSON line a case goes to OUT_FOLDER/results.jsonl when it ends, logs to OUT_FOLDER/logs.tar.gz.
set -u
bench=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
export PYTHONPATH=$(dirname "$bench"):${PYTHONPATH:-}
exec python3 "$bench/lease.py" experts "$@"
