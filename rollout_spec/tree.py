"""DraftTree: the one type that drafters make and verifiers take.

Shape legend: B requests, N nodes (padded), D depth of the deepest node, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import enum
import functools
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
    draft_token_ids: Tensor | None = None  # [Vd] int64, no token twice

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2 or self.parents.shape != self.token_ids.shape:
            raise ValueError(
                f"token_ids and parents must both be [B, N]; got {tuple(self.token_ids.shape)} and {tuple(self.parents.shape)}"
            )
        if self.num_nodes.shape != self.token_ids.shape[:1]:
            raise ValueError(f"num_nodes must be [B]; got {tuple(self.num_nodes.shape)} for B = {self.token_ids.shape[0]}")
        if self.draw in (Draw.SAMPLED, Draw.WITHOUT_REPLACEMENT) and self.draft_probs is None and self.max_nodes > 0:
            raise ValueError(
                f"a {self.draw.value} tree needs draft_probs: without the distribution its tokens were drawn from no verifier is exact"
            )
        if self.draft_probs is not None:
            if self.draft_probs.shape[:2] != self.token_ids.shape or self.draft_probs.ndim != 3:
                raise ValueError(
                    f"draft_probs must be [B, N, V]; got {tuple(self.draft_probs.shape)} for [B, N] = {tuple(self.token_ids.shape)}"
                )
            if self.draft_probs.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"draft_probs are {self.draft_probs.dtype}: widen them to float32, normalise there, and sample from those very numbers"
                )
        if self.draft_token_ids is not None and (self.draft_probs is None or self.draft_token_ids.shape != self.draft_probs.shape[2:]):
            raise ValueError("draft_token_ids must name one target token for each column of draft_probs")

    @property
    def batch_size(self) -> int:
        return self.token_ids.shape[0]

    @property
    def max_nodes(self) -> int:
        """N: the padded number of nodes."""
        return self.token_ids.shape[1]

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    @staticmethod
    def empty(batch_size: int, device: torch.device | None = None) -> DraftTree:
        """B trees without a node: plain decoding."""
        none = torch.empty(batch_size, 0, dtype=torch.int64, device=device)
        return DraftTree(token_ids=none, parents=none, num_nodes=none.new_zeros(batch_size), draw=Draw.DETERMINISTIC)

    @staticmethod
    def chains(
        token_ids: Tensor, lengths: Tensor, draw: Draw, draft_probs: Tensor | None = None, draft_token_ids: Tensor | None = None
    ) -> DraftTree:
        """Chains from token_ids [B, K], of which the first lengths [B] of each row are drafted."""
        return DraftTree(
            token_ids=token_ids,
            parents=_chain_parents(token_ids),
            num_nodes=lengths,
            draw=draw,
            draft_probs=draft_probs,
            draft_token_ids=draft_token_ids,
        )

    def valid(self) -> Tensor:
        """[B, N] bool: True where a node is not padding."""
        return torch.arange(self.max_nodes, device=self.device) < self.num_nodes[:, None]

    def is_chain(self) -> bool:
        """True if every request's nodes form one path from the root."""
        return self._is_chain

    def depths(self) -> Tensor:
        """[B, N] int64: 1 for children of the root, parent's depth + 1 below; 0 at padding.

        Pointer doubling: after step i a node's pointer stands 2^i edges higher and its depth counts the edges jumped over.
        """
        valid = self.valid()
        above = torch.nn.functional.pad(torch.where(valid, self.parents + 1, 0), (1, 0))  # [B, N + 1], entry 0 is the root
        depth = torch.nn.functional.pad(valid.long(), (1, 0))
        for _ in range(self._num_doublings()):
            depth = depth + depth.gather(1, above)
            above = above.gather(1, above)
        return depth[:, 1:]

    def max_depth(self) -> int:
        """D: depth of the deepest node of the batch, 0 without nodes."""
        return int(self.depths().max()) if self.token_ids.numel() else 0

    def ancestors(self) -> Tensor:
        """[B, N, N] bool: entry (n, m) says that m is n itself or one of its ancestors; padding rows see only themselves."""
        order = torch.arange(self.max_nodes, device=self.device)
        parent_of = (self.parents[:, :, None] == order) & self.valid()[:, :, None]
        reach = (parent_of | (order[:, None] == order)).float()
        for _ in range(self._num_doublings()):
            reach = (reach @ reach).clamp_max_(1.0)
        return reach > 0

    def children(self) -> Tensor:
        """[B, N + 1, W] int64: children of the root (entry 0) and of node n (entry n + 1) in node order, NO_NODE after the last.

        W is the largest number of siblings in the batch, at least 1.
        """
        valid = self.valid()
        order = torch.arange(self.max_nodes, device=self.device)
        earlier = self._siblings(valid) & (order < order[:, None])  # (n, m): m is a sibling before n
        rank = earlier.sum(2)
        width = int(rank.max()) + 1 if rank.numel() else 1
        table = torch.full((self.batch_size, self.max_nodes + 1, width), NO_NODE, dtype=torch.int64, device=self.device)
        requests, nodes = valid.nonzero(as_tuple=True)
        table[requests, self.parents[requests, nodes] + 1, rank[requests, nodes]] = nodes
        return table

    def check(self, vocab_size: int) -> None:
        """Raise ValueError, naming the request and node, if ids or parents cannot be right, or siblings repeat a token. O(B·N²)."""
        if self.max_nodes == 0:
            return
        valid = self.valid()
        order = torch.arange(self.max_nodes, device=self.device)
        bad_token = valid & ((self.token_ids < 0) | (self.token_ids >= vocab_size))
        bad_parent = valid & ((self.parents < NO_PARENT) | (self.parents >= order))
        for name, values, bad in (("token id", self.token_ids, bad_token), ("parent", self.parents, bad_parent)):
            if bool(bad.any()):
                request, node = bad.nonzero()[0].tolist()
                value = values[request, node].item()
                raise ValueError(
                    f"draft tree: request {request}, node {node} has {name} {value} (vocabulary of {vocab_size}, parent < node)"
                )
        same_token = self.token_ids[:, :, None] == self.token_ids[:, None, :]
        twice = self._siblings(valid) & same_token & (order < order[:, None])
        if bool(twice.any()):
            request, node, sibling = twice.nonzero()[0].tolist()
            token = self.token_ids[request, node].item()
            raise ValueError(f"draft tree: request {request}, nodes {sibling} and {node} are siblings with the same token {token}")

    @functools.cached_property
    def _is_chain(self) -> bool:
        """is_chain, which a round asks several times."""
        chain = _chain_parents(self.parents)
        return torch.equal(self.parents, chain) or bool(((self.parents == chain) | ~self.valid()).all())

    def _siblings(self, valid: Tensor) -> Tensor:
        """[B, N, N] bool: both nodes are valid and hang below the same parent."""
        return (self.parents[:, :, None] == self.parents[:, None, :]) & valid[:, :, None] & valid[:, None, :]

    def _num_doublings(self) -> int:
        return max(self.max_nodes - 1, 0).bit_length()


def _chain_parents(like: Tensor) -> Tensor:
    """[B, N] int64: parents of chains, one after another."""
    return torch.arange(-1, like.shape[1] - 1, device=like.device).expand_as(like)
