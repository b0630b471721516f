"""Objectives as functions of slot statistics: what drafters are trained on.

Slot objectives give a loss for every slot, anchor objectives one for every anchor; ``compute.py`` averages them. All are
finite and pass zero gradients at invalid slots.

Shape legend: T anchors, G slots of an anchor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_spec_mtp.losses.density import log_ratios, prefix_weights
from rollout_spec_mtp.losses.stats import SlotStats


def ce_per_slot(stats: SlotStats) -> Tensor:
    """[T, G] -log q(y). Tokens outside the draft vocabulary cannot be learned and count 0."""
    learnable = stats.valid & ~torch.isneginf(stats.draft_logprobs)
    return torch.where(learnable, -stats.draft_logprobs, 0.0)


def kl_per_slot(stats: SlotStats) -> Tensor:
    """[T, G] forward KL(p || q), see SlotStats.kl."""
    assert stats.kl is not None
    return stats.kl


def tv_per_slot(stats: SlotStats) -> Tensor:
    """[T, G] TV(p, q) = 1 - alpha."""
    return 1.0 - stats.overlap


def hybrid_per_slot(stats: SlotStats, decay: float) -> Tensor:
    """[T, G] lambda KL + (1 - lambda) TV with lambda = exp(-decay sg[alpha]): KL where the laws hardly overlap and TV's
    gradient vanishes, TV where they do."""
    kl_share = torch.exp(-decay * stats.overlap.detach())
    return kl_share * kl_per_slot(stats) + (1.0 - kl_share) * tv_per_slot(stats)


def valid_slots(valid: Tensor, dtype: torch.dtype) -> Tensor:
    """[T] number of valid slots of each anchor, at least 1 so that it can divide."""
    return valid.sum(dim=1).clamp(min=1).to(dtype)


def e2e_length(stats: SlotStats) -> Tensor:
    """[T] sum_j prod_{i<=j} alpha_i over valid j: the accepted length if every slot's alpha were independent of its tokens.

    Bebop (arXiv 2606.12370). Along a rollout it is biased for the accepted length of rejection sampling, because alphas are
    weighted by the target's law of the prefix and not by the prefixes that survive; ``rejection_length`` is not.
    """
    alive = torch.ones_like(stats.overlap[:, 0])
    length = torch.zeros_like(alive)
    for slot in range(stats.overlap.shape[1]):
        alive = alive * stats.overlap[:, slot]
        length = length + alive * stats.valid[:, slot]
    return length


def rejection_length(stats: SlotStats) -> Tensor:
    """[T] unbiased estimate of the accepted length (no bonus token) under rejection sampling.

    ``E[L] = sum_j E_{y~p}[prod_{i<j} min(1, q_i(y_i)/p_i(y_i)) alpha_j]`` (Leviathan 2023's acceptance, rewritten over target
    draws; the last step is summed over the vocabulary, not sampled). y must be drawn from the p of the statistics. The target
    law does not depend on the drafter, so the gradient is unbiased too. Each of the j terms lies in [0, 1].
    """
    weights = _weights(stats, carry_credit=False)
    return (weights * stats.overlap * stats.valid).sum(dim=1)


def block_length(stats: SlotStats) -> Tensor:
    """[T] unbiased estimate of the accepted length (no bonus token) under block verification (Sun 2024).

    ``E[L] = sum_j E_{x~q}[w_j] = sum_j E_{y~p}[R_j w_j]``, and R_j w_j = min(1, R_1, ..., R_j) <= 1 (density.py): target
    draws need no unbounded importance weight, and prefixes with p = 0 have w = 0, so nothing is missed. Summing the last step
    over the vocabulary (Rao-Blackwell: no term's variance rises) gives the term
    ``survival_{j-1} sum_v min(p_j(v), e^{credit_{j-1}} q_j(v))``. Value and gradient are unbiased for y ~ p.
    """
    assert stats.block_overlap is not None
    weights = _weights(stats, carry_credit=True)
    return (weights * stats.block_overlap * stats.valid).sum(dim=1)


def chain_length(stats: SlotStats) -> Tensor:
    """[T] sum_j prod_{i<=j} q_i(y_i): expected length of the rollout's own prefix that the drafter samples (arXiv 2606.11552)."""
    alive = torch.ones_like(stats.draft_logprobs[:, 0])
    length = torch.zeros_like(alive)
    for slot in range(stats.draft_logprobs.shape[1]):
        alive = alive * stats.draft_logprobs[:, slot].exp()
        length = length + alive * stats.valid[:, slot]
    return length


def first_error_focal(stats: SlotStats, exponent: float) -> Tensor:
    """[T] (1 - q_f(y_f))^exponent CE_f at the first slot f whose most likely draft token is not y; 0 where there is none.

    arXiv 2606.11552. The slots after f are never reached, so this one decides the length. The focal factor is differentiated,
    as in Lin et al. 2017. If y_f is outside the draft vocabulary the anchor counts 0: nothing can move its error.
    """
    errs = stats.valid & ~stats.draft_correct
    first = errs & (errs.cumsum(dim=1) == 1) & ~torch.isneginf(stats.draft_logprobs)
    # Unselected slots get a harmless value first: a power of 0 there would put NaN into the gradient of the selection.
    logprobs = torch.where(first, stats.draft_logprobs, -1.0)
    focal = -logprobs * (-torch.expm1(logprobs)) ** exponent
    return torch.where(first, focal, 0.0).sum(dim=1)


def _weights(stats: SlotStats, *, carry_credit: bool) -> Tensor:
    ratio = log_ratios(stats.draft_logprobs, stats.target_logprobs)
    return prefix_weights(ratio, carry_credit=carry_credit).survival
