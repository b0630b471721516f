"""DDTree: the best tree of a node budget when a drafter's distributions at different depths do not depend on each other.

A block drafter gives one marginal ``q_d`` for each depth, so a node is a list of tokens, one a depth, and its probability is
``q(node) = prod_d q_d(token_d)``.
Exact match walks such a tree ``sum_{n in T} p(path of n)`` tokens far; with q for p the best tree of N nodes is the N most probable nodes,
which always form a tree because a child is never more probable than its parent.

Shape legend: B requests, D depths, K candidates of a depth.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from torch import Tensor

from rollout_spec.drafters.nodes import Nodes, pack
from rollout_spec.tree import NO_PARENT, DraftTree


def ddtree(log_probs: Tensor, token_ids: Tensor, num_nodes: Tensor, max_depths: Tensor) -> DraftTree:
    """The deterministic trees with the largest ``sum_n q(n)`` of at most num_nodes [B] nodes no deeper than max_depths [B].

    log_probs [B, D, K] are the log-probabilities of each depth's K most probable tokens token_ids [B, D, K], in falling order; with
    K >= num_nodes (or the whole vocabulary) the trees are the best of all. Candidates of probability 0 are never taken. A tree's nodes come
    in falling order of probability, ties in the order in which they were found. O(N log N) a request.

    Raises ValueError for shapes that do not fit and for log-probabilities that rise along K.
    """
    if log_probs.ndim != 3 or token_ids.shape != log_probs.shape:
        raise ValueError(f"log_probs and token_ids must both be [B, D, K]; got {tuple(log_probs.shape)} and {tuple(token_ids.shape)}")
    batch = log_probs.shape[0]
    if num_nodes.shape != (batch,) or max_depths.shape != (batch,):
        raise ValueError(f"num_nodes and max_depths must be [B] = [{batch}]; got {tuple(num_nodes.shape)} and {tuple(max_depths.shape)}")
    if bool((log_probs.diff(dim=2) > 0).any()):
        raise ValueError("log_probs must fall along the candidates of a depth: pass what topk returns")
    # Sums run over Python floats (float64): a child's score is then never rounded above its parent's.
    rows = zip(log_probs.double().tolist(), token_ids.tolist(), num_nodes.tolist(), max_depths.tolist(), strict=True)
    return pack([_best_nodes(*row) for row in rows], log_probs.device)


def _best_nodes(log_probs: Sequence[Sequence[float]], token_ids: Sequence[Sequence[int]], num_nodes: int, max_depth: int) -> Nodes:
    """The num_nodes most probable nodes over log_probs and token_ids [D, K].

    The heap holds every node whose elder sibling (or, for a first child, whose parent) was taken: the most probable node not yet taken
    is always among them. Entries are (-log q, order of discovery, depth index, candidate, parent node).
    """
    nodes = Nodes()
    heap: list[tuple[float, int, int, int, int]] = []
    found = 0

    def push(depth: int, candidate: int, parent: int, parent_score: float) -> None:
        nonlocal found
        if depth < min(max_depth, len(log_probs)) and candidate < len(log_probs[depth]) and log_probs[depth][candidate] > -math.inf:
            heapq.heappush(heap, (-(parent_score + log_probs[depth][candidate]), found, depth, candidate, parent))
            found += 1

    scores: list[float] = []
    push(0, 0, NO_PARENT, 0.0)
    while heap and len(nodes) < num_nodes:
        cost, _, depth, candidate, parent = heapq.heappop(heap)
        node = nodes.add(token_ids[depth][candidate], parent)
        scores.append(-cost)
        push(depth, candidate + 1, parent, scores[parent] if parent != NO_PARENT else 0.0)
        push(depth + 1, 0, node, -cost)
    return nodes
