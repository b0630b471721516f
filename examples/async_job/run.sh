#!/usr/bin/env bash
# An asynchronous GRPO run as a Ray job: a trainer and two rollout replicas side by side, on a CPU. A replica whose process dies is
# replaced while the job goes on (docs/verl.md).
#
#   examples/async_job/run.sh [hydra overrides]
#
# It starts a Ray cluster of this one machine, submits the job, shows its log and stops the cluster again. On a cluster that is there:
# set DASHBOARD=http://head:8265, and nothing is started or stopped. RUN (default runs/async_job), PYTHON and SPEC (default suffix) as in
# examples/grpo.sh; RUN must be reachable from where the job runs.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
: "${RUN:=runs/async_job}" "${SPEC:=suffix}" "${PYTHON:=python}" "${DASHBOARD:=}" "${PORT:=6399}" "${DASHBOARD_PORT:=8299}"
mkdir -p "$RUN"
RUN="$(cd "$RUN" && pwd)"
python="$(command -v "$PYTHON")"
ray=("$python" -m ray.scripts.scripts)
export RAY_USAGE_STATS_ENABLED=0

if [ -z "$DASHBOARD" ]; then
  DASHBOARD="http://127.0.0.1:$DASHBOARD_PORT"
  # Newer versions of Ray guard a cluster that they start with a token; this one's is its own.
  RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$("$python" -c 'import secrets; print(secrets.token_hex(32))')}"
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
  # Processors and GPUs are places in verl's schedule: one for the trainer, one a replica. With --block the cluster is a child of this
  # script and ends with it; `ray stop` would end every cluster of this user. In a folder of its own no other program takes it for its.
  folder="$(mktemp -d -t ray.XXXXXX)"
  "${ray[@]}" start --head --block --temp-dir="$folder" --num-cpus=32 --num-gpus=3 --port="$PORT" --dashboard-port="$DASHBOARD_PORT" --disable-usage-stats &
  head=$!
  trap 'kill "$head" 2>/dev/null; wait "$head" || true; rm -rf "$folder"' EXIT
  until (exec 3<>"/dev/tcp/127.0.0.1/$DASHBOARD_PORT") 2>/dev/null; do
    kill -0 "$head" 2>/dev/null || { echo "Ray did not start; its messages are above" >&2; exit 1; }
    sleep 0.5
  done
fi

# The workers are children of the cluster, not of the job: what examples/grpo.sh exports for them goes along.
environment="$("$python" -c 'import json, sys; print(json.dumps({"env_vars": dict(pair.split("=", 1) for pair in sys.argv[1:])}))' \
  "RUN=$RUN" "SPEC=$SPEC" "PYTHON=$python" MODE=separate_async "VERL_FILE_LOGGER_PATH=$RUN/metrics.jsonl" \
  HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}")"
"${ray[@]}" job submit --address "$DASHBOARD" --runtime-env-json "$environment" -- \
  "$here/../verl_grpo_tiny/run.sh" actor_rollout_ref.rollout.n_gpus_per_node=2 ray_kwargs.ray_init.num_cpus=null \
  ray_kwargs.ray_init.num_gpus=null "$@"
