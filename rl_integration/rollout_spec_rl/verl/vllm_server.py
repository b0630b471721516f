"""verl's own vLLM server and replica, with our metrics: verl's server hands nothing of its workers' answers on.

Registered in the place of verl's replica for ``rollout.name=vllm``; without our options in the engine's settings it is verl's.
"""

from __future__ import annotations

import pickle
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from rollout_spec_rl.verl.metrics import StepTotals, merge
from rollout_spec_rl.vllm.options import KEY


class SpecVllmServer(vLLMHttpServer):
    """verl's server, found and asked as our own server is (collect.py)."""

    async def take_metrics(self) -> StepTotals:
        """Sums over the engine's workers since they were last asked for."""
        return merge([pickle.loads(packed) for packed in await self.engine.collective_rpc("rollout_spec_totals")])


class SpecVllmReplica(vLLMReplica):
    """Starts our server where the engine runs our proposer."""

    def __init__(self, replica_rank: int, config: Any, *args: Any, **settings: Any) -> None:
        super().__init__(replica_rank, config, *args, **settings)
        engine = (config.get("engine_kwargs") or {}).get("vllm") or {}
        if KEY in (engine.get("additional_config") or {}):
            self.server_class = ray.remote(SpecVllmServer)
