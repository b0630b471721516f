"""What benchmarks/budget.py makes of its rounds."""

from __future__ import annotations

import pytest
from budget import Cell, Rounds, Variant, table


def test_tokens_over_seconds_without_rounds_that_the_machine_was_away() -> None:
    rounds = [(4, 0.1), (8, 0.2), (6, 0.1), (8, 5.0), (6, 0.2)]
    variant = Variant(name="auto", engine=None, rounds=Rounds(), counted=rounds)  # type: ignore[arg-type]
    assert variant.tokens_per_s == pytest.approx((4 + 8 + 6 + 6) / 0.6)


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
        "auto_to_best_fixed": 0.95,
        "auto_to_off": 1.9,
    }
    assert table([row]).splitlines()[2] == "| suffix/T=1/B=1 | 2.0 | 10 | 20 | 19 | 0.95 (fixed:2) | 1.90 |"
