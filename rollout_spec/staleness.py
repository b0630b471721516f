"""StaleJudge: whether a drafter accepts clearly less than when its weights were new, at the entropy of now."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_KEPT = 0.02  # of what the drafter was judged by, after the policy's weights changed
_SURE = 3.5  # standard errors: every round is a look
_LEAST = 0.06  # acceptance that must be missing: of next to nothing, half is nothing either
_FIRST_LOOK = 96.0  # observations of new drafter weights before anything is said about them
_FEW = 8.0  # observations that say nothing yet


@dataclass(frozen=True, kw_only=True)
class StaleConfig:
    """Observations are acceptance probabilities (or 0 and 1) of first drafted tokens that no budget has selected."""

    below: float = 0.75  # stale is an acceptance below this part of what it was when the drafter's weights were new
    fresh_above: float = 0.85  # above which it is no longer
    slope_doubt: float = 0.04  # acceptance a nat that the slope may be wrong by
    reference_size: float = 600.0  # observations of new drafter weights that make what they are held to later
    memory: float = 200.0  # observations that are remembered

    def __post_init__(self) -> None:
        if not 0 < self.below <= self.fresh_above <= 1:
            raise ValueError(f"0 < below <= fresh_above <= 1 does not hold for {self.below} and {self.fresh_above}")
        for name in ("reference_size", "memory"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class StaleJudge:
    """Two means of acceptance, each with the mean entropy that it was seen at: now, and when the drafter's weights were new."""

    def __init__(self, config: StaleConfig | None = None) -> None:
        self.config = StaleConfig() if config is None else config
        self.stale = False
        self._now = self._reference = (0.0, 0.0, 0.0)  # number of observations, sum of acceptance, sum of entropies
        self._is_new = True  # the drafter's weights: no update of the policy's came after enough was seen of them

    def observe(self, number: float, accept: float, entropy: float, *, slope: float, noise: float) -> None:
        """Sums over a round's observations; slope of acceptance over entropy, and the variance of one observation (with its request's)."""
        fade = math.exp(-number / self.config.memory)
        held = self._now
        self._now = (held[0] * fade + number, held[1] * fade + accept, held[2] * fade + entropy)
        if self._is_new and self._reference[0] < self.config.reference_size:
            self._reference = (self._reference[0] + number, self._reference[1] + accept, self._reference[2] + entropy)
        self._judge(slope, noise)

    def reference_at(self, entropy: float, slope: float) -> float:
        """Acceptance that new weights had, carried to this entropy; NaN until enough was seen of them."""
        number, accept, pivot = self._reference
        if number < _FIRST_LOOK:
            return math.nan
        return min(max(accept / number + slope * (entropy - pivot / number), 0.02), 0.995)

    def target_updated(self) -> None:
        """The policy's weights changed: the reference is complete, or still to be begun."""
        self._is_new = self._is_new and self._reference[0] < _FIRST_LOOK
        self._now = (self._now[0] * _KEPT, self._now[1] * _KEPT, self._now[2] * _KEPT)

    def drafter_updated(self) -> None:
        """Other drafter weights: everything begins anew."""
        self._now = self._reference = (0.0, 0.0, 0.0)
        self._is_new, self.stale = True, False

    def _judge(self, slope: float, noise: float) -> None:
        number, accept, entropy = self._now
        if self._reference[0] < _FIRST_LOOK or number < _FEW:
            return
        reference = self.reference_at(entropy / number, slope)
        # The farther the entropy has moved since, the less the slope is to be relied on.
        doubt = self.config.slope_doubt * abs(entropy / number - self._reference[2] / self._reference[0])
        now = accept / number + doubt
        error = math.sqrt(noise / number + noise / self._reference[0])
        if self.stale:
            self.stale = now < self.config.fresh_above * reference
        else:
            self.stale = now < self.config.below * reference and reference - now > max(_SURE * error, _LEAST)

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {"stale": self.stale, "now": self._now, "reference": self._reference, "is_new": self._is_new}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave. KeyError, TypeError or ValueError if it is something else."""
        self._now, self._reference = _triple(state["now"]), _triple(state["reference"])
        self.stale, self._is_new = bool(state["stale"]), bool(state["is_new"])


def _triple(values: Sequence[float]) -> tuple[float, float, float]:
    first, second, third = values
    return float(first), float(second), float(third)
