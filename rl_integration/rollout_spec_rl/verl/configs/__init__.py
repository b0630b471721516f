"""Hydra groups for verl's entry points: ``rollout_spec`` (off, suffix, mtp, block) and ``machine`` (cpu)."""
