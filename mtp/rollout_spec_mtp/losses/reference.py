"""The losses written down once more from full logits, to be read: what compute.py and chunked.py are checked against.

Shares no code with them. Plain autograd, any float dtype, memory [T, G, V]; loops over slots follow the papers' recursions.

Shape legend: T anchors, G slots of an anchor, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitBatch:
    """Full logits at every slot. Invalid slots may hold anything, NaN included."""

    student_logits: Tensor  # [T, G, Vd]
    target_logits: Tensor  # [T, G, V]
    token_ids: Tensor  # [T, G] int64 the rollout's tokens, target vocabulary
    valid: Tensor  # [T, G] bool
    draft_token_ids: Tensor | None = None  # [Vd] int64 target id of every draft column; None: Vd = V
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Laws:
    """Both laws at the draft vocabulary's tokens, and at the rollout's token y; finite but meaningless at invalid slots."""

    draft_logprobs: Tensor  # [T, G, Vd]
    draft_probs: Tensor  # [T, G, Vd]
    target_probs: Tensor  # [T, G, Vd] detached; sums to the mass inside the draft vocabulary
    token_draft_logprobs: Tensor  # [T, G] log q(y), -inf outside the draft vocabulary
    token_target_probs: Tensor  # [T, G] p(y)


def laws(batch: LogitBatch) -> Laws:
    """q = softmax(student / temperature), p = sg[softmax(target / temperature)]."""
    usable = batch.valid[..., None]
    draft_logprobs = (torch.where(usable, batch.student_logits, 0.0) / batch.temperature).log_softmax(-1)
    target_probs = (torch.where(usable, batch.target_logits.detach(), 0.0) / batch.temperature).log_softmax(-1).exp()
    token_ids = torch.where(batch.valid, batch.token_ids, 0)
    token_target_probs = target_probs.gather(-1, token_ids[..., None])[..., 0]
    if batch.draft_token_ids is None:
        token_draft_logprobs = draft_logprobs.gather(-1, token_ids[..., None])[..., 0]
    else:
        target_probs = target_probs[..., batch.draft_token_ids]
        is_token = token_ids[..., None] == batch.draft_token_ids
        found = torch.where(is_token, draft_logprobs, 0.0).sum(-1)
        token_draft_logprobs = torch.where(is_token.any(-1), found, -torch.inf)
    return Laws(
        draft_logprobs=draft_logprobs,
        draft_probs=draft_logprobs.exp(),
        target_probs=target_probs,
        token_draft_logprobs=token_draft_logprobs,
        token_target_probs=token_target_probs,
    )


def overlap(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """[...] sum_v min(p, q) over the last dimension; at a tie the gradient is q's."""
    return torch.where(draft_probs <= target_probs, draft_probs, target_probs).sum(-1)


def ce_per_slot(batch: LogitBatch) -> Tensor:
    """[T, G] -log q(y); 0 where y is outside the draft vocabulary."""
    logprobs = laws(batch).token_draft_logprobs
    return torch.where(torch.isneginf(logprobs), 0.0, -logprobs)


def kl_per_slot(batch: LogitBatch) -> Tensor:
    """[T, G] m KL(p / m || q), m the target's mass inside the draft vocabulary (1 if it is whole)."""
    both = laws(batch)
    mass = both.target_probs.sum(-1, keepdim=True)
    inside = both.target_probs / torch.where(mass > 0, mass, 1.0)
    terms = torch.where(inside > 0, inside * (torch.where(inside > 0, inside, 1.0).log() - both.draft_logprobs), 0.0)
    return mass[..., 0] * terms.sum(-1)


def tv_per_slot(batch: LogitBatch) -> Tensor:
    """[T, G] 1 - sum_v min(p, q)."""
    both = laws(batch)
    return 1.0 - overlap(both.draft_probs, both.target_probs)


def hybrid_per_slot(batch: LogitBatch, decay: float = 3.0) -> Tensor:
    """[T, G] lambda KL + (1 - lambda) TV, lambda = exp(-decay sg[alpha])."""
    tv = tv_per_slot(batch)
    kl_share = torch.exp(-decay * (1.0 - tv.detach()))
    return kl_share * kl_per_slot(batch) + (1.0 - kl_share) * tv


def mean_over_slots(per_slot: Tensor, valid: Tensor, decay: float | None = None) -> Tensor:
    """[] mean over valid slots, slot k weighted e^{-(k-1)/decay} if decay is given; 0 without a valid slot."""
    depth = torch.arange(valid.shape[1], dtype=per_slot.dtype, device=per_slot.device)
    weights = valid * (torch.ones_like(depth) if decay is None else torch.exp(-depth / decay))
    if not valid.any():
        return torch.where(valid, per_slot, 0.0).sum()
    return torch.where(valid, per_slot * weights, 0.0).sum() / weights.sum()


def e2e_tv_per_anchor(batch: LogitBatch) -> Tensor:
    """[T] 1 - (1/gamma) sum_j prod_{i<=j} alpha_i (Bebop, arXiv 2606.12370), gamma the anchor's valid slots, alpha = 1 at invalid ones."""
    both = laws(batch)
    alphas = torch.where(batch.valid, overlap(both.draft_probs, both.target_probs), 1.0)
    products = [torch.stack([alphas[:, i] for i in range(j + 1)]).prod(0) for j in range(alphas.shape[1])]
    return 1.0 - _sum_over_valid(products, batch.valid) / _gamma(batch.valid)


def rejection_length_per_anchor(batch: LogitBatch) -> Tensor:
    """[T] sum_j prod_{i<j} min(1, q_i(y_i)/p_i(y_i)) alpha_j: for y ~ p unbiased for the accepted length under rejection sampling."""
    both = laws(batch)
    alphas = overlap(both.draft_probs, both.target_probs)
    reach = torch.ones_like(alphas[:, 0])
    terms = []
    for j in range(alphas.shape[1]):
        terms.append(reach * alphas[:, j])
        ratio = both.token_draft_logprobs[:, j].exp() / both.token_target_probs[:, j]
        reach = reach * torch.where(batch.valid[:, j] & (ratio <= 1), ratio, 1.0)
    return _sum_over_valid(terms, batch.valid)


def block_length_per_anchor(batch: LogitBatch) -> Tensor:
    """[T] sum_j R_{j-1} sum_v min(w_{j-1} p_j(v), q_j(v)): for y ~ p unbiased for the accepted length under block verification.

    w is Sun 2024's recursion ``w_i = min(1, w_{i-1} p_i(y_i)/q_i(y_i))``, ``R_i = prod_{k<=i} q_k(y_k)/p_k(y_k)`` the importance weight of
    the prefix; the sum over v is the last step's expectation under q, written over both laws.
    """
    both = laws(batch)
    importance = torch.ones_like(both.token_target_probs[:, 0])
    w = torch.ones_like(importance)
    terms = []
    for j in range(batch.valid.shape[1]):
        terms.append(importance * overlap(both.draft_probs[:, j], w[:, None] * both.target_probs[:, j]))
        ratio = both.token_draft_logprobs[:, j].exp() / both.token_target_probs[:, j]
        alive = ratio > 0
        inverse = 1.0 / torch.where(alive, ratio, 1.0)
        extended = torch.where(w * inverse < 1, w * inverse, 1.0)
        w = torch.where(batch.valid[:, j] & alive, extended, w)
        importance = importance * torch.where(batch.valid[:, j], ratio, 1.0)
    return _sum_over_valid(terms, batch.valid)


def chain_per_anchor(batch: LogitBatch) -> Tensor:
    """[T] -sum_j prod_{i<=j} q_i(y_i) (arXiv 2606.11552)."""
    token_probs = torch.where(batch.valid, laws(batch).token_draft_logprobs.exp(), 1.0)
    products = [torch.stack([token_probs[:, i] for i in range(j + 1)]).prod(0) for j in range(token_probs.shape[1])]
    return -_sum_over_valid(products, batch.valid)


def first_error_focal_per_anchor(batch: LogitBatch, exponent: float = 2.0) -> Tensor:
    """[T] (1 - q_f(y_f))^exponent CE_f at the first slot f where y is not a most likely draft token (arXiv 2606.11552)."""
    both = laws(batch)
    loss = torch.zeros_like(both.draft_probs[:, 0, 0])
    no_error_yet = torch.ones_like(batch.valid[:, 0])
    for j in range(batch.valid.shape[1]):
        logprob = both.token_draft_logprobs[:, j]
        errs = no_error_yet & batch.valid[:, j] & (logprob < both.draft_logprobs[:, j].amax(-1))
        learnable = errs & ~torch.isneginf(logprob)
        logprob = torch.where(learnable, logprob, -1.0)
        loss = loss + torch.where(learnable, -logprob * (1.0 - logprob.exp()) ** exponent, 0.0)
        no_error_yet = no_error_yet & ~errs
    return loss


def mean_over_anchors(per_anchor: Tensor, valid: Tensor) -> Tensor:
    """[] mean over anchors that have a valid slot; 0 if none has."""
    has_slot = valid.any(1)
    total = torch.where(has_slot, per_anchor, 0.0).sum()
    return total / has_slot.sum() if has_slot.any() else total


SLOT_LOSSES: dict[str, Callable[[LogitBatch], Tensor]] = {
    "ce": ce_per_slot,
    "kl": kl_per_slot,
    "tv": tv_per_slot,
    "hybrid": hybrid_per_slot,
}
ANCHOR_LOSSES: dict[str, Callable[[LogitBatch], Tensor]] = {
    "e2e_tv": e2e_tv_per_anchor,
    "rejection_length": lambda batch: 1.0 - rejection_length_per_anchor(batch) / _gamma(batch.valid),
    "block_length": lambda batch: 1.0 - block_length_per_anchor(batch) / _gamma(batch.valid),
    "chain": chain_per_anchor,
}


def _gamma(valid: Tensor) -> Tensor:
    return valid.sum(1).clamp(min=1)


def _sum_over_valid(terms: list[Tensor], valid: Tensor) -> Tensor:
    return torch.where(valid, torch.stack(terms, dim=1), 0.0).sum(1)
