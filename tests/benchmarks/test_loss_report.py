"""Records of arms to tables: positions weigh alike, short texts have no deep slots, gains are of the same sequences."""

from __future__ import annotations

from typing import Any

import pytest
from loss_report import summarise, table


def sequence(key: str, num_positions: int, length: float, alphas: list[float], slots: list[int]) -> dict[str, Any]:
    return {
        "key": key,
        "num_positions": num_positions,
        "rejection_length": length * num_positions,
        "block_length": 1.2 * length * num_positions,
        "overlap_by_depth": [alpha * num for alpha, num in zip(alphas, slots, strict=True)],
        "num_slots_by_depth": slots,
    }


def arm(scale: float) -> dict[str, Any]:
    return {
        "sequences": [
            sequence("a", 100, 0.5 * scale, [0.4 * scale, 0.3], [100, 99]),
            sequence("b", 50, 0.8 * scale, [0.6 * scale, 0.5], [50, 49]),
            sequence("c", 1, 0.2 * scale, [0.2 * scale, 0.0], [1, 0]),
        ]
    }


def test_means_and_gains() -> None:
    summary = summarise({"start": arm(0.5), "ce": arm(1.0), "tv": arm(1.08)}, [("tv", "ce"), ("kl", "ce")])
    ce = summary["arms"]["ce"]
    assert ce["rejection_length"]["value"] == pytest.approx((100 * 0.5 + 50 * 0.8 + 0.2) / 151)
    assert ce["alpha_by_depth"][0]["value"] == pytest.approx((100 * 0.4 + 50 * 0.6 + 0.2) / 151)
    # The text of one position has no second slot, and is not counted as one that was missed.
    assert ce["alpha_by_depth"][1]["value"] == pytest.approx((99 * 0.3 + 49 * 0.5) / 148)
    # The comparison without its arm is left out.
    (gain,) = summary["gains"]
    assert (gain["arm"], gain["over"]) == ("tv", "ce")
    for name in ("rejection_length", "block_length", "alpha_1"):
        assert (gain[name]["value"], gain[name]["low"], gain[name]["high"]) == pytest.approx((0.08, 0.08, 0.08))


def test_table_marks_what_is_told_apart() -> None:
    noisy = arm(1.0)
    noisy["sequences"][0]["rejection_length"] *= 1.2
    noisy["sequences"][1]["rejection_length"] *= 0.8
    lines = table(summarise({"ce": arm(1.0), "tv": arm(1.08), "kl": noisy}, [("tv", "ce"), ("kl", "ce")])).splitlines()
    assert lines[0] == "| loss | α1 | α2 | length, rejection | length, block |"
    assert lines[2].startswith("| ce | 0.465 | 0.366 | 0.597 (")
    gains = [line.split(" | ") for line in lines if line.startswith(("| tv | ce", "| kl | ce"))]
    assert gains[0][3] == "**+8.0 % (+8.0 to +8.0)**"
    assert gains[1][3].startswith("+2.2 % (-20.0 to +20.0)")
