"""Attention and what surrounds the cache, against float64 and against plain decoding."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from rollout_spec.engine.plan import AttentionPlan
from rollout_spec_kernels.cpu import CpuOps

DTYPES = (torch.float32, torch.bfloat16)
SLOTS, CAPACITY = 4, 150


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _masks(parents: list[int], num_words: int = 1) -> Tensor:
    """[rows, W] bitmask words of a tree given by parent rows (-1: none)."""
    masks: list[int] = []
    for row, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << row)
    words = [[mask >> 64 * w & (1 << 64) - 1 for w in range(num_words)] for mask in masks]
    return torch.tensor([[word - (word >> 63 << 64) for word in row] for row in words])


def _plan(contexts: list[int], rows: list[int], ancestors: Tensor | None = None, slots: list[int] | None = None) -> AttentionPlan:
    return AttentionPlan(
        row_offsets=torch.tensor([0, *rows]).cumsum(0),
        slots=torch.tensor(slots if slots is not None else list(range(len(rows)))),
        context_lengths=torch.tensor(contexts),
        ancestors=ancestors,
    )


def _reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float, window: int, dtype: torch.dtype) -> Tensor:
    """Softmax attention in the given dtype, request by request."""
    group = q.shape[1] // k_cache.shape[1]
    out = torch.empty(q.shape, dtype=dtype)
    for b in range(plan.slots.numel()):
        visible, rows = plan.visible(b), slice(int(plan.row_offsets[b]), int(plan.row_offsets[b + 1]))
        if window:  # the keys a row sees come in order of position and the last one is its own: the window keeps the last ones
            visible = visible & (visible.flip(1).cumsum(1).flip(1) <= window)
        k, v = (cache[plan.slots[b], :, : visible.shape[1]].to(dtype).repeat_interleave(group, 0) for cache in (k_cache, v_cache))
        scores = torch.einsum("rhd,hnd->rhn", q[rows].to(dtype), k) * scale
        weights = torch.softmax(scores.masked_fill(~visible[:, None], -math.inf), -1)
        out[rows] = torch.einsum("rhn,hnd->rhd", weights, v)
    return out.flatten(1)


def _caches(num_kv_heads: int, head_dim: int, dtype: torch.dtype, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """Random keys and values where the plan's requests have any, NaN elsewhere."""
    k, v = (_normal(SLOTS, num_kv_heads, CAPACITY, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    for cache in (k, v):
        used = torch.zeros(SLOTS, CAPACITY, dtype=torch.bool)
        for b, slot in enumerate(plan.slots.tolist()):
            used[slot, : int(plan.context_lengths[b] + plan.num_earlier + plan.rows_per_request[b])] = True
        cache.transpose(1, 2)[~used] = math.nan
    return k, v


TREE = [-1, 0, 0, 1, 1, 2, 3, 6, 5]
PLANS = {
    "decode": _plan([0, 5, 31, 140], [1, 1, 1, 1], slots=[3, 1, 0, 2]),
    "chains": _plan([3, 64, 100], [5, 0, 17]),
    "prefill": _plan([0, 33], [97, 40]),
    "trees": _plan([0, 30, 63], [9, 4, 1], ancestors=torch.cat([_masks(TREE), _masks([-1, 0, 0, 2]), _masks([-1])])),
    "a level of growing trees": dataclasses.replace(
        _plan([0, 60], [3, 3], ancestors=torch.cat([_masks(TREE)[3:6], _masks(TREE)[3:6]])), num_earlier=3
    ),
    "tree of two words": _plan([40], [80], ancestors=_masks([-1, *(row // 2 for row in range(79))], 2)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 8), (6, 1, 40), (2, 1, 128)])
@pytest.mark.parametrize("window", [0, 3, 40])
def test_error_is_at_most_twice_that_of_torch(
    ops: CpuOps, dtype: torch.dtype, plan: AttentionPlan, num_heads: int, num_kv_heads: int, head_dim: int, window: int
) -> None:
    k, v = _caches(num_kv_heads, head_dim, dtype, plan)
    q, scale = _normal(plan.num_rows, num_heads, head_dim, seed=3, dtype=dtype), head_dim**-0.5
    exact = _reference(q, k, v, plan, scale, window, torch.float64)
    plain = _reference(q, k, v, plan, scale, window, dtype).double()
    got = ops.attention(q, k, v, plan, scale, window)
    assert got.dtype is dtype
    assert got.shape == exact.shape
    assert not got.isnan().any()
    assert float((got.double() - exact).abs().max()) <= 2 * float((plain - exact).abs().max()) + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 6])
def test_rows_of_a_tree_equal_plain_decoding_of_their_path(ops: CpuOps, dtype: torch.dtype, window: int, restore_threads: None) -> None:
    """Bitwise: verified in a tree among other requests, or decoded one token at a time with the path's keys in place."""
    context, num_rows, scale = 61, len(TREE), 0.125  # the path crosses a chunk of 32 keys
    plan = _plan([30, context, 90], [4, num_rows, 1], ancestors=torch.cat([_masks([-1, 0, 1, 2]), _masks(TREE), _masks([-1])]))
    k, v = _caches(3, 64, dtype, plan)
    q = _normal(plan.num_rows, 9, 64, seed=3, dtype=dtype)
    torch.set_num_threads(2)
    together = ops.attention(q, k, v, plan, scale, window)
    torch.set_num_threads(1)
    assert torch.equal(ops.attention(q, k, v, plan, scale, window), together)
    visible = plan.visible(1)
    for row in range(num_rows):
        keys = visible[row].nonzero()[:, 0]
        path_k, path_v = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
        path_k[2, :, : len(keys)], path_v[2, :, : len(keys)] = k[1, :, keys], v[1, :, keys]
        alone = ops.attention(q[4 + row][None], path_k, path_v, _plan([len(keys) - 1], [1], slots=[2]), scale, window)
        assert torch.equal(alone[0], together[4 + row]), f"row {row}"


def test_chunked_prefill_equals_one_prefill(ops: CpuOps) -> None:
    plan = _plan([0], [130])
    k, v = _caches(2, 64, torch.bfloat16, plan)
    q = _normal(130, 6, 64, seed=3, dtype=torch.bfloat16)
    whole = ops.attention(q, k, v, plan, 0.125)
    parts = [ops.attention(q[i : i + n], k, v, _plan([i], [n]), 0.125) for i, n in ((0, 50), (50, 1), (51, 79))]
    assert torch.equal(torch.cat(parts), whole)


def test_nan_and_large_scores(ops: CpuOps) -> None:
    plan = _plan([20, 20], [1, 1])
    k, v = _caches(1, 8, torch.float32, plan)
    q = _normal(2, 1, 8, seed=3) * 1e4  # one weight is 1, the others underflow to 0
    got = ops.attention(q, k, v, plan, 1.0)
    exact = _reference(q, k, v, plan, 1.0, 0, torch.float64)
    assert torch.allclose(got.double(), exact, rtol=1e-3)  # scores of 1e4 carry an error of 1e-3 in float32
    k[0, 0, 7, 3] = math.nan
    dirty = ops.attention(q, k, v, plan, 1.0)
    assert dirty[0].isnan().all()
    assert torch.equal(dirty[1], got[1])


_DEEP = dataclasses.replace(_plan([0, 148], [1, 1], ancestors=_masks([-1, 0, 1])[[0, 2]]), num_earlier=2)


@pytest.mark.parametrize(
    "plan",
    [_plan([0, 150], [1, 1]), _plan([0, 5], [1, 2]), _plan([0, 5], [1, 1], slots=[0, 4]), _plan([0, -1], [1, 1]), _DEEP],
    ids=str,
)
def test_a_plan_that_leaves_the_cache_is_refused(ops: CpuOps, plan: AttentionPlan) -> None:
    cache = torch.zeros(SLOTS, 1, CAPACITY, 8)
    with pytest.raises(ValueError, match="the plan must cover 2 rows and stay inside the cache of 4 slots of 150 tokens"):
        ops.attention(torch.zeros(2, 1, 8), cache, cache, plan, 1.0)


def test_odd_head_sizes_are_refused(ops: CpuOps) -> None:
    cache = torch.zeros(1, 1, 4, 12)
    with pytest.raises(ValueError, match="multiple of 8"):
        ops.attention(torch.zeros(1, 1, 12), cache, cache, _plan([0], [1]), 1.0)


def test_commit_moves_accepted_rows_in_every_layer_and_nothing_else(ops: CpuOps) -> None:
    shape = (3, SLOTS, 2, 30, 8)
    k, v = _normal(*shape, seed=1, dtype=torch.bfloat16), _normal(*shape, seed=2, dtype=torch.bfloat16)
    slots, contexts = torch.tensor([2, 0, 3]), torch.tensor([7, 0, 26])
    moves = torch.tensor([[0, 2, 5, 9], [1, 3, 4, -1], [-1, -1, -1, -1]])
    wanted = []
    for cache in (k, v):
        moved = cache.clone()
        for b in range(3):
            for i, source in enumerate(moves[b].tolist()):
                if source >= 0:
                    moved[:, slots[b], :, contexts[b] + i] = cache[:, slots[b], :, contexts[b] + source]
        wanted.append(moved)
    ops.commit(k, v, slots, contexts, moves)
    assert torch.equal(k, wanted[0])
    assert torch.equal(v, wanted[1])
    with pytest.raises(ValueError, match="inside the cache of 4 slots of 30 tokens"):
        ops.commit(k, v, slots, contexts, torch.full((3, 1), 23))
