"""The two numbers every ratio scheme is made of: what target and draft share, and what the target has left.

With a scale w (1, or the acceptance mass that reached a node), for every token v

    shared(v) = min(w p(v), q(v)),    residual(v) = (w p(v) - q(v))+,    shared + residual = w p

which is why they are exact: a drafted v is kept with probability shared(v) / q(v), and the residual makes up the rest.

Shape legend: B requests, N nodes, R rows, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_spec.tree import DraftTree
from rollout_spec.verify.categorical import take_rows

# How far the sum of a draft distribution may be from 1. Softmax in float32 stays within 1e-5 at any vocabulary size; rounding to
# bfloat16 does not, and its tokens would be drawn from other numbers than the ratio is computed with.
SUM_TOLERANCE = 1e-4


def overlap(target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor | None) -> Tensor:
    """[R, Vd] min(p, q) in the draft's columns; its sum is 1 - TV(p, q). target_probs [R, V] may be scaled by w."""
    columns = target_probs if draft_token_ids is None else target_probs[:, draft_token_ids]
    return torch.minimum(columns, draft_probs)


def remove(target_probs: Tensor, shared: Tensor, draft_token_ids: Tensor | None) -> Tensor:
    """[R, V] (p - q)+ as p minus the overlap [R, Vd]: exactly 0 wherever q >= p."""
    if draft_token_ids is None:
        return target_probs - shared
    left = target_probs.to(shared.dtype, copy=True)
    left[:, draft_token_ids] -= shared
    return left


def residual(target_probs: Tensor, draft_probs: Tensor, draft_token_ids: Tensor | None) -> Tensor:
    """[R, V] (p - q)+; target_probs [R, V] may be scaled by w."""
    return remove(target_probs, overlap(target_probs, draft_probs, draft_token_ids), draft_token_ids)


def normalised(left: Tensor, mass: Tensor, target_probs: Tensor) -> Tensor:
    """[R, V] left / mass [R], or the target where the residual has no mass: then p = q, and p itself is what is left."""
    scaled = left / mass[:, None].clamp_min(torch.finfo(left.dtype).tiny)
    empty = mass <= 0
    return torch.where(empty[:, None], target_probs, scaled) if bool(empty.any()) else scaled


def stop_mass(residual_mass: Tensor, scale: Tensor) -> Tensor:
    """h = Z / (Z + 1 - w), 0/0 = 1: the probability to stop at a node reached with mass w if nothing below it is accepted.

    It makes h + (1 - h)(w - Z) = w: stopping here or accepting below (which happens with w - Z) adds up to w again
    (Sun 2024, algorithm 2; arXiv 2505.12398, algorithm 1).
    """
    # In this order a node reached with mass 1 stops with probability exactly 1, however small Z is.
    denominator = residual_mass + (1 - scale)
    return torch.where(denominator > 0, residual_mass / denominator, 1.0)


class DraftRows:
    """Rows and entries of a tree's draft_probs, refused with ValueError where they cannot be what the tokens were drawn from."""

    def __init__(self, tree: DraftTree, vocab_size: int) -> None:
        self.token_ids = tree.draft_token_ids  # [Vd] or None
        self._draft_probs = tree.draft_probs
        if tree.draft_probs is None:
            return  # a tree without nodes: no row is read
        valid = tree.valid()
        self._columns = torch.where(valid, tree.token_ids, 0)  # [B, N] column of draft_probs that holds the node's token
        if self.token_ids is not None:
            self._columns = _reduced_columns(self._columns, self.token_ids, valid, vocab_size)
        elif tree.draft_probs.shape[2] != vocab_size:
            raise ValueError(
                f"draft_probs have {tree.draft_probs.shape[2]} columns, the vocabulary {vocab_size}: name them in draft_token_ids"
            )
        self._token_probs = tree.draft_probs.gather(2, self._columns[:, :, None])[:, :, 0]  # [B, N]
        _refuse(valid & ~(self._token_probs > 0), "holds a token that its own draft_probs give no probability")

    def widen(self, log_probs: Tensor) -> Tensor:
        """[R, V] exp(log_probs) in the wider of the target's and the draft's dtype."""
        probs = log_probs.exp()
        return probs if self._draft_probs is None else probs.to(torch.promote_types(probs.dtype, self._draft_probs.dtype))

    def rows(self, requests: Tensor, nodes: Tensor) -> Tensor:
        """[R, Vd] the distributions that the nodes were drawn from; possibly a view, not to be modified. Refused unless they sum to 1."""
        assert self._draft_probs is not None
        rows = take_rows(self._draft_probs.flatten(0, 1), requests * self._draft_probs.shape[1] + nodes)
        sums = rows.sum(-1)
        off = ~((sums - 1).abs() <= SUM_TOLERANCE)
        if bool(off.any()):
            row = int(off.nonzero()[0, 0])
            raise ValueError(
                f"draft tree: request {int(requests[row])}, node {int(nodes[row])} has draft_probs that sum to {float(sums[row])}: "
                f"normalise them in float32 and sample from those very numbers"
            )
        return rows

    def columns(self, requests: Tensor, nodes: Tensor) -> Tensor:
        """[R] column of draft_probs that holds each node's token."""
        return self._columns[requests, nodes]

    def token_probs(self, requests: Tensor, nodes: Tensor) -> Tensor:
        """[R] q(x) of each node's token x."""
        return self._token_probs[requests, nodes]

    def remaining(self, requests: Tensor, siblings: Tensor, ranks: Tensor) -> Tensor:
        """[R, Vd] norm(q without earlier siblings): what sibling number ranks [R] of siblings [R, W] was drawn from.

        The mass left is summed anew rather than taken as 1 - q(x): when the siblings before hold almost all of q, that difference
        has no correct digit.
        """
        rows = self.rows(requests, siblings.gather(1, ranks[:, None])[:, 0])
        last = int(ranks.max())
        if last == 0:
            return rows
        rows = rows.clone()
        for rank in range(last):
            later = (ranks > rank).nonzero()[:, 0]
            rows[later, self.columns(requests[later], siblings[later, rank])] = 0.0
        return rows / rows.sum(-1, keepdim=True)


def _reduced_columns(token_ids: Tensor, draft_token_ids: Tensor, valid: Tensor, vocab_size: int) -> Tensor:
    """[B, N] the column of each node's token in a reduced vocabulary draft_token_ids [Vd]."""
    if bool(((draft_token_ids < 0) | (draft_token_ids >= vocab_size)).any()):
        raise ValueError(f"draft_token_ids reach outside the vocabulary of {vocab_size}: are they offsets instead of ids?")
    order = torch.arange(draft_token_ids.numel(), device=draft_token_ids.device)
    column_of = order.new_full((vocab_size,), -1)
    column_of[draft_token_ids] = order
    if bool((column_of[draft_token_ids] != order).any()):
        raise ValueError("draft_token_ids names a token twice: its probability would be split over two columns")
    columns = column_of[token_ids]
    _refuse(valid & (columns < 0), "holds a token that is not in draft_token_ids")
    return torch.where(valid, columns, 0)


def _refuse(bad: Tensor, what: str) -> None:
    if bool(bad.any()):
        request, node = bad.nonzero()[0].tolist()
        raise ValueError(f"draft tree: request {request}, node {node} {what}")
