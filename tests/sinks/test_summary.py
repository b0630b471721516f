"""SummarySink: ratios of sums and means of ratios are different numbers, and every length says what it counts."""

from __future__ import annotations

import dataclasses

import pytest

from rollout_spec.events import PrefillEvent, RequestEvent, RoundEvent
from rollout_spec.sinks.summary import SummarySink

ROUND = RoundEvent(
    round_index=0,
    num_requests=3,
    num_draft_tokens=9,
    num_accepted_tokens=3,
    num_emitted_tokens=6,
    drafted_by_depth=(3, 2, 1),
    accepted_by_depth=(2, 1, 0),
    mean_accept_prob_by_depth=(0.6, 0.5, 0.1),
    mean_entropy=2.0,
    draft_s=0.1,
    target_s=0.5,
    verify_s=0.2,
    other_s=0.2,
    weights_version=0,
    drafter="ngram",
    verifier="exact_match",
)


def finished(accepted: int, rounds: int) -> RequestEvent:
    return RequestEvent(
        request_id="r",
        finish_reason="length",
        num_prompt_tokens=1,
        num_tokens=accepted + rounds,
        num_rounds=rounds,
        num_draft_tokens=2 * accepted,
        num_accepted_tokens=accepted,
        weights_version=0,
    )


def test_pooled_and_per_request_lengths_differ_and_count_the_bonus() -> None:
    """Requests with (accepted, rounds) 30/10 and 0/1000: 1 + 30/1010 pooled, (4 + 1)/2 per request."""
    sink = SummarySink()
    for accepted, rounds in ((30, 10), (0, 1000)):
        sink.emit(finished(accepted, rounds))
        for index in range(rounds):
            part = dataclasses.replace(ROUND, num_requests=1, num_accepted_tokens=3 if accepted and index < 10 else 0)
            sink.emit(part)
    summary = sink.summary()
    assert summary["acceptance_length_pooled"] == pytest.approx(1 + 30 / 1010)
    assert summary["acceptance_length_per_request"] == pytest.approx(2.5)


def test_rates_by_depth_are_conditional_on_reaching_it() -> None:
    sink = SummarySink()
    sink.emit(ROUND)
    sink.emit(
        dataclasses.replace(
            ROUND, drafted_by_depth=(1,), accepted_by_depth=(1,), mean_accept_prob_by_depth=(1.0,), mean_entropy=4.0, num_emitted_tokens=2
        )
    )
    sink.emit(PrefillEvent(num_prompts=1, num_tokens=5, num_shared_tokens=0, target_s=0.25))
    summary = sink.summary()
    assert summary["acceptance_by_depth"] == [pytest.approx(3 / 4), pytest.approx(1 / 2), 0.0]
    assert summary["acceptance_rate"] == pytest.approx(6 / 18)
    assert summary["mean_entropy"] == pytest.approx((2.0 * 6 + 4.0 * 2) / 8)
    assert summary["ms_per_round"] == pytest.approx(1000.0)
    assert summary["seconds"] == pytest.approx({"draft": 0.2, "target": 1.25, "verify": 0.4, "other": 0.4, "prefill_within_target": 0.25})


def test_a_run_without_rounds_has_no_ratios() -> None:
    summary = SummarySink().summary()
    for name in ("acceptance_rate", "acceptance_length_pooled", "acceptance_length_per_request", "mean_entropy", "ms_per_round"):
        assert summary[name] is None
    assert summary["acceptance_by_depth"] == []
