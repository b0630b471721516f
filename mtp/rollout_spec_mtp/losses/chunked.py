"""Losses from hidden states: heads, softmaxes and their gradients in chunks, so that full logits never exist.

``chunked_loss`` finds value and gradient in one pass (three products with a head: drafter, target, drafter backward), which
is possible because anchors do not interact and the denominators depend on the mask alone. ``chunked_stats`` gives the
statistics themselves, differentiable by recomputing each chunk, for evaluation and for losses this package does not have.

The heads are the policy's, borrowed: they, and the target's hidden states, never get a gradient.

Shape legend: T anchors, G slots, R target rows, H hidden size, V vocabulary, Vd draft vocabulary, N rows of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_spec_mtp.losses.chunk import NO_COLUMN, ChunkForward, ChunkLayout, KnownNormaliser, SlotGrads, chunk_backward, chunk_forward
from rollout_spec_mtp.losses.compute import LossOutput, compute_loss
from rollout_spec_mtp.losses.config import LossConfig
from rollout_spec_mtp.losses.stats import Extra, SlotCounts, SlotStats

DEFAULT_CHUNK_BYTES = 1 << 30
# Tensors as large as a chunk's logits that are alive at once at the worst moment (KL, no shared target rows, backward).
LIVE_LOGITS = 8

_DIFFERENTIABLE = ("overlap", "draft_logprobs", "kl", "block_overlap")


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftBatch:
    """Hidden states to judge a drafter by. Entries at invalid slots may hold anything, NaN included.

    ``target_hidden[target_rows[t, j]]`` is the state whose head output is the target law of slot j of anchor t, so that a packed
    sequence is stored once although its positions serve up to G anchors. Hidden states are those the head is applied to (after the
    final norm). The head products run in the heads' dtype, everything after them in float32 (float64 for float64 heads).
    Raises ValueError for shapes that do not fit, a temperature that is not positive, and a draft vocabulary that is no set of ids.
    """

    student_hidden: Tensor  # [T, G, H]
    target_hidden: Tensor  # [R, H]
    target_rows: Tensor  # [T, G] int64
    token_ids: Tensor  # [T, G] int64 the rollout's tokens, target vocabulary
    valid: Tensor  # [T, G] bool
    student_head: Tensor  # [Vd, H]
    target_head: Tensor  # [V, H]
    draft_token_ids: Tensor | None = None  # [Vd] int64 target id of every row of student_head; None: Vd = V
    temperature: float = 1.0  # of the policy; divides both logits
    # [R] logsumexp of the target's whole row of logits over the temperature, if it is known: the target's head is then applied at the
    # draft vocabulary alone, and with a small one most of the teacher's cost is gone. Target entropies cannot be had that way.
    target_lse: Tensor | None = None

    def __post_init__(self) -> None:
        if self.student_hidden.ndim != 3 or self.student_hidden.shape[1] == 0:
            raise ValueError(f"student_hidden must be [T, G, H] with one or more slots, got {tuple(self.student_hidden.shape)}")
        slots = self.student_hidden.shape[:2]
        for name in ("target_rows", "token_ids", "valid"):
            if getattr(self, name).shape != slots:
                raise ValueError(f"{name} must be [T, G] = {tuple(slots)}, got {tuple(getattr(self, name).shape)}")
        if self.valid.dtype != torch.bool:
            raise ValueError(f"valid must be bool, got {self.valid.dtype}")
        for hidden, head in (("student_hidden", "student_head"), ("target_hidden", "target_head")):
            hidden_size, head_size = getattr(self, hidden).shape[-1], getattr(self, head).shape[-1]
            if hidden_size != head_size:
                raise ValueError(f"{hidden} has {hidden_size} features but {head} takes {head_size}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}: a greedy policy has no law to train on")
        if self.target_lse is not None and self.target_lse.shape != self.target_hidden.shape[:1]:
            raise ValueError(f"target_lse must be [R] = {tuple(self.target_hidden.shape[:1])}, got {tuple(self.target_lse.shape)}")
        self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        draft_size, vocab_size = self.student_head.shape[0], self.target_head.shape[0]
        if self.draft_token_ids is None:
            if draft_size != vocab_size:
                raise ValueError(f"student_head has {draft_size} rows, target_head {vocab_size}: draft_token_ids must map one to the other")
            return
        ids = self.draft_token_ids
        if ids.shape != (draft_size,):
            raise ValueError(
                f"draft_token_ids must name one token for each of the {draft_size} rows of student_head, got {tuple(ids.shape)}"
            )
        if draft_size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size or torch.unique(ids).numel() != draft_size):
            raise ValueError(f"draft_token_ids must be distinct token ids below {vocab_size} (not offsets)")

    @functools.cached_property
    def teacher_head(self) -> Tensor:
        """[V or Vd, H]: the rows of the target's head whose logits are computed."""
        if self.target_lse is None or self.draft_token_ids is None:
            return self.target_head
        return self.target_head.index_select(0, self.draft_token_ids)

    def max_rows(self, chunk_bytes: int) -> int:
        """Rows of a chunk whose logits-sized tensors fit into chunk_bytes; at least the slots of one anchor."""
        row_bytes = LIVE_LOGITS * self.teacher_head.shape[0] * _work_dtype(self.student_head).itemsize
        return max(chunk_bytes // row_bytes, self.valid.shape[1])


def chunked_loss(
    batch: DraftBatch, config: LossConfig, counts: SlotCounts | None = None, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> LossOutput:
    """``compute_loss`` of the batch's statistics, differentiable in ``batch.student_hidden`` only.

    The gradient is found together with the value and kept in the size of student_hidden (none if it needs no gradient).
    Memory above the inputs: chunk_bytes + one student_hidden. Second derivatives are not supported.
    """
    counts = SlotCounts.of(batch.valid) if counts is None else counts
    wants_grad = batch.student_hidden.requires_grad and torch.is_grad_enabled()
    hidden_grad = torch.zeros_like(batch.student_hidden, dtype=_grad_dtype(batch.student_hidden)) if wants_grad else None
    shares = [_chunk_loss(batch, chunk, config, counts, hidden_grad) for chunk in _chunks(batch, chunk_bytes)]
    if not shares:
        shares = [compute_loss(_neutral_stats(batch, config.extras), config, counts)]
    loss = torch.stack([share.loss.detach() for share in shares]).sum()
    if hidden_grad is not None:
        loss = _WithGradient.apply(batch.student_hidden, loss, hidden_grad)  # type: ignore[no-untyped-call]
    metrics = {name: torch.stack([share.metrics[name] for share in shares]).sum(dim=0) for name in shares[0].metrics}
    return LossOutput(loss=loss, metrics=metrics)


def chunked_stats(batch: DraftBatch, extras: frozenset[Extra] = frozenset(), *, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> SlotStats:
    """Slot statistics of the batch, differentiable in ``batch.student_hidden`` only; the backward pass computes logits again."""
    if batch.target_lse is not None and Extra.TARGET_ENTROPIES in extras:
        raise ValueError(
            "target entropies need the whole rows of target logits: leave target_lse out, or take them from where it came from"
        )
    names = _stat_names(extras)
    values = _RecomputedStats.apply(batch.student_hidden, batch, extras, chunk_bytes)  # type: ignore[no-untyped-call]
    return SlotStats(valid=batch.valid, **dict(zip(names, values, strict=True)))


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient is already known."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, hidden_grad: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_grad)
        ctx.dtype = hidden.dtype
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (hidden_grad,) = ctx.saved_tensors
        return (hidden_grad * grad).to(ctx.dtype), None, None


class _RecomputedStats(torch.autograd.Function):
    """Statistics by chunks; nothing of the vocabulary's size is saved."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, batch: DraftBatch, extras: frozenset[Extra], chunk_bytes: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden)
        ctx.batch, ctx.extras, ctx.chunk_bytes = batch, extras, chunk_bytes
        whole = _neutral_stats(batch, extras)
        names = _stat_names(extras)
        for chunk in _chunks(batch, chunk_bytes):
            stats = _forward(batch, chunk, extras).stats
            for name in names:
                getattr(whole, name)[chunk.anchors] = getattr(stats, name)
        ctx.mark_non_differentiable(*(getattr(whole, name) for name in names if name not in _DIFFERENTIABLE))
        return tuple(getattr(whole, name) for name in names)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (hidden,) = ctx.saved_tensors
        batch: DraftBatch = ctx.batch
        by_name = {name: grad for name, grad in zip(_stat_names(ctx.extras), grads, strict=True) if name in _DIFFERENTIABLE}
        hidden_grad = torch.zeros_like(hidden, dtype=_grad_dtype(hidden))
        for chunk in _chunks(batch, ctx.chunk_bytes):
            grads_of_chunk = SlotGrads(**{name: grad[chunk.anchors] for name, grad in by_name.items()})
            _put_hidden_grad(hidden_grad, batch, chunk, chunk_backward(_forward(batch, chunk, ctx.extras), grads_of_chunk))
        return hidden_grad.to(hidden.dtype), None, None, None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chunk:
    anchors: Tensor  # [C] indices
    layout: ChunkLayout
    target_rows: Tensor  # [U] distinct rows of target_hidden


def _chunks(batch: DraftBatch, chunk_bytes: int) -> Iterator[_Chunk]:
    """The anchors that have a valid slot, in pieces that fit into chunk_bytes."""
    anchors_per_chunk = batch.max_rows(chunk_bytes) // batch.valid.shape[1]
    columns = _column_of_token(batch)
    used = batch.valid.any(dim=1).nonzero()[:, 0]
    for start in range(0, used.shape[0], anchors_per_chunk):
        anchors = used[start : start + anchors_per_chunk]
        valid = batch.valid[anchors]
        target_rows, row_of_slot = torch.unique(batch.target_rows[anchors][valid], return_inverse=True)
        token_ids = batch.token_ids[anchors][valid]
        layout = ChunkLayout(
            valid=valid,
            token_ids=token_ids,
            columns=token_ids if columns is None else columns[token_ids],
            target_rows=row_of_slot,
        )
        yield _Chunk(anchors=anchors, layout=layout, target_rows=target_rows)


def _forward(batch: DraftBatch, chunk: _Chunk, extras: frozenset[Extra]) -> ChunkForward:
    with torch.no_grad():
        student_hidden = batch.student_hidden[chunk.anchors][chunk.layout.valid]
        target_hidden = batch.target_hidden[chunk.target_rows]
        return chunk_forward(
            _logits(student_hidden, batch.student_head),
            _logits(target_hidden, batch.teacher_head),
            chunk.layout,
            temperature=batch.temperature,
            draft_token_ids=batch.draft_token_ids,
            extras=extras,
            known=_known_normaliser(batch, chunk, target_hidden),
        )


def _known_normaliser(batch: DraftBatch, chunk: _Chunk, target_hidden: Tensor) -> KnownNormaliser | None:
    """What stands in for the logits outside the draft vocabulary; target_hidden [U, H] are the chunk's target rows."""
    if batch.target_lse is None:
        return None
    dtype = _work_dtype(batch.student_head)
    states, rows = target_hidden[chunk.layout.target_rows].to(dtype), batch.target_head[chunk.layout.token_ids].to(dtype)
    return KnownNormaliser(lse=batch.target_lse[chunk.target_rows].to(dtype), token_logits=(states * rows).sum(-1))


def _chunk_loss(batch: DraftBatch, chunk: _Chunk, config: LossConfig, counts: SlotCounts, hidden_grad: Tensor | None) -> LossOutput:
    """One chunk's share of the loss; its gradient goes into hidden_grad [T, G, H]."""
    forward = _forward(batch, chunk, config.extras)
    stats = _leaf_stats(forward.stats)
    with torch.enable_grad():
        share = compute_loss(stats, config, counts)
    if hidden_grad is not None:
        _put_hidden_grad(hidden_grad, batch, chunk, chunk_backward(forward, _grads(share.loss, stats)))
    return share


def _column_of_token(batch: DraftBatch) -> Tensor | None:
    """[V] draft column of every target token, NO_COLUMN outside the draft vocabulary; None if they are the same."""
    if batch.draft_token_ids is None:
        return None
    columns = torch.full((batch.target_head.shape[0],), NO_COLUMN, dtype=torch.int64, device=batch.token_ids.device)
    columns[batch.draft_token_ids] = torch.arange(batch.draft_token_ids.shape[0], device=columns.device)
    return columns


def _work_dtype(head: Tensor) -> torch.dtype:
    return torch.float64 if head.dtype == torch.float64 else torch.float32


def _grad_dtype(hidden: Tensor) -> torch.dtype:
    """float16 gradients would underflow before the loss scale reaches them."""
    return torch.float32 if hidden.dtype == torch.float16 else hidden.dtype


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """[N, Vd] in the work dtype. Autocast is off so that the recomputation in a backward pass gives the same numbers."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden.to(head.dtype) @ head.detach().T
    return logits.to(_work_dtype(head))


def _put_hidden_grad(hidden_grad: Tensor, batch: DraftBatch, chunk: _Chunk, logits_grad: Tensor) -> None:
    """Write one chunk's part of d loss / d student_hidden into hidden_grad [T, G, H], from logits_grad [N, Vd]."""
    head, valid = batch.student_head.detach(), chunk.layout.valid
    size: Tensor | None = None
    if head.dtype == torch.float16:  # a mean over many slots is too small for its exponents: keep the size out of the product
        size = logits_grad.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
        logits_grad = logits_grad / size
    with torch.autocast(head.device.type, enabled=False):
        rows = (logits_grad.to(head.dtype) @ head).to(hidden_grad.dtype)
    slots = torch.zeros(*valid.shape, rows.shape[1], dtype=hidden_grad.dtype, device=hidden_grad.device)
    slots[valid] = rows if size is None else rows * size
    hidden_grad[chunk.anchors] = slots


def _stat_names(extras: frozenset[Extra]) -> list[str]:
    return ["overlap", "draft_logprobs", "target_logprobs", "draft_correct", *(e.value for e in Extra if e in extras)]


def _neutral_stats(batch: DraftBatch, extras: frozenset[Extra]) -> SlotStats:
    """The statistics of a batch without a valid slot."""
    dtype = _work_dtype(batch.student_head)
    zeros = torch.zeros(batch.valid.shape, dtype=dtype, device=batch.valid.device)
    return SlotStats(
        valid=batch.valid,
        overlap=torch.ones_like(zeros),
        draft_logprobs=zeros.clone(),
        target_logprobs=zeros.clone(),
        draft_correct=torch.ones_like(batch.valid),
        kl=zeros.clone() if Extra.KL in extras else None,
        block_overlap=torch.ones_like(zeros) if Extra.BLOCK_OVERLAP in extras else None,
        target_entropies=zeros.clone() if Extra.TARGET_ENTROPIES in extras else None,
    )


def _leaf_stats(stats: SlotStats) -> SlotStats:
    """The same statistics as leaves of a new graph."""
    leaves = {name: getattr(stats, name).requires_grad_() for name in _DIFFERENTIABLE if getattr(stats, name) is not None}
    return SlotStats(valid=stats.valid, target_logprobs=stats.target_logprobs, draft_correct=stats.draft_correct, **leaves)


def _grads(loss: Tensor, leaves: SlotStats) -> SlotGrads:
    names = [name for name in _DIFFERENTIABLE if getattr(leaves, name) is not None]
    grads = torch.autograd.grad(loss, [getattr(leaves, name) for name in names], allow_unused=True)
    return SlotGrads(**dict(zip(names, grads, strict=True)))
