"""DraftTree: the one type that drafters make and verifiers take.

Shape legend: B requests, N nodes (padded), D depth of the deepest node, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

NO_PARENT = -1  # parent of a node that hangs directly below the root (the last committed token)
NO_NODE = -1  # padding in lists of node indices


class Draw(enum.Enum):
    """How the children of every node were chosen; it decides which verifiers are exact on the tree.

    DETERMINISTIC: tokens and shape are a function of the context alone (top-k, argmax, retrieval).
    SAMPLED: each node is one draw from ``draft_probs`` at that node, independent of everything else (chains).
    WITHOUT_REPLACEMENT: siblings are drawn from ``draft_probs`` one after another without replacement; the node order
        of siblings is the draw order, and the number of children asked for at a node never depends on a drawn token.
    GUMBEL: children are the top-k of ``log draft_probs + G`` with the same noise ``G[seed, position, token]`` the target uses.
    """

    DETERMINISTIC = "deterministic"
    SAMPLED = "sampled"
    WITHOUT_REPLACEMENT = "without_replacement"
    GUMBEL = "gumbel"


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftTree:
    """A batch of draft trees in topological order (parent index < child index). A chain is a tree of width one.

    The root (the last committed token) is not a node. Nodes ``num_nodes[b]:`` of request b are padding.

    ``draft_probs[b, n]`` is the distribution that node n was drawn from, i.e. the drafter's distribution *at the parent of n*,
    in the same dtype and with the same filters as it was sampled with; siblings repeat it. With ``draft_token_ids`` its
    columns are a reduced vocabulary and column c stands for target token ``draft_token_ids[c]``.
    """

    token_ids: Tensor  # [B, N] int64, target vocabulary
    parents: Tensor  # [B, N] int64, NO_PARENT below the root
    num_nodes: Tensor  # [B] int64
    draw: Draw
    draft_probs: Tensor | None = None  # [B, N, V or Vd] float32 or float64
    draft_token_ids: Tensor | None = None  # [Vd] int64

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2 or self.parents.shape != self.token_ids.shape:
            raise ValueError(f"token_ids and parents must both be [B, N]; got {tuple(self.token_ids.shape)} and {tuple(self.parents.shape)}")
        if self.num_nodes.shape != self.token_ids.shape[:1]:
            raise ValueError(f"num_nodes must be [B]; got {tuple(self.num_nodes.shape)} for B = {self.token_ids.shape[0]}")
        if self.draw in (Draw.SAMPLED, Draw.WITHOUT_REPLACEMENT) and self.draft_probs is None and self.max_nodes > 0:
            raise ValueError(f"a {self.draw.value} tree needs draft_probs: without the distribution its tokens were drawn from no verifier is exact")
        if self.draft_probs is not None and self.draft_probs.shape[:2] != self.token_ids.shape:
            raise ValueError(f"draft_probs must be [B, N, V]; got {tuple(self.draft_probs.shape)} for [B, N] = {tuple(self.token_ids.shape)}")
        if self.draft_token_ids is not None and (self.draft_probs is None or self.draft_token_ids.shape != self.draft_probs.shape[2:]):
            raise ValueError("draft_token_ids must name one target token for each column of draft_probs")

    @property
    def batch_size(self) -> int:
        return self.token_ids.shape[0]

    @property
    def max_nodes(self) -> int:
        """N: the padded number of nodes."""
        return self.token_ids.shape[1]

    @staticmethod
    def empty(batch_size: int) -> DraftTree:
        """B trees without a node: plain decoding."""
        none = torch.empty(batch_size, 0, dtype=torch.int64)
        return DraftTree(token_ids=none, parents=none, num_nodes=torch.zeros(batch_size, dtype=torch.int64), draw=Draw.DETERMINISTIC)

    @staticmethod
    def chains(
        token_ids: Tensor, lengths: Tensor, draw: Draw, draft_probs: Tensor | None = None, draft_token_ids: Tensor | None = None
    ) -> DraftTree:
        """Chains from token_ids [B, K], of which the first lengths [B] of each row are drafted."""
        parents = torch.arange(-1, token_ids.shape[1] - 1).expand_as(token_ids)
        return DraftTree(
            token_ids=token_ids,
            parents=parents,
            num_nodes=lengths,
            draw=draw,
            draft_probs=draft_probs,
            draft_token_ids=draft_token_ids,
        )

    def valid(self) -> Tensor:
        """[B, N] bool: True where a node is not padding."""
        return torch.arange(self.max_nodes) < self.num_nodes[:, None]

    def is_chain(self) -> bool:
        """True if every request's nodes form one path from the root."""
        chain = torch.arange(-1, self.max_nodes - 1).expand_as(self.parents)
        return bool(((self.parents == chain) | ~self.valid()).all())

    def depths(self) -> Tensor:
        """[B, N] int64: 1 for children of the root, parent's depth + 1 below; 0 at padding."""
        depth = torch.zeros_like(self.parents)
        rows = torch.arange(self.batch_size)
        for node in range(self.max_nodes):
            parent = self.parents[:, node]
            above = torch.where(parent >= 0, depth[rows, parent.clamp_min(0)], 0)
            depth[:, node] = above + 1
        return depth * self.valid()

    def ancestors(self) -> Tensor:
        """[B, N, N] bool: entry (n, m) says that m is n itself or one of its ancestors; padding rows see only themselves."""
        eye = torch.eye(self.max_nodes, dtype=torch.bool)
        mask = eye.expand(self.batch_size, -1, -1).clone()
        rows = torch.arange(self.batch_size)
        for node in range(self.max_nodes):
            parent = self.parents[:, node]
            has = (parent >= 0) & (node < self.num_nodes)
            mask[:, node] |= mask[rows, parent.clamp_min(0)] & has[:, None]
        return mask

    def check(self, vocab_size: int) -> None:
        """Raise ValueError, naming the request and node, if ids, parents or probabilities cannot be right. O(B·N)."""
        valid = self.valid()
        bad_token = valid & ((self.token_ids < 0) | (self.token_ids >= vocab_size))
        order = torch.arange(self.max_nodes)
        bad_parent = valid & ((self.parents < NO_PARENT) | (self.parents >= order))
        for name, bad in (("token id", bad_token), ("parent", bad_parent)):
            if bool(bad.any()):
                request, node = bad.nonzero()[0].tolist()
                value = (self.token_ids if name == "token id" else self.parents)[request, node].item()
                raise ValueError(f"draft tree: request {request}, node {node} has {name} {value} (vocabulary of {vocab_size}, parent < node)")
