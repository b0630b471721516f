"""The metrics' values on streams that can be counted by hand, the identities between them, and what verl and vLLM call them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams import a_request, a_round, plain_round, story

from rollout_spec.metrics import BY_NAME, METRICS, accepted_length_counts, compute, num_drafts, promql, scalars
from rollout_spec.sinks.prometheus_families import FAMILIES
from rollout_spec.sinks.summary import SummarySink
from rollout_spec_rl.verl.metrics import StepTotals, named


def totals(*events: object) -> SummarySink:
    sink = SummarySink()
    for event in events:
        sink.emit(event)  # type: ignore[arg-type]
    return sink


def test_every_figure_of_two_rounds_by_hand() -> None:
    found = compute(totals(plain_round(0), a_round(1), a_request(accepted=2, rounds=1), a_request(accepted=0, rounds=3, weights_version=2)))
    wanted: dict[str, float | list[float]] = {
        "num_rounds": 2,
        "num_request_rounds": 4,
        "num_drafts": 2,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 2,
        "num_tokens": 6,
        "num_not_finite_rounds": 0,
        "num_failed_requests": 0,
        "accept_rate": 2 / 6,
        "accept_length": 1 + 2 / 4,
        "accept_length_when_drafted": 1 + 2 / 2,
        "accept_length_per_request": (3 + 1) / 2,
        "tokens_per_request_round": 6 / 4,
        "accept_rate_by_depth": [1 / 2, 1.0, 0.0],
        "survival_by_depth": [1 / 2, 1 / 2, 0.0],
        "accept_prob_by_depth": [0.5, 0.75, 0.25],
        "accept_length_by_context": [1 + 2 / 3, 1.0],
        "entropy": 1.0,
        "draft_tokens_per_request_round": 6 / 4,
        "undrafted_rounds_rate": 1 / 2,
        "ms_per_round": 1000 * (0.015 + 0.020) / 2,
        "requests_per_round": 2.0,
        "tokens_per_engine_s": 6 / 0.035,
        "draft_share": 0.002 / 0.035,
        "target_share": 0.029 / 0.035,
        "verify_share": 0.003 / 0.035,
        "other_share": 0.001 / 0.035,
        "prefill_s": 0.0,
        "weight_sync_s": 0.0,
        # 4 tokens of 2 requests are two rounds of 15 ms; the round without a draft stands for itself.
        "speedup": (0.030 + 0.015) / 0.035,
        "speedup_bound": (2 * 0.018 + 0.015) / 0.035,
        "policy_lag": 1.0,
    }
    assert set(found) == set(wanted) == set(BY_NAME)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value), name


def test_pooled_and_per_request_are_two_numbers() -> None:
    """The pitfall's own example: requests of (accepted, rounds) 30/10 and 0/1000."""
    sink = totals(a_request(accepted=30, rounds=10), a_request(accepted=0, rounds=1000))
    for accepted in [3] * 10 + [0] * 1000:
        sink.emit(a_round(num_requests=1, num_accepted_tokens=accepted, num_emitted_tokens=accepted + 1))
    found = compute(sink)
    assert found["accept_length"] == pytest.approx(1 + 30 / 1010)
    assert found["accept_length_per_request"] == pytest.approx(2.5)


def test_nothing_seen_is_nothing_said() -> None:
    found = compute(SummarySink())
    ratios = {metric.name for metric in METRICS if metric.pooling.value != "sum"}
    for name in ratios:
        value = found[name]
        assert value == [] or (isinstance(value, float) and math.isnan(value)), name
    assert set(scalars(SummarySink())) == set(BY_NAME) - ratios


@given(
    accept=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    draft_length=st.integers(1, 5),
    num_requests=st.integers(1, 6),
    plain_every=st.integers(2, 9),
    seed=st.integers(0, 2**16),
)
def test_identities(accept: list[float], draft_length: int, num_requests: int, plain_every: int, seed: int) -> None:
    """Of streams without stops, where a round emits what it accepted and one token more a request."""
    events = story(
        60,
        accept=accept,
        entropy=[1.0] * len(accept),
        draft_length=draft_length,
        num_requests=num_requests,
        plain_every=plain_every,
        seed=seed,
    )
    sink = totals(*events)
    found = compute(sink)
    assert found["num_tokens"] == found["num_accepted_tokens"] + found["num_request_rounds"]  # type: ignore[operator]
    assert found["accept_length"] == pytest.approx(found["tokens_per_request_round"])
    assert found["accept_length"] == pytest.approx(1 + found["accept_rate"] * found["draft_tokens_per_request_round"])  # type: ignore[operator]
    # The length is one plus the sum of the survivals, and a survival the product of the conditional rates: one chain, no tree.
    survival, rates = found["survival_by_depth"], found["accept_rate_by_depth"]
    assert isinstance(survival, list)
    assert isinstance(rates, list)
    assert found["accept_length_when_drafted"] == pytest.approx(1 + sum(survival))
    for depth, share in enumerate(survival):
        assert share == pytest.approx(math.prod(rates[: depth + 1]))
    drafts_share = num_drafts(sink) / sink.num_request_rounds
    assert found["accept_length"] == pytest.approx(1 + drafts_share * (found["accept_length_when_drafted"] - 1))  # type: ignore[operator]
    counts = accepted_length_counts(sink)
    assert sum(counts) == sink.num_request_rounds
    assert sum(length * count for length, count in enumerate(counts)) == sink.num_accepted_tokens
    shares = [found[f"{part}_share"] for part in ("draft", "target", "verify", "other")]
    assert sum(shares) == pytest.approx(1.0)  # type: ignore[arg-type]
    assert found["speedup"] <= found["speedup_bound"] * 1.2  # type: ignore[operator]
    for name in ("accept_rate", "undrafted_rounds_rate", "draft_share"):
        assert 0 <= found[name] <= 1  # type: ignore[operator]


def test_merged_totals_are_those_of_one_stream() -> None:
    events = list(story(120, accept=[0.7, 0.4], entropy=[1.0, 2.0]))
    whole, first, second = totals(*events), totals(*events[:70]), totals(*events[70:])
    first.merge(second)
    wanted, found = compute(whole), compute(first)
    for name in set(BY_NAME) - {"speedup"}:  # what each half knew of rounds without a draft when it compared differs
        assert found[name] == pytest.approx(wanted[name]), name
    assert found["speedup"] == pytest.approx(wanted["speedup"], rel=0.1)


def test_verl_gets_the_same_numbers_under_the_names_of_the_table() -> None:
    step = StepTotals()
    for event in story(120, accept=[0.7, 0.4], entropy=[1.0, 2.0]):
        step.add(event)
    logged, found = named(step), compute(step.rounds)
    checked = 0
    for metric in METRICS:
        value = found[metric.name]
        if not metric.verl:
            continue
        pairs = [(metric.verl.format(i + 1), v) for i, v in enumerate(value)] if isinstance(value, list) else [(metric.verl, value)]
        for name, number in pairs:
            assert logged[name] == pytest.approx(number), name
            checked += 1
    assert checked >= 15


def test_vllm_counts_are_ours() -> None:
    """vLLM's formulas (SpecDecodingProm's docstring), on its counters as the table names ours."""
    sink = totals(*story(120, accept=[0.7], entropy=[1.0]))
    of = {metric.vllm.split(" ")[0]: metric.compute(sink) for metric in METRICS if metric.pooling.value == "sum" and metric.vllm}
    accepted, drafts = of["vllm:spec_decode_num_accepted_tokens_total"], of["vllm:spec_decode_num_drafts_total"]
    drafted = of["vllm:spec_decode_num_draft_tokens_total"]
    found = compute(sink)
    assert found["accept_rate"] == pytest.approx(accepted / drafted)  # type: ignore[operator]
    assert found["accept_length_when_drafted"] == pytest.approx(1 + accepted / drafts)  # type: ignore[operator]


def test_queries_use_metrics_that_exist() -> None:
    import re

    exported = {family.exported_name for family in FAMILIES}
    asked = 0
    for metric in METRICS:
        query = promql(metric, by="replica", window="1m")
        assert "$" not in query
        for name in re.findall(r"rollout_spec_\w+", query):
            assert name in exported, (metric.name, name)
            asked += 1
    assert asked > 30
