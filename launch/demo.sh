#!/usr/bin/env bash
# Installs the project, then trains the recipe `demo` on 4 processes (on 1, 2 or 4 GPUs where there are GPUs).
# Run again, it resumes or says that it is done. Arguments are overrides: launch/demo.sh run.steps=200
set -euo pipefail
bash "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
processes=$((gpus == 1 ? 1 : gpus == 2 || gpus == 3 ? 2 : 4))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
.venv/bin/torchrun --standalone --nproc-per-node "$processes" -m trainer +config=demo "$@"
[ $# -gt 0 ] && exit 0
cat <<TEXT

What to try next:
  .venv/bin/trainer report runs/demo                 # the curves, as a page
  .venv/bin/trainer sample runs/demo prompt="def "   # text from the trained model
  .venv/bin/trainer train --processes 2 +config=demo run.name=other parallel=zero1   # the same run under another plan
  .venv/bin/trainer train --processes 8 +config=demo run.name=demo3d run.device=cpu  # data, tensor and pipeline parallelism
TEXT
