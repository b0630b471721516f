"""Proof 4: whole sequences are the same, token by token, with and without speculation."""

from __future__ import annotations

import pytest
import torch
from exactness.backends import TRITON, Backend
from exactness.cases import Case
from exactness.decoding import bigram, decode, proposer
from exactness.registry import GREEDY, SEEDED

from rollout_spec.tree import Draw
from rollout_spec.verify import Scheme, VerifyFn
from rollout_spec.verify import verify as readable_verify

SEEDS = [3, 1 << 40, 77, 5, 6, 123456789, 0, 9]
NUM_TOKENS = 40


@pytest.mark.parametrize(("backend", "scheme", "case"), SEEDED.parameters())
def test_seeded_sampling_is_unchanged_by_speculation(verify: VerifyFn, backend: Backend, scheme: Scheme, case: Case) -> None:
    # Triton's interpreter takes some 50 ms a request and round.
    seeds, num_tokens = (SEEDS[:2], 12) if backend is TRITON else (SEEDS, NUM_TOKENS)
    target, draft = bigram(case.vocab_size, 1), bigram(case.vocab_size, 1, temperature=1.3)
    plain, plain_rounds = decode(verify, scheme, target, seeds, num_tokens, None)
    drafted, rounds = decode(verify, scheme, target, seeds, num_tokens, proposer(draft, case.widths, case.draw))
    assert drafted == plain
    assert rounds < plain_rounds  # drafts were accepted, so equality is not that of two plain runs
    one_by_one = [decode(verify, scheme, target, [seed], num_tokens, None)[0][0] for seed in seeds]
    assert one_by_one == plain  # nor does it depend on the neighbours


def test_useless_drafts_do_not_change_gumbel_decoding() -> None:
    target, unrelated = bigram(48, 1), bigram(48, 2)
    plain, _ = decode(readable_verify, Scheme.GUMBEL, target, SEEDS, NUM_TOKENS, None)
    for draw in Draw:
        drafted, _ = decode(readable_verify, Scheme.GUMBEL, target, SEEDS, NUM_TOKENS, proposer(unrelated, (2, 1), draw))
        assert drafted == plain


@pytest.mark.parametrize(("backend", "scheme", "case"), GREEDY.parameters())
def test_greedy_decoding_is_unchanged_by_speculation(verify: VerifyFn, backend: Backend, scheme: Scheme, case: Case) -> None:
    target, draft = bigram(case.vocab_size, 1, temperature=0), bigram(case.vocab_size, 1, temperature=0.5)
    expected: list[int] = [0]
    while len(expected) <= NUM_TOKENS:
        expected.append(int(target[expected[-1]].argmax()))
    drafted, rounds = decode(verify, scheme, target, SEEDS[:3], NUM_TOKENS, proposer(draft, case.widths, case.draw))
    assert drafted == [expected[1:]] * 3
    assert rounds < NUM_TOKENS


def test_seeds_matter() -> None:
    target = bigram(48, 1)
    tokens, _ = decode(readable_verify, Scheme.GUMBEL, target, [1, 2], NUM_TOKENS, None)
    assert tokens[0] != tokens[1]
    assert torch.tensor(tokens).unique().numel() > 8
