"""Hydra groups for verl's entry points: ``rollout_spec`` (off, suffix, mtp, block, the same in vLLM as vllm_*) and ``machine`` (cpu)."""
