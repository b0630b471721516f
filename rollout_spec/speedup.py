"""What speculation saves, from one run's rounds: each drafted one against the rounds without a draft that would have emitted as much.

A round of B requests that emits n tokens in t seconds stands for n / B rounds without drafting, which take off = n / B · T0(B) seconds,
where T0(B) is the mean time of this run's own rounds of B requests without a draft. Speed-up = sum of off / sum of t (ratio of sums, over
the rounds that can be compared), saved = 1 - 1 / speed-up. Tokens count the recovered or bonus token; prefills are on neither side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rollout_spec.events import RoundEvent

# T0 is taken from batches at most this many times larger or smaller; farther ones cost something else.
_NEAR = 2.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One round against no drafting."""

    draft_length: int  # deepest node that any of its requests had; 0 = nothing was drafted
    seconds: float
    off_s: float | None  # time to emit as many tokens without drafting; None when no comparable round was seen
    bound_s: float  # the same if a forward of drafted rows cost what one without them does: never less than the truth


@dataclass(kw_only=True)
class PlainRounds:
    """T0: seconds of rounds without a draft, by batch size."""

    seconds: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, num_requests: int, seconds: float) -> None:
        self.seconds[num_requests] = self.seconds.get(num_requests, 0.0) + seconds
        self.counts[num_requests] = self.counts.get(num_requests, 0) + 1

    def merge(self, other: PlainRounds) -> None:
        for batch, seconds in other.seconds.items():
            self.seconds[batch] = self.seconds.get(batch, 0.0) + seconds
            self.counts[batch] = self.counts.get(batch, 0) + other.counts[batch]

    def mean(self, num_requests: int) -> float | None:
        """T0 in seconds: of this batch size, else between its nearest neighbours within a factor of two; None without one."""
        near = [batch for batch in self.counts if num_requests / _NEAR <= batch <= num_requests * _NEAR]
        if not near:
            return None
        below = max((batch for batch in near if batch <= num_requests), default=min(near))
        above = min((batch for batch in near if batch >= num_requests), default=max(near))
        low, high = self.seconds[below] / self.counts[below], self.seconds[above] / self.counts[above]
        return low if above == below else low + (high - low) * (num_requests - below) / (above - below)


def round_seconds(event: RoundEvent) -> float:
    return event.draft_s + event.target_s + event.verify_s + event.other_s


def compare(event: RoundEvent, plain: PlainRounds) -> Comparison:
    """The round against what ``plain`` knows. Rounds whose requests all failed compare with nothing."""
    seconds = round_seconds(event)
    rounds_off = event.num_emitted_tokens / event.num_requests if event.num_requests else 0.0
    if event.num_draft_tokens == 0:
        return Comparison(draft_length=0, seconds=seconds, off_s=seconds if event.num_requests else None, bound_s=seconds)
    t0 = plain.mean(event.num_requests) if event.num_requests else None
    return Comparison(
        draft_length=len(event.drafted_by_depth),
        seconds=seconds,
        off_s=None if t0 is None else rounds_off * t0,
        bound_s=rounds_off * (seconds - event.draft_s),
    )


@dataclass(kw_only=True)
class LengthTotals:
    """All rounds of one draft length. ``compared_s`` is the part of ``seconds`` whose ``off_s`` is known."""

    num_rounds: int = 0
    seconds: float = 0.0
    compared_s: float = 0.0
    off_s: float = 0.0
    bound_s: float = 0.0

    def add(self, comparison: Comparison) -> None:
        self.num_rounds += 1
        self.seconds += comparison.seconds
        self.bound_s += comparison.bound_s
        if comparison.off_s is not None:
            self.compared_s += comparison.seconds
            self.off_s += comparison.off_s

    def merge(self, other: LengthTotals) -> None:
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
class SpeedTotals:
    """Running sums by draft length. T0 is what was known when a round came; whoever can read a run twice compares with all of it."""

    plain: PlainRounds = field(default_factory=PlainRounds)
    by_length: dict[int, LengthTotals] = field(default_factory=dict)

    def add(self, event: RoundEvent) -> Comparison:
        if event.num_draft_tokens == 0 and event.num_requests:
            self.plain.add(event.num_requests, round_seconds(event))
        comparison = compare(event, self.plain)
        self.by_length.setdefault(comparison.draft_length, LengthTotals()).add(comparison)
        return comparison

    def merge(self, other: SpeedTotals) -> None:
        self.plain.merge(other.plain)
        for length, totals in other.by_length.items():
            self.by_length.setdefault(length, LengthTotals()).merge(totals)

    def total(self) -> LengthTotals:
        out = LengthTotals()
        for totals in self.by_length.values():
            out.merge(totals)
        return out

    def drafted(self) -> LengthTotals:
        """Without the rounds in which nothing was drafted."""
        out = LengthTotals()
        for length, totals in self.by_length.items():
            if length:
                out.merge(totals)
        return out

    def speedup(self) -> float:
        """Whole run against no drafting; NaN when nothing was drafted or none of it could be compared."""
        return self.total().speedup if self.drafted().compared_s else math.nan

    def speedup_bound(self) -> float:
        """At most: as if drafted rows were free in the target's forward. NaN when nothing was drafted."""
        total = self.total()
        return total.bound_s / total.seconds if self.drafted().num_rounds and total.seconds else math.nan
