"""Traversal verification: from the leaves towards the root of a tree drawn without replacement.

Shape legend: B requests, N nodes, D depth of the deepest node, W most siblings, R rows, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_spec.tree import NO_NODE, NO_PARENT, DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify.categorical import inverse_cdf, row_slices, take_rows
from rollout_spec.verify.randomness import VerifyNoise
from rollout_spec.verify.ratio import DraftRows, normalised, residual, stop_mass
from rollout_spec.verify.target import TargetRows
from rollout_spec.verify.trace import Trace


def traversal(tree: DraftTree, target: TargetRows, noise: VerifyNoise) -> Verdict:
    """Traversal verification (arXiv 2505.12398, algorithm 1).

    a(root) = 1, a(child) = min(1, a(parent) p(x) / q(x)). Descend to the first-drawn leaf; with probability a(leaf) accept its whole
    path and emit from p there. Otherwise remove it: at its parent, with r = (a p - q)+ and Z = sum r, p becomes r / Z, q loses the
    child and is renormalised, a becomes Z / (Z + 1 - a); then descend again. The root is reached with a = 1, so the walk ends. A node
    with a = 0 cannot be accepted, nor anything below it, and is tested without descending further.

    The k-th leaf tested takes acceptance uniform (depth 0, trial k). Rows are asked for as paths are entered.
    """
    walk = _Walk(tree, target, DraftRows(tree, target.vocab_size))
    requests = torch.arange(tree.batch_size, device=tree.device)
    trial = 0
    while requests.numel():
        walk.descend(requests)
        passed = noise.accept(requests, torch.zeros_like(requests), trial) < walk.mass[requests, walk.depth[requests]]
        requests = requests[~passed]
        if requests.numel():
            walk.retreat(requests)
        trial += 1
    return walk.finish(noise)


class _Walk:
    """Where each request's walk stands: the current path, and and p, q and a at its nodes, by depth (0 = root)."""

    def __init__(self, tree: DraftTree, target: TargetRows, draft: DraftRows) -> None:
        self.trace = Trace(tree)
        self.tree, self.target, self.draft, self.children = tree, target, draft, tree.children()
        batch, max_depth = self.trace.path.shape
        self.depth = torch.zeros(batch, dtype=torch.int64, device=tree.device)
        self.nodes = torch.full((batch, max_depth + 1), NO_PARENT, dtype=torch.int64, device=tree.device)
        self.removed = torch.zeros_like(self.nodes)  # [B, D + 1] children refused so far
        self.mass = torch.ones(batch, max_depth + 1, dtype=torch.float64, device=tree.device)  # a
        self.draft_left = torch.ones_like(self.mass)  # what the children not yet refused were drawn from holds of q
        self.probs: Tensor | None = None  # [B, D, V] p of nodes that lost a child; until then it is the target's own row

    def descend(self, requests: Tensor) -> None:
        """Follow the first child that was not removed, down to a leaf (or to a = 0), computing a on the way."""
        while requests.numel():
            at = self.depth[requests]
            children = self._children(requests, at)
            child = torch.where(self.mass[requests, at] > 0, children.gather(1, self.removed[requests, at, None])[:, 0], NO_NODE)
            requests, at, child = requests[child != NO_NODE], at[child != NO_NODE], child[child != NO_NODE]
            if not requests.numel():
                return
            drafted_target_probs = self._token_probs(requests, at, self.tree.token_ids[requests, child])
            drafted_probs = self.draft.token_probs(requests, child).double() / self.draft_left[requests, at]
            self.mass[requests, at + 1] = (self.mass[requests, at] * drafted_target_probs / drafted_probs).clamp_max(1.0)
            self.nodes[requests, at + 1] = child
            self.removed[requests, at + 1] = 0
            self.draft_left[requests, at + 1] = 1.0
            self.depth[requests] = at + 1

    def retreat(self, requests: Tensor) -> None:
        """Remove the node each walk stands at and go back to its parent."""
        at = self.depth[requests] - 1
        siblings, rank, scale = self._children(requests, at), self.removed[requests, at], self.mass[requests, at]
        fresh = rank == 0
        log_probs = self.target.log_probs(requests[fresh], self.nodes[requests, at][fresh])
        row_of = fresh.long().cumsum(0) - 1  # row of log_probs, for fresh requests
        columns = self.draft.columns(requests, self.nodes[requests, at + 1])
        for part in row_slices(requests, self.target.vocab_size):
            asked, depths = requests[part], at[part]
            target_probs = self._rows(asked, depths, fresh[part], log_probs, row_of[part])
            draft_probs = self.draft.remaining(asked, siblings[part], rank[part])
            left = residual(target_probs * scale[part, None].to(target_probs.dtype), draft_probs, self.draft.token_ids)
            residual_mass = left.sum(-1)
            self._store(asked, depths, normalised(left, residual_mass, target_probs))
            self.mass[asked, depths] = stop_mass(residual_mass.double(), scale[part])
            self.draft_left[asked, depths] *= draft_probs.scatter(1, columns[part, None], 0.0).sum(-1).double()
        self.removed[requests, at] = rank + 1
        self.depth[requests] = at

    def finish(self, noise: VerifyNoise) -> Verdict:
        """Emit one token from p of the node where each walk ended."""
        trace, steps = self.trace, torch.arange(self.trace.path.shape[1], device=self.tree.device)
        every = torch.arange(self.tree.batch_size, device=self.tree.device)
        nodes = self.nodes[every, self.depth]
        trace.num_accepted, trace.is_bonus = self.depth, self.children[every, nodes + 1, 0] == NO_NODE
        trace.path = torch.where(steps < self.depth[:, None], self.nodes[:, 1:], NO_NODE)
        trace.accept_probs[steps < self.depth[:, None]] = 1.0
        trace.accept_probs[(steps == self.depth[:, None]) & ~trace.is_bonus[:, None]] = 0.0
        # An inner node is accepted only after all its children were refused: then its p is a residual that was stored.
        log_probs = self.target.log_probs(every[trace.is_bonus], nodes[trace.is_bonus])
        row_of = trace.is_bonus.long().cumsum(0) - 1
        uniforms = noise.recover(every, self.depth)
        tokens = [
            inverse_cdf(self._rows(every[part], self.depth[part], trace.is_bonus[part], log_probs, row_of[part]), uniforms[part])
            for part in row_slices(every, self.target.vocab_size)
        ]
        trace.next_token_ids = torch.cat(tokens)
        return trace.verdict()

    def _rows(self, requests: Tensor, at: Tensor, fresh: Tensor, log_probs: Tensor, row_of: Tensor) -> Tensor:
        """[R, V] p at depths [R]: the target's own, log_probs[row_of], where fresh [R], else the residual that was stored."""
        new = fresh.nonzero()[:, 0]
        if new.numel() == requests.numel():
            return self.draft.widen(take_rows(log_probs, row_of))
        assert self.probs is not None
        stored = take_rows(self.probs.flatten(0, 1), (requests * self.probs.shape[1] + at)[~fresh])
        if not new.numel():
            return stored
        rows = stored.new_empty(requests.numel(), stored.shape[1])
        rows[new], rows[~fresh] = self.draft.widen(take_rows(log_probs, row_of[new])), stored
        return rows

    def _store(self, requests: Tensor, at: Tensor, probs: Tensor) -> None:
        if self.probs is None:
            self.probs = probs.new_empty(*self.trace.path.shape, probs.shape[1])
        self.probs[requests, at] = probs

    def _token_probs(self, requests: Tensor, at: Tensor, token_ids: Tensor) -> Tensor:
        """[R] float64 p(token) at depths [R]."""
        probs = torch.empty(requests.shape, dtype=torch.float64, device=requests.device)
        fresh = self.removed[requests, at] == 0
        if bool(fresh.any()):
            entered = requests[fresh]
            log_probs = self.target.log_probs(entered, self.nodes[entered, at[fresh]])
            probs[fresh] = log_probs.gather(1, token_ids[fresh, None])[:, 0].double().exp()
        if not bool(fresh.all()):
            assert self.probs is not None
            probs[~fresh] = self.probs[requests[~fresh], at[~fresh], token_ids[~fresh]].double()
        return probs

    def _children(self, requests: Tensor, at: Tensor) -> Tensor:
        """[R, W + 1] children of the walks' nodes at depths [R], NO_NODE after the last."""
        children = self.children[requests, self.nodes[requests, at] + 1]
        return torch.nn.functional.pad(children, (0, 1), value=NO_NODE)
