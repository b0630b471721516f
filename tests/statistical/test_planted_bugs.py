"""The proofs of the other files must fail on wrong code. Each planted bug is named, and each is caught by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from exactness.backends import READABLE, TRITON, Backend
from exactness.cases import Case
from exactness.decoding import bigram, decode, proposer
from exactness.laws import law_error, prefix_law, round_cells
from exactness.models import Drafter, TableModel
from exactness.planted import (
    keyed_by_token,
    lenient,
    lenient_match,
    pruning,
    residual_from_target,
    rounded_target,
    shared_with_acceptance,
    shared_with_recovery,
)
from exactness.registry import (
    DRAFT_KEYED_BY_TOKEN,
    KEYED_BY_TOKEN,
    LENIENT,
    LENIENT_MATCH,
    OTHER_Q,
    PRUNING,
    RESIDUAL,
    ROUNDED,
    SHARED_ACCEPTANCE,
    SHARED_RECOVERY,
)
from exactness.sampling import (
    FALSE_ALARM_RATE,
    NUM_IN_INTERPRETER,
    NUM_REQUESTS,
    MakeNoise,
    chi_square,
    counter_noise,
    sample_prefixes,
)

from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verify import Scheme, VerifyFn

CAUGHT = 1e-4  # a law off by this much fails the enumeration by eight orders of magnitude, in float32 by two


def _case(scheme: Scheme, backend: Backend = READABLE) -> Case:
    """A depth less for Triton's interpreter."""
    draw, widths = {
        Scheme.REJECTION: (Draw.SAMPLED, (1, 1)),
        Scheme.BLOCK: (Draw.SAMPLED, (1, 1)),
        Scheme.EXACT_MATCH: (Draw.DETERMINISTIC, (2, 1)),
        Scheme.GUMBEL: (Draw.DETERMINISTIC, (2, 1)),
        Scheme.REJECTION_WALK: (Draw.WITHOUT_REPLACEMENT, (2, 1)),
        Scheme.TRAVERSAL: (Draw.WITHOUT_REPLACEMENT, (2, 1)),
    }[scheme]
    return Case(draw, widths[:1] if backend is TRITON else widths, 3)


def _enumerated_error(plant: Callable[[VerifyFn], VerifyFn], verify: VerifyFn, backend: Backend, scheme: Scheme) -> float:
    case = _case(scheme, backend)
    guide = backend.guide and replace(backend.guide, verify=plant(backend.guide.verify))
    cells, weights = round_cells(plant(verify), scheme, case.drafter(), case.target(), guide)
    return law_error(cells, weights, case.target())


def _sampled_p_value(
    verify: VerifyFn,
    backend: Backend,
    scheme: Scheme,
    noise: MakeNoise = counter_noise,
    num_requests: int = 1 << 15,
    draft_uniforms: torch.Tensor | None = None,
) -> float:
    """The chi-square proof's p-value; most bugs need a quarter of its requests, shared noise far fewer."""
    case = _case(scheme, backend)
    length = case.length
    draft, target = case.draft(2 * length), case.target(2 * length)
    if backend is TRITON:
        num_requests = 2 * NUM_IN_INTERPRETER[length]
    codes = sample_prefixes(
        verify, scheme, lambda model: Drafter(model, case.widths, case.draw), draft, target, length, noise, num_requests, draft_uniforms
    )
    return chi_square(codes, target.joint(length))


def _decodes_the_same(verify: VerifyFn, buggy: VerifyFn, scheme: Scheme) -> bool:
    target, seeds = bigram(48, 1), list(range(16))
    propose = proposer(bigram(48, 1, temperature=1.3), (2, 1), Draw.DETERMINISTIC)
    return decode(buggy, scheme, target, seeds, 48, propose)[0] == decode(verify, scheme, target, seeds, 48, None)[0]


@pytest.mark.parametrize(("backend", "scheme", "case"), LENIENT.parameters())
def test_lenient_acceptance(verify: VerifyFn, backend: Backend, scheme: Scheme, case: str) -> None:
    if case == "enumeration":
        assert _enumerated_error(lenient, verify, backend, scheme) > CAUGHT
    else:
        assert _sampled_p_value(lenient(verify), backend, scheme, num_requests=NUM_REQUESTS) < FALSE_ALARM_RATE


@pytest.mark.parametrize(("backend", "scheme", "case"), LENIENT_MATCH.parameters())
def test_lenient_match(verify: VerifyFn, backend: Backend, scheme: Scheme, case: str) -> None:
    if case == "enumeration":
        assert _enumerated_error(lenient_match, verify, backend, scheme) > CAUGHT
    else:
        assert not _decodes_the_same(verify, lenient_match(verify), scheme)


@pytest.mark.parametrize(("backend", "scheme", "case"), RESIDUAL.parameters())
def test_residual_from_the_target(verify: VerifyFn, backend: Backend, scheme: Scheme, case: str) -> None:
    assert _enumerated_error(residual_from_target, verify, backend, scheme) > CAUGHT


@pytest.mark.parametrize(("backend", "scheme", "case"), SHARED_RECOVERY.parameters())
def test_draft_noise_shared_with_recovery(verify: VerifyFn, backend: Backend, scheme: Scheme, case: str) -> None:
    assert _sampled_p_value(verify, backend, scheme, shared_with_recovery) < FALSE_ALARM_RATE


@pytest.mark.parametrize(("backend", "scheme", "case"), SHARED_ACCEPTANCE.parameters())
def test_draft_noise_shared_with_acceptance(verify: VerifyFn, backend: Backend, scheme: Scheme, case: str) -> None:
    assert _sampled_p_value(verify, backend, scheme, shared_with_acceptance) < FALSE_ALARM_RATE


@pytest.mark.parametrize(("backend", "scheme", "case"), KEYED_BY_TOKEN.parameters())
def test_acceptance_noise_keyed_by_token(verify: VerifyFn, backend: Backend, scheme: Scheme, case: str) -> None:
    assert _sampled_p_value(verify, backend, scheme, keyed_by_token, NUM_REQUESTS) < FALSE_ALARM_RATE


@pytest.mark.parametrize(("backend", "scheme", "case"), DRAFT_KEYED_BY_TOKEN.parameters())
def test_draft_noise_keyed_by_token(verify: VerifyFn, backend: Backend, scheme: Scheme, case: str) -> None:
    """A drafter that draws the token of one position from the same uniform in every round that drafts it."""
    by_position = torch.rand(NUM_REQUESTS, 2 * _case(scheme).length - 1, generator=torch.Generator().manual_seed(21), dtype=torch.float64)
    assert _sampled_p_value(verify, backend, scheme, num_requests=NUM_REQUESTS, draft_uniforms=by_position) < FALSE_ALARM_RATE


@pytest.mark.parametrize(("backend", "scheme", "case"), ROUNDED.parameters())
def test_target_rounded_to_two_decimals(verify: VerifyFn, backend: Backend, scheme: Scheme, case: str) -> None:
    if case == "enumeration":
        assert _enumerated_error(rounded_target, verify, backend, scheme) > CAUGHT
    else:
        assert not _decodes_the_same(verify, rounded_target(verify), scheme)


def _counter_example() -> tuple[TableModel, TableModel]:
    """Target and drafter of the counter-example, the same after every token."""
    target, draft = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    return tuple(TableModel(tuple(law.expand(3**depth, -1) for depth in range(2))) for law in (target, draft))


@pytest.mark.parametrize(("backend", "scheme", "case"), PRUNING.parameters())
def test_sampled_token_pruning(verify: VerifyFn, backend: Backend, scheme: Scheme, case: str) -> None:
    """Drafts of one token, verified only if q(x) >= .25: the output is [.12, .72, .16] instead of [.1, .6, .3]."""
    target, draft = _counter_example()
    drafter = pruning(lambda model: Drafter(model, (1,), Draw.SAMPLED))(draft)
    cells, weights = round_cells(verify, scheme, drafter, target, backend.guide)
    law = prefix_law(cells, weights, target, 1)
    torch.testing.assert_close(law, torch.tensor([0.12, 0.72, 0.16], dtype=torch.float64), rtol=0, atol=backend.tolerance)
    assert law_error(cells, weights, target) > CAUGHT


@pytest.mark.parametrize("scheme", [Scheme.EXACT_MATCH, Scheme.GUMBEL])
def test_pruning_is_harmless_where_the_target_draws_alone(scheme: Scheme) -> None:
    target, draft = _counter_example()
    cells, weights = round_cells(READABLE.verify, scheme, pruning(lambda model: Drafter(model, (1,), Draw.SAMPLED))(draft), target)
    assert law_error(cells, weights, target) < READABLE.tolerance


class _OtherPrecision(Drafter):
    """Draws from bfloat16 numbers; the tree carries what was drawn from, or the float64 numbers they came from."""

    def __init__(self, drafter: Drafter, *, honest: bool) -> None:
        rounded = [table.bfloat16().double() for table in drafter.model.tables]
        super().__init__(TableModel(tuple(table / table.sum(-1, keepdim=True) for table in rounded)), (), drafter.draw)
        self.parents, self.honest, self.wide = drafter.parents, honest, drafter

    def every_draft(self) -> tuple[DraftTree, torch.Tensor]:
        tree, weights = super().every_draft()
        if self.honest:
            return tree, weights
        rows = [self.wide._row(tree.token_ids, node) for node in range(len(self.parents))]
        return replace(tree, draft_probs=torch.stack(rows, dim=1)), weights


@pytest.mark.parametrize(("backend", "scheme", "case"), OTHER_Q.parameters())
def test_ratio_with_other_numbers_than_were_sampled_from(verify: VerifyFn, backend: Backend, scheme: Scheme, case: str) -> None:
    one = _case(scheme, backend)
    for honest in (True, False):
        cells, weights = round_cells(verify, scheme, _OtherPrecision(one.drafter(), honest=honest), one.target(), backend.guide)
        error = law_error(cells, weights, one.target())
        assert error < backend.tolerance if honest else error > CAUGHT


def test_sequences_without_a_bug_are_the_same() -> None:
    assert _decodes_the_same(READABLE.verify, READABLE.verify, Scheme.EXACT_MATCH)
    assert _decodes_the_same(READABLE.verify, READABLE.verify, Scheme.GUMBEL)
