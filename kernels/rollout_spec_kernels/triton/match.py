"""Exact match and its Gumbel-coupled form from logits in Triton: the target draws at every node, a program a request.

rollout_spec/verify/ defines the schemes and says why they are exact; csrc/verification.h is the same text in C++.

Shape legend: B requests, N nodes, V target vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_spec_kernels.triton.law import draw, target_prob
from rollout_spec_kernels.triton.noise import TARGET, gumbel, philox, recover_uniform
from rollout_spec_kernels.triton.rows import dropped


@triton.jit
def race(logits, row, vocab_size, inverse, support, seed, position, noise, chunk: tl.constexpr):
    """argmax of logits / temperature + G over the support, the lowest token on ties; -1 if a logit is NaN or none is finite.

    G [V] is noise, or (None) the TARGET stream's.
    """
    best = tl.full((chunk,), float("-inf"), tl.float32)
    where = tl.zeros((chunk,), tl.int64)
    poison = tl.zeros((chunk,), tl.float32)
    for begin in range(0, tl.cdiv(vocab_size, 8), chunk):
        block = begin + tl.arange(0, chunk)
        if noise is None:
            c0, c1, c2, c3 = philox(seed, TARGET, position, block.to(tl.uint64))
        for i in tl.static_range(8):
            token = 8 * block.to(tl.int64) + i
            if noise is None:
                word = c0 if i // 2 == 0 else (c1 if i // 2 == 1 else (c2 if i // 2 == 2 else c3))
                g = gumbel((word >> 32) if i % 2 else (word & 0xFFFFFFFF))
            else:
                g = tl.load(noise + token, mask=token < vocab_size, other=0.0)
            x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            poison += tl.where(x == x, 0.0, 1.0)
            score = x * inverse + g
            if support is not None:
                score = tl.where(dropped(x, token, row, support), float("-inf"), score)
            wins = score > best
            best = tl.where(wins, score, best)
            where = tl.where(wins, token, where)
    most = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == most, where, vocab_size), axis=0)
    return tl.where((tl.sum(poison, axis=0) == 0) & (most > float("-inf")) & (most < float("inf")), winner, -1)


@triton.jit
def follow(
    tokens, parents, lengths, logits, roots, inv_temperatures, log_normalisers, support, seeds, positions, recover, gumbels,
    path, num_accepted, next_tokens, is_bonus, accept_probs, num_nodes, vocab_size,
    block_nodes: tl.constexpr, races: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    inverse, seed, position = tl.load(inv_temperatures + b), tl.load(seeds + b), tl.load(positions + b)
    node = tl.arange(0, block_nodes)
    is_node = node < tl.load(lengths + b)
    token = tl.load(tokens + b * num_nodes + node, mask=is_node, other=-1)
    parent = tl.load(parents + b * num_nodes + node, mask=is_node, other=-2)
    at = tl.sum(tl.zeros((1,), tl.int64) - 1, axis=0)
    depth = tl.sum(tl.zeros((1,), tl.int64), axis=0)
    going = True
    while going:
        row = tl.load(roots + b) + 1 + at
        own = b * (num_nodes + 1) + depth  # of the noise that is handed over
        if races:
            noise = None if gumbels is None else gumbels + own * vocab_size
            drawn = race(logits, row, vocab_size, inverse, support, seed, position + depth, noise, chunk)
        else:
            log_normaliser = tl.load(log_normalisers + row)
            u = recover_uniform(recover, own, seed, position, depth)
            drawn = draw(logits, row, vocab_size, inverse, log_normaliser, support, None, None, None, None, 0, u, False, chunk)
        is_child = parent == at
        num_children = tl.sum(is_child.to(tl.int32), axis=0)
        hit = tl.max(tl.where(is_child & (token == drawn), node, -1), axis=0).to(tl.int64)
        share = (hit >= 0).to(tl.float64)
        if not races:
            children = target_prob(logits, row, token, is_child, vocab_size, inverse, tl.load(log_normalisers + row), support)
            share = tl.minimum(tl.sum(children.to(tl.float64), axis=0), 1.0)
        tl.store(accept_probs + b * num_nodes + depth, share, mask=num_children > 0)
        tl.store(path + b * num_nodes + depth, hit, mask=hit >= 0)
        going = (hit >= 0) & (drawn >= 0)
        if going:
            at = hit
            depth += 1
        else:
            tl.store(next_tokens + b, drawn)
            tl.store(num_accepted + b, depth)
            tl.store(is_bonus + b, (num_children == 0).to(tl.int8))
