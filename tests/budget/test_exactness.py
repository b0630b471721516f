"""The law of what is emitted under a budget that learns, and under one that looks at the drafted token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from rollout_spec.controllers import EntropyBudget, ThroughputBudget
from rollout_spec.cost import RoundShape
from rollout_spec.pilot import BudgetPilot, RoundReport, outcome_of
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec.verify import DenseNoise, DenseTarget, Scheme, verify

TARGET, DRAFT = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
BIASED = torch.tensor([0.12, 0.72, 0.16], dtype=torch.float64)
BATCH, KEPT = 64, 160  # requests, and tokens of each that are counted: of more rounds than any needs


def emitted(lengths_of: Callable[[Tensor], Tensor], after: Callable[[DraftTree, Tensor, Verdict], None], scheme: Scheme) -> Tensor:
    """[3] counts of the first KEPT tokens of every request. lengths_of is shown the drafts [B, 2], of which only a wrong rule makes use."""
    generator = torch.Generator().manual_seed(5)
    texts: list[list[int]] = [[] for _ in range(BATCH)]
    while min(map(len, texts)) < KEPT:
        drafted = torch.multinomial(DRAFT.expand(BATCH, -1), 2, replacement=True, generator=generator)
        lengths = lengths_of(drafted)
        tree = DraftTree.chains(drafted, lengths, Draw.SAMPLED, draft_probs=DRAFT.expand(BATCH, 2, 3).contiguous())
        noise = DenseNoise(
            accept=torch.rand(BATCH, 2, 1, generator=generator, dtype=torch.float64),
            recover=torch.rand(BATCH, 3, generator=generator, dtype=torch.float64),
        )
        verdict = verify(tree, DenseTarget(TARGET.expand(BATCH, 3, 3).contiguous()), noise, scheme)
        for text, row in zip(texts, verdict.emitted(tree).tolist(), strict=True):
            text.extend(token for token in row if token >= 0)
        after(tree, lengths, verdict)
    return torch.bincount(torch.tensor([token for text in texts for token in text[:KEPT]]), minlength=3)


def p_value(counts: Tensor, law: Tensor) -> float:
    return float(chisquare(counts.numpy(), (law / law.sum() * counts.sum()).numpy()).pvalue)


@pytest.mark.parametrize("scheme", [Scheme.REJECTION, Scheme.BLOCK])
@pytest.mark.parametrize("controller", [ThroughputBudget(max_length=2), EntropyBudget(max_length=2, threshold=0.36)], ids=lambda c: c.name)
def test_a_budget_that_learns_from_acceptance_leaves_the_law_alone(controller: ThroughputBudget | EntropyBudget, scheme: Scheme) -> None:
    """Its decisions follow what was accepted of each request: history, which rejection has already paid for."""
    pilot = BudgetPilot(controller)
    ids = tuple(f"request {i}" for i in range(BATCH))
    decided: set[tuple[int, ...]] = set()

    def lengths_of(drafted: Tensor) -> Tensor:
        budget = pilot.decide(ids, torch.full((BATCH,), 1000), torch.full((BATCH,), 50))
        decided.add(tuple(budget.draft_lengths.tolist()))
        return budget.draft_lengths

    def after(tree: DraftTree, lengths: Tensor, verdict: Verdict) -> None:
        # What happened, not how likely it was: decisions then hang on the very coins that verification threw.
        num_accepted, depths = verdict.num_accepted, torch.arange(verdict.accept_probs.shape[1])
        accept_probs = torch.where(verdict.accept_probs.isnan(), torch.nan, (depths < num_accepted[:, None]).double())
        depth, drafted = int(lengths.max()), int(lengths.sum())
        outcome = outcome_of(
            ids,
            asked=lengths,
            accept_probs=accept_probs,
            num_accepted=num_accepted,
            node_depths=torch.arange(1, tree.max_nodes + 1) * tree.valid(),
            entropies=torch.where(torch.arange(accept_probs.shape[1] + 1) <= num_accepted[:, None], 0.9, torch.nan),
        )
        shape = RoundShape(num_requests=BATCH, num_rows=BATCH + drafted, depth=depth, context=50 * BATCH, num_new_states=0)
        pilot.observe(RoundReport(outcome=outcome, shape=shape, draft_s=1e-4 * drafted, rest_s=0.02 + 1e-4 * drafted))

    assert p_value(emitted(lengths_of, after, scheme), TARGET) > 1e-4
    assert len(decided) > 1


def test_a_budget_that_looks_at_the_drafted_token_is_biased_as_computed() -> None:
    """Verified only where q(x) >= .25 (docs/exactness.md): a round's first token then has the law [.12, .72, .16]."""
    firsts: list[Tensor] = []

    def lengths_of(drafted: Tensor) -> Tensor:
        return (DRAFT[drafted[:, 0]] >= 0.25).long()

    def after(tree: DraftTree, lengths: Tensor, verdict: Verdict) -> None:
        firsts.append(verdict.emitted(tree)[:, 0])

    emitted(lengths_of, after, Scheme.REJECTION)
    counts = torch.bincount(torch.cat(firsts), minlength=3)
    assert p_value(counts, BIASED) > 1e-4
    assert p_value(counts, TARGET) < 1e-12
