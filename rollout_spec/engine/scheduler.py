"""Who runs and whose prompt is computed next: admission to slots, shared prefixes, chunked prefill.

Shape legend: B requests in the chunk, R rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.runner import StepInput
from rollout_spec.engine.running import RunningRequest

# A shared prefix shorter than this is not worth waiting for another request's prefill.
MIN_SHARED_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """Rows of one prefill forward: tokens ``starts[i]:ends[i]`` of each request."""

    requests: tuple[RunningRequest, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def step(self, tap_layers: tuple[int, ...]) -> StepInput:
        spans = list(zip(self.requests, self.starts, self.ends, strict=True))
        lengths = torch.tensor([end - start for _, start, end in spans])
        assert all(request.slot is not None for request in self.requests)
        return StepInput(
            token_ids=torch.tensor([token for request, start, end in spans for token in request.tokens[start:end]]),
            positions=torch.cat([torch.arange(start, end) for _, start, end in spans]),
            plan=AttentionPlan(
                row_offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
                slots=torch.tensor([request.slot.index for request in self.requests if request.slot is not None]),
                context_lengths=torch.tensor(self.starts),
            ),
            tap_layers=tap_layers,
            is_known=True,
        )


class Scheduler:
    """First come, first served. A request that shares a prompt with one being filled waits for it and copies its K/V."""

    def __init__(self, kv: KVSlots, prefill_chunk: int) -> None:
        self.waiting: deque[RunningRequest] = deque()
        self.running: list[RunningRequest] = []
        self._num_shared_tokens = 0
        self._kv, self._prefill_chunk = kv, prefill_chunk
        self._leaders: dict[str, RunningRequest] = {}  # request id -> the request whose prefill it waits for

    def admit(self) -> None:
        """Give waiting requests free slots, with whatever prefix of them some slot already holds."""
        while self.waiting:
            request = self.waiting[0]
            wanted = request.tokens[:-1]
            source, _ = self._kv.longest_prefix(wanted)
            slot = self._kv.acquire(prefer=source)
            if slot is None:
                return
            self.waiting.popleft()
            request.slot = slot
            self._share(request, wanted)
            self.running.append(request)

    def _share(self, request: RunningRequest, wanted: list[int]) -> None:
        """Copy the longest prefix there is; if a request still being filled will hold a longer one, wait for that."""
        assert request.slot is not None
        source, length = self._kv.longest_prefix(wanted)
        if source is None:
            request.slot.tokens, request.slot.taps, request.num_cached = [], {}, 0
        else:
            self._kv.copy_prefix(source, request.slot, length)
            request.num_cached = length
            self._num_shared_tokens += length
        array = np.asarray(wanted)
        best = length + MIN_SHARED_TOKENS
        for other in self.running:
            if other is request or other.is_ready or other.request_id in self._leaders:
                continue
            shared = self._kv.prefix_to_come(array, other.tokens[:-1])
            if shared >= best:
                best = shared + 1
                self._leaders[request.request_id] = other

    def next_chunk(self) -> PrefillChunk | None:
        """The next prefill rows, at most prefill_chunk of them; None when every running request is ready."""
        left = self._prefill_chunk
        requests, starts, ends = [], [], []
        for request in self.running:
            if request.is_ready or not self._may_fill(request):
                continue
            take = min(len(request.tokens) - 1 - request.num_cached, left)
            if take > 0:
                requests.append(request)
                starts.append(request.num_cached)
                ends.append(request.num_cached + take)
                left -= take
            if left == 0:
                break
        return PrefillChunk(requests=tuple(requests), starts=tuple(starts), ends=tuple(ends)) if requests else None

    def _may_fill(self, request: RunningRequest) -> bool:
        leader = self._leaders.get(request.request_id)
        if leader is None:
            return True
        if leader.slot is not None and not leader.is_ready and leader in self.running:
            return False
        del self._leaders[request.request_id]
        self._share(request, request.tokens[:-1])
        return not request.is_ready and request.request_id not in self._leaders

    def filled(self, chunk: PrefillChunk) -> None:
        for request, start, end in zip(chunk.requests, chunk.starts, chunk.ends, strict=True):
            assert request.slot is not None
            assert request.num_cached == start
            request.num_cached = end
            request.slot.tokens = request.tokens[:end]

    def take_shared_count(self) -> int:
        """Prompt tokens copied instead of computed since the last call."""
        count, self._num_shared_tokens = self._num_shared_tokens, 0
        return count

    def ready(self) -> list[RunningRequest]:
        """Requests that can take part in a round, in slot order."""
        return sorted((r for r in self.running if r.is_ready), key=lambda r: r.slot.index if r.slot is not None else -1)

    def remove(self, request: RunningRequest) -> None:
        if request.slot is not None:
            # Only what was really committed may serve as a prefix for others, and only as far as a drafter's states reach.
            states = min((len(tap) for tap in request.slot.taps.values()), default=request.num_cached)
            request.slot.tokens = request.tokens[: min(request.num_cached, states)]
            self._kv.release(request.slot)
            request.slot = None
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._leaders.pop(request.request_id, None)

    def restart(self) -> None:
        """The weights changed: every running request computes its K/V anew."""
        self._kv.forget()
        self._leaders.clear()
        for request in self.running:
            request.num_cached = 0
