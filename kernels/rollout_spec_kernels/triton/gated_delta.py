"""Gated Delta Net layers over a draft tree, without rollback, in Triton: outputs of all nodes, and the accepted leaf's state.

rollout_spec.engine.gated_delta has the formulas and their readable form, in the same signatures.

Shape legend: B requests, N rows (root and nodes, parents before children), H heads, dk key size, dv value size, C channels, w window.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_spec.engine.gated_delta import TreeStates, ancestor_taps, check_tree

_BLOCK_VALUES = 64


def tree_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor) -> TreeStates:
    """gated_delta.tree_delta with one program for each request, head and block of value columns; float32 inside."""
    check_tree(q, k, v, log_decay, beta, parents, state)
    batch, num_rows, num_heads, key_size = q.shape
    value_size = v.shape[3]
    out, updates = torch.empty(2, *v.shape, dtype=torch.float32, device=q.device)
    decay = torch.empty(log_decay.shape, dtype=torch.float32, device=q.device)
    _solve[(batch, num_heads, triton.cdiv(value_size, _BLOCK_VALUES))](
        q.contiguous(), k.contiguous(), v.contiguous(), log_decay.contiguous(), beta.contiguous(), parents.contiguous(), state.contiguous(),
        out, updates, decay, num_rows,
        num_heads=num_heads, key_size=key_size, value_size=value_size,
        block_rows=max(16, triton.next_power_of_2(num_rows)), block_keys=max(16, triton.next_power_of_2(key_size)),
        block_values=_BLOCK_VALUES,
    )  # fmt: skip
    return TreeStates(out=out.to(v.dtype), updates=updates, decay=decay)


def commit_state(k: Tensor, states: TreeStates, parents: Tensor, leaves: Tensor, state: Tensor) -> Tensor:
    """gated_delta.commit_state [B, H, dk, dv] float32; no row's state is ever written but the leaf's."""
    batch, num_rows, num_heads, key_size = k.shape
    value_size = state.shape[3]
    new = torch.empty(state.shape, dtype=torch.float32, device=k.device)
    _commit[(batch, num_heads, triton.cdiv(value_size, _BLOCK_VALUES))](
        k.contiguous(), states.updates, states.decay, parents.contiguous(), leaves.contiguous(), state.contiguous(), new, num_rows,
        num_heads=num_heads, key_size=key_size, value_size=value_size,
        block_keys=max(16, triton.next_power_of_2(key_size)), block_values=_BLOCK_VALUES,
    )  # fmt: skip
    return new


def tree_convolution(x: Tensor, history: Tensor, weight: Tensor, parents: Tensor) -> Tensor:
    """gated_delta.tree_convolution [B, N, C]: each row's window runs along its ancestors into the history; float32 inside."""
    batch, num_rows, num_channels = x.shape
    window, block = weight.shape[1], 128
    out = torch.empty_like(x)
    _convolve[(batch, num_rows, triton.cdiv(num_channels, block))](
        x.contiguous(), history.contiguous(), weight.contiguous(), ancestor_taps(parents, window), out, num_rows, num_channels,
        window=window, block=block,
    )  # fmt: skip
    return out


@triton.jit
def _solve(
    q, k, v, log_decay, beta, parents, state, out, updates, decay, num_rows,
    num_heads: tl.constexpr, key_size: tl.constexpr, value_size: tl.constexpr,
    block_rows: tl.constexpr, block_keys: tl.constexpr, block_values: tl.constexpr,
):  # fmt: skip
    request, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, other = tl.arange(0, block_rows), tl.arange(0, block_rows)
    is_row = row < num_rows
    key, value = tl.arange(0, block_keys), block * block_values + tl.arange(0, block_values)
    is_key, is_value = key < key_size, value < value_size
    at = ((request * num_rows + row) * num_heads + head).to(tl.int64)
    in_keys, in_values = is_row[:, None] & is_key[None, :], is_row[:, None] & is_value[None, :]
    queries = tl.load(q + at[:, None] * key_size + key[None, :], mask=in_keys, other=0.0).to(tl.float32)
    keys = tl.load(k + at[:, None] * key_size + key[None, :], mask=in_keys, other=0.0).to(tl.float32)
    values = tl.load(v + at[:, None] * value_size + value[None, :], mask=in_values, other=0.0).to(tl.float32)
    strength = tl.load(beta + at, mask=is_row, other=0.0).to(tl.float32)
    own_decay = tl.load(log_decay + at, mask=is_row, other=0.0).to(tl.float32)
    parent = tl.load(parents + request * num_rows + row, mask=is_row, other=-1)
    # sees[i, j]: j is i or an ancestor of it. Parents come first, so one pass over the rows is enough.
    sees = row[:, None] == other[None, :]
    for i in range(num_rows):
        above = tl.sum(tl.where(row == i, parent, 0), axis=0)
        inherited = tl.max(tl.where((row == above)[:, None], sees, 0).to(tl.int32), axis=0) > 0
        sees = sees | ((row == i)[:, None] & inherited[None, :])
    total_decay = tl.sum(tl.where(sees, own_decay[None, :], 0.0), axis=1)  # π
    between = tl.exp(tl.where(sees, total_decay[:, None] - tl.sum(tl.where(sees, own_decay[None, :], 0.0), axis=1)[None, :], float("-inf")))
    cell = ((request * num_heads + head).to(tl.int64) * key_size + key[:, None]) * value_size + value[None, :]
    initial = tl.load(state + cell, mask=is_key[:, None] & is_value[None, :], other=0.0).to(tl.float32)
    grown = tl.exp(total_decay)[:, None]
    # (I + A) U = β (V - e^π K H0), row by row: A is strictly lower triangular.
    solved = strength[:, None] * (values - grown * tl.dot(keys, initial, input_precision="ieee"))
    coupling = strength[:, None] * between * tl.dot(keys, tl.trans(keys), input_precision="ieee")
    coupling = tl.where(row[:, None] == other[None, :], 0.0, coupling)
    for i in range(num_rows):
        weights = tl.sum(tl.where((row == i)[:, None], coupling, 0.0), axis=0)
        owed = tl.sum(weights[:, None] * solved, axis=0)
        solved = tl.where((row == i)[:, None], solved - owed[None, :], solved)
    mixed = tl.dot(between * tl.dot(queries, tl.trans(keys), input_precision="ieee"), solved, input_precision="ieee")
    result = grown * tl.dot(queries, initial, input_precision="ieee") + mixed
    to = at[:, None] * value_size + value[None, :]
    tl.store(out + to, result, mask=in_values)
    tl.store(updates + to, solved, mask=in_values)
    tl.store(decay + at, total_decay, mask=is_row & (row * 0 + block == 0))


@triton.jit
def _commit(
    k, updates, decay, parents, leaves, state, new, num_rows,
    num_heads: tl.constexpr, key_size: tl.constexpr, value_size: tl.constexpr, block_keys: tl.constexpr, block_values: tl.constexpr,
):  # fmt: skip
    request, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key, value = tl.arange(0, block_keys), block * block_values + tl.arange(0, block_values)
    is_key, is_value = key < key_size, value < value_size
    leaf = tl.load(leaves + request)
    final = tl.load(decay + (request * num_rows + leaf) * num_heads + head)
    cell = ((request * num_heads + head).to(tl.int64) * key_size + key[:, None]) * value_size + value[None, :]
    inside = is_key[:, None] & is_value[None, :]
    total = tl.exp(final) * tl.load(state + cell, mask=inside, other=0.0).to(tl.float32)
    row = leaf
    while row >= 0:
        at = ((request * num_rows + row) * num_heads + head).to(tl.int64)
        own_key = tl.load(k + at * key_size + key, mask=is_key, other=0.0).to(tl.float32)
        update = tl.load(updates + at * value_size + value, mask=is_value, other=0.0)
        total += tl.exp(final - tl.load(decay + at)) * own_key[:, None] * update[None, :]
        row = tl.load(parents + request * num_rows + row)
    tl.store(new + cell, total, mask=inside)


@triton.jit
def _convolve(x, history, weight, taps, out, num_rows, num_channels, window: tl.constexpr, block: tl.constexpr):
    request, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.program_id(2) * block + tl.arange(0, block)
    inside = channel < num_channels
    total = tl.zeros((block,), tl.float32)
    for i in tl.static_range(window):
        tap = tl.load(taps + (request * num_rows + row) * window + i) + channel * 0
        # A row, or, counted from -1 backwards, an entry of the history.
        new = tl.load(x + (request * num_rows + tap) * num_channels + channel, mask=inside & (tap >= 0), other=0.0).to(tl.float32)
        at = (request * num_channels + channel) * (window - 1) + (window - 1 + tap)
        old = tl.load(history + at, mask=inside & (tap < 0), other=0.0).to(tl.float32)
        total += tl.load(weight + channel * window + i, mask=inside, other=0.0).to(tl.float32) * tl.where(tap >= 0, new, old)
    tl.store(out + (request * num_rows + row) * num_channels + channel, total.to(out.dtype.element_ty), mask=inside)
