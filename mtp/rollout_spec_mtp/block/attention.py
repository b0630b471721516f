"""Attention of many blocks of a packed batch at once: each sees its own block and the context strictly before its anchor.

Shape legend: F flat rows of the batch, T anchors, B block size, H query heads, Hkv key/value heads, d head size, C anchors of a span.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """Neighbouring anchors of one sequence, whose blocks attend in one product."""

    first: int  # index of its first anchor
    last: int  # index after its last anchor
    begin: int  # flat rows begin:end hold the context of all of them
    end: int
    mask: Tensor  # [C B, (end - begin) + C B] bool: True where a block row sees a context row or, behind those, a block row


def make_spans(anchors: Tensor, positions: Tensor, block_size: int, max_rows: int) -> list[Span]:
    """Spans of at most max_rows block rows over anchors [T] (rising flat rows), whose sequence starts ``positions`` [T] rows before them.

    The context of an anchor is every flat row from its sequence's start to just before the anchor: the anchor's own target state does
    not exist yet when a draft starts from it, and rows before the start belong to a neighbour. Memory of all masks:
    T B (context + max_rows) bytes.
    """
    starts = anchors - positions
    per_span = max(max_rows // block_size, 1)
    spans: list[Span] = []
    rows, begins = anchors.tolist(), starts.tolist()
    first = 0
    while first < len(rows):
        last = first + 1
        while last < len(rows) and last - first < per_span and begins[last] == begins[first]:
            last += 1
        begin, end = begins[first], rows[last - 1]
        context = torch.arange(begin, end, device=anchors.device) < anchors[first:last, None]
        block = torch.arange(last - first, device=anchors.device).repeat_interleave(block_size)
        mask = torch.cat([context.repeat_interleave(block_size, dim=0), block[:, None] == block], dim=1)
        spans.append(Span(first=first, last=last, begin=begin, end=end, mask=mask))
        first = last
    return spans


def attend_spans(
    q: Tensor,  # [T, B, H, d]
    k: Tensor,  # [T, B, Hkv, d] of the blocks
    v: Tensor,  # [T, B, Hkv, d]
    context_k: Tensor,  # [F, Hkv, d]
    context_v: Tensor,  # [F, Hkv, d]
    spans: list[Span],
) -> Tensor:
    """softmax(q [K_context ; K_block]ᵀ / sqrt(d)) [V_context ; V_block] under the spans' masks -> [T, B, H, d]."""
    outputs = []
    for span in spans:
        anchors, rows = slice(span.first, span.last), slice(span.begin, span.end)
        keys = torch.cat([context_k[rows], k[anchors].flatten(0, 1)])
        values = torch.cat([context_v[rows], v[anchors].flatten(0, 1)])
        queries = q[anchors].flatten(0, 1)
        mixed = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=span.mask, enable_gqa=True
        )
        outputs.append(mixed[0].transpose(0, 1).reshape(-1, *q.shape[1:]))
    return torch.cat(outputs) if outputs else q
