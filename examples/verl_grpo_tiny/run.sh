#!/usr/bin/env bash
# GRPO with verl on a CPU in about two minutes: a random tiny model, verl's own trainer, rollouts by rollout_spec.
#
#   examples/verl_grpo_tiny/run.sh [hydra overrides]        # e.g. trainer.total_training_steps=40
#   SPEC=vllm_suffix examples/verl_grpo_tiny/run.sh         # rollouts by vLLM
#   MODE=fully_async examples/verl_grpo_tiny/run.sh         # or colocate_async, separate_async; default sync
#   SPEC=mtp examples/verl_grpo_tiny/run.sh                 # trains an MTP head on this policy and these prompts first, in seconds;
#                                                           # or block, and vllm_mtp or vllm_block for the same with rollouts by vLLM
#
# RUN (default runs/verl_grpo_tiny), PYTHON and SPEC (default suffix) as in examples/grpo.sh. The model and prompts are made by prepare.py.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
: "${RUN:=runs/verl_grpo_tiny}" "${SPEC:=suffix}" "${MODE:=sync}"
source "$here/../grpo.sh"
head_dim=16 vllm=()
if [[ "$SPEC" == vllm_* ]]; then
  head_dim=32
  export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
  vllm=(actor_rollout_ref.rollout.max_model_len=128 actor_rollout_ref.rollout.max_num_seqs=16
    actor_rollout_ref.rollout.max_num_batched_tokens=256)
fi
[ -d "$run/data/model" ] || "$python" "$here/prepare.py" "$run/data" "$head_dim"

trainer=verl.trainer.main_ppo
mode=("trainer.v1.trainer_mode=$MODE" data.train_batch_size=8 trainer.total_training_steps=3 algorithm.rollout_correction.rollout_is=token)
# Trainer and rollouts in workers of their own, weights through Ray's object store.
apart=(actor_rollout_ref.hybrid_engine=false actor_rollout_ref.rollout.checkpoint_engine.backend=rollout_spec ray_kwargs.ray_init.num_gpus=2)
case "$MODE" in
  sync | colocate_async) ;;
  separate_async)
    mode+=("${apart[@]}" actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1 trainer.v1.separate_async.parameter_sync_step=1)
    ;;
  fully_async)
    trainer=verl.experimental.fully_async_policy.fully_async_main
    mode=("${apart[@]}" data.train_batch_size=0 rollout.nnodes=1 rollout.n_gpus_per_node=1 rollout.n=4 rollout.total_rollout_steps=32
      async_training.trigger_parameter_sync_step=1 async_training.staleness_threshold=0.5)
    ;;
  *)
    echo "MODE=$MODE is not one of sync, colocate_async, separate_async, fully_async" >&2
    exit 2
    ;;
esac

drafter_of "$here/drafter_${SPEC##*_}.yaml"

grpo "$trainer" \
  data.max_prompt_length=64 data.max_response_length=32 \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
  reward.custom_reward_function.path="$here/reward.py" \
  ${drafter[@]+"${drafter[@]}"} ${vllm[@]+"${vllm[@]}"} "${mode[@]}" "$@"
