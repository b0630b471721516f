"""EntropySlope: how acceptance moves with the policy's entropy, and how far that is known. A part of the entropy monitor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_ERROR_WEIGHT = 0.25  # of the prior, for a squared nat of error: where all variance is error, the rest of it says nothing


class EntropySlope:
    """Regression of first-depth acceptance on the batch's mean entropy H over rounds, ``α = c + m H`` with ``m <= 0``, from sums that fade.

    A request's own entropy is too noisy a regressor: errors flatten a slope. They do so to the batch's, too; what they add to its
    variance is summed as well, and taken off; the more it is, the more the prior counts. Only what happens under the same weights
    counts: an update changes entropy and acceptance together, and a slope through both sides of it would explain a drafter that the
    policy left behind.
    """

    def __init__(self, *, prior: float, weight: float, memory: float) -> None:
        """prior: slope a nat before anything was seen, worth ``weight`` observations a squared nat; memory: observations."""
        self._prior, self._weight, self._memory = prior, weight, memory
        # Faded sums over first depths since weights changed: number, H, α, H², α H, squared error of H.
        self._sums = [0.0] * 6
        self._earlier = [0.0] * 3  # the moments of what came before

    def observe(self, count: float, accept: float, entropy: float, squared_error: float) -> None:
        """One round: number of observations, their summed acceptance, the batch's mean H in nats and its squared standard error."""
        fade = math.exp(-count / self._memory)
        new = (count, count * entropy, accept, count * entropy * entropy, accept * entropy, count * squared_error)
        self._sums = [held * fade + more for held, more in zip(self._sums, new, strict=True)]

    @property
    def value(self) -> float:
        """m, a nat."""
        told, true, covariance = self._moments()
        weight = self._weight + _ERROR_WEIGHT * (told - true)
        return min((weight * self._prior + covariance) / (weight + true), 0.0)

    def error(self, noise: float) -> float:
        """Standard error of ``value``, for observations of this variance around the law."""
        told, true, _ = self._moments()
        return math.sqrt(noise * (self._weight + told)) / (self._weight + _ERROR_WEIGHT * (told - true) + true)

    def weights_changed(self, kept: float) -> None:
        """Begin a new span; what was seen before it counts ``kept`` as much."""
        self._earlier, self._sums = [kept * moment for moment in self._moments()], [0.0] * 6

    def _moments(self) -> tuple[float, float, float]:
        """Within spans of the same weights, times the number of observations: variance of H, that without errors, covariance with α."""
        number, x, y, xx, xy, error = self._sums
        told, true, covariance = self._earlier
        if number > 0:
            variance = max(xx - x * x / number, 0.0)
            told += variance
            true += max(variance - error, 0.0)
            covariance += xy - x * y / number
        return told, true, covariance

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums, "earlier": self._earlier}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave. KeyError or ValueError if it is something else."""
        for name, own in (("sums", self._sums), ("earlier", self._earlier)):
            if len(state[name]) != len(own):
                raise ValueError(f"the slope's state has {len(state[name])} {name}, not {len(own)}")
        self._sums, self._earlier = ([float(value) for value in state[name]] for name in ("sums", "earlier"))
