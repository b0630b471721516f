"""The fused verification of trees: decisions, numbers, rows on demand, refusals, against the readable one and float64.

Its laws are proved by tests/statistical, where it is a backend. Shape legend: B requests, N nodes, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec.verify import AllRows, CounterNoise, DenseNoise, DenseTarget, Scheme, TokenScores
from rollout_spec.verify import verify as readable_verify
from rollout_spec_kernels.cpu import CpuOps
from rollout_spec_kernels.verify import verify, verify_fused

RATIO = (Scheme.REJECTION_WALK, Scheme.TRAVERSAL)
SCHEMES = (*RATIO, Scheme.EXACT_MATCH)
SLACK = 1e-5  # as in test_verify.py
SHAPES = {
    "wide": (-1, -1, -1, 0, 0, 1, 3, 3, 6),
    "narrow": (-1, 0, 1, -1, 3, 0),  # siblings far apart in node order
    "star": (-1, -1, -1, -1, -1),
}


@pytest.fixture(autouse=True)
def _needs_kernels(ops: CpuOps) -> None:
    """Skip where they cannot be built."""


@dataclass(frozen=True)
class Round:
    tree: DraftTree
    target_probs: Tensor  # [B, N + 1, V] float32
    accept: Tensor  # [B, N + 1, N + 1] float64
    recover: Tensor  # [B, N + 1] float64

    def noise(self, accept_shift: float = 0.0, recover_shift: float = 0.0) -> DenseNoise:
        shifted = [(of + shift).clamp(0, 1 - 2**-53) for of, shift in ((self.accept, accept_shift), (self.recover, recover_shift))]
        return DenseNoise(accept=shifted[0], recover=shifted[1])

    def wide_tree(self) -> DraftTree:
        assert self.tree.draft_probs is not None
        probs = self.tree.draft_probs.double()
        return replace(self.tree, draft_probs=probs / probs.sum(-1, keepdim=True))


def _round(
    batch: int,
    vocab_size: int,
    draft_vocab: int | None,
    parents: tuple[int, ...],
    *,
    closeness: float = 1.0,
    seed: int = 1,
    peak: float = 0.0,
) -> Round:
    """Ragged trees drawn without replacement; impossible tokens in p and q. ``peak`` lifts one logit of each q row."""
    generator = torch.Generator().manual_seed(seed)
    nodes, columns = len(parents), draft_vocab or vocab_size
    names = None if draft_vocab is None else torch.randperm(vocab_size, generator=generator)[:draft_vocab]
    target = torch.randn(batch, nodes + 1, vocab_size, generator=generator) * 2
    above = torch.tensor(parents)
    drafted = target[:, above + 1] + closeness * torch.randn(batch, nodes + 1, vocab_size, generator=generator)[:, above + 1]
    drafted = drafted if names is None else drafted[..., names]
    drafted[..., 1 % columns] += peak
    holes = torch.rand(batch, nodes + 1, columns, generator=generator) < 0.1
    drafted = torch.where(holes[:, above + 1] & (torch.arange(columns) >= len(parents)), -torch.inf, drafted)
    target[torch.rand(target.shape, generator=generator) < 0.1] = -torch.inf
    target[..., 0] = 0.0  # no row without a token
    draft_probs = drafted.softmax(-1)
    race = torch.rand(batch, nodes + 1, columns, generator=generator).log().neg()
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    for parent in set(parents):
        children = [node for node, other in enumerate(parents) if other == parent]
        scores = race[:, parent + 1] / draft_probs[:, children[0]]
        tokens[:, children] = scores.topk(len(children), largest=False).indices
    tree = DraftTree(
        token_ids=tokens if names is None else names[tokens],
        parents=above.expand(batch, -1),
        num_nodes=nodes - torch.arange(batch) % (nodes + 1),
        draw=Draw.WITHOUT_REPLACEMENT,
        draft_probs=draft_probs,
        draft_token_ids=names,
    )
    accept = torch.rand(batch, nodes + 1, nodes + 1, generator=generator, dtype=torch.float64)
    return Round(tree, target.softmax(-1), accept, torch.rand(batch, nodes + 1, generator=generator, dtype=torch.float64))


def _decided(verdict: Verdict) -> list[tuple[list[int], int, bool]]:
    paths = [[node for node in path if node >= 0] for path in verdict.path.tolist()]
    return list(zip(paths, verdict.next_token_ids.tolist(), verdict.is_bonus.tolist(), strict=True))


def _fused(tree: DraftTree, target: DenseTarget, noise: DenseNoise | CounterNoise, scheme: Scheme) -> Verdict:
    verdict = verify_fused(tree, target, noise, scheme)
    assert verdict is not None, "left to the readable verifier"
    return verdict


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("vocab_size", "draft_vocab", "peak"), [(9, None, 0.0), (77, 40, 0.0), (513, None, 12.0), (20_000, 3000, 0.0)])
def test_the_same_noise_decides_the_same(scheme: Scheme, shape: str, vocab_size: int, draft_vocab: int | None, peak: float) -> None:
    """Every decision is one that float64 makes with uniforms within SLACK, and nearly all are those it makes with the very same ones."""
    batch = 20 if vocab_size > 5000 else 120
    drawn = _round(batch, vocab_size, draft_vocab, SHAPES[shape], peak=peak)
    fused = _fused(drawn.tree, DenseTarget(drawn.target_probs), drawn.noise(), scheme)
    wide, target = drawn.wide_tree(), DenseTarget(drawn.target_probs.double())
    exact = readable_verify(wide, target, drawn.noise(), scheme)
    shifts = itertools.product((-SLACK, 0.0, SLACK), repeat=2)
    possible = [_decided(readable_verify(wide, target, drawn.noise(*shift), scheme)) for shift in shifts]
    for request, decision in enumerate(_decided(fused)):
        assert decision in [decisions[request] for decisions in possible], request
    same = [a == b for a, b in zip(_decided(fused), _decided(exact), strict=True)]
    assert sum(same) >= 0.97 * batch
    got, wanted = fused.accept_probs[torch.tensor(same)], exact.accept_probs[torch.tensor(same)]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6, equal_nan=True)
    if scheme in RATIO or vocab_size < 100:  # exact match seldom meets a draft of a large vocabulary
        assert len({len(path) for path, _, _ in _decided(fused)}) > 1


@pytest.mark.parametrize("scheme", RATIO)
def test_children_behind_one_that_holds_nearly_all_of_q(scheme: Scheme) -> None:
    """What q has without its peak is summed anew: 1 - q(x) has no correct digit here, and the second child's ratio hangs on it."""
    vocab_size, batch = 300, 64
    generator = torch.Generator().manual_seed(5)
    rest = torch.rand(batch, vocab_size, generator=generator) * 1e-11
    draft = rest.clone()
    draft[:, 7] = 1.0
    second = (torch.arange(batch) % (vocab_size - 10)) + 10
    target = torch.rand(batch, 3, vocab_size, generator=generator)
    target[:, :, 7] = 0.0
    target /= target.sum(-1, keepdim=True)
    tree = DraftTree(
        token_ids=torch.stack([torch.full((batch,), 7), second], dim=1),
        parents=torch.full((batch, 2), -1),
        num_nodes=torch.full((batch,), 2),
        draw=Draw.WITHOUT_REPLACEMENT,
        draft_probs=draft[:, None].expand(-1, 2, -1).contiguous(),
    )
    # The second child is kept with probability min(1, p(x) / q'(x)), q' = q without token 7: a uniform 1e-4 below and above decides.
    kept = target[:, 0].double().gather(1, second[:, None])[:, 0]
    draft_left = draft.double().scatter(1, torch.full((batch, 1), 7), 0.0)
    ratio = kept / (draft_left.gather(1, second[:, None])[:, 0] / draft_left.sum(-1))
    moving = ratio < 0.99
    assert int(moving.sum()) > 10
    for factor, accepted in ((1 - 1e-4, 1), (1 + 1e-4, 0)):
        accept = torch.full((batch, 3, 3), 1 - 2**-53, dtype=torch.float64)
        # Walk: (depth 0, trial 1). Traversal tests the first child, then the second: trials 0 and 1.
        accept[:, 0, 1] = (ratio * factor).clamp_max(1 - 2**-53)
        noise = DenseNoise(accept=accept, recover=torch.full((batch, 3), 0.5, dtype=torch.float64))
        verdict = _fused(tree, DenseTarget(target), noise, scheme)
        assert verdict.num_accepted[moving].unique().tolist() == [accepted]


@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize("shape", SHAPES)
def test_keyed_noise_is_the_cores(scheme: Scheme, shape: str, ops: CpuOps) -> None:
    parents = tuple(range(-1, 5)) if scheme in (Scheme.REJECTION, Scheme.BLOCK) else SHAPES[shape]
    drawn = _round(60, 40, None, parents)
    tree = replace(drawn.tree, draw=Draw.SAMPLED) if scheme in (Scheme.REJECTION, Scheme.BLOCK) else drawn.tree
    noise = CounterNoise([-3, 2**63 + 5, *range(58)], [2**41, *range(59)], ops)
    target = DenseTarget(drawn.target_probs)
    fused, readable = _fused(tree, target, noise, scheme), readable_verify(tree, target, noise, scheme)
    differing = sum(a != b for a, b in zip(_decided(fused), _decided(readable), strict=True))
    assert differing <= 1  # a uniform within float32 rounding of its threshold
    assert fused.num_accepted.unique().numel() > 1


class _Lazy(DenseTarget):
    """Gives rows one request for them at a time, and keeps count."""

    def __init__(self, target_probs: Tensor) -> None:
        super().__init__(target_probs)
        self.computed: list[tuple[int, int]] = []

    def all_rows(self, *, needed: bool) -> AllRows | None:  # type: ignore[override]
        return super().all_rows(needed=needed) if needed else None

    def log_probs(self, requests: Tensor, nodes: Tensor) -> Tensor:
        self.computed += zip(requests.tolist(), nodes.tolist(), strict=True)
        return super().log_probs(requests, nodes)

    def score(self, requests: Tensor, nodes: Tensor, token_ids: Tensor) -> TokenScores | None:
        return None


@pytest.mark.parametrize("scheme", Scheme)
def test_rows_on_demand_decide_the_same_and_no_row_twice(scheme: Scheme, ops: CpuOps) -> None:
    chain = scheme in (Scheme.REJECTION, Scheme.BLOCK)
    drawn = _round(60, 130, 70, tuple(range(-1, 5)) if chain else SHAPES["wide"])
    tree = replace(drawn.tree, draw=Draw.SAMPLED) if chain else drawn.tree
    noise, lazy = CounterNoise(list(range(60)), [7] * 60, ops), _Lazy(drawn.target_probs)
    whole, demanded = (_fused(tree, target, noise, scheme) for target in (DenseTarget(drawn.target_probs), lazy))
    assert _decided(demanded) == _decided(whole)
    assert torch.equal(demanded.accept_probs.nan_to_num(-1), whole.accept_probs.nan_to_num(-1))
    assert len(lazy.computed) == len(set(lazy.computed))
    if scheme is not Scheme.BLOCK:
        assert 60 <= len(lazy.computed) < int((tree.num_nodes + 1).sum())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("draft_vocab", [None, 2000])
def test_neighbours_and_threads_do_not_matter(scheme: Scheme, draft_vocab: int | None, restore_threads: None) -> None:
    drawn = _round(9, 20_000, draft_vocab, SHAPES["wide"])
    torch.set_num_threads(2)
    together = _fused(drawn.tree, DenseTarget(drawn.target_probs), CounterNoise(list(range(9)), [3] * 9), scheme)
    torch.set_num_threads(1)
    for b in range(9):
        own = {name: getattr(drawn.tree, name)[b : b + 1] for name in ("token_ids", "parents", "num_nodes", "draft_probs")}
        alone = _fused(replace(drawn.tree, **own), DenseTarget(drawn.target_probs[b : b + 1]), CounterNoise([b], [3]), scheme)
        assert _decided(alone) == _decided(together)[b : b + 1]


def test_point_masses_keep_or_refuse_the_whole_path() -> None:
    drawn = _round(32, 50, None, SHAPES["wide"])
    tree = replace(drawn.tree, num_nodes=torch.full((32,), 9))
    sure = torch.nn.functional.one_hot(torch.zeros(32, 10, dtype=torch.int64), 50).float()
    path = [0, 3, 6, 8]  # the target is sure of each token of this path
    for above, node in zip([-1, *path], path, strict=False):
        sure[:, above + 1] = torch.nn.functional.one_hot(tree.token_ids[:, node], 50).float()
    for scheme in SCHEMES:
        kept = _fused(tree, DenseTarget(sure), drawn.noise(), scheme)
        assert [decided[0] for decided in _decided(kept)] == [path] * 32
        assert kept.next_token_ids.tolist() == [0] * 32
    missing = torch.tensor([next(token for token in range(50) if token not in row) for row in tree.token_ids[:, :3].tolist()])
    other = torch.nn.functional.one_hot(missing, 50).float()[:, None].expand(-1, 10, -1)
    for scheme in SCHEMES:
        refused = _fused(tree, DenseTarget(other), drawn.noise(), scheme)
        assert refused.num_accepted.tolist() == [0] * 32
        assert torch.equal(refused.next_token_ids, missing)
        assert not refused.is_bonus.any()


@pytest.mark.parametrize("scheme", RATIO)
def test_what_the_readable_verifier_refuses_is_refused_with_its_words(scheme: Scheme) -> None:
    drawn = _round(4, 50, None, SHAPES["wide"])
    tree, probs = drawn.tree, drawn.tree.draft_probs
    assert probs is not None
    faulty = {
        "draft_probs that sum to 1.00": replace(tree, draft_probs=probs * 1.002),
        "give no probability": replace(tree, draft_probs=probs.scatter(2, tree.token_ids[:, :, None], 0.0)),
        "siblings with the same token": replace(tree, token_ids=tree.token_ids[:, :1].expand(-1, 9).contiguous()),
        "has parent": replace(tree, parents=torch.full_like(tree.parents, 3)),
        "has token id": replace(tree, token_ids=tree.token_ids + 50),
    }
    # Every uniform refuses, so that every child of the root is looked at.
    noise = DenseNoise(accept=torch.full((4, 10, 10), 1 - 2**-53, dtype=torch.float64), recover=drawn.recover)
    for message, bad in faulty.items():
        assert verify_fused(bad, DenseTarget(drawn.target_probs), noise, scheme) is None
        with pytest.raises(ValueError, match=message):
            verify(bad, DenseTarget(drawn.target_probs), noise, scheme)
    nowhere = DenseTarget(torch.full_like(drawn.target_probs, torch.nan))
    assert verify_fused(tree, nowhere, noise, scheme) is None
