"""What a round showed of acceptance and entropy, and what is expected of the next one.

Shape legend: R rounds, B requests in a round, D depths (entry 0 is depth 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundOutcome:
    """What a round showed. No token is in here, drafted or emitted."""

    request_ids: tuple[str, ...]
    asked: Ints  # [B] draft depths asked for
    accept_probs: Array  # [B, D] as Verdict.accept_probs, NaN where nothing was drafted or not reached
    num_accepted: Ints  # [B]
    nodes_by_depth: Array  # [D] draft nodes of all requests together
    entropies: Array  # [B, D + 1] at the emitted positions, NaN after them


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundsSeen:
    """Rounds of the same requests together."""

    request_ids: tuple[str, ...]
    asked: Ints  # [R, B]
    accept_probs: Array  # [R, B, D] of the deepest round
    num_accepted: Ints  # [R, B]
    nodes_by_depth: Array  # [D] of all rounds
    entropies: Array  # [R, B, D + 1]

    @staticmethod
    def of(outcomes: Sequence[RoundOutcome]) -> RoundsSeen:
        """One or more rounds of the same requests in the same order."""
        first = outcomes[0]
        assert all(outcome.request_ids == first.request_ids for outcome in outcomes), "rounds of other requests"
        depth = max(outcome.accept_probs.shape[1] for outcome in outcomes)
        nodes = np.zeros(depth)
        for outcome in outcomes:
            nodes[: len(outcome.nodes_by_depth)] += outcome.nodes_by_depth
        return RoundsSeen(
            request_ids=first.request_ids,
            asked=np.stack([outcome.asked for outcome in outcomes]),
            accept_probs=_stacked([outcome.accept_probs for outcome in outcomes], depth),
            num_accepted=np.stack([outcome.num_accepted for outcome in outcomes]),
            nodes_by_depth=nodes,
            entropies=_stacked([outcome.entropies for outcome in outcomes], depth + 1),
        )


def _stacked(parts: Sequence[Array], width: int) -> Array:
    """[R, B, width] of parts [B, up to width], NaN behind them."""
    stacked = np.full((len(parts), parts[0].shape[0], width), np.nan)
    for index, part in enumerate(parts):
        stacked[index, :, : part.shape[1]] = part
    return stacked


@dataclass(frozen=True, kw_only=True, eq=False)
class Forecast:
    """What is expected of the next round's drafts."""

    accept: Array  # [B, D] that a node of this depth is accepted, given that the walk gets there and one was drafted
    steps: Array  # [B, D] the same times the probability that the drafter finds something to draft
    nodes: Array  # [D] nodes that a request gets at this depth when it is asked for
    spread: Array  # [B, D] standard error of the law's part of ``accept``
    entropies: Array  # [B] recent mean entropy of each request, nats
    epoch: int  # EntropyMonitor.epoch
    num_observed: float  # first-depth observations that the law rests on
    num_asked: float = math.inf  # requests that were drafted for since weights changed; infinity while they are the first ones

    @property
    def accepted(self) -> Array:
        """[B, D] expected tokens that depth d adds: the product of ``steps`` down to it."""
        return np.multiply.accumulate(self.steps, axis=1)

    def at_best(self, num_errors: float) -> Forecast:
        """The same with acceptance so many standard errors higher."""
        accept = np.clip(self.accept + num_errors * self.spread, 0.0, 0.995)
        return replace(self, accept=accept, steps=self.steps * accept / self.accept)
