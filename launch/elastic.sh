#!/usr/bin/env bash
# Trains over nodes without a scheduler, and goes on when processes die or nodes are lost: run the same command on each node.
#   NODES=2:4 launch/elastic.sh HOST[:PORT] +config=llama3_8b run.name=mine        HOST: a node that stays; it must reach the others
#   NODES       nodes, or least:most (1)              PROCESSES   processes a node (its GPUs, or 1)
#   RESTARTS    restarts after failures (10)          WAIT        seconds to wait for further nodes, at each start (60)
#   RUN_ID      names the launch, for its nodes to meet (trainer)
# A restart resumes what the launch has saved last, whatever checkpoint.resume says, on the nodes that are left; a node that comes back
# joins after a save. Keep parallel.dp=-1 (the default) and give the batch by batch.global_size, so that it stays the same whatever the
# number of ranks.
set -euo pipefail
[ $# -ge 1 ] && [[ $1 != *=* ]] || { echo "usage: NODES=2:4 $0 HOST[:PORT] +config=RECIPE [SETTING=VALUE ...]" >&2; exit 2; }
endpoint=$1; shift
[[ $endpoint == *:* ]] || endpoint=$endpoint:29400
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${TRAINER_PYTHON:-$PWD/.venv/bin/python}
processes=${PROCESSES:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
# Else processes that are started again read the addresses of the dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# On a signal torchrun passes it on and waits so long for the save (torch 2.13; earlier, 30 s).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
# torchrun passes these on to its processes, which save and stop. Of others it would die. It does not heed nohup by itself.
signals=SIGTERM,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2
[ -n "$(trap -p HUP)" ] || signals=$signals,SIGHUP
exec "$python" -m torch.distributed.run --nnodes "${NODES:-1}" --nproc-per-node "$processes" --max-restarts "${RESTARTS:-10}" \
  --signals-to-handle "$signals" --rdzv-backend c10d \
  --rdzv-endpoint "$endpoint" --rdzv-id "${RUN_ID:-trainer}" --rdzv-conf "last_call_timeout=${WAIT:-60}" -m trainer "$@"
