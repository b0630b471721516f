"""Repetition, frequency and presence penalties: what a row's own history does to its logits.

Shape legend: R rows (one a tree node or request), V vocabulary, T tokens of a history, E entries touched by penalties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class RowHistory:
    """The tokens before one row. The row's output is ``output_token_ids`` followed by ``path_token_ids``.

    Rows of one request's tree should share the very same ``prompt_token_ids`` and ``output_token_ids`` objects and differ in
    ``path_token_ids``: the shared part is then counted once a call instead of once a row.
    """

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    path_token_ids: Sequence[int] = ()  # draft tokens from below the root down to this row's node, the node included

    def tensor(self) -> Tensor:
        """[T] int64 (CPU): prompt + output + path."""
        return torch.tensor([*self.prompt_token_ids, *self.output_token_ids, *self.path_token_ids], dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """``l -> l / repetition if l > 0 else l * repetition`` for tokens of prompt + output (Keskar et al. 2019, CTRL, section 4.1),
    then ``l - frequency * count - presence * [count > 0]`` with the count in the output only, as vLLM does both."""

    repetition: float
    frequency: float
    presence: float

    @property
    def any(self) -> bool:
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0


def penalise(x: Tensor, histories: Sequence[RowHistory], penalties: Penalties) -> Tensor:
    """Penalised logits (a new tensor) of x [R, V], row r by histories[r] (R of them); see ``Penalties`` for the formula.

    Raises ValueError for a history token outside the vocabulary.

    Works on sparse (row, token, count) entries: a history touches few of the V columns. The shared part of the histories is
    counted once a request. Path tokens come second and overwrite the shared part's entry of the same token with a value made
    afresh from ``x``, so no token is ever penalised twice.
    """
    shared: dict[tuple[int, int], _Counts] = {}
    rows, ids, counts = [], [], []
    path_rows, path_ids, path_counts = [], [], []
    for row, history in enumerate(histories):
        key = (id(history.prompt_token_ids), id(history.output_token_ids))
        if key not in shared:
            shared[key] = _count(history, with_prompt=penalties.repetition != 1)
        base = shared[key]
        rows.append(np.full(len(base.ids), row))
        ids.append(base.ids)
        counts.append(base.counts)
        for token_id in history.path_token_ids:
            path_rows.append(row)
            path_ids.append(token_id)
            path_counts.append(base.of(token_id) + list(history.path_token_ids).count(token_id))
    out = x.clone()
    for entries in (
        (np.concatenate(rows), np.concatenate(ids), np.concatenate(counts)),
        (np.array(path_rows, np.int64), np.array(path_ids, np.int64), np.array(path_counts, np.int64)),
    ):
        _overwrite_(out, x, penalties, *entries)
    return out


@dataclass(frozen=True, kw_only=True, eq=False)
class _Counts:
    """Distinct tokens of a history's shared part, ascending, and how often each stands in the output (0: prompt only)."""

    ids: np.ndarray  # [E] int64
    counts: np.ndarray  # [E] int64

    def of(self, token_id: int) -> int:
        at = int(np.searchsorted(self.ids, token_id))
        return int(self.counts[at]) if at < len(self.ids) and self.ids[at] == token_id else 0


def _count(history: RowHistory, *, with_prompt: bool) -> _Counts:
    output = np.asarray(history.output_token_ids, dtype=np.int64)
    prompt = np.asarray(history.prompt_token_ids if with_prompt else (), dtype=np.int64)
    ids, inverse = np.unique(np.concatenate([prompt, output]), return_inverse=True)
    return _Counts(ids=ids, counts=np.bincount(inverse[len(prompt) :], minlength=len(ids)))


def _overwrite_(out: Tensor, x: Tensor, penalties: Penalties, rows: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> None:
    """Write the penalised values of entries (rows [E], ids [E], counts [E]) of x into out; equal entries write equal values."""
    if not len(ids):
        return
    if ids.min() < 0 or ids.max() >= x.shape[1]:
        raise ValueError(f"a history holds token {ids.min() if ids.min() < 0 else ids.max()}, outside the vocabulary of {x.shape[1]}")
    flat = torch.from_numpy(rows * x.shape[1] + ids).to(x.device)
    count = torch.from_numpy(counts).to(x)
    value = x.reshape(-1)[flat]
    value = torch.where(value > 0, value / penalties.repetition, value * penalties.repetition)
    value -= penalties.frequency * count
    value -= penalties.presence * (count > 0).to(x.dtype)
    out.view(-1)[flat] = value
