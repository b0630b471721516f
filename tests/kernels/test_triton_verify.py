"""Triton's verification from logits, run by Triton's interpreter where there is no GPU, against the readable verifier in float64.

Shape legend: B requests, N nodes, V vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from rollout_spec.noise import Stream, gumbel_noise, uniforms, vocab_bits
from rollout_spec.sampling import SamplingParams, process_logits, truncations
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.truncation import Truncations
from rollout_spec.verdict import Verdict
from rollout_spec.verify import RATIO_SCHEMES, CounterNoise, DenseNoise, DenseTarget, Scheme, VerifyNoise
from rollout_spec.verify import verify as readable_verify

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollout-spec[triton]'")

import triton.language as tl  # noqa: E402 - after the check that it is there

from rollout_spec_kernels.triton import noise as triton_noise  # noqa: E402
from rollout_spec_kernels.triton.rows import row_stats  # noqa: E402
from rollout_spec_kernels.triton.verify import verify_logits  # noqa: E402

# Triton's interpreter is numpy, which warns of the NaN and infinities that these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHAINS = (Scheme.REJECTION, Scheme.BLOCK)
TREES = (Scheme.REJECTION_WALK, Scheme.TRAVERSAL)
TREE = (-1, -1, 0, 0, 1, 3)
SLACK = 1e-5  # uniforms this close to a threshold may be decided either way


@triton.jit
def _words(seeds, position, out, block: tl.constexpr):
    row = tl.program_id(0)
    blocks = tl.arange(0, block)
    seed = tl.load(seeds + row)
    words = triton_noise.philox(seed, triton_noise.TARGET, seed * 0 + position, blocks.to(tl.uint64))
    for i in tl.static_range(4):
        tl.store(out + (row * block + blocks) * 4 + i, words[i].to(tl.int64, bitcast=True))


def test_bits_are_the_cores() -> None:
    seeds, position = [0, 7, (1 << 63) - 1, -3], (1 << 40) + 5
    out = torch.zeros(4, 16, 4, dtype=torch.int64, device=DEVICE)
    _words[(4,)](torch.tensor(seeds, device=DEVICE), position, out, block=16)
    for row, seed in enumerate(seeds):
        words = out[row].flatten().cpu().numpy().view("<u4")
        assert (words == vocab_bits(seed, Stream.TARGET, position, 128)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_stats(dtype: torch.dtype) -> None:
    logits = 5 * torch.randn(7, 2500, generator=torch.Generator().manual_seed(1))
    logits[1, 100:] = -torch.inf
    logits[2] = -torch.inf
    logits[2, 2400] = 3.0  # a point mass
    logits[3, 17] = torch.nan
    logits = logits.to(DEVICE, dtype)
    params = [SamplingParams(temperature=temperature) for temperature in (1.0, 0.5, 2.0, 1.0, 0.3, 10.0, 1.0)]
    stats = row_stats(logits, _moved(truncations(params)), may_truncate=False)
    wide = logits.double()
    scaled = wide / torch.tensor([one.temperature for one in params], dtype=torch.float64, device=DEVICE)[:, None]
    torch.testing.assert_close(stats.raw_log_normalisers.double(), wide.logsumexp(-1), rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(stats.log_normalisers.double(), scaled.logsumexp(-1), rtol=1e-6, atol=1e-6, equal_nan=True)
    entropies = torch.special.entr(scaled.softmax(-1)).sum(-1)
    torch.testing.assert_close(stats.entropies.double(), entropies, rtol=1e-5, atol=1e-6, equal_nan=True)


def _moved(given: Truncations) -> Truncations:
    return Truncations(**{field.name: getattr(given, field.name).to(DEVICE) for field in fields(given)})


@dataclass(frozen=True)
class Round:
    tree: DraftTree
    logits: Tensor  # [R, V] float32, row offsets with a gap before each request
    roots: Tensor  # [B]
    params: list[SamplingParams]

    @property
    def seeds(self) -> list[int]:
        return [-5, *range(self.tree.batch_size - 1)]

    @property
    def positions(self) -> list[int]:
        return [1 << 40, *range(self.tree.batch_size - 1)]

    @property
    def noise(self) -> CounterNoise:
        return CounterNoise(self.seeds, self.positions)

    def verify(self, scheme: Scheme, noise: VerifyNoise | None = None) -> Verdict:
        return verify_logits(self.tree, self.logits, self.roots, truncations(self.params), noise or self.noise, scheme)

    def exact(self) -> tuple[DraftTree, DenseTarget]:
        """In float64, on the CPU."""
        nodes = torch.arange(self.tree.max_nodes + 1)
        rows = torch.where(nodes <= self.tree.num_nodes.cpu()[:, None], self.roots.cpu()[:, None] + nodes, self.roots.cpu()[:, None])
        every = [one for one in self.params for _ in nodes]
        probs = process_logits(self.logits.cpu().float()[rows].flatten(0, 1), every).double().softmax(-1).view(*rows.shape, -1)
        moved = {name: getattr(self.tree, name).cpu() for name in ("token_ids", "parents", "num_nodes")}
        draft = None if self.tree.draft_probs is None else self.tree.draft_probs.cpu().double()
        names = None if self.tree.draft_token_ids is None else self.tree.draft_token_ids.cpu()
        return replace(self.tree, **moved, draft_probs=draft, draft_token_ids=names), DenseTarget(probs)


def _round(scheme: Scheme, batch: int, vocab_size: int, draft_vocab: int | None, dtype: torch.dtype = torch.float32) -> Round:
    generator = torch.Generator().manual_seed(vocab_size)
    parents = tuple(range(-1, 3)) if scheme in CHAINS else TREE
    nodes, columns = len(parents), draft_vocab or vocab_size
    names = None if draft_vocab is None else torch.randperm(vocab_size, generator=generator)[:draft_vocab]
    lengths = nodes - torch.arange(batch) % (nodes + 1)
    temperatures = [0.7 + 0.1 * (b % 5) for b in range(batch)]
    roots = (lengths + 2).cumsum(0) - lengths - 1  # one row of NaN before each request
    logits = torch.full((int((lengths + 2).sum()), vocab_size), torch.nan)
    above = torch.tensor(parents) + 1
    drafted = torch.empty(batch, nodes + 1, columns)
    for b in range(batch):
        rows = 2.5 * torch.randn(nodes + 1, vocab_size, generator=generator)
        drafted[b] = (rows if names is None else rows[:, names]) / temperatures[b] + 0.7 * torch.randn(
            nodes + 1, columns, generator=generator
        )
        rows[torch.rand(rows.shape, generator=generator) < 0.1] = -torch.inf
        rows[:, 0] = 0.0
        logits[roots[b] : roots[b] + lengths[b] + 1] = rows[: lengths[b] + 1]
    order = (drafted - torch.rand(drafted.shape, generator=generator).log().neg().log()).argsort(-1, descending=True)
    ranks = torch.tensor([parents[:node].count(parent) for node, parent in enumerate(parents)])
    tokens = order[:, above, ranks]
    tree = DraftTree(
        token_ids=(tokens if names is None else names[tokens]).to(DEVICE),
        parents=torch.tensor(parents).expand(batch, -1).to(DEVICE),
        num_nodes=lengths.to(DEVICE),
        draw=Draw.SAMPLED if scheme in CHAINS else Draw.WITHOUT_REPLACEMENT,
        draft_probs=drafted.softmax(-1)[:, above].to(DEVICE),
        draft_token_ids=None if names is None else names.to(DEVICE),
    )
    return Round(tree, logits.to(DEVICE, dtype), roots.to(DEVICE), [SamplingParams(temperature=one) for one in temperatures])


class _Shifted(CounterNoise):
    """The same noise with every uniform moved."""

    def __init__(self, seeds: list[int], positions: list[int], accept_shift: float, recover_shift: float) -> None:
        super().__init__(seeds, positions)
        self._shifts = accept_shift, recover_shift

    def accept(self, requests: Tensor, depths: Tensor, trial: int) -> Tensor:
        return (super().accept(requests, depths, trial) + self._shifts[0]).clamp(0, 1 - 2**-53)

    def recover(self, requests: Tensor, depths: Tensor) -> Tensor:
        return (super().recover(requests, depths) + self._shifts[1]).clamp(0, 1 - 2**-53)


def _decided(verdict: Verdict) -> list[tuple[list[int], int, bool]]:
    paths = [[node for node in path if node >= 0] for path in verdict.path.tolist()]
    return list(zip(paths, verdict.next_token_ids.tolist(), verdict.is_bonus.tolist(), strict=True))


@pytest.mark.parametrize("scheme", [*CHAINS, Scheme.EXACT_MATCH, *TREES])
@pytest.mark.parametrize(
    ("vocab_size", "draft_vocab", "dtype"),
    [(7, None, torch.float32), (77, 20, torch.float32), (2100, None, torch.bfloat16), (1030, 600, torch.float32)],
)
def test_the_same_noise_decides_the_same(scheme: Scheme, vocab_size: int, draft_vocab: int | None, dtype: torch.dtype) -> None:
    drawn = _round(scheme, 15, vocab_size, draft_vocab, dtype)
    got = drawn.verify(scheme)
    tree, target = drawn.exact()
    shifts = itertools.product((-SLACK, 0.0, SLACK), repeat=2)
    possible = [_decided(readable_verify(tree, target, _Shifted(drawn.seeds, drawn.positions, *shift), scheme)) for shift in shifts]
    exact = readable_verify(tree, target, drawn.noise, scheme)
    for request, decision in enumerate(_decided(got)):
        assert decision in [decisions[request] for decisions in possible], request
    assert _decided(got) == _decided(exact)  # and with these seeds no uniform lies that close
    torch.testing.assert_close(got.accept_probs.cpu(), exact.accept_probs, rtol=0, atol=2e-6, equal_nan=True)
    if scheme in RATIO_SCHEMES:  # the other seldom meets a draft of a large vocabulary
        assert exact.num_accepted.unique().numel() > 1


@pytest.mark.parametrize("vocab_size", [9, 1500])
def test_gumbel_gives_the_tokens_of_the_cores_noise(vocab_size: int) -> None:
    drawn = _round(Scheme.GUMBEL, 12, vocab_size, None)
    tree, target = drawn.exact()
    wanted = readable_verify(tree, target, drawn.noise, Scheme.GUMBEL)
    assert _decided(drawn.verify(Scheme.GUMBEL)) == _decided(wanted)


def test_scores_are_those_of_the_emitted_tokens() -> None:
    drawn = _round(Scheme.BLOCK, 10, 300, None)
    verdict = drawn.verify(Scheme.BLOCK)
    assert verdict.raw_logprobs is not None
    assert verdict.processed_logprobs is not None
    assert verdict.entropies is not None
    for b, tokens in enumerate(verdict.emitted(drawn.tree).tolist()):
        for depth, token in enumerate(tokens):
            if token < 0:
                assert bool(verdict.raw_logprobs[b, depth].isnan())
                continue
            row = drawn.logits[drawn.roots[b] + depth].double()
            processed = (row / drawn.params[b].temperature).log_softmax(-1)
            assert float(verdict.raw_logprobs[b, depth]) == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-5)
            assert float(verdict.processed_logprobs[b, depth]) == pytest.approx(float(processed[token]), abs=1e-5)
            assert float(verdict.entropies[b, depth]) == pytest.approx(float(torch.special.entr(processed.exp()).sum()), abs=1e-5)


@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize(("vocab_size", "draft_vocab"), [(77, None), (1030, 600)])
def test_verdicts_are_those_of_the_truncated_law(scheme: Scheme, vocab_size: int, draft_vocab: int | None) -> None:
    drawn = _round(scheme, 12, vocab_size, None if scheme is Scheme.GUMBEL else draft_vocab)
    filters = [{"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.05}, {}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}]
    params = [replace(one, **filters[b % len(filters)]) for b, one in enumerate(drawn.params)]
    drawn = replace(drawn, params=params)
    got = drawn.verify(scheme)
    tree, target = drawn.exact()
    wanted = readable_verify(tree, target, drawn.noise, scheme)
    assert _decided(got) == _decided(wanted)
    torch.testing.assert_close(got.accept_probs.cpu(), wanted.accept_probs, rtol=0, atol=2e-6, equal_nan=True)
    if scheme in RATIO_SCHEMES:
        assert wanted.num_accepted.unique().numel() > 1
    whole = _decided(replace(drawn, params=[SamplingParams(temperature=one.temperature) for one in params]).verify(scheme))
    assert _decided(got) != whole  # the filters decided something


def test_scores_are_the_truncated_laws() -> None:
    drawn = _round(Scheme.BLOCK, 6, 300, None)
    drawn = replace(drawn, params=[replace(one, top_k=9, top_p=0.9) for one in drawn.params])
    verdict = drawn.verify(Scheme.BLOCK)
    assert verdict.processed_logprobs is not None
    assert verdict.raw_logprobs is not None
    assert verdict.entropies is not None
    for b, tokens in enumerate(verdict.emitted(drawn.tree).tolist()):
        for depth, token in enumerate(token for token in tokens if token >= 0):
            row = drawn.logits[drawn.roots[b] + depth][None].float().cpu()
            processed = process_logits(row, [drawn.params[b]]).double().log_softmax(-1)[0]
            assert float(verdict.processed_logprobs[b, depth]) == pytest.approx(float(processed[token]), abs=1e-5)
            assert float(verdict.raw_logprobs[b, depth]) == pytest.approx(float(row.double().log_softmax(-1)[0, token]), abs=1e-5)
            assert float(verdict.entropies[b, depth]) == pytest.approx(float(torch.special.entr(processed.exp()).sum()), abs=1e-5)


class _Handed:
    """The uniforms of a CounterNoise, but not as keys."""

    def __init__(self, noise: CounterNoise) -> None:
        self.accept, self.recover, self.gumbel_argmax = noise.accept, noise.recover, noise.gumbel_argmax


@pytest.mark.parametrize("scheme", [scheme for scheme in Scheme if scheme is not Scheme.GUMBEL])
def test_uniforms_may_be_handed_over(scheme: Scheme) -> None:
    drawn = _round(scheme, 10, 90, None)
    handed = drawn.verify(scheme, _Handed(drawn.noise))
    assert _decided(handed) == _decided(drawn.verify(scheme))
    other = CounterNoise([seed + 100 for seed in drawn.seeds], drawn.positions)
    assert _decided(drawn.verify(scheme, _Handed(other))) != _decided(handed)


def test_gumbel_noise_may_be_handed_over() -> None:
    drawn = _round(Scheme.GUMBEL, 10, 90, None)
    depths = range(drawn.tree.max_nodes + 1)
    noise = [gumbel_noise(drawn.seeds, [position + depth for position in drawn.positions], 90) for depth in depths]
    given = DenseNoise(gumbel=torch.stack(noise, dim=1))
    assert _decided(drawn.verify(Scheme.GUMBEL, given)) == _decided(drawn.verify(Scheme.GUMBEL))
    with pytest.raises(ValueError, match="races run inside the kernel"):
        drawn.verify(Scheme.GUMBEL, _Handed(drawn.noise))


def test_plain_decoding_draws_from_the_target() -> None:
    drawn = _round(Scheme.EXACT_MATCH, 8, 400, None)
    plain = Round(DraftTree.empty(8, DEVICE), drawn.logits, drawn.roots, drawn.params)
    verdict = plain.verify(Scheme.BLOCK)
    probs = (
        (drawn.logits[drawn.roots].double() / torch.tensor([one.temperature for one in drawn.params], device=DEVICE)[:, None])
        .softmax(-1)
        .cpu()
    )
    levels = uniforms(plain.seeds, plain.positions, Stream.RECOVER)[:, 0]
    assert verdict.next_token_ids.tolist() == (probs.cumsum(-1) <= levels[:, None]).sum(-1).tolist()
    assert bool(verdict.is_bonus.all())


def test_point_masses_and_equal_laws() -> None:
    drawn = _round(Scheme.BLOCK, 12, 101, None)
    tree = replace(drawn.tree, num_nodes=torch.full((12,), 4, device=DEVICE))
    roots = 5 * torch.arange(12, device=DEVICE)
    assert tree.draft_probs is not None
    sure = torch.nn.functional.one_hot(torch.nn.functional.pad(tree.token_ids, (0, 1)), 101).float().log().flatten(0, 1)
    equal = torch.cat([tree.draft_probs, tree.draft_probs[:, :1]], dim=1).log().flatten(0, 1)
    for scheme in CHAINS:
        kept = Round(tree, sure, roots, [SamplingParams()] * 12).verify(scheme)
        assert kept.num_accepted.tolist() == [4] * 12
        assert kept.next_token_ids.tolist() == [0] * 12
        assert Round(tree, equal, roots, [SamplingParams()] * 12).verify(scheme).num_accepted.tolist() == [4] * 12


def _undrafted(tree: DraftTree) -> int:
    return next(token for token in range(50) if token not in tree.token_ids.flatten().tolist())


def test_what_is_wrong_is_refused() -> None:
    drawn = _round(Scheme.BLOCK, 4, 50, None)
    assert drawn.tree.draft_probs is not None
    off = replace(drawn, tree=replace(drawn.tree, draft_probs=drawn.tree.draft_probs * 1.002))
    with pytest.raises(ValueError, match=r"draft_probs that sum to 1\.00"):
        off.verify(Scheme.BLOCK)
    for scheme in TREES:
        tree = _round(scheme, 4, 50, None)
        assert tree.tree.draft_probs is not None
        # Sure of a token that nobody drafted: every child is refused, and then the rows they were drawn from are looked at.
        sure = torch.full_like(tree.logits, -torch.inf).index_fill(1, torch.tensor(_undrafted(tree.tree), device=DEVICE), 0.0)
        off = replace(tree, logits=sure, tree=replace(tree.tree, draft_probs=tree.tree.draft_probs * 1.002))
        with pytest.raises(ValueError, match=r"draft_probs that sum to 1\.00"):
            off.verify(scheme)
        impossible = tree.tree.draft_probs.scatter(2, tree.tree.token_ids[:, :, None], 0.0)
        with pytest.raises(ValueError, match="give no probability"):
            replace(tree, tree=replace(tree.tree, draft_probs=impossible)).verify(scheme)
    with pytest.raises(ValueError, match="temperature 0"):
        replace(drawn, params=[SamplingParams(temperature=0)] * 4).verify(Scheme.BLOCK)
    with pytest.raises(ValueError, match="4 trees need as many roots and truncations; got 4 and 3"):
        replace(drawn, params=drawn.params[:3]).verify(Scheme.BLOCK)
    with pytest.raises(ValueError, match="4 trees need as many seeds and positions; got 5"):
        drawn.verify(Scheme.BLOCK, CounterNoise([1] * 5, [2] * 5))
    with pytest.raises(ValueError, match="not exact on 'deterministic' drafts"):
        replace(drawn, tree=replace(drawn.tree, draw=Draw.DETERMINISTIC)).verify(Scheme.BLOCK)
    nowhere = replace(drawn, logits=torch.full_like(drawn.logits, torch.nan))
    for scheme in (Scheme.BLOCK, Scheme.EXACT_MATCH, Scheme.GUMBEL, *TREES):
        with pytest.raises(ValueError, match="no distribution to draw from"):
            nowhere.verify(scheme)
