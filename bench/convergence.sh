#!/usr/bin/env bash
# Evaluation loss of a 10M model after 1,000 steps on the default corpus, by form of the gradients and seed, on all GPUs of this machine
# (replicas: every gradient is quantised twice, on its way there and back). AT_ONCE runs share the GPUs.
# Usage: bench/convergence.sh OUT_FOLDER [CASE...]; a JSON line a run goes to OUT_FOLDER/convergence.jsonl. SEEDS, STEPS and PEAK (learning
# rate) set the others.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1; shift
export OMP_NUM_THREADS=2 PYTHONPATH=.:${PYTHONPATH:-}
processes=${PROCESSES:-$(nvidia-smi -L | wc -l)} runs=${RUNS:-$out/runs} steps=${STEPS:-1000}
hop=parallel.grad_comm.outer
declare -A settings=([fp32]="" [int8]="$hop.codec=int8" [int4]="$hop.codec=int4" [int4_hadamard]="$hop.codec=int4 $hop.hadamard=32"
  [int4_classic]="$hop.codec=int4 $hop.error_feedback=classic" [int4_average8]="$hop.codec=int4 $hop.error_feedback=average8"
  [int4_stochastic]="$hop.codec=int4 $hop.stochastic=true" [fp8]="$hop.codec=fp8" [int4_2048]="$hop.codec=int4 $hop.block=2048")
cases=("$@"); [ ${#cases[@]} -gt 0 ] || cases=(fp32 int8 int4 int4_hadamard int4_classic int4_average8)
run() {
  local case=$1 seed=$2 folder=$runs/$1-$2
  torchrun --standalone --nproc-per-node "$processes" -m trainer +config=demo model.width=320 model.depth=7 model.attention.heads=5 \
    model.attention.kv_heads=5 model.feed_forward.width=896 precision=bf16 activation=none parallel=ddp ${settings[$case]} run.dir="$folder" run.seed="$seed" \
    run.steps="$steps" lr.warmup=50 batch.sequence_length=256 batch.global_size=32 batch.micro_size=$((32 / processes)) checkpoint.every=0 checkpoint.at_end=false lr.peak="${PEAK:-1e-3}" eval.every="$steps" eval.sequences=512 \
    logging.console=plain logging.every=50 > "$folder.log" 2>&1 || { echo "$case $seed failed"; tail -3 "$folder.log"; return; }
  python3 - "$case" "$seed" "$folder" <<'PY' >> "$out/convergence.jsonl"
import json, sys
lines = [json.loads(line) for line in open(f"{sys.argv[3]}/metrics.jsonl")]
last = [line for line in lines if "loss" in line][-1]
print(json.dumps({"case": sys.argv[1], "seed": int(sys.argv[2]), "eval_loss": [line["eval_loss"] for line in lines if "eval_loss" in line][-1],
                  "loss": last["loss"], "steps": last["step"], "bytes_outer": last["comm/bytes_outer"], "step_seconds": last["step_seconds_p50"]}))
PY
}
mkdir -p "$runs"
for seed in ${SEEDS:-0 1 2}; do
  for case in "${cases[@]}"; do
    run "$case" "$seed" &
    while [ "$(jobs -rp | wc -l)" -ge "${AT_ONCE:-2}" ]; do wait -n; done
  done
done
wait
python3 - "$out/convergence.jsonl" <<'PY'
import collections, json, statistics, sys
runs = collections.defaultdict(dict)
for line in open(sys.argv[1]):
    run = json.loads(line)
    runs[run["case"]][run["seed"]] = run["eval_loss"]
base = runs["fp32"]
for case, losses in runs.items():
    seeds = sorted(set(losses) & set(base))
    differences = [losses[seed] - base[seed] for seed in seeds]
    spread = statistics.stdev(differences) if len(seeds) > 1 else float("nan")
    print(f"| {case} | " + " | ".join(f"{losses[seed]:.4f}" for seed in seeds) + f" | {statistics.mean(differences):+.4f} | {spread:.4f} |")
PY
