#!/usr/bin/env bash
# What is done once a step beside once a micro-batch: weight gradients that GEMMs add to their sums beside sums by kernels of
# their own, and weights that are cast to fp8 once a step beside each time. 8 layers of Llama-3 8B, 8 micro-batches of 4096
# tokens, each way twice in turn; on two GPUs or more also under ZeRO-1 and a pipeline.
# Usage: bench/accumulation.sh OUT_FOLDER [CASE...]; a JSON line a case goes to OUT_FOLDER/accumulation.jsonl: tokens/s,
# peak_gib and predicted.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1; shift
mkdir -p "$out"
gpus=$(nvidia-smi -L | wc -l)
export OMP_NUM_THREADS=8 PYTHONPATH=.:${PYTHONPATH:-} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
common="model=configs/model/llama3_8b.yaml depth=8 length=4096 micro=1 accumulation=8 precision.compute=bf16 steps=${STEPS:-6} out=$out/accumulation.jsonl"
compared_() {  # NAME GPUS KEY VALUE VALUE SETTING...
  local name=$1 count=$2 key=$3 values="$4 $5"; shift 5
  [ ${#wanted[@]} -gt 0 ] && [[ ! " ${wanted[*]} " == *" $name "* ]] && return
  for round in 1 2; do
    for value in $values; do
      log=$out/${name}_${value}_$round.log
      timeout "${LIMIT:-120}" torchrun --standalone --nproc-per-node "$count" bench/step.py case="${name}_$value" "$key=$value" $common "$@" > "$log" 2>&1
      echo "== ${name}_$value rc $?"; grep '^{"case"' "$log" | cut -c1-300 || tail -5 "$log" | cut -c1-300
    done
  done
}
wanted=("$@")
selective="compile=true activation.mode=selective"
fp8="precision.float8.ends=0 precision.float8.recipe"
compared_ compiled 1 sums gemm kernel $selective
compared_ eager 1 sums gemm kernel activation.mode=full
compared_ fp8 1 casts once each $selective $fp8=tensorwise
compared_ fp8_rowwise 1 casts once each $selective $fp8=rowwise
compared_ fp8_full 1 casts once each compile=true activation.mode=full $fp8=tensorwise
[ "$gpus" -lt 2 ] && exit
compared_ zero1 2 sums gemm kernel $selective parallel.zero.stage=1
compared_ pipeline 2 sums gemm kernel $selective parallel.pp=2 parallel.pipeline.schedule=zb_v
compared_ fp8_zero2 2 casts once each $selective parallel.zero.stage=2 $fp8=tensorwise
compared_ fp8_pipeline 2 casts once each $selective parallel.pp=2 parallel.pipeline.schedule=zb_v $fp8=tensorwise
