"""ModelRunner: rows in, hidden states and logits out. The engine does not know which model it drives.

Shape legend: R rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.plan import AttentionPlan

CausalLM: TypeAlias = Any  # a transformers model for causal LM: nn.Module types none of the attributes that we need


@dataclass(frozen=True, kw_only=True, eq=False)
class StepInput:
    token_ids: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    plan: AttentionPlan
    tap_layers: tuple[int, ...] = ()  # decoder layers whose output is wanted too; -1 = the final norm's output
    is_known: bool = False  # the rows are known tokens, no drafts: whatever state there is may move past them at once


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOutput:
    hidden: Tensor  # [R, H] after the final norm: what the head takes
    taps: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> [R, H]


class ModelRunner(Protocol):
    ops: Ops
    vocab_size: int
    max_position: int
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    def make_slots(self, num_slots: int, capacity: int) -> KVSlots: ...

    def forward(self, step: StepInput, kv: KVSlots) -> StepOutput:
        """Compute the rows, write their K/V into their slots, and return their states."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] of states [R, H]; the dtype is the model's."""

    def commit(self, kv: KVSlots, plan: AttentionPlan, paths: Tensor, moves: Tensor | None) -> None:
        """Keep what the last forward, of this plan, computed for the roots and the accepted nodes paths [B, D] (-1 = none); drop the rest.

        K/V of rows moves[b, i] (-1 = none) go to row i in every layer (rounds.kv_moves); None: all lie where they belong.
        """

    def named_weights(self) -> Mapping[str, Tensor]:
        """Every weight by its checkpoint name, tied ones once."""

    def tied_names(self) -> Mapping[str, str]:
        """Other names under which a checkpoint may bring a tied weight -> its name in named_weights."""

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Copy the tensors in (names checked by the caller) and refresh packed forms; returns how many."""
