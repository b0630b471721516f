"""The drafter's side of weight syncs: its own weights change by its own updates only, and everything is said with its checksum."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from torch import Tensor

from rollout_spec.drafter import Drafter, HasWeights
from rollout_spec.engine.runner import ModelRunner
from rollout_spec.engine.weights import WeightsReport, checksums, combine, tensor_checksum
from rollout_spec.events import EventSink, WeightSyncEvent


class DrafterSync:
    """Tells the drafter of the target's updates and takes its own, and makes sure that neither reaches the other's weights."""

    def __init__(self, drafter: Drafter | None, runner: ModelRunner, sink: EventSink) -> None:
        self._drafter, self._runner, self._sink = drafter, runner, sink
        self._sums = checksums(drafter.named_weights()) if isinstance(drafter, HasWeights) else {}

    def target_updated(self, version: int) -> None:
        """Raises RuntimeError if a weight of the drafter's own is another than after its last update."""
        if self._drafter is not None:
            began = time.perf_counter()
            self._drafter.target_updated(version)
            if isinstance(self._drafter, HasWeights):
                check_untouched("the drafter", self._sums, self._drafter.named_weights(), f"weights {version} of the target")
                self._emit("drafter_head", version, checksums(self._drafter.borrowed_weights()), began)

    def update(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> WeightsReport:
        """Engine.update_drafter."""
        began = time.perf_counter()
        if not isinstance(self._drafter, HasWeights):
            held = "there is no drafter" if self._drafter is None else f"the drafter {self._drafter.name} has no weights of its own"
            raise ValueError(f"drafter weights {version} refused: {held}")
        target = checksums(self._runner.named_weights())
        self._drafter.update_weights(named_tensors, version)
        check_untouched("the target", target, self._runner.named_weights(), f"weights {version} of the drafter")
        self._sums = checksums(self._drafter.named_weights())
        self._emit("drafter", version, self._sums, began)
        return WeightsReport(version=version, num_tensors=len(self._sums), checksum=combine(self._sums), tensor_checksums=self._sums)

    def _emit(self, role: str, version: int, sums: Mapping[str, int], began: float) -> None:
        seconds = time.perf_counter() - began
        self._sink.emit(WeightSyncEvent(role=role, version=version, num_tensors=len(sums), checksum=combine(sums), seconds=seconds))


def check_untouched(whose: str, before: Mapping[str, int], now: Mapping[str, Tensor], update: str) -> None:
    """Raise RuntimeError that names every tensor whose checksum is another than before an update that was not for it."""
    changed = [name for name, tensor in now.items() if before.get(name) != tensor_checksum(tensor)]
    if changed:
        raise RuntimeError(f"{update} changed weights of {whose}: {', '.join(changed[:8])}")
