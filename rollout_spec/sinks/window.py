"""WindowSink: the figures of every span of time, for dashboards that want points and not events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from rollout_spec.events import Event, RoundEvent, TrainEvent, WeightSyncEvent
from rollout_spec.metrics import accepted_length_counts, scalars
from rollout_spec.sinks.summary import SummarySink


class Axis(Enum):
    """What a point's step is: the number of the last round, or the trainer's global step (the policy's version)."""

    ROUND = "round"
    GLOBAL_STEP = "global_step"


class PointWriter(Protocol):
    def point(self, step: int, figures: dict[str, float], accepted_lengths: Sequence[int]) -> None:
        """One span's figures; ``accepted_lengths[k]`` request rounds accepted exactly k drafted tokens."""

    def train(self, event: TrainEvent) -> None:
        """One step of a trainer."""

    def close(self) -> None: ...


class WindowSink:
    """Writes a point when ``every_s`` have passed since the last one, when the policy's weights change, and at the end."""

    def __init__(
        self, writer: PointWriter, *, axis: Axis = Axis.ROUND, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._writer, self._axis, self._every_s, self._clock = writer, axis, every_s, clock
        self._totals = SummarySink()
        self._round_index = self._version = 0
        self._began = clock()

    def emit(self, event: Event) -> None:
        if isinstance(event, TrainEvent):
            self._writer.train(event)
            return
        if isinstance(event, WeightSyncEvent) and event.role == "target":
            self._write()  # what was sampled so far belongs to the version before
            self._version = event.version
        self._totals.emit(event)
        if isinstance(event, RoundEvent):
            self._round_index, self._version = event.round_index, event.weights_version
            if self._clock() - self._began >= self._every_s:
                self._write()

    def close(self) -> None:
        self._write()
        self._writer.close()

    def _write(self) -> None:
        if self._totals.num_rounds:
            step = self._round_index if self._axis is Axis.ROUND else self._version
            figures = {**scalars(self._totals), "round": float(self._round_index), "policy_version": float(self._version)}
            self._writer.point(step, figures, accepted_length_counts(self._totals))
            # What is known of rounds without a draft goes on to be true; everything else starts anew.
            plain = self._totals.speed.plain
            self._totals = SummarySink()
            self._totals.speed.plain = plain
        self._began = self._clock()
