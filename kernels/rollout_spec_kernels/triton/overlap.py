"""What drafter and target share, sum_v min(p, q) = 1 - TV, from hidden states: forward and backward without a row of probabilities.

Logits exist for a chunk of rows at a time and are overwritten with their own gradient; three numbers a row are kept for the backward
pass. Every TV objective is a function of these overlaps: rollout_spec_mtp.losses has the objectives and the formula's readable form.

Shape legend: N rows (anchor and slot), H drafter's hidden size, Ht target's, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # vocabulary entries in flight
_CHUNK_BYTES = 256 << 20  # of both laws' logits


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """Linear layers onto a vocabulary."""

    weight: Tensor  # [V or Vd, H or Ht]
    bias: Tensor | None = None  # [V or Vd]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V or Vd] float32."""
        return torch.nn.functional.linear(hidden, self.weight, self.bias).float()


def overlap(
    hidden: Tensor,  # [N, H]
    head: Head,  # the drafter's
    target_hidden: Tensor,  # [N, Ht]
    target_head: Head,
    draft_token_ids: Tensor | None = None,  # [Vd] int64 the target token of each draft column; None: Vd = V
    temperature: float = 1.0,
) -> Tensor:
    """[N] float32 alpha = sum_v min(p, q), p = softmax(target logits / temperature), q likewise; clamped to 1.

    Gradients flow to ``hidden`` and to the drafter's head where they are asked for, never to the target (Bebop, arXiv 2606.12370): with
    ``s = sum_{q <= p} q``, ``d alpha / dz_v = q_v ([q_v <= p_v] - s) / temperature``.

    Raises ValueError for sizes that do not fit and temperatures that are not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if hidden.shape[0] != target_hidden.shape[0]:
        raise ValueError(f"{hidden.shape[0]} rows of the drafter but {target_hidden.shape[0]} of the target")
    columns = target_head.weight.shape[0] if draft_token_ids is None else draft_token_ids.numel()
    if head.weight.shape[0] != columns:
        raise ValueError(f"the drafter's head has {head.weight.shape[0]} columns for {columns} tokens")
    alpha: Tensor = _Overlap.apply(
        hidden, head.weight, head.bias, target_hidden.detach(), target_head.weight.detach(), target_head.bias, draft_token_ids, temperature
    )
    return alpha


class _Overlap(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_hidden: Tensor,
        target_weight: Tensor,
        target_bias: Tensor | None,
        names: Tensor | None,
        temperature: float,
    ) -> Tensor:
        num_rows = hidden.shape[0]
        head, target_head = Head(weight=weight, bias=bias), Head(weight=target_weight, bias=target_bias)
        # alpha, s, and the log-normalisers of q and p
        kept = torch.empty(4, num_rows, dtype=torch.float32, device=hidden.device)
        for part in _parts(num_rows, weight.shape[0] + target_weight.shape[0]):
            logits, target_logits = head.logits(hidden[part]), target_head.logits(target_hidden[part])
            _forward[(logits.shape[0],)](
                logits, target_logits, _named(names, logits), *(row[part] for row in kept), 1.0 / temperature,
                logits.shape[1], target_logits.shape[1], has_names=names is not None, chunk=_CHUNK,
            )  # fmt: skip
        context.save_for_backward(hidden, weight, bias, target_hidden, target_weight, target_bias, names, kept)
        context.temperature = temperature
        return kept[0]

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_hidden, target_weight, target_bias, names, kept = context.saved_tensors
        head, target_head = Head(weight=weight, bias=bias), Head(weight=target_weight, bias=target_bias)
        wanted = context.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted[1] else None
        grad_bias = torch.zeros(weight.shape[:1], dtype=torch.float32, device=weight.device) if wanted[2] and bias is not None else None
        upstream = grads[0].float().contiguous()
        for part in _parts(hidden.shape[0], weight.shape[0] + target_weight.shape[0]):
            logits, target_logits = head.logits(hidden[part]), target_head.logits(target_hidden[part])
            _backward[(logits.shape[0],)](
                logits, target_logits, _named(names, logits), *(row[part] for row in kept[1:]), upstream[part], 1.0 / context.temperature,
                logits.shape[1], target_logits.shape[1], has_names=names is not None, chunk=_CHUNK,
            )  # fmt: skip
            if grad_hidden is not None:
                grad_hidden[part] = (logits.to(weight.dtype) @ weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(logits.T, hidden[part].float())
            if grad_bias is not None:
                grad_bias += logits.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _parts(num_rows: int, num_columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // (4 * num_columns))
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def _named(names: Tensor | None, like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=like.device) if names is None else names


@triton.jit
def _log_normaliser(logits, inverse, size, chunk: tl.constexpr):
    """logsumexp(logits * inverse) of one row."""
    most = tl.max(tl.full((chunk,), float("-inf"), tl.float32), axis=0)
    for begin in range(0, size, chunk):
        v = begin + tl.arange(0, chunk)
        most = tl.maximum(most, tl.max(tl.load(logits + v, mask=v < size, other=float("-inf")), axis=0))
    total = tl.zeros((chunk,), tl.float64)
    for begin in range(0, size, chunk):
        v = begin + tl.arange(0, chunk)
        total += tl.exp((tl.load(logits + v, mask=v < size, other=float("-inf")) - most) * inverse)
    return most * inverse + tl.log(tl.sum(total, axis=0)).to(tl.float32)


@triton.jit
def _laws(logits, target_logits, names, c, size, inverse, draft_normaliser, target_normaliser, has_names: tl.constexpr):
    """q and p of columns c; equal logits and normalisers give equal bits."""
    inside = c < size
    token = c.to(tl.int64)
    if has_names:
        token = tl.load(names + c, mask=inside, other=0)
    q = tl.exp(tl.load(logits + c, mask=inside, other=float("-inf")) * inverse - draft_normaliser)
    p = tl.exp(tl.load(target_logits + token, mask=inside, other=float("-inf")) * inverse - target_normaliser)
    return q, p


@triton.jit
def _forward(
    logits, target_logits, names, alpha, below, draft_normalisers, target_normalisers, inverse, size, target_size,
    has_names: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * size
    target_logits += row.to(tl.int64) * target_size
    draft_normaliser = _log_normaliser(logits, inverse, size, chunk)
    target_normaliser = _log_normaliser(target_logits, inverse, target_size, chunk)
    shared = tl.zeros((chunk,), tl.float64)
    kept = tl.zeros((chunk,), tl.float64)
    for begin in range(0, size, chunk):
        c = begin + tl.arange(0, chunk)
        q, p = _laws(logits, target_logits, names, c, size, inverse, draft_normaliser, target_normaliser, has_names)
        shared += tl.where(q <= p, q, p)
        kept += tl.where(q <= p, q, 0.0)
    tl.store(alpha + row, tl.minimum(tl.sum(shared, axis=0), 1.0).to(tl.float32))
    tl.store(below + row, tl.sum(kept, axis=0).to(tl.float32))
    tl.store(draft_normalisers + row, draft_normaliser)
    tl.store(target_normalisers + row, target_normaliser)


@triton.jit
def _backward(
    logits, target_logits, names, below, draft_normalisers, target_normalisers, upstream, inverse, size, target_size,
    has_names: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * size
    target_logits += row.to(tl.int64) * target_size
    draft_normaliser, target_normaliser = tl.load(draft_normalisers + row), tl.load(target_normalisers + row)
    kept, grad = tl.load(below + row), tl.load(upstream + row) * inverse
    for begin in range(0, size, chunk):
        c = begin + tl.arange(0, chunk)
        q, p = _laws(logits, target_logits, names, c, size, inverse, draft_normaliser, target_normaliser, has_names)
        tl.store(logits + c, grad * q * (tl.where(q <= p, 1.0, 0.0) - kept), mask=c < size)
