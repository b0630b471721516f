# What the GRPO examples on a CPU have in common; they source it and call `grpo TRAINER_MODULE overrides...`.
#
# RUN=folder gets metrics.jsonl and summary.json, PYTHON=interpreter runs it (default python), SPEC=off|suffix|mtp|block, or vllm_suffix|vllm_mtp|vllm_block, names the rollouts.
#
# Token-level importance weights are on for what they show: rollout_corr/rollout_is_max and _min are the largest and smallest ratio of the
# trainer's probability of a sampled token to the one that the rollout reported, 1 up to rounding.
examples="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python}"
mkdir -p "$RUN"
run="$(cd "$RUN" && pwd)"

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0 HYDRA_FULL_ERROR=1
# Every process of a run imports torch; with a pool of threads each they would wait for one another.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export VERL_FILE_LOGGER_PATH="$run/metrics.jsonl"

# drafter_of CONFIG: says in `drafter` which drafter SPEC=mtp, block, vllm_mtp or vllm_block takes: the one in the folder DRAFTER or, if that is
# empty, one that CONFIG trains on the run's policy and prompts before the first step.
drafter_of() {
  local ours=actor_rollout_ref.rollout.custom.rollout_spec options
  drafter=()
  case "$SPEC" in
    mtp | block) options="$ours" ;;
    vllm_mtp | vllm_block) options=actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.rollout_spec ;;
    *) return ;;
  esac
  if [ -n "${DRAFTER:-}" ]; then
    drafter=("$options.drafter=$(cd "$DRAFTER" && pwd)")
  else
    drafter=("+$ours.refresh_before_rl=true" "+$ours.drafter_config=$1")
  fi
}

grpo() {
  local module="$1"
  shift
  "$python" -m "$module" +machine=cpu "+rollout_spec=$SPEC" \
    hydra.run.dir="$run/hydra" \
    algorithm.adv_estimator=grpo \
    data.train_files="$run/data/train.parquet" data.val_files="$run/data/validation.parquet" data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path="$run/data/model" actor_rollout_ref.model.enable_gradient_checkpointing=false \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64 \
    reward.num_workers=1 \
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
    trainer.logger='["console","file"]' trainer.total_epochs=100 trainer.default_local_dir="$run/checkpoints" \
    trainer.val_before_train=false trainer.test_freq=-1 trainer.save_freq=-1 trainer.resume_mode=disable \
    "$@"
  "$python" "$examples/summarise.py" "$run"
}
