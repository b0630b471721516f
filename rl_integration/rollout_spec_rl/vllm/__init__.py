"""Our drafters, budgets and telemetry inside vLLM (V1 runner): offline ``LLM``, ``vllm serve``, and under verl.

    llm = LLM(model, **rollout_spec_rl.vllm.engine_args(drafter="runs/mtp/drafter", draft_length=3))

vLLM loads ``plugin`` in every process by the entry-point group ``vllm.general_plugins``; nothing else here runs unless it is asked for.
This module imports no vLLM.
"""

from __future__ import annotations

from rollout_spec_rl.vllm.options import VllmOptions, engine_args

__all__ = ["VllmOptions", "engine_args"]
