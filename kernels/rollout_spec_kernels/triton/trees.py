"""Rejection walk and traversal verification from logits in Triton: a program a request, which reads a row once for each decision.

rollout_spec/verify/walk.py and traversal.py define the schemes and say why they are exact; csrc/verification.h is the same text in C++.

Shape legend: B requests, N nodes, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_spec_kernels.triton.law import draft_prob, draw, left
from rollout_spec_kernels.triton.noise import accept_uniform, recover_uniform

_TINY = tl.constexpr(1.17549435e-38)  # 1 / Z must not overflow


@triton.jit
def _at(values, place, index):
    """values[index] of values that a program holds."""
    return tl.sum(tl.where(place == index, values, values * 0), axis=0)


@triton.jit
def _next_child(parent, node, of, begin):
    """The first child of node ``of`` among the nodes from ``begin`` on, or -1."""
    none = tl.max(node, axis=0) + 1
    found = tl.min(tl.where((parent == of) & (node >= begin), node, none), axis=0)
    return tl.where(found < none, found, -1).to(tl.int64)


@triton.jit
def _token_left(
    logits, row, token, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, num_stages,
    has_names: tl.constexpr,
):  # fmt: skip
    """p of one token after the stages."""
    v = tl.zeros((1,), tl.int64) + token
    p, _ = left(
        logits, row, v, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, num_stages, has_names
    )
    return tl.sum(p.to(tl.float64), axis=0)


@triton.jit
def _refuse(
    logits, row, token, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, num_stages, w, draft_left,
    has_names: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Adds the stage that refuses a token: (Z, what q holds behind it, what q_0 sums to)."""
    scale, inverse_draft = w.to(tl.float32), (1.0 / draft_left).to(tl.float32)
    mass = tl.zeros((chunk,), tl.float64)
    rest = tl.zeros((chunk,), tl.float64)
    whole = tl.zeros((chunk,), tl.float64)
    for begin in range(0, vocab_size, chunk):
        v = begin + tl.arange(0, chunk)
        p, q = left(
            logits, row, v, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, num_stages, has_names
        )
        mass += p * scale - tl.minimum(p * scale, q * inverse_draft)
        rest += tl.where(v == token, 0.0, q)
        _, first = left(
            logits, row, v, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, 0, has_names
        )
        whole += first
    total = tl.sum(mass, axis=0)
    at = stages + 3 * num_stages
    tl.store(at, scale)
    tl.store(at + 1, inverse_draft)
    tl.store(at + 2, tl.where(total > 0, 1.0 / tl.maximum(total, _TINY), 0.0).to(tl.float32))
    tl.store(stage_tokens + num_stages, token)
    tl.debug_barrier()  # the program's other threads read the stage
    return total, tl.maximum(tl.sum(rest, axis=0), _TINY), tl.sum(whole, axis=0)


@triton.jit
def _node_field(values, node, length, other: tl.constexpr):
    """A field of a request's nodes; ``other`` where there is none."""
    return tl.load(values + node, mask=node < length, other=other)


@triton.jit
def _emit(
    logits, row, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, num_stages, u,
    first_child, depth, next_token, num_accepted, is_bonus, accept_probs, has_names: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Ends a request at this depth, with a token that u draws from what is left there; the pointers are the request's own."""
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
    tl.store(accept_probs + depth, 0.0, mask=first_child >= 0)
    tl.store(next_token, drawn)
    tl.store(num_accepted, depth)
    tl.store(is_bonus, (first_child < 0).to(tl.int8))


@triton.jit
def walk(
    tokens, parents, lengths, draft_probs, column_of, logits, roots, inv_temperatures, log_normalisers, support, seeds, positions, accept,
    recover, stages, stage_tokens, draft_sums, path, num_accepted, next_tokens, is_bonus, accept_probs, num_nodes, vocab_size, draft_vocab,
    block_nodes: tl.constexpr, has_names: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Children in draw order against what is left of p and q; descends at the first that is accepted."""
    b = tl.program_id(0).to(tl.int64)
    inverse, seed, position = tl.load(inv_temperatures + b), tl.load(seeds + b), tl.load(positions + b)
    node, length = tl.arange(0, block_nodes), tl.load(lengths + b)
    token, parent = _node_field(tokens + b * num_nodes, node, length, -1), _node_field(parents + b * num_nodes, node, length, -2)
    stages += b * 3 * (num_nodes + 1)
    stage_tokens += b * (num_nodes + 1)
    zero = tl.sum(tl.zeros((1,), tl.int64), axis=0)
    depth, trial, at = zero, zero, zero - 1
    child = _next_child(parent, node, at, 0)
    first = child
    draft_left = tl.sum(tl.zeros((1,), tl.float64) + 1.0, axis=0)
    going = True
    while going:
        row = tl.load(roots + b) + 1 + at
        log_normaliser = tl.load(log_normalisers + row)
        draft_row = draft_probs + (b * num_nodes + tl.maximum(first, 0)) * draft_vocab
        if child >= 0:
            own = _at(token, node, child)
            p = _token_left(
                logits, row, own, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, trial, has_names
            )
            q = draft_prob(draft_row, column_of, own, has_names).to(tl.float64) / draft_left
            u = accept_uniform(accept, b * (num_nodes + 1) + child, seed, position, depth, trial)
            if u * q < p:
                tl.store(path + b * num_nodes + depth, child)
                tl.store(accept_probs + b * num_nodes + depth, 1.0)
                at = child
                depth += 1
                child = _next_child(parent, node, at, 0)
                first = child
                trial = zero
                draft_left = draft_left * 0.0 + 1.0
            else:
                _, draft_left, whole = _refuse(
                    logits, row, own, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, trial,
                    draft_left * 0.0 + 1.0, draft_left, has_names, chunk,
                )  # fmt: skip
                tl.store(draft_sums + b * num_nodes + child, whole)
                trial += 1
                child = _next_child(parent, node, at, child + 1)
        else:
            u = recover_uniform(recover, b * (num_nodes + 1) + depth, seed, position, depth)
            _emit(
                logits, row, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages, stage_tokens, trial, u, first,
                depth, next_tokens + b, num_accepted + b, is_bonus + b, accept_probs + b * num_nodes, has_names, chunk,
            )  # fmt: skip
            going = False


@triton.jit
def traverse(
    tokens, parents, lengths, draft_probs, column_of, logits, roots, inv_temperatures, log_normalisers, support, seeds, positions, accept,
    recover, stages, stage_tokens, draft_sums, path, num_accepted, next_tokens, is_bonus, accept_probs, num_nodes, vocab_size, draft_vocab,
    block_nodes: tl.constexpr, has_names: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Leaf by leaf, in draw order, towards the root. What the walk knows of its nodes it holds by depth (0 = root)."""
    b = tl.program_id(0).to(tl.int64)
    inverse, seed, position = tl.load(inv_temperatures + b), tl.load(seeds + b), tl.load(positions + b)
    node, length = tl.arange(0, block_nodes), tl.load(lengths + b)
    token, parent = _node_field(tokens + b * num_nodes, node, length, -1), _node_field(parents + b * num_nodes, node, length, -2)
    stages, stage_tokens = stages + b * 3 * (num_nodes + 1), stage_tokens + b * (num_nodes + 1)
    place = tl.arange(0, 2 * block_nodes)
    none, whole_mass = tl.zeros((2 * block_nodes,), tl.int64), tl.zeros((2 * block_nodes,), tl.float64) + 1.0
    # By depth: the node, its children refused so far, where to look for the next, the stages before its own.
    nodes, refused, cursor, first_stage = none - 1, none, none, none
    mass, draft_left = whole_mass, whole_mass  # a, and what q holds behind the refused
    zero = tl.sum(tl.zeros((1,), tl.int64), axis=0)
    depth, trial = zero, zero
    going = True
    while going:
        at, w, num = _at(nodes, place, depth), _at(mass, place, depth), _at(refused, place, depth)
        row = tl.load(roots + b) + 1 + at
        log_normaliser, before = tl.load(log_normalisers + row), _at(first_stage, place, depth)
        child = tl.where(w > 0, _next_child(parent, node, at, _at(cursor, place, depth)), -1)
        # The row that a node's children were drawn from; any of them will do, refused ones too.
        any_child = tl.maximum(_next_child(parent, node, at, 0), 0)
        draft_row = draft_probs + (b * num_nodes + any_child) * draft_vocab
        if child >= 0:
            own = _at(token, node, child)
            p = _token_left(
                logits, row, own, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages + 3 * before,
                stage_tokens + before, num, has_names,
            )  # fmt: skip
            q = draft_prob(draft_row, column_of, own, has_names).to(tl.float64) / _at(draft_left, place, depth)
            depth += 1
            entered = place == depth
            nodes, refused, cursor = tl.where(entered, child, nodes), tl.where(entered, 0, refused), tl.where(entered, 0, cursor)
            first_stage, draft_left = tl.where(entered, before + num, first_stage), tl.where(entered, 1.0, draft_left)
            mass = tl.where(entered, tl.minimum(w * p / q, 1.0), mass)
        else:
            u = accept_uniform(accept, b * (num_nodes + 1) + trial, seed, position, zero, trial)
            if (u < w) | (depth == 0):  # the root has a = 1: only a NaN keeps a walk from ending there
                u = recover_uniform(recover, b * (num_nodes + 1) + depth, seed, position, depth)
                _emit(
                    logits, row, vocab_size, inverse, log_normaliser, support, draft_row, column_of, stages + 3 * before,
                    stage_tokens + before, num, u, _next_child(parent, node, at, 0), depth, next_tokens + b, num_accepted + b, is_bonus + b,
                    accept_probs + b * num_nodes, has_names, chunk,
                )  # fmt: skip
                tl.store(path + b * num_nodes + place - 1, nodes, mask=(place > 0) & (place <= depth))
                tl.store(accept_probs + b * num_nodes + place, whole_mass, mask=place < depth)
                going = False
            else:
                trial, depth = trial + 1, depth - 1
                here = place == depth
                above, num, before = _at(nodes, place, depth), _at(refused, place, depth), _at(first_stage, place, depth)
                w, held = _at(mass, place, depth), _at(draft_left, place, depth)
                row, draft_row = tl.load(roots + b) + 1 + above, draft_probs + (b * num_nodes + at) * draft_vocab
                remaining, rest, whole = _refuse(
                    logits, row, _at(token, node, at), vocab_size, inverse, tl.load(log_normalisers + row), support, draft_row, column_of,
                    stages + 3 * before, stage_tokens + before, num, w, held, has_names, chunk,
                )  # fmt: skip
                tl.store(draft_sums + b * num_nodes + at, whole)
                total = remaining + (1.0 - w)
                mass = tl.where(here, tl.where(total > 0, remaining / total, 1.0), mass)
                draft_left, refused = tl.where(here, rest, draft_left), tl.where(here, num + 1, refused)
                cursor = tl.where(here, at + 1, cursor)
