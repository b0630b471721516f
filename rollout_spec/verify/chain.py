"""Verifying chains of sampled drafts: token by token (rejection) and as a whole (block).

Shape legend: B requests, N nodes, D nodes of the longest chain, R rows, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify.categorical import inverse_cdf, row_slices, take_rows
from rollout_spec.verify.randomness import VerifyNoise
from rollout_spec.verify.ratio import DraftRows, overlap, remove, residual, stop_mass
from rollout_spec.verify.target import TargetRows
from rollout_spec.verify.trace import Trace


def rejection(tree: DraftTree, target: TargetRows, noise: VerifyNoise) -> Verdict:
    """Chain rejection sampling (Leviathan 2023, algorithm 1; Chen 2023, algorithm 2).

    Accept x ~ q if u < p(x) / q(x). At the first rejection emit from norm((p - q)+) and stop; behind the last accepted token of
    the chain emit from p (the bonus token). Rows are asked for depth by depth, only for requests that got there.
    """
    draft, trace = DraftRows(tree, target.vocab_size), Trace(tree)
    requests = torch.arange(tree.batch_size, device=tree.device)
    depth = 0
    while requests.numel():
        nodes = torch.full_like(requests, depth)
        log_probs = target.log_probs(requests, nodes - 1)  # [R, V]
        accepted = torch.zeros_like(requests, dtype=torch.bool)
        inner = (tree.num_nodes[requests] > depth).nonzero()[:, 0]  # rows behind which a token was drafted
        if inner.numel():
            asked, drafted = requests[inner], nodes[inner]
            drafted_target_probs = log_probs[inner, tree.token_ids[asked, drafted]].double().exp()
            accepted[inner] = noise.accept(asked, drafted, 0) * draft.token_probs(asked, drafted) < drafted_target_probs
            trace.accept(requests[accepted], depth, nodes[accepted])
        uniforms = torch.empty(requests.shape, dtype=torch.float64, device=tree.device)
        uniforms[~accepted] = noise.recover(requests[~accepted], nodes[~accepted])
        for part in row_slices(requests, log_probs.shape[1]):
            _finish_depth(tree, draft, trace, requests[part], depth, log_probs[part], accepted[part], uniforms[part])
        requests = requests[accepted]
        depth += 1
    return trace.verdict()


def _finish_depth(
    tree: DraftTree, draft: DraftRows, trace: Trace, requests: Tensor, depth: int, log_probs: Tensor, accepted: Tensor, uniforms: Tensor
) -> None:
    """Note 1 - TV of requests [R] that drafted a token here, and emit the last token of those that did not have it accepted."""
    target_probs = draft.widen(log_probs)  # [R, V]
    drafted = tree.num_nodes[requests] > depth
    ends, inner, refused = (~drafted).nonzero()[:, 0], drafted.nonzero()[:, 0], (drafted & ~accepted).nonzero()[:, 0]
    if ends.numel():
        trace.emit(requests[ends], inverse_cdf(take_rows(target_probs, ends), uniforms[ends]), is_bonus=True)
    if inner.numel():
        draft_probs = draft.rows(requests[inner], torch.full_like(inner, depth))
        shared = overlap(take_rows(target_probs, inner), draft_probs, draft.token_ids)
        trace.accept_probs[requests[inner], depth] = shared.sum(-1).double().clamp_max(1.0)
        if refused.numel():
            current = take_rows(target_probs, refused)
            left = remove(current, take_rows(shared, (~accepted[inner]).nonzero()[:, 0]), draft.token_ids)
            trace.emit(requests[refused], inverse_cdf(left, uniforms[refused], fallback=current), is_bonus=False)


def block(tree: DraftTree, target: TargetRows, noise: VerifyNoise) -> Verdict:
    """Block verification (Sun 2024, algorithm 2).

    With w_0 = 1, w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), Z_i = sum_v (w_i p_{i+1}(v) - q_{i+1}(v))+, h_i = Z_i / (Z_i + 1 - w_i)
    for i < γ and h_γ = w_γ, accept τ = max{i : u_i < h_i} tokens. τ = γ: emit from p_{γ+1}; else from
    norm((w_τ p_{τ+1} - q_{τ+1})+). Needs every row of the chain, so it asks for all of them at once.
    """
    draft, trace = DraftRows(tree, target.vocab_size), Trace(tree)
    every = torch.arange(tree.batch_size, device=tree.device)
    steps = torch.arange(trace.path.shape[1] + 1, device=tree.device)  # [D + 1]
    # Row i of a chain is the target after i tokens.
    requests, lengths = (steps <= tree.num_nodes[:, None]).nonzero(as_tuple=True)  # [R]
    log_probs = target.log_probs(requests, lengths - 1)  # [R, V]
    row_of = torch.zeros(tree.batch_size, steps.numel(), dtype=torch.int64, device=tree.device)
    row_of[requests, lengths] = torch.arange(requests.numel(), device=tree.device)
    weights = _prefix_weights(tree, draft, log_probs, row_of)  # [B, D + 1] w_i

    stop = torch.zeros_like(weights)  # [B, D + 1] h_i, of which h_0 is not tested
    inner = (lengths < tree.num_nodes[requests]).nonzero()[:, 0]
    for part in row_slices(inner, log_probs.shape[1]):
        asked, at = requests[inner[part]], lengths[inner[part]]
        _look_ahead(draft, trace, stop, weights, asked, at, take_rows(log_probs, inner[part]))
    stop[every, tree.num_nodes] = weights[every, tree.num_nodes]
    trace.num_accepted = _last_accepted(tree, noise, stop)  # [B] τ
    trace.path = torch.where(steps[:-1] < trace.num_accepted[:, None], steps[:-1], trace.path)
    trace.accept_probs.masked_fill_(steps[:-1] > trace.num_accepted[:, None], torch.nan)

    last, scale = row_of[every, trace.num_accepted], weights[every, trace.num_accepted]
    uniforms = noise.recover(every, trace.num_accepted)
    for part in row_slices(every, log_probs.shape[1]):
        _emit_block(tree, draft, trace, every[part], take_rows(log_probs, last[part]), scale[part], uniforms[part])
    return trace.verdict()


def _look_ahead(
    draft: DraftRows, trace: Trace, stop: Tensor, weights: Tensor, requests: Tensor, lengths: Tensor, log_probs: Tensor
) -> None:
    """Fill h_i of stop [B, D + 1] and 1 - TV behind prefixes of lengths [R] = i."""
    target_probs, draft_probs = draft.widen(log_probs), draft.rows(requests, lengths)
    trace.accept_probs[requests, lengths] = overlap(target_probs, draft_probs, draft.token_ids).sum(-1).double().clamp_max(1.0)
    scale = weights[requests, lengths]
    if not bool(((lengths > 0) & (scale > 0)).any()):
        return  # h_0 is not tested, and w = 0 means h = 0
    mass = residual(target_probs * scale[:, None].to(target_probs.dtype), draft_probs, draft.token_ids).sum(-1).double()  # Z_i
    stop[requests, lengths] = stop_mass(mass, scale)


def _emit_block(
    tree: DraftTree, draft: DraftRows, trace: Trace, requests: Tensor, log_probs: Tensor, scale: Tensor, uniforms: Tensor
) -> None:
    """Emit the last token of requests [R]: from p at a chain's end, else from norm((w p - q)+) with w = scale [R]."""
    target_probs, at = draft.widen(log_probs), trace.num_accepted[requests]
    is_bonus = at == tree.num_nodes[requests]
    bonus, recovered = is_bonus.nonzero()[:, 0], (~is_bonus).nonzero()[:, 0]
    if bonus.numel():
        trace.emit(requests[bonus], inverse_cdf(take_rows(target_probs, bonus), uniforms[bonus]), is_bonus=True)
    if recovered.numel():
        current = take_rows(target_probs, recovered)
        scaled = current * scale[recovered, None].to(current.dtype)
        left = residual(scaled, draft.rows(requests[recovered], at[recovered]), draft.token_ids)
        trace.emit(requests[recovered], inverse_cdf(left, uniforms[recovered], fallback=current), is_bonus=False)


def _prefix_weights(tree: DraftTree, draft: DraftRows, log_probs: Tensor, row_of: Tensor) -> Tensor:
    """[B, D + 1] float64: w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)) for i up to the chain's length."""
    weights = torch.ones(row_of.shape, dtype=torch.float64, device=tree.device)
    for depth in range(row_of.shape[1] - 1):
        requests = (tree.num_nodes > depth).nonzero()[:, 0]
        nodes = torch.full_like(requests, depth)
        drafted_target_probs = log_probs[row_of[requests, depth], tree.token_ids[requests, depth]].double().exp()
        ratio = drafted_target_probs / draft.token_probs(requests, nodes).double()
        weights[requests, depth + 1] = (weights[requests, depth] * ratio).clamp_max(1.0)
    return weights


def _last_accepted(tree: DraftTree, noise: VerifyNoise, stop: Tensor) -> Tensor:
    """[B] τ = max{i : u_i < h_i}, 0 if there is none."""
    requests, nodes = tree.valid().nonzero(as_tuple=True)
    passed = torch.zeros_like(stop, dtype=torch.int64)
    if requests.numel():
        below = noise.accept(requests, nodes, 0) < stop[requests, nodes + 1]
        passed[requests, nodes + 1] = torch.where(below, nodes + 1, 0)
    return passed.amax(1)
