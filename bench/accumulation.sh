#!/usr/bin/env bash
# Weight gradients that GEMMs add to their sums beside sums by kernels of their own: 8 layers of Llama-3 8B, 8 micro-batches
# of 4096 tokens, bf16, each way twice in turn; on two GPUs or more also under ZeRO-1 and a pipeline.
# Usage: bench/accumulation.sh OUT_FOLDER [CASE...]; a JSON line a case goes to OUT_FOLDER/accumulation.jsonl: tokens/s,
# peak_gib and predicted.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1; shift
mkdir -p "$out"
gpus=$(nvidia-smi -L | wc -l)
export OMP_NUM_THREADS=8 PYTHONPATH=.:${PYTHONPATH:-} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
common="model=configs/model/llama3_8b.yaml depth=8 length=4096 micro=1 accumulation=8 precision.compute=bf16 steps=${STEPS:-6} out=$out/accumulation.jsonl"
compared_() {
  local name=$1 count=$2; shift 2
  [ ${#wanted[@]} -gt 0 ] && [[ ! " ${wanted[*]} " == *" $name "* ]] && return
  for round in 1 2; do
    for sums in gemm kernel; do
      log=$out/${name}_${sums}_$round.log
      timeout "${LIMIT:-120}" torchrun --standalone --nproc-per-node "$count" bench/step.py case="${name}_$sums" sums=$sums $common "$@" > "$log" 2>&1
      echo "== ${name}_$sums rc $?"; grep '^{"case"' "$log" | cut -c1-300 || tail -5 "$log" | cut -c1-300
    done
  done
}
wanted=("$@")
compared_ compiled 1 compile=true activation.mode=selective
compared_ eager 1 activation.mode=full
[ "$gpus" -lt 2 ] && exit
compared_ zero1 2 compile=true activation.mode=selective parallel.zero.stage=1
compared_ pipeline 2 compile=true activation.mode=selective parallel.pp=2 parallel.pipeline.schedule=zb_v
