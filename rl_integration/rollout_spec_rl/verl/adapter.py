"""RolloutSpecAdapter: the training worker's end of a replica. It sends the trainer's weights to the server."""

from __future__ import annotations

import os
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from rollout_spec_rl.verl.mailbox import Posting, open_mailbox
from rollout_spec_rl.verl.names import server_name
from rollout_spec_rl.verl.weights import buckets


class RolloutSpecAdapter(BaseRollout):
    """Every trainer rank drives the gather of sharded weights; the replica's leader sends them."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True  # a replica is one rank
        self._server: Any = None
        self._mailbox: Any = None  # held, because it goes with the last who holds it

    @property
    def server(self) -> Any:
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """The engine gave nothing up."""

    async def release(self) -> None:
        """The engine keeps its memory."""

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", peft_config: Any = None, **_: Any
    ) -> None:
        """Send all weights as version ``global_steps``, bucket by bucket, each tensor with its checksum, then put them to use.

        Raises ValueError for LoRA adapters and delta formats, which the engine does not load.
        """
        if wire_format != "named_tensors":
            raise ValueError(
                f"weights come as {wire_format!r}; the embedded engine takes full tensors: use another checkpoint_engine.backend"
            )
        if peft_config is not None:
            raise ValueError("the embedded engine has no LoRA layers: set actor_rollout_ref.model.lora.merge=True to sync merged weights")
        if global_steps is None:
            raise ValueError("verl sent weights without a version (global_steps)")
        size = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        if self._mailbox is None:
            self._mailbox = open_mailbox()
        posting = Posting(self._mailbox, global_steps)
        await posting.begin()
        num_tensors = 0
        async for bucket in buckets(ensure_async_iterator(weights), global_steps, size):
            num_tensors += len(bucket.tensors)
            await self.server.receive_bucket.remote(await posting.put(bucket))
        await posting.end()
        await self.server.commit_weights.remote(global_steps, num_tensors)
        await self.server.set_global_steps.remote(global_steps)
