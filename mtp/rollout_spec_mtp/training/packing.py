"""Sequences side by side in rows, and a readable account of what is supervised.

Shape legend: P packed rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rollout_spec_mtp.training.protocol import PADDING, PackedBatch, SlotLayout
from rollout_spec_mtp.training.shards import Rollout


def pack(rows: Sequence[Sequence[Rollout]], device: torch.device | None = None) -> PackedBatch:
    """Rows of whole sequences, padded to the longest row."""
    length = max(sum(rollout.token_ids.numel() for rollout in row) for row in rows)
    shape = (len(rows), length)
    token_ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    sequence_ids, is_response = torch.full(shape, PADDING), torch.zeros(shape, dtype=torch.bool)
    lse, entropies = torch.zeros(shape), torch.zeros(shape)
    first = rows[0][0]
    hidden = {layer: states.new_zeros(*shape, states.shape[1]) for layer, states in first.hidden.items()}
    for number, row in enumerate(rows):
        begin = 0
        for sequence, rollout in enumerate(row):
            end = begin + rollout.token_ids.numel()
            token_ids[number, begin:end] = rollout.token_ids
            positions[number, begin:end] = torch.arange(end - begin)
            sequence_ids[number, begin:end] = sequence
            is_response[number, begin + rollout.num_prompt_tokens : end] = True
            for layer, states in rollout.hidden.items():
                hidden[layer][number, begin : end - 1] = states
            lse[number, begin : end - 1] = rollout.target_lse
            entropies[number, begin : end - 1] = rollout.target_entropies
            begin = end
    return PackedBatch(
        token_ids=token_ids.to(device),
        positions=positions.to(device),
        sequence_ids=sequence_ids.to(device),
        is_response=is_response.to(device),
        hidden={layer: states.to(device) for layer, states in hidden.items()},
        target_lse=lse.to(device),
        target_entropies=entropies.to(device),
    )


def supervision_lines(batch: PackedBatch, layout: SlotLayout, decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """One line a token of the batch's first row: where it is, and which slots (as depth<-anchor) it supervises."""
    length = batch.token_ids.shape[1]
    by_token: dict[int, list[str]] = {}
    for anchor, rows, valid in zip(layout.anchors.tolist(), layout.token_rows.tolist(), layout.valid.tolist(), strict=True):
        for depth, (row, is_valid) in enumerate(zip(rows, valid, strict=True), start=1):
            if is_valid:
                by_token.setdefault(row, []).append(f"{depth}<-{anchor % length}")
    columns: list[Tensor] = [batch.sequence_ids[0], batch.positions[0], batch.token_ids[0], batch.is_response[0]]
    for place, (sequence, position, token, response) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if sequence == PADDING:
            return
        part = "response" if response else "prompt"
        slots = " ".join(by_token.get(place, [])) or "-"
        yield f"{place:5d}  seq {sequence:3d}  pos {position:5d}  {part:8s}  {decode([token])!r:16s}  {slots}"
