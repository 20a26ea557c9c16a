#!/usr/bin/env bash
# Llama-3 8B, sequence 8192, bf16, on all GPUs of this machine: the training step under several settings.
# Usage: bench/llama3_8b.sh OUT_FOLDER [CASE...]; a JSON line a case goes to OUT_FOLDER/step.jsonl.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1; shift
gpus=$(nvidia-smi -L | wc -l)
export OMP_NUM_THREADS=8 PYTHONPATH=.:${PYTHONPATH:-} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
common="model=configs/model/llama3_8b.yaml length=8192 precision.compute=bf16 parallel.zero.stage=3 compile=true out=$out/step.jsonl"
case_() {
  local name=$1; shift
  [ ${#wanted[@]} -gt 0 ] && [[ ! " ${wanted[*]} " == *" $name "* ]] && return
  timeout "${LIMIT:-200}" torchrun --standalone --nproc-per-node "$gpus" bench/step.py case="$name" $common "$@" > "$out/$name.log" 2>&1
  echo "== $name rc $?"; grep '^{"case"' "$out/$name.log" || tail -15 "$out/$name.log"
}
wanted=("$@")
case_ selective_1 activation.mode=selective
case_ selective_2 activation.mode=selective micro=2
case_ matmul_1 activation.mode=selective 'activation.save=[attention,matmul]'
case_ attention_2 activation.mode=selective 'activation.save=[attention]' micro=2
case_ full_2 activation.mode=full micro=2
case_ eager_1 activation.mode=selective compile=false
case_ zero2_1 activation.mode=selective parallel.zero.stage=2
save='activation.mode=selective activation.save=[attention,matmul] micro=2'
case_ matmul_2 $save
case_ copied_2 $save parallel.zero.collectives=copy_engine
case_ fp8_2 $save precision.float8.recipe=tensorwise
case_ fp8_gathered_2 $save precision.float8.recipe=tensorwise precision.float8.gather=true
case_ fp8_copied_2 $save precision.float8.recipe=tensorwise parallel.zero.collectives=copy_engine
