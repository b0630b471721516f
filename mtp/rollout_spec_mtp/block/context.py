"""ContextCache: which slot of the drafter's K/V a request has, and how many context rows it holds.

Shape legend: R rows, D draft layers, Hkv key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollout_spec.engine.kv import KVSlots
from rollout_spec_mtp.block.served import ContextKeys

_FIRST_SLOTS, _FIRST_CAPACITY = 4, 256


class ContextCache:
    """Slots by request id. Grows as requests and contexts do: a drafter is built before the engine's sizes are known."""

    def __init__(self, make_slots: Callable[[int, int], KVSlots], margin: int) -> None:
        self._make_slots, self._margin = make_slots, margin  # margin: rows of room behind every context
        self.kv = make_slots(_FIRST_SLOTS, _FIRST_CAPACITY + margin)
        self._slots: dict[str, int] = {}
        self._lengths: dict[str, int] = {}

    def open(self, request_id: str) -> None:
        """Give the request a slot that holds nothing; one that has a slot keeps it."""
        self._lengths[request_id] = 0
        if request_id in self._slots:
            return
        taken = set(self._slots.values())
        num_slots = self.kv.k.shape[1]
        if len(taken) == num_slots:
            self._grow(2 * num_slots, self.kv.capacity)
        self._slots[request_id] = next(slot for slot in range(self.kv.k.shape[1]) if slot not in taken)

    def close(self, request_id: str) -> None:
        del self._slots[request_id], self._lengths[request_id]

    def forget(self) -> None:
        """Every context is void: the target's weights changed."""
        self._lengths = dict.fromkeys(self._lengths, 0)

    def slot(self, request_id: str) -> int:
        return self._slots[request_id]

    def length(self, request_id: str) -> int:
        """Context rows that the request's slot holds, from position 0."""
        return self._lengths[request_id]

    def extend(self, request_id: str, first: int, count: int) -> None:
        """Count rows ``first:first + count`` as held; ValueError if that would leave a gap before them."""
        held = self._lengths[request_id]
        if first > held:
            raise ValueError(f"request {request_id}: target states of positions {held} to {first - 1} never came to the block drafter")
        self._lengths[request_id] = first + count
        if first + count + self._margin > self.kv.capacity:
            self._grow(self.kv.k.shape[1], 2 * (first + count) + self._margin)

    def write(self, keys: ContextKeys, slots: Tensor, positions: Tensor) -> None:
        """Store rows [R, D, Hkv, d] at their slots [R] and positions [R]."""
        self.kv.k[:, slots, :, positions] = keys.k
        self.kv.v[:, slots, :, positions] = keys.v

    def _grow(self, num_slots: int, capacity: int) -> None:
        old, self.kv = self.kv, self._make_slots(num_slots, capacity)
        for new_cache, old_cache in ((self.kv.k, old.k), (self.kv.v, old.v)):
            new_cache[:, : old_cache.shape[1], :, : old_cache.shape[3]] = old_cache


def request_slots(cache: ContextCache, request_ids: list[str]) -> Tensor:
    """[requests] int64."""
    return torch.tensor([cache.slot(request_id) for request_id in request_ids], dtype=torch.int64)
