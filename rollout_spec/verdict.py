"""Verdict: what a verifier decided about a batch of draft trees.

Shape legend: B requests, D deepest possible depth (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.tree import DraftTree

NO_TOKEN = -1  # padding in lists of token ids


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
    # How likely a drafted token was to be accepted at depth d, given that depth d was reached: 1 - TV before the drafted token is
    # looked at (rejection, block), the children's total target probability (exact match), or the realised 0 or 1 (gumbel,
    # rejection walk, traversal: no cheap number exists before the tokens are looked at). NaN where nothing was drafted or not reached.
    accept_probs: Tensor  # [B, D] float32 or float64
    # One entry for each emitted token, NaN after them; None when the target cannot tell (dense probabilities only).
    raw_logprobs: Tensor | None = None  # [B, D + 1] log-softmax of the model's own logits
    processed_logprobs: Tensor | None = None  # [B, D + 1] after every logits processor: what was sampled from
    entropies: Tensor | None = None  # [B, D + 1] nats, of the processed distribution

    def emitted(self, tree: DraftTree) -> Tensor:
        """[B, D + 1] int64: the tokens each request emits, NO_TOKEN after them. ``tree`` is the one that was verified."""
        accepted = tree.token_ids.gather(1, self.path.clamp_min(0)) if tree.max_nodes else self.path
        tokens = torch.nn.functional.pad(torch.where(self.path >= 0, accepted, NO_TOKEN), (0, 1), value=NO_TOKEN)
        return tokens.scatter(1, self.num_accepted[:, None], self.next_token_ids[:, None])
