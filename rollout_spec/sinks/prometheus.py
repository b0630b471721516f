"""Prometheus: one endpoint a process, with a registry of its own. Needs the extra ``prometheus``.

Many processes (Ray's workers) do not share anything: each listens on a port of its own and says which in a file for ``file_sd_configs``.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
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
from rollout_spec.sinks.prometheus_families import BY_NAME, FAMILIES, MAX_DEPTH, MAX_ENTROPY, OWN_LABELS, Kind
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


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError:
        raise ValueError("the Prometheus sink needs the package prometheus-client: pip install 'rollout-spec[prometheus]'") from None
    return prometheus_client


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
        self._children: dict[tuple[str, ...], Any] = {}
        self._metrics = {family.name: _metric(client, family.name, self.registry) for family in FAMILIES if family.name != "sink_events"}
        self._plain = PlainRounds()
        self._info: dict[str, tuple[str, str]] = {}
        self._losses = _HealthCollector(client, self._own)
        self.registry.register(self._losses)
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
        self._losses.health = health

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
                self._of("predicted_gain").set(event.predicted_gain)
        elif isinstance(event, DrafterStaleEvent):
            self._add("drafter_stale", 1)
        elif isinstance(event, TrainEvent) and event.role == "policy":
            self._of("train_step").set(event.step)
            for name, stat in _IMPORTANCE.items():
                if name in event.metrics:
                    self._of("importance_ratio", stat).set(event.metrics[name])

    def close(self) -> None:
        if self._targets_file is not None:
            self._targets_file.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()

    def _of(self, name: str, *labels: str) -> Any:
        """The child with these labels; kept, for looking it up costs more than adding to it."""
        key = (name, *labels)
        child = self._children.get(key)
        if child is None:
            named = dict(zip(BY_NAME[name].labels, labels, strict=True))
            child = self._children[key] = self._metrics[name].labels(**self._own, **named)
        return child

    def _add(self, name: str, amount: float, *labels: str) -> None:
        self._of(name, *labels).inc(amount)

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
        self._of("round_seconds").observe(round_seconds(event))
        self._of("running_requests").set(event.num_requests)
        self._of("weights_version", "target").set(event.weights_version)
        if math.isfinite(event.predicted_accept_prob):
            self._of("predicted_accept_prob").set(event.predicted_accept_prob)
        self._by_depth(event)
        self._by_context(event)
        self._by_entropy(event, drafts)
        self._against_off(event)

    def _by_depth(self, event: RoundEvent) -> None:
        survivors = [event.num_requests, *event.accepted_by_depth, 0]
        for depth, (here, deeper) in enumerate(itertools.pairwise(survivors)):
            for _ in range(here - deeper):
                self._of("accepted_length").observe(depth)
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
        self._of("weights_version", event.role).set(event.version)
        now = (str(event.version), event.checksum)
        before = self._info.get(event.role)
        if before is not None and before != now:
            self._children.pop(("weights_info", event.role, *before), None)
            self._metrics["weights_info"].remove(*self._own.values(), event.role, *before)
        self._info[event.role] = now
        self._of("weights_info", event.role, *now).set(1)


def _metric(client: Any, name: str, registry: Any) -> Any:
    family = BY_NAME[name]
    kinds = {Kind.COUNTER: client.Counter, Kind.GAUGE: client.Gauge, Kind.HISTOGRAM: client.Histogram}
    further = {"buckets": family.buckets} if family.buckets else {}
    return kinds[family.kind](f"rollout_spec_{name}", family.what, (*OWN_LABELS, *family.labels), registry=registry, **further)


def _write_targets(path: Path, address: str, labels: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps([{"targets": [address], "labels": labels}]) + "\n")
    beside.replace(path)


class _HealthCollector:
    """sink_events, read from the sinks themselves at every scrape."""

    def __init__(self, client: Any, own: dict[str, str]) -> None:
        self._client, self._own = client, own
        self.health: Callable[[], Sequence[SinkHealth]] = list

    def collect(self) -> list[Any]:
        labels = (*OWN_LABELS, *BY_NAME["sink_events"].labels)
        family = self._client.core.CounterMetricFamily("rollout_spec_sink_events", BY_NAME["sink_events"].what, labels=labels)
        for sink in self.health():
            for outcome in ("delivered", "dropped", "failed"):
                family.add_metric((*self._own.values(), sink.name, outcome), getattr(sink, f"num_{outcome}"))
        return [family]
