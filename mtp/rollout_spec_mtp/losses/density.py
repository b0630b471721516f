"""Density ratios along a target rollout, and the weights with which a prefix of it survives verification.

For y ~ p the drafter's path q is reached by importance weights r_i = q_i(y_i) / p_i(y_i). What a verifier accepts of the
drafter's law, seen from the target's, is a factor in [0, 1] a slot, so these weights never explode:

* rejection sampling: ``c_i = min(1, r_i)``, since ``q min(1, p/q) = p min(1, q/p)``;
* block verification (Sun 2024): with ``w_i = min(1, w_{i-1} p_i/q_i)`` and ``R_i = r_1 ... r_i``,
  ``R_i w_i = min(R_i, R_{i-1} w_{i-1}) = min(1, R_1, ..., R_i)``. In logs this is a reflected walk: the *credit*
  ``e_i = -log w_i = max(0, e_{i-1} + log r_i)`` is what the path was over-drafted so far, and
  ``c_i = min(1, e^{e_{i-1}} r_i)``. Rejection sampling is the same with no credit, hence never better.

Shape legend: T anchors, G slots of an anchor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Caps log ratios so that no sum of them is inf - inf. It binds only where q(y) > e^80 p(y), which target draws do not meet.
LOG_CAP = 80.0


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixWeights:
    """What the slots before each slot leave over for it."""

    survival: Tensor  # [T, G] in [0, 1]: product of c_i over the slots before
    log_credit: Tensor  # [T, G] >= 0: e of the slot before; 0 at the first slot


def log_ratios(draft_logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """log q(y)/p(y) [T, G] from SlotStats' log q(y) and log p(y) [T, G]; 0 at invalid slots, where both are, -inf where q(y) = 0."""
    impossible = torch.isneginf(draft_logprobs)
    ratio = (draft_logprobs - target_logprobs).clamp(max=LOG_CAP)
    return torch.where(impossible, -torch.inf, ratio)


def prefix_weights(log_ratio: Tensor, *, carry_credit: bool) -> PrefixWeights:
    """Survival and credit before each slot from log q(y)/p(y) [T, G].

    ``carry_credit`` False: rejection sampling (credit 0); True: block verification. At a tie (log 1) the gradient goes to the
    survival factor alone, the convention [q <= p] of the overlap's gradient.
    """
    credit = torch.zeros_like(log_ratio[:, 0])
    survival = torch.ones_like(credit)
    survivals, log_credits = [], []
    for slot in range(log_ratio.shape[1]):
        survivals.append(survival)
        log_credits.append(credit)
        level = credit + log_ratio[:, slot]
        survival = survival * torch.where(level <= 0, level, 0.0).exp()
        if carry_credit:
            credit = torch.where(level > 0, level, 0.0).clamp(max=LOG_CAP)
    return PrefixWeights(survival=torch.stack(survivals, dim=1), log_credit=torch.stack(log_credits, dim=1))
