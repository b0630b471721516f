"""A run's rounds in at most MAX_BINS bins of equally many rounds, whatever its length: when they are full, neighbours are merged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rollout_spec.events import BudgetEvent, Event, RoundEvent
from rollout_spec.sinks.summary import SummarySink

MAX_BINS = 200
ENTROPY_STEP = 0.25  # nats


@dataclass(kw_only=True)
class EntropyCell:
    """Rounds of nearly the same entropy."""

    num_drafts: int = 0
    num_accepted: int = 0  # first drafted tokens that were accepted
    entropy_sum: float = 0.0  # over num_drafts

    def merge(self, other: EntropyCell) -> None:
        self.num_drafts += other.num_drafts
        self.num_accepted += other.num_accepted
        self.entropy_sum += other.entropy_sum


@dataclass(kw_only=True)
class Bin:
    """Neighbouring rounds, with what happened between them."""

    totals: SummarySink = field(default_factory=SummarySink)
    first_time_s: float = math.inf
    last_time_s: float = -math.inf
    policy_version: int = -1  # of the last round
    drafter_version: int = -1
    entropy_cells: dict[int, EntropyCell] = field(default_factory=dict)
    predicted_sum: float = 0.0  # acceptance of a first drafted token that the controller expected
    predicted_count: int = 0
    gain_sum: float = 0.0  # gain that the controller expected of its budgets
    gain_count: int = 0

    def add(self, event: Event, time_s: float) -> None:
        self.totals.emit(event)
        if isinstance(event, BudgetEvent) and math.isfinite(event.predicted_gain):
            self.gain_sum += event.predicted_gain
            self.gain_count += 1
        if not isinstance(event, RoundEvent):
            return
        self.first_time_s, self.last_time_s = min(self.first_time_s, time_s), max(self.last_time_s, time_s)
        self.policy_version = event.weights_version
        if math.isfinite(event.predicted_accept_prob):
            self.predicted_sum += event.predicted_accept_prob
            self.predicted_count += 1
        if event.drafted_by_depth and math.isfinite(event.mean_entropy):
            cell = self.entropy_cells.setdefault(int(event.mean_entropy / ENTROPY_STEP), EntropyCell())
            drafts = event.drafted_by_depth[0]
            cell.merge(EntropyCell(num_drafts=drafts, num_accepted=event.accepted_by_depth[0], entropy_sum=drafts * event.mean_entropy))

    def merge(self, later: Bin) -> None:
        self.totals.merge(later.totals)
        self.first_time_s, self.last_time_s = min(self.first_time_s, later.first_time_s), max(self.last_time_s, later.last_time_s)
        self.policy_version = max(self.policy_version, later.policy_version)
        self.drafter_version = max(self.drafter_version, later.drafter_version)
        for place, cell in later.entropy_cells.items():
            self.entropy_cells.setdefault(place, EntropyCell()).merge(cell)
        self.predicted_sum += later.predicted_sum
        self.predicted_count += later.predicted_count
        self.gain_sum += later.gain_sum
        self.gain_count += later.gain_count


@dataclass(kw_only=True)
class Bins:
    bins: list[Bin] = field(default_factory=list)
    width: int = 1  # rounds a bin
    drafter_version: int = -1

    def add(self, event: Event, time_s: float) -> None:
        """Rounds fill bins; other events belong to the bin that is being filled."""
        if not self.bins or (isinstance(event, RoundEvent) and self.bins[-1].totals.num_rounds >= self.width):
            if len(self.bins) >= MAX_BINS:
                self._halve()
            if not self.bins or self.bins[-1].totals.num_rounds >= self.width:
                self.bins.append(Bin(drafter_version=self.drafter_version))
        self.bins[-1].drafter_version = self.drafter_version
        self.bins[-1].add(event, time_s)

    def total(self) -> Bin:
        out = Bin()
        for part in self.bins:
            out.merge(part)
        return out

    def _halve(self) -> None:
        for first, second in zip(self.bins[::2], self.bins[1::2], strict=False):
            first.merge(second)
        self.bins = self.bins[::2]
        self.width *= 2
