#!/usr/bin/env bash
# GRPO of SmolLM2-135M-Instruct on reasoning-gym's gsm_symbolic, on a CPU: about 20 s a step on two cores.
#
#   examples/verl_grpo_smollm2/run.sh [hydra overrides]                  # trains a drafter on this policy and these prompts first
#   DRAFTER=runs/mtp_smollm2/drafter examples/verl_grpo_smollm2/run.sh   # with one that is there
#   SPEC=off examples/verl_grpo_smollm2/run.sh                           # without speculation
#   SPEC=vllm_mtp examples/verl_grpo_smollm2/run.sh                      # rollouts by vLLM, or vllm_suffix, vllm_block; DRAFTER as above
#
# RUN (default runs/verl_grpo_smollm2), PYTHON and SPEC (default mtp) as in examples/grpo.sh. The first drafter takes some 20 minutes;
# it is kept by the checksum of the policy, so the next run finds it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
: "${RUN:=runs/verl_grpo_smollm2}" "${SPEC:=mtp}"
# In synchronous mode the actor and the engine take turns, so each may have all cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
source "$here/../grpo.sh"
if [[ "$SPEC" == vllm_* ]]; then
  export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
  # verl sends no tensor to vLLM that is larger than the bucket, and the embedding is one of 108 MB.
  engine=(actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=128
    actor_rollout_ref.rollout.max_model_len=512 actor_rollout_ref.rollout.max_num_seqs=16 actor_rollout_ref.rollout.max_num_batched_tokens=512)
else
  engine=("+actor_rollout_ref.rollout.custom.rollout_spec.threads=$OMP_NUM_THREADS")
fi
[ -d "$run/data/model" ] || "$python" "$here/prepare.py" "$run/data"

drafter_of "$here/../../configs/drafter/${SPEC##*_}_smollm2.yaml"

grpo verl.trainer.main_ppo \
  trainer.total_training_steps=24 data.seed=1 algorithm.rollout_correction.rollout_is=token \
  data.train_batch_size=2 data.max_prompt_length=256 data.max_response_length=96 \
  actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.actor.optim.lr=5e-6 \
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
  reward.custom_reward_function.path="$here/reward.py" \
  "${engine[@]}" ${drafter[@]+"${drafter[@]}"} "$@"
