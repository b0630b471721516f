"""Nodes of one request's draft tree while a drafter builds it, and their packing into a DraftTree.

Shape legend: B requests, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rollout_spec.tree import NO_PARENT, DraftTree, Draw


@dataclass(kw_only=True)
class Nodes:
    """Parallel lists in topological order. Chosen from the context alone, so they pack into a deterministic tree."""

    token_ids: list[int] = field(default_factory=list)  # [N]
    parents: list[int] = field(default_factory=list)  # [N], NO_PARENT below the root

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, token_id: int, parent: int) -> int:
        """Append a node and return its index."""
        self.token_ids.append(token_id)
        self.parents.append(parent)
        return len(self.token_ids) - 1

    @staticmethod
    def chain(token_ids: list[int]) -> Nodes:
        return Nodes(token_ids=token_ids, parents=list(range(NO_PARENT, len(token_ids) - 1)))


def pack(requests: Sequence[Nodes], device: torch.device) -> DraftTree:
    """The deterministic DraftTree [B, N] of B requests' nodes; padding is token 0 below the root."""
    num_nodes = [len(nodes) for nodes in requests]
    width = max(num_nodes, default=0)
    token_ids = [nodes.token_ids + [0] * (width - len(nodes)) for nodes in requests]
    parents = [nodes.parents + [NO_PARENT] * (width - len(nodes)) for nodes in requests]
    return DraftTree(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device).reshape(len(requests), width),
        parents=torch.tensor(parents, dtype=torch.int64, device=device).reshape(len(requests), width),
        num_nodes=torch.tensor(num_nodes, dtype=torch.int64, device=device),
        draw=Draw.DETERMINISTIC,
    )
