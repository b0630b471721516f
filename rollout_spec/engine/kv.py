"""KV slots: one preallocated row of K/V for each running request, and which prompt prefixes the slots still hold.

Shape legend: S slots, L layers, Hkv key/value heads, C capacity of a slot in tokens, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(kw_only=True)
class Slot:
    """What one row of the cache holds: the K/V of ``tokens``, in order from index 0."""

    index: int
    tokens: list[int] = field(default_factory=list)
    taps: dict[int, Tensor] = field(default_factory=dict)  # layer -> [prompt tokens, H], when a drafter needs them
    last_used: int = 0
    busy: bool = False


class KVSlots:
    """Preallocated K and V of every layer, [L, S, Hkv, C, d] each."""

    def __init__(
        self, *, num_layers: int, num_slots: int, num_kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, capacity, head_dim)
        # Zeros, not empty: a masked row times an uninitialised NaN is NaN. The pages are only touched when written.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.slots = [Slot(index=i) for i in range(num_slots)]
        self._clock = 0

    def acquire(self, prefer: Slot | None = None) -> Slot | None:
        """A free slot (``prefer`` if it is free, else the one unused for longest), or None."""
        free = [slot for slot in self.slots if not slot.busy]
        if not free:
            return None
        chosen = prefer if prefer is not None and not prefer.busy else min(free, key=lambda slot: (slot.last_used, slot.index))
        chosen.busy = True
        return chosen

    def release(self, slot: Slot) -> None:
        """Free the slot; what it holds stays usable as a prefix until it is taken again."""
        self._clock += 1
        slot.last_used = self._clock
        slot.busy = False

    def longest_prefix(self, tokens: Sequence[int]) -> tuple[Slot | None, int]:
        """The slot that holds the longest prefix of tokens, and its length."""
        wanted = np.asarray(tokens)
        best: tuple[Slot | None, int] = (None, 0)
        for slot in self.slots:
            length = self.usable_prefix(wanted, slot)
            if length > best[1]:
                best = (slot, length)
        return best

    def usable_prefix(self, wanted: np.ndarray, slot: Slot) -> int:
        """How many leading tokens of wanted can be had from the slot."""
        return common_prefix(wanted, slot.tokens)

    def prefix_to_come(self, wanted: np.ndarray, tokens: Sequence[int]) -> int:
        """How many could be had from a slot that is being filled with these tokens."""
        return common_prefix(wanted, tokens)

    def copy_prefix(self, source: Slot, target: Slot, length: int) -> None:
        """Make target hold the first length tokens that source holds."""
        if source is not target:
            self.k[:, target.index, :, :length] = self.k[:, source.index, :, :length]
            self.v[:, target.index, :, :length] = self.v[:, source.index, :, :length]
        target.tokens = source.tokens[:length]
        target.taps = {layer: states[:length] for layer, states in source.taps.items()}

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [S, Hkv, C, d] of a decoder layer."""
        return self.k[layer], self.v[layer]

    def pretend(self, length: int) -> None:
        """Let whatever lies in every slot pass for so many tokens, where only the time of a forward matters."""

    def forget(self) -> None:
        """Drop every slot's contents: the weights changed."""
        for slot in self.slots:
            slot.tokens = []
            slot.taps = {}


def common_prefix(wanted: np.ndarray, held: Sequence[int]) -> int:
    """Number of leading tokens that the two have in common."""
    length = min(len(wanted), len(held))
    if length == 0 or wanted[0] != held[0]:
        return 0
    different = np.nonzero(wanted[:length] != np.asarray(held[:length]))[0]
    return int(different[0]) if different.size else length
