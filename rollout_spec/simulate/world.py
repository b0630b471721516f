"""World: what a simulated rollout knows that a controller has to find out.

Shape legend: B running requests, D depths, S shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Progress = Callable[[float], float]  # of the share of all tokens that are emitted


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Seconds of a round: a two-piece roofline for the forward, straight lines for the rest.

    forward = max(base_s + row_s rows, memory_s) + request_s B + attend_s rows (context / B); drafting K deep adds
    draft_s + K step_s + draft_row_s (drafted rows).
    """

    base_s: float
    row_s: float
    memory_s: float = 0.0  # weights have to be read whatever the number of rows
    request_s: float = 0.0
    attend_s: float = 0.0
    draft_s: float
    step_s: float
    draft_row_s: float

    def parts(self, num_requests: int, context: int, depths: Array, rows: Array) -> tuple[Array, Array]:
        """([S] seconds in the drafter, [S] of everything else)."""
        forward = np.maximum(self.base_s + self.row_s * rows, self.memory_s) + self.request_s * num_requests
        forward = forward + self.attend_s * rows * context / max(num_requests, 1)
        draft = (depths > 0) * self.draft_s + depths * self.step_s + (depths > 0) * self.draft_row_s * np.maximum(rows - num_requests, 0.0)
        return draft, forward

    @property
    def known(self) -> bool:
        return True

    def round_s(self, num_requests: int, context: int, depths: Array, rows: Array) -> Array:
        """[S] seconds of rounds with these depths [S] and rows of the forward [S]: what ``RoundCosts.round_s`` estimates."""
        draft, rest = self.parts(num_requests, context, depths, rows)
        total: Array = draft + rest
        return total


# About SmolLM2-135M on two CPU cores (docs/speed.md), and about a 7B model on one data-centre GPU.
CPU = CostCurve(base_s=0.0125, row_s=0.0008, request_s=0.0012, attend_s=4e-7, draft_s=0.0006, step_s=0.0006, draft_row_s=0.0003)
GPU = CostCurve(
    base_s=0.004, row_s=0.00007, memory_s=0.013, request_s=0.00001, attend_s=1e-9, draft_s=0.0006, step_s=0.0009, draft_row_s=2e-6
)


@dataclass(frozen=True, kw_only=True)
class World:
    """Requests, a law of acceptance, a cost, and clocks that do not tell the truth.

    At depth d a request accepts with ``intercept + slope H + offset``, each depth ``depth_ratio`` times the one before; intercept, mean
    entropy and weights may change with the share of all tokens that are emitted, so that every controller meets the same work.
    """

    name: str
    about: str
    costs: CostCurve
    num_requests: int
    max_batch: int
    mean_tokens: float
    tail: float = 0.2  # standard deviation of the logarithm of requests' lengths
    prompt_tokens: int = 200
    intercept: Progress
    slope: float = -0.04
    depth_ratio: float = 0.92
    entropy: Progress
    entropy_spread: float = 0.3  # relative standard deviation between requests
    offsets: tuple[float, ...] = (0.0,)  # kinds of requests, equally many
    position_spread: float = 0.2  # standard deviation of α from position to position
    realised: bool = False  # a verifier that only tells 0 or 1
    found: float = 1.0  # how often the drafter has anything to propose at a depth
    clock_noise: float = 0.05  # standard deviation of the logarithm of a measured round
    clock_drift: float = 0.0  # amplitude of a slow swing of the same
    outliers: float = 0.0  # share of rounds that measure five times what they take
    drafter_updates: tuple[float, ...] = ()  # shares of tokens at which new drafter weights arrive
    policy_updates: tuple[float, ...] = ()

    def lengths(self, noise: np.random.Generator) -> Ints:
        """[num_requests] tokens that each request emits."""
        drawn = noise.lognormal(np.log(self.mean_tokens) - 0.5 * self.tail**2, self.tail, self.num_requests)
        return np.maximum(drawn.astype(np.int64), 4)
