#!/usr/bin/env bash
# Creates .venv and installs the project with all it needs. Quick when nothing changed. PYTHON=... picks the interpreter,
# VENV=... another folder, TORCH=... a version of torch.
# Without TORCH, a machine with a GPU (it has nvidia-smi) gets the newest torch that is allowed. One without gets 2.13, which
# the machines that test the project have as a small CPU build; 2.14 would bring 3 GB of CUDA libraries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
  echo "trainer needs Python 3.11 to 3.13, and $python is $("$python" --version); set PYTHON=/path/to/python3.11" >&2; exit 2; }
venv=${VENV:-.venv}
if [ -n "${TORCH:-}" ]; then torch="torch==$TORCH"
elif command -v nvidia-smi > /dev/null; then torch=torch
else torch="torch<2.14"; fi
stamp() { echo "$("$venv/bin/python" --version) $torch $(cksum < pyproject.toml)"; }
[ -x "$venv/bin/python" ] && [ "$(cat "$venv/.installed" 2>/dev/null)" = "$(stamp)" ] && exit 0
# Debian's Python has venv without ensurepip: then pip itself installs pip.
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" 2>/dev/null || {
  "$python" -m venv --without-pip --clear "$venv"; "$python" -m pip --python "$venv/bin/python" install -q pip; }
echo "Installing trainer into $venv (once; a few minutes) ..."
"$venv/bin/python" -m pip install -q --disable-pip-version-check -e '.[all]' "$torch"
stamp > "$venv/.installed"
