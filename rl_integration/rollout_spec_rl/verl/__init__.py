"""verl with rollouts by the embedded engine: a backend named ``rollout_spec``, a CPU platform, and Hydra groups that switch them on.

    python -m verl.trainer.main_ppo +rollout_spec=suffix ...        # speculative rollouts
    python -m verl.trainer.main_ppo +rollout_spec=off ...           # the same engine without speculation
    python -m verl.trainer.main_ppo +machine=cpu +rollout_spec=... # on a machine without an accelerator

verl loads ``plugin`` in every process by the entry-point group ``verl.plugins``; everything else here is imported where it is used.
"""

from __future__ import annotations

BACKEND = "rollout_spec"  # of actor_rollout_ref.rollout.name
CPU = "cpu"  # of VERL_PLATFORM and trainer.device
