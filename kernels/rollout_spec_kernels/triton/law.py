"""What is left of a target's law after children were refused, from logits, in Triton: csrc/law.h's text for Triton's kernels.

A stage is one refused child: ``p_{j+1} = (w p_j - q_j)+ / Z`` with q_j = q_0 without the children before, renormalised. It is three
numbers and a token, so a row is read once for each refusal and written never.

Shape legend: V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_spec_kernels.triton.rows import dropped


@triton.jit
def target_prob(logits, row, token, is_asked, vocab_size, inverse, log_normaliser, support):
    """p_0 of tokens after a row; 0 where the row's support (rows.py; None: all) leaves them out or they are not asked for."""
    x = tl.load(logits + row * vocab_size + token, mask=is_asked, other=float("-inf")).to(tl.float32)
    p = tl.exp(x * inverse - log_normaliser)
    if support is not None:
        p = tl.where(dropped(x, token, row, support), 0.0, p)
    return tl.where(is_asked, p, 0.0)


@triton.jit
def prob(logits, row, token, vocab_size, inverse, log_normalisers, support):
    """p_0 of one token after a row."""
    return target_prob(logits, row, token, token >= 0, vocab_size, inverse, tl.load(log_normalisers + row), support)


@triton.jit
def draft_prob(draft_row, column_of, token, has_names: tl.constexpr):
    """q_0 of a drafted token, 0 if it has no column."""
    column = token
    if has_names:
        column = tl.load(column_of + token).to(tl.int64)
    return tl.load(draft_row + column, mask=column >= 0, other=0.0)


@triton.jit
def left(
    logits, row, v, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, num_stages,
    has_names: tl.constexpr,
):  # fmt: skip
    """(p, q) of tokens v after num_stages stages; q is 0 for refused tokens and not renormalised. Without a draft_row q is 0.

    stages [3 num_stages] float32: w, 1 / sum q_j, and 1 / Z or 0 where nothing is left: then p = q, and p itself is left.
    """
    inside = v < vocab_size
    p = target_prob(logits, row, v, inside, vocab_size, inverse, log_normaliser, support)
    q = p * 0.0
    if draft_row is not None:
        column = v.to(tl.int64)
        if has_names:
            column = tl.load(column_of + v, mask=inside, other=-1).to(tl.int64)
        q = tl.load(draft_row + column, mask=inside & (column >= 0), other=0.0)
        if stages is not None:
            for j in range(num_stages):
                scaled = p * tl.load(stages + 3 * j)
                rest = scaled - tl.minimum(scaled, q * tl.load(stages + 3 * j + 1))
                inverse_left = tl.load(stages + 3 * j + 2)
                p = tl.where(inverse_left > 0, rest * inverse_left, p)
                q = tl.where(v == tl.load(stage_tokens + j), 0.0, q)
    return p, q


@triton.jit
def draw(
    logits, row, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, num_stages, u,
    has_names: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """The first token whose cumulative weight (left's p) exceeds u times the total, in token order; -1 without mass."""
    sums = tl.zeros((1,), tl.float64)
    for begin in range(0, vocab_size, chunk):
        v = begin + tl.arange(0, chunk)
        p, _ = left(
            logits, row, v, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, num_stages, has_names
        )
        sums += tl.sum(p.to(tl.float64), axis=0)
    total = tl.sum(sums, axis=0)
    # Below the total, so that a uniform just below 1 cannot run off the end.
    level = tl.minimum(u * total, total * 0.9999999999999998)
    before = tl.sum(tl.zeros((1,), tl.float64), axis=0)
    token = tl.sum(tl.zeros((1,), tl.int64) - 1, axis=0)
    last = token
    for begin in range(0, vocab_size, chunk):
        v = begin + tl.arange(0, chunk)
        p, _ = left(
            logits, row, v, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, num_stages, has_names
        )
        weight = p.to(tl.float64)
        own = tl.sum(weight, axis=0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, v, -1), axis=0).to(tl.int64))
        if (token < 0) & (before + own > level):
            over = (before + tl.cumsum(weight, axis=0) > level) & (weight > 0)
            found = tl.min(tl.where(over, v, vocab_size), axis=0)
            token = tl.where(found < vocab_size, found.to(tl.int64), last)
        before += own
    return tl.where((total > 0) & (total < float("inf")), tl.where(token < 0, last, token), -1)
