"""StateBuffer: target hidden states on their way to a drafter that asked for them.

Shape legend: R rows of a forward, H hidden size, B requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollout_spec.drafter import TargetStates
from rollout_spec.engine.runner import StepInput, StepOutput
from rollout_spec.engine.running import RunningRequest
from rollout_spec.engine.scheduler import PrefillChunk


class StateBuffer:
    """Keeps, per request, the states of committed tokens that the drafter has not seen yet, and each slot's prompt states."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._pending: dict[str, list[tuple[range, dict[int, Tensor]]]] = {}  # positions, layer -> their states
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

    def begin(self, request: RunningRequest) -> None:
        """A request enters its first round: the drafter gets the states of all tokens computed so far."""
        self._begun.add(request.request_id)
        if self.layers and request.slot is not None and not request.num_cached:
            # A prompt of one token: the slot holds no state, and what it will hold must not be shared as if it had states.
            request.slot.taps = dict.fromkeys(self.layers, torch.empty(0))
        if self.layers and request.slot is not None and request.num_cached:
            assert all(tap.shape[0] == request.num_cached for tap in request.slot.taps.values())
            self._pending[request.request_id] = [(range(request.num_cached), dict(request.slot.taps))]

    def add_round(self, requests: Sequence[RunningRequest], rows: Sequence[Sequence[int]], taps: Mapping[int, Tensor]) -> None:
        """States of the rows that a round commits (root, then accepted path), which lie behind what each request has cached so far."""
        for request, own in zip(requests, rows, strict=True):
            # A path's rows ascend. Those of a chain are neighbours: a view of a few rows does, until the next round takes it.
            adjoining = own[-1] - own[0] + 1 == len(own)
            chosen = slice(own[0], own[-1] + 1) if adjoining else torch.tensor(own)
            positions = range(request.num_cached, request.num_cached + len(own))
            piece = {layer: taps[layer][chosen] for layer in self.layers}
            self._pending.setdefault(request.request_id, []).append((positions, piece))

    def take(self, requests: Sequence[RunningRequest]) -> TargetStates | None:
        """Everything pending for these requests, in their order; after ``clear``, a request's states from position 0 once more."""
        if not self.layers:
            return None
        for request in requests:
            if request.request_id not in self._begun:
                self.begin(request)
        parts = [self._pending.pop(request.request_id, []) for request in requests]
        offsets = list(itertools.accumulate((sum(len(positions) for positions, _ in part) for part in parts), initial=0))
        flat = [piece for part in parts for piece in part]
        if not flat:
            return TargetStates(hidden={}, positions=torch.empty(0, dtype=torch.int64), offsets=torch.tensor(offsets))
        return TargetStates(
            hidden={layer: _joined([states[layer] for _, states in flat]) for layer in self.layers},
            positions=torch.tensor([position for positions, _ in flat for position in positions]),
            offsets=torch.tensor(offsets),
        )

    def drop(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        self._begun.discard(request_id)

    def clear(self) -> None:
        """The weights changed: what is pending is void, and so is what drafters have seen."""
        self._pending.clear()
        self._begun.clear()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
