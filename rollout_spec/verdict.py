"""Verdict: what a verifier decided about a batch of draft trees.

Shape legend: B requests, D deepest possible depth (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """Accepted path, the token emitted after it, and how likely acceptance was at every depth that was reached.

    A round emits ``num_accepted[b] + 1`` tokens: the accepted draft tokens in path order, then ``next_token_ids[b]``, which
    is a *bonus* token if no drafted child was refused before it (the walk ended at a leaf), else a *recovered* one.
    """

    path: Tensor  # [B, D] int64 node indices, NO_NODE after num_accepted
    num_accepted: Tensor  # [B] int64
    next_token_ids: Tensor  # [B] int64
    is_bonus: Tensor  # [B] bool
    # Probability, given that depth d was reached and before the drafted token is looked at where the scheme allows it, that
    # a drafted token is accepted there (RS and block: 1 - TV; exact match: the children's total target probability;
    # Gumbel-coupled: the realised 0 or 1). NaN where nothing was drafted or the depth was not reached.
    accept_probs: Tensor  # [B, D] float32 or float64
    # One entry for each emitted token, NaN after them; None when the target cannot tell (dense probabilities only).
    raw_logprobs: Tensor | None = None  # [B, D + 1] log-softmax of the model's own logits
    processed_logprobs: Tensor | None = None  # [B, D + 1] after every logits processor: what was sampled from
    entropies: Tensor | None = None  # [B, D + 1] nats, of the processed distribution
