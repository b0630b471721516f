"""AttentionPlan: which rows one forward computes, where their K/V goes and what each may see.

Shape legend: B requests in this forward, R rows (all requests' new tokens, request by request), W 64-bit mask words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """Rows of request b are ``row_offsets[b]:row_offsets[b + 1]``; row j of a request is stored at index ``context_lengths[b] + j``.

    Every row sees the whole committed context of its request. Among the new rows it sees those whose bit is set in ``ancestors``
    (bit ``j % 64`` of word ``j // 64`` for new row j, itself included), or, with None, all up to itself (causal).

    With ``num_earlier`` (only beside ``ancestors``) so many rows of a growing tree lie already behind each context: row j is stored
    behind them, and bits count from the context, the earlier rows first.
    """

    row_offsets: Tensor  # [B + 1] int64
    slots: Tensor  # [B] int64
    context_lengths: Tensor  # [B] int64
    ancestors: Tensor | None = None  # [R, W] int64 bitmask
    num_earlier: int = 0

    @property
    def num_rows(self) -> int:
        return int(self.row_offsets[-1])

    @property
    def rows_per_request(self) -> Tensor:
        """[B] int64."""
        return self.row_offsets.diff()

    def row_requests(self) -> Tensor:
        """[R] int64: the request of each row."""
        return torch.repeat_interleave(torch.arange(self.slots.numel()), self.rows_per_request)

    def row_slots(self) -> Tensor:
        """[R] int64: the cache slot of each row."""
        return self.slots[self.row_requests()]

    def row_indices(self) -> Tensor:
        """[R] int64: the index inside the slot at which each row's K/V is stored."""
        requests = self.row_requests()
        within = torch.arange(self.num_rows) - self.row_offsets[requests]
        return self.context_lengths[requests] + self.num_earlier + within

    def row_parents(self) -> Tensor:
        """[R] int64: the row of its request that each row follows on, -1 for one that follows on the context. No earlier rows."""
        assert not self.num_earlier
        within = torch.arange(self.num_rows) - self.row_offsets[self.row_requests()]
        if self.ancestors is None:
            return within - 1
        columns = torch.arange(int(self.rows_per_request.max()))
        sees = (self.ancestors[:, columns // 64] >> (columns % 64)) & 1 == 1
        # Ancestors come before their descendants, the nearest last.
        return torch.where(sees & (columns < within[:, None]), columns, -1).amax(1)

    def visible(self, request: int) -> Tensor:
        """[rows, context + earlier + rows] bool for one request: the readable form of the mask."""
        begin, end = int(self.row_offsets[request]), int(self.row_offsets[request + 1])
        num_rows, context = end - begin, int(self.context_lengths[request])
        if self.ancestors is None:
            among = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
        else:
            columns = torch.arange(self.num_earlier + num_rows)
            words = self.ancestors[begin:end][:, columns // 64]
            among = (words >> (columns % 64)) & 1 == 1
        return torch.cat([torch.ones(num_rows, context, dtype=torch.bool), among], dim=1)


def mask_words(bits: Tensor) -> Tensor:
    """[..., W] int64 of bits [..., N] bool: bit j % 64 of word j // 64 is bits[..., j]."""
    num_words = -(-bits.shape[-1] // 64)
    padded: Tensor = torch.nn.functional.pad(bits.long(), (0, num_words * 64 - bits.shape[-1])).view(*bits.shape[:-1], num_words, 64)
    # Bit 63 makes the sum wrap to a negative number: that is the word wanted.
    return (padded << torch.arange(64)).sum(-1)
