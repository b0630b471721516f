"""A draft head's chains in one call, against the readable form over the same operations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rollout_spec.engine.draft_head import ChainDraws, Chains, DraftHead, HeadCache, HeadWeights, NewRows
from rollout_spec.engine.ops import TorchOps
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.stack import DecoderLayer
from rollout_spec.noise import LANE, Stream
from rollout_spec.sampling import SamplingParams
from rollout_spec_kernels.cpu import CpuOps
from rollout_spec_kernels.draft import FusedDraftHead

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB, SLOTS, CAPACITY = 40, 4, 2, 16, 56, 601, 5, 48
DTYPES = (torch.float32, torch.bfloat16)
REDUCED = torch.arange(0, VOCAB, 7)[torch.randperm(86, generator=torch.Generator().manual_seed(0))]  # 86 ids in no order
KINDS = [(0, None), (3, REDUCED)]  # tapped layers behind a projection, draft vocabulary
# Five requests: in their middle, two new rows, just started, without new rows, at another temperature.
COUNTS, CONTEXTS, SLOTS_OF, LENGTHS = (1, 2, 9, 0, 3), (20, 5, 0, 7, 11), (3, 0, 4, 1, 2), (4, 1, 3, 0, 2)
TEMPERATURES = (1.0, 0.6, 1.4, 1.0, 0.0)
SEEDS, POSITIONS = (11, -2, 2**63 + 5, 4, 5), (22, 8, 10, 8, 15)


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weights(ops: CpuOps | TorchOps, dtype: torch.dtype, num_taps: int, ids: Tensor | None, window: int = 0) -> HeadWeights:
    seeds = iter(range(100))

    def linear(num_out: int, num_in: int, out_dtype: torch.dtype | None = None, scale: float = 1.0) -> object:
        return ops.pack_linear(scale * _normal(num_out, num_in, seed=next(seeds), dtype=dtype) / num_in**0.5, None, out_dtype)

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * _normal(size, seed=next(seeds), dtype=dtype)

    layer = DecoderLayer(
        input_norm=norm(HIDDEN),
        post_norm=norm(HIDDEN),
        q_norm=norm(HEAD_DIM),
        k_norm=norm(HEAD_DIM),
        qkv=linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),  # type: ignore[arg-type]
        out=linear(HIDDEN, HEADS * HEAD_DIM),  # type: ignore[arg-type]
        gate_up=linear(2 * WIDTH, HIDDEN),  # type: ignore[arg-type]
        down=linear(HIDDEN, WIDTH),  # type: ignore[arg-type]
        sliding_window=window,
    )
    return HeadWeights(
        tap_norms=tuple(norm(HIDDEN) for _ in range(num_taps)),
        tap_fc=linear(HIDDEN, num_taps * HIDDEN) if num_taps else None,  # type: ignore[arg-type]
        embed_norm=norm(HIDDEN),
        hidden_norm=norm(HIDDEN),
        fc=linear(HIDDEN, 2 * HIDDEN),  # type: ignore[arg-type]
        layer=layer,
        final_norm=norm(HIDDEN),
        head=linear(VOCAB if ids is None else ids.numel(), HIDDEN, torch.float32, 3.0),  # type: ignore[arg-type]
        embedding=_normal(VOCAB, HIDDEN, seed=next(seeds), dtype=dtype),
        token_ids=ids,
        head_dim=HEAD_DIM,
        eps=1e-5,
    )


def _cache(dtype: torch.dtype) -> HeadCache:
    """Something in every cell: what a request must not see would show."""
    k, v = _normal(2, 1, SLOTS, KV_HEADS, CAPACITY, HEAD_DIM, seed=70, dtype=dtype)
    cos, sin = _normal(2, CAPACITY, HEAD_DIM, seed=71, dtype=dtype)
    return HeadCache(k=k.clone(), v=v.clone(), cos=cos.contiguous(), sin=sin.contiguous())


def _rows(num_taps: int, dtype: torch.dtype, chosen: Sequence[int] = range(5)) -> NewRows:
    """The new rows of some of the requests."""
    starts = torch.tensor([0, *COUNTS]).cumsum(0)
    index = torch.cat([torch.arange(int(starts[b]), int(starts[b + 1])) for b in chosen])
    total = int(starts[-1])
    return NewRows(
        taps=[_normal(total, HIDDEN, seed=80 + tap, dtype=dtype)[index] for tap in range(max(1, num_taps))],
        token_ids=torch.randint(0, VOCAB, (total,), generator=torch.Generator().manual_seed(90))[index],
        plan=AttentionPlan(
            row_offsets=torch.tensor([0, *(COUNTS[b] for b in chosen)]).cumsum(0),
            slots=torch.tensor([SLOTS_OF[b] for b in chosen]),
            context_lengths=torch.tensor([CONTEXTS[b] for b in chosen]),
        ),
    )


def _draws(coupled: bool, chosen: Sequence[int] = range(5), **changes: object) -> ChainDraws:
    lengths = torch.tensor([LENGTHS[b] for b in chosen])
    draws = ChainDraws(
        lengths=lengths,
        num_steps=int(lengths.max()),
        sampling=[SamplingParams(temperature=TEMPERATURES[b]) for b in chosen],
        seeds=[SEEDS[b] for b in chosen],
        positions=[POSITIONS[b] for b in chosen],
        coupled=coupled,
    )
    return dataclasses.replace(draws, **changes)  # type: ignore[arg-type]


def _valid(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max())) < lengths[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_taps", "ids"), KINDS)
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("window", [0, 6])
def test_chains_are_those_of_the_readable_form(
    ops: CpuOps, dtype: torch.dtype, num_taps: int, ids: Tensor | None, coupled: bool, window: int
) -> None:
    """Same tokens, same K/V bit for bit; no draw of these seeds is decided by the last bits of a probability."""
    weights, rows, draws = _weights(ops, dtype, num_taps, ids, window), _rows(num_taps, dtype), _draws(coupled)
    fused, readable = ops.draft_head(weights), DraftHead(ops, weights)
    assert isinstance(fused, FusedDraftHead)
    cache, wanted_cache = _cache(dtype), _cache(dtype)
    got, wanted = fused.draw_chains(rows, cache, draws), readable.draw_chains(rows, wanted_cache, draws)
    valid = _valid(draws.lengths)
    assert torch.equal(got.token_ids[valid], wanted.token_ids[valid])
    for slot, context, count, length in zip(SLOTS_OF, CONTEXTS, COUNTS, LENGTHS, strict=True):
        end = context + count + max(0, length - 1)
        for mine, theirs, before in ((cache.k, wanted_cache.k, _cache(dtype).k), (cache.v, wanted_cache.v, _cache(dtype).v)):
            assert torch.equal(mine[:, slot, :, :end], theirs[:, slot, :, :end])
            # A request that is done is not run further.
            assert torch.equal(mine[:, slot, :, end:], before[:, slot, :, end:])
    assert (got.probs is None) is coupled
    if got.probs is not None and wanted.probs is not None:
        torch.testing.assert_close(got.probs[valid], wanted.probs[valid], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_taps", "ids"), KINDS)
def test_probabilities_are_within_twice_torchs_error(ops: CpuOps, dtype: torch.dtype, num_taps: int, ids: Tensor | None) -> None:
    weights, rows, draws = _weights(ops, dtype, num_taps, ids), _rows(num_taps, dtype), _draws(coupled=False)
    fused = ops.draft_head(weights)
    states = fused.absorb(rows, _cache(dtype))
    assert torch.equal(states, DraftHead(ops, weights).absorb(rows, _cache(dtype)))
    probs = fused.draw_chains(rows, _cache(dtype), draws).probs
    assert probs is not None
    warm = [b for b in range(5) if LENGTHS[b] and TEMPERATURES[b]]
    logits = fused.logits(states)[warm] / torch.tensor([[TEMPERATURES[b]] for b in warm])
    exact = torch.softmax(logits.double(), -1)
    error, plain = ((p.double() - exact).abs().amax() for p in (probs[warm, 0], torch.softmax(logits, -1)))
    assert float(error) <= 2 * float(plain) + 2**-24  # one rounding of a probability near 1
    assert float((probs[_valid(draws.lengths)].double().sum(-1) - 1).abs().max()) < 1e-6
    assert probs[4, 0].max() == 1.0  # greedy: a point mass
    assert probs[4, 0].count_nonzero() == 1


@pytest.mark.parametrize(("num_taps", "ids"), KINDS)
def test_every_draw_is_the_inverse_cdf_of_the_numbers_handed_over(ops: CpuOps, num_taps: int, ids: Tensor | None) -> None:
    """To float64, and of the uniform that the core's keys name: another step's, or a renormalised law's draw, would miss."""
    weights, draws = _weights(ops, torch.bfloat16, num_taps, ids), _draws(coupled=False)
    for seed in range(40):
        keyed = dataclasses.replace(draws, seeds=[seed * 5 + b for b in range(5)])
        chains = ops.draft_head(weights).draw_chains(_rows(num_taps, torch.bfloat16), _cache(torch.bfloat16), keyed)
        assert chains.probs is not None
        for b, step in _valid(draws.lengths).nonzero().tolist():
            token = int(chains.token_ids[b, step])
            column = token if ids is None else int((ids == token).nonzero())
            uniform = float(TorchOps().uniforms([keyed.seeds[b]], [POSITIONS[b] + step * LANE], Stream.DRAFT))
            sums = chains.probs[b, step].double().cumsum(0)
            below = float(sums[column - 1]) if column else 0.0
            assert below <= uniform * float(sums[-1]) + 1e-12
            assert uniform * float(sums[-1]) < float(sums[column]) + 1e-12


def _outcome(head: DraftHead, chosen: Sequence[int], coupled: bool, num_taps: int, dtype: torch.dtype) -> tuple[Chains, HeadCache]:
    cache = _cache(dtype)
    return head.draw_chains(_rows(num_taps, dtype, chosen), cache, _draws(coupled, chosen)), cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coupled", [False, True])
def test_a_requests_drafts_do_not_depend_on_the_batch(ops: CpuOps, dtype: torch.dtype, coupled: bool, restore_threads: None) -> None:
    """Bit for bit: alone on one thread, or among others in another order on two."""
    head = ops.draft_head(_weights(ops, dtype, 3, REDUCED))
    order = (4, 2, 3, 0, 1)
    torch.set_num_threads(2)
    together, cache = _outcome(head, order, coupled, 3, dtype)
    torch.set_num_threads(1)
    for place, b in enumerate(order):
        if LENGTHS[b] == 0:
            continue
        alone, own_cache = _outcome(head, [b], coupled, 3, dtype)
        assert torch.equal(alone.token_ids[0], together.token_ids[place, : LENGTHS[b]])
        assert torch.equal(own_cache.k[:, SLOTS_OF[b]], cache.k[:, SLOTS_OF[b]])
        if alone.probs is not None and together.probs is not None:
            assert torch.equal(alone.probs[0], together.probs[place, : LENGTHS[b]])


@pytest.mark.parametrize("coupled", [False, True])
def test_entries_behind_a_length_hold_no_garbage(ops: CpuOps, coupled: bool) -> None:
    head, draws = ops.draft_head(_weights(ops, torch.float32, 0, None)), _draws(coupled)
    chains = head.draw_chains(_rows(0, torch.float32), _cache(torch.float32), draws)
    assert chains.token_ids[~_valid(draws.lengths)].count_nonzero() == 0
    assert chains.probs is None or chains.probs[~_valid(draws.lengths)].count_nonzero() == 0


@pytest.mark.parametrize("coupled", [False, True])
def test_truncated_laws_are_drawn_by_the_readable_form(ops: CpuOps, coupled: bool) -> None:
    weights, rows = _weights(ops, torch.float32, 0, None), _rows(0, torch.float32)
    draws = _draws(coupled, sampling=[SamplingParams(top_k=3), *(SamplingParams() for _ in range(4))])
    got, wanted = (head.draw_chains(rows, _cache(torch.float32), draws) for head in (ops.draft_head(weights), DraftHead(ops, weights)))
    assert torch.equal(got.token_ids, wanted.token_ids)
    if got.probs is not None and wanted.probs is not None:
        assert torch.equal(got.probs, wanted.probs)
        assert int((got.probs[0] > 0).sum(-1).max()) == 3


def test_weights_updated_in_place_are_used(ops: CpuOps) -> None:
    weights, rows, draws = _weights(ops, torch.float32, 0, None), _rows(0, torch.float32), _draws(coupled=False)
    head = ops.draft_head(weights)
    before = head.draw_chains(rows, _cache(torch.float32), draws).probs
    weights.embedding.mul_(-1)
    between = head.draw_chains(rows, _cache(torch.float32), draws).probs
    weights.head.update(_normal(VOCAB, HIDDEN, seed=3), None)
    after = head.draw_chains(rows, _cache(torch.float32), draws).probs
    assert before is not None
    assert between is not None
    assert after is not None
    assert not torch.equal(before[:, 0], between[:, 0])
    assert not torch.equal(between[:, 0], after[:, 0])


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(ops: CpuOps, coupled: bool, temperature: float, poison: float) -> None:
    weights, rows = _weights(ops, torch.float32, 0, None), _rows(0, torch.float32, [0, 2])
    rows.taps[0][5] = poison  # a row of the second request
    draws = _draws(coupled, [0, 2], sampling=[SamplingParams(temperature=temperature)] * 2)
    with pytest.raises(ValueError, match="no distribution to draw from: the draft head's logits of request 1 are not finite"):
        ops.draft_head(weights).draw_chains(rows, _cache(torch.float32), draws)
    with pytest.raises(ValueError, match="no distribution to draw from"):
        DraftHead(ops, weights).draw_chains(rows, _cache(torch.float32), dataclasses.replace(draws, sampling=[SamplingParams()] * 2))


def test_what_reaches_outside_is_refused(ops: CpuOps) -> None:
    head, cache, plan = ops.draft_head(_weights(ops, torch.float32, 0, None)), _cache(torch.float32), _rows(0, torch.float32).plan
    rows, draws = _rows(0, torch.float32), _draws(coupled=False)
    long = dataclasses.replace(plan, context_lengths=torch.tensor([CAPACITY - 3, 5, 0, 7, 11]))  # room for 1 row and 2 of 3 fed ones
    wrong = (
        (dataclasses.replace(rows, token_ids=torch.full_like(rows.token_ids, VOCAB)), draws),
        (dataclasses.replace(rows, plan=long), draws),
        (dataclasses.replace(rows, plan=dataclasses.replace(plan, slots=torch.tensor([0, 1, 2, 3, SLOTS]))), draws),
        (rows, dataclasses.replace(draws, lengths=torch.tensor([1, 1, 1, 1, 1]))),  # the fourth has no new row
        (rows, dataclasses.replace(draws, lengths=torch.tensor([5, 1, 1, 0, 1]))),  # more than num_steps
    )
    for bad_rows, bad_draws in wrong:
        with pytest.raises(ValueError, match="must stay inside 5 slots of 48 tokens and a vocabulary of 601"):
            head.draw_chains(bad_rows, cache, bad_draws)
    with pytest.raises(ValueError, match="as many sampling parameters"):
        head.draw_chains(rows, cache, dataclasses.replace(draws, seeds=[1]))
    with pytest.raises(ValueError, match="reads 1 tapped layers; got 3"):
        head.absorb(_rows(3, torch.float32), cache)


def test_weights_that_do_not_fit_are_refused(ops: CpuOps) -> None:
    weights = _weights(ops, torch.float32, 0, REDUCED)
    wrong: dict[str, dict[str, object]] = {
        r"head must be \(86, 40\) in torch.float32; got \(85, 40\)": {"head": ops.pack_linear(torch.zeros(85, HIDDEN), None)},
        "fc was packed by other operations": {"fc": TorchOps().pack_linear(torch.zeros(HIDDEN, 2 * HIDDEN), None)},
        "token_ids reach outside the vocabulary of 601": {"token_ids": REDUCED + 20},
        "tap_fc and tap_norms come together": {"tap_norms": (torch.ones(HIDDEN),)},
        "hidden_norm must be": {"hidden_norm": torch.ones(HIDDEN + 1)},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            ops.draft_head(dataclasses.replace(weights, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [CpuOps, TorchOps])
@pytest.mark.parametrize("window", [0, 3])
def test_a_tree_run_level_by_level_is_the_tree_run_at_once(ops: CpuOps, kind: type, window: int) -> None:
    own = kind()
    head, dtype = own.draft_head(_weights(own, torch.float32, 0, None, window)), torch.float32
    parents = [-1, -1, 0, 0, 1, 2, 4]
    sizes = (2, 3, 2)
    masks: list[int] = []
    for node, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
    states, tokens = _normal(2, 7, HIDDEN, seed=1), torch.arange(14).view(2, 7)
    positions = torch.tensor([9, 30])[:, None] + torch.tensor([mask.bit_count() - 1 for mask in masks])

    def run(begin: int, count: int, cache: HeadCache) -> Tensor:
        plan = AttentionPlan(
            row_offsets=torch.arange(3) * count,
            slots=torch.tensor([2, 0]),
            context_lengths=torch.tensor([9, 30]),
            ancestors=torch.tensor(masks[begin : begin + count]).repeat(2)[:, None],
            num_earlier=begin,
        )
        part = slice(begin, begin + count)
        at = positions[:, part].flatten()
        return head.step(states[:, part].flatten(0, 1), tokens[:, part].flatten(), cache, plan, at).view(2, count, HIDDEN)

    whole = run(0, 7, _cache(dtype))
    cache, begin, parts = _cache(dtype), 0, []
    for size in sizes:
        parts.append(run(begin, size, cache))
        begin += size
    if isinstance(own, CpuOps):
        assert torch.equal(torch.cat(parts, dim=1), whole)
    else:
        torch.testing.assert_close(torch.cat(parts, dim=1), whole)
