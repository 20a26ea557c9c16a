#!/usr/bin/env bash
# Llama-3 8B, sequence 8192, bf16, selective recompute, compile: tensor and pipeline plans on all GPUs of this machine.
# Usage: bench/parallel_8b.sh OUT_FOLDER [CASE...]; a JSON line a case goes to OUT_FOLDER/parallel.jsonl.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1; shift
gpus=$(nvidia-smi -L | wc -l)
export OMP_NUM_THREADS=8 PYTHONPATH=.:${PYTHONPATH:-} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
common="model=configs/model/llama3_8b.yaml length=8192 precision.compute=bf16 activation.mode=selective compile=true steps=${STEPS:-6} out=$out/parallel.jsonl"
case_() {
  local name=$1; shift
  [ ${#wanted[@]} -gt 0 ] && [[ ! " ${wanted[*]} " == *" $name "* ]] && return
  timeout "${LIMIT:-120}" torchrun --standalone --nproc-per-node "$gpus" bench/step.py case="$name" $common "$@" > "$out/$name.log" 2>&1
  echo "== $name rc $?"; grep '^{"case"' "$out/$name.log" | cut -c1-700 || grep -v "^W\|^  *File\|^  *return" "$out/$name.log" | tail -15 | cut -c1-300
}
wanted=("$@")
pp="parallel.zero.stage=1 micro=1 accumulation=8"
case_ tp2 parallel.tp=2 parallel.zero.stage=3 micro=2
# What is kept is the same whatever counts as one product.
fused="parallel.tp=2 parallel.zero.stage=3 micro=2 activation.save=[attention]"
case_ fusion_off $fused
case_ fusion_copy_engine $fused parallel.tp_overlap=copy_engine
case_ tp4 parallel.tp=4 parallel.zero.stage=1 micro=2
case_ pp2_1f1b parallel.pp=2 $pp
case_ pp2_interleaved parallel.pp=2 $pp parallel.pipeline.schedule=interleaved
case_ pp2_zb_v parallel.pp=2 $pp parallel.pipeline.schedule=zb_v
case_ pp2_auto parallel.pp=2 $pp parallel.pipeline.schedule=auto
case_ tp2_pp2 parallel.tp=2 parallel.pp=2 $pp parallel.pipeline.schedule=interleaved
case_ pp4_1f1b parallel.pp=4 $pp
case_ pp4_interleaved parallel.pp=4 $pp parallel.pipeline.schedule=interleaved
case_ pp4_zb_v parallel.pp=4 $pp parallel.pipeline.schedule=zb_v
case_ pp4_auto parallel.pp=4 $pp parallel.pipeline.schedule=auto
