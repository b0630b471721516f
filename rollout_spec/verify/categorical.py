"""Work on V-wide rows, a few at a time, and drawing one token a row: inverse CDF from a uniform, or the Gumbel race.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 256
_SLICE_ELEMENTS = 1 << 19  # numbers in one V-wide temporary


def row_slices(rows: Tensor, vocab_size: int) -> Iterator[slice]:
    """Consecutive slices of rows [R], few enough that V-wide temporaries stay in the cache of a CPU; one slice on other devices.

    Temporaries of a whole batch (16 rows of 49k tokens are 3 MB) are fresh pages in every round, and their faults cost several
    times the arithmetic.
    """
    num_rows = rows.shape[0]
    step = max(1, _SLICE_ELEMENTS // vocab_size) if rows.device.type == "cpu" else max(1, num_rows)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index] for index [K] in ascending order: rows itself when that is all of them, a view when it is one, else a copy.

    The copy is index_select's, which moves whole rows; indexing with a tensor goes through them number by number.
    """
    if index.numel() == rows.shape[0]:
        return rows
    if index.numel() == 1:
        return rows[int(index)][None]
    return rows.index_select(0, index)


def inverse_cdf(weights: Tensor, uniforms: Tensor, fallback: Tensor | None = None) -> Tensor:
    """[R] int64: the first token whose cumulative weight exceeds u · total, in token order.

    weights [R, V] are non-negative and need not be normalised, uniforms [R] float64 lie in [0, 1); where a row of weights has no mass
    at all, the row of fallback [R, V] is drawn from. Sums are float64, and the
    level stays below the total, so neither a rounded normaliser nor u just below 1 can run off the end; a token of zero weight
    is never returned. Two levels (blocks of the vocabulary, then one block) read every weight once and store no CDF.

    Raises ValueError if a row has no mass or is not finite.
    """
    num_rows, vocab_size = weights.shape
    blocks = pad(weights, (0, -vocab_size % _BLOCK)).view(num_rows, -(-vocab_size // _BLOCK), _BLOCK)
    edges = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [R, number of blocks]
    total = edges[:, -1]
    if not bool(((total > 0) & total.isfinite()).all()):
        if fallback is not None and bool((total >= 0).all()):
            return inverse_cdf(torch.where((total > 0)[:, None], weights, fallback), uniforms)
        raise ValueError(f"no distribution to draw from: the weights of a row sum to zero, inf or NaN ({total.tolist()})")
    level = _below(uniforms * total, total)
    block = (edges <= level[:, None]).sum(-1)
    rows = torch.arange(num_rows, device=weights.device)
    before = pad(edges, (1, 0))[rows, block]
    inside = blocks[rows, block].to(torch.float64).cumsum(-1)  # [R, _BLOCK]
    # The block's own sum may round differently from the difference of the edges; its last positive token absorbs that.
    level = _below(level - before, inside[:, -1])
    return block * _BLOCK + (inside <= level[:, None]).sum(-1)


def draw_tokens(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """[R] int64: inverse_cdf of rows given by their logarithms, a few rows at a time."""
    parts = [inverse_cdf(log_probs[part].exp(), uniforms[part]) for part in row_slices(uniforms, log_probs.shape[1])]
    return torch.cat(parts) if parts else torch.empty_like(uniforms, dtype=torch.int64)


def _below(level: Tensor, total: Tensor) -> Tensor:
    """level, or the next number below total if it is not smaller than total."""
    return torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))


def gumbel_argmax(log_probs: Tensor, gumbel: Tensor) -> Tensor:
    """[R] int64: argmax_v (log p(v) + G(v)), which is a draw from p when G [R, V] is standard Gumbel noise (Maddison 2014).

    A token of zero probability is never returned, not even where the finite-precision noise of every possible token is -inf
    (one draw in 2**25 for a point mass): there the likeliest token wins.
    """
    best, token_ids = (log_probs + gumbel).max(dim=-1)
    lost = best == -torch.inf
    if bool(lost.any()):
        token_ids[lost] = log_probs[lost].argmax(dim=-1)
    return token_ids
