"""Acceptance estimators: against the exact laws of the oracle, and the two ways of averaging told apart."""

from __future__ import annotations

import math

import pytest
import torch
from exactness.models import Drafter, random_model

from rollout_spec.acceptance import (
    EntropyLaw,
    acceptance_by_depth,
    acceptance_length_per_request,
    acceptance_length_pooled,
    acceptance_probability,
    acceptance_rate_per_request,
    acceptance_rate_pooled,
    expected_length_block,
    expected_length_exact_match,
    expected_length_rejection,
    fit_entropy_law,
)
from rollout_spec.reference import ORACLES, ReferenceTree, expected_accepted
from rollout_spec.tree import DraftTree, Draw

TARGET, DRAFT = random_model(3, 4, 1), random_model(3, 4, 2)


def _oracle_mean(scheme: str, drafter: Drafter) -> float:
    tree, weights = drafter.every_draft()
    return sum(
        float(weight) * expected_accepted(ORACLES[scheme], ReferenceTree.of(tree, row, 3), TARGET.law) for row, weight in enumerate(weights)
    )


def test_block_weights_average_to_the_expected_length() -> None:
    drafter = Drafter(DRAFT, (1, 1, 1), Draw.SAMPLED)
    tree, weights = drafter.every_draft()
    assert tree.draft_probs is not None
    rows = drafter.target_rows(TARGET, tree)[:, :-1]
    tokens = tree.token_ids[:, :, None]
    lengths = expected_length_block(rows.gather(2, tokens)[:, :, 0], tree.draft_probs.gather(2, tokens)[:, :, 0])
    block, rejection = _oracle_mean("block", drafter), _oracle_mean("rejection", drafter)
    assert float((weights * lengths).sum()) == pytest.approx(block, abs=1e-12)
    assert block > rejection  # never fewer than token by token


def test_rejection_length_is_the_oracles_where_alpha_does_not_depend_on_the_prefix() -> None:
    from exactness.models import TableModel

    laws = [torch.tensor(law, dtype=torch.float64) for law in ([0.2, 0.5, 0.3], [0.6, 0.1, 0.3])]
    target, draft = (TableModel(tuple(law.expand(3**depth, -1) for depth in range(4))) for law in laws)
    drafter = Drafter(draft, (1, 1, 1), Draw.SAMPLED)
    tree, weights = drafter.every_draft()
    mean = sum(
        float(weight) * expected_accepted(ORACLES["rejection"], ReferenceTree.of(tree, row, 3), target.law)
        for row, weight in enumerate(weights)
    )
    alpha = acceptance_probability(*laws)
    assert float(alpha) == pytest.approx(0.6)
    assert float(expected_length_rejection(alpha.repeat(3))) == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2), (3, 1)])
def test_exact_match_length_is_the_oracles(widths: tuple[int, ...]) -> None:
    drafter = Drafter(DRAFT, widths, Draw.DETERMINISTIC)
    tree, _ = drafter.every_draft()
    length = expected_length_exact_match(tree, drafter.target_rows(TARGET, tree))
    assert float(length[0]) == pytest.approx(_oracle_mean("exact_match", drafter), abs=1e-12)


def test_exact_match_length_ignores_padding_and_impossible_tokens() -> None:
    tree = DraftTree.chains(torch.tensor([[0, 1, 2], [0, 9, 9]]), torch.tensor([3, 1]), Draw.DETERMINISTIC)
    rows = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.9, 0.1, 0.0], [1.0, 0.0, 0.0]]).expand(2, -1, -1)
    torch.testing.assert_close(expected_length_exact_match(tree, rows), torch.tensor([1.0, 0.5]))
    assert expected_length_exact_match(DraftTree.empty(2), rows[:, :1]).tolist() == [0.0, 0.0]


def test_pooled_and_per_request_means_are_different_numbers() -> None:
    accepted, rounds = [30, 0], [10, 1000]
    assert round(acceptance_length_pooled(accepted, rounds), 2) == 1.03
    assert acceptance_length_per_request(accepted, rounds) == 2.5
    assert acceptance_rate_pooled([30, 0], [40, 960]) == pytest.approx(0.03)
    assert acceptance_rate_per_request([30, 0], [40, 960]) == pytest.approx(0.375)


def test_nothing_to_average_is_nan_and_idle_requests_do_not_count() -> None:
    assert math.isnan(acceptance_length_pooled([], []))
    assert math.isnan(acceptance_length_per_request([0], [0]))
    assert math.isnan(acceptance_rate_pooled([0], [0]))
    assert acceptance_length_per_request([3, 0], [3, 0]) == 2.0
    assert acceptance_rate_per_request([1, 0], [4, 0]) == 0.25


def test_by_depth() -> None:
    rates = acceptance_by_depth([8, 4, 0], [4, 1, 0])
    assert rates[:2] == [0.5, 0.25]
    assert math.isnan(rates[2])


def test_entropy_law_is_recovered_from_weighted_points() -> None:
    entropies = torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0, math.nan])
    accept_probs = 0.9 - 0.2 * entropies
    accept_probs[4] = 1.0  # an outlier without weight
    law = fit_entropy_law(entropies, accept_probs, torch.tensor([1.0, 2.0, 1.0, 4.0, 0.0, 7.0]))
    assert (law.intercept, law.slope) == (pytest.approx(0.9), pytest.approx(-0.2))
    torch.testing.assert_close(law.predict(torch.tensor([0.5, 10.0])), torch.tensor([0.8, 0.0]))
    # Twice the weight is the same as the point twice.
    x, y = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.8, 0.5, 0.4])
    once = fit_entropy_law(x, y, torch.tensor([1.0, 2.0, 1.0]))
    twice = fit_entropy_law(torch.cat([x, x[1:2]]), torch.cat([y, y[1:2]]))
    assert once.slope == pytest.approx(twice.slope)
    assert once.intercept == pytest.approx(twice.intercept)


def test_entropy_law_of_one_entropy_is_flat_and_of_nothing_is_refused() -> None:
    assert fit_entropy_law(torch.full((5,), 0.1), torch.linspace(0, 1, 5)) == EntropyLaw(intercept=0.5, slope=0.0)
    with pytest.raises(ValueError, match="no pair"):
        fit_entropy_law(torch.tensor([math.nan]), torch.tensor([0.5]))
