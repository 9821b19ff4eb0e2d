#!/usr/bin/env bash
# Trains the same small DiT on 8x8 digits with four optimizers, scores each against held-out images, compares them.
# usage: bash scripts/quickstart.sh [--smoke]      (--smoke: 20 steps each)
# A second call goes on where the first one stopped, or says that all is done.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

folder=runs/quickstart
overlay=()
case "${1:-}" in
"") ;;
--smoke) folder=runs/smoke overlay=(configs/quickstart/smoke.yaml) ;;
*)
    echo "usage: bash scripts/quickstart.sh [--smoke]" >&2
    exit 2
    ;;
esac

install ""
# one rank a GPU (a power of two of them, to divide the batch), else two on the CPU
ranks=0
if command -v nvidia-smi >/dev/null; then ranks=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())'); fi
if [ "$ranks" -eq 0 ]; then ranks=2; fi
while [ $((128 % ranks)) -ne 0 ]; do ranks=$((ranks - 1)); done

# 1.6e-2 is, of a grid of ratio 2, each one's best rate on this task or equal to it within noise (scripts/sweep.py)
runs=()
for optimizer in adamw muon muon_bp periodic_row_muon; do
    runs+=("$folder/$optimizer")
    "$PYTHON" -m dit_train launch --ranks "$ranks" configs/quickstart/base.yaml "configs/optimizers/$optimizer.yaml" \
        ${overlay[@]+"${overlay[@]}"} --optimizer.lr 1.6e-2 --run.folder "$folder/$optimizer"
done
"$PYTHON" scripts/compare.py "${runs[@]}" --out "$folder"
