"""The Prometheus metrics: names, kinds, labels and what they mean. rollout_spec.sinks.prometheus fills them.

Every one also carries ``engine``, ``replica`` and ``drafter``. Cardinality is bounded: depths and draft lengths up to MAX_DEPTH, context
buckets by doubling, entropies in half nats, one weights version and checksum a role at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

OWN_LABELS = ("engine", "replica", "drafter")
MAX_DEPTH = 64
MAX_ENTROPY = 12.0  # nats; the natural logarithm of 162,000


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str  # without rollout_spec_, and without the _total of counters
    what: str
    kind: Kind = Kind.COUNTER
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported_name(self) -> str:
        return f"rollout_spec_{self.name}" + ("_total" if self.kind is Kind.COUNTER else "")


FAMILIES: tuple[Family, ...] = (
    Family(name="rounds", what="rounds of the batch"),
    Family(name="request_rounds", what="rounds, once for every request in them"),
    Family(name="drafts", what="rounds of a request in which something was drafted for it"),
    Family(name="draft_tokens", what="nodes of drafted trees"),
    Family(name="accepted_tokens", what="drafted tokens that requests kept"),
    Family(name="emitted_tokens", what="tokens emitted, recovered and bonus tokens included"),
    Family(name="undrafted_rounds", what="rounds of the batch in which nothing was drafted"),
    Family(name="not_finite_rounds", what="rounds with an entropy or acceptance probability that is no number"),
    Family(name="drafted_at_depth", labels=("depth",), what="request rounds that reached a drafted token at this depth"),
    Family(name="accepted_at_depth", labels=("depth",), what="of those, the ones whose verifier accepted one"),
    Family(name="accept_prob_sum_at_depth", labels=("depth",), what="sum of acceptance probabilities over drafted_at_depth"),
    Family(name="request_rounds_by_context", labels=("context",), what="request rounds of contexts up to so many tokens"),
    Family(name="draft_tokens_by_context", labels=("context",), what="their draft tokens"),
    Family(name="accepted_tokens_by_context", labels=("context",), what="those of them that were kept"),
    Family(name="drafts_by_entropy", labels=("entropy",), what="drafts in rounds of a mean entropy up to so many nats"),
    Family(name="accepted_by_entropy", labels=("entropy",), what="those whose first token was accepted"),
    Family(name="entropy_nats_sum", what="sum of entropies over entropy_tokens"),
    Family(name="entropy_tokens", what="emitted tokens whose entropy is known"),
    Family(name="seconds", labels=("part",), what="time in draft, target, verify, other (rounds) and prefill"),
    Family(name="prompt_tokens", labels=("source",), what="prompt tokens computed, or shared (copied from another request)"),
    Family(name="requests", labels=("finish_reason",), what="requests that ended"),
    Family(name="compared_seconds", labels=("draft_length",), what="time of rounds that can be compared with no drafting"),
    Family(name="off_seconds", labels=("draft_length",), what="time that their tokens would have taken without drafting"),
    Family(name="bound_seconds", labels=("draft_length",), what="the same if drafted rows cost the target nothing, all rounds"),
    Family(name="rounds_by_draft_length", labels=("draft_length",), what="rounds whose deepest draft was so long"),
    Family(name="weight_syncs", labels=("role",), what="weight updates of the target or drafter"),
    Family(name="weight_sync_seconds", labels=("role",), what="time they took"),
    Family(name="policy_lag_versions_sum", what="policy versions between first token and end, summed over policy_lag_requests"),
    Family(name="policy_lag_requests", what="finished requests whose first version is known"),
    Family(name="drafter_stale", what="times that the drafter was found stale"),
    Family(name="sink_events", labels=("sink", "outcome"), what="events delivered, dropped or failed in each sink"),
    Family(
        name="round_seconds",
        kind=Kind.HISTOGRAM,
        buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
        what="time of a round, prefills left out",
    ),
    Family(
        name="accepted_length",
        kind=Kind.HISTOGRAM,
        buckets=(0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0),
        what="drafted tokens that the verifier accepted, one observation a request round (the bonus is not counted)",
    ),
    Family(name="running_requests", kind=Kind.GAUGE, what="requests in the last round"),
    Family(name="weights_version", kind=Kind.GAUGE, labels=("role",), what="version in use"),
    Family(name="weights_info", kind=Kind.GAUGE, labels=("role", "weights_version", "checksum"), what="1 for the weights in use"),
    Family(name="predicted_accept_prob", kind=Kind.GAUGE, what="acceptance of the first drafted token that the controller expects"),
    Family(name="predicted_gain", kind=Kind.GAUGE, what="gain of drafting that the controller expects (0 = none)"),
    Family(name="train_step", kind=Kind.GAUGE, what="the policy's last training step"),
    Family(name="importance_ratio", kind=Kind.GAUGE, labels=("stat",), what="trainer's over rollout's probability of sampled tokens"),
)
