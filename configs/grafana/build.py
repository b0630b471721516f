"""Writes rollout_spec.json beside this file from the metrics' own queries: python configs/grafana/build.py"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_spec import metrics

OUT = Path(__file__).with_name("rollout_spec.json")
BY = "engine, replica, drafter"
WINDOW = "$__rate_interval"
SELECT = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8


def metric(name: str) -> str:
    query = metrics.promql(metrics.BY_NAME[name], by=BY, window=WINDOW)
    assert query, name
    return query


def rate(name: str, *further: str) -> str:
    return f"sum by ({', '.join((BY, *further))}) (rate(rollout_spec_{name}_total[{WINDOW}]))"


def panel(title: str, about: str, *queries: tuple[str, str], unit: str = "none", **options: Any) -> dict[str, Any]:
    """A time series; a query is (PromQL, legend)."""
    custom = {"lineWidth": 2, "fillOpacity": options.pop("fill", 0), "stacking": {"mode": options.pop("stacking", "none")}}
    return {
        "type": options.pop("type", "timeseries"),
        "title": title,
        "description": about,
        "datasource": SELECT,
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom, **options}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend, "datasource": SELECT}
            for place, (expression, legend) in enumerate(queries)
        ],
    }


RUN = "{{drafter}} {{replica}}"
PANELS: Sequence[dict[str, Any]] = (
    panel(
        "Speed-up against no drafting",
        "Measured against rounds without a draft in the same process. Above 1 it pays. 'at most' is a bound that needs no such rounds.",
        (metric("speedup"), RUN),
        (metric("speedup_bound"), f"{RUN} at most"),
    ),
    panel(
        "Tokens a second",
        "Emitted tokens over seconds in rounds, prefills left out.",
        (metric("tokens_per_engine_s"), RUN),
    ),
    panel(
        "Acceptance length",
        "Tokens a draft, the recovered or bonus token counted; 1.00 = nothing is accepted.",
        (metric("accept_length_when_drafted"), f"{RUN} a draft"),
        (metric("accept_length"), f"{RUN} a round"),
    ),
    panel("Acceptance rate", "Accepted over drafted tokens.", (metric("accept_rate"), RUN), unit="percentunit", min=0, max=1),
    panel(
        "α by depth",
        "Accepted at a depth over request rounds that reached a drafted token there.",
        (metric("accept_rate_by_depth"), f"{RUN} depth {{{{depth}}}}"),
        unit="percentunit",
        min=0,
        max=1,
    ),
    panel("Entropy", "Mean entropy of the sampled law, nats.", (metric("entropy"), RUN)),
    panel(
        "α against entropy",
        "Acceptance of first drafted tokens in rounds of a mean entropy up to so many nats.",
        (f"{rate('accepted_by_entropy', 'entropy')} / {rate('drafts_by_entropy', 'entropy')}", f"{RUN} ≤ {{{{entropy}}}} nats"),
        unit="percentunit",
        min=0,
        max=1,
    ),
    panel(
        "α: expected and measured",
        "Acceptance of first drafted tokens as the budget's controller expects it, and as it came out.",
        ("rollout_spec_predicted_accept_prob", f"{RUN} expected"),
        (
            f'sum by ({BY}) (rate(rollout_spec_accepted_at_depth_total{{depth="1"}}[{WINDOW}])) / {rate("drafts")}',
            f"{RUN} measured",
        ),
        unit="percentunit",
    ),
    panel(
        "Budget chosen",
        "Share of rounds by their deepest draft.",
        (f"{rate('rounds_by_draft_length', 'draft_length')} / on ({BY}) group_left () {rate('rounds')}", f"{RUN} K = {{{{draft_length}}}}"),
        unit="percentunit",
        stacking="normal",
        fill=40,
    ),
    panel(
        "Budget: measured speed-up by draft length",
        "The best budget is the highest line; compare with what was chosen.",
        (f"{rate('off_seconds', 'draft_length')} / {rate('compared_seconds', 'draft_length')}", f"{RUN} K = {{{{draft_length}}}}"),
    ),
    panel("Tokens a round", "Emitted tokens a request and round.", (metric("tokens_per_request_round"), RUN)),
    panel(
        "Time a round",
        "Mean and 95th percentile, prefills left out.",
        (metric("ms_per_round"), f"{RUN} mean"),
        (f"1000 * histogram_quantile(0.95, sum by (le, {BY}) (rate(rollout_spec_round_seconds_bucket[{WINDOW}])))", f"{RUN} p95"),
        unit="ms",
    ),
    panel(
        "Where the time goes",
        "Seconds a second in drafting, the target, verification, everything else, and prefills.",
        (rate("seconds", "part"), f"{RUN} {{{{part}}}}"),
        unit="s",
        stacking="normal",
        fill=40,
    ),
    panel(
        "Acceptance by context length",
        "Tokens a request round of contexts up to so many tokens.",
        (metric("accept_length_by_context"), f"{RUN} ≤ {{{{context}}}}"),
    ),
    panel(
        "Weights in use",
        "Version of the policy (target) and of the drafter.",
        ("max by (engine, replica, drafter, role) (rollout_spec_weights_version)", f"{RUN} {{{{role}}}}"),
    ),
    panel(
        "Checksums",
        "One line for the weights in use of each role: replicas that serve one policy must show one checksum.",
        ("count by (role, weights_version, checksum) (rollout_spec_weights_info)", "{{role}} {{weights_version}} {{checksum}}"),
    ),
    panel(
        "Staleness",
        "Policy versions between a request's first token and its end, mean; and how far the drafter is behind the policy.",
        (metric("policy_lag"), f"{RUN} samples"),
        (
            " - ".join(f'max by ({BY}) (rollout_spec_weights_version{{role="{role}"}})' for role in ("target", "drafter")),
            f"{RUN} drafter",
        ),
    ),
    panel(
        "Importance ratio",
        "The trainer's probability of sampled tokens over the rollout's.",
        ("rollout_spec_importance_ratio", f"{RUN} {{{{stat}}}}"),
    ),
    panel(
        "Requests", "Ended requests a second, by how.", (rate("requests", "finish_reason"), f"{RUN} {{{{finish_reason}}}}"), unit="reqps"
    ),
    panel("Running", "Requests in the last round.", ("rollout_spec_running_requests", RUN)),
    panel(
        "Losses",
        "Events that a sink dropped or failed on, and rounds with a number that is none.",
        (
            f'sum by ({BY}, sink, outcome) (increase(rollout_spec_sink_events_total{{outcome!="delivered"}}[{WINDOW}]))',
            f"{RUN} {{{{sink}}}} {{{{outcome}}}}",
        ),
        (f"sum by ({BY}) (increase(rollout_spec_not_finite_rounds_total[{WINDOW}]))", f"{RUN} not finite"),
    ),
)


def dashboard() -> dict[str, Any]:
    placed = [
        {**each, "id": place + 1, "gridPos": {"w": WIDTH, "h": HEIGHT, "x": place % 3 * WIDTH, "y": place // 3 * HEIGHT}}
        for place, each in enumerate(PANELS)
    ]
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": "rollout-spec",
        "title": "rollout_spec",
        "tags": ["rollout_spec"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "annotations": {"list": []},
        "panels": placed,
    }


if __name__ == "__main__":
    OUT.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
