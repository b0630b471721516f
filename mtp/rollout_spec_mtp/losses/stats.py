"""SlotStats: all that a loss needs to know about one draft slot, as scalars.

Anchor t is a position of a target rollout that a draft starts from; slot j of it is the j-th token after it. Both the target
and the drafter are conditioned on the rollout's own tokens before the slot, so slot tokens are draws of the target.

Shape legend: T anchors, G slots of an anchor (the draft length gamma).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor


class Extra(enum.Enum):
    """Statistics that cost another pass over the vocabulary and are computed only when asked for; values are field names."""

    KL = "kl"
    BLOCK_OVERLAP = "block_overlap"
    TARGET_ENTROPIES = "target_entropies"


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotStats:
    """Per-slot statistics of drafter law q against target law p, both after the temperature; y is the rollout's token.

    Invalid slots hold the neutral value of each statistic and pass no gradient. Gradients flow to the drafter through
    ``overlap``, ``draft_logprobs``, ``kl`` and ``block_overlap``; the target's side is constant.
    With a reduced draft vocabulary sums run over its tokens: target mass outside it never overlaps.
    """

    valid: Tensor  # [T, G] bool
    overlap: Tensor  # [T, G] alpha = sum_v min(p, q) = 1 - TV; invalid: 1
    draft_logprobs: Tensor  # [T, G] log q(y), -inf if y is not in the draft vocabulary; invalid: 0
    target_logprobs: Tensor  # [T, G] log p(y), no gradient; invalid: 0
    draft_correct: Tensor  # [T, G] bool: y is a most likely token of q; invalid: True
    # KL(p' || q) times the mass m of p inside the draft vocabulary, p' = p / m: the usual KL when the vocabulary is whole, and
    # 0 at the best any drafter over that vocabulary can do. invalid: 0
    kl: Tensor | None = None  # [T, G]
    # sum_v min(p, e^credit q) with the credit that block verification carries into the slot (density.py); invalid: 1
    block_overlap: Tensor | None = None  # [T, G]
    target_entropies: Tensor | None = None  # [T, G] nats of p over the whole vocabulary, no gradient; invalid: 0


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotCounts:
    """Denominators of the means in a loss. Counts of shards add up: sum them over processes and accumulation steps and give
    the total to every shard's loss, and the shards' losses and gradients add up to those of the whole batch."""

    anchors: Tensor  # [] anchors with at least one valid slot
    by_depth: Tensor  # [G] valid slots at each depth

    @staticmethod
    def of(valid: Tensor) -> SlotCounts:
        """Count valid [T, G]."""
        return SlotCounts(anchors=valid.any(dim=1).sum(), by_depth=valid.sum(dim=0))

    def __add__(self, other: SlotCounts) -> SlotCounts:
        return SlotCounts(anchors=self.anchors + other.anchors, by_depth=self.by_depth + other.by_depth)

    def to_tensor(self) -> Tensor:
        """[G + 1] int64: one tensor to all-reduce."""
        return torch.cat([self.anchors[None], self.by_depth])

    @staticmethod
    def from_tensor(counts: Tensor) -> SlotCounts:
        """The inverse of ``to_tensor``; counts [G + 1]."""
        return SlotCounts(anchors=counts[0], by_depth=counts[1:])
