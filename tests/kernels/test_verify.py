"""The fused verification of chains against the readable one: decisions, numbers, noise, refusals and what is left to the readable one.

Trees are in test_verify_trees.py.

Its laws are proved by tests/statistical, where it is a backend. Shape legend: B requests, N nodes, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rollout_spec.noise import uniforms
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec.verify import AllRows, CounterNoise, DenseNoise, DenseTarget, Scheme, TokenScores
from rollout_spec.verify import verify as readable_verify
from rollout_spec_kernels.cpu import CpuOps
from rollout_spec_kernels.verify import verify, verify_fused

RATIO = (Scheme.REJECTION, Scheme.BLOCK)
CHAINS = (*RATIO, Scheme.EXACT_MATCH)
# Uniforms this close to a threshold may be decided either way: the probabilities are float32, and so is what lies between them.
SLACK = 1e-5


@pytest.fixture(autouse=True)
def _needs_kernels(ops: CpuOps) -> None:
    """Skip where they cannot be built."""


@dataclass(frozen=True)
class Round:
    tree: DraftTree
    target_probs: Tensor  # [B, N + 1, V] float32
    noise: DenseNoise

    def wide(self, accept_shift: float = 0.0, recover_shift: float = 0.0) -> tuple[DraftTree, DenseTarget, DenseNoise]:
        """The same numbers in float64, with every uniform moved."""
        tree = self.tree if self.tree.draft_probs is None else replace(self.tree, draft_probs=self.tree.draft_probs.double())
        accept, recover = self.noise._accept, self.noise._recover
        assert accept is not None
        assert recover is not None
        shifted = [(uniform + shift).clamp(0, 1 - 2**-53) for uniform, shift in ((accept, accept_shift), (recover, recover_shift))]
        return tree, DenseTarget(self.target_probs.double()), DenseNoise(accept=shifted[0], recover=shifted[1])


def _round(batch: int, vocab_size: int, draft_vocab: int | None, *, nodes: int = 3, seed: int = 1, closeness: float = 1.0) -> Round:
    """Ragged chains drawn from q; impossible tokens in p and q; the reduced vocabulary lies in no order."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, nodes + 1, vocab_size, generator=generator) * 2
    drafted = logits[:, :nodes] + closeness * torch.randn(batch, nodes, vocab_size, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[..., 0] = 0.0  # no row without a token
    names = None if draft_vocab is None else torch.randperm(vocab_size, generator=generator)[:draft_vocab]
    drafted = drafted if names is None else drafted[..., names]
    drafted[torch.rand(drafted.shape, generator=generator) < 0.1] = -torch.inf
    drafted[..., -1] = 0.0
    draft_probs = drafted.softmax(-1)
    columns = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=generator).view(batch, nodes)
    tree = DraftTree.chains(
        columns if names is None else names[columns], torch.arange(batch) % (nodes + 1), Draw.SAMPLED, draft_probs, names
    )
    noise = DenseNoise(
        accept=torch.rand(batch, nodes, 1, generator=generator, dtype=torch.float64),
        recover=torch.rand(batch, nodes + 1, generator=generator, dtype=torch.float64),
    )
    return Round(tree, logits.softmax(-1), noise)


def _decided(verdict: Verdict) -> list[tuple[int, int, bool]]:
    return list(zip(verdict.num_accepted.tolist(), verdict.next_token_ids.tolist(), verdict.is_bonus.tolist(), strict=True))


def _fused(tree: DraftTree, target: DenseTarget, noise: DenseNoise | CounterNoise, scheme: Scheme) -> Verdict:
    verdict = verify_fused(tree, target, noise, scheme)
    assert verdict is not None, "left to the readable verifier"
    return verdict


@pytest.mark.parametrize("scheme", CHAINS)
@pytest.mark.parametrize("closeness", [1.0, 0.03])
@pytest.mark.parametrize(
    ("vocab_size", "draft_vocab"), [(1, None), (2, 1), (33, None), (257, 40), (4097, 1000), (49152, None), (49152, 8192)]
)
def test_the_same_noise_decides_the_same(scheme: Scheme, vocab_size: int, draft_vocab: int | None, closeness: float) -> None:
    """Every decision is one that float64 makes with uniforms within SLACK, and nearly all are those it makes with the very same ones."""
    batch = 8 if vocab_size > 5000 else 100
    drawn = _round(batch, vocab_size, draft_vocab, closeness=closeness)
    fused = _fused(drawn.tree, DenseTarget(drawn.target_probs), drawn.noise, scheme)
    plain = readable_verify(drawn.tree, DenseTarget(drawn.target_probs), drawn.noise, scheme)
    exact = readable_verify(*drawn.wide(), scheme)
    shifts = itertools.product((-SLACK, 0.0, SLACK), repeat=2)
    possible = [_decided(readable_verify(*drawn.wide(*shift), scheme)) for shift in shifts]
    for request, decision in enumerate(_decided(fused)):
        assert decision in {decisions[request] for decisions in possible}, (request, decision)
    same = torch.tensor([a == b == c for a, b, c in zip(*map(_decided, (fused, plain, exact)), strict=True)])
    assert int(same.sum()) >= 0.98 * batch
    # As near to float64 as the readable verifier is in float32, or within a rounding of 1.
    wanted, got, near = (verdict.accept_probs[same] for verdict in (exact, fused, plain))
    assert torch.equal(got.isnan(), wanted.isnan())
    error, plain_error = ((probs - wanted).abs().nan_to_num(0.0).max() for probs in (got, near))
    assert float(error) <= 2 * float(plain_error) + 2**-23


@pytest.mark.parametrize("scheme", CHAINS)
@pytest.mark.parametrize("draft_vocab", [None, 60])
def test_every_number_of_a_verdict_is_written(scheme: Scheme, draft_vocab: int | None) -> None:
    drawn = _round(40, 300, draft_vocab)
    verdict = _fused(drawn.tree, DenseTarget(drawn.target_probs), drawn.noise, scheme)
    steps, lengths, accepted = torch.arange(3), drawn.tree.num_nodes, verdict.num_accepted
    assert torch.equal(verdict.path, torch.where(steps < accepted[:, None], steps, -1))
    assert torch.equal(verdict.is_bonus, accepted == lengths)
    assert torch.equal(verdict.accept_probs.isnan(), (steps >= lengths[:, None]) | (steps > accepted[:, None]))
    assert bool(((verdict.next_token_ids >= 0) & (verdict.next_token_ids < 300)).all())
    assert bool((accepted > 0).any())
    assert bool((accepted < lengths).any())


@pytest.mark.parametrize("scheme", RATIO)
@pytest.mark.parametrize("draft_vocab", [None, 50])
def test_point_masses_and_equal_laws(scheme: Scheme, draft_vocab: int | None) -> None:
    drawn = _round(64, 101, draft_vocab)
    tree, names = replace(drawn.tree, num_nodes=torch.full((64,), 3)), drawn.tree.draft_token_ids
    assert tree.draft_probs is not None
    # Target sure of each drafted token: w stays 1 and the whole chain is kept.
    sure = torch.nn.functional.one_hot(torch.nn.functional.pad(tree.token_ids, (0, 1)), 101).float()
    kept = _fused(tree, DenseTarget(sure), drawn.noise, scheme)
    assert kept.num_accepted.tolist() == [3] * 64
    assert kept.next_token_ids.tolist() == [0] * 64
    # Target sure of another token: w is 0 from the first on, and that token is emitted.
    other = (tree.token_ids[:, 0] + 1) % 101
    refused = _fused(tree, DenseTarget(torch.nn.functional.one_hot(other, 101).float()[:, None].expand(-1, 4, -1)), drawn.noise, scheme)
    assert refused.num_accepted.tolist() == [0] * 64
    assert torch.equal(refused.next_token_ids, other)
    assert not refused.is_bonus.any()
    # p = q: the residual has no mass, h is 0/0 = 1, and everything is kept.
    same = torch.zeros(64, 4, 101)
    same[:, :3, names if names is not None else slice(None)] = tree.draft_probs
    same[:, 3] = same[:, 0]
    equal = _fused(tree, DenseTarget(same), drawn.noise, scheme)
    assert equal.num_accepted.tolist() == [3] * 64
    torch.testing.assert_close(equal.accept_probs, torch.ones(64, 3, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_residual_without_mass_is_drawn_from_the_target() -> None:
    """Rejection of a token that q gives no less than p does: by rounding only, and then p is what is left."""
    law = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    tree = DraftTree.chains(torch.tensor([[0]]), torch.tensor([1]), Draw.SAMPLED, torch.tensor([[[0.50001, 0.50001]]]))
    noise = DenseNoise(
        accept=torch.full((1, 1, 1), 1 - 2**-53, dtype=torch.float64), recover=torch.tensor([[0.9, 0.0]], dtype=torch.float64)
    )
    for verdict in (
        _fused(tree, DenseTarget(law), noise, Scheme.REJECTION),
        readable_verify(tree, DenseTarget(law), noise, Scheme.REJECTION),
    ):
        assert _decided(verdict) == [(0, 1, False)]


class _Handed:
    """The uniforms of a CounterNoise, but not as keys."""

    def __init__(self, noise: CounterNoise) -> None:
        self.accept, self.recover, self.gumbel_argmax = noise.accept, noise.recover, noise.gumbel_argmax


@pytest.mark.parametrize("scheme", CHAINS)
@pytest.mark.parametrize("nodes", [1, 3, 9])
def test_keyed_noise_is_the_cores(scheme: Scheme, nodes: int) -> None:
    drawn = _round(50, 40, None, nodes=nodes)
    noise = CounterNoise([-3, 2**63 + 5, *range(48)], [2**41, *range(49)])
    keyed = _fused(drawn.tree, DenseTarget(drawn.target_probs), noise, scheme)
    handed = _fused(drawn.tree, DenseTarget(drawn.target_probs), _Handed(noise), scheme)  # type: ignore[arg-type]
    assert _decided(keyed) == _decided(handed)
    assert keyed.num_accepted.unique().numel() > 1


def test_gumbel_chains_are_raced_with_the_kernels_own_noise(ops: CpuOps) -> None:
    drawn = _round(60, 500, None)
    target = DenseTarget(drawn.target_probs)
    noise = CounterNoise(list(range(60)), [5] * 60, ops)
    fused, readable = _fused(drawn.tree, target, noise, Scheme.GUMBEL), readable_verify(drawn.tree, target, noise, Scheme.GUMBEL)
    assert _decided(fused) == _decided(readable)
    assert torch.equal(fused.accept_probs.nan_to_num(-1), readable.accept_probs.nan_to_num(-1))
    # Noise of another implementation has other bits: its user gets exactly that.
    assert verify_fused(drawn.tree, target, CounterNoise(list(range(60)), [5] * 60), Scheme.GUMBEL) is None


@pytest.mark.parametrize("scheme", CHAINS)
@pytest.mark.parametrize("draft_vocab", [None, 2000])
def test_neighbours_and_threads_do_not_matter(scheme: Scheme, draft_vocab: int | None, restore_threads: None) -> None:
    drawn = _round(9, 20_000, draft_vocab)
    noise = CounterNoise(list(range(9)), [3] * 9)
    torch.set_num_threads(2)
    together = _fused(drawn.tree, DenseTarget(drawn.target_probs), noise, scheme)
    torch.set_num_threads(1)
    for b in range(9):
        own = {name: getattr(drawn.tree, name)[b : b + 1] for name in ("token_ids", "parents", "num_nodes", "draft_probs")}
        alone = _fused(replace(drawn.tree, **own), DenseTarget(drawn.target_probs[b : b + 1]), CounterNoise([b], [3]), scheme)
        assert _decided(alone) == _decided(together)[b : b + 1]
        depth = alone.accept_probs.shape[1]  # its own chain's length
        assert torch.equal(alone.accept_probs.nan_to_num(-1), together.accept_probs[b : b + 1, :depth].nan_to_num(-1))


@pytest.mark.parametrize("scheme", Scheme)
def test_plain_decoding_draws_from_the_target_under_every_scheme(scheme: Scheme, ops: CpuOps) -> None:
    drawn = _round(30, 700, None)
    noise, target = CounterNoise(list(range(30)), [4] * 30, ops), DenseTarget(drawn.target_probs[:, :1])
    verdict = _fused(DraftTree.empty(30), target, noise, scheme)
    every, log_probs = torch.arange(30), drawn.target_probs[:, 0].log()
    wanted = (
        noise.gumbel_argmax(every, torch.zeros_like(every), log_probs)
        if scheme is Scheme.GUMBEL
        else ops.inverse_cdf(log_probs, uniforms(list(range(30)), [4] * 30, stream=2)[:, 0])  # type: ignore[arg-type]
    )
    assert torch.equal(verdict.next_token_ids, wanted)
    assert bool(verdict.is_bonus.all())
    assert verdict.path.shape == verdict.accept_probs.shape == (30, 0)


class _Scored(DenseTarget):
    """A target that is the model's own law, and says so."""

    def all_rows(self, *, needed: bool) -> AllRows:
        rows = super().all_rows(needed=needed)
        return replace(rows, entropies=torch.special.entr(rows.log_probs.exp()).sum(-1))

    def score(self, requests: Tensor, nodes: Tensor, token_ids: Tensor) -> TokenScores:
        rows = self.target_probs[requests, nodes + 1]
        scores = rows.log().gather(1, token_ids[:, None])[:, 0]
        return TokenScores(raw_logprobs=scores, processed_logprobs=scores, entropies=torch.special.entr(rows).sum(-1))


@pytest.mark.parametrize("scheme", CHAINS)
def test_scores_are_those_of_the_emitted_tokens(scheme: Scheme) -> None:
    drawn = _round(40, 300, None)
    fused = _fused(drawn.tree, _Scored(drawn.target_probs), drawn.noise, scheme)
    readable = readable_verify(drawn.tree, _Scored(drawn.target_probs), drawn.noise, scheme)
    assert _decided(fused) == _decided(readable)
    for name in ("raw_logprobs", "processed_logprobs", "entropies"):
        torch.testing.assert_close(getattr(fused, name), getattr(readable, name), equal_nan=True, rtol=1e-6, atol=1e-6)


def _faults() -> Iterator[tuple[str, DraftTree, str]]:
    full, reduced = _round(4, 50, None).tree, _round(4, 50, 20).tree
    assert full.draft_probs is not None
    assert reduced.draft_probs is not None
    names = reduced.draft_token_ids
    assert names is not None
    zero = full.draft_probs.scatter(2, full.token_ids[:, :, None], 0.0)
    yield "not normalised", replace(full, draft_probs=full.draft_probs * 1.001), "draft_probs that sum to 1.001"
    yield "NaN in q", replace(full, draft_probs=full.draft_probs.index_fill(2, torch.tensor([7]), torch.nan)), "draft"
    yield "drafted without probability", replace(full, draft_probs=zero / zero.sum(-1, keepdim=True)), "give no probability"
    yield "too few columns", replace(full, draft_probs=full.draft_probs[:, :, :49]), "49 columns, the vocabulary 50"
    yield "unknown token", replace(full, token_ids=full.token_ids + 50), "has token id"
    yield "negative token", replace(full, token_ids=full.token_ids - 50), "has token id -"
    yield "name twice", replace(reduced, draft_token_ids=torch.cat([names[:1], names[:-1]])), "names a token twice"
    yield "name outside", replace(reduced, draft_token_ids=names + 50), "reach outside the vocabulary"
    yield (
        "drafted without a name",
        replace(reduced, token_ids=torch.full_like(reduced.token_ids, _missing(names))),
        "not in draft_token_ids",
    )
    yield "siblings", replace(full, parents=torch.full_like(full.parents, -1)), "siblings"
    yield "another draw", replace(full, draw=Draw.DETERMINISTIC), "is not exact on 'deterministic' drafts"


def _missing(names: Tensor) -> int:
    return next(token for token in range(50) if token not in set(names.tolist()))


@pytest.mark.parametrize("scheme", RATIO)
@pytest.mark.parametrize(("tree", "message"), [pytest.param(tree, message, id=name) for name, tree, message in _faults()])
def test_what_the_readable_verifier_refuses_is_refused_with_its_words(scheme: Scheme, tree: DraftTree, message: str) -> None:
    drawn = _round(4, 50, None)
    # Every uniform accepts, so that rejection reaches the last row too.
    noise = DenseNoise(accept=torch.zeros(4, 3, 1, dtype=torch.float64), recover=torch.full((4, 4), 0.5, dtype=torch.float64))
    assert verify_fused(tree, DenseTarget(drawn.target_probs), noise, scheme) is None
    with pytest.raises(ValueError, match=message):
        verify(tree, DenseTarget(drawn.target_probs), noise, scheme)


@pytest.mark.parametrize("scheme", CHAINS)
def test_rows_that_are_no_distribution_are_refused(scheme: Scheme) -> None:
    drawn = _round(8, 50, None)
    for bad in (torch.full_like(drawn.target_probs, torch.nan), torch.zeros_like(drawn.target_probs)):
        assert verify_fused(drawn.tree, DenseTarget(bad), drawn.noise, scheme) is None
        with pytest.raises(ValueError, match="no distribution to draw from"):
            verify(drawn.tree, DenseTarget(bad), drawn.noise, scheme)


def test_a_batch_of_another_size_is_refused() -> None:
    drawn = _round(4, 50, None)
    with pytest.raises(ValueError, match="4 draft trees for 3 requests"):
        verify(drawn.tree, DenseTarget(drawn.target_probs[:3]), drawn.noise, Scheme.BLOCK)


def test_other_dtypes_are_the_readable_verifiers() -> None:
    drawn = _round(20, 50, None)
    wide_tree, wide_target, wide_noise = drawn.wide()
    accept = torch.rand(20, 4, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    noise = DenseNoise(accept=accept, recover=wide_noise._recover)
    for tree, target in ((drawn.tree, wide_target), (wide_tree, DenseTarget(drawn.target_probs))):
        assert verify_fused(tree, target, noise, Scheme.BLOCK) is None
        got, wanted = (function(tree, target, noise, Scheme.BLOCK) for function in (verify, readable_verify))
        assert _decided(got) == _decided(wanted)
