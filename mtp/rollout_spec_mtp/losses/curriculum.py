"""Domino's curriculum: train the uncorrected logits first, hand over to the corrected ones."""

from __future__ import annotations

from torch import Tensor


def base_weight(step: int, num_steps: int) -> float:
    """lambda of Domino's curriculum at a step: linear from 1 at step 0 to 0 at num_steps and after.

    Raises ValueError unless num_steps > 0 and step >= 0.
    """
    if num_steps <= 0 or step < 0:
        raise ValueError(f"a curriculum needs num_steps > 0 and step >= 0, got {num_steps} and {step}")
    return max(0.0, 1.0 - step / num_steps)


def domino_loss(final_loss: Tensor, base_loss: Tensor, weight: float) -> Tensor:
    """(1 - weight) * final + weight * base (ALGORITHMS: Domino); final is the loss of the corrected logits, base of the
    uncorrected ones, weight in [0, 1]."""
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"the base loss's weight must lie in [0, 1], got {weight}")
    return (1.0 - weight) * final_loss + weight * base_loss
