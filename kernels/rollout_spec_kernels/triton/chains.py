"""Rejection and block verification of chains from logits in Triton: a program a row for what p and q share, then one a request.

rollout_spec/verify/ defines the schemes and says why they are exact; csrc/verification.h is the same text in C++.

Shape legend: B requests, N nodes, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_spec_kernels.triton.law import draft_prob, draw, left, prob
from rollout_spec_kernels.triton.noise import accept_uniform, recover_uniform


@triton.jit
def chain_rows(
    tokens, lengths, draft_probs, column_of, logits, roots, inv_temperatures, log_normalisers, support,
    shared, left_over, draft, weights, num_nodes, vocab_size, draft_vocab,
    has_names: tl.constexpr, is_block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    b, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if i < tl.load(lengths + b):
        inverse, root = tl.load(inv_temperatures + b), tl.load(roots + b)
        # w of the prefix (block).
        w = tl.sum(tl.full((1,), 1.0, tl.float64), axis=0)
        for j in range(i):
            token = tl.load(tokens + b * num_nodes + j)
            q = draft_prob(draft_probs + (b * num_nodes + j) * draft_vocab, column_of, token, has_names).to(tl.float64)
            p = prob(logits, root + j, token, vocab_size, inverse, log_normalisers, support).to(tl.float64)
            if is_block:
                w = tl.minimum(1.0, w * p / q)
        row, draft_row = root + i, draft_probs + (b * num_nodes + i) * draft_vocab
        log_normaliser, scale = tl.load(log_normalisers + row), w.to(tl.float32)
        sums = tl.zeros((chunk,), tl.float64)
        rest = tl.zeros((chunk,), tl.float64)
        mass = tl.zeros((chunk,), tl.float64)
        for begin in range(0, vocab_size, chunk):
            v = begin + tl.arange(0, chunk)
            p, q = left(logits, row, v, vocab_size, inverse, log_normaliser, support, draft_row, column_of, None, None, 0, has_names)
            sums += tl.minimum(p, q)
            rest += p * scale - tl.minimum(p * scale, q)
            mass += q
        to = b * num_nodes + i
        tl.store(shared + to, tl.sum(sums, axis=0))
        tl.store(left_over + to, tl.sum(rest, axis=0))
        tl.store(draft + to, tl.sum(mass, axis=0))
        tl.store(weights + to, w)


@triton.jit
def finish_chain(
    tokens, lengths, draft_probs, column_of, logits, roots, inv_temperatures, log_normalisers, support, shared, left_over, weights, seeds,
    positions, accept, recover, stages, stage_tokens, path, num_accepted, next_tokens, is_bonus, accept_probs,
    num_nodes, vocab_size, draft_vocab,
    has_names: tl.constexpr, is_block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    length, root, inverse = tl.load(lengths + b), tl.load(roots + b), tl.load(inv_temperatures + b)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    accepted = tl.sum(tl.zeros((1,), tl.int64), axis=0)
    goes_on = accepted == 0
    for i in range(length):
        u = accept_uniform(accept, b * (num_nodes + 1) + i, seed, position, i, 0)
        token = tl.load(tokens + b * num_nodes + i)
        p = prob(logits, root + i, token, vocab_size, inverse, log_normalisers, support).to(tl.float64)
        q = draft_prob(draft_probs + (b * num_nodes + i) * draft_vocab, column_of, token, has_names).to(tl.float64)
        if is_block:
            stop = tl.minimum(1.0, tl.load(weights + b * num_nodes + i) * p / q)  # w of the whole chain
            if i + 1 < length:
                w, mass = stop, tl.load(left_over + b * num_nodes + i + 1)
                total = mass + (1.0 - w)
                stop = tl.where(w > 0, tl.where(total > 0, mass / total, 1.0), 0.0)
            accepted = tl.where(u < stop, accepted * 0 + i + 1, accepted)
        else:
            goes_on = goes_on & (u * q < p)
            accepted = tl.where(goes_on, accepted * 0 + i + 1, accepted)
    for i in range(length):
        tl.store(path + b * num_nodes + i, i, mask=i < accepted)
        overlap = tl.minimum(1.0, tl.load(shared + b * num_nodes + i))
        tl.store(accept_probs + b * num_nodes + i, overlap, mask=i <= accepted)
    ends = accepted == length
    at = tl.where(ends, 0, accepted)  # an entry that exists
    w = tl.load(weights + b * num_nodes + at).to(tl.float32)
    row, log_normaliser = root + accepted, tl.load(log_normalisers + root + accepted)
    draft_row = draft_probs + (b * num_nodes + at) * draft_vocab
    stages += b * 3 * (num_nodes + 1)
    stage_tokens += b * (num_nodes + 1)
    tl.store(stages, w)
    tl.store(stages + 1, 1.0)
    tl.store(stages + 2, (tl.load(left_over + b * num_nodes + at) > 0).to(tl.float32))  # else p = q but for rounding: p itself is left
    tl.store(stage_tokens, -1)
    tl.debug_barrier()  # the program's other threads read the stage
    num_stages = (ends == 0).to(tl.int32)
    u = recover_uniform(recover, b * (num_nodes + 1) + accepted, seed, position, accepted)
    drawn = draw(
        logits,
        row,
        vocab_size,
        inverse,
        log_normaliser,
        support,
        draft_row,
        column_of,
        stages,
        stage_tokens,
        num_stages,
        u,
        has_names,
        chunk,
    )
    tl.store(next_tokens + b, drawn)
    tl.store(num_accepted + b, accepted)
    tl.store(is_bonus + b, ends.to(tl.int8))
