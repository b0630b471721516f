"""StaleJudge: whether a drafter accepts clearly less than when its weights were new, at the entropy of now."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_KEPT = 0.02  # of what the drafter was judged by, after the policy's weights changed
_SURE = 3.0  # standard errors
_LEAST = 0.06  # acceptance that must be missing: of next to nothing, half is nothing either
_FIRST_LOOK = 96.0  # observations of new drafter weights before anything is said about them
_FEW = 8.0  # observations that say nothing yet
_NOTHING = (0.0, 0.0, 0.0, 0.0)


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
        self._now = self._reference = _NOTHING  # number of observations, sums of acceptance and of entropies, number of requests
        self._is_new = True  # the drafter's weights: no update of the policy's came after enough was seen of them

    def observe(
        self, number: float, accept: float, entropy: float, requests: float, *, slope: float, within: float, between: float
    ) -> None:
        """Sums over a round's observations, and of how many requests they are the first; slope of acceptance over entropy.

        within: variance of a request's observations; between: of requests' means.
        """
        fade = math.exp(-number / self.config.memory)
        held = self._now
        # Old observations fade; a request that is observed for long is one request still.
        self._now = (held[0] * fade + number, held[1] * fade + accept, held[2] * fade + entropy, held[3] + requests)
        if self._is_new and self._reference[0] < self.config.reference_size:
            known = self._reference
            self._reference = (known[0] + number, known[1] + accept, known[2] + entropy, known[3] + requests)
        self._judge(slope, within, between)

    @property
    def recent(self) -> float:
        """Mean acceptance of late; NaN before the first observation."""
        number, accept, _, _ = self._now
        return accept / number if number else math.nan

    def reference_at(self, entropy: float, slope: float) -> float:
        """Acceptance that new weights had, carried to this entropy; NaN until enough was seen of them."""
        number, accept, pivot, _ = self._reference
        if number < _FIRST_LOOK:
            return math.nan
        return min(max(accept / number + slope * (entropy - pivot / number), 0.02), 0.995)

    def target_updated(self) -> None:
        """The policy's weights changed: the reference is complete, or still to be begun."""
        self._is_new = self._is_new and self._reference[0] < _FIRST_LOOK
        number, accept, entropy, requests = self._now
        self._now = (number * _KEPT, accept * _KEPT, entropy * _KEPT, requests * _KEPT)

    def drafter_updated(self) -> None:
        """Other drafter weights: everything begins anew."""
        self._now = self._reference = _NOTHING
        self._is_new, self.stale = True, False

    def _judge(self, slope: float, within: float, between: float) -> None:
        number, accept, entropy, requests = self._now
        if self._reference[0] < _FIRST_LOOK or number < _FEW:
            return
        reference = self.reference_at(entropy / number, slope)
        # The farther the entropy has moved since, the less the slope is to be relied on.
        doubt = self.config.slope_doubt * abs(entropy / number - self._reference[2] / self._reference[0])
        now = accept / number + doubt
        then, _, _, requests_then = self._reference
        error = math.sqrt(within / number + within / then + between / max(requests, 1.0) + between / max(requests_then, 1.0))
        if self.stale:
            self.stale = now < self.config.fresh_above * reference
        else:
            self.stale = now < self.config.below * reference and reference - now > max(_SURE * error, _LEAST)

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {"stale": self.stale, "now": self._now, "reference": self._reference, "is_new": self._is_new}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave. KeyError, TypeError or ValueError if it is something else."""
        self._now, self._reference = _four(state["now"]), _four(state["reference"])
        self.stale, self._is_new = bool(state["stale"]), bool(state["is_new"])


def _four(values: Sequence[float]) -> tuple[float, float, float, float]:
    first, second, third, fourth = values
    return float(first), float(second), float(third), float(fourth)
