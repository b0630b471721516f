"""What the records of drafter_losses.py add up to: means of every arm, and gains of one arm over another sequence by sequence. Pure.

A record is ``{"arm": name, "sequences": [...]}``; a sequence has its ``key``, num_positions, and sums over its positions rejection_length
and block_length (no bonus token), overlap_by_depth and num_slots_by_depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from paired import Floats, Interval, gain_interval, mean_interval

# Gains that the table ends with: (arm, over arm).
COMPARISONS: Mapping[str, Sequence[tuple[str, str]]] = {
    "mtp": (
        ("e2e_tv", "ce"),
        ("e2e_tv", "kl"),
        ("e2e_tv", "tv"),
        ("rejection_length", "e2e_tv"),
        ("block_length", "e2e_tv"),
        ("block_length", "rejection_length"),
    ),
    "block": (("ce+position", "ce"), ("ce+focal", "ce"), ("ce+chain", "ce"), ("ce+all", "ce"), ("e2e_tv", "ce"), ("e2e_tv", "ce+all")),
}
LENGTHS = ("rejection_length", "block_length")


def depth_columns(sequences: Sequence[Mapping[str, Any]], depth: int) -> tuple[Floats, Floats]:
    """Sums and counts of the overlap at a depth (from 1), of the sequences that have a slot there."""
    sums = np.array([sequence["overlap_by_depth"][depth - 1] for sequence in sequences])
    counts = np.array([sequence["num_slots_by_depth"][depth - 1] for sequence in sequences], dtype=np.float64)
    return sums[counts > 0], counts[counts > 0]


def length_columns(sequences: Sequence[Mapping[str, Any]], name: str) -> tuple[Floats, Floats]:
    """Sums and counts of a length over positions."""
    sums = np.array([sequence[name] for sequence in sequences])
    return sums, np.array([sequence["num_positions"] for sequence in sequences], dtype=np.float64)


def summarise(records: Mapping[str, Mapping[str, Any]], comparisons: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Means of every arm and paired gains of the comparisons whose arms are both there.

    Raises ValueError if arms were judged on different sequences.
    """
    keys = {name: [sequence["key"] for sequence in record["sequences"]] for name, record in records.items()}
    if len({tuple(held) for held in keys.values()}) > 1:
        raise ValueError("the arms were judged on different sequences: nothing to compare in pairs")
    arms = {}
    for name, record in records.items():
        sequences = record["sequences"]
        depths = range(1, len(sequences[0]["overlap_by_depth"]) + 1)
        arms[name] = {
            "alpha_by_depth": [dataclasses.asdict(mean_interval(*depth_columns(sequences, depth))) for depth in depths],
            **{length: dataclasses.asdict(mean_interval(*length_columns(sequences, length))) for length in LENGTHS},
        }
    gains = [gain(records, arm, over) for arm, over in comparisons if arm in records and over in records]
    return {"arms": arms, "gains": gains}


def gain(records: Mapping[str, Mapping[str, Any]], arm: str, over: str) -> dict[str, Any]:
    """Relative gains of one arm over another: both accepted lengths, and the overlap at the first depth."""
    new, old = records[arm]["sequences"], records[over]["sequences"]
    found: dict[str, Any] = {"arm": arm, "over": over}
    for length in LENGTHS:
        sums, counts = length_columns(new, length)
        found[length] = dataclasses.asdict(gain_interval(sums, length_columns(old, length)[0], counts))
    sums, counts = depth_columns(new, 1)
    found["alpha_1"] = dataclasses.asdict(gain_interval(sums, depth_columns(old, 1)[0], counts))
    return found


def table(summary: Mapping[str, Any]) -> str:
    """Two markdown tables: arms, and gains in per cent."""
    num_depths = len(next(iter(summary["arms"].values()))["alpha_by_depth"])
    lines = [
        "| loss | " + " | ".join(f"α{depth}" for depth in range(1, num_depths + 1)) + " | length, rejection | length, block |",
        "|---|" + "---|" * (num_depths + 2),
    ]
    for name, arm in summary["arms"].items():
        alphas = " | ".join(f"{alpha['value']:.3f}" for alpha in arm["alpha_by_depth"])
        lengths = " | ".join(_spread(Interval(**arm[length])) for length in LENGTHS)
        lines.append(f"| {name} | {alphas} | {lengths} |")
    lines += ["", "| gain of | over | α1 | length, rejection | length, block |", "|---|---|---|---|---|"]
    for row in summary["gains"]:
        cells = " | ".join(_per_cent(Interval(**row[name])) for name in ("alpha_1", *LENGTHS))
        lines.append(f"| {row['arm']} | {row['over']} | {cells} |")
    return "\n".join(lines) + "\n"


def _spread(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _per_cent(interval: Interval) -> str:
    text = f"{100 * interval.value:+.1f} % ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})"
    return f"**{text}**" if interval.excludes_zero else text
