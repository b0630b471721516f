"""Budgets: how many nodes a drafter may propose for each request, and the protocol of what decides it.

A decision may depend on distributions and on history, never on the draft tokens that were sampled: trimming by a sampled
token biases every rejection scheme (docs/exactness.md has the counter-example).

Shape legend: B requests, D depths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rollout_spec.cost import RoundCosts
from rollout_spec.rounds_seen import Forecast


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Why a budget is what it is. NaN and empty: the controller does not predict."""

    reason: str = "fixed"  # fixed | table | best | off | probe | reference | explore | threshold: see docs/budget.md
    accept_by_depth: tuple[float, ...] = ()  # expected acceptance at each depth that somebody drafts, mean over those that do
    num_accepted: float = math.nan  # expected, all requests together
    round_s: float = math.nan  # expected
    gain: float = math.nan  # expected tokens a second over those without a draft, minus 1
    holds: bool = False  # it may stand for some rounds of the same requests; probes and the like are for one


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeGrowth:
    """How a drafter that knows its trees' scores may size them itself: by expected tokens a second, jointly over the batch."""

    num_requests: int  # of the round, whether they draft or not: each emits a token besides
    round_s: Tensor  # [R + 1] float64: seconds of the round with 0 .. R draft nodes in all trees together, drafting included
    max_nodes: int  # of one request


@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """Limits of one round's draft trees."""

    draft_lengths: Tensor  # [B] int64: deepest node allowed; 0 = do not draft
    tree_width: tuple[int, ...] = (1,)  # children of each node by depth; the last entry holds for all deeper ones
    growth: TreeGrowth | None = None  # for drafters of best-first trees; others follow lengths and widths alone
    decision: Decision = field(default_factory=Decision)

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
    request_ids: tuple[str, ...]
    forecast: Forecast
    costs: RoundCosts
    num_rounds: int = 1  # since the latest decision, which stood for all of them


class BudgetController(Protocol):
    """Pure decision: the same signals and state give the same budget. The state before the first decision is None."""

    @property
    def name(self) -> str: ...

    def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]: ...


@dataclass(frozen=True, kw_only=True)
class FixedBudget:
    """The same draft length and width every round, cut to what a request may still emit. A length of 0 is no speculation."""

    draft_length: int
    tree_width: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if self.draft_length < 0:
            raise ValueError(f"draft_length must be 0 or more, got {self.draft_length}")
        check_widths(self.tree_width)

    @property
    def name(self) -> str:
        return f"fixed:{self.draft_length}" if self.draft_length else "off"

    def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]:
        lengths = useful_lengths(signals, self.draft_length)
        return Budget(draft_lengths=lengths, tree_width=self.tree_width, decision=Decision(holds=True)), state


def useful_lengths(signals: BudgetSignals, draft_length: int) -> Tensor:
    """[B]: a round emits one token more than it accepts, so drafting up to remaining - 1 is enough."""
    return torch.clamp(signals.remaining - 1, min=0, max=draft_length)


def check_widths(tree_width: tuple[int, ...]) -> None:
    if not tree_width or min(tree_width) < 1:
        raise ValueError(f"tree_width needs one or more positive widths, got {tree_width}")
