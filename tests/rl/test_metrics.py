"""Metrics of a step: counted right, merged over servers, forgotten once taken."""

from __future__ import annotations

import dataclasses
import math
import pickle
import threading

import pytest

from rollout_spec.events import DrafterStaleEvent, PrefillEvent, RequestEvent, RoundEvent, WeightSyncEvent
from rollout_spec_rl.verl.metrics import StepSink, StepTotals, merge, named

ROUND = RoundEvent(
    round_index=0,
    num_requests=2,
    num_draft_tokens=6,
    num_accepted_tokens=3,
    num_emitted_tokens=5,
    drafted_by_depth=(2, 2),
    accepted_by_depth=(2, 1),
    mean_accept_prob_by_depth=(0.9, 0.5),
    mean_entropy=1.5,
    draft_s=0.001,
    target_s=0.006,
    verify_s=0.002,
    other_s=0.001,
    weights_version=3,
    drafter="suffix",
    verifier="gumbel",
)
UNDRAFTED = dataclasses.replace(
    ROUND,
    num_requests=1,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    num_emitted_tokens=1,
    drafted_by_depth=(),
    accepted_by_depth=(),
    mean_entropy=0.3,
)


def request(num_accepted: int, num_rounds: int, reason: str = "stop") -> RequestEvent:
    return RequestEvent(
        request_id="r",
        finish_reason=reason,
        num_prompt_tokens=4,
        num_tokens=num_accepted + num_rounds,
        num_rounds=num_rounds,
        num_draft_tokens=2 * num_accepted,
        num_accepted_tokens=num_accepted,
        weights_version=3,
    )


def totals(*events: object) -> StepTotals:
    sink = StepSink()
    for event in events:
        sink.emit(event)  # type: ignore[arg-type]
    return sink.take()


def test_what_the_budget_expected_stands_beside_what_happened() -> None:
    """Weighted by the requests it was said of; a round without a prediction says nothing."""
    sure = dataclasses.replace(ROUND, predicted_accept_prob=0.8, budget_s=0.0002)
    unsure = dataclasses.replace(ROUND, drafted_by_depth=(6,), accepted_by_depth=(1,), predicted_accept_prob=0.4, budget_s=0.0001)
    stale = DrafterStaleEvent(round_index=2, drafter="mtp", weights_version=3, accept_prob=0.2, reference_accept_prob=0.5, mean_entropy=2.0)
    parts = [totals(sure, UNDRAFTED), totals(unsure, stale)]
    found = named(merge(parts))
    assert found["rollout_spec/predicted_accept_rate_depth_1"] == pytest.approx((2 * 0.8 + 6 * 0.4) / 8)
    assert found["rollout_spec/budget_share"] == pytest.approx(0.0003 / 0.03)
    assert found["rollout_spec/num_stale_alarms"] == 1
    assert "rollout_spec/predicted_accept_rate_depth_1" not in named(totals(ROUND, UNDRAFTED))


def test_figures_of_one_server() -> None:
    sync = WeightSyncEvent(role="target", version=3, num_tensors=9, checksum="", seconds=0.5)
    prefill = PrefillEvent(num_prompts=1, num_tokens=9, num_shared_tokens=0, target_s=0.25)
    found = named(totals(sync, prefill, ROUND, UNDRAFTED, request(3, 1), request(0, 10, "aborted"), request(1, 1, "error")))
    assert found["rollout/spec_accept_rate"] == pytest.approx(3 / 6)
    assert found["rollout/spec_accept_length"] == pytest.approx(1 + 3 / 3)
    assert found["rollout_spec/accept_length_per_request"] == pytest.approx(1 + (3 + 0 + 1) / 3)
    assert found["rollout_spec/tokens_per_round"] == pytest.approx(6 / 3)
    assert found["rollout_spec/draft_tokens_per_round"] == pytest.approx(6 / 3)
    assert found["rollout_spec/entropy"] == pytest.approx((5 * 1.5 + 0.3) / 6)
    assert found["rollout_spec/ms_per_round"] == pytest.approx(10.0)
    assert found["rollout_spec/draft_share"] == pytest.approx(0.1)
    assert found["rollout_spec/undrafted_rounds_rate"] == pytest.approx(0.5)
    assert found["rollout_spec/engine_s"] == pytest.approx(0.27)
    assert (found["rollout_spec/accept_rate_depth_1"], found["rollout_spec/accept_rate_depth_2"]) == (1.0, 0.5)
    assert (found["rollout_spec/num_requests"], found["rollout_spec/num_aborted_requests"]) == (3, 1)
    assert (found["rollout_spec/num_failed_requests"], found["rollout_spec/max_batch"]) == (1, 2)
    assert (found["rollout_spec/policy_version"], found["rollout_spec/drafter_version"]) == (3, -1)
    assert found["rollout_spec/weight_sync_s"] == 0.5


def test_pooled_and_per_request_lengths_are_not_the_same() -> None:
    """(accepted, rounds) of 30/10 and 0/1000: pooled 1.03, per request 2.5."""
    rounds = dataclasses.replace(ROUND, num_requests=1010, num_accepted_tokens=30, num_draft_tokens=60, num_emitted_tokens=1040)
    found = named(totals(rounds, request(30, 10), request(0, 1000)))
    assert found["rollout/spec_accept_length"] == pytest.approx(1.0297, abs=1e-4)
    assert found["rollout_spec/accept_length_per_request"] == pytest.approx(2.5)


def test_nothing_is_called_zero_that_was_not_seen() -> None:
    assert not any(name.startswith("rollout/") for name in named(StepTotals()))
    undrafted = named(totals(UNDRAFTED))
    assert "rollout/spec_accept_rate" not in undrafted
    assert undrafted["rollout/spec_accept_length"] == 1.0
    assert all(math.isfinite(value) for value in undrafted.values())


def test_two_servers_are_one_after_merging() -> None:
    """Sums of the parts, whichever server saw what; each part crosses a process boundary."""
    events = [
        ROUND,
        UNDRAFTED,
        request(3, 1),
        ROUND,
        request(2, 4),
        dataclasses.replace(ROUND, drafted_by_depth=(2,), accepted_by_depth=(1,)),
    ]
    parts = [pickle.loads(pickle.dumps(totals(*half))) for half in (events[:3], events[3:])]
    assert named(merge(parts)) == pytest.approx(named(totals(*events)))
    assert named(merge([parts[1], parts[0]])) == pytest.approx(named(merge(parts)))


def test_the_oldest_version_in_use_is_reported() -> None:
    newer, older = totals(dataclasses.replace(ROUND, weights_version=8)), totals(ROUND)
    assert merge([newer, older]).policy_version == 3
    assert merge([]).policy_version == -1


def test_a_step_forgets_the_one_before_but_not_its_versions() -> None:
    sink = StepSink()
    sink.emit(ROUND)
    sink.emit(WeightSyncEvent(role="drafter", version=2, num_tensors=1, checksum="", seconds=0.0))
    assert sink.take().rounds.num_rounds == 1
    later = sink.take()
    assert (later.rounds.num_rounds, later.num_requests) == (0, 0)
    assert (later.policy_version, later.drafter_version) == (3, 2)


def test_no_event_is_lost_between_two_threads() -> None:
    sink, taken = StepSink(), []
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            taken.append(sink.take())

    thread = threading.Thread(target=take)
    thread.start()
    for _ in range(3000):
        sink.emit(ROUND)
    stop.set()
    thread.join()
    taken.append(sink.take())
    assert sum(part.rounds.num_rounds for part in taken) == 3000
