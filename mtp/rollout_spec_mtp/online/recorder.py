"""Keeping what the engine shows a drafter anyway: sequences and the policy's states of them, without a forward of their own.

Shape legend: L tokens of a sequence, R rows of a round, H hidden size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, Drafter, DrafterNeeds, HasWeights, RequestView, TargetStates
from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """One finished sequence as far as its states go: each token but the last has one."""

    token_ids: Tensor  # [L] int64
    num_prompt_tokens: int
    hidden: Mapping[int, Tensor]  # layer -> [L - 1, H], in the buffer's storage


class RolloutBuffer:
    """The newest sequences of one policy version, at most so many tokens; the oldest make room. Safe from several threads."""

    def __init__(self, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"the buffer must hold 1 token or more, got {max_tokens}")
        self._max_tokens = max_tokens
        self._held: deque[Recorded] = deque()
        self._num_tokens = 0
        self._lock = threading.Lock()

    def add(self, sequence: Recorded) -> None:
        """A sequence longer than the whole buffer is left out."""
        length = sequence.token_ids.numel()
        with self._lock:
            if length > self._max_tokens:
                return
            while self._num_tokens + length > self._max_tokens:
                self._num_tokens -= self._held.popleft().token_ids.numel()
            self._held.append(sequence)
            self._num_tokens += length

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self._num_tokens = 0

    def snapshot(self) -> list[Recorded]:
        """Oldest first."""
        with self._lock:
            return list(self._held)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens


@dataclass(kw_only=True)
class _Growing:
    """States of one running request, in pieces that join."""

    length: int = 0
    pieces: list[dict[int, Tensor]] = field(default_factory=list)


class StateRecorder:
    """A drafter with weights of its own, and a buffer that gets what it is shown.

    Only committed tokens have states here: rejected ones are never handed over. When the policy changes, the buffer is emptied, and a
    running request's states come again from position 0 under the new weights, so no sequence mixes versions. The tokens of a request's
    last round have no state yet when it ends; they are left off. Requests at another temperature than the one trained for (validation)
    are not kept.
    """

    def __init__(self, drafter: Drafter, buffer: RolloutBuffer, temperature: float, storage: torch.dtype = torch.bfloat16) -> None:
        if not isinstance(drafter, HasWeights):
            raise ValueError(f"the drafter {drafter.name} has no weights of its own: there is nothing to refresh")
        self._drafter, self._buffer = drafter, buffer
        self._temperature, self._storage = temperature, storage
        self._growing: dict[str, _Growing] = {}
        self.name, self.vocab_size = drafter.name, drafter.vocab_size
        # The teacher's law comes from the last state, which not every drafter reads.
        self._layers = tuple(sorted({-1, *drafter.needs.hidden_layers}))
        # Every round: a stale drafter's budget may be 0, and that is when there must be something to learn from.
        self.needs = DrafterNeeds(
            hidden_layers=self._layers, run_target=drafter.needs.run_target, every_round=True, draws=drafter.needs.draws
        )

    @property
    def weights_version(self) -> int:
        return self._drafter.weights_version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._drafter.weights_version = version

    def start(self, request: RequestView) -> None:
        if request.sampling.temperature == self._temperature:
            self._growing[request.request_id] = _Growing()
        self._drafter.start(request)

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        if context.states is not None and context.states.hidden:
            self._record(context.requests, context.states)
        return self._drafter.propose(context, budget)

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Verdict) -> None:
        self._drafter.observe(context, tree, verdict)

    def finish(self, request: RequestView) -> None:
        grown = self._growing.pop(request.request_id, None)
        if grown is not None and grown.length > request.num_prompt_tokens:
            self._buffer.add(
                Recorded(
                    token_ids=torch.tensor(request.token_ids[: grown.length + 1]),
                    num_prompt_tokens=request.num_prompt_tokens,
                    hidden={layer: torch.cat([piece[layer] for piece in grown.pieces]) for layer in self._layers},
                )
            )
        self._drafter.finish(request)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._drafter.update_weights(named_tensors, version)

    def target_updated(self, version: int) -> None:
        self._buffer.clear()
        # Also of requests that run: one that is aborted before its states come again leaves nothing.
        self._growing = {request_id: _Growing() for request_id in self._growing}
        self._drafter.target_updated(version)

    def named_weights(self) -> Mapping[str, Tensor]:
        return self._drafter.named_weights()

    def borrowed_weights(self) -> Mapping[str, Tensor]:
        return self._drafter.borrowed_weights()

    def _record(self, requests: Iterable[RequestView], states: TargetStates) -> None:
        offsets, positions = states.offsets.tolist(), states.positions.tolist()
        stored = {layer: states.hidden[layer].to(self._storage, copy=True) for layer in self._layers}
        for request, first, last in zip(requests, offsets, offsets[1:], strict=False):
            grown = self._growing.get(request.request_id)
            if grown is None or last == first:
                continue
            assert positions[first] == grown.length, f"states of {request.request_id} do not join the {grown.length} before"
            grown.pieces.append({layer: rows[first:last] for layer, rows in stored.items()})
            grown.length += last - first
