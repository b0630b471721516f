#!/usr/bin/env bash
# GRPO of Qwen3-0.6B with the actor on GPUs and rollouts by the embedded engine on the same machine's processors, beside the actor's updates.
#
#   DRAFTER=runs/mtp_qwen3/drafter DATA=data/gsm8k examples/verl_grpo_qwen3_gpu/run.sh [hydra overrides]
#
# config.yaml holds the run; this only names files. DATA has train.parquet and test.parquet in verl's format.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
: "${DRAFTER:?give the folder of a trained drafter (rollout-spec train-drafter), or SPEC=suffix}" "${DATA:?give the folder of train.parquet and test.parquet}"
"${PYTHON:-python}" -m verl.trainer.main_ppo --config-dir "$here" --config-name config "+rollout_spec=${SPEC:-mtp}" \
  data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
  actor_rollout_ref.rollout.custom.rollout_spec.drafter="$DRAFTER" "$@"
