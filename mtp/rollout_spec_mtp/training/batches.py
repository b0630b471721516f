"""Which sequences are trained on, in which order: a function of (seed, step) alone, so that a run resumes where it was.

Shape legend: P packed rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch

from rollout_spec_mtp.training.packing import pack
from rollout_spec_mtp.training.protocol import PackedBatch
from rollout_spec_mtp.training.shards import Rollout, RolloutSet, first_fit


def split_held_out(rollouts: RolloutSet, held_out: float) -> tuple[list[int], list[int]]:
    """Sequence numbers (training, held out). All samples of a prompt are on one side, by a hash of its id."""
    sides: tuple[list[int], list[int]] = ([], [])
    for number in range(len(rollouts)):
        prompt = rollouts.key(number).rpartition("/")[0]
        digest = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "little")
        sides[digest < held_out * 2**64].append(number)
    if not sides[0] or not sides[1]:
        raise ValueError(
            f"{len(sides[0])} sequences to train on and {len(sides[1])} held out: collect more prompts, or change evaluate.held_out"
        )
    return sides


class Sequences(Protocol):
    """Rollouts by number; lengths are known without reading them."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Rollout: ...

    def length(self, number: int) -> int: ...


class Batches:
    """Rows of packed sequences. Every epoch goes through all rows once, in an order of its own."""

    def __init__(self, rollouts: Sequences, numbers: Sequence[int], *, row_tokens: int, seed: int) -> None:
        self._rollouts, self._seed = rollouts, seed
        lengths = {number: rollouts.length(number) for number in numbers}
        order = [numbers[i] for i in torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed)).tolist()]
        self.rows = first_fit([lengths.get(number, 0) for number in range(len(rollouts))], order, row_tokens)

    def rows_of_step(self, step: int, rows_per_step: int) -> list[int]:
        """Row numbers of a step, across the border between two epochs if need be."""
        wanted = range(step * rows_per_step, (step + 1) * rows_per_step)
        return [self._epoch_order(place // len(self.rows))[place % len(self.rows)] for place in wanted]

    def num_steps(self, epochs: float, rows_per_step: int) -> int:
        return max(1, round(epochs * len(self.rows) / rows_per_step))

    def batch(self, rows: Sequence[int], device: torch.device) -> PackedBatch:
        return pack([[self._rollouts[number] for number in self.rows[row]] for row in rows], device)

    def _epoch_order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self._seed << 20) + epoch + 1)
        order: list[int] = torch.randperm(len(self.rows), generator=generator).tolist()
        return order
