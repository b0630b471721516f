"""Rollout metrics of a training step: summed in every server, merged in the trainer, named for verl's logger. Nothing here imports verl.

All lengths count the recovered or bonus token of each round; rates are ratios of sums unless their name says ``per_request``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_spec.acceptance import (
    acceptance_by_depth,
    acceptance_length_per_request,
    acceptance_length_pooled,
    acceptance_rate_pooled,
)
from rollout_spec.events import DrafterStaleEvent, Event, RequestEvent, RoundEvent, TrainEvent, WeightSyncEvent
from rollout_spec.metrics import BY_NAME
from rollout_spec.sinks.summary import SummarySink

_SUMMED = (
    "num_requests",
    "num_failed_requests",
    "num_aborted_requests",
    "num_restarts",
    "num_undrafted_rounds",
    "num_stale_alarms",
    "predicted_accept_sum",
    "predicted_accept_count",
    "budget_s",
    "sync_s",
    "num_drafter_refreshes",
    "drafter_train_s",
    "drafter_loss_sum",
)


@dataclass(kw_only=True)
class StepTotals:
    """What one server did since it was last asked."""

    rounds: SummarySink = field(default_factory=SummarySink)
    num_requests: int = 0
    num_failed_requests: int = 0
    num_aborted_requests: int = 0
    num_restarts: int = 0  # of the server's process
    num_stale_alarms: int = 0  # times that the monitor found the drafter stale
    predicted_accept_sum: float = 0.0  # of first drafted tokens, by requests that had one
    predicted_accept_count: int = 0
    budget_s: float = 0.0
    num_undrafted_rounds: int = 0  # rounds in which nothing was proposed: the budget or the drafter said no
    max_batch: int = 0
    sync_s: float = 0.0
    num_drafter_refreshes: int = 0
    drafter_train_s: float = 0.0
    drafter_loss_sum: float = 0.0  # of refreshes' mean losses
    policy_version: int = -1
    drafter_version: int = -1

    def add(self, event: Event) -> None:
        self.rounds.emit(event)
        if isinstance(event, RoundEvent):
            self.num_undrafted_rounds += event.num_draft_tokens == 0
            self.max_batch = max(self.max_batch, event.num_requests)
            if not math.isnan(event.predicted_accept_prob) and event.drafted_by_depth:
                self.predicted_accept_sum += event.predicted_accept_prob * event.drafted_by_depth[0]
                self.predicted_accept_count += event.drafted_by_depth[0]
            if not math.isnan(event.budget_s):
                self.budget_s += event.budget_s
            self.policy_version = event.weights_version
        elif isinstance(event, RequestEvent):
            self.num_requests += 1
            self.num_failed_requests += event.finish_reason == "error"
            self.num_aborted_requests += event.finish_reason == "aborted"
        elif isinstance(event, DrafterStaleEvent):
            self.num_stale_alarms += 1
        elif isinstance(event, WeightSyncEvent):
            self.sync_s += event.seconds
            if event.role == "drafter":
                self.drafter_version = event.version
            elif event.role == "target":
                self.policy_version = event.version
        elif isinstance(event, TrainEvent) and event.role == "drafter":
            self.num_drafter_refreshes += 1
            self.drafter_train_s += event.metrics["seconds"]
            self.drafter_loss_sum += event.loss


class StepSink:
    """An EventSink that gives its totals away once a step. The engine's thread emits, the server's takes."""

    def __init__(self) -> None:
        self._totals = StepTotals()
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._totals.add(event)

    def count_restart(self) -> None:
        with self._lock:
            self._totals.num_restarts += 1

    def take(self) -> StepTotals:
        with self._lock:
            taken = self._totals
            self._totals = StepTotals(policy_version=taken.policy_version, drafter_version=taken.drafter_version)
        return taken

    def close(self) -> None:
        """Nothing to release."""


def merge(parts: Sequence[StepTotals]) -> StepTotals:
    """The totals of several servers: sums, except that versions are the oldest in use."""
    out = StepTotals()
    for part in parts:
        out.rounds.merge(part.rounds)
        for name in _SUMMED:
            setattr(out, name, getattr(out, name) + getattr(part, name))
        out.max_batch = max(out.max_batch, part.max_batch)
    for name in ("policy_version", "drafter_version"):
        setattr(out, name, min((getattr(part, name) for part in parts), default=-1))
    return out


def named(totals: StepTotals) -> dict[str, float]:
    """Metrics by the names they have in verl's logger; a ratio whose denominator is zero is left out, not called 0."""
    rounds = totals.rounds
    accepted, requests_rounds = [count for count, _ in rounds.per_request], [count for _, count in rounds.per_request]
    in_rounds_s = sum(rounds.seconds.values()) - rounds.prefill_s
    figures = {
        "rollout/spec_accept_rate": acceptance_rate_pooled([rounds.num_accepted_tokens], [rounds.num_draft_tokens]),
        "rollout/spec_accept_length": acceptance_length_pooled([rounds.num_accepted_tokens], [rounds.num_request_rounds]),
        "rollout_spec/accept_length_per_request": acceptance_length_per_request(accepted, requests_rounds),
        **{
            f"rollout_spec/{name}": _value(name, rounds)
            for name in ("accept_length_when_drafted", "speedup", "speedup_bound", "policy_lag")
        },
        "rollout_spec/draft_tokens_per_round": _ratio(rounds.num_draft_tokens, rounds.num_request_rounds),
        "rollout_spec/predicted_accept_rate_depth_1": _ratio(totals.predicted_accept_sum, totals.predicted_accept_count),
        "rollout_spec/num_stale_alarms": totals.num_stale_alarms,
        "rollout_spec/budget_share": _ratio(totals.budget_s, in_rounds_s),
        "rollout_spec/tokens_per_round": _ratio(rounds.num_emitted_tokens, rounds.num_request_rounds),
        "rollout_spec/entropy": _ratio(rounds.entropy_sum, rounds.entropy_count),
        "rollout_spec/ms_per_round": 1e3 * _ratio(in_rounds_s, rounds.num_rounds),
        "rollout_spec/requests_per_round": _ratio(rounds.num_request_rounds, rounds.num_rounds),
        "rollout_spec/draft_share": _ratio(rounds.seconds["draft"], in_rounds_s),
        "rollout_spec/undrafted_rounds_rate": _ratio(totals.num_undrafted_rounds, rounds.num_rounds),
        "rollout_spec/engine_s": sum(rounds.seconds.values()),
        "rollout_spec/prefill_s": rounds.prefill_s,
        "rollout_spec/weight_sync_s": totals.sync_s,
        "rollout_spec/num_rounds": rounds.num_rounds,
        "rollout_spec/num_tokens": rounds.num_emitted_tokens,
        "rollout_spec/num_requests": totals.num_requests,
        "rollout_spec/num_failed_requests": totals.num_failed_requests,
        "rollout_spec/num_aborted_requests": totals.num_aborted_requests,
        "rollout_spec/num_restarts": totals.num_restarts,
        "rollout_spec/max_batch": totals.max_batch,
        "rollout_spec/drafter_refreshes": totals.num_drafter_refreshes,
        "rollout_spec/drafter_train_s": totals.drafter_train_s,
        "rollout_spec/drafter_loss": _ratio(totals.drafter_loss_sum, totals.num_drafter_refreshes),
        "rollout_spec/policy_version": totals.policy_version,
        "rollout_spec/drafter_version": totals.drafter_version,
    }
    for depth, rate in enumerate(acceptance_by_depth(rounds.drafted_by_depth, rounds.accepted_by_depth), start=1):
        figures[f"rollout_spec/accept_rate_depth_{depth}"] = rate
    return {name: float(value) for name, value in figures.items() if not math.isnan(value)}


def _value(name: str, totals: SummarySink) -> float:
    value = BY_NAME[name].compute(totals)
    assert not isinstance(value, list)
    return value


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan
