"""Min-p, top-k and top-p: which tokens of a distribution stay.

Shape legend: R rows, V vocabulary, C candidates of one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Truncations:
    """Temperature, then truncation, of each row: what ``truncate_`` takes, as tensors on the CPU."""

    temperatures: Tensor  # [R] float32 > 0
    top_k: Tensor  # [R] int64
    top_p: Tensor  # [R] float64
    min_p: Tensor  # [R] float64

    def apply(self, logits: Tensor) -> Tensor:
        """[R, V] float32: logits [R, V] of any float dtype over their temperatures, -inf where a token is dropped."""
        x = logits.float() / self.temperatures.to(logits.device)[:, None]
        rows = zip(x.split(1), self.top_k.tolist(), self.top_p.tolist(), self.min_p.tolist(), strict=True)
        return torch.cat([truncate_(row, top_k=top_k, top_p=top_p, min_p=min_p) for row, top_k, top_p, min_p in rows])


def truncate_(x: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Set the logits x [R, V] float32 of dropped tokens to -inf, in place, and return x. Kept logits keep their bits.

    With p = softmax(x) over what is left, in this order (vLLM's):

    - min_p: keep ``p(v) >= min_p * max p`` (Nguyen et al. 2024), tested on logits: ``x(v) >= max x + log min_p``;
    - top_k (0 = off): keep the k largest and everything tied with the k-th, as vLLM and transformers do;
    - top_p (1 = off): keep the smallest set of largest p with mass >= top_p (Holtzman et al. 2019), lowest ids first among
      equal logits: token v stays if the mass of those before it is < top_p. The mass is summed in float64.

    The largest logit always stays. Rows with a NaN, +inf or nothing but -inf are left as they are. A row's result does not
    depend on the other rows.
    """
    if x.device.type == "cpu":
        for row in x.numpy():
            _truncate_row(row, top_k, top_p, min_p)
        return x
    return truncate_batched_(x, top_k=top_k, top_p=top_p, min_p=min_p)


def _truncate_row(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    """One row [V] on the CPU, where selecting few candidates by value is many times faster than torch's sort and topk."""
    largest = float(row.max())
    if not math.isfinite(largest):
        return
    floor = largest + math.log(min_p) if min_p > 0 else -math.inf
    if 0 < top_k < len(row):
        # Min-p keeps a prefix of the descending order, so the k-th of what it kept is the k-th of the row or lies below the floor.
        floor = max(floor, float(np.partition(row, len(row) - top_k)[len(row) - top_k]))
    ids = np.flatnonzero(row >= row.dtype.type(floor)) if floor > -math.inf else np.arange(len(row))  # [C] ascending
    values = row[ids]
    if top_p < 1:
        keep = _nucleus(values, largest, top_p)
        ids, values = ids[keep], values[keep]
    row.fill(-np.inf)
    row[ids] = values


def _nucleus(values: np.ndarray, largest: float, top_p: float) -> np.ndarray:
    """Indices, ascending, of the top-p set of the logits values [C], given in ascending order of id.

    Only candidates with p >= (1 - top_p) / C are sorted: the C or fewer others together hold less than 1 - top_p, so the mass
    reaches top_p among the candidates. Half of that bound is used, far more room than rounding needs.
    """
    weights = np.exp(values - values.dtype.type(largest))  # unnormalised p
    total = float(weights.sum(dtype=np.float64))
    candidates = np.flatnonzero(weights >= 0.5 * (1 - top_p) / len(values) * total)
    # Sorting values is vectorised, sorting indices is not; so ties are settled afterwards, by value.
    descending = np.sort(values[candidates])[::-1]
    mass = np.cumsum(np.exp(descending - values.dtype.type(largest)), dtype=np.float64)
    num_kept = int(np.searchsorted(mass, top_p * total)) + 1  # the first token at which the mass reaches top_p is the last kept
    last = descending[min(num_kept, len(descending)) - 1]
    stays = values[candidates] >= last
    surplus = int(stays.sum()) - num_kept
    if surplus > 0:
        tied = np.flatnonzero(values[candidates] == last)
        stays[tied[-surplus:]] = False
    kept: np.ndarray = candidates[stays]
    return kept


def truncate_batched_(x: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """``truncate_`` with whole-batch torch operations, for devices where a row loop would be slow."""
    if min_p > 0:
        x.masked_fill_(x < x.amax(-1, keepdim=True) + math.log(min_p), -math.inf)
    if 0 < top_k < x.shape[1]:
        x.masked_fill_(x < x.topk(top_k, dim=-1).values[:, -1:], -math.inf)
    if top_p < 1:
        values, ids = x.sort(dim=-1, descending=True, stable=True)
        probs = values.softmax(-1).double()
        mass_before = probs.cumsum(-1) - probs
        drop = mass_before >= top_p
        drop[:, 0] = False  # also where rounding makes the first mass negative or top_p is below the smallest float
        x.scatter_(1, ids, values.masked_fill(drop, -math.inf))
    return x
