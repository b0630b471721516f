"""What the command line prints: tables for people, JSON for machines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollout_spec.demo import DemoResult
from rollout_spec.doctor import Finding, Status

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def print_summary(console: Console, out: Path, summary: Mapping[str, Any]) -> None:
    """One run's totals and where its files are."""
    table = Table("figure", "value", title=f"rollouts in {out}")
    for key in (
        "num_requests",
        "num_failed_requests",
        "num_tokens",
        "wall_s",
        "tokens_per_s",
        "num_rounds",
        "ms_per_round",
        "mean_entropy",
    ):
        table.add_row(key, _number(summary[key]))
    for key in ("acceptance_rate", "acceptance_length_pooled", "acceptance_length_per_request"):
        table.add_row(key, _number(summary[key]))
    table.add_row("acceptance_by_depth", " ".join(_number(rate) for rate in summary["acceptance_by_depth"]) or "–")
    table.add_row("seconds", " ".join(f"{part} {_number(seconds)}" for part, seconds in summary["seconds"].items()))
    console.print(table)
    console.print(f"files: {out / 'rollouts.parquet'}, {out / 'events.jsonl'}, {out / 'summary.json'}", highlight=False, soft_wrap=True)


def print_bench(console: Console, path: Path, results: Mapping[str, Any]) -> None:
    """Medians with their spread; the ratio is to no speculation in the same repeat."""
    table = Table(
        "engine",
        "drafter",
        "batch",
        "tokens/s",
        "min–max",
        "× none",
        "min–max",
        "accepted length",
        "ms/round",
        title="lengths count the bonus token",
    )
    for row in results["results"]:
        speed, ratio = row["tokens_per_s"], row["ratio_to_none"]
        table.add_row(
            row["engine"],
            row["drafter"],
            str(row["batch_size"]),
            _number(speed["median"]),
            f"{_number(speed['min'])}–{_number(speed['max'])}",
            _number(ratio and ratio["median"]),
            f"{_number(ratio['min'])}–{_number(ratio['max'])}" if ratio else "–",
            _number(row["acceptance_length_pooled"]),
            _number(row["ms_per_round"]),
        )
    console.print(table)
    console.print(f"results: {path}", highlight=False, soft_wrap=True)


def print_demo(console: Console, result: DemoResult) -> None:
    """Epoch by epoch: the same tokens, and what it took to get them."""
    table = Table(
        "epoch",
        "drafter",
        "tokens",
        "rounds",
        "accepted length",
        "tokens/s",
        "× none",
        "same tokens as none",
        title=f"SmolLM2-135M-Instruct, T = 1, {result.dtype}",
    )
    for row in result.rows:
        plain = next(other for other in result.rows if other.epoch == row.epoch)
        summary, reference = row.summary, plain.summary
        ratio = float(str(summary["tokens_per_s"])) / float(str(reference["tokens_per_s"]))
        table.add_row(
            str(row.epoch),
            row.drafter,
            str(summary["num_tokens"]),
            str(summary["num_rounds"]),
            _number(summary["acceptance_length_pooled"]),
            _number(summary["tokens_per_s"]),
            _number(ratio),
            "by law" if row.identical is None else "yes" if row.identical else "[bold red]NO[/]",
        )
    console.print(table)
    console.print("epoch 1 runs the same prompts again: there the suffix drafter knows the samples of epoch 0", highlight=False)
    console.print(f"files: {result.out}/epoch*/rollouts.parquet, events.jsonl, summary.json", highlight=False, soft_wrap=True)


def print_findings(console: Console, findings: Sequence[Finding], *, as_json: bool) -> None:
    """doctor's list."""
    if as_json:
        console.print_json(json.dumps([{**dataclasses.asdict(finding), "status": finding.status.value} for finding in findings]))
        return
    table = Table("component", "status", "detail", "mend")
    for finding in findings:
        table.add_row(
            finding.component, f"[{_STYLES[finding.status]}]{finding.status.value}[/]", escape(finding.detail), escape(finding.mend)
        )
    console.print(table)


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.2f}" if abs(value) < 1000 else f"{value:.0f}"
