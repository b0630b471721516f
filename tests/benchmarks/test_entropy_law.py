"""What benchmarks/entropy_law.py makes of its rounds."""

from __future__ import annotations

import numpy as np
import pytest
from entropy_law import Seen, calibration, law_rows, windows

INTERCEPTS, SLOPE = np.array([0.8, 0.7]), -0.05


def rounds(num: int, *, cycle: int = 0, told_too_much: float = 0.0) -> list[Seen]:
    """Requests whose acceptance is drawn about the law; every fifth walk ends before depth 2."""
    rng = np.random.default_rng(cycle)
    out = []
    for index in range(num):
        temperature = 0.5 + index // 60
        entropies = np.repeat(2.0 * temperature + rng.normal(scale=0.3, size=(8, 1)), 2, axis=1)
        law = INTERCEPTS + SLOPE * entropies
        accept = law + rng.normal(scale=0.1, size=law.shape)
        ended = rng.random(8) < 0.2
        entropies[ended, 1] = accept[ended, 1] = np.nan
        expected = np.nan_to_num(law, nan=0.5) + told_too_much
        out.append(Seen(cycle=cycle, temperature=temperature, entropies=entropies, expected=expected, accept_probs=accept))
    return out


def test_the_law_is_found_and_holds_on_other_rounds() -> None:
    found = law_rows(rounds(360), rounds(360, cycle=1))
    for row, intercept in zip(found, INTERCEPTS, strict=True):
        assert row["intercept"] == pytest.approx(intercept, abs=0.02)
        assert row["slope"] == pytest.approx(SLOPE, abs=0.005)
        assert row["r_squared_windows"] > 0.9
        assert 0.3 < row["r_squared_positions"] < row["r_squared_windows"]


def test_a_window_is_of_one_wave() -> None:
    entropies, accept = windows(rounds(61))
    assert accept.shape == (6, 2)  # five of twelve rounds, and the one at the next temperature
    assert entropies[-1] - entropies[-2] == pytest.approx(2.0, abs=0.4)


def test_calibration_tells_what_was_expected_too_much() -> None:
    exact, biased = calibration(rounds(300)), calibration(rounds(300, told_too_much=0.1))
    assert exact["all"]["calibration_error"] < 0.01
    assert [row["calibration_error"] for row in biased["by_depth"]] == pytest.approx([0.1, 0.1], abs=0.02)
    assert exact["by_depth"][1]["num"] < 0.9 * exact["by_depth"][0]["num"]
    assert sum(row["num"] for row in exact["all"]["bins"]) == exact["all"]["num"]
