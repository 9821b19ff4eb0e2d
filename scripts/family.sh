#!/usr/bin/env bash
# Every optimizer on 8x8 digits for 500 steps, each at three learning rates, compared at its best.
# usage: bash scripts/family.sh [FOLDER]      (default runs/family; a second call goes on where the first one stopped)
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

if [ $# -gt 1 ]; then
    echo "usage: bash scripts/family.sh [FOLDER]" >&2
    exit 2
fi
install ""

chosen=()
at() { # RATES OPTIMIZER...
    local rates=$1 name
    shift
    for name in "$@"; do chosen+=(--optimizer "configs/optimizers/$name.yaml=$rates"); done
}
# where rates mean what AdamW's do, and else as trials of 60 steps said
at 8e-3,1.6e-2,3.2e-2 adamw adamw_8bit mars_adamw muon muon_8bit mars_muon muon_eq normuon muon_bp block_muon \
    periodic_row_muon row_muon auon_hybrid
at 1.6e-2,3.2e-2,4.8e-2 periodic_sign_muon
at 3.2e-2,6.4e-2,0.128 dion dion2
at 0.2,0.4,0.8 adago sgd
at 0.12,0.24,0.48 auon
at 2,4,8 auon_repo
at 1e-3,2e-3,4e-3 scion
at 2e-3,4e-3,8e-3 scion_row scion_sign lion
at 5e-5,1e-4,2e-4 scion_column
exec "$PYTHON" scripts/sweep.py configs/quickstart/base.yaml configs/studies/family.yaml --ranks 1 --jobs 2 \
    --out "${1:-runs/family}" "${chosen[@]}"
