"""Ratios of sums over sequences with bootstrap intervals, and paired gains of one arm over another. Pure.

Tokens of one text are not independent, so whole sequences are drawn again. Arms that were judged on the same sequences are compared on
the same draws: what makes a sequence easy or hard for every arm then cancels.

Shape legend: S sequences, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_RESAMPLES = 4000
_BATCH = 250  # resamples whose draws are alive at once
_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Sums:
    """One arm's sums and counts by sequence, both [S]."""

    sums: Floats
    counts: Floats


def mean_interval(sums: Floats, counts: Floats) -> Interval:
    """``sum sums / sum counts`` over sequences, sums and counts [S]: every position counts the same, whatever its sequence's length."""
    _check(sums, counts)
    return _interval(_ratio(sums, counts), _resampled(sums[:, None], counts)[:, 0])


def gain_interval(sums: Floats, baseline_sums: Floats, counts: Floats) -> Interval:
    """``mean / baseline mean - 1``, all [S], means as in ``mean_interval`` over the same positions of the same sequences."""
    _check(sums, counts)
    _check(baseline_sums, counts)
    both = _resampled(np.stack([sums, baseline_sums], axis=1), counts)
    return _interval(_ratio(sums, counts) / _ratio(baseline_sums, counts) - 1, both[:, 0] / both[:, 1] - 1)


def difference_interval(arm: Sums, other: Sums) -> Interval:
    """``mean - other mean``, means as in ``mean_interval``, of two arms that each counted what it saw of the same sequences."""
    _check(arm.sums, arm.counts)
    _check(other.sums, other.counts)
    # The generator is seeded, so both arms get the same draws.
    one, two = (_resampled(part.sums[:, None], part.counts)[:, 0] for part in (arm, other))
    return _interval(_ratio(arm.sums, arm.counts) - _ratio(other.sums, other.counts), one - two)


def _resampled(sums: Floats, counts: Floats) -> Floats:
    """[R, columns] ratios of the columns of sums [S, columns], each resample one draw of sequences for all columns; seeded."""
    generator = np.random.default_rng(0)
    num, batches = len(counts), []
    for begin in range(0, NUM_RESAMPLES, _BATCH):
        rows = generator.integers(num, size=(min(_BATCH, NUM_RESAMPLES - begin), num))
        batches.append(sums[rows].sum(axis=1) / counts[rows].sum(axis=1)[:, None])
    return np.concatenate(batches)


def _ratio(sums: Floats, counts: Floats) -> float:
    return float(sums.sum() / counts.sum())


def _interval(value: float, resampled: Floats) -> Interval:
    low, high = np.quantile(resampled, _QUANTILES)
    return Interval(value=value, low=float(low), high=float(high))


def _check(sums: Floats, counts: Floats) -> None:
    if sums.shape != counts.shape or sums.ndim != 1 or len(sums) < 2:
        raise ValueError(f"two or more sequences with one sum and one count each are needed, got shapes {sums.shape} and {counts.shape}")
    if not (counts > 0).all():
        raise ValueError("every sequence needs a positive count: leave out those without a position")
