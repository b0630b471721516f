"""What the trainer and a kind of drafter know of each other.

A kind decides which slots a packed batch holds (``layout``, cheap, before any forward: gradient accumulation needs the counts of
all micro-batches first) and computes their hidden states (``forward``); the trainer owns data, loss, optimiser and checkpoints.

Shape legend: P packed rows, L tokens of a row, H hidden size, T anchors, G slots of an anchor, V vocabulary, Vd draft vocabulary.
Flat row ``p * L + l`` names token l of packed row p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rollout_spec.drafter import Drafter
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.runner import CausalLM
from rollout_spec.tree import Draw

PADDING = -1  # sequence id of a padded token


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """Whole sequences side by side in rows. Sequences of a row must not see each other; ``sequence_ids`` tells them apart.

    The state of a token is the target's after reading it: its head output is the law of the next token. The last token of a
    sequence has no state (zeros), and its ``target_lse`` means nothing.
    """

    token_ids: Tensor  # [P, L] int64
    positions: Tensor  # [P, L] int64 within the sequence; 0 at padding
    sequence_ids: Tensor  # [P, L] int64, counted from 0 in each row; PADDING
    is_response: Tensor  # [P, L] bool: the token was sampled by the policy (not of the prompt, not padding)
    hidden: Mapping[int, Tensor]  # layer -> [P, L, H]; layers as in DrafterNeeds.hidden_layers, -1 is always there
    target_lse: Tensor  # [P, L] float32 logsumexp of the target's logits over the temperature, at positions whose next token is_response
    target_entropies: Tensor  # [P, L] float32 nats of the same law


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotLayout:
    """The slots of a batch. Entries at invalid slots must be in range but mean nothing."""

    anchors: Tensor  # [T] int64 flat row each draft starts from, in the kind's own meaning
    token_rows: Tensor  # [T, G] int64 flat row of the token each slot predicts
    target_rows: Tensor  # [T, G] int64 flat row of the state whose head output is that slot's target law (token_rows - 1)
    valid: Tensor  # [T, G] bool

    def first(self, num_slots: int) -> SlotLayout:
        """The same drafts, shorter."""
        return SlotLayout(
            anchors=self.anchors,
            token_rows=self.token_rows[:, :num_slots],
            target_rows=self.target_rows[:, :num_slots],
            valid=self.valid[:, :num_slots],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyParts:
    """What a drafter borrows from the policy: shared storage, no gradient, never saved with the drafter."""

    module: CausalLM  # the transformers causal LM, for its layer class, rotary embedding and config
    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]
    final_norm: Tensor  # [H]

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.head.shape[1]

    def borrowed(self, draft_token_ids: Tensor | None) -> dict[str, Tensor]:
        """What a drafter with this vocabulary reads of the policy's weights."""
        return {"embedding": self.embedding, "head": self.head if draft_token_ids is None else self.head[draft_token_ids]}

    def kept(self) -> PolicyParts:
        """The same with embedding, head and norm as they are now, whatever becomes of the policy's weights."""
        head = self.head.clone()
        tied = self.embedding.data_ptr() == self.head.data_ptr()
        return PolicyParts(
            module=self.module, embedding=head if tied else self.embedding.clone(), head=head, final_norm=self.final_norm.clone()
        )

    @staticmethod
    def of(module: CausalLM) -> PolicyParts:
        """Parts of a transformers causal LM; they follow the policy's weights, which are updated in place."""
        head = module.get_output_embeddings()
        if head.bias is not None:
            raise ValueError("drafters borrow the policy's output head, and one with a bias is not supported")
        return PolicyParts(
            module=module,
            embedding=module.get_input_embeddings().weight.detach(),
            head=head.weight.detach(),
            final_norm=module.model.norm.weight.detach(),
        )


class TrainableDrafter(Protocol):
    """An nn.Module over float32 parameters of the drafter alone: ``parameters()`` must not hold a tensor of the policy."""

    kind: str
    num_slots: int  # G
    sequential: bool  # slots come one after the other: the first ones of a layout can be had without the later ones
    hidden_layers: tuple[int, ...]  # the target layers whose states it reads
    draft_token_ids: Tensor | None  # [Vd] int64 target id of every draft column; None: the whole vocabulary

    def layout(self, batch: PackedBatch, seed: int) -> SlotLayout:
        """The batch's slots; random choices (anchors) are functions of ``seed`` alone."""

    def __call__(self, batch: PackedBatch, layout: SlotLayout) -> Tensor:
        """[T, G, H] states that the (reduced) head is applied to, teacher-forced on the batch's own tokens."""

    def config_mapping(self) -> dict[str, object]:
        """What ``DrafterKind.build`` needs to make the same module again; plain JSON values."""


class MakeTrainable(Protocol):
    def __call__(self, config: Mapping[str, object], policy: PolicyParts, draft_token_ids: Tensor | None) -> TrainableDrafter:
        """A fresh module (weights drawn from torch's global generator). ValueError for unknown keys and wrong values."""


class MakeDrafter(Protocol):
    def __call__(self, model: Any, policy: PolicyParts, ops: Ops, draw: Draw | None) -> Drafter:
        """The served form of a trained module (what ``MakeTrainable`` made); draw None = the kind's own choice."""


@dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """One row of the table in kinds.py: how a kind of drafter is built for training and served by the engine."""

    name: str  # as in config.json's "kind" and the training config's drafter.kind
    build: MakeTrainable
    serve: MakeDrafter
    # Optional: reads a published layout (not our config.json). True if the directory is one of this kind's.
    recognises: Callable[[Path], bool] | None = None
    # Optional: writes a trained module as other engines read it. Arguments: module, the policy's checkpoint directory, a new directory.
    export: Callable[[Any, Path, Path], None] | None = None
    load_foreign: Callable[[Path, PolicyParts], Any] | None = None
