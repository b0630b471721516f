"""EntropyMonitor: how many of the next draft's tokens will be accepted, judged by the policy's entropy and by what was accepted so far.

The entropy law (Bebop, arXiv 2606.12370) says that acceptance falls about linearly with the policy's entropy H. The monitor fits it online,
``α_d = c_d + m H`` with one slope for all depths, from counts that fade; H is a request's recent mean, for a single position's entropy says
little (docs/drafters.md). What a request accepts beyond the law is its own offset, trusted as far as requests are found to differ. A jump
that H does not explain is noticed by a cumulative sum, and moves the law at once.

Shape legend: R rounds of the same requests, B requests in a round, D depths (entry 0 is depth 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_spec.entropy_slope import EntropySlope
from rollout_spec.request_rows import RequestRows
from rollout_spec.rounds_seen import Forecast, RoundOutcome, RoundsSeen
from rollout_spec.staleness import StaleConfig, StaleJudge

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

_NEW_TOKENS = 16.0  # that a new request's entropy is taken for the batch's
_LEAST_BETWEEN = 0.005  # variance of requests' mean acceptance, where they were not seen to differ
_ENTROPY_ROUNDS = 6.0  # tokens a request that the batch's mean entropy remembers


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Time constants and priors. Observations are acceptance probabilities (or 0 and 1) of single depths of single requests."""

    max_depth: int = 16  # deeper drafts are judged as this deep
    law_memory: float = 3000.0  # observations that the law remembers
    entropy_memory: float = 24.0  # tokens that a request's mean entropy remembers
    offset_memory: float = 40.0  # observations that a request's own offset remembers
    prior_accept: float = 0.5  # of the first depth, before anything was seen ...
    prior_weight: float = 4.0  # ... and how many observations that is worth
    depth_ratio: float = 0.93  # of a depth's acceptance to that of the depth before, until it is seen
    prior_slope: float = -0.04  # per nat; sampled drafts .03, greedy ones .07 (docs/drafters.md) ...
    slope_weight: float = 30.0  # ... worth so many observations a squared nat
    jump_slack: float = 0.5  # standard deviations a round that no jump explains
    jump_threshold: float = 9.0  # and their sum that means a jump: a single request has streaks that mean none
    version_memory: float = 0.4  # what earlier observations count after the policy's weights changed
    drafter_memory: float = 0.1  # and after the drafter's did
    judged_per_request: float = 16.0  # first observations of a request, since the policy's last update, that the drafter is judged by
    staleness: StaleConfig = field(default_factory=StaleConfig)

    def __post_init__(self) -> None:
        if self.max_depth < 1:
            raise ValueError(f"max_depth must be 1 or more, got {self.max_depth}")
        for name in ("law_memory", "entropy_memory", "offset_memory", "prior_weight", "slope_weight"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class EntropyMonitor:
    """``observe`` every round, ask ``forecast`` before the next. The law outlives requests; ``state_dict`` keeps it for a later run."""

    def __init__(self, config: MonitorConfig | None = None) -> None:
        self.config = MonitorConfig() if config is None else config
        depth = self.config.max_depth
        self._requests = RequestRows()
        # Faded sums over observations, by depth: weight, α, H.
        self._n, self._y, self._x = np.zeros((3, depth))
        own = self.config
        self._slope = EntropySlope(prior=own.prior_slope, weight=own.slope_weight, memory=own.law_memory)
        # Faded sums by depth over requests that were asked: walks that got there and those that found a node; askings and nodes.
        self._reached, self._found, self._asked, self._nodes = np.zeros((4, depth))
        self._entropy_sum = self._entropy_squares = self._entropy_weight = 0.0  # of all emitted positions
        self._squares = self._square_weight = 0.0  # n r² of rounds' mean residuals r: their noise
        self._covariance = self._variance = self._pairs = 0.0  # of a request's residual with its offset so far, and with itself
        self._below, self._above = _Run(), _Run()
        self._judge = StaleJudge(self.config.staleness)
        self._epoch = 0
        self._num_asked = math.inf  # requests drafted for since weights changed
        self._coefficients: tuple[Array, float] = (np.zeros(depth), 0.0)
        self._fit()

    # What is known

    @property
    def stale(self) -> bool:
        """True while the drafter accepts clearly less than when its weights were new, at the entropy there is now."""
        return self._judge.stale

    @property
    def epoch(self) -> int:
        """Counts the times that everything may have changed: weights, or a jump."""
        return self._epoch

    @property
    def law(self) -> tuple[Array, float]:
        """(c [D], m): α_d = c_d + m H."""
        return self._coefficients

    @property
    def mean_entropy(self) -> float:
        """Recent mean over all requests, nats; NaN before the first token."""
        return self._entropy_sum / self._entropy_weight if self._entropy_weight else math.nan

    def first_accept(self) -> tuple[float, float]:
        """Acceptance of first drafted tokens that the drafter is judged by, and as it was when its weights were new, at the entropy of now.

        NaN until enough was seen.
        """
        entropy = self.mean_entropy if self._entropy_weight else 0.0
        return self._judge.recent, self._judge.reference_at(entropy, self._coefficients[1])

    def forecast(self, request_ids: tuple[str, ...]) -> Forecast:
        """For the next round of these requests, in this order."""
        rows = self._requests.of(request_ids)
        held = self._requests.values[rows]
        overall = self.mean_entropy if self._entropy_weight else 1.0
        known = held[:, RequestRows.TOKENS]
        # A new request starts at the batch's mean entropy, worth some tokens.
        entropies = overall * (held[:, RequestRows.ENTROPY] * known + _NEW_TOKENS) / (known + _NEW_TOKENS)
        intercepts, slope = self._coefficients
        offsets = held[:, RequestRows.RESIDUAL] / (held[:, RequestRows.COUNT] + self._offset_prior())
        accept = np.clip(intercepts + (slope * entropies + offsets)[:, None], 0.01, 0.995)
        found = (self._found + 1.0) / (self._reached + 1.0)
        noise = self._variance / self._pairs if self._pairs > 0 else 0.25
        doubt = np.square(self._slope.error(noise) * (entropies - self._pivot))
        return Forecast(
            accept=accept,
            steps=accept * found,
            nodes=(self._nodes + 1.0) / (self._asked + 1.0),
            spread=np.sqrt(noise / (self._n + self.config.prior_weight) + doubt[:, None]),
            entropies=entropies,
            epoch=self._epoch,
            num_observed=float(self._n[0]),
            num_asked=self._num_asked,
        )

    # What happens

    def observe(self, outcome: RoundOutcome, expected: Forecast | None = None) -> bool:
        """Take in one round, for which ``expected`` was the forecast. True if the drafter was found stale by it."""
        return self.observe_rounds([outcome], expected)

    def observe_rounds(self, outcomes: Sequence[RoundOutcome], expected: Forecast | None = None) -> bool:
        """Take in rounds of the same requests at once, all under one forecast: what costs time here does so by the call."""
        seen = RoundsSeen.of(outcomes)
        rows = self._requests.of(seen.request_ids)
        before = self._judge.stale
        num_asked = int((seen.asked > 0).sum())
        if num_asked:
            self._num_asked += num_asked
            self._observe_drafts(seen, rows, self.forecast(seen.request_ids) if expected is None else expected)
        self._observe_entropies(seen.entropies, rows)
        return self._judge.stale and not before

    def finish(self, request_id: str) -> None:
        self._requests.drop(request_id)

    def target_updated(self) -> None:
        """The policy's weights changed: what was seen counts less, but the drafter is still held to what it once was."""
        self._fade_all(self.config.version_memory)
        self._judge.target_updated()

    def drafter_updated(self) -> None:
        """The drafter's weights changed: it is judged anew."""
        self._fade_all(self.config.drafter_memory)
        self._judge.drafter_updated()

    def _fade_all(self, kept: float) -> None:
        for sums in (self._n, self._y, self._x, self._reached, self._found, self._asked, self._nodes):
            sums *= kept
        self._requests.values[:, (RequestRows.RESIDUAL, RequestRows.COUNT)] *= kept
        self._requests.values[:, RequestRows.SEEN] = 0.0
        self._slope.weights_changed(kept)
        self._num_asked = 0.0
        self._below.clear()
        self._above.clear()
        self._epoch += 1
        self._fit()

    def _observe_entropies(self, entropies: Array, rows: Ints) -> None:
        known = np.isfinite(entropies)
        counts = known.sum((0, 2))
        sums = np.where(known, entropies, 0.0).sum((0, 2))
        count = float(counts.sum())
        if not count:
            return
        # All requests together show a change of the policy or its temperature within rounds; how a request differs shows slowly.
        fade = math.exp(-count / max(self.config.entropy_memory, _ENTROPY_ROUNDS * len(counts)))
        self._entropy_sum = self._entropy_sum * fade + float(sums.sum())
        self._entropy_squares = self._entropy_squares * fade + float(np.square(entropies[known]).sum())
        self._entropy_weight = self._entropy_weight * fade + count
        held = self._requests.values[rows]
        kept = held[:, RequestRows.TOKENS] * np.exp(-counts / self.config.entropy_memory)
        total = kept + counts
        relative = sums / max(self.mean_entropy, 1e-3)
        held[:, RequestRows.ENTROPY] = (held[:, RequestRows.ENTROPY] * kept + relative) / np.maximum(total, 1e-9)
        held[:, RequestRows.TOKENS] = total
        self._requests.values[rows] = held

    def _observe_drafts(self, outcome: RoundsSeen, rows: Ints, expected: Forecast) -> None:
        depth = min(outcome.accept_probs.shape[2], self.config.max_depth)
        self._observe_findings(outcome, depth)
        probs = outcome.accept_probs[:, :, :depth]
        seen = ~np.isnan(probs)
        if not seen.any():
            return
        accept = np.where(seen, probs, 0.0)
        entropies = expected.entropies
        by_request = seen.sum(0)  # [B, D]
        counts = by_request.sum(0)
        first = float(counts[0])
        if first:
            self._slope.observe(first, float(accept[:, :, 0].sum()), float(entropies @ by_request[:, 0]) / first, self._entropy_error())
        fade = np.exp(-counts / self.config.law_memory)
        for sums, new in ((self._n, counts), (self._y, accept.sum((0, 1))), (self._x, entropies @ by_request)):
            sums[:depth] = sums[:depth] * fade + new
        residuals = np.where(seen, accept - expected.accept[:, :depth], 0.0)
        self._observe_offsets(outcome, expected, seen, rows)
        self._observe_jump(float(residuals.sum()), float(counts.sum()))
        self._fit()
        self._observe_first(outcome, expected, rows)

    def _entropy_error(self) -> float:
        """Squared standard error of ``mean_entropy``, nats²."""
        if not self._entropy_weight:
            return 0.0
        mean = self._entropy_sum / self._entropy_weight
        return max(self._entropy_squares / self._entropy_weight - mean * mean, 0.0) / self._entropy_weight

    def _observe_findings(self, outcome: RoundsSeen, depth: int) -> None:
        """How often a walk that got to a depth found a node there, and how many nodes a request gets a depth."""
        depths = np.arange(depth)
        wanted = outcome.asked[:, :, None] > depths
        reached = wanted & (outcome.num_accepted[:, :, None] >= depths)
        found = ~np.isnan(outcome.accept_probs[:, :, :depth])
        asked = wanted.sum((0, 1))
        fade = np.exp(-asked / self.config.law_memory)
        for sums, new in (
            (self._reached, reached.sum((0, 1))),
            (self._found, found.sum((0, 1))),
            (self._asked, asked),
            (self._nodes, outcome.nodes_by_depth[:depth]),
        ):
            sums[:depth] = sums[:depth] * fade + new

    def _observe_offsets(self, outcome: RoundsSeen, expected: Forecast, seen: NDArray[np.bool_], rows: Ints) -> None:
        """What each request accepts beyond the law, and how much requests differ at all: the covariance of a request's rounds."""
        depth = seen.shape[2]
        intercepts, slope = self._coefficients
        law = intercepts[:depth] + slope * expected.entropies[:, None]
        counts = seen.sum((0, 2))
        beyond = np.where(seen, outcome.accept_probs[:, :, :depth] - law, 0.0).sum((0, 2))
        held = self._requests.values[rows]
        sums, numbers = held[:, RequestRows.RESIDUAL], held[:, RequestRows.COUNT]
        both = (numbers > 0) & (counts > 0)
        if both.any():
            now, before = beyond[both] / counts[both], sums[both] / numbers[both]
            fade = math.exp(-float(both.sum()) / self.config.law_memory)
            self._covariance = self._covariance * fade + float(now @ before)
            self._variance = self._variance * fade + float((now * now) @ counts[both])
            self._pairs = self._pairs * fade + float(both.sum())
        fading = np.exp(-counts / self.config.offset_memory)
        held[:, RequestRows.RESIDUAL] = sums * fading + beyond
        held[:, RequestRows.COUNT] = numbers * fading + counts
        self._requests.values[rows] = held

    def _offset_prior(self) -> float:
        """Observations after which a request's own mean counts as much as the law: noise over the variance between requests."""
        if self._pairs < 1.0:
            return 20.0
        between, noise = self._covariance / self._pairs, self._variance / self._pairs
        return min(max(noise / max(between, 1e-4), 4.0), 400.0)

    def _observe_jump(self, residual_sum: float, count: float) -> None:
        """Cumulative sums (Page 1954) of the rounds' mean residuals, in standard deviations; past the threshold the law moves."""
        mean = residual_sum / count
        if self._square_weight >= 8.0:
            sigma = math.sqrt(self._squares / self._square_weight / count)
            score = max(-4.0, min(4.0, mean / max(sigma, 1e-6)))
            self._below.add(-score - self.config.jump_slack, residual_sum, count)
            self._above.add(score - self.config.jump_slack, residual_sum, count)
            for run in (self._below, self._above):
                if run.score > self.config.jump_threshold:
                    self._jump(run)
                    return
            # An outlier must not widen the scale that it is judged by.
            mean = max(-3.0 * sigma, min(3.0 * sigma, mean))
        fade = math.exp(-1.0 / 200.0)
        self._squares = self._squares * fade + count * mean * mean
        self._square_weight = self._square_weight * fade + 1.0

    def _jump(self, run: _Run) -> None:
        """Move the law by the mean residual of the run, and trust it as much as the run is long."""
        shift, count = run.residual_sum / run.count, run.count
        kept = min(1.0, max(count, self.config.prior_weight) / max(float(self._n[0]), 1.0))
        self._y += shift * self._n
        for sums in (self._n, self._y, self._x):
            sums *= kept
        self._requests.values[:, (RequestRows.RESIDUAL, RequestRows.COUNT)] = 0.0
        self._below.clear()
        self._above.clear()
        self._epoch += 1

    @property
    def _pivot(self) -> float:
        """Entropy at which the law was mostly seen, nats."""
        return float(self._x[0] / self._n[0]) if self._n[0] > 0 else 1.0

    def _fit(self) -> None:
        """Least squares with priors: one slope for all depths, then an intercept a depth, each leaning on the depth before."""
        own = self.config
        slope, pivot = self._slope.value, self._pivot
        intercepts = np.empty_like(self._n)
        at_pivot = own.prior_accept
        for d, (n, x, y) in enumerate(zip(self._n.tolist(), self._x.tolist(), self._y.tolist(), strict=True)):
            guess = at_pivot if d == 0 else own.depth_ratio * at_pivot
            at_pivot = (own.prior_weight * guess + y - slope * (x - n * pivot)) / (own.prior_weight + n)
            intercepts[d] = at_pivot - slope * pivot
        self._coefficients = (intercepts, slope)

    def _observe_first(self, outcome: RoundsSeen, expected: Forecast, rows: Ints) -> None:
        """Judge the drafter by observations that nobody has selected.

        These are the first ones of each request, since the policy's last update, and those of rounds that drafted for all. Others come
        from the requests that accept most, for these are drafted for; how many they are says nothing about the drafter.
        """
        own = self.config
        seen_before = self._requests.values[rows, RequestRows.SEEN]
        first = outcome.accept_probs[:, :, 0]
        known = ~np.isnan(first)
        chosen = known & ((seen_before < own.judged_per_request) | (outcome.asked > 0).all(axis=1, keepdims=True))
        self._requests.values[rows, RequestRows.SEEN] = seen_before + known.sum(0)
        by_request = chosen.sum(0)
        count = float(by_request.sum())
        if not count:
            return
        # Requests differ, too: those of now may be others than those of then.
        within, between = 0.25, _LEAST_BETWEEN
        if self._pairs > 1.0:
            within, between = self._variance / self._pairs, max(self._covariance / self._pairs, _LEAST_BETWEEN)
        accept, entropy = float(first[chosen].sum()), float(expected.entropies @ by_request)
        requests = float(((by_request > 0) & (seen_before == 0)).sum())
        self._judge.observe(count, accept, entropy, requests, slope=self._coefficients[1], within=within, between=between)

    # Kept between runs

    _SUMS = ("_n", "_y", "_x", "_reached", "_found", "_asked", "_nodes")
    _NUMBERS = (
        "_entropy_sum",
        "_entropy_squares",
        "_entropy_weight",
        "_squares",
        "_square_weight",
        "_covariance",
        "_variance",
        "_pairs",
        "_epoch",
    )

    def state_dict(self) -> dict[str, Any]:
        """The law and its evidence, as JSON can hold it; requests are not kept."""
        sums = {name: getattr(self, name).tolist() for name in self._SUMS}
        return (
            sums
            | {name: getattr(self, name) for name in self._NUMBERS}
            | {
                "slope": self._slope.state_dict(),
                "judge": self._judge.state_dict(),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave. ValueError if it is of another depth, KeyError if something is missing."""
        if len(state["_n"]) != self.config.max_depth:
            raise ValueError(f"the monitor's state is of {len(state['_n'])} depths, not of {self.config.max_depth}")
        for name in self._SUMS:
            setattr(self, name, np.array(state[name], dtype=np.float64))
        for name in self._NUMBERS:
            setattr(self, name, state[name])
        self._slope.load_state_dict(state["slope"])
        self._judge.load_state_dict(state["judge"])
        self._fit()


class _Run:
    """One side of a cumulative sum: its score, and what was summed since it was last 0."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.score = self.residual_sum = self.count = 0.0

    def add(self, score: float, residual_sum: float, count: float) -> None:
        self.score += score
        self.residual_sum += residual_sum
        self.count += count
        if self.score <= 0:
            self.clear()
