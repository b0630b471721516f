"""Bootstrap intervals: right on ratios, narrow in pairs, honest in coverage."""

from __future__ import annotations

import numpy as np
import paired
import pytest


def test_mean_weighs_positions_not_sequences() -> None:
    found = paired.mean_interval(np.array([1.0, 10.0, 10.0]), np.array([1.0, 100.0, 100.0]))
    assert found.value == pytest.approx(21 / 201)
    assert found.low <= found.value <= found.high


def test_interval_covers_the_truth_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "NUM_RESAMPLES", 500)
    generator = np.random.default_rng(7)
    covered = 0
    for _ in range(300):
        counts = generator.integers(20, 120, size=60).astype(float)
        # Sequences differ by more than their own noise, as texts do.
        sums = counts * (0.4 + 0.1 * generator.standard_normal(60))
        found = paired.mean_interval(sums, counts)
        covered += found.low <= 0.4 <= found.high
    # 95 % of 300 is 285, the bootstrap of 60 sequences a little less; five standard deviations of a binomial are 19.
    assert 260 <= covered <= 299


def test_difference_is_paired_and_each_arm_has_its_own_counts() -> None:
    generator = np.random.default_rng(11)
    level = generator.uniform(0.1, 0.9, size=40)  # of a sequence, in both arms
    counts, others = generator.integers(20, 120, size=(2, 40)).astype(float)
    arm, other = paired.Sums(sums=level * counts, counts=counts), paired.Sums(sums=(level - 0.05) * others, counts=others)
    found = paired.difference_interval(arm, other)
    assert found.value == pytest.approx((level * counts).sum() / counts.sum() - ((level - 0.05) * others).sum() / others.sum())
    assert found.low < found.value < found.high
    alone = paired.mean_interval(arm.sums, arm.counts)
    assert found.high - found.low < alone.high - alone.low, "what both arms share of a sequence cancels"
    same = paired.difference_interval(arm, arm)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="two or more sequences"):
        paired.difference_interval(arm, paired.Sums(sums=others[:1], counts=others[:1]))


def test_gain_is_paired() -> None:
    generator = np.random.default_rng(3)
    counts = generator.integers(20, 120, size=40).astype(float)
    baseline = counts * generator.uniform(0.1, 1.0, size=40)
    found = paired.gain_interval(1.1 * baseline, baseline, counts)
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert found.excludes_zero
    # The same two arms judged on different sequences would not tell them apart.
    alone, other = paired.mean_interval(1.1 * baseline, counts), paired.mean_interval(baseline, counts)
    assert alone.low < other.high


def test_no_difference_does_not_exclude_zero() -> None:
    generator = np.random.default_rng(5)
    counts = np.full(80, 50.0)
    common = generator.uniform(10, 30, size=80)
    found = paired.gain_interval(common + generator.standard_normal(80), common + generator.standard_normal(80), counts)
    assert not found.excludes_zero
    assert found.low < 0 < found.high


@pytest.mark.parametrize(
    ("sums", "counts", "message"),
    [
        ([1.0], [1.0], "two or more sequences"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], "one sum and one count each"),
        ([1.0, 2.0], [1.0, 0.0], "positive count"),
    ],
)
def test_refusals(sums: list[float], counts: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired.mean_interval(np.array(sums), np.array(counts))
