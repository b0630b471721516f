"""Writes docs/metrics.md from the code that computes the metrics: python docs/build_metrics.py"""

from __future__ import annotations

from pathlib import Path

from rollout_spec.metrics import METRICS, promql
from rollout_spec.sinks.prometheus_families import FAMILIES, OWN_LABELS

OUT = Path(__file__).with_name("metrics.md")
HEAD = """# Metrics

Made from `rollout_spec/metrics.py` and `rollout_spec/sinks/prometheus_families.py` by `python docs/build_metrics.py`; do not edit.

A *request round* is one round of one request: a round of a batch of eight is eight of them. *Pooled* figures are ratios of sums, in
which every round weighs the same; *per request* ones are means of ratios, in which every request does. They differ: requests that
accepted 30 tokens in 10 rounds and 0 in 1000 have a pooled length of 1.03 and one of 2.50 per request. A ratio whose denominator is
zero is left out, never called 0. A `*` after a name stands for one number a depth, a `†` for one a context length.

| name | unit | formula | pooled as | bonus token | in verl's logger |
| --- | --- | --- | --- | --- | --- |
"""
IDENTITIES = """
`accept_length` = 1 + `accept_rate` · `draft_tokens_per_request_round`, and for chains `accept_length_when_drafted` = 1 + Σ
`survival_by_depth`, a survival being the product of `accept_rate_by_depth` so far. `num_tokens` = `num_accepted_tokens` +
`num_request_rounds` less what stops cut off. The four shares of time add up to 1. Tests hold them (`tests/telemetry/test_metrics.py`).

## vLLM's names

| ours | vLLM | difference |
| --- | --- | --- |
"""
QUERIES = """
## Queries

Over our own Prometheus metrics, by replica, for a window of five minutes. `accept_length_per_request` has none: counters cannot tell it.

| name | PromQL |
| --- | --- |
"""
EXPORTED = """
## What Prometheus gets

Every one also carries {labels}. Depths and draft lengths above 64 count as 64; context lengths double; entropies go in half nats up
to 12; of weights only those in use have a series. So a replica never has more than about a thousand.

| name | kind | labels | what |
| --- | --- | --- | --- |
"""


def text() -> str:
    marks = {"": "", "depth": "*", "context": "†"}
    rows = [
        f"| `{metric.name}`{marks[metric.by]} | {metric.unit} | {metric.formula} | {metric.pooling.value} | {metric.bonus.value} "
        f"| {f'`{metric.verl}`' if metric.verl else ''} |"
        for metric in METRICS
    ]
    vllm = [f"| `{metric.name}`{marks[metric.by]} | `{metric.vllm}` | {metric.vllm_differs} |" for metric in METRICS if metric.vllm]
    queries = [
        f"| `{metric.name}`{marks[metric.by]} | `{promql(metric, by='replica', window='5m')}` |" for metric in METRICS if metric.promql
    ]
    exported = [
        f"| `{family.exported_name}` | {family.kind.value} | {', '.join(f'`{label}`' for label in family.labels)} | {family.what} |"
        for family in FAMILIES
    ]
    labels = ", ".join(f"`{label}`" for label in OWN_LABELS)
    parts = [HEAD, _lines(rows), IDENTITIES, _lines(vllm), QUERIES, _lines(queries), EXPORTED.format(labels=labels), _lines(exported)]
    return "".join(parts)


def _lines(rows: list[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    OUT.write_text(text(), encoding="utf-8")
