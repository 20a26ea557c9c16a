#!/usr/bin/env bash
# What the case `tp_overlap` of bench/gpu_check.sh does in 40 rounds, for ROUNDS (1700) on 2 GPUs, in bf16 of few tokens:
# products beside their collectives, with late ranks and memory full of NaN, in 10,000 epochs of each kind of product or
# more, which the log's last line counts. Then SANITIZED (1) rounds of kernels alone, without cuBLAS, at which
# compute-sanitizer's racecheck looks, where it is installed; it sees hazards within a GPU's thread blocks, not between
# GPUs. Before them a kernel of such a name that has a hazard, which racecheck has to report.
# Usage: bench/fusion_long.sh OUT_FOLDER. Logs and the largest errors go there. Exit code 1 if one failed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$1"; out=$(realpath "$1")
export PYTHONPATH=$PWD:$PWD/tests:${PYTHONPATH:-} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
run=(-m torch.distributed.run --standalone --nproc-per-node 2 tests/workers/fusion_gpu.py)

failed=0
check() {  # NAME COMMAND...: its output goes to a log
    if "${@:2}" > "$out/$1.log" 2>&1; then echo "$1 passed"; else failed=1; echo "$1 failed: $out/$1.log"; fi
}

[ "${ROUNDS:-1700}" -gt 0 ] && check long python3 "${run[@]}" "$out/long.json" "${ROUNDS:-1700}" 1000 72
if command -v compute-sanitizer > /dev/null; then
    ours=(); for name in _gather_matmul _matmul_scatter _sum_received _attend_slots _combine _cast _add_up; do
        ours+=(--kernel-name "kernel_substring=$name")
    done
    racecheck() { compute-sanitizer --tool racecheck --target-processes all --error-exitcode 1 "${ours[@]}" "$@"; }
    reported() { racecheck "$@" | tee /dev/stderr | grep -q "RACECHECK SUMMARY: [1-9]"; }
    check control reported python3 tests/workers/hazard.py
    check racecheck racecheck python3 "${run[@]}" "$out/racecheck.json" kernels "${SANITIZED:-1}" 72
else
    echo "racecheck left out: compute-sanitizer is not installed (it comes with the CUDA toolkit)"
fi
exit $failed
