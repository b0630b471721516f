"""The monitor finds the law it is shown, follows its jumps, tells a stale drafter, and no change of entropy is called one."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from rollout_spec.monitor import EntropyMonitor, MonitorConfig
from rollout_spec.rounds_seen import Forecast, RoundOutcome
from rollout_spec.staleness import StaleConfig

Law = Callable[[int], tuple[float, float]]  # round -> (intercept, slope) at depth 1
RATIO = 0.9


class Rollout:
    """Rounds of ``batch`` requests whose acceptance follows a law; each request has an entropy and an offset of its own."""

    def __init__(self, monitor: EntropyMonitor, *, batch: int = 8, depth: int = 2, spread: float = 0.15, seed: int = 0) -> None:
        self.monitor, self.batch, self.depth, self.spread = monitor, batch, depth, spread
        self.noise = np.random.default_rng(seed)
        self.ids = tuple(f"request {i}" for i in range(batch))
        self.offsets = np.zeros(batch)
        self.entropies = np.full(batch, 1.0)

    def mean(self, intercept: float, slope: float) -> np.ndarray:
        first = intercept + slope * self.entropies + self.offsets
        return np.clip(first[:, None] * RATIO ** np.arange(self.depth), 0.01, 0.99)

    def round(self, intercept: float, slope: float = 0.0, *, realised: bool = False) -> bool:
        mean = self.mean(intercept, slope)
        probs = np.clip(mean + self.spread * self.noise.standard_normal(mean.shape), 0.0, 1.0)
        kept = np.logical_and.accumulate(self.noise.random(mean.shape) < probs, axis=1)
        accepted = kept.sum(1)
        reached = np.arange(self.depth) <= accepted[:, None]
        told = kept.astype(float) if realised else probs
        emitted = np.arange(self.depth + 1) <= accepted[:, None]
        tokens = self.noise.gamma(1.0, np.maximum(self.entropies, 1e-6)[:, None], (self.batch, self.depth + 1))
        return self.monitor.observe(
            RoundOutcome(
                request_ids=self.ids,
                asked=np.full(self.batch, self.depth),
                accept_probs=np.where(reached, told, np.nan),
                num_accepted=accepted,
                nodes_by_depth=np.full(self.depth, float(self.batch)),
                entropies=np.where(emitted, tokens, np.nan),
            )
        )

    def forecast(self) -> Forecast:
        return self.monitor.forecast(self.ids)


def test_the_law_is_found_and_predicts_by_depth() -> None:
    rollout = Rollout(EntropyMonitor())
    noise = np.random.default_rng(1)
    for _ in range(40):
        rollout.entropies = np.full(8, noise.uniform(0.5, 6.0))
        for _ in range(25):
            rollout.round(0.8, -0.08)
    intercepts, slope = rollout.monitor.law
    assert slope == pytest.approx(-0.08, abs=0.02)
    assert intercepts[0] == pytest.approx(0.8, abs=0.08)
    rollout.entropies = np.full(8, 3.0)
    for _ in range(20):
        rollout.round(0.8, -0.08)
    expected = rollout.forecast()
    np.testing.assert_allclose(expected.accept[:, :2].mean(0), rollout.mean(0.8, -0.08).mean(0), atol=0.06)
    np.testing.assert_allclose(expected.accepted[:, 1], expected.steps[:, 0] * expected.steps[:, 1])
    assert rollout.monitor.mean_entropy == pytest.approx(3.0, rel=0.3)


def test_entropy_alone_moves_the_prediction() -> None:
    """Nothing is drafted after the entropy has fallen: the law still says that it would pay again."""
    rollout = Rollout(EntropyMonitor())
    for entropy in (1.0, 6.0, 2.0, 7.0) * 3:
        rollout.entropies = np.full(8, entropy)
        for _ in range(25):
            rollout.round(0.8, -0.08)
    high = rollout.forecast().accept[:, 0].mean()
    rollout.entropies = np.full(8, 0.5)
    for _ in range(20):
        tokens = np.random.default_rng(2).gamma(1.0, 0.5, (8, 1))
        nothing = np.zeros((8, 0))
        rollout.monitor.observe(
            RoundOutcome(
                request_ids=rollout.ids,
                asked=np.zeros(8, dtype=np.int64),
                accept_probs=nothing,
                num_accepted=np.zeros(8, dtype=np.int64),
                nodes_by_depth=np.zeros(0),
                entropies=tokens,
            )
        )
    assert rollout.forecast().accept[:, 0].mean() > high + 0.3


def test_requests_that_differ_are_told_apart_and_equal_ones_are_not() -> None:
    different, equal = Rollout(EntropyMonitor()), Rollout(EntropyMonitor())
    different.offsets = np.array([0.25] * 4 + [-0.25] * 4)
    for _ in range(60):
        different.round(0.5)
        equal.round(0.5)
    first = different.forecast().accept[:, 0]
    assert first[:4].min() > first[4:].max() + 0.3
    assert np.ptp(equal.forecast().accept[:, 0]) < 0.08


def test_a_drafter_that_finds_nothing_is_known_to() -> None:
    monitor = EntropyMonitor()
    for index in range(200):
        has = index % 4 == 0
        monitor.observe(
            RoundOutcome(
                request_ids=("a",),
                asked=np.array([2]),
                accept_probs=np.array([[0.9, np.nan]]) if has else np.full((1, 2), np.nan),
                num_accepted=np.array([0]),
                nodes_by_depth=np.array([float(has), 0.0]),
                entropies=np.array([[1.0, np.nan, np.nan]]),
            )
        )
    expected = monitor.forecast(("a",))
    assert expected.accept[0, 0] == pytest.approx(0.9, abs=0.05)
    assert expected.steps[0, 0] == pytest.approx(0.9 / 4, abs=0.05)
    assert expected.nodes[0] == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(("batch", "realised", "within"), [(32, False, 4), (8, False, 8), (8, True, 12), (1, False, 20)])
def test_a_jump_is_followed(batch: int, realised: bool, within: int) -> None:
    rollout = Rollout(EntropyMonitor(), batch=batch)
    for _ in range(max(120, 600 // batch)):
        rollout.round(0.8, realised=realised)
    for _ in range(within):
        rollout.round(0.25, realised=realised)
    assert rollout.forecast().accept[:, 0].mean() < 0.45


@pytest.mark.parametrize(("batch", "realised"), [(32, False), (8, True), (1, False)])
def test_a_policy_that_jumped_away_is_reported_within_20_rounds(batch: int, realised: bool) -> None:
    rollout = Rollout(EntropyMonitor(), batch=batch)
    for _ in range(max(100, 400 // batch)):
        assert not rollout.round(0.8, realised=realised)
    rollout.monitor.target_updated()
    reported = [rollout.round(0.25, realised=realised) for _ in range(20)]
    assert reported.count(True) == 1
    assert rollout.monitor.stale
    now, reference = rollout.monitor.first_accept()
    assert now < 0.5 < 0.7 < reference
    rollout.monitor.drafter_updated()
    assert not rollout.monitor.stale
    assert not any(rollout.round(0.25, realised=realised) for _ in range(60))  # it is held to what it was when it was new


def test_a_useless_drafter_is_reported_by_the_few_drafts_that_are_still_made() -> None:
    """After the jump 32 requests are drafted for, and then nobody."""
    rollout = Rollout(EntropyMonitor())
    rollout.entropies = np.full(8, 2.5)
    for _ in range(120):
        assert not rollout.round(0.45)
    rollout.monitor.target_updated()
    rollout.entropies = np.full(8, 5.0)
    assert any(rollout.round(0.02) for _ in range(4))


def test_an_update_that_changes_entropy_and_acceptance_teaches_no_slope() -> None:
    """Else the law would explain a drafter that the policy left behind by the entropy that rose at the same time."""
    rollout = Rollout(EntropyMonitor())
    for entropy, accept in ((2.5, 0.45), (5.0, 0.02)):
        rollout.entropies = np.full(8, entropy)
        for _ in range(100):
            rollout.round(accept)
        rollout.monitor.target_updated()
    assert rollout.monitor.law[1] > -0.06


def test_a_policy_that_learns_slowly_is_reported_too() -> None:
    rollout = Rollout(EntropyMonitor())
    accept, reported = 0.8, 0
    for version in range(30):
        for _ in range(20):
            reported += rollout.round(accept)
        if version < 20:
            accept -= 0.02
        rollout.monitor.target_updated()
    assert reported == 1
    assert rollout.monitor.stale


def test_a_change_of_temperature_is_not_a_stale_drafter() -> None:
    rollout = Rollout(EntropyMonitor())
    reported = 0
    for entropy in (1.0, 1.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        rollout.entropies = np.full(8, entropy)
        for _ in range(40):
            reported += rollout.round(0.8, -0.07)
        rollout.monitor.target_updated()
    assert reported == 0


def test_a_steady_drafter_is_never_called_stale() -> None:
    """300 rounds, with requests that come and go and differ, at eight seeds."""
    for seed in range(8):
        rollout = Rollout(EntropyMonitor(), seed=seed, spread=0.25)
        for index in range(300):
            if index % 25 == 0:
                rollout.ids = tuple(f"{index} {i}" for i in range(8))
                rollout.offsets = rollout.noise.choice([-0.15, 0.15], 8)
                rollout.monitor.target_updated()
            assert not rollout.round(0.6, realised=True)


def test_new_weights_widen_the_uncertainty() -> None:
    rollout = Rollout(EntropyMonitor())
    for _ in range(100):
        rollout.round(0.7)
    before = rollout.forecast()
    rollout.monitor.target_updated()
    after = rollout.forecast()
    assert (after.spread[:, :2] > before.spread[:, :2]).all()
    assert after.epoch == before.epoch + 1
    assert after.accept[:, 0].mean() == pytest.approx(before.accept[:, 0].mean(), abs=0.05)


def test_acceptance_is_known_less_where_the_entropy_was_never_seen() -> None:
    """Until it was: then the slope is known, and with it acceptance everywhere."""
    rollout = Rollout(EntropyMonitor())
    for _ in range(100):
        rollout.round(0.7, -0.05)
    near = rollout.forecast().spread[0, 0]
    rollout.entropies = np.full(8, 6.0)
    for _ in range(5):
        rollout.monitor._observe_entropies(np.full((1, 8, 3), 6.0), rollout.monitor._requests.of(rollout.ids))
    far = rollout.forecast()
    assert far.spread[0, 0] > 3 * near
    assert abs(far.accept[0, 0] - 0.4) < 2 * far.spread[0, 0]
    for _ in range(60):
        rollout.round(0.7, -0.05)
    assert rollout.forecast().spread[0, 0] < 0.5 * far.spread[0, 0]


def test_state_survives_json_and_finished_requests_are_forgotten() -> None:
    rollout = Rollout(EntropyMonitor())
    for _ in range(50):
        rollout.round(0.7, -0.05)
    again = EntropyMonitor()
    again.load_state_dict(json.loads(json.dumps(rollout.monitor.state_dict())))
    for request_id in rollout.ids:
        rollout.monitor.finish(request_id)
    for mine, wanted in zip(
        dataclasses.astuple(again.forecast(("new",))), dataclasses.astuple(rollout.monitor.forecast(("new",))), strict=True
    ):
        np.testing.assert_allclose(mine, wanted)
    assert again.first_accept() == rollout.monitor.first_accept()
    with pytest.raises(ValueError, match="16 depths, not of 3"):
        EntropyMonitor(MonitorConfig(max_depth=3)).load_state_dict(rollout.monitor.state_dict())


def test_before_anything_was_seen_there_is_a_prior() -> None:
    monitor = EntropyMonitor()
    expected = monitor.forecast(("a", "b"))
    assert expected.accept.shape == (2, 16)
    assert (np.diff(expected.accept, axis=1) < 0).all()
    assert expected.accept[0, 0] == pytest.approx(0.5)
    assert math.isnan(monitor.mean_entropy)
    assert math.isnan(monitor.first_accept()[1])


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="max_depth must be 1 or more, got 0"):
        MonitorConfig(max_depth=0)
    with pytest.raises(ValueError, match="law_memory must be positive"):
        MonitorConfig(law_memory=0.0)
    with pytest.raises(ValueError, match=r"does not hold for 0\.9 and 0\.8"):
        StaleConfig(below=0.9, fresh_above=0.8)
    with pytest.raises(ValueError, match="memory must be positive"):
        StaleConfig(memory=0.0)


def test_no_token_reaches_the_monitor() -> None:
    names = {name for of in (RoundOutcome, Forecast) for name in inspect.signature(of).parameters}
    assert not {name for name in names if "token" in name or "draft_prob" in name}
