"""What the records of bebop.py add up to: means by temperature, means by entropy, and the entropy law. Pure.

A record is ``{"temperature": T, "texts": [...]}``; a text has ``key`` (its prompt), ``arm`` (the scheme it was served with), num_tokens,
num_rounds, lists over its positions ``entropies``, ``bound``, ``greedy``, ``sampled``, and sums over them ``exact_match_length`` and
``rejection_length`` (no bonus token).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from paired import Floats, Interval, mean_interval

from rollout_spec.acceptance import fit_entropy_law
from rollout_spec.verify import Scheme

MEASURES = ("bound", "greedy", "sampled")
NAMES = {"bound": "max p", "greedy": "greedy drafts", "sampled": "sampled drafts"}
ENTROPY_EDGES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, math.inf)
# length -> (the estimate over positions, the arm that serves it)
_LENGTHS = {"greedy": ("exact_match_length", Scheme.EXACT_MATCH.value), "sampled": ("rejection_length", Scheme.REJECTION.value)}


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """by_temperature (in the records' order), by_entropy (positions of all temperatures together), and two fits of the entropy law."""
    by_temperature = [temperature_row(record["temperature"], record["texts"]) for record in records]
    texts = [text for record in records for text in record["texts"]]
    positions = {name: np.concatenate([np.asarray(text[name]) for text in texts]) for name in ("entropies", *MEASURES)}
    entropies = np.array([row["entropy"]["value"] for row in by_temperature])
    means = {name: np.array([row[name]["value"] for row in by_temperature]) for name in MEASURES}
    return {
        "by_temperature": by_temperature,
        "by_entropy": entropy_rows(positions),
        "law_of_temperatures": {name: law(entropies, means[name]) for name in MEASURES},
        "law_of_positions": {name: law(positions["entropies"], positions[name]) for name in MEASURES},
    }


def temperature_row(temperature: float, texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over all positions of a temperature's texts, intervals over prompts, and what the engine made of it."""
    counts = _by_prompt(texts, lambda text: len(text["entropies"]))
    row: dict[str, Any] = {"temperature": temperature, "num_positions": int(counts.sum())}
    for name, key in (("entropy", "entropies"), *((measure, measure) for measure in MEASURES)):
        row[name] = dataclasses.asdict(mean_interval(_by_prompt(texts, lambda text, key=key: math.fsum(text[key])), counts))
    beyond = sum(sampled > bound for text in texts for sampled, bound in zip(text["sampled"], text["bound"], strict=True))
    row["sampled_beyond_bound_rate"] = beyond / row["num_positions"]
    for name, (estimate, arm) in _LENGTHS.items():
        own = [text for text in texts if text["arm"] == arm]
        # Both count the token that ends a round, as users see it.
        expected = _by_prompt(texts, lambda text, key=estimate: text[key] + len(text["entropies"]))
        row[f"{name}_length"] = dataclasses.asdict(mean_interval(expected, counts))
        tokens, rounds = _by_prompt(own, lambda text: text["num_tokens"]), _by_prompt(own, lambda text: text["num_rounds"])
        row[f"{name}_served_length"] = dataclasses.asdict(mean_interval(tokens, rounds))
    return row


def entropy_rows(positions: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """Means of every measure in buckets of entropy; buckets without a position are left out."""
    rows = []
    for low, high in itertools.pairwise(ENTROPY_EDGES):
        inside = (positions["entropies"] >= low) & (positions["entropies"] < high)
        if inside.any():
            means = {name: float(positions[name][inside].mean()) for name in MEASURES}
            mean_entropy = float(positions["entropies"][inside].mean())
            edges = {"entropy_from": low, "entropy_to": high if math.isfinite(high) else None}
            rows.append({**edges, "entropy": mean_entropy, "num_positions": int(inside.sum()), **means})
    return rows


def law(entropies: Floats, values: Floats) -> dict[str, float]:
    """Least squares of values on entropies, both [R], and the share of the values' variance that the line explains."""
    fitted = fit_entropy_law(torch.from_numpy(entropies), torch.from_numpy(values))
    residual = values - fitted.intercept - fitted.slope * entropies
    variance = float(values.var())
    explained = 1 - float((residual**2).mean()) / variance if variance > 0 else math.nan
    return {"intercept": fitted.intercept, "slope": fitted.slope, "r_squared": explained}


def table(summary: Mapping[str, Any]) -> str:
    """Three markdown tables."""
    lines = [
        "| T | entropy | max p | greedy: p(argmax q) | sampled: Σ min(p, q) | sampled > max p at | tokens a round, greedy | sampled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in summary["by_temperature"]:
        beyond = f"{100 * row['sampled_beyond_bound_rate']:.0f} %"
        cells = [f"{row['temperature']:g}", f"{row['entropy']['value']:.2f}", *(_with_spread(row[name]) for name in MEASURES), beyond]
        lengths = [f"{row[f'{name}_length']['value']:.2f} ({row[f'{name}_served_length']['value']:.2f})" for name in _LENGTHS]
        lines.append(f"| {' | '.join([*cells, *lengths])} |")
    lines += ["", "| entropy of the position | positions | max p | greedy | sampled |", "|---|---|---|---|---|"]
    for row in summary["by_entropy"]:
        upper = "and more" if row["entropy_to"] is None else f"to {row['entropy_to']:g}"
        cells = [f"{row[name]:.3f}" for name in MEASURES]
        lines.append(f"| {row['entropy_from']:g} {upper} | {row['num_positions']} | {' | '.join(cells)} |")
    lines += ["", "| entropy law | over temperatures | R² | over positions | R² |", "|---|---|---|---|---|"]
    for name in MEASURES:
        both = [summary[f"law_of_{points}"][name] for points in ("temperatures", "positions")]
        cells = [cell for fit in both for cell in (f"{fit['intercept']:.3f} {fit['slope']:+.3f} H", f"{fit['r_squared']:.3f}")]
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _with_spread(values: Mapping[str, float]) -> str:
    interval = Interval(**values)
    return f"{interval.value:.3f} ± {(interval.high - interval.low) / 2:.3f}"


def _by_prompt(texts: Sequence[Mapping[str, Any]], value: Any) -> Floats:
    """[S] sums of value(text) over the texts of each prompt, prompts in order of their keys."""
    totals: dict[str, float] = {}
    for text in texts:
        totals[text["key"]] = totals.get(text["key"], 0.0) + value(text)
    return np.array([totals[key] for key in sorted(totals)], dtype=np.float64)
