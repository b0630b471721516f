"""What speculation saves, from one run's rounds: each drafted one against the rounds without a draft that would have emitted as much.

A round of B requests that emits n tokens in t seconds stands for n / B rounds without drafting, which take off = n / B · T0(B) seconds,
where T0(B) is the mean time of this run's own rounds of B requests without a draft. Speed-up = sum of off / sum of t (ratio of sums, over
the rounds that can be compared), saved = 1 - 1 / speed-up. Tokens count the recovered or bonus token; prefills are on neither side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout_spec.events import RoundEvent

# T0 is taken from batches at most this many times larger or smaller; farther ones cost something else.
_NEAR = 2.0


def round_seconds(event: RoundEvent) -> float:
    return event.draft_s + event.target_s + event.verify_s + event.other_s


def draft_length(event: RoundEvent) -> int:
    """Deepest node that was drafted; 0 = none was. Logs that do not say it tell the mean number of nodes a request instead.

    Not the deepest node that was reached: rounds whose drafts were refused at once would pass for short drafts.
    """
    if event.draft_depth >= 0 or not event.num_requests:
        return max(event.draft_depth, 0)
    return round(event.num_draft_tokens / event.num_requests)


@dataclass(kw_only=True)
class PlainRounds:
    """T0: seconds of rounds without a draft, by batch size."""

    seconds: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, event: RoundEvent) -> None:
        """A round; those with a draft, and those whose requests all failed, tell nothing."""
        if event.num_draft_tokens == 0 and event.num_requests:
            self._add(event.num_requests, round_seconds(event), 1)

    def merge(self, other: PlainRounds) -> None:
        for batch, seconds in other.seconds.items():
            self._add(batch, seconds, other.counts[batch])

    def mean(self, num_requests: int) -> float | None:
        """T0 in seconds: of this batch size, else between its nearest neighbours within a factor of two; None without one."""
        near = [batch for batch in self.counts if num_requests / _NEAR <= batch <= num_requests * _NEAR]
        if not near:
            return None
        below = max((batch for batch in near if batch <= num_requests), default=min(near))
        above = min((batch for batch in near if batch >= num_requests), default=max(near))
        low, high = self.seconds[below] / self.counts[below], self.seconds[above] / self.counts[above]
        return low if above == below else low + (high - low) * (num_requests - below) / (above - below)

    def _add(self, num_requests: int, seconds: float, count: int) -> None:
        self.seconds[num_requests] = self.seconds.get(num_requests, 0.0) + seconds
        self.counts[num_requests] = self.counts.get(num_requests, 0) + count


@dataclass(kw_only=True)
class Comparison:
    """Rounds against no drafting; sums. ``compared_s`` is the part of ``seconds`` whose ``off_s`` is known."""

    num_rounds: int = 0
    seconds: float = 0.0
    compared_s: float = 0.0
    off_s: float = 0.0
    bound_s: float = 0.0  # off if a forward of drafted rows cost what one without them does: never less than the truth

    def add(self, other: Comparison) -> None:
        self.num_rounds += other.num_rounds
        self.seconds += other.seconds
        self.compared_s += other.compared_s
        self.off_s += other.off_s
        self.bound_s += other.bound_s

    @property
    def speedup(self) -> float:
        """Against no drafting; NaN when no round could be compared."""
        return self.off_s / self.compared_s if self.compared_s else math.nan


@dataclass(kw_only=True)
class Cell:
    """Rounds of one draft length and batch size; ``off_rounds`` rounds without a draft would have emitted as much."""

    num_rounds: int = 0
    seconds: float = 0.0
    off_rounds: float = 0.0
    bound_s: float = 0.0

    def add(self, event: RoundEvent) -> None:
        seconds = round_seconds(event)
        off_rounds = event.num_emitted_tokens / event.num_requests
        self.num_rounds += 1
        self.seconds += seconds
        self.off_rounds += off_rounds
        self.bound_s += off_rounds * (seconds - event.draft_s) if event.num_draft_tokens else seconds

    def merge(self, other: Cell) -> None:
        self.num_rounds += other.num_rounds
        self.seconds += other.seconds
        self.off_rounds += other.off_rounds
        self.bound_s += other.bound_s

    def against(self, t0: float | None) -> Comparison:
        known = t0 is not None
        return Comparison(
            num_rounds=self.num_rounds,
            seconds=self.seconds,
            compared_s=self.seconds if known else 0.0,
            off_s=self.off_rounds * t0 if t0 is not None else 0.0,
            bound_s=self.bound_s,
        )


@dataclass(kw_only=True)
class SpeedTotals:
    """Sums by draft length and batch size. They are compared when asked, with all that is known of rounds without a draft by then."""

    plain: PlainRounds = field(default_factory=PlainRounds)
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)  # (draft length, requests)

    def add(self, event: RoundEvent) -> None:
        if event.num_requests:
            self.plain.add(event)
            self.cells.setdefault((draft_length(event), event.num_requests), Cell()).add(event)

    def merge(self, other: SpeedTotals) -> None:
        self.plain.merge(other.plain)
        for key, cell in other.cells.items():
            self.cells.setdefault(key, Cell()).merge(cell)

    def by_length(self, plain: PlainRounds | None = None) -> dict[int, Comparison]:
        """Comparisons by draft length with ``plain`` (None: what these rounds tell). Those without a draft stand for themselves."""
        out: dict[int, Comparison] = {}
        for length, comparison in self._compared(self.plain if plain is None else plain):
            out.setdefault(length, Comparison()).add(comparison)
        return dict(sorted(out.items()))

    def total(self, plain: PlainRounds | None = None) -> Comparison:
        out = Comparison()
        for comparison in self.by_length(plain).values():
            out.add(comparison)
        return out

    def speedup(self, plain: PlainRounds | None = None) -> float:
        """Whole run against no drafting; NaN when nothing was drafted or none of it could be compared."""
        by_length = self.by_length(plain)
        drafted = any(length and comparison.compared_s for length, comparison in by_length.items())
        return self.total(plain).speedup if drafted else math.nan

    def speedup_bound(self) -> float:
        """At most: as if drafted rows were free in the target's forward. NaN when nothing was drafted."""
        total = self.total()
        return total.bound_s / total.seconds if any(length for length, _ in self.cells) and total.seconds else math.nan

    def _compared(self, plain: PlainRounds) -> Iterator[tuple[int, Comparison]]:
        for (length, batch), cell in self.cells.items():
            t0 = cell.seconds / cell.off_rounds if length == 0 and cell.off_rounds else plain.mean(batch)
            yield length, cell.against(t0)


def compare(event: RoundEvent, plain: PlainRounds) -> Comparison:
    """One round against what ``plain`` knows."""
    totals = SpeedTotals()
    totals.add(event)
    return totals.total(plain)
