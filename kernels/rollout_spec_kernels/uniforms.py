"""Uniforms: a round's noise as tables, for verifiers that index it themselves and noise that they cannot draw from keys.

Shape legend: B requests, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.tree import DraftTree
from rollout_spec.verify import RATIO_SCHEMES, Scheme, VerifyNoise


@dataclass(frozen=True, kw_only=True, eq=False)
class Uniforms:
    """Every uniform that verification of a batch may ask for; the others are 0."""

    accept: Tensor  # [B, N + 1] float64, of a node, or of a trial under traversal
    recover: Tensor  # [B, N + 1] float64, by depth

    @staticmethod
    def of(tree: DraftTree, noise: VerifyNoise, scheme: Scheme) -> Uniforms | None:
        """None where parents make no tree, so that nodes have no depth."""
        valid = tree.valid()
        if bool((valid & (tree.parents >= torch.arange(tree.max_nodes, device=tree.device))).any()):
            return None
        depths = tree.depths()
        deepest = depths.amax(1) if tree.max_nodes else tree.num_nodes
        recover = torch.zeros(tree.batch_size, tree.max_nodes + 1, dtype=torch.float64, device=tree.device)
        requests, at = (torch.arange(tree.max_nodes + 1, device=tree.device) <= deepest[:, None]).nonzero(as_tuple=True)
        recover[requests, at] = noise.recover(requests, at)
        accept = torch.zeros_like(recover)
        if scheme is Scheme.TRAVERSAL:
            for trial in range(tree.max_nodes + 1):  # every node is tested at most once, then the root
                tested = (tree.num_nodes >= trial).nonzero()[:, 0]
                accept[tested, trial] = noise.accept(tested, torch.zeros_like(tested), trial)
        elif scheme in RATIO_SCHEMES:
            ranks = _sibling_ranks(tree, valid)
            for rank in range(int(ranks.max()) + 1):
                requests, nodes = (valid & (ranks == rank)).nonzero(as_tuple=True)
                accept[requests, nodes] = noise.accept(requests, depths[requests, nodes] - 1, rank)
        return Uniforms(accept=accept, recover=recover)


def _sibling_ranks(tree: DraftTree, valid: Tensor) -> Tensor:
    """[B, N] how many siblings come before each node."""
    order = torch.arange(tree.max_nodes, device=tree.device)
    earlier = (tree.parents[:, :, None] == tree.parents[:, None, :]) & valid[:, None, :] & (order < order[:, None])
    return earlier.sum(2)
