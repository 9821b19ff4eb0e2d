#!/usr/bin/env bash
# The tests. usage: bash scripts/test.sh [--all | --gpu] [PYTEST ARGUMENTS]
#   (nothing)  what runs in minutes on two CPU cores      --all  the long ones too      --gpu  those that need a GPU
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

case "${1:-}" in
--all) marks="not gpu" && shift ;;
--gpu) marks="gpu" && shift ;;
*) marks="not long and not gpu" ;;
esac

install "[dev]"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m pytest -m "$marks" --durations=10 "$@"
