"""SummarySink: the totals of a run, from its events. Every length counts the recovered or bonus token of each round."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rollout_spec.acceptance import (
    acceptance_by_depth,
    acceptance_length_per_request,
    acceptance_length_pooled,
    acceptance_rate_pooled,
)
from rollout_spec.events import Event, PrefillEvent, RequestEvent, RoundEvent, WeightSyncEvent
from rollout_spec.speedup import SpeedTotals

Number = TypeVar("Number", int, float)
Key = TypeVar("Key", bound=Hashable)

_COUNTS = ("num_rounds", "num_request_rounds", "num_emitted_tokens", "num_draft_tokens", "num_accepted_tokens", "num_undrafted_rounds")
_SUMS = ("num_not_finite_rounds", "num_prefilled_tokens", "num_shared_tokens", "entropy_sum", "entropy_count", "prefill_s", "weight_sync_s")
_LISTS = (
    "drafted_by_depth",
    "accepted_by_depth",
    "accept_prob_sum_by_depth",
    "rounds_by_context",
    "drafted_by_context",
    "accepted_by_context",
)


@dataclass(kw_only=True)
class SummarySink:
    """Running sums; ``summary`` turns them into the figures of summary.json, rollout_spec.metrics into all figures there are."""

    num_rounds: int = 0  # rounds of the batch
    num_request_rounds: int = 0  # rounds counted once for every request in them
    num_emitted_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_undrafted_rounds: int = 0  # rounds in which nothing was proposed: the budget or the drafter said no
    num_not_finite_rounds: int = 0  # rounds with an entropy or acceptance probability that is no number
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    accept_prob_sum_by_depth: list[float] = field(default_factory=list)  # acceptance probabilities, over drafted_by_depth
    rounds_by_context: list[int] = field(default_factory=list)
    drafted_by_context: list[int] = field(default_factory=list)
    accepted_by_context: list[int] = field(default_factory=list)
    entropy_sum: float = 0.0
    entropy_count: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("draft", "target", "verify", "other"), 0.0))
    prefill_s: float = 0.0
    num_prefilled_tokens: int = 0
    num_shared_tokens: int = 0
    weight_sync_s: float = 0.0
    requests_by_reason: dict[str, int] = field(default_factory=dict)
    per_request: list[tuple[int, int]] = field(default_factory=list)  # (accepted tokens, rounds) of each finished request
    policy_lags: dict[int, int] = field(default_factory=dict)  # versions between a request's first token and its end -> requests
    speed: SpeedTotals = field(default_factory=SpeedTotals)

    def emit(self, event: Event) -> None:
        if isinstance(event, RoundEvent):
            self._add_round(event)
        elif isinstance(event, PrefillEvent):
            self.prefill_s += event.target_s
            self.seconds["target"] += event.target_s
            self.num_prefilled_tokens += event.num_tokens
            self.num_shared_tokens += event.num_shared_tokens
        elif isinstance(event, RequestEvent):
            self._add_request(event)
        elif isinstance(event, WeightSyncEvent):
            self.weight_sync_s += event.seconds

    def close(self) -> None:
        pass

    def merge(self, other: SummarySink) -> None:
        """Add another's totals: of another replica, or of the time after."""
        for name in (*_COUNTS, *_SUMS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _LISTS:
            _add_lists(getattr(self, name), getattr(other, name))
        _add_counts(self.requests_by_reason, other.requests_by_reason)
        _add_counts(self.policy_lags, other.policy_lags)
        for part, seconds in other.seconds.items():
            self.seconds[part] += seconds
        self.per_request += other.per_request
        self.speed.merge(other.speed)

    def _add_round(self, event: RoundEvent) -> None:
        self.num_rounds += 1
        self.num_request_rounds += event.num_requests
        self.num_emitted_tokens += event.num_emitted_tokens
        self.num_draft_tokens += event.num_draft_tokens
        self.num_accepted_tokens += event.num_accepted_tokens
        self.num_undrafted_rounds += event.num_draft_tokens == 0
        self.num_not_finite_rounds += not all(map(math.isfinite, (event.mean_entropy, *event.mean_accept_prob_by_depth)))
        _add_lists(self.drafted_by_depth, event.drafted_by_depth)
        _add_lists(self.accepted_by_depth, event.accepted_by_depth)
        pairs = zip(event.mean_accept_prob_by_depth, event.drafted_by_depth, strict=False)  # the former may be left out
        _add_lists(self.accept_prob_sum_by_depth, [mean * count for mean, count in pairs])
        _add_lists(self.rounds_by_context, event.rounds_by_context)
        _add_lists(self.drafted_by_context, event.drafted_by_context)
        _add_lists(self.accepted_by_context, event.accepted_by_context)
        if math.isfinite(event.mean_entropy):
            self.entropy_sum += event.mean_entropy * event.num_emitted_tokens
            self.entropy_count += event.num_emitted_tokens
        for part in self.seconds:
            self.seconds[part] += getattr(event, f"{part}_s")
        self.speed.add(event)

    def _add_request(self, event: RequestEvent) -> None:
        _add_counts(self.requests_by_reason, {event.finish_reason: 1})
        if event.num_rounds:
            self.per_request.append((event.num_accepted_tokens, event.num_rounds))
        if event.oldest_weights_version >= 0:
            _add_counts(self.policy_lags, {event.weights_version - event.oldest_weights_version: 1})

    def summary(self) -> dict[str, object]:
        """Rates and lengths; a ratio without a denominator is null. Pooled = ratio of sums, per_request = mean of ratios."""
        accepted, rounds = [accepted for accepted, _ in self.per_request], [rounds for _, rounds in self.per_request]
        return {
            "acceptance_rate": _known(acceptance_rate_pooled([self.num_accepted_tokens], [self.num_draft_tokens])),
            "acceptance_length_pooled": _known(acceptance_length_pooled([self.num_accepted_tokens], [self.num_request_rounds])),
            "acceptance_length_per_request": _known(acceptance_length_per_request(accepted, rounds)),
            "acceptance_by_depth": [_known(rate) for rate in acceptance_by_depth(self.drafted_by_depth, self.accepted_by_depth)],
            "mean_entropy": _ratio(self.entropy_sum, self.entropy_count),
            "num_rounds": self.num_rounds,
            "num_request_rounds": self.num_request_rounds,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "ms_per_round": _ratio(1e3 * (sum(self.seconds.values()) - self.prefill_s), self.num_rounds),
            "seconds": {**self.seconds, "prefill_within_target": self.prefill_s},
        }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def _add_lists(total: list[Number], more: Sequence[Number]) -> None:
    total.extend([type(more[0])()] * (len(more) - len(total)) if more else [])
    for place, count in enumerate(more):
        total[place] += count


def _add_counts(total: dict[Key, int], more: Mapping[Key, int]) -> None:
    for key, count in more.items():
        total[key] = total.get(key, 0) + count
