"""What benchmarks/budget.py makes of its rounds."""

from __future__ import annotations

import pytest
from budget import Cell, Sums, table


def test_seconds_are_those_of_a_steady_machine() -> None:
    """All are three times as slow in one turn, and the machine forgets one of them in another."""
    pace = [1.0, 1.0, 3.0, 1.0, 1.0, 1.0]
    turns = {
        name: [(turn, tokens, base * pace[turn]) for turn in range(6)]
        for name, tokens, base in (("a", 4, 0.1), ("b", 8, 0.1), ("c", 6, 0.2))
    }
    turns["c"][4] = (4, 6, 50.0)
    sums = Sums(turns)
    assert sums.speeds() == pytest.approx({"a": 40.0, "b": 80.0, "c": 36 / (5 * 0.2 + 0.6)})
    ratio = sums.ratio("a", "b")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))
    assert sums.ratio("c", "a").low < 36 / 1.6 / 40 < sums.ratio("c", "a").high


def test_rare_turns_count_for_themselves() -> None:
    often = [(turn, 4, 0.1) for turn in range(9)]
    assert Sums({"often": often, "rare": often[::3]}).speeds() == pytest.approx({"often": 40.0, "rare": 40.0})


def test_cells_are_named_by_what_tells_them_apart() -> None:
    assert Cell(drafter="runs/mtp/drafter", temperature=1.0, batch_size=4).key == "mtp/T=1/B=4"
    assert Cell(drafter="suffix", temperature=0.3, batch_size=16).key == "suffix/T=0.3/B=16"


def test_a_row_a_cell() -> None:
    row = {
        "drafter": "suffix",
        "temperature": 1.0,
        "batch_size": 1,
        "mean_entropy": 2.0,
        "tokens_per_s": {"fixed:0": 10.0, "fixed:2": 20.0, "auto": 19.0},
        "best_fixed": "fixed:2",
        "auto_to_best_fixed": {"value": 0.95, "low": 0.9, "high": 1.0},
        "auto_to_off": {"value": 1.9, "low": 1.8, "high": 2.0},
    }
    assert table([row]).splitlines()[2] == "| suffix/T=1/B=1 | 2.0 | 10 | 20 | 19 | fixed:2: 0.950 (0.90–1.00) | 1.900 (1.80–2.00) |"
