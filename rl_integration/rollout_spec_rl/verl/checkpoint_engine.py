"""Weights to rollouts in other processes over Ray's object store: ``checkpoint_engine.backend=rollout_spec``.

verl's own backends need NCCL or RDMA; this one needs nothing, so that ``separate_async`` runs on CPUs. The first trainer rank puts buckets
into the object store and their references into a mailbox; every rollout worker reads them in order.

verl imports this module by ``checkpoint_engine.custom_backend_module``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from rollout_spec_rl.verl import BACKEND
from rollout_spec_rl.verl.weights import NamedTensor, WeightBucket, buckets

MAILBOX = "rollout_spec_mailbox"


class Mailbox:
    """References to the buckets of the newest version. Asking for one that has not come yet waits."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._letters: list[list[Any]] = []  # references in lists: bare ones would be fetched into this process
        self._complete = False
        self._changed = asyncio.Condition()

    async def begin(self, version: int) -> None:
        """A new version; the buckets of the one before may go."""
        async with self._changed:
            self._version, self._letters, self._complete = version, [], False
            self._changed.notify_all()

    async def put(self, version: int, letter: list[Any]) -> None:
        async with self._changed:
            assert version == self._version, f"bucket of version {version} while {self._version} is being sent"
            self._letters.append(letter)
            self._changed.notify_all()

    async def end(self, version: int) -> None:
        async with self._changed:
            assert version == self._version, f"end of version {version} while {self._version} is being sent"
            self._complete = True
            self._changed.notify_all()

    async def get(self, version: int, index: int) -> list[Any] | None:
        """The bucket of that number, or None when there are no more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version == version and (index < len(self._letters) or self._complete))
            return self._letters[index] if index < len(self._letters) else None


@CheckpointEngineRegistry.register(BACKEND)
class RolloutSpecCheckpointEngine(CheckpointEngine):
    """One sender (the first trainer rank), any number of receivers; trainer ranks other than the first only take part in the gather."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._bucket_bytes, self._is_master = bucket_size, is_master
        self._held: Any = None

    def prepare(self) -> dict[str, Any]:
        """The sender makes the mailbox before any receiver looks for it."""
        if self._is_master and self._held is None:
            self._held = ray.remote(Mailbox).options(name=MAILBOX, num_cpus=0, max_concurrency=1000).remote()
            ray.get(self._held.__ray_ready__.remote())
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

    @property
    def _mailbox(self) -> Any:
        if self._held is None:
            self._held = ray.get_actor(MAILBOX)
        return self._held

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Send everything as version ``global_steps``; returns metrics of the transfer."""
        assert global_steps is not None, "verl sends weights with their version"
        began, num_bytes = time.perf_counter(), 0
        if self._is_master:
            await self._mailbox.begin.remote(global_steps)
        async for bucket in buckets(ensure_async_iterator(weights), global_steps, self._bucket_bytes):
            if self._is_master:
                num_bytes += sum(tensor.nbytes for _, tensor in bucket.tensors)
                await self._mailbox.put.remote(global_steps, [ray.put(bucket)])
        if not self._is_master:
            return {}
        await self._mailbox.end.remote(global_steps)
        return {"rollout_spec/weight_send_s": time.perf_counter() - began, "rollout_spec/weight_send_mb": num_bytes / 2**20}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[NamedTensor]:
        """Name and tensor of everything that was sent, checked against the sender's checksums."""
        assert global_steps is not None, "verl asks for weights by their version"
        index = 0
        while (letter := await self._mailbox.get.remote(global_steps, index)) is not None:
            bucket: WeightBucket = await letter[0]
            for named_tensor in bucket.checked():
                yield named_tensor
            index += 1
