#!/usr/bin/env bash
# Installs the project, then runs the whole test suite. Arguments go to pytest: launch/test.sh -k checkpoint
# With another torch than the one that setup.sh installs, such as the oldest: VENV=.venv-oldest TORCH=2.11.0 launch/test.sh
set -euo pipefail
bash "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
# Where this is set, each of hundreds of processes would compile the package again, and each worker all tests.
unset PYTHONDONTWRITEBYTECODE
# A crash of a worker ends the suite: pytest-xdist would wait for ever for the files of a worker that it starts anew.
# Four workers (some tests wait more than they compute), each with whole files, whose fixtures are made once; their order: tests/conftest.py.
exec "${VENV:-.venv}/bin/python" -m pytest -q --durations=10 -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@" tests
