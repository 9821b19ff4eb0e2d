#!/usr/bin/env bash
# One host's part of a run on several: a torchrun with one rank a GPU. The same command on every host; again, it goes on.
#
#   NODES=2 NODE_RANK=0 FIRST_HOST=10.0.0.1 bash scripts/train_node.sh RUN_FOLDER CONFIG... [--section.key value ...]
#
# RUN_FOLDER must lie on a disk that all hosts share. Returns the run's own code: 0 done, 85 asked to stop and saved, 2 bad
# input, 1 failed. scripts/kubernetes and scripts/skypilot call it; for Slurm there is scripts/slurm/train.sbatch.
#   RANKS         ranks of this host (default: its GPUs, or 1)     PORT    of the rendezvous on the first host (29400)
#   MAX_RESTARTS  times the ranks are started again here (0)       PYTHON  the environment's interpreter (python)
#   LOCAL_ADDR    this host's address as others reach it (default: that of its name)
set -euo pipefail

RUN=${1:?usage: NODES=N NODE_RANK=I FIRST_HOST=NAME train_node.sh RUN_FOLDER CONFIG... [--section.key value ...]}
shift
: "${NODES:?how many hosts}" "${NODE_RANK:?this one, from 0}" "${FIRST_HOST:?name or address of host 0}"
PYTHON=${PYTHON:-python}
WAIT_SECONDS=${WAIT_SECONDS:-900} # for hosts that start later, and for a link that is cut
SHUTDOWN_SECONDS=${SHUTDOWN_SECONDS:-280}
if [[ -z "${RANKS:-}" ]]; then
    RANKS=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || true
    RANKS=$((RANKS > 0 ? RANKS : 1))
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

deadline=$((SECONDS + WAIT_SECONDS))
until getent ahosts "$FIRST_HOST" >/dev/null; do # its name may be known only once it runs
    if ((SECONDS > deadline)); then
        echo "no address for $FIRST_HOST after $WAIT_SECONDS s" >&2
        exit 1
    fi
    sleep 1
done

rm -f "$RUN/exit.json" # no code of an earlier start; ranks start only once all hosts are here
here=()
if [[ -n "${LOCAL_ADDR:-}" ]]; then here=(--local-addr "$LOCAL_ADDR"); fi
"$PYTHON" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "$FIRST_HOST:${PORT:-29400}" --rdzv-id dit-train "${here[@]}" \
    --rdzv-conf "is_host=$((NODE_RANK == 0)),join_timeout=$WAIT_SECONDS,read_timeout=$WAIT_SECONDS" \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout "$SHUTDOWN_SECONDS" \
    -m dit_train "$@" --run.folder "$RUN" &
agent=$!
for signal in TERM INT USR1; do # bash takes a signal only between commands, hence the wait below
    trap "kill -$signal $agent 2>/dev/null || true" "$signal"
done

code=0
wait "$agent" || code=$?
while kill -0 "$agent" 2>/dev/null; do # a trap ends the wait before torchrun has ended
    code=0
    wait "$agent" || code=$?
done
for _ in {1..20}; do # torchrun turns every code into 1; a shared disk may show the file late
    [[ -f "$RUN/exit.json" ]] && exit "$(sed -n 's/.*"code": *\([0-9]*\).*/\1/p' "$RUN/exit.json")"
    sleep 0.5
done
exit $((code == 0 ? 1 : code)) # not done, as far as anybody has said
