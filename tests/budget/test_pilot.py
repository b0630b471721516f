"""The pilot learns a decision's rounds together, loses none, and tells what it found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_spec.budget import Budget
from rollout_spec.controllers import ThroughputBudget
from rollout_spec.cost import RoundShape
from rollout_spec.monitor import EntropyMonitor
from rollout_spec.pilot import BudgetPilot, RoundReport
from rollout_spec.rounds_seen import RoundOutcome
from rollout_spec.simulate.world import CPU

BATCH = 4
IDS = tuple(f"request {i}" for i in range(BATCH))


class Rollout:
    """Rounds as the pilot decides them; first drafted tokens are accepted with probability ``accept``."""

    def __init__(self, pilot: BudgetPilot, seed: int = 0) -> None:
        self.pilot, self.noise = pilot, np.random.default_rng(seed)
        self.outcomes: list[RoundOutcome] = []

    def decide(self, ids: tuple[str, ...] = IDS) -> Budget:
        return self.pilot.decide(ids, torch.full((len(ids),), 500), torch.full((len(ids),), 100))

    def round(self, accept: float, ids: tuple[str, ...] = IDS) -> bool:
        lengths = self.decide(ids).draft_lengths.numpy()
        depth, batch = int(lengths.max()), len(ids)
        asked = np.arange(depth) < lengths[:, None]
        kept = np.logical_and.accumulate((self.noise.random((batch, depth)) < accept) & asked, axis=1)
        accepted = kept.sum(1)
        reached = asked & (np.arange(depth) <= accepted[:, None])
        entropies = np.where(np.arange(depth + 1) <= accepted[:, None], self.noise.gamma(1.0, 1.0, (batch, depth + 1)), np.nan)
        shape = RoundShape(num_requests=batch, num_rows=batch + int(lengths.sum()), depth=depth, context=100 * batch)
        draft_s, rest_s = CPU.parts(batch, 100 * batch, np.array([float(depth)]), np.array([float(shape.num_rows)]))
        self.outcomes.append(
            RoundOutcome(
                request_ids=ids,
                asked=lengths,
                accept_probs=np.where(reached, kept.astype(float), np.nan),
                num_accepted=accepted,
                nodes_by_depth=asked.sum(0).astype(float),
                entropies=entropies,
            )
        )
        report = RoundReport(outcome=self.outcomes[-1], shape=shape, draft_s=float(draft_s[0]), rest_s=float(rest_s[0]))
        return self.pilot.observe(report)


def test_no_round_is_lost(tmp_path: Path) -> None:
    """Whatever ends a decision early, its rounds are in what is saved."""
    rollout = Rollout(BudgetPilot(ThroughputBudget()))
    for index in range(37):
        rollout.round(0.7, IDS[: BATCH - index % 2] if 20 <= index < 30 else IDS)
        if index == 33:
            rollout.pilot.finish(IDS[0])
        if index == 35:
            rollout.pilot.target_updated()
    rollout.pilot.save(tmp_path / "budget.json")
    held = json.loads((tmp_path / "budget.json").read_text())["monitor"]
    each = EntropyMonitor()
    for index, outcome in enumerate(rollout.outcomes):
        each.observe(outcome)
        if index == 35:
            each.target_updated()
    for name in ("_n", "_reached", "_asked", "_nodes"):
        np.testing.assert_allclose(held[name], each.state_dict()[name], rtol=0.01)


def test_rounds_taken_in_together_teach_the_same_law() -> None:
    rollout, each = Rollout(BudgetPilot(ThroughputBudget())), EntropyMonitor()
    for _ in range(400):
        rollout.round(0.65)
        each.observe(rollout.outcomes[-1])
    together = rollout.pilot.monitor
    intercepts, slope = together.law
    own_intercepts, own_slope = each.law
    assert intercepts[0] + slope == pytest.approx(own_intercepts[0] + own_slope, abs=0.02)
    assert intercepts[0] + slope == pytest.approx(0.65, abs=0.05)


def test_learning_happens_by_the_decision() -> None:
    """A single request's round is short: what learning costs, it costs by the call."""
    rollout = Rollout(BudgetPilot(ThroughputBudget()))
    monitor, calls = rollout.pilot.monitor, list[int]()
    observe = monitor.observe_rounds
    monitor.observe_rounds = lambda outcomes, expected=None: calls.append(len(outcomes)) or observe(outcomes, expected)  # type: ignore[method-assign, func-returns-value]
    for _ in range(200):
        rollout.round(0.8)
    assert sum(calls) >= 197
    assert len(calls) < 80
    assert max(calls) == 4


def test_a_drafter_found_stale_when_requests_change_is_told_of_in_the_next_round() -> None:
    rollout = Rollout(BudgetPilot(ThroughputBudget()))
    for _ in range(400):
        assert not rollout.round(0.8)
    rollout.pilot.target_updated()
    told = [rollout.round(0.02, IDS if index % 2 else IDS[::-1]) for index in range(40)]
    assert told.count(True) == 1
    assert rollout.pilot.monitor.stale
