"""What a round costs, learnt from the rounds themselves: drafting, and everything else, by the shape of the round.

The same round takes 40 % more time on a shared machine a minute later, and a budget only asks which of two shapes is cheaper. So every
measurement is divided by the machine's present speed before it is remembered, and the speed is judged by shapes that were measured before.

Shape legend: S shapes asked for at once, C remembered cells, F features.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DEEPER = 2  # from this depth on, depths are of one kind

# Rows at which the marginal cost of a row may rise. Non-negative steps of the slope make the cost monotone and convex in rows.
_KNOTS = np.array([4.0, 12.0, 32.0, 64.0, 128.0, 256.0, 512.0])
_REST_FEATURES = 4 + len(_KNOTS)
_DRAFT_FEATURES = 4
_MEMORY = 15  # latest measurements of a cell; their median is its cost
_SETTLED = 3  # measurements after which a cell may judge the machine's speed
_MAX_CELLS = 384
_SPEED_GAIN = 0.2  # of one round's deviation: about ten rounds of memory
_RIDGE = 1e-7  # of normalised features
_OUTLIER = math.log(1.6)  # a deviation beyond says nothing about the speed
_REFIT_EVERY = 24  # rounds
_REFIT_SOON = 4  # rounds, after something new
_FEW_ROUNDS = 3  # of a kind that tell what it costs, even if one of them was disturbed
_MANY_ROUNDS = 8  # that tell what half or twice as many requests cost
_TOKENS_A_ROUND = 1.7  # new states that a drafter reads a request and round, about


@dataclass(frozen=True, kw_only=True)
class RoundShape:
    """What decides how long a round takes."""

    num_requests: int
    num_rows: int  # of the target's forward: requests and draft nodes
    depth: int  # deepest draft asked for; 0 = the drafter did not run
    context: int  # tokens that all requests together have behind them
    num_new_states: int = 0  # target states that the drafter read first; a prompt's come with its first draft


def _rest_features(num_requests: float, rows: Array, context: float) -> Array:
    """[S, F] for rows [S]: one forward, its rows, their attention, and the hinges."""
    out = np.empty((rows.size, _REST_FEATURES))
    out[:, 0] = 1.0
    out[:, 1] = rows
    out[:, 2] = num_requests
    out[:, 3] = rows * (context / max(num_requests, 1.0)) * 1e-3
    np.maximum(rows[:, None] - _KNOTS, 0.0, out=out[:, 4:])
    return out


def _draft_features(num_requests: float, rows: Array, depths: Array, new_states: float) -> Array:
    """[S, F]: starting the drafter, its steps, its drafted rows, and the states it reads first; all 0 where depths are 0."""
    drafting = depths > 0
    return np.stack([drafting * 1.0, depths, np.maximum(rows - num_requests, 0.0) * drafting, drafting * new_states], axis=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundCosts:
    """Costs as they were known at one moment. Monotone in rows and depth, convex in rows."""

    rest: Array  # [F] seconds a feature, all >= 0
    draft: Array  # [F]
    speed: float = 1.0  # present duration of what took 1 when it was measured
    # Rounds measured by (bucket of the number of requests, depth up to DEEPER): the live table, which only grows.
    measured: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """False before the first fit: nothing can be weighed against anything then."""
        return bool(self.rest.any())

    def round_s(self, num_requests: int, context: int, depths: Array, rows: Array) -> Array:
        """[S] seconds of rounds with these depths [S] and rows of the forward [S]."""
        rest = _rest_features(num_requests, rows, context) @ self.rest
        draft = _draft_features(num_requests, rows, depths, _TOKENS_A_ROUND * num_requests) @ self.draft
        total: Array = (rest + draft) * self.speed
        return total

    def is_measured(self, num_requests: int, depth: int) -> bool:
        """True if some rounds of about this many requests and this depth were measured, or many of half or twice as many requests.

        All depths from DEEPER on count as one: beyond it costs are taken to go on as they began.
        """
        own, count = request_bucket(num_requests), self.measured.get
        kind = min(depth, DEEPER)
        beside = max(count((own - 1, kind), 0), count((own + 1, kind), 0))
        return count((own, kind), 0) >= _FEW_ROUNDS or beside >= _MANY_ROUNDS


def request_bucket(num_requests: int) -> int:
    """Numbers of requests that cost about alike: powers of two."""
    return num_requests.bit_length()


@dataclass(kw_only=True)
class _Cell:
    """Latest measurements of one shape, divided by the speed of their moment."""

    shape: RoundShape
    log_rest: list[float] = field(default_factory=list)
    log_draft: list[float] = field(default_factory=list)  # empty where nothing is drafted
    rest_median: float = 0.0
    draft_median: float = 0.0
    rest_row: Array = field(init=False)  # [F]
    draft_row: Array = field(init=False)  # [F]

    def __post_init__(self) -> None:
        own = self.shape
        rows = np.array([float(own.num_rows)])
        self.rest_row = _rest_features(own.num_requests, rows, own.context)[0]
        self.draft_row = _draft_features(own.num_requests, rows, np.array([float(own.depth)]), own.num_new_states)[0]
        self.add([], [])

    def add(self, log_rest: list[float], log_draft: list[float]) -> None:
        self.log_rest = (self.log_rest + log_rest)[-_MEMORY:]
        self.log_draft = (self.log_draft + log_draft)[-_MEMORY:]
        self.rest_median, self.draft_median = _median(self.log_rest), _median(self.log_draft)


class OnlineCosts:
    """Remembers medians by shape, and fits ``RoundCosts`` to them by non-negative least squares of relative errors."""

    def __init__(self) -> None:
        self._cells: OrderedDict[tuple[int, ...], _Cell] = OrderedDict()
        self._log_speed = 0.0
        self._since_fit = 0
        self._rest, self._draft = np.zeros(_REST_FEATURES), np.zeros(_DRAFT_FEATURES)
        self._measured: Counter[tuple[int, int]] = Counter()

    def snapshot(self) -> RoundCosts:
        return RoundCosts(rest=self._rest, draft=self._draft, speed=math.exp(self._log_speed), measured=self._measured)

    def observe(self, shape: RoundShape, draft_s: float, rest_s: float) -> None:
        """One round's measured seconds: in the drafter, and in everything else."""
        if not (rest_s > 0 and math.isfinite(rest_s) and draft_s >= 0 and math.isfinite(draft_s)):
            raise ValueError(f"a round cannot take {draft_s} + {rest_s} seconds")
        key = _key(shape)
        cell = self._cells.get(key)
        is_new = cell is None
        if cell is None:
            cell = self._cells[key] = _Cell(shape=shape)
            if len(self._cells) > _MAX_CELLS:
                self._cells.popitem(last=False)
        self._cells.move_to_end(key)
        if len(cell.log_rest) >= _SETTLED:
            deviation = math.log(rest_s) - self._log_speed - cell.rest_median
            if abs(deviation) < _OUTLIER:
                self._log_speed += _SPEED_GAIN * deviation
            else:
                self._log_speed += math.copysign(_SPEED_GAIN * _OUTLIER * 0.25, deviation)
        cell.add([math.log(rest_s) - self._log_speed], [math.log(draft_s) - self._log_speed] if shape.depth and draft_s > 0 else [])
        self._measured[request_bucket(shape.num_requests), min(shape.depth, DEEPER)] += 1
        self._since_fit += 1
        soon = is_new or len(cell.log_rest) == _SETTLED
        if self._since_fit >= _REFIT_EVERY or (soon and (self._since_fit >= _REFIT_SOON or len(self._cells) <= _REFIT_SOON)):
            self._fit()

    def calibrate(self, shape: RoundShape, rest_s: float) -> None:
        """A measurement made on purpose, of the forward alone; the first rounds of that shape take its place."""
        cell = self._cells.setdefault(_key(shape), _Cell(shape=shape))
        if not cell.log_rest:
            cell.add([math.log(rest_s) - self._log_speed], [])
        # Of forwards as wide as a draft's: the drafter did not run.
        self._measured[request_bucket(shape.num_requests), 0] += _FEW_ROUNDS
        self._fit()

    def _fit(self) -> None:
        self._since_fit = 0
        cells = list(self._cells.values())
        rest, medians = np.stack([cell.rest_row for cell in cells]), [cell.rest_median for cell in cells]
        self._rest = _relative_fit(rest, medians, [len(cell.log_rest) for cell in cells])
        drafting = [cell for cell in cells if cell.log_draft]
        if drafting:
            draft, medians = np.stack([cell.draft_row for cell in drafting]), [cell.draft_median for cell in drafting]
            self._draft = _relative_fit(draft, medians, [len(cell.log_draft) for cell in drafting])

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {
            "log_speed": self._log_speed,
            "rest": self._rest.tolist(),
            "draft": self._draft.tolist(),
            "measured": [[*kind, count] for kind, count in self._measured.items()],
            "cells": [{"shape": vars(cell.shape), "log_rest": cell.log_rest, "log_draft": cell.log_draft} for cell in self._cells.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave. KeyError, TypeError or ValueError if it is something else."""
        rest, draft = np.array(state["rest"], dtype=np.float64), np.array(state["draft"], dtype=np.float64)
        if rest.shape != self._rest.shape or draft.shape != self._draft.shape:
            raise ValueError(f"costs of {rest.size} + {draft.size} features, not of {self._rest.size} + {self._draft.size}")
        cells: Iterable[Mapping[str, Any]] = state["cells"]
        self._cells = OrderedDict()
        for held in cells:
            shape = RoundShape(**held["shape"])
            self._cells[_key(shape)] = _Cell(shape=shape, log_rest=list(held["log_rest"]), log_draft=list(held["log_draft"]))
        self._log_speed = float(state["log_speed"])
        self._measured = Counter({(int(bucket), int(depth)): int(count) for bucket, depth, count in state["measured"]})
        self._rest, self._draft = rest, draft


def _key(shape: RoundShape) -> tuple[int, ...]:
    """Shapes that count as one: rows and states within some ten per cent, contexts within a factor of two."""
    return (
        shape.num_requests if shape.num_requests < 16 else 16 * round(8 * math.log2(shape.num_requests)),
        round(8 * math.log2(max(shape.num_rows, 1))),
        shape.depth,
        max(shape.context // max(shape.num_requests, 1), 1).bit_length(),
        round(2 * math.log2(1 + shape.num_new_states)),
    )


def _median(values: list[float]) -> float:
    """Of two the lower one: what disturbs a measurement makes it longer."""
    if not values:
        return 0.0
    ordered, half = sorted(values), len(values) // 2
    if len(values) == 2:
        return ordered[0]
    return ordered[half] if len(values) % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def _relative_fit(features: Array, log_costs: list[float], counts: list[int]) -> Array:
    """[F] non-negative least squares of relative errors: minimise sum_c n_c (features_c . w / cost_c - 1)^2."""
    scaled = features * np.exp(-np.array(log_costs))[:, None]
    weights = np.array(counts, dtype=np.float64)
    norms = np.sqrt((scaled * scaled).mean(0))
    norms[norms == 0.0] = 1.0
    unit = scaled / norms
    gram, target = unit.T @ (unit * weights[:, None]), unit.T @ weights
    # A trace of ridge: features that were never told apart share their cost instead of one of them taking it all.
    gram[np.diag_indices_from(gram)] += _RIDGE * weights.sum()
    fitted: Array = non_negative(gram, target) / norms
    return fitted


def non_negative(gram: Array, target: Array) -> Array:
    """[F] the w >= 0 that minimises ``w . gram w / 2 - target . w``, for a positive definite gram [F, F].

    Active sets (Lawson & Hanson 1974, in the form of Bro & de Jong 1997): free the coordinate that wants up most, solve over the free
    ones, and step back to the boundary while any would go below 0.
    """
    solution = np.zeros_like(target)
    free = np.zeros(target.size, dtype=bool)
    for _ in range(3 * target.size):
        slope = np.where(free, -np.inf, target - gram @ solution)
        if slope.max() <= 1e-10 * max(float(np.abs(target).max()), 1.0):
            break
        free[int(slope.argmax())] = True
        while True:
            wanted = np.zeros_like(solution)
            wanted[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
            below = free & (wanted <= 0)
            if not below.any():
                break
            step = float((solution[below] / (solution[below] - wanted[below])).min())
            solution = solution + step * (wanted - solution)
            free &= solution > 1e-15
            solution[~free] = 0.0
        solution = wanted
    return solution
