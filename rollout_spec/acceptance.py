"""How many drafted tokens are accepted: expectations from probabilities, and estimates from counts. Pure.

A length that counts the recovered or bonus token says ``including the bonus``; all others count accepted draft tokens only.

Shape legend: B requests, N nodes, K drafted tokens of a chain, V vocabulary, R finished requests, D depths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.tree import DraftTree


def acceptance_probability(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """[...] α = sum_v min(p(v), q(v)) = 1 - TV(p, q) for laws [..., V]: how likely one sampled draft token is accepted by rejection."""
    return torch.minimum(target_probs, draft_probs).sum(-1)


def expected_length_rejection(accept_probs: Tensor) -> Tensor:
    """[...] expected accepted tokens of a chain under rejection: sum_j prod_{i <= j} α_i for accept_probs [..., K].

    Exact when α_i does not depend on the tokens before (Leviathan 2023, equation 1, without the bonus). With α of a prefix drawn from
    the drafter and kept with min(1, p / q) it is one term of a mean; use the oracle of ``rollout_spec.reference`` for small exact laws.
    """
    return accept_probs.cumprod(-1).sum(-1)


def expected_length_block(target_token_probs: Tensor, draft_token_probs: Tensor) -> Tensor:
    """[...] sum_j w_j, w_j = min(1, w_{j-1} p(x_j) / q(x_j)), for probabilities [..., K] of a drafted chain's own tokens.

    Averaged over chains drawn from the drafter it is the expected accepted length of block verification (Sun 2024, theorem 2).
    """
    weight = torch.ones_like(target_token_probs[..., 0])
    total = torch.zeros_like(weight)
    for ratio in (target_token_probs / draft_token_probs).unbind(-1):
        weight = (weight * ratio).clamp_max(1.0)
        total = total + weight
    return total


def expected_length_exact_match(tree: DraftTree, target_probs: Tensor) -> Tensor:
    """[B] sum over nodes of p(path to the node), for target_probs [B, N + 1, V] (row 0 the root, row n + 1 after node n).

    The expected accepted length of exact match and of the Gumbel-coupled scheme on a tree that does not know the noise.
    """
    valid = tree.valid()
    parent_rows = torch.where(valid, tree.parents + 1, 0)
    rows = target_probs.gather(1, parent_rows[:, :, None].expand(-1, -1, target_probs.shape[2]))  # [B, N, V] law at each node's parent
    steps = rows.gather(2, torch.where(valid, tree.token_ids, 0)[:, :, None])[:, :, 0]
    # p(path) = exp(sum of log p over ancestors); log 0 is cut off far below anything that matters, for 0 * -inf is not a number.
    log_steps = steps.log().clamp_min(-1e4)
    return (torch.einsum("bnm,bm->bn", tree.ancestors().to(log_steps.dtype), log_steps).exp() * valid).sum(1)


def acceptance_length_pooled(num_accepted: Sequence[int], num_rounds: Sequence[int]) -> float:
    """Tokens a round, including the bonus, over all rounds of all requests: 1 + sum accepted / sum rounds. NaN without rounds."""
    return 1.0 + _ratio(sum(num_accepted), sum(num_rounds))


def acceptance_length_per_request(num_accepted: Sequence[int], num_rounds: Sequence[int]) -> float:
    """Mean over requests of 1 + accepted / rounds, including the bonus; every request weighs the same. NaN without any that ran."""
    return 1.0 + _mean([accepted / rounds for accepted, rounds in zip(num_accepted, num_rounds, strict=True) if rounds])


def acceptance_rate_pooled(num_accepted: Sequence[int], num_drafted: Sequence[int]) -> float:
    """Accepted over drafted tokens of all requests together. NaN if nothing was drafted."""
    return _ratio(sum(num_accepted), sum(num_drafted))


def acceptance_rate_per_request(num_accepted: Sequence[int], num_drafted: Sequence[int]) -> float:
    """Mean over the requests that drafted anything of accepted over drafted tokens. NaN if none did."""
    return _mean([accepted / drafted for accepted, drafted in zip(num_accepted, num_drafted, strict=True) if drafted])


def acceptance_by_depth(drafted_by_depth: Sequence[int], accepted_by_depth: Sequence[int]) -> list[float]:
    """[D] accepted over reached-with-a-draft, depth by depth from 1; NaN where no round got."""
    return [_ratio(accepted, drafted) for drafted, accepted in zip(drafted_by_depth, accepted_by_depth, strict=True)]


@dataclass(frozen=True, kw_only=True)
class EntropyLaw:
    """α = intercept + slope H: acceptance falls about linearly with the policy's entropy (Bebop, arXiv 2606.12370)."""

    intercept: float
    slope: float  # per nat

    def predict(self, entropies: Tensor) -> Tensor:
        """α for entropies [...] in nats, kept within [0, 1]."""
        return (self.intercept + self.slope * entropies).clamp(0.0, 1.0)


def fit_entropy_law(entropies: Tensor, accept_probs: Tensor, weights: Tensor | None = None) -> EntropyLaw:
    """Least squares of accept_probs on entropies, both [R], weighted by weights [R] >= 0 (None: all 1).

    Entries where either is NaN are left out. If the rest share one entropy the slope is 0 and the intercept their mean.
    Raises ValueError if nothing is left.
    """
    seen = ~(entropies.isnan() | accept_probs.isnan())
    x, y = entropies[seen].double(), accept_probs[seen].double()
    w = torch.ones_like(x) if weights is None else weights[seen].double()
    total = w.sum()
    if not bool(total > 0):
        raise ValueError("no pair of entropy and acceptance with a positive weight to fit")
    mean_x, mean_y = (w * x).sum() / total, (w * y).sum() / total
    spread = (w * (x - mean_x) ** 2).sum() / total
    # Below this the entropies differ by rounding only, and a slope would be noise over noise.
    if float(spread) <= 1e-12 * max(1.0, float(mean_x) ** 2):
        return EntropyLaw(intercept=float(mean_y), slope=0.0)
    slope = (w * (x - mean_x) * (y - mean_y)).sum() / total / spread
    return EntropyLaw(intercept=float(mean_y - slope * mean_x), slope=float(slope))


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else math.nan


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
