"""Which slots a packed batch trains: random anchors of every sequence and the tokens that follow them.

Shape legend: P packed rows, L tokens of a row, F = P L flat rows, T anchors, G slots of an anchor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_spec_mtp.training.protocol import PADDING, PackedBatch, SlotLayout


def block_layout(batch: PackedBatch, num_slots: int, num_anchors: int, seed: int) -> SlotLayout:
    """Up to num_anchors random anchors of each sequence, in flat order, and num_slots slots of each.

    An anchor is the last committed token of a round: any token whose next one was sampled by the policy. Slot i of it predicts the token
    i + 1 places after it and is valid as long as all tokens up to that one belong to the sequence and were sampled by the policy.
    The choice is a function of the batch's shape and the seed alone.
    """
    followed = _followed(batch, num_slots)  # [F, G]
    anchors = _choose(batch, followed[:, 0], num_anchors, seed)
    num_flat = batch.token_ids.numel()
    token_rows = anchors[:, None] + torch.arange(1, num_slots + 1, device=anchors.device)
    token_rows = token_rows.clamp(max=num_flat - 1)
    return SlotLayout(anchors=anchors, token_rows=token_rows, target_rows=token_rows - 1, valid=followed[anchors])


def _followed(batch: PackedBatch, num_slots: int) -> Tensor:
    """[F, G] bool: all of the next 1 .. i + 1 tokens are of the same sequence and sampled by the policy."""
    ids, sampled = batch.sequence_ids, batch.is_response
    steps = []
    for step in range(1, num_slots + 1):
        ok = torch.zeros_like(sampled)
        if step < ids.shape[1]:
            ok[:, :-step] = (ids[:, step:] == ids[:, :-step]) & (ids[:, :-step] != PADDING) & sampled[:, step:]
        steps.append(ok.flatten())
    return torch.stack(steps, dim=1).cumprod(dim=1).bool()


def _choose(batch: PackedBatch, eligible: Tensor, num_anchors: int, seed: int) -> Tensor:
    """[T] flat rows: num_anchors (or all) of each sequence's eligible [F] ones, uniformly without replacement, in rising order."""
    num_rows, length = batch.token_ids.shape
    draws = torch.rand(num_rows * length, generator=torch.Generator().manual_seed(seed)).to(eligible.device)
    rows = torch.arange(num_rows, device=eligible.device)[:, None]
    sequence = (rows * (length + 1) + batch.sequence_ids).flatten()  # ids are below length: no two rows share a value
    candidates = eligible.nonzero()[:, 0]
    by_draw = candidates[draws[candidates].argsort()]
    grouped = by_draw[sequence[by_draw].argsort(stable=True)]
    _, counts = torch.unique_consecutive(sequence[grouped], return_counts=True)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    rank = torch.arange(grouped.numel(), device=grouped.device) - first
    return grouped[rank < num_anchors].sort().values
