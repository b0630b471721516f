"""Weights to rollouts in other processes over Ray's object store: ``checkpoint_engine.backend=rollout_spec``.

verl's own backends need NCCL or RDMA; this one needs nothing, so that ``separate_async`` runs on CPUs. The first trainer rank posts buckets
to the mailbox; every rollout worker reads them in order.

verl imports this module by ``checkpoint_engine.custom_backend_module``.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from rollout_spec_rl.verl import BACKEND
from rollout_spec_rl.verl.mailbox import Posting, open_mailbox, read
from rollout_spec_rl.verl.weights import NamedTensor, buckets


@CheckpointEngineRegistry.register(BACKEND)
class RolloutSpecCheckpointEngine(CheckpointEngine):
    """One sender (the first trainer rank), any number of receivers; trainer ranks other than the first only take part in the gather."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._bucket_bytes = bucket_size
        self._mailbox = open_mailbox() if is_master else None  # the sender's: it goes when the trainer does

    def prepare(self) -> dict[str, Any]:
        """The mailbox is there before any receiver looks for it."""
        if self._mailbox is not None:
            ray.get(self._mailbox.__ray_ready__.remote())
        return {}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: list[dict[str, Any]],  # noqa: ARG003  # of prepare: a name is all that is shared
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {"rank": list(range(actor_wg_world_size))}, {"rank": list(range(rollout_world_size))}

    def init_process_group(self, rank: int) -> None:
        """Nothing to connect: everybody finds the mailbox by its name."""

    def finalize(self) -> None:
        """Buckets go when the next version comes."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Send everything as version ``global_steps``; returns metrics of the transfer."""
        assert global_steps is not None, "verl sends weights with their version"
        began, num_bytes = time.perf_counter(), 0
        if self._mailbox is None:
            async for _ in ensure_async_iterator(weights):  # every rank takes part in the gather
                pass
            return {}
        posting = Posting(self._mailbox, global_steps)
        await posting.begin(again=True)
        async for bucket in buckets(ensure_async_iterator(weights), global_steps, self._bucket_bytes):
            num_bytes += sum(tensor.nbytes for _, tensor in bucket.tensors)
            await posting.put(bucket)
        await posting.end()
        return {"rollout_spec/weight_send_s": time.perf_counter() - began, "rollout_spec/weight_send_mb": num_bytes / 2**20}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[NamedTensor]:
        """Name and tensor of everything that was sent, checked against the sender's checksums."""
        assert global_steps is not None, "verl asks for weights by their version"
        async for bucket in read(open_mailbox(), global_steps):
            for named_tensor in bucket.checked():
                yield named_tensor
