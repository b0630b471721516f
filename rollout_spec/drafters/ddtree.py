"""DDTree: the best tree of a node budget when a drafter's distributions at different depths do not depend on each other.

A block drafter gives one marginal ``q_d`` for each depth, so a node is a list of tokens, one a depth, and its probability is
``q(node) = prod_d q_d(token_d)``.
Exact match walks such a tree ``sum_{n in T} p(path of n)`` tokens far; with q for p the best tree of N nodes is the N most probable nodes,
which always form a tree because a child is never more probable than its parent.

Shape legend: B requests, D depths, K candidates of a depth, N nodes, M pairs of a parent and a candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.budget import TreeGrowth
from rollout_spec.tree import NO_PARENT, DraftTree, Draw


@dataclass(frozen=True, kw_only=True, eq=False)
class BestNodes:
    """The most probable nodes of each request, in falling order: every prefix of them is the best tree of its size."""

    log_probs: Tensor  # [B, N] float64 log q of the node
    depths: Tensor  # [B, N] int64, from 1
    candidates: Tensor  # [B, N] int64: the node's token is so many-th of its depth
    parents: Tensor  # [B, N] int64
    num_nodes: Tensor  # [B] int64

    def valid(self) -> Tensor:
        """[B, N] bool."""
        return torch.arange(self.log_probs.shape[1], device=self.log_probs.device) < self.num_nodes[:, None]

    def tree(self, token_ids: Tensor, num_nodes: Tensor) -> DraftTree:
        """The deterministic trees of the first num_nodes [B] nodes; token_ids [B, D, K] are the depths' candidates."""
        most = int(num_nodes.max()) if num_nodes.numel() else 0
        kept = torch.arange(most, device=token_ids.device) < num_nodes[:, None]
        depths, candidates = self.depths[:, :most], self.candidates[:, :most]
        requests = torch.arange(token_ids.shape[0], device=token_ids.device)[:, None]
        return DraftTree(
            token_ids=torch.where(kept, token_ids[requests, depths - 1, candidates], 0),
            parents=torch.where(kept, self.parents[:, :most], NO_PARENT),
            num_nodes=num_nodes,
            draw=Draw.DETERMINISTIC,
        )


def ddtree(log_probs: Tensor, token_ids: Tensor, num_nodes: Tensor, max_depths: Tensor) -> DraftTree:
    """The deterministic trees with the largest ``sum_n q(n)`` of at most num_nodes [B] nodes no deeper than max_depths [B].

    log_probs [B, D, K] are the log-probabilities of each depth's K most probable tokens token_ids [B, D, K], in falling order; with
    K >= num_nodes (or the whole vocabulary) the trees are the best of all. Candidates of probability 0 are never taken. A tree's nodes come
    in falling order of probability, ties with the shallower first.

    Raises ValueError for shapes that do not fit and for log-probabilities that rise along K.
    """
    if token_ids.shape != log_probs.shape:
        raise ValueError(f"log_probs and token_ids must both be [B, D, K]; got {tuple(log_probs.shape)} and {tuple(token_ids.shape)}")
    nodes = best_nodes(log_probs, num_nodes, max_depths)
    return nodes.tree(token_ids, nodes.num_nodes)


def best_nodes(log_probs: Tensor, num_nodes: Tensor, max_depths: Tensor) -> BestNodes:
    """The num_nodes [B] most probable nodes no deeper than max_depths [B], over log_probs [B, D, K] in falling order along K.

    Depth by depth, for the whole batch at once: the i-th best node of a depth with its k-th candidate is beaten by ``i k - 1`` others, so
    that of the pairs with ``i k <= N`` alone, about N log N of them, the N best of the next depth come. O(D N log² N).

    Raises ValueError as ``ddtree`` does.
    """
    if log_probs.ndim != 3:
        raise ValueError(f"log_probs must be [B, D, K]; got {tuple(log_probs.shape)}")
    batch, depth, _ = log_probs.shape
    if num_nodes.shape != (batch,) or max_depths.shape != (batch,):
        raise ValueError(f"num_nodes and max_depths must be [B] = [{batch}]; got {tuple(num_nodes.shape)} and {tuple(max_depths.shape)}")
    if bool((log_probs.diff(dim=2) > 0).any()):
        raise ValueError("log_probs must fall along the candidates of a depth: pass what topk returns")
    most = int(num_nodes.max()) if batch else 0
    depth = min(depth, int(max_depths.max())) if batch else 0
    # Sums in float64: a child's score is then never rounded above its parent's.
    steps = log_probs[:, :depth, :most].double()
    scores, parents, candidates, depths = _levels(steps, most)
    scores = torch.where(depths[None] <= max_depths[:, None], scores, -torch.inf)
    # Stable: of equals the shallower stays first, so that parents precede their children.
    ranked, order = scores.sort(dim=1, descending=True, stable=True)
    places = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    ranked, order = ranked[:, :most], order[:, :most]
    above = parents.gather(1, order)
    return BestNodes(
        log_probs=ranked,
        depths=depths.expand_as(scores).gather(1, order),
        candidates=candidates.gather(1, order),
        parents=torch.where(above >= 0, places.gather(1, above.clamp_min(0)), NO_PARENT),
        num_nodes=torch.minimum((ranked > -torch.inf).sum(1), num_nodes),
    )


def throughput_sizes(nodes: BestNodes, growth: TreeGrowth, trust: float = 1.0) -> Tensor:
    """[B] nodes of each request's tree for the most expected tokens a second of the whole round (CaDDTree, BASTION; here over the batch).

    With the n most probable nodes of all requests the round brings ``requests + trust * sum q`` tokens in ``growth.round_s[n]``: one sort,
    and the best n. Prefixes of a request's nodes are trees, and the n best of all are prefixes of each. trust says how many tokens come
    of each that q promises.
    """
    gains = torch.where(nodes.valid(), nodes.log_probs, -torch.inf).exp()
    allowed = torch.arange(gains.shape[1], device=gains.device) < growth.max_nodes
    ranked, order = (gains * allowed).flatten().sort(descending=True, stable=True)
    possible = min(int((ranked > 0).sum()), growth.round_s.numel() - 1)
    tokens = growth.num_requests + trust * torch.nn.functional.pad(ranked[:possible].cumsum(0), (1, 0))
    best = int((tokens / growth.round_s[: possible + 1].to(tokens.device)).argmax())
    return torch.bincount(order[:best] // gains.shape[1], minlength=gains.shape[0]) if gains.shape[1] else nodes.num_nodes


def _levels(steps: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every depth the ``most`` best nodes, one depth after the other, for steps [B, D, K].

    Scores, parents (places in this list, NO_PARENT at depth 1), candidates, each [B, D N], and depths [D N].
    """
    batch, depth, width = steps.shape
    device = steps.device
    scores = [steps[:, 0]] if depth else [steps.new_empty(batch, 0)]
    parents = [torch.full((batch, width), NO_PARENT, device=device)] if depth else [torch.empty(batch, 0, dtype=torch.int64, device=device)]
    candidates = [torch.arange(width, device=device).expand(batch, -1)] if depth else [parents[0]]
    sizes = [scores[0].shape[1]]
    for level in range(1, depth):
        held = scores[-1]
        ranks = torch.cartesian_prod(torch.arange(held.shape[1], device=device), torch.arange(width, device=device))
        ranks = ranks[(ranks + 1).prod(1) <= most]  # [M, 2] parent and candidate, ranked
        sums = held[:, ranks[:, 0]] + steps[:, level, ranks[:, 1]]
        best, order = sums.sort(dim=1, descending=True, stable=True)
        order = order[:, :most]
        scores.append(best[:, :most])
        parents.append(ranks[:, 0][order] + sum(sizes[:-1]))
        candidates.append(ranks[:, 1][order])
        sizes.append(scores[-1].shape[1])
    depths = torch.cat([torch.full((size,), level + 1, device=device) for level, size in enumerate(sizes)])
    return torch.cat(scores, dim=1), torch.cat(parents, dim=1), torch.cat(candidates, dim=1), depths
