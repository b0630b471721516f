"""The slope of the entropy law, its error, and what an update of weights does to both."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rollout_spec.entropy_slope import EntropySlope

NOISE = 0.2  # variance of an observation


def slope(**given: float) -> EntropySlope:
    return EntropySlope(**({"prior": -0.04, "weight": 30.0, "memory": 3000.0} | given))


def shown(of: EntropySlope, noise: np.random.Generator, *, true: float, rounds: int, error: float = 0.0) -> EntropySlope:
    """Rounds of 8 observations at entropies from 1 to 5 nats, which are told with this standard error."""
    for _ in range(rounds):
        entropy = noise.uniform(1.0, 5.0)
        accept = 8 * (0.8 + true * entropy) + np.sqrt(8 * NOISE) * noise.standard_normal()
        of.observe(8.0, accept, entropy + error * noise.standard_normal(), error**2)
    return of


def test_its_error_is_the_scatter_of_what_is_found() -> None:
    found = [shown(slope(weight=1e-3), np.random.default_rng(seed), true=-0.1, rounds=60) for seed in range(300)]
    values = np.array([each.value for each in found])
    assert values.mean() == pytest.approx(-0.1, abs=0.005)
    assert found[0].error(NOISE) == pytest.approx(values.std(), rel=0.2)


def test_errors_of_the_entropy_do_not_flatten_it() -> None:
    values = [shown(slope(weight=1e-3), np.random.default_rng(seed), true=-0.1, rounds=200, error=1.0).value for seed in range(40)]
    assert -0.1 < np.mean(values) < -0.085  # not -.057, as the plain regression has it


def test_an_entropy_that_hardly_moves_teaches_nothing() -> None:
    """What is told of it is error then; acceptance that scatters beside it must not become a law."""
    values = []
    for seed in range(100):
        noise, found = np.random.default_rng(seed), slope()
        for _ in range(150):
            found.observe(8.0, 8 * 0.6 + np.sqrt(8 * NOISE) * noise.standard_normal(), 1.0 + 0.4 * noise.standard_normal(), 0.16)
        values.append(found.value)
    assert np.std(values) < 1.2 * found.error(NOISE)
    assert np.quantile(values, 0.02) > -0.25  # -.4 where the prior counts no more than it did


def test_nothing_seen_is_the_prior_and_its_doubt() -> None:
    assert slope().value == -0.04
    assert slope().error(NOISE) == pytest.approx(np.sqrt(NOISE / 30.0))


def test_a_span_counts_less_after_weights_changed_and_what_lies_between_spans_teaches_nothing() -> None:
    noise = np.random.default_rng(0)
    found = shown(slope(), noise, true=-0.1, rounds=100)
    before, error = found.value, found.error(NOISE)
    found.weights_changed(0.4)
    assert found.error(NOISE) > error
    found.observe(8.0, 0.1, 30.0, 0.0)  # far away and refused: a new span of one round
    assert found.value == pytest.approx(before, abs=0.02)


def test_state_survives_json() -> None:
    found, later = shown(slope(), np.random.default_rng(0), true=-0.1, rounds=20), slope()
    found.weights_changed(0.5)
    shown(found, np.random.default_rng(1), true=-0.1, rounds=20)
    later.load_state_dict(json.loads(json.dumps(found.state_dict())))
    assert (later.value, later.error(NOISE)) == (found.value, found.error(NOISE))
    with pytest.raises(ValueError, match="2 sums"):
        later.load_state_dict({"sums": [0.0, 1.0], "earlier": [0.0, 0.0, 0.0]})
