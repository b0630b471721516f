"""Tree attention in Triton: ragged batches of draft trees over the slotted K/V cache, split over the keys.

A program is some rows of one request, all the query heads of one key/value head, and one part of the request's keys: every K/V tile is
loaded once for all of them. A second kernel adds the parts up. How the keys are split depends on the request's own length only, so a
row's bits do not depend on the other requests.

Shape legend: B requests, R rows, H query heads, Hkv key/value heads, G = H / Hkv, d head size, S slots, C slot capacity, W mask words,
P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_spec.engine.plan import AttentionPlan, mask_words

MAX_PARTS = 32
MIN_PART = 256  # keys
_BLOCK_KEYS = 64
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def attention(
    q: Tensor,  # [R, H, d]
    k_cache: Tensor,  # [S, Hkv, C, d]
    v_cache: Tensor,  # [S, Hkv, C, d]
    plan: AttentionPlan,
    scale: float,
    sliding_window: int = 0,
) -> Tensor:
    """softmax(scale q Kᵀ) V over the cells that the plan lets each row see -> [R, H d]; products and sums in float32.

    rollout_spec.engine.ops.Ops has the signature, TorchOps.attention the readable form. The plan's tensors lie beside q; its indices are
    not checked against the cache here, as that would wait for the device.

    Raises ValueError for dtypes other than float32, float16 and bfloat16, and shapes that do not fit one another.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    if q.dtype not in _DTYPES or k_cache.dtype is not q.dtype or v_cache.dtype is not q.dtype:
        raise ValueError(f"q and the caches must be of one dtype of {_DTYPES}; got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    if k_cache.shape[3] != head_dim or num_heads % num_kv_heads or v_cache.shape != k_cache.shape:
        raise ValueError(f"q {tuple(q.shape)} does not fit caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError("k_cache and v_cache must have the same strides, the last of them 1")
    out = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    first, words = visible(plan, sliding_window)
    group, most_rows = num_heads // num_kv_heads, int(plan.rows_per_request.max())
    longest = int((plan.context_lengths + plan.rows_per_request).max()) + plan.num_earlier
    num_parts = min(MAX_PARTS, triton.cdiv(longest, MIN_PART))
    block_rows = min(64, max(16, triton.next_power_of_2(most_rows * group)))
    parts = torch.empty(num_parts, num_rows, num_heads, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(num_parts, num_rows, num_heads, 2, dtype=torch.float32, device=q.device)  # largest score, sum of weights
    block_dim = max(16, triton.next_power_of_2(head_dim))
    row_blocks = triton.cdiv(most_rows * group, block_rows)
    lengths = (plan.row_offsets, plan.slots, plan.context_lengths)
    _attend[(plan.slots.numel(), num_kv_heads, row_blocks * num_parts)](
        q.contiguous(), k_cache, v_cache, parts, sums, *lengths, first, words, scale, num_rows, plan.num_earlier, num_parts,
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        group=group, head_dim=head_dim, num_kv_heads=num_kv_heads, mask_words=words.shape[1],
        block_rows=block_rows, block_keys=_BLOCK_KEYS, block_dim=block_dim, max_parts=MAX_PARTS, min_part=MIN_PART,
        widens=triton.knobs.runtime.interpret,  # Triton's interpreter multiplies bfloat16 as if they were integers
    )  # fmt: skip
    _add_parts[(num_rows, num_heads)](
        parts, sums, out, *lengths[::2], plan.row_requests(), num_rows, plan.num_earlier,
        num_heads=num_heads, head_dim=head_dim, block_dim=block_dim, block_keys=_BLOCK_KEYS, max_parts=MAX_PARTS, min_part=MIN_PART,
    )  # fmt: skip
    return out


def visible(plan: AttentionPlan, sliding_window: int) -> tuple[Tensor, Tensor]:
    """What each row sees: the context's keys from first [R] int64 on, and the new rows in words [R, W] int64.

    The keys a row sees come in order of position, one each, and end with its own: a window keeps the last ones.
    """
    requests = plan.row_requests()
    if plan.ancestors is None:
        within = torch.arange(plan.num_rows, device=plan.slots.device) - plan.row_offsets[requests]
        bits = torch.arange(int(plan.rows_per_request.max()), device=plan.slots.device) <= within[:, None]
    else:
        columns = torch.arange(64 * plan.ancestors.shape[1], device=plan.slots.device)
        bits = (plan.ancestors[:, columns // 64] >> (columns % 64)) & 1 == 1
    if sliding_window <= 0:
        first = torch.zeros(plan.num_rows, dtype=torch.int64, device=plan.slots.device)
        return first, mask_words(bits) if plan.ancestors is None else plan.ancestors.contiguous()
    seen = bits.sum(1)
    kept = bits & (bits.flip(1).cumsum(1).flip(1) <= sliding_window)
    return (plan.context_lengths[requests] + seen - sliding_window).clamp_min(0), mask_words(kept)


@triton.jit
def _part_length(num_keys, block_keys: tl.constexpr, max_parts: tl.constexpr, min_part: tl.constexpr):
    """Keys of one part of a request with so many, a multiple of block_keys."""
    even = tl.cdiv(tl.cdiv(num_keys, max_parts), block_keys) * block_keys
    return tl.maximum(even, min_part)


@triton.jit
def _product(a, b, widens: tl.constexpr):
    if widens:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _attend(
    q, k_cache, v_cache, parts, sums, row_offsets, slots, contexts, first_visible, words, scale, num_rows, num_earlier, num_parts,
    slot_stride, head_stride, key_stride,
    group: tl.constexpr, head_dim: tl.constexpr, num_kv_heads: tl.constexpr, mask_words: tl.constexpr,
    block_rows: tl.constexpr, block_keys: tl.constexpr, block_dim: tl.constexpr, max_parts: tl.constexpr, min_part: tl.constexpr,
    widens: tl.constexpr,
):  # fmt: skip
    request, kv_head = tl.program_id(0), tl.program_id(1)
    block, part = tl.program_id(2) // num_parts, tl.program_id(2) % num_parts
    begin = tl.load(row_offsets + request)
    own_rows = tl.load(row_offsets + request + 1) - begin
    context = tl.load(contexts + request)
    num_keys = context + num_earlier + own_rows
    part_length = _part_length(num_keys, block_keys, max_parts, min_part)
    from_key, to_key = part * part_length, tl.minimum((part + 1) * part_length, num_keys)
    if (block * block_rows < own_rows * group) & (from_key < num_keys):
        index = block * block_rows + tl.arange(0, block_rows)
        is_row = index < own_rows * group
        row, head = begin + index // group, kv_head * group + index % group
        dims = tl.arange(0, block_dim)
        is_dim = dims < head_dim
        at = (row[:, None] * (num_kv_heads * group) + head[:, None]) * head_dim + dims[None, :]
        queries = tl.load(q + at, mask=is_row[:, None] & is_dim[None, :], other=0.0)
        first = tl.load(first_visible + row, mask=is_row, other=num_keys)
        largest = tl.full((block_rows,), float("-inf"), tl.float32)
        weight = tl.zeros((block_rows,), tl.float32)
        total = tl.zeros((block_rows, block_dim), tl.float32)
        cell = tl.load(slots + request) * slot_stride + kv_head * head_stride
        # Tiles that every row's window hides are not read.
        lowest = tl.minimum(tl.min(first, axis=0), context) // block_keys * block_keys
        for key in range(tl.maximum(from_key, lowest), to_key, block_keys):
            keys = key + tl.arange(0, block_keys)
            is_key = keys < to_key
            where = cell + keys[:, None] * key_stride + dims[None, :]
            held = is_key[:, None] & is_dim[None, :]
            tile = tl.load(k_cache + where, mask=held, other=0.0)
            scores = _product(queries, tl.trans(tile), widens) * scale
            sees = (keys[None, :] < context) & (keys[None, :] >= first[:, None])
            if key + block_keys > context:
                node = keys - context
                is_node = (node >= 0) & is_key & (node < 64 * mask_words)
                word = tl.load(words + row[:, None] * mask_words + node[None, :] // 64, mask=is_row[:, None] & is_node[None, :], other=0)
                sees = sees | (is_node[None, :] & (((word >> (node[None, :] % 64)) & 1) == 1))
            scores = tl.where(sees & is_key[None, :], scores, float("-inf"))
            most = tl.maximum(largest, tl.max(scores, axis=1))
            base = tl.where(most == float("-inf"), 0.0, most)
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(largest - base)
            weight = weight * shrink + tl.sum(weights, axis=1)
            values = tl.load(v_cache + where, mask=held, other=0.0)
            total = total * shrink[:, None] + _product(weights.to(values.dtype), values, widens)
            largest = most
        to = (part * num_rows + row) * (num_kv_heads * group) + head
        tl.store(parts + to[:, None] * head_dim + dims[None, :], total, mask=is_row[:, None] & is_dim[None, :])
        tl.store(sums + 2 * to, largest, mask=is_row)
        tl.store(sums + 2 * to + 1, weight, mask=is_row)


@triton.jit
def _add_parts(
    parts, sums, out, row_offsets, contexts, row_requests, num_rows, num_earlier,
    num_heads: tl.constexpr, head_dim: tl.constexpr, block_dim: tl.constexpr, block_keys: tl.constexpr,
    max_parts: tl.constexpr, min_part: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    request = tl.load(row_requests + row)
    own_rows = tl.load(row_offsets + request + 1) - tl.load(row_offsets + request)
    num_keys = tl.load(contexts + request) + num_earlier + own_rows
    num_parts = tl.cdiv(num_keys, _part_length(num_keys, block_keys, max_parts, min_part))
    part = tl.arange(0, max_parts)
    is_part = part < num_parts
    at = (part.to(tl.int64) * num_rows + row) * num_heads + head
    largest = tl.load(sums + 2 * at, mask=is_part, other=float("-inf"))
    weight = tl.load(sums + 2 * at + 1, mask=is_part, other=0.0)
    share = tl.exp(largest - tl.max(largest, axis=0))  # a row sees itself, so the maximum is finite
    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim
    partial = tl.load(parts + at[:, None] * head_dim + dims[None, :], mask=is_part[:, None] & is_dim[None, :], other=0.0)
    total = tl.sum(partial * share[:, None], axis=0) / tl.sum(weight * share, axis=0)
    tl.store(out + (row.to(tl.int64) * num_heads + head) * head_dim + dims, total.to(out.dtype.element_ty), mask=is_dim)
