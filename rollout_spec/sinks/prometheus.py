"""Prometheus: one endpoint a process, with a registry of its own. Needs the extra ``prometheus``.

Many processes (Ray's workers) do not share anything: each listens on a port of its own and says which in a file for ``file_sd_configs``.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.events import (
    BudgetEvent,
    DrafterStaleEvent,
    Event,
    PrefillEvent,
    RequestEvent,
    RoundEvent,
    TrainEvent,
    WeightSyncEvent,
    context_edge,
)
from rollout_spec.files import write_text
from rollout_spec.sinks.prometheus_families import FAMILIES, MAX_DEPTH, MAX_ENTROPY, OWN_LABELS, Kind
from rollout_spec.sinks.queued import SinkHealth
from rollout_spec.speedup import PlainRounds, compare, draft_length, round_seconds

LOOPBACK = "127.0.0.1"
# What trainers call the ratio of their own probability of a sampled token to the rollout's, by the statistic it is.
_IMPORTANCE = {
    "importance_ratio_mean": "mean",
    "importance_ratio_max": "max",
    "rollout_corr/rollout_is_mean": "mean",
    "rollout_corr/rollout_is_max": "max",
}


def _zeros() -> dict[tuple[str, ...], float]:
    """Counters that are there from the start: what a series counts before its first scrape is no increase."""
    plain: dict[tuple[str, ...], float] = {(family.name,): 0.0 for family in FAMILIES if family.kind is Kind.COUNTER and not family.labels}
    return plain | {("requests", reason): 0.0 for reason in ("stop", "length", "aborted", "error")}


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError:
        raise ValueError("the Prometheus sink needs the package prometheus-client: pip install 'rollout-spec[prometheus]'") from None
    return prometheus_client


class Histogram:
    """Counts by upper edge, which belongs to its bucket."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect.bisect_left(self._edges, value)] += count
        self.sum += count * value

    def cumulative(self) -> list[tuple[str, float]]:
        """(edge, how many are not above it), as Prometheus wants it."""
        edges = [*(str(float(edge)) for edge in self._edges), "+Inf"]
        return [(edge, float(count)) for edge, count in zip(edges, itertools.accumulate(self._counts), strict=True)]


class PrometheusSink:
    """Counts events and serves the counts under http://HOST:PORT/metrics.

    ``targets_file``: where host, port and labels are written for Prometheus's file-based discovery; removed by ``close``.
    Raises ValueError when prometheus-client is missing or the port is taken.
    """

    def __init__(
        self,
        *,
        engine: str = "rollout_spec",
        replica: str = "0",
        drafter: str = "none",
        host: str = LOOPBACK,
        port: int = 0,
        targets_file: Path | None = None,
    ) -> None:
        client = _client()
        self.registry: Any = client.CollectorRegistry()
        self._own = {"engine": engine, "replica": replica, "drafter": drafter}
        # Kept here and handed over when Prometheus asks: the client's own counters would take longer than a round's other bookkeeping.
        self._values = _zeros()  # (family, label values) of counters and gauges
        self._histograms = {family.name: Histogram(family.buckets) for family in FAMILIES if family.kind is Kind.HISTOGRAM}
        self._plain = PlainRounds()
        self._info: dict[str, tuple[str, str]] = {}
        self._health: Callable[[], Sequence[SinkHealth]] = list
        self.registry.register(self)
        try:
            self._server, _ = client.start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise ValueError(f"the Prometheus sink cannot listen on {host}:{port} ({error.strerror}): choose another port") from error
        self.address = f"{host}:{self._server.server_port}"
        self._targets_file = targets_file
        if targets_file is not None:
            _write_targets(targets_file, self.address, self._own)

    def watch(self, health: Callable[[], Sequence[SinkHealth]]) -> None:
        """Report these sinks' losses; asked when Prometheus asks, so that even a full queue of this very sink shows."""
        self._health = health

    def emit(self, event: Event) -> None:
        if isinstance(event, RoundEvent):
            self._round(event)
        elif isinstance(event, PrefillEvent):
            self._add("seconds", event.target_s, "prefill")
            self._add("prompt_tokens", event.num_tokens, "computed")
            self._add("prompt_tokens", event.num_shared_tokens, "shared")
        elif isinstance(event, RequestEvent):
            self._add("requests", 1, event.finish_reason)
            if event.oldest_weights_version >= 0:
                self._add("policy_lag_versions_sum", event.weights_version - event.oldest_weights_version)
                self._add("policy_lag_requests", 1)
        elif isinstance(event, WeightSyncEvent):
            self._weights(event)
        elif isinstance(event, BudgetEvent):
            if math.isfinite(event.predicted_gain):
                self._set("predicted_gain", event.predicted_gain)
        elif isinstance(event, DrafterStaleEvent):
            self._add("drafter_stale", 1)
        elif isinstance(event, TrainEvent) and event.role == "policy":
            self._set("train_step", event.step)
            for name, stat in _IMPORTANCE.items():
                if name in event.metrics:
                    self._set("importance_ratio", event.metrics[name], stat)

    def close(self) -> None:
        if self._targets_file is not None:
            self._targets_file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """What the client's registry calls at every scrape."""
        core = _client().core
        kinds = {Kind.COUNTER: core.CounterMetricFamily, Kind.GAUGE: core.GaugeMetricFamily, Kind.HISTOGRAM: core.HistogramMetricFamily}
        found = {
            family.name: kinds[family.kind](f"rollout_spec_{family.name}", family.what, labels=(*OWN_LABELS, *family.labels))
            for family in FAMILIES
        }
        own = tuple(self._own.values())
        for (name, *labels), value in list(self._values.items()):
            found[name].add_metric((*own, *labels), value)
        for name, histogram in self._histograms.items():
            found[name].add_metric(own, histogram.cumulative(), histogram.sum)
        for sink in self._health():
            for outcome in ("delivered", "dropped", "failed"):
                found["sink_events"].add_metric((*own, sink.name, outcome), getattr(sink, f"num_{outcome}"))
        yield from found.values()

    def _add(self, name: str, amount: float, *labels: str) -> None:
        key = (name, *labels)
        self._values[key] = self._values.get(key, 0.0) + amount

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[(name, *labels)] = value

    def _round(self, event: RoundEvent) -> None:
        drafts = event.drafted_by_depth[0] if event.drafted_by_depth else 0
        for name, amount in (
            ("rounds", 1),
            ("request_rounds", event.num_requests),
            ("drafts", drafts),
            ("draft_tokens", event.num_draft_tokens),
            ("accepted_tokens", event.num_accepted_tokens),
            ("emitted_tokens", event.num_emitted_tokens),
            ("undrafted_rounds", event.num_draft_tokens == 0),
            ("not_finite_rounds", not all(map(math.isfinite, (event.mean_entropy, *event.mean_accept_prob_by_depth)))),
        ):
            self._add(name, amount)
        for part in ("draft", "target", "verify", "other"):
            self._add("seconds", getattr(event, f"{part}_s"), part)
        self._histograms["round_seconds"].add(round_seconds(event))
        self._set("running_requests", event.num_requests)
        self._set("weights_version", event.weights_version, "target")
        if math.isfinite(event.predicted_accept_prob):
            self._set("predicted_accept_prob", event.predicted_accept_prob)
        self._by_depth(event)
        self._by_context(event)
        self._by_entropy(event, drafts)
        self._against_off(event)

    def _by_depth(self, event: RoundEvent) -> None:
        survivors = [event.num_requests, *event.accepted_by_depth, 0]
        for depth, (here, deeper) in enumerate(itertools.pairwise(survivors)):
            self._histograms["accepted_length"].add(depth, here - deeper)
        probs = (*event.mean_accept_prob_by_depth, *[math.nan] * len(event.drafted_by_depth))
        for i, (drafted, accepted) in enumerate(zip(event.drafted_by_depth, event.accepted_by_depth, strict=True)):
            label = str(min(i + 1, MAX_DEPTH))
            self._add("drafted_at_depth", drafted, label)
            self._add("accepted_at_depth", accepted, label)
            if math.isfinite(probs[i]):
                self._add("accept_prob_sum_at_depth", probs[i] * drafted, label)

    def _by_context(self, event: RoundEvent) -> None:
        for name, counts in (
            ("request_rounds_by_context", event.rounds_by_context),
            ("draft_tokens_by_context", event.drafted_by_context),
            ("accepted_tokens_by_context", event.accepted_by_context),
        ):
            for bucket, count in enumerate(counts):
                if count:
                    self._add(name, count, str(context_edge(bucket)))

    def _by_entropy(self, event: RoundEvent, drafts: int) -> None:
        if not math.isfinite(event.mean_entropy):
            return
        self._add("entropy_nats_sum", event.mean_entropy * event.num_emitted_tokens)
        self._add("entropy_tokens", event.num_emitted_tokens)
        if drafts:
            edge = min(MAX_ENTROPY, math.ceil(2 * event.mean_entropy) / 2)
            self._add("drafts_by_entropy", drafts, f"{edge:.1f}")
            self._add("accepted_by_entropy", event.accepted_by_depth[0], f"{edge:.1f}")

    def _against_off(self, event: RoundEvent) -> None:
        self._plain.add(event)
        comparison = compare(event, self._plain)
        length = str(min(draft_length(event), MAX_DEPTH))
        self._add("rounds_by_draft_length", 1, length)
        self._add("bound_seconds", comparison.bound_s, length)
        self._add("compared_seconds", comparison.compared_s, length)
        self._add("off_seconds", comparison.off_s, length)

    def _weights(self, event: WeightSyncEvent) -> None:
        self._add("weight_syncs", 1, event.role)
        self._add("weight_sync_seconds", event.seconds, event.role)
        self._set("weights_version", event.version, event.role)
        now = (str(event.version), event.checksum)
        before = self._info.get(event.role)
        if before is not None and before != now:
            del self._values[("weights_info", event.role, *before)]
        self._info[event.role] = now
        self._set("weights_info", 1, event.role, *now)


def _write_targets(path: Path, address: str, labels: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps([{"targets": [address], "labels": labels}]) + "\n")
