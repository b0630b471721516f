"""SummarySink: the totals of a run, from its events. Every length counts the recovered or bonus token of each round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rollout_spec.acceptance import (
    acceptance_by_depth,
    acceptance_length_per_request,
    acceptance_length_pooled,
    acceptance_rate_pooled,
)
from rollout_spec.events import Event, PrefillEvent, RequestEvent, RoundEvent


@dataclass(kw_only=True)
class SummarySink:
    """Running sums; ``summary`` turns them into the figures of summary.json."""

    num_rounds: int = 0  # rounds of the batch
    num_request_rounds: int = 0  # rounds counted once for every request in them
    num_emitted_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    entropy_sum: float = 0.0
    entropy_count: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("draft", "target", "verify", "other"), 0.0))
    prefill_s: float = 0.0
    per_request: list[tuple[int, int]] = field(default_factory=list)  # (accepted tokens, rounds) of each finished request

    def emit(self, event: Event) -> None:
        if isinstance(event, RoundEvent):
            self._add_round(event)
        elif isinstance(event, PrefillEvent):
            self.prefill_s += event.target_s
            self.seconds["target"] += event.target_s
        elif isinstance(event, RequestEvent) and event.num_rounds:
            self.per_request.append((event.num_accepted_tokens, event.num_rounds))

    def close(self) -> None:
        pass

    def _add_round(self, event: RoundEvent) -> None:
        self.num_rounds += 1
        self.num_request_rounds += event.num_requests
        self.num_emitted_tokens += event.num_emitted_tokens
        self.num_draft_tokens += event.num_draft_tokens
        self.num_accepted_tokens += event.num_accepted_tokens
        _add_lists(self.drafted_by_depth, event.drafted_by_depth)
        _add_lists(self.accepted_by_depth, event.accepted_by_depth)
        if math.isfinite(event.mean_entropy):
            self.entropy_sum += event.mean_entropy * event.num_emitted_tokens
            self.entropy_count += event.num_emitted_tokens
        for part in self.seconds:
            self.seconds[part] += getattr(event, f"{part}_s")

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


def _add_lists(total: list[int], more: tuple[int, ...]) -> None:
    total.extend([0] * (len(more) - len(total)))
    for depth, count in enumerate(more):
        total[depth] += count
