"""What benchmarks/budget.py makes of its rounds."""

from __future__ import annotations

import pytest
from budget import Cell, Sums, Turn, table


def turns(tokens: int, seconds: list[float], shape: int, *, budget_s: float = 0.0) -> list[Turn]:
    """One in every turn."""
    return [
        Turn(number=number, num_tokens=tokens, seconds=took, budget_s=budget_s, shape=(1, shape, shape))
        for number, took in enumerate(seconds)
    ]


def test_seconds_are_those_of_a_steady_machine() -> None:
    """All are three times as slow in one turn, and the machine forgets one of them in another."""
    pace = [1.0, 1.0, 3.0, 1.0, 1.0, 1.0]
    slow = [0.2 * factor for factor in pace]
    slow[4] = 50.0
    sums = Sums({"a": turns(4, [0.1 * f for f in pace], 0), "b": turns(8, [0.1 * f for f in pace], 1), "c": turns(6, slow, 2)})
    assert sums.speeds() == pytest.approx({"a": 40.0, "b": 80.0, "c": 36 / (5 * 0.2 + 0.6)})
    ratio = sums.ratio("a", "b")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))


def test_equal_rounds_last_equally_long_and_each_pays_for_its_own_deciding() -> None:
    """The clock was kinder to one of two that did the same."""
    sums = Sums({"fixed:0": turns(4, [0.11] * 8, 0), "auto": turns(4, [0.09] * 8, 0, budget_s=0.01), "fixed:1": turns(6, [0.2] * 8, 1)})
    assert sums.speeds() == pytest.approx({"fixed:0": 40.0, "auto": 4 / 0.11, "fixed:1": 30.0})


def test_rare_turns_count_for_themselves() -> None:
    often = turns(4, [0.1] * 9, 0)
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
