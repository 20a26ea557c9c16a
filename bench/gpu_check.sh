#!/usr/bin/env bash
# What the CPU tests cannot see, on all GPUs of this machine: the matrix of plans over NCCL, then whole runs through the command line.
# Usage: bench/gpu_check.sh OUT_FOLDER
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1
gpus=$(nvidia-smi -L | wc -l)
export PYTHONPATH=.:tests:${PYTHONPATH:-} OMP_NUM_THREADS=8 CUBLAS_WORKSPACE_CONFIG=:4096:8
CUDA_VISIBLE_DEVICES=0 python3 -m pytest -q tests/observe/test_observe.py tests/data/test_batches.py -k "cuda or gpu" -p no:cacheprovider 2>&1 | tail -3
timeout 300 torchrun --standalone --nproc-per-node "$gpus" tests/workers/plans.py "$out/plans_$gpus.json" > "$out/plans.log" 2>&1; echo "plans rc $?"; tail -3 "$out/plans.log"
python3 - "$out/plans_$gpus.json" <<'PY'
import json, sys
results = json.load(open(sys.argv[1]))
for compute in ("fp32", "bf16", "fp16"):
    rows = [r for r in results if r["compute"] == compute]
    print(compute, len(rows), "plans; worst", {k: f"{max(r[k] for r in rows):.1e}" for k in ("loss", "norm", "gradient", "parameters")})
    worst = max(rows, key=lambda r: r["gradient"]); print("  ", worst["case"], worst["where"])
PY
run() {
  local name=$1; shift
  timeout 200 torchrun --standalone --nproc-per-node "$gpus" -m trainer +config=demo run.name="$name" run.dir="/tmp/runs/$name" run.steps=30 "$@" > "$out/$name.log" 2>&1
  echo "== $name rc $?"; grep -E "^step +30|done|error|Error" "$out/$name.log" | tail -4
}
run demo
run compiled compile=true precision=bf16 activation=selective
run documents data.mask_documents=true compile=true precision=bf16
run offload parallel=zero3_offload
run fp16 precision=fp16 parallel=zero2
run gemma model=gemma2_2b model.width=256 model.depth=4 model.attention.heads=4 model.attention.kv_heads=2 model.attention.head_dim=64 model.feed_forward.width=512 model.vocab_size=4096 'model.attention.window=64' precision=bf16
