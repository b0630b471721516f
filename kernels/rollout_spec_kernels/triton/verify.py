"""Verification from the model's logits in Triton: temperature, softmax, acceptance and the last token without a row of probabilities.

One kernel takes each row's normaliser and entropy; then chains (rejection, block) have a program a row for what target and draft
share and one a request for the decision; on trees (exact match, its Gumbel-coupled form, rejection walk, traversal) there is one a
request. Rows with filters or penalties are csrc/verify.cu's, which takes log-probabilities.

Shape legend: B requests, N nodes, R rows, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify import RATIO_SCHEMES, Scheme, check_pairing
from rollout_spec.verify.ratio import SUM_TOLERANCE
from rollout_spec_kernels.triton import trees
from rollout_spec_kernels.triton.law import draft_prob, draw, left, prob
from rollout_spec_kernels.triton.noise import ACCEPT, RECOVER, TARGET, gumbel, philox, uniform

_CHUNK = 1024  # vocabulary entries in flight


@dataclass(frozen=True, kw_only=True, eq=False)
class RowStats:
    """Of each row of logits."""

    log_normalisers: Tensor  # [R] float32: logsumexp(logits * inverse temperature)
    raw_log_normalisers: Tensor  # [R] float32: logsumexp(logits)
    entropies: Tensor  # [R] float32 nats, at the temperature; NaN for a row that defines no distribution


def row_stats(logits: Tensor, inv_temperatures: Tensor) -> RowStats:
    """logits [R, V] of any float dtype, contiguous, inv_temperatures [R] float32."""
    num_rows, vocab_size = logits.shape
    stats = torch.empty(3, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _row_stats[(num_rows,)](logits, inv_temperatures, *stats, vocab_size, chunk=_CHUNK)
    return RowStats(log_normalisers=stats[0], raw_log_normalisers=stats[1], entropies=stats[2])


def verify_logits(
    tree: DraftTree,
    logits: Tensor,  # [R, V] of any float dtype: request b's root is row roots[b], its node n row roots[b] + 1 + n
    roots: Tensor,  # [B] int64
    temperatures: Sequence[float],  # B, all > 0
    seeds: Sequence[int],  # B
    positions: Sequence[int],  # B, absolute positions of the round's first tokens
    scheme: Scheme,
) -> Verdict:
    """The scheme's verdict on softmax(logits / temperature), with the noise of rollout_spec.verify.CounterNoise(seeds, positions).

    rollout_spec.verify.verify has the laws and their proofs. Raises ValueError for a scheme that is not exact on the tree, for sizes
    that do not fit, for draft_probs that do not sum to 1, and for rows that define no distribution.
    """
    batch, vocab_size = tree.batch_size, logits.shape[1]
    if not len(temperatures) == len(seeds) == len(positions) == roots.numel() == batch:
        raise ValueError(f"{batch} trees need as many roots, temperatures, seeds and positions")
    if min(temperatures, default=1.0) <= 0:
        raise ValueError("temperature 0 is no softmax: greedy rows are verified from log-probabilities")
    check_pairing(scheme, tree)
    tree.check(vocab_size)
    tree = replace(tree, token_ids=tree.token_ids.contiguous(), parents=tree.parents.contiguous(), num_nodes=tree.num_nodes.contiguous())
    device, logits = logits.device, logits.contiguous()
    inverse = torch.tensor([1.0 / temperature for temperature in temperatures], dtype=torch.float32, device=device)
    requests = torch.repeat_interleave(torch.arange(batch, device=device), tree.num_nodes + 1)
    order = torch.arange(requests.numel(), device=device) - torch.nn.functional.pad((tree.num_nodes + 1).cumsum(0), (1, 0))[requests]
    rows = torch.zeros(logits.shape[0], device=device)
    rows[roots[requests] + order] = inverse[requests]
    stats = row_stats(logits, rows)
    keys = [torch.tensor([_signed(value) for value in values], dtype=torch.int64, device=device) for values in (seeds, positions)]
    num_nodes = tree.max_nodes
    work = _Work(
        path=torch.full((batch, num_nodes), -1, dtype=torch.int64, device=device),
        num_accepted=torch.empty(batch, dtype=torch.int64, device=device),
        next_token_ids=torch.empty(batch, dtype=torch.int64, device=device),
        is_bonus=torch.empty(batch, dtype=torch.int8, device=device),
        accept_probs=torch.full((batch, num_nodes), torch.nan, dtype=torch.float64, device=device),
    )
    if batch:
        if scheme in RATIO_SCHEMES and num_nodes > 0:
            _decide_by_ratio(work, tree, logits, roots, inverse, stats, keys, scheme)
        else:
            _follow[(batch,)](
                tree.token_ids, tree.parents, tree.num_nodes, logits, roots, inverse, stats.log_normalisers, *keys,
                work.path, work.num_accepted, work.next_token_ids, work.is_bonus, work.accept_probs, num_nodes, vocab_size,
                block_nodes=triton.next_power_of_2(max(num_nodes, 1)), races=scheme is Scheme.GUMBEL, chunk=_CHUNK,
            )  # fmt: skip
    if bool((work.next_token_ids < 0).any()):
        raise ValueError(f"no distribution to draw from: request {int((work.next_token_ids < 0).nonzero()[0, 0])} has a row without one")
    return work.verdict(tree, logits, roots, inverse, stats)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Work:
    """What the kernels write."""

    path: Tensor  # [B, N] int64
    num_accepted: Tensor  # [B] int64
    next_token_ids: Tensor  # [B] int64, -1 where there was no distribution
    is_bonus: Tensor  # [B] int8
    accept_probs: Tensor  # [B, N] float64

    def verdict(self, tree: DraftTree, logits: Tensor, roots: Tensor, inverse: Tensor, stats: RowStats) -> Verdict:
        """The verdict with the scores of every emitted token, cut to the deepest node."""
        depth = tree.max_depth()
        path = self.path[:, :depth]
        verdict = Verdict(
            path=path,
            num_accepted=self.num_accepted,
            next_token_ids=self.next_token_ids,
            is_bonus=self.is_bonus.bool(),
            accept_probs=self.accept_probs[:, :depth],
        )
        rows = roots[:, None] + torch.nn.functional.pad(path, (1, 0), value=-1) + 1  # [B, D + 1]
        emitted = torch.arange(depth + 1, device=path.device) <= self.num_accepted[:, None]
        rows = torch.where(emitted, rows, roots[:, None])
        chosen = logits[rows, verdict.emitted(tree).clamp_min(0)].float()

        def spread(values: Tensor) -> Tensor:
            return torch.where(emitted, values, torch.nan)

        return Verdict(
            path=path,
            num_accepted=verdict.num_accepted,
            next_token_ids=verdict.next_token_ids,
            is_bonus=verdict.is_bonus,
            accept_probs=verdict.accept_probs,
            raw_logprobs=spread(chosen - stats.raw_log_normalisers[rows]),
            processed_logprobs=spread(chosen * inverse[:, None] - stats.log_normalisers[rows]),
            entropies=spread(stats.entropies[rows]),
        )


def _decide_by_ratio(
    work: _Work, tree: DraftTree, logits: Tensor, roots: Tensor, inverse: Tensor, stats: RowStats, keys: Sequence[Tensor], scheme: Scheme
) -> None:
    """The schemes that divide by q: chains with every row's sums side by side and then the decisions, trees step by step."""
    assert tree.draft_probs is not None
    batch, num_nodes, vocab_size, device = tree.batch_size, tree.max_nodes, logits.shape[1], logits.device
    draft_probs, names = tree.draft_probs.float().contiguous(), tree.draft_token_ids
    column_of = torch.full((1 if names is None else vocab_size,), -1, dtype=torch.int32, device=device)
    if names is not None:
        column_of[names] = torch.arange(names.numel(), dtype=torch.int32, device=device)
    elif draft_probs.shape[2] != vocab_size:
        raise ValueError(f"draft_probs have {draft_probs.shape[2]} columns, the vocabulary {vocab_size}: name them in draft_token_ids")
    _check_tokens(tree, draft_probs, None if names is None else column_of)
    rows = (logits, roots, inverse, stats.log_normalisers)
    stages = torch.empty(batch, num_nodes + 1, 3, dtype=torch.float32, device=device)
    stage_tokens = torch.empty(batch, num_nodes + 1, dtype=torch.int64, device=device)
    draft_sums = torch.ones(batch, num_nodes, dtype=torch.float64, device=device)  # of the rows that are looked at
    written = (work.path, work.num_accepted, work.next_token_ids, work.is_bonus, work.accept_probs)
    sizes = (num_nodes, vocab_size, draft_probs.shape[2])
    # Without fused multiply-adds: w p - min(w p, q) must be 0 where q is the larger.
    options = {"has_names": names is not None, "chunk": _CHUNK, "enable_fp_fusion": False}
    if scheme in (Scheme.REJECTION_WALK, Scheme.TRAVERSAL):
        kernel = trees.walk if scheme is Scheme.REJECTION_WALK else trees.traverse
        kernel[(batch,)](
            tree.token_ids, tree.parents, tree.num_nodes, draft_probs, column_of, *rows, *keys, stages, stage_tokens, draft_sums, *written,
            *sizes, block_nodes=triton.next_power_of_2(num_nodes), **options,
        )  # fmt: skip
        _check_sums(tree, draft_sums)
        return
    common = (tree.token_ids, tree.num_nodes, draft_probs, column_of, *rows)
    shared, rest, weights = torch.zeros(3, batch, num_nodes, dtype=torch.float64, device=device)
    is_block = scheme is Scheme.BLOCK
    _chain_rows[(batch, num_nodes)](*common, shared, rest, draft_sums, weights, *sizes, is_block=is_block, **options)
    _check_sums(tree, draft_sums)
    _finish_chain[(batch,)](*common, shared, rest, weights, *keys, stages, stage_tokens, *written, *sizes, is_block=is_block, **options)


def _check_tokens(tree: DraftTree, draft_probs: Tensor, column_of: Tensor | None) -> None:
    columns = tree.token_ids if column_of is None else column_of[tree.token_ids.clamp(0, column_of.numel() - 1)].long()
    held = draft_probs.gather(2, columns.clamp_min(0)[:, :, None])[:, :, 0]
    bad = tree.valid() & ~((columns >= 0) & (held > 0))
    if bool(bad.any()):
        request, node = bad.nonzero()[0].tolist()
        raise ValueError(f"draft tree: request {request}, node {node} holds a token that its own draft_probs give no probability")


def _check_sums(tree: DraftTree, draft_sums: Tensor) -> None:
    off = tree.valid() & ~((draft_sums - 1).abs() <= SUM_TOLERANCE)
    if bool(off.any()):
        request, node = off.nonzero()[0].tolist()
        raise ValueError(
            f"draft tree: request {request}, node {node} has draft_probs that sum to {float(draft_sums[request, node])}: "
            f"normalise them in float32 and sample from those very numbers"
        )


def _signed(value: int) -> int:
    """The value modulo 2**64 as torch's int64 holds it."""
    low = value & ((1 << 64) - 1)
    return low - (1 << 64) if low >> 63 else low


@triton.jit
def _row_stats(logits, inv_temperatures, log_normalisers, raw_log_normalisers, entropies, vocab_size, chunk: tl.constexpr):
    row = tl.program_id(0)
    inverse = tl.load(inv_temperatures + row)
    base = logits + row.to(tl.int64) * vocab_size
    most = tl.full((1,), float("-inf"), tl.float32)
    for begin in range(0, vocab_size, chunk):
        v = begin + tl.arange(0, chunk)
        most = tl.maximum(most, tl.max(tl.load(base + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32), axis=0))
    weight = tl.zeros((chunk,), tl.float64)
    raw_weight = tl.zeros((chunk,), tl.float64)
    moment = tl.zeros((chunk,), tl.float64)
    for begin in range(0, vocab_size, chunk):
        v = begin + tl.arange(0, chunk)
        below = tl.load(base + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32) - most
        scaled = below * inverse
        e = tl.exp(scaled)
        weight += e
        raw_weight += tl.exp(below)
        moment += e * tl.where(e > 0, scaled, 0.0)  # 0 · −inf is 0 here, NaN stays
    total = tl.sum(weight, axis=0)
    one = tl.arange(0, 1)
    log_total = tl.log(total).to(tl.float32)
    tl.store(log_normalisers + row + one, most * inverse + log_total)
    tl.store(raw_log_normalisers + row + one, most + tl.log(tl.sum(raw_weight, axis=0)).to(tl.float32))
    tl.store(entropies + row + one, (tl.log(total) - tl.sum(moment, axis=0) / total).to(tl.float32) + one)


@triton.jit
def _race(logits, row, vocab_size, inverse, seed, position, chunk: tl.constexpr):
    """argmax of logits / temperature + G, the lowest token on ties; -1 if a logit is NaN or none is finite."""
    best = tl.full((chunk,), float("-inf"), tl.float32)
    where = tl.zeros((chunk,), tl.int64)
    poison = tl.zeros((chunk,), tl.float32)
    for begin in range(0, tl.cdiv(vocab_size, 8), chunk):
        block = begin + tl.arange(0, chunk)
        c0, c1, c2, c3 = philox(seed, TARGET, position, block.to(tl.uint64))
        for i in tl.static_range(8):
            word = c0 if i // 2 == 0 else (c1 if i // 2 == 1 else (c2 if i // 2 == 2 else c3))
            half = (word >> 32) if i % 2 else (word & 0xFFFFFFFF)
            token = 8 * block.to(tl.int64) + i
            x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            poison += tl.where(x == x, 0.0, 1.0)
            score = x * inverse + gumbel(half)
            wins = score > best
            best = tl.where(wins, score, best)
            where = tl.where(wins, token, where)
    most = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == most, where, vocab_size), axis=0)
    return tl.where((tl.sum(poison, axis=0) == 0) & (most > float("-inf")) & (most < float("inf")), winner, -1)


@triton.jit
def _follow(
    tokens, parents, lengths, logits, roots, inv_temperatures, log_normalisers, seeds, positions,
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
        if races:
            drawn = _race(logits, row, vocab_size, inverse, seed, position + depth, chunk)
        else:
            log_normaliser = tl.load(log_normalisers + row)
            u = uniform(seed, RECOVER, position + depth, 0)
            drawn = draw(logits, row, vocab_size, inverse, log_normaliser, None, None, None, None, 0, u, False, chunk)
        is_child = parent == at
        num_children = tl.sum(is_child.to(tl.int32), axis=0)
        hit = tl.max(tl.where(is_child & (token == drawn), node, -1), axis=0).to(tl.int64)
        share = (hit >= 0).to(tl.float64)
        if not races:
            x = tl.load(logits + row * vocab_size + token, mask=is_child, other=float("-inf")).to(tl.float32)
            children = tl.where(is_child, tl.exp(x * inverse - tl.load(log_normalisers + row)), 0.0)
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


@triton.jit
def _chain_rows(
    tokens, lengths, draft_probs, column_of, logits, roots, inv_temperatures, log_normalisers,
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
            p = prob(logits, root + j, token, vocab_size, inverse, log_normalisers).to(tl.float64)
            if is_block:
                w = tl.minimum(1.0, w * p / q)
        row, draft_row = root + i, draft_probs + (b * num_nodes + i) * draft_vocab
        log_normaliser, scale = tl.load(log_normalisers + row), w.to(tl.float32)
        sums = tl.zeros((chunk,), tl.float64)
        rest = tl.zeros((chunk,), tl.float64)
        mass = tl.zeros((chunk,), tl.float64)
        for begin in range(0, vocab_size, chunk):
            v = begin + tl.arange(0, chunk)
            p, q = left(logits, row, v, vocab_size, inverse, log_normaliser, draft_row, column_of, None, None, 0, has_names)
            sums += tl.minimum(p, q)
            rest += p * scale - tl.minimum(p * scale, q)
            mass += q
        to = b * num_nodes + i
        tl.store(shared + to, tl.sum(sums, axis=0))
        tl.store(left_over + to, tl.sum(rest, axis=0))
        tl.store(draft + to, tl.sum(mass, axis=0))
        tl.store(weights + to, w)


@triton.jit
def _finish_chain(
    tokens, lengths, draft_probs, column_of, logits, roots, inv_temperatures, log_normalisers, shared, left_over, weights, seeds, positions,
    stages, stage_tokens, path, num_accepted, next_tokens, is_bonus, accept_probs, num_nodes, vocab_size, draft_vocab,
    has_names: tl.constexpr, is_block: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    length, root, inverse = tl.load(lengths + b), tl.load(roots + b), tl.load(inv_temperatures + b)
    seed, position = tl.load(seeds + b), tl.load(positions + b)
    accepted = tl.sum(tl.zeros((1,), tl.int64), axis=0)
    goes_on = accepted == 0
    for i in range(length):
        # Test i takes word i (i + 1) / 2 of the round's stream (CounterNoise).
        u = uniform(seed, ACCEPT, position, i * (i + 1) // 2)
        token = tl.load(tokens + b * num_nodes + i)
        p = prob(logits, root + i, token, vocab_size, inverse, log_normalisers).to(tl.float64)
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
    u = uniform(seed, RECOVER, position + accepted, 0)
    drawn = draw(
        logits, row, vocab_size, inverse, log_normaliser, draft_row, column_of, stages, stage_tokens, num_stages, u, has_names, chunk
    )
    tl.store(next_tokens + b, drawn)
    tl.store(num_accepted + b, accepted)
    tl.store(is_bonus + b, ends.to(tl.int8))
