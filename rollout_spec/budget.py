"""Budgets: how many nodes a drafter may propose for each request, and the protocol of what decides it.

A decision may depend on distributions and on history, never on the draft tokens that were sampled: trimming by a sampled
token biases every rejection scheme (docs/exactness.md has the counter-example).

Shape legend: B requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """Limits of one round's draft trees."""

    draft_lengths: Tensor  # [B] int64: deepest node allowed; 0 = do not draft
    tree_width: tuple[int, ...] = (1,)  # children of each node by depth; the last entry holds for all deeper ones

    def width_at(self, depth: int) -> int:
        """Children asked for at a node of this depth (the root has depth 0)."""
        return self.tree_width[min(depth, len(self.tree_width) - 1)]

    @property
    def max_depth(self) -> int:
        return int(self.draft_lengths.max()) if self.draft_lengths.numel() else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class BudgetSignals:
    """What a controller may look at: shapes, costs, distributions and history. No sampled draft token is in here."""

    remaining: Tensor  # [B] int64 tokens a request may still emit
    context_lengths: Tensor  # [B] int64
    entropies: Tensor  # [B] float64: target entropy at the last emitted position, NaN before the first
    request_ids: tuple[str, ...]


class BudgetController(Protocol):
    """Pure decision: the same signals and state give the same budget."""

    def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]: ...


@dataclass(frozen=True, kw_only=True)
class FixedBudget:
    """The same draft length and width every round, cut to what a request may still emit."""

    draft_length: int
    tree_width: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if self.draft_length < 0:
            raise ValueError(f"draft_length must be 0 or more, got {self.draft_length}")
        if not self.tree_width or min(self.tree_width) < 1:
            raise ValueError(f"tree_width needs one or more positive widths, got {self.tree_width}")

    def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]:
        # A round emits one token more than it accepts, so drafting up to remaining - 1 is enough.
        lengths = torch.clamp(signals.remaining - 1, min=0, max=self.draft_length)
        return Budget(draft_lengths=lengths, tree_width=self.tree_width), state
