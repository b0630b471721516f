"""Every metric: its formula, unit and what it counts, the function that computes it, and what vLLM, verl and Prometheus call it.

docs/metrics.md is made from this table (``python docs/build_metrics.py``). All are computed from totals of a step, a span of time or a run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from rollout_spec.acceptance import (
    acceptance_by_depth,
    acceptance_length_per_request,
    acceptance_length_pooled,
    acceptance_rate_pooled,
)
from rollout_spec.events import context_edge
from rollout_spec.sinks.summary import SummarySink


class Pooling(Enum):
    SUM = "sum"
    POOLED = "ratio of sums"
    PER_REQUEST = "mean of ratios, one a request"


class Bonus(Enum):
    COUNTED = "counted"
    NOT_COUNTED = "not counted"
    NONE = "–"  # nothing that could count it


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number, or one a depth or context bucket (``by``). NaN where the denominator is zero, never 0."""

    name: str
    unit: str
    formula: str
    pooling: Pooling
    bonus: Bonus
    compute: Callable[[SummarySink], float | list[float]]
    by: str = ""  # depth: entry i is depth i + 1 | context: entry i is events.context_bucket i
    verl: str = ""  # its name in verl's logger; {} is the depth
    vllm: str = ""  # vLLM's name or query for the same number
    vllm_differs: str = ""  # how that differs
    promql: str = ""  # over our own metrics; $w stands for the range, $by for the labels that are kept


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan


def _round_s(totals: SummarySink) -> float:
    """Seconds of rounds: everything but prefills."""
    return math.fsum(totals.seconds.values()) - totals.prefill_s


def _share(part: str) -> Callable[[SummarySink], float]:
    def share(totals: SummarySink) -> float:
        seconds = totals.seconds[part] - (totals.prefill_s if part == "target" else 0.0)
        return _ratio(seconds, _round_s(totals))

    return share


def _lag(totals: SummarySink) -> float:
    return _ratio(sum(lag * count for lag, count in totals.policy_lags.items()), sum(totals.policy_lags.values()))


def _lists(over: str, under: str) -> Callable[[SummarySink], list[float]]:
    def ratios(totals: SummarySink) -> list[float]:
        return [_ratio(a, b) for a, b in zip(getattr(totals, over), getattr(totals, under), strict=True)]

    return ratios


def _survival(totals: SummarySink) -> list[float]:
    drafts = num_drafts(totals)
    return [_ratio(accepted, drafts) for accepted in totals.accepted_by_depth]


def _context_lengths(totals: SummarySink) -> list[float]:
    pairs = zip(totals.accepted_by_context, totals.rounds_by_context, strict=True)
    return [1.0 + _ratio(accepted, rounds) for accepted, rounds in pairs]


def num_drafts(totals: SummarySink) -> int:
    """Rounds of a request in which something was drafted for it."""
    return totals.drafted_by_depth[0] if totals.drafted_by_depth else 0


def _counter(name: str) -> str:
    return f"sum by ($by) (rate(rollout_spec_{name}_total[$w]))"


def _over(over: str, under: str) -> str:
    return f"{_counter(over)} / {_counter(under)}"


def _seconds(part: str = "") -> str:
    selector = f'part="{part}"' if part else 'part!="prefill"'
    return f"sum by ($by) (rate(rollout_spec_seconds_total{{{selector}}}[$w]))"


def _by(label: str, over: str, under: str) -> str:
    return " / ".join(f"sum by ($by, {label}) (rate(rollout_spec_{name}_total[$w]))" for name in (over, under))


METRICS: tuple[Metric, ...] = (
    # Counts
    Metric(
        name="num_rounds",
        unit="rounds",
        formula="rounds of the batch",
        pooling=Pooling.SUM,
        bonus=Bonus.NONE,
        compute=lambda t: t.num_rounds,
        verl="rollout_spec/num_rounds",
        promql=_counter("rounds"),
    ),
    Metric(
        name="num_request_rounds",
        unit="rounds",
        formula="Σ over rounds of the requests in it",
        pooling=Pooling.SUM,
        bonus=Bonus.NONE,
        compute=lambda t: t.num_request_rounds,
        promql=_counter("request_rounds"),
    ),
    Metric(
        name="num_drafts",
        unit="rounds",
        formula="request rounds with a draft = drafted_by_depth[1]",
        pooling=Pooling.SUM,
        bonus=Bonus.NONE,
        compute=num_drafts,
        vllm="vllm:spec_decode_num_drafts_total",
        promql=_counter("drafts"),
    ),
    Metric(
        name="num_draft_tokens",
        unit="tokens",
        formula="Σ nodes of the drafted trees",
        pooling=Pooling.SUM,
        bonus=Bonus.NOT_COUNTED,
        compute=lambda t: t.num_draft_tokens,
        vllm="vllm:spec_decode_num_draft_tokens_total",
        promql=_counter("draft_tokens"),
    ),
    Metric(
        name="num_accepted_tokens",
        unit="tokens",
        formula="Σ drafted tokens that the requests kept (what a stop cut off is not counted)",
        pooling=Pooling.SUM,
        bonus=Bonus.NOT_COUNTED,
        compute=lambda t: t.num_accepted_tokens,
        vllm="vllm:spec_decode_num_accepted_tokens_total",
        vllm_differs="vLLM counts what its verifier accepted, also behind a stop",
        promql=_counter("accepted_tokens"),
    ),
    Metric(
        name="num_tokens",
        unit="tokens",
        formula="num_accepted_tokens + one recovered or bonus token for each request round that no stop cut short",
        pooling=Pooling.SUM,
        bonus=Bonus.COUNTED,
        compute=lambda t: t.num_emitted_tokens,
        verl="rollout_spec/num_tokens",
        vllm="vllm:generation_tokens_total",
        promql=_counter("emitted_tokens"),
    ),
    Metric(
        name="num_not_finite_rounds",
        unit="rounds",
        formula="rounds whose entropy or acceptance probability is NaN or infinite",
        pooling=Pooling.SUM,
        bonus=Bonus.NONE,
        compute=lambda t: t.num_not_finite_rounds,
        promql=_counter("not_finite_rounds"),
    ),
    Metric(
        name="num_failed_requests",
        unit="requests",
        formula="requests that ended with finish_reason = error",
        pooling=Pooling.SUM,
        bonus=Bonus.NONE,
        compute=lambda t: t.requests_by_reason.get("error", 0),
        verl="rollout_spec/num_failed_requests",
        promql='sum by ($by) (rate(rollout_spec_requests_total{finish_reason="error"}[$w]))',
    ),
    # Acceptance
    Metric(
        name="accept_rate",
        unit="1",
        formula="num_accepted_tokens / num_draft_tokens",
        pooling=Pooling.POOLED,
        bonus=Bonus.NOT_COUNTED,
        compute=lambda t: acceptance_rate_pooled([t.num_accepted_tokens], [t.num_draft_tokens]),
        verl="rollout/spec_accept_rate",
        vllm="vllm:spec_decode_num_accepted_tokens_total / vllm:spec_decode_num_draft_tokens_total",
        promql=_over("accepted_tokens", "draft_tokens"),
    ),
    Metric(
        name="accept_length",
        unit="tokens a request round",
        formula="1 + num_accepted_tokens / num_request_rounds",
        pooling=Pooling.POOLED,
        bonus=Bonus.COUNTED,
        compute=lambda t: acceptance_length_pooled([t.num_accepted_tokens], [t.num_request_rounds]),
        verl="rollout/spec_accept_length",
        vllm="1 + vllm:spec_decode_num_accepted_tokens_total / vllm:spec_decode_num_drafts_total",
        vllm_differs="vLLM divides by rounds with a draft (accept_length_when_drafted); equal when every round drafts",
        promql=f"1 + {_over('accepted_tokens', 'request_rounds')}",
    ),
    Metric(
        name="accept_length_when_drafted",
        unit="tokens a draft",
        formula="1 + num_accepted_tokens / num_drafts",
        pooling=Pooling.POOLED,
        bonus=Bonus.COUNTED,
        compute=lambda t: 1.0 + _ratio(t.num_accepted_tokens, num_drafts(t)),
        verl="rollout_spec/accept_length_when_drafted",
        vllm="1 + vllm:spec_decode_num_accepted_tokens_total / vllm:spec_decode_num_drafts_total",
        promql=f"1 + {_over('accepted_tokens', 'drafts')}",
    ),
    Metric(
        name="accept_length_per_request",
        unit="tokens a request round",
        formula="mean over requests of 1 + accepted / rounds",
        pooling=Pooling.PER_REQUEST,
        bonus=Bonus.COUNTED,
        compute=lambda t: acceptance_length_per_request([a for a, _ in t.per_request], [r for _, r in t.per_request]),
        verl="rollout_spec/accept_length_per_request",
    ),
    Metric(
        name="tokens_per_request_round",
        unit="tokens a request round",
        formula="num_tokens / num_request_rounds (accept_length less what stops cut off)",
        pooling=Pooling.POOLED,
        bonus=Bonus.COUNTED,
        compute=lambda t: _ratio(t.num_emitted_tokens, t.num_request_rounds),
        verl="rollout_spec/tokens_per_round",
        promql=_over("emitted_tokens", "request_rounds"),
    ),
    Metric(
        name="accept_rate_by_depth",
        unit="1",
        formula="α_d = accepted at depth d / request rounds that reached a drafted token at depth d",
        pooling=Pooling.POOLED,
        bonus=Bonus.NOT_COUNTED,
        compute=lambda t: acceptance_by_depth(t.drafted_by_depth, t.accepted_by_depth),
        by="depth",
        verl="rollout_spec/accept_rate_depth_{}",
        promql=_by("depth", "accepted_at_depth", "drafted_at_depth"),
    ),
    Metric(
        name="survival_by_depth",
        unit="1",
        formula="accepted at depth d / num_drafts",
        pooling=Pooling.POOLED,
        bonus=Bonus.NOT_COUNTED,
        compute=_survival,
        by="depth",
        vllm="vllm:spec_decode_num_accepted_tokens_per_pos_total / vllm:spec_decode_num_drafts_total",
        promql="sum by ($by, depth) (rate(rollout_spec_accepted_at_depth_total[$w])) / on ($by) group_left () "
        "sum by ($by) (rate(rollout_spec_drafts_total[$w]))",
    ),
    Metric(
        name="accept_prob_by_depth",
        unit="1",
        formula="mean acceptance probability (1 - TV before the drafted token is looked at, or what the verifier offers) at depth d",
        pooling=Pooling.POOLED,
        bonus=Bonus.NOT_COUNTED,
        compute=_lists("accept_prob_sum_by_depth", "drafted_by_depth"),
        by="depth",
        promql=_by("depth", "accept_prob_sum_at_depth", "drafted_at_depth"),
    ),
    Metric(
        name="accept_length_by_context",
        unit="tokens a request round",
        formula="1 + accepted / request rounds, of contexts up to the bucket's edge",
        pooling=Pooling.POOLED,
        bonus=Bonus.COUNTED,
        compute=_context_lengths,
        by="context",
        promql=f"1 + {_by('context', 'accepted_tokens_by_context', 'request_rounds_by_context')}",
    ),
    # Entropy, budget
    Metric(
        name="entropy",
        unit="nats",
        formula="mean entropy of the processed law over emitted positions",
        pooling=Pooling.POOLED,
        bonus=Bonus.COUNTED,
        compute=lambda t: _ratio(t.entropy_sum, t.entropy_count),
        verl="rollout_spec/entropy",
        promql=_over("entropy_nats_sum", "entropy_tokens"),
    ),
    Metric(
        name="draft_tokens_per_request_round",
        unit="tokens a request round",
        formula="num_draft_tokens / num_request_rounds",
        pooling=Pooling.POOLED,
        bonus=Bonus.NOT_COUNTED,
        compute=lambda t: _ratio(t.num_draft_tokens, t.num_request_rounds),
        verl="rollout_spec/draft_tokens_per_round",
        promql=_over("draft_tokens", "request_rounds"),
    ),
    Metric(
        name="undrafted_rounds_rate",
        unit="1",
        formula="rounds in which nothing was drafted / num_rounds",
        pooling=Pooling.POOLED,
        bonus=Bonus.NONE,
        compute=lambda t: _ratio(t.num_undrafted_rounds, t.num_rounds),
        verl="rollout_spec/undrafted_rounds_rate",
        promql=_over("undrafted_rounds", "rounds"),
    ),
    # Time
    Metric(
        name="ms_per_round",
        unit="ms",
        formula="1000 · (draft + target + verify + other) / num_rounds, prefills left out",
        pooling=Pooling.POOLED,
        bonus=Bonus.NONE,
        compute=lambda t: 1e3 * _ratio(_round_s(t), t.num_rounds),
        verl="rollout_spec/ms_per_round",
        promql=f"1000 * {_seconds()} / {_counter('rounds')}",
    ),
    Metric(
        name="requests_per_round",
        unit="requests",
        formula="num_request_rounds / num_rounds",
        pooling=Pooling.POOLED,
        bonus=Bonus.NONE,
        compute=lambda t: _ratio(t.num_request_rounds, t.num_rounds),
        verl="rollout_spec/requests_per_round",
        promql=_over("request_rounds", "rounds"),
    ),
    Metric(
        name="tokens_per_engine_s",
        unit="tokens/s",
        formula="num_tokens / seconds in rounds, prefills left out",
        pooling=Pooling.POOLED,
        bonus=Bonus.COUNTED,
        compute=lambda t: _ratio(t.num_emitted_tokens, _round_s(t)),
        promql=f"{_counter('emitted_tokens')} / {_seconds()}",
    ),
    *(
        Metric(
            name=f"{part}_share",
            unit="1",
            formula=f"seconds of {what} / seconds in rounds",
            pooling=Pooling.POOLED,
            bonus=Bonus.NONE,
            compute=_share(part),
            verl="rollout_spec/draft_share" if part == "draft" else "",
            promql=f"{_seconds(part)} / {_seconds()}",
        )
        for part, what in (
            ("draft", "the drafter"),
            ("target", "the target's forwards and head"),
            ("verify", "the verifier"),
            ("other", "everything else"),
        )
    ),
    Metric(
        name="prefill_s",
        unit="s",
        formula="Σ seconds of prefills",
        pooling=Pooling.SUM,
        bonus=Bonus.NONE,
        compute=lambda t: t.prefill_s,
        verl="rollout_spec/prefill_s",
        promql=_seconds("prefill"),
    ),
    Metric(
        name="weight_sync_s",
        unit="s",
        formula="Σ seconds of weight updates, policy's and drafter's",
        pooling=Pooling.SUM,
        bonus=Bonus.NONE,
        compute=lambda t: t.weight_sync_s,
        verl="rollout_spec/weight_sync_s",
        promql=_counter("weight_sync_seconds"),
    ),
    # Does it pay?
    Metric(
        name="speedup",
        unit="1",
        formula="Σ off / Σ t over comparable rounds; off = tokens / requests · T0(requests), T0 from this run's rounds without a draft",
        pooling=Pooling.POOLED,
        bonus=Bonus.COUNTED,
        compute=lambda t: t.speed.speedup(),
        verl="rollout_spec/speedup",
        promql=_over("off_seconds", "compared_seconds"),
    ),
    Metric(
        name="speedup_bound",
        unit="1",
        formula="at most: Σ tokens / requests · (t - draft) / Σ t, as if drafted rows cost the target nothing",
        pooling=Pooling.POOLED,
        bonus=Bonus.COUNTED,
        compute=lambda t: t.speed.speedup_bound(),
        verl="rollout_spec/speedup_bound",
        promql=f"{_counter('bound_seconds')} / {_seconds()}",
    ),
    # Staleness
    Metric(
        name="policy_lag",
        unit="versions",
        formula="mean over finished requests of policy version at the end - version that sampled the first token",
        pooling=Pooling.PER_REQUEST,
        bonus=Bonus.NONE,
        compute=_lag,
        verl="rollout_spec/policy_lag",
        promql=_over("policy_lag_versions_sum", "policy_lag_requests"),
    ),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def compute(totals: SummarySink) -> dict[str, float | list[float]]:
    """Every metric of these totals, by name."""
    return {metric.name: metric.compute(totals) for metric in METRICS}


def scalars(totals: SummarySink) -> dict[str, float]:
    """Every finite number of these totals, with the depth or the longest context in the names of those that are one a bucket."""
    out: dict[str, float] = {}
    for metric in METRICS:
        value = metric.compute(totals)
        if isinstance(value, list):
            names = [i + 1 if metric.by == "depth" else context_edge(i) for i in range(len(value))]
            out |= {f"{metric.name}_{name}": number for name, number in zip(names, value, strict=True)}
        else:
            out[metric.name] = value
    return {name: float(value) for name, value in out.items() if math.isfinite(value)}


def accepted_length_counts(totals: SummarySink) -> list[int]:
    """Entry k: request rounds whose verifier accepted exactly k drafted tokens (before stops); they add up to num_request_rounds."""
    survivors = [totals.num_request_rounds, *totals.accepted_by_depth, 0]
    return [here - deeper for here, deeper in itertools.pairwise(survivors)]


def promql(metric: Metric, *, by: str, window: str) -> str:
    """The metric's query over our Prometheus metrics, keeping these labels; empty when counters cannot tell it."""
    return metric.promql.replace("$by", by).replace("$w", window)
