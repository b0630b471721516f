"""Length objectives are the accepted lengths: exhaustive enumeration on a tiny vocabulary, values and gradients.

The truth is taken from the verifiers' rules (ALGORITHMS 1) over all draft chains; the objectives from all target rollouts.

Shape legend: V vocabulary, G draft length, P prefixes shorter than G, S sequences of length G.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rollout_spec_mtp.losses import DraftBatch, Extra, SlotStats, chunked_stats, objectives, reference

VOCAB, LENGTH = 3, 3
SEQUENCES = list(itertools.product(range(VOCAB), repeat=LENGTH))
PREFIXES = [prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCAB), repeat=length)]
ROW = {prefix: row for row, prefix in enumerate(PREFIXES)}
REDUCED_IDS = torch.tensor([2, 0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """A target and a drafter as tables of logits, one row for each prefix."""

    student_logits: Tensor  # [P, V or Vd] leaf
    target_logits: Tensor  # [P, V]
    draft_token_ids: Tensor | None

    def draft_probs(self) -> Tensor:
        """[P, V], zeros outside the draft vocabulary."""
        probs = self.student_logits.softmax(-1)
        if self.draft_token_ids is None:
            return probs
        return torch.zeros(len(PREFIXES), VOCAB, dtype=probs.dtype).index_copy(1, self.draft_token_ids, probs)

    def target_probs(self) -> Tensor:
        return self.target_logits.softmax(-1)


def make_tables(seed: int, *, reduced: bool = False) -> Tables:
    noise = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(len(PREFIXES), VOCAB, generator=noise, dtype=torch.float64)
    student = target + 1.2 * torch.randn(len(PREFIXES), VOCAB, generator=noise, dtype=torch.float64)
    if reduced:
        student = student[:, REDUCED_IDS]
        target[:, 1] -= 1.0  # a vocabulary that lacks likely tokens over-drafts all others, and nothing depends on the drafter
    ids = REDUCED_IDS if reduced else None
    return Tables(student_logits=student.clone().requires_grad_(), target_logits=target, draft_token_ids=ids)


def path_probs(probs: Tensor, sequence: tuple[int, ...]) -> list[Tensor]:
    return [probs[ROW[sequence[:i]], token] for i, token in enumerate(sequence)]


def drafted(tables: Tables) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Every chain the drafter can make with its probability."""
    for sequence in SEQUENCES:
        probability = torch.stack(path_probs(tables.draft_probs(), sequence)).prod()
        if probability > 0:
            yield probability, sequence


def true_rejection_length(tables: Tables) -> Tensor:
    """E[accepted] when x_i is accepted with probability min(1, p/q) and the first rejection ends the round."""
    total = torch.zeros((), dtype=torch.float64)
    for probability, sequence in drafted(tables):
        reach = torch.ones((), dtype=torch.float64)
        for p, q in zip(path_probs(tables.target_probs(), sequence), path_probs(tables.draft_probs(), sequence), strict=True):
            reach = reach * torch.clamp(p / q, max=1.0)
            total = total + probability * reach
    return total


def true_block_length(tables: Tables) -> Tensor:
    """E[tau], tau = max{i : u_i < h_i} with Sun 2024's h_i."""
    q_table, p_table = tables.draft_probs(), tables.target_probs()
    total = torch.zeros((), dtype=torch.float64)
    for probability, sequence in drafted(tables):
        w = torch.ones((), dtype=torch.float64)
        h = []
        for i, (p, q) in enumerate(zip(path_probs(p_table, sequence), path_probs(q_table, sequence), strict=True), start=1):
            w = torch.clamp(w * p / q, max=1.0)
            if i == LENGTH:
                h.append(w)
                continue
            row = ROW[sequence[:i]]
            z = torch.clamp(w * p_table[row] - q_table[row], min=0.0).sum()
            h.append(z / (z + 1 - w) if z + 1 - w > 0 else torch.ones((), dtype=torch.float64))
        later_fail = torch.ones((), dtype=torch.float64)
        for i in reversed(range(LENGTH)):
            total = total + probability * later_fail * h[i] * (i + 1)
            later_fail = later_fail * (1 - h[i])
    return total


def rollout_stats(tables: Tables) -> tuple[Tensor, SlotStats]:
    """Probability of every target rollout [S] and the fused statistics at its slots; heads are identities."""
    rows = torch.tensor([[ROW[sequence[:i]] for i in range(LENGTH)] for sequence in SEQUENCES])
    probabilities = torch.stack([torch.stack(path_probs(tables.target_probs(), sequence)).prod() for sequence in SEQUENCES])
    batch = DraftBatch(
        student_hidden=tables.student_logits[rows],
        target_hidden=tables.target_logits,
        target_rows=rows,
        token_ids=torch.tensor(SEQUENCES),
        valid=torch.ones(len(SEQUENCES), LENGTH, dtype=torch.bool),
        student_head=torch.eye(tables.student_logits.shape[1], dtype=torch.float64),
        target_head=torch.eye(VOCAB, dtype=torch.float64),
        draft_token_ids=tables.draft_token_ids,
    )
    return probabilities, chunked_stats(batch, frozenset({Extra.BLOCK_OVERLAP}))


def oracle_batch(tables: Tables) -> reference.LogitBatch:
    rows = torch.tensor([[ROW[sequence[:i]] for i in range(LENGTH)] for sequence in SEQUENCES])
    return reference.LogitBatch(
        student_logits=tables.student_logits[rows],
        target_logits=tables.target_logits[rows],
        token_ids=torch.tensor(SEQUENCES),
        valid=torch.ones(len(SEQUENCES), LENGTH, dtype=torch.bool),
        draft_token_ids=tables.draft_token_ids,
    )


Length = Callable[[Tables], Tensor]
Estimator = Callable[[SlotStats], Tensor]
Oracle = Callable[[reference.LogitBatch], Tensor]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    ("truth", "estimator", "oracle"),
    [
        (true_rejection_length, objectives.rejection_length, reference.rejection_length_per_anchor),
        (true_block_length, objectives.block_length, reference.block_length_per_anchor),
    ],
    ids=["rejection", "block"],
)
def test_expectation_over_rollouts_is_the_accepted_length(
    truth: Length, estimator: Estimator, oracle: Oracle, seed: int, reduced: bool
) -> None:
    tables = make_tables(seed, reduced=reduced)
    expected = truth(tables)
    (expected_grad,) = torch.autograd.grad(expected, tables.student_logits)
    assert expected_grad.abs().max() > 1e-3
    probabilities, stats = rollout_stats(tables)
    for value in ((probabilities * estimator(stats)).sum(), (probabilities * oracle(oracle_batch(tables))).sum()):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-13)
        (grad,) = torch.autograd.grad(value, tables.student_logits)
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_block_verification_accepts_more_and_e2e_is_another_number(seed: int) -> None:
    """What the docstrings claim: block >= rejection, and the product of alphas along a rollout is biased for both."""
    tables = make_tables(seed)
    probabilities, stats = rollout_stats(tables)
    rejection, block = true_rejection_length(tables), true_block_length(tables)
    assert block > rejection + 1e-3
    e2e = (probabilities * objectives.e2e_length(stats)).sum()
    assert (e2e - rejection).abs() > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_last_step_over_the_vocabulary_lowers_the_variance_of_every_term(seed: int) -> None:
    """Term j sampled (min(1, R_1..R_j)) against term j with its last step summed out: same mean, no larger variance."""
    tables = make_tables(seed)
    probabilities, stats = rollout_stats(tables)
    log_ratio = (stats.draft_logprobs - stats.target_logprobs).detach()
    sampled = torch.cat([torch.zeros(len(SEQUENCES), 1, dtype=torch.float64), log_ratio.cumsum(1)], dim=1).cummin(1).values[:, 1:].exp()
    shorter = [objectives.block_length(_first_slots(stats, j)).detach() for j in range(LENGTH + 1)]
    marginal = torch.stack([shorter[j + 1] - shorter[j] for j in range(LENGTH)], dim=1)
    weights = probabilities[:, None]
    means = (weights * sampled).sum(0)
    torch.testing.assert_close(means, (weights * marginal).sum(0))
    variances = [(weights * (term - means) ** 2).sum(0) for term in (marginal, sampled)]
    assert (variances[0] < variances[1]).all()


def _first_slots(stats: SlotStats, num_slots: int) -> SlotStats:
    """The same statistics with only the first slots valid."""
    valid = stats.valid & (torch.arange(LENGTH) < num_slots)
    return SlotStats(
        valid=valid,
        overlap=stats.overlap,
        draft_logprobs=stats.draft_logprobs,
        target_logprobs=stats.target_logprobs,
        draft_correct=stats.draft_correct,
        block_overlap=stats.block_overlap,
    )
