"""Triton's tree attention and commit, run by Triton's interpreter where there is no GPU, against float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from rollout_spec.engine.plan import AttentionPlan

pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollout-spec[triton]'")

from rollout_spec_kernels.triton.attention import MIN_PART, attention
from rollout_spec_kernels.triton.commit import commit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TREE = (-1, 0, 0, 1, 1, 2, 3, 6, 5)
SLOTS, CAPACITY = 4, 2 * MIN_PART + 90


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _masks(parents: tuple[int, ...], num_words: int = 1) -> Tensor:
    """[rows, W] bitmask words of a tree given by parent rows (-1: none)."""
    masks: list[int] = []
    for row, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << row)
    words = [[mask >> 64 * w & (1 << 64) - 1 for w in range(num_words)] for mask in masks]
    return torch.tensor([[word - (word >> 63 << 64) for word in row] for row in words], device=DEVICE)


def _plan(contexts: list[int], rows: list[int], ancestors: Tensor | None = None, slots: list[int] | None = None) -> AttentionPlan:
    return AttentionPlan(
        row_offsets=torch.tensor([0, *rows], device=DEVICE).cumsum(0),
        slots=torch.tensor(slots if slots is not None else list(range(len(rows))), device=DEVICE),
        context_lengths=torch.tensor(contexts, device=DEVICE),
        ancestors=ancestors,
    )


def _reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, window: int, dtype: torch.dtype) -> Tensor:
    """Softmax attention in the given dtype, request by request."""
    group = q.shape[1] // k_cache.shape[1]
    out = torch.empty(q.shape, dtype=dtype, device=DEVICE)
    for b in range(plan.slots.numel()):
        seen, rows = plan.visible(b).to(DEVICE), slice(int(plan.row_offsets[b]), int(plan.row_offsets[b + 1]))
        if window:
            seen = seen & (seen.flip(1).cumsum(1).flip(1) <= window)
        k, v = (cache[plan.slots[b], :, : seen.shape[1]].to(dtype).repeat_interleave(group, 0) for cache in (k_cache, v_cache))
        scores = torch.einsum("rhd,hnd->rhn", q[rows].to(dtype), k) * scale
        weights = torch.softmax(scores.masked_fill(~seen[:, None], -math.inf), -1)
        out[rows] = torch.einsum("rhn,hnd->rhd", weights, v)
    return out.flatten(1)


def _caches(num_kv_heads: int, head_dim: int, dtype: torch.dtype, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """Random keys and values where the plan's requests have any, NaN elsewhere."""
    k, v = (_normal(SLOTS, num_kv_heads, CAPACITY, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    for cache in (k, v):
        used = torch.zeros(SLOTS, CAPACITY, dtype=torch.bool, device=DEVICE)
        for b, slot in enumerate(plan.slots.tolist()):
            used[slot, : int(plan.context_lengths[b] + plan.num_earlier + plan.rows_per_request[b])] = True
        cache.transpose(1, 2)[~used] = math.nan
    return k, v


PLANS = {
    "decode": _plan([0, 5, 63, 2 * MIN_PART + 7], [1, 1, 1, 1], slots=[3, 1, 0, 2]),
    "chains": _plan([3, 64, MIN_PART - 2], [5, 0, 17]),
    "trees": _plan([0, 30, 2 * MIN_PART - 3], [9, 4, 1], ancestors=torch.cat([_masks(TREE), _masks((-1, 0, 0, 2)), _masks((-1,))])),
    "a level of growing trees": dataclasses.replace(
        _plan([0, 60], [3, 3], ancestors=torch.cat([_masks(TREE)[3:6], _masks(TREE)[3:6]])), num_earlier=3
    ),
    "tree of two words": _plan([MIN_PART - 40], [80], ancestors=_masks((-1, *(row // 2 for row in range(79))), 2)),
}


SHAPES = {torch.float32: (6, 2, 32), torch.bfloat16: (4, 1, 40), torch.float16: (2, 2, 16)}  # H, Hkv, d


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(
    ("dtype", "window"),
    [(torch.float32, 0), (torch.float32, 3), (torch.float32, 70), (torch.bfloat16, 0), (torch.bfloat16, 70), (torch.float16, 3)],
)
def test_error_is_at_most_twice_that_of_torch(dtype: torch.dtype, plan: AttentionPlan, window: int) -> None:
    num_heads, num_kv_heads, head_dim = SHAPES[dtype]
    k, v = _caches(num_kv_heads, head_dim, dtype, plan)
    q, scale = _normal(plan.num_rows, num_heads, head_dim, seed=3, dtype=dtype), head_dim**-0.5
    exact = _reference(q, k, v, plan, scale, window, torch.float64)
    plain = _reference(q, k, v, plan, scale, window, dtype).double()
    got = attention(q, k, v, plan, scale, window)
    assert got.dtype is dtype
    assert got.shape == exact.shape
    assert not got.isnan().any()
    assert float((got.double() - exact).abs().max()) <= 2 * float((plain - exact).abs().max()) + torch.finfo(dtype).eps


def test_a_row_does_not_depend_on_the_other_requests() -> None:
    """Bitwise, whatever part count the longest request asks for."""
    plan = _plan([2 * MIN_PART, 50, 7], [2, 9, 3], ancestors=torch.cat([_masks((-1, 0)), _masks(TREE), _masks((-1, 0, 0))]))
    k, v = _caches(2, 32, torch.float32, plan)
    q = _normal(plan.num_rows, 4, 32, seed=3)
    together = attention(q, k, v, plan, 0.2)
    alone = attention(q[2:11], k, v, _plan([50], [9], ancestors=_masks(TREE), slots=[1]), 0.2)
    assert torch.equal(alone, together[2:11])


def test_large_scores_and_nan() -> None:
    plan = _plan([20, MIN_PART + 9], [1, 1])
    k, v = _caches(1, 16, torch.float32, plan)
    q = _normal(2, 1, 16, seed=3) * 1e4  # one weight is 1, the others underflow to 0
    got = attention(q, k, v, plan, 1.0)
    assert torch.allclose(got.double(), _reference(q, k, v, plan, 1.0, 0, torch.float64), rtol=1e-3)
    k[0, 0, 7, 3] = math.nan
    dirty = attention(q, k, v, plan, 1.0)
    assert dirty[0].isnan().all()
    assert torch.equal(dirty[1], got[1])


def test_what_does_not_fit_is_refused() -> None:
    cache = torch.zeros(SLOTS, 2, 32, 16, device=DEVICE)
    with pytest.raises(ValueError, match="does not fit"):
        attention(torch.zeros(1, 3, 16, device=DEVICE), cache, cache, _plan([0], [1]), 1.0)
    with pytest.raises(ValueError, match="one dtype"):
        attention(torch.zeros(1, 2, 16, device=DEVICE).double(), cache, cache, _plan([0], [1]), 1.0)
    with pytest.raises(ValueError, match="same strides"):
        attention(torch.zeros(1, 2, 16, device=DEVICE), cache, cache.transpose(1, 2).contiguous().transpose(1, 2), _plan([0], [1]), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commit_moves_accepted_rows_in_every_layer_and_nothing_else(dtype: torch.dtype) -> None:
    shape = (3, SLOTS, 2, 30, 24)
    k, v = _normal(*shape, seed=1, dtype=dtype), _normal(*shape, seed=2, dtype=dtype)
    slots, contexts = torch.tensor([2, 0, 3], device=DEVICE), torch.tensor([7, 0, 26], device=DEVICE)
    moves = torch.tensor([[0, 2, 5, 9, 10], [1, 2, 3, 4, -1], [-1, -1, -1, -1, -1]], device=DEVICE)  # sources of one are targets of others
    wanted = []
    for cache in (k, v):
        moved = cache.clone()
        for b in range(3):
            for i, source in enumerate(moves[b].tolist()):
                if source >= 0:
                    moved[:, slots[b], :, contexts[b] + i] = cache[:, slots[b], :, contexts[b] + source]
        wanted.append(moved)
    commit(k, v, slots, contexts, moves)
    assert torch.equal(k, wanted[0])
    assert torch.equal(v, wanted[1])
    with pytest.raises(ValueError, match="contiguous"):
        commit(k.transpose(1, 2), v.transpose(1, 2), slots, contexts, moves)
