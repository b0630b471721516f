#!/usr/bin/env bash
# GRPO with verl on a CPU in about two minutes: a random tiny model, verl's own trainer, rollouts by rollout_spec.
#
#   examples/verl_grpo_tiny/run.sh [hydra overrides]        # e.g. trainer.total_training_steps=40
#
# RUN=folder (default runs/verl_grpo_tiny) gets metrics.jsonl and summary.json, PYTHON=interpreter runs it (default python),
# SPEC=off|suffix|mtp|block (default suffix) names the rollouts.
#
# Token-level importance weights are on for what they show: rollout_corr/rollout_is_max and _min are the largest and smallest ratio of the
# trainer's probability of a sampled token to the one that the rollout reported, 1 up to rounding.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python}"
mkdir -p "${RUN:=runs/verl_grpo_tiny}"
run="$(cd "$RUN" && pwd)"
[ -d "$run/data/model" ] || "$python" "$here/prepare.py" "$run/data"

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0 HYDRA_FULL_ERROR=1
# Every process of a run imports torch; with a pool of threads each they would wait for one another.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export VERL_FILE_LOGGER_PATH="$run/metrics.jsonl"

"$python" -m verl.trainer.main_ppo +machine=cpu "+rollout_spec=${SPEC:-suffix}" \
  hydra.run.dir="$run/hydra" \
  algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_is=token \
  data.train_files="$run/data/train.parquet" data.val_files="$run/data/validation.parquet" \
  data.train_batch_size=8 data.max_prompt_length=64 data.max_response_length=32 data.dataloader_num_workers=0 \
  actor_rollout_ref.model.path="$run/data/model" actor_rollout_ref.model.enable_gradient_checkpointing=false \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.rollout.agent.num_workers=1 \
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16 \
  reward.num_workers=1 reward.custom_reward_function.path="$here/reward.py" \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
  trainer.logger='["console","file"]' trainer.total_training_steps=3 trainer.total_epochs=100 \
  trainer.val_before_train=false trainer.test_freq=-1 trainer.save_freq=-1 trainer.resume_mode=disable \
  "$@"

"$python" "$here/summarise.py" "$run"
