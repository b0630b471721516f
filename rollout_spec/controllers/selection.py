"""Who drafts how deep: draft rows shared out over the batch by expected tokens a second. Pure.

With expected tokens ``G_bd = Π_{i<=d} α_bi`` of request b's depth d, the best round maximises

    (B + Σ_{chosen} G_bd) / (C_draft(K, rows) + C_verify(rows))

over sets of depths that are whole from depth 1 (CaDDTree and BASTION stop one tree this way; here it is the batch). For a given
deepest depth K and number of rows the best set takes the largest gains a row, so the search is one sort and one pass for every K. It is
exact for any cost if every depth takes one row, and for wider trees up to the rounding of a whole level.

Shape legend: B requests, D depths, M depths of all requests together, S candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_spec.controllers.probing import ProbeConfig, ProbeState
from rollout_spec.rounds_seen import Forecast

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


class CostCurve(Protocol):
    """``RoundCosts``, or the true costs of a simulated world."""

    @property
    def known(self) -> bool: ...

    def round_s(self, num_requests: int, context: int, depths: Array, rows: Array) -> Array: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """Draft lengths and what is expected of them."""

    lengths: Ints  # [B]
    num_accepted: float  # all requests together
    round_s: float
    plain_s: float  # of the same round without a draft

    @property
    def gain(self) -> float:
        """Expected tokens a second over those of the round without a draft, minus 1."""
        batch = len(self.lengths)
        return (batch + self.num_accepted) / batch * self.plain_s / self.round_s - 1.0


def select(forecast: Forecast, costs: CostCurve, limits: Ints, context: int) -> Selection:
    """The draft lengths [B], none above limits [B], with the most expected tokens a second; all 0 where drafting does not pay."""
    batch, depth = len(limits), int(limits.max(initial=0))
    plain_s = float(costs.round_s(batch, context, np.zeros(1), np.array([float(batch)]))[0])
    nothing = Selection(lengths=np.zeros(batch, dtype=np.int64), num_accepted=0.0, round_s=plain_s, plain_s=plain_s)
    if depth == 0:
        return nothing
    depths = np.arange(depth)
    nodes = np.maximum.accumulate(forecast.nodes[:depth])
    allowed = depths < limits[:, None]  # [B, D]
    gains = np.cumprod(forecast.steps[:, :depth], axis=1)
    # A stable sort keeps a request's depths in order when they gain alike.
    order = np.argsort(np.where(allowed, -gains / nodes, 1.0), axis=None, kind="stable")[: int(allowed.sum())]  # [M]
    depth_of = order % depth
    within = depth_of <= depths[:, None]  # [D, M]: row K - 1 allows depths up to K
    num_accepted = np.cumsum(np.where(within, gains.ravel()[order], 0.0), axis=1)
    rows = batch + np.cumsum(np.where(within, nodes[depth_of], 0.0), axis=1)
    deepest = np.repeat(depths + 1.0, order.size)
    seconds = costs.round_s(batch, context, deepest, rows.ravel())
    rates = (batch + num_accepted.ravel()) / seconds
    best = int(rates.argmax())
    if rates[best] <= batch / plain_s:
        return nothing
    row, end = divmod(best, order.size)
    chosen = order[: end + 1][within[row, : end + 1]] // depth
    return Selection(
        lengths=np.bincount(chosen, minlength=batch),
        num_accepted=float(num_accepted[row, end]),
        round_s=float(seconds[best]),
        plain_s=plain_s,
    )


def valued(forecast: Forecast, costs: CostCurve, lengths: Ints, context: int) -> Selection:
    """What is expected of draft lengths [B] that something else decided; seconds are NaN while costs are unknown."""
    batch = len(lengths)
    depth = int(lengths.max(initial=0))
    asked = np.arange(depth) < lengths[:, None]
    num_accepted = float((np.cumprod(forecast.steps[:, :depth], axis=1) * asked).sum())
    if not costs.known:
        return Selection(lengths=lengths, num_accepted=num_accepted, round_s=math.nan, plain_s=math.nan)
    rows = np.array([batch, batch + float((asked * forecast.nodes[:depth]).sum())])
    plain_s, round_s = costs.round_s(batch, context, np.array([0.0, depth]), rows).tolist()
    return Selection(lengths=lengths, num_accepted=num_accepted, round_s=round_s, plain_s=plain_s)


def accept_by_depth(forecast: Forecast, lengths: Ints) -> tuple[float, ...]:
    """[D] expected acceptance at each depth that somebody drafts: the mean over those requests."""
    depth = int(lengths.max(initial=0))
    asked = np.arange(depth) < lengths[:, None]
    means: list[float] = ((forecast.accept[:, :depth] * asked).sum(0) / asked.sum(0)).tolist()
    return tuple(means)


def probe_lengths(probing: ProbeState, limits: Ints, num_missing: int, config: ProbeConfig) -> Ints:
    """[B]: a few requests draft a little; all 0 if these have no room for it."""
    lengths = np.zeros_like(limits)
    chosen = probing.chosen(len(limits), num_missing, config)
    lengths[chosen] = np.minimum(limits[chosen], config.length)
    return lengths
