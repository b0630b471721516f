"""The cost model finds the costs it is shown, keeps their shape, and is not fooled by a machine that slows down."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from rollout_spec.cost import OnlineCosts, RoundShape, non_negative
from rollout_spec.simulate.world import CPU, GPU, CostCurve


def shape(num_requests: int, depth: int, *, rows: int | None = None) -> RoundShape:
    return RoundShape(
        num_requests=num_requests,
        num_rows=num_requests * (1 + depth) if rows is None else rows,
        depth=depth,
        context=300 * num_requests,
        num_new_states=2 * num_requests if depth else 0,
    )


def true_parts(curve: CostCurve, of: RoundShape) -> tuple[float, float]:
    draft, rest = curve.parts(of.num_requests, of.context, np.array([float(of.depth)]), np.array([float(of.num_rows)]))
    return float(draft[0]), float(rest[0])


def taught(curve: CostCurve, sizes: tuple[int, ...], *, repeats: int = 4, sigma: float = 0.0) -> OnlineCosts:
    noise, costs = np.random.default_rng(0), OnlineCosts()
    for _ in range(repeats):
        for size in sizes:
            for depth in (0, 1, 2, 4):
                draft_s, rest_s = true_parts(curve, shape(size, depth))
                factor = math.exp(sigma * noise.standard_normal())
                costs.observe(shape(size, depth), draft_s * factor, rest_s * factor)
    return costs


def predicted(costs: OnlineCosts, of: RoundShape) -> float:
    return float(costs.snapshot().round_s(of.num_requests, of.context, np.array([float(of.depth)]), np.array([float(of.num_rows)]))[0])


@pytest.mark.parametrize("curve", [CPU, GPU], ids=["cpu", "gpu"])
def test_measured_shapes_are_predicted_and_others_between_them(curve: CostCurve) -> None:
    costs = taught(curve, (1, 4, 16, 64))
    for size, depth in ((1, 0), (4, 2), (16, 4), (64, 1), (8, 1), (32, 3)):
        assert predicted(costs, shape(size, depth)) == pytest.approx(sum(true_parts(curve, shape(size, depth))), rel=0.15)


def test_costs_are_monotone_and_convex_in_rows() -> None:
    costs = taught(GPU, (1, 16, 64), sigma=0.2).snapshot()
    rows = np.arange(16.0, 600.0)
    seconds = costs.round_s(16, 4800, np.full_like(rows, 3.0), rows)
    assert (np.diff(seconds) >= -1e-12).all()
    assert (np.diff(seconds, 2) >= -1e-12).all()
    depths = np.arange(0.0, 9.0)
    assert (np.diff(costs.round_s(16, 4800, depths, np.full_like(depths, 64.0))) >= -1e-12).all()


def test_a_slower_machine_changes_the_speed_and_not_what_is_cheaper() -> None:
    """Everything takes half as long again for a while, and only rounds with a draft are run in that time."""
    costs = taught(CPU, (8,), repeats=8)
    before = predicted(costs, shape(8, 2)) / predicted(costs, shape(8, 0))
    for _ in range(40):
        draft_s, rest_s = true_parts(CPU, shape(8, 2))
        costs.observe(shape(8, 2), 1.5 * draft_s, 1.5 * rest_s)
    assert predicted(costs, shape(8, 2)) == pytest.approx(1.5 * sum(true_parts(CPU, shape(8, 2))), rel=0.08)
    assert predicted(costs, shape(8, 2)) / predicted(costs, shape(8, 0)) == pytest.approx(before, rel=0.03)


def test_single_rounds_that_take_ten_times_as_long_are_forgotten() -> None:
    costs = taught(CPU, (8,), repeats=8)
    wanted = predicted(costs, shape(8, 2))
    for index in range(30):
        draft_s, rest_s = true_parts(CPU, shape(8, 2))
        factor = 10.0 if index % 6 == 0 else 1.0
        costs.observe(shape(8, 2), draft_s * factor, rest_s * factor)
    assert predicted(costs, shape(8, 2)) == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize("disturbed", range(3))
def test_one_disturbed_round_of_the_first_few_does_not_decide(disturbed: int) -> None:
    """What a kind of round costs is believed after three of them: a draft that took five times as long once is not dear."""
    costs = OnlineCosts()
    for depth in (0, 1, 2):
        for index in range(3):
            assert not costs.snapshot().is_measured(8, depth)
            draft_s, rest_s = true_parts(CPU, shape(8, depth))
            factor = 5.0 if depth == 1 and index == disturbed else 1.0
            costs.observe(shape(8, depth), draft_s * factor, rest_s * factor)
        assert costs.snapshot().is_measured(8, depth)
    for depth in (0, 1, 2):
        assert predicted(costs, shape(8, depth)) == pytest.approx(sum(true_parts(CPU, shape(8, depth))), rel=0.05)


def test_it_knows_what_was_never_measured() -> None:
    costs = OnlineCosts()
    assert not costs.snapshot().known
    for _ in range(3):
        costs.observe(shape(8, 0), 0.0, 0.02)
    known = costs.snapshot()
    assert known.known
    assert known.is_measured(8, 0)
    assert known.is_measured(15, 0)
    assert not known.is_measured(8, 1)
    assert not known.is_measured(40, 0)
    for _ in range(8):
        costs.observe(shape(8, 5), 0.004, 0.03)
    assert costs.snapshot().is_measured(9, 2)
    assert costs.snapshot().is_measured(20, 7)  # twice as many requests, and often enough


def test_calibration_gives_way_to_rounds() -> None:
    costs = OnlineCosts()
    costs.calibrate(shape(8, 0), 0.01)
    assert predicted(costs, shape(8, 0)) == pytest.approx(0.01, rel=0.01)
    assert costs.snapshot().is_measured(8, 0)
    for _ in range(20):
        costs.observe(shape(8, 0), 0.0, 0.02)
    assert predicted(costs, shape(8, 0)) == pytest.approx(0.02, rel=0.05)


def test_state_survives_json() -> None:
    costs = taught(CPU, (1, 8), sigma=0.1)
    again = OnlineCosts()
    again.load_state_dict(json.loads(json.dumps(costs.state_dict())))
    for size, depth in ((1, 0), (8, 4), (3, 1)):
        assert predicted(again, shape(size, depth)) == pytest.approx(predicted(costs, shape(size, depth)), rel=1e-6)
    assert again.snapshot().is_measured(8, 2)


@pytest.mark.parametrize("seconds", [(0.1, 0.0), (-1.0, 0.1), (0.1, math.nan), (math.inf, 0.1)])
def test_impossible_seconds_are_refused(seconds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="a round cannot take"):
        OnlineCosts().observe(shape(1, 1), *seconds)


@given(st.integers(0, 10**6), st.integers(1, 9), st.booleans())
def test_non_negative_least_squares_is_scipys(seed: int, size: int, collinear: bool) -> None:
    noise = np.random.default_rng(seed)
    matrix = noise.random((24, size))
    if collinear and size > 1:
        matrix[:, 1] = matrix[:, 0] + 1e-3 * noise.random(24)
    wanted = matrix @ np.maximum(noise.standard_normal(size), 0.0) + 0.1 * noise.standard_normal(24)
    found = non_negative(matrix.T @ matrix, matrix.T @ wanted)
    assert (found >= 0).all()
    assert np.linalg.norm(matrix @ found - wanted) == pytest.approx(nnls(matrix, wanted)[1], rel=1e-6)
