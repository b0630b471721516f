"""Proof 2, enumeration: every draft, every branch of the noise, law of the output within rounding of the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exactness.backends import READABLE, Backend
from exactness.cases import ROUNDS, Case, with_reduced_vocabulary
from exactness.laws import law_error, many_rounds_law, oracle_error, round_cells
from exactness.models import Drafter
from exactness.registry import BRANCHES, REDUCED, SEVERAL_ROUNDS

from rollout_spec.verify import EXACT_ON, Scheme, VerifyFn


@pytest.mark.parametrize(("backend", "scheme", "case"), BRANCHES.parameters())
def test_output_law_is_the_targets(verify: VerifyFn, backend: Backend, scheme: Scheme, case: Case) -> None:
    drafter, target = case.drafter(), case.target()
    cells, weights = round_cells(verify, scheme, drafter, target, backend.guide)
    assert float((weights.sum() - 1).abs()) < READABLE.tolerance
    assert law_error(cells, weights, target) < backend.tolerance
    # On each single draft too, output by output, against an oracle that shares no line with verify.
    assert oracle_error(cells, scheme, drafter, target) < backend.tolerance


@pytest.mark.parametrize(("backend", "scheme", "case"), REDUCED.parameters())
def test_reduced_draft_vocabulary_changes_nothing(verify: VerifyFn, backend: Backend, scheme: Scheme, case: Case) -> None:
    guide = backend.guide and replace(backend.guide, verify=with_reduced_vocabulary(backend.guide.verify))
    cells, weights = round_cells(with_reduced_vocabulary(verify), scheme, case.drafter(), case.target(), guide)
    assert law_error(cells, weights, case.target()) < backend.tolerance


@pytest.mark.parametrize(("backend", "scheme", "case"), SEVERAL_ROUNDS.parameters())
def test_law_over_several_rounds(verify: VerifyFn, backend: Backend, scheme: Scheme, case: Case) -> None:
    length, reach = 3, 3 + case.length
    draft, target = case.draft(reach), case.target(reach)
    law = many_rounds_law(verify, scheme, lambda model: Drafter(model, case.widths, case.draw), draft, target, length, backend.guide)
    torch.testing.assert_close(law, target.joint(length), rtol=0, atol=backend.tolerance)


def test_every_scheme_has_a_case_of_every_draw_it_is_exact_on() -> None:
    for scheme, draws in EXACT_ON.items():
        assert {case.draw for one, case in BRANCHES.cases if one is scheme} == draws
        assert scheme in ROUNDS
