#!/usr/bin/env bash
# Step time over a slow network, by codec of the gradients: two hosts emulated by network namespaces, joined by a link whose rate
# `tc` limits in both directions. Needs root and iproute2; says so and ends with 0 where it may not make namespaces.
# Usage: bench/slow_network.sh OUT.jsonl [PROCESSES_A_HOST [--rates 1 10] [--cases none int8] [--steps 10] [SETTING=VALUE...]]
# The Python of $PYTHON (python3) runs bench/slow_network.py, which describes the rest.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,5s/^# //p' "$0"; exit 2; }
out=$(realpath -m "$1") processes=${2:-1}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=.:${PYTHONPATH:-} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES= GLOO_SOCKET_IFNAME=slow
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

skip() { echo "skipped: $1"; exit 0; }
command -v ip > /dev/null && command -v tc > /dev/null || skip "ip and tc (iproute2) are not installed"
[ "$(id -u)" = 0 ] || skip "making network namespaces needs root"

hosts=("trainer-$$-0" "trainer-$$-1") agents=() folder=$(mktemp -d)
# shellcheck disable=SC2317
clean() {
  for agent in "${agents[@]}"; do kill "$agent" 2> /dev/null || true; done
  wait
  for host in "${hosts[@]}"; do ip netns del "$host" 2> /dev/null || true; done
  rm -rf "$folder"
}
trap clean EXIT
trap 'exit 130' INT TERM

build() {
  ip netns add "${hosts[0]}" && ip netns add "${hosts[1]}" &&
    ip link add slow netns "${hosts[0]}" type veth peer name slow netns "${hosts[1]}" || return
  for number in 0 1; do
    host() { ip netns exec "${hosts[$number]}" "$@"; }
    host ip address add "10.213.7.$((number + 1))/24" dev slow && host ip link set slow up && host ip link set lo up &&
      host tc qdisc replace dev slow root tbf rate 1gbit burst 32kb limit 16mb || return
  done
}
build 2> "$folder/error" || skip "no limited link between network namespaces here: $(tail -1 "$folder/error")"

for number in 0 1; do
  ip netns exec "${hosts[$number]}" "${PYTHON:-python3}" -m torch.distributed.run --nnodes 2 --node-rank "$number" \
    --nproc-per-node "$processes" --master-addr 10.213.7.1 --master-port 29400 bench/slow_network.py "$folder" "$out" "$@" &
  agents+=($!)
done
wait -n && wait -n  # the first that fails ends the other
