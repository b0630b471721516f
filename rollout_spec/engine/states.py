"""StateBuffer: target hidden states on their way to a drafter that asked for them.

Shape legend: R rows of a forward, H hidden size, B requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_spec.drafter import TargetStates
from rollout_spec.engine.runner import StepInput, StepOutput
from rollout_spec.engine.running import RunningRequest
from rollout_spec.engine.scheduler import PrefillChunk

_FEW = 32  # pieces of a request that may lie about unmerged


@dataclass(kw_only=True)
class StatePile:
    """States of one request, in the order of their positions. Without a draft it grows by a piece a round, up to the whole context."""

    pieces: list[tuple[range, dict[int, Tensor]]] = field(default_factory=list)  # positions, layer -> their states
    num_loose: int = 0  # last pieces that are one round's each

    def add(self, positions: range, states: dict[int, Tensor]) -> None:
        self.pieces.append((positions, states))
        self.num_loose += 1
        if self.num_loose == _FEW:
            # Merged they no longer are views that each hold a whole round's states in memory, and there are few of them.
            loose = self.pieces[-_FEW:]
            whole = range(loose[0][0].start, loose[-1][0].stop)
            self.pieces[-_FEW:] = [(whole, {layer: torch.cat([states[layer] for _, states in loose]) for layer in states})]
            self.num_loose = 0


class StateBuffer:
    """Keeps, per request, the states of committed tokens that the drafter has not seen yet, and each slot's prompt states."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._pending: dict[str, StatePile] = {}
        self._begun: set[str] = set()  # requests whose states from position 0 were queued under the present weights

    def add_prefill(self, chunk: PrefillChunk, step: StepInput, out: StepOutput) -> None:
        """Append the chunk's states to their slots: a request that shares the prefix gets them with its copy of the K/V."""
        if not self.layers:
            return
        for i, request in enumerate(chunk.requests):
            assert request.slot is not None
            begin, end = int(step.plan.row_offsets[i]), int(step.plan.row_offsets[i + 1])
            for layer in self.layers:
                new = out.taps[layer][begin:end]
                held = request.slot.taps.get(layer)
                request.slot.taps[layer] = new if held is None or held.shape[0] == 0 else torch.cat([held, new])

    def enter(self, requests: Sequence[RunningRequest]) -> None:
        """These take part in a round. What a request has computed before its first one is pending from then on, whoever drafts when."""
        if self.layers:
            for request in requests:
                if request.request_id not in self._begun:
                    self._begin(request)

    def _begin(self, request: RunningRequest) -> None:
        self._begun.add(request.request_id)
        if request.slot is not None and not request.num_cached:
            # A prompt of one token: the slot holds no state, and what it will hold must not be shared as if it had states.
            request.slot.taps = dict.fromkeys(self.layers, torch.empty(0))
        if request.slot is not None and request.num_cached:
            assert all(tap.shape[0] == request.num_cached for tap in request.slot.taps.values())
            self._pending[request.request_id] = StatePile(pieces=[(range(request.num_cached), dict(request.slot.taps))])

    def add_round(self, requests: Sequence[RunningRequest], rows: Sequence[Sequence[int]], taps: Mapping[int, Tensor]) -> None:
        """States of the rows that a round commits (root, then accepted path), which lie behind what each request has cached so far."""
        for request, own in zip(requests, rows, strict=True):
            # A path's rows ascend. Those of a chain are neighbours: a view of a few rows does, until the next round takes it.
            adjoining = own[-1] - own[0] + 1 == len(own)
            chosen = slice(own[0], own[-1] + 1) if adjoining else torch.tensor(own)
            positions = range(request.num_cached, request.num_cached + len(own))
            piece = {layer: taps[layer][chosen] for layer in self.layers}
            self._pending.setdefault(request.request_id, StatePile()).add(positions, piece)

    def take(self, requests: Sequence[RunningRequest]) -> TargetStates | None:
        """Everything pending for these requests, in their order; after ``clear``, a request's states from position 0 once more."""
        if not self.layers:
            return None
        return target_states([self._pending.pop(request.request_id, StatePile()) for request in requests], self.layers)

    def drop(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        self._begun.discard(request_id)

    def clear(self) -> None:
        """The weights changed: what is pending is void, and so is what drafters have seen."""
        self._pending.clear()
        self._begun.clear()


def target_states(piles: Sequence[StatePile], layers: Sequence[int]) -> TargetStates:
    """What a drafter is handed of requests with these piles [B]."""
    offsets = list(itertools.accumulate((sum(len(positions) for positions, _ in pile.pieces) for pile in piles), initial=0))
    flat = [piece for pile in piles for piece in pile.pieces]
    if not flat:
        return TargetStates(hidden={}, positions=torch.empty(0, dtype=torch.int64), offsets=torch.tensor(offsets))
    return TargetStates(
        hidden={layer: _joined([states[layer] for _, states in flat]) for layer in layers},
        positions=torch.tensor([position for positions, _ in flat for position in positions]),
        offsets=torch.tensor(offsets),
    )


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
