"""RecurrentSlots: KV slots of a hybrid model, each with the state of its recurrent layers beside K and V.

K and V can be cut anywhere, a recurrent state cannot: it is that after one number of tokens. So a slot keeps two of them: the one after all
that is committed, and the one after the tokens that were known beforehand (a prompt), from which the other samples of the prompt start.

Shape legend: S slots, B requests of a forward, N rows of a request (padded), L recurrent layers, H value heads, dk key size, dv value size,
C channels of the short convolution, w its window, D depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout_spec.engine.gated_delta import GatedDelta, TreeStates, commit_history
from rollout_spec.engine.kv import KVSlots, Slot, common_prefix


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    num_heads: int  # H
    key_size: int  # dk
    value_size: int  # dv
    num_channels: int  # C
    window: int  # w


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """What one layer knows of the tokens before the rows."""

    state: Tensor  # [B, H, dk, dv] float32
    history: Tensor  # [B, C, w - 1] the convolution's last inputs, newest last


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRows:
    """What one layer computed for rows, from which the memory after any of them can be had."""

    before: Memory
    inputs: Tensor  # [B, N, C] of the convolution
    keys: Tensor  # [B, N, H, dk] float32
    states: TreeStates
    parents: Tensor  # [B, N] int64

    def after(self, leaves: Tensor, ops: GatedDelta) -> Memory:
        """The memory after rows leaves [B]; -1 = none of the request's rows counts."""
        rows, kept = leaves.clamp_min(0), leaves < 0
        state = ops.commit_state(self.keys, self.states, self.parents, rows, self.before.state)
        history = commit_history(self.inputs, self.before.history, self.parents, rows)
        return Memory(
            state=torch.where(kept[:, None, None, None], self.before.state, state),
            history=torch.where(kept[:, None, None], self.before.history, history),
        )


class _Bank:
    """One memory for each slot and layer, and after how many tokens of the slot it is."""

    def __init__(self, num_layers: int, num_slots: int, shape: RecurrentShape, dtype: torch.dtype, device: torch.device) -> None:
        self.state = torch.zeros(
            num_layers, num_slots, shape.num_heads, shape.key_size, shape.value_size, dtype=torch.float32, device=device
        )
        self.history = torch.zeros(num_layers, num_slots, shape.num_channels, shape.window - 1, dtype=dtype, device=device)
        self.lengths = [0] * num_slots

    def take(self, slot: int, source: _Bank, source_slot: int) -> None:
        self.state[:, slot], self.history[:, slot] = source.state[:, source_slot], source.history[:, source_slot]
        self.lengths[slot] = source.lengths[source_slot]


class RecurrentSlots(KVSlots):
    """Keys and values of the layers that attend, memories of those that recur."""

    def __init__(
        self,
        *,
        layer_types: Sequence[str],
        shape: RecurrentShape,
        num_slots: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        attending = [layer for layer, kind in enumerate(layer_types) if kind == "full_attention"]
        recurring = [layer for layer, kind in enumerate(layer_types) if kind != "full_attention"]
        super().__init__(
            num_layers=len(attending),
            num_slots=num_slots,
            num_kv_heads=num_kv_heads,
            capacity=capacity,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        self._kv_index: Mapping[int, int] = {layer: index for index, layer in enumerate(attending)}
        self._index: Mapping[int, int] = {layer: index for index, layer in enumerate(recurring)}
        self._present = _Bank(len(recurring), num_slots, shape, dtype, device)
        self._known = _Bank(len(recurring), num_slots, shape, dtype, device)
        self.rows: dict[int, LayerRows] = {}  # layer -> what the last forward over drafts computed

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return super().of_layer(self._kv_index[layer])

    def memory(self, layer: int, slots: Tensor, context_lengths: Tensor) -> Memory:
        """The memory of a recurrent layer after the contexts [B] of slots [B]; zeros where there is none."""
        lengths = context_lengths.tolist()
        held = [self._present.lengths[slot] for slot in slots.tolist()]
        assert all(length in (0, own) for length, own in zip(lengths, held, strict=True)), f"states after {held} tokens for {lengths}"
        index, begins = self._index[layer], (context_lengths == 0).to(self.k.device)
        return Memory(
            state=self._present.state[index][slots].masked_fill(begins[:, None, None, None], 0),
            history=self._present.history[index][slots].masked_fill(begins[:, None, None], 0),
        )

    def remember(self, layer: int, slots: Tensor, memory: Memory, *, known: bool) -> None:
        """Keep a layer's memory after new tokens of slots [B]: known beforehand, or sampled."""
        for bank in (self._present, self._known) if known else (self._present,):
            bank.state[self._index[layer], slots] = memory.state
            bank.history[self._index[layer], slots] = memory.history

    def advance(self, slots: Tensor, lengths: Tensor, *, known: bool) -> None:
        """Slots [B] hold the memories after lengths [B] tokens from now on."""
        for bank in (self._present, self._known) if known else (self._present,):
            for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
                bank.lengths[slot] = length

    def usable_prefix(self, wanted: np.ndarray, slot: Slot) -> int:
        common = common_prefix(wanted, slot.tokens)
        return max((bank.lengths[slot.index] for bank in (self._present, self._known) if bank.lengths[slot.index] <= common), default=0)

    def prefix_to_come(self, wanted: np.ndarray, tokens: Sequence[int]) -> int:
        return len(tokens) if common_prefix(wanted, tokens) == len(tokens) else 0

    def copy_prefix(self, source: Slot, target: Slot, length: int) -> None:
        bank = self._present if self._present.lengths[source.index] == length else self._known
        assert bank.lengths[source.index] == length
        super().copy_prefix(source, target, length)
        for own in (self._present, self._known):
            own.take(target.index, bank, source.index)

    def pretend(self, length: int) -> None:
        for bank in (self._present, self._known):
            bank.lengths = [length] * len(self.slots)
