"""Moving the accepted path's K/V together, all layers in one launch, in Triton.

Shape legend: L layers, S slots, Hkv key/value heads, C slot capacity, d head size, B requests, D moves.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def commit(k_cache: Tensor, v_cache: Tensor, slots: Tensor, context_lengths: Tensor, moves: Tensor) -> None:
    """In every layer, cell context + i takes what cell context + moves[b, i] holds (negative: nothing), in place.

    Caches [L, S, Hkv, C, d], slots and context_lengths [B], moves [B, D] int64, of which a request's ascend (moves[b, i] >= i).
    Indices are not checked against the cache here, as that would wait for the device. Raises ValueError for caches that are not
    contiguous and alike.
    """
    if v_cache.shape != k_cache.shape or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous and of one shape [L, S, Hkv, C, d]")
    num_layers, num_slots, num_kv_heads, capacity, head_dim = k_cache.shape
    num_requests, num_moves = moves.shape
    if num_requests == 0 or num_moves == 0:
        return
    _move[(num_layers, num_requests, 2 * num_kv_heads)](
        k_cache, v_cache, slots, context_lengths, moves.contiguous(), num_slots, capacity,
        num_kv_heads=num_kv_heads, head_dim=head_dim, num_moves=num_moves,
        block_moves=triton.next_power_of_2(num_moves), block_dim=triton.next_power_of_2(head_dim),
    )  # fmt: skip


@triton.jit
def _move(
    k_cache, v_cache, slots, contexts, moves, num_slots, capacity,
    num_kv_heads: tl.constexpr, head_dim: tl.constexpr, num_moves: tl.constexpr, block_moves: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    layer, request = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, is_value = tl.program_id(2) % num_kv_heads, tl.program_id(2) // num_kv_heads
    step = tl.arange(0, block_moves)
    source = tl.load(moves + request * num_moves + step, mask=step < num_moves, other=-1)
    dims = tl.arange(0, block_dim)
    moved = (source > step)[:, None] & (dims < head_dim)[None, :]
    cell = ((layer * num_slots + tl.load(slots + request)) * num_kv_heads + head) * capacity + tl.load(contexts + request)
    from_ = (cell + source)[:, None] * head_dim + dims[None, :]
    to = (cell + step)[:, None] * head_dim + dims[None, :]
    # A cell may be both: everything is read before anything is written.
    if is_value:
        rows = tl.load(v_cache + from_, mask=moved, other=0.0)
        tl.debug_barrier()
        tl.store(v_cache + to, rows, mask=moved)
    else:
        rows = tl.load(k_cache + from_, mask=moved, other=0.0)
        tl.debug_barrier()
        tl.store(k_cache + to, rows, mask=moved)
