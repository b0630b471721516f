"""Of each row of logits: normalisers, entropy, and which tokens min-p, top-k and top-p leave (rollout_spec/truncation.py), in Triton.

What stays is three numbers a row: tokens whose logit is larger than ``tied``, and up to the id ``last`` those from ``least`` on, which at
the row's temperature have one quotient with it. No copy of the row is made; the verifiers apply the numbers as they read it.

The edge of a top-k or top-p set is found by bisection over the quotients, as integers that are ordered like them: each pass sums the
count, or e^x in float64, of what lies above the middle, and the bounds move on to values that occur, so that a pass halves what is left.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_spec.truncation import Truncations

CHUNK = 1024  # vocabulary entries in flight
_NO_KEY = tl.constexpr(-(1 << 31))  # below every float's


@dataclass(frozen=True, kw_only=True, eq=False)
class RowStats:
    """Of each row of logits."""

    log_normalisers: Tensor  # [R] float32: logsumexp of logits / temperature over what stays
    raw_log_normalisers: Tensor  # [R] float32: logsumexp(logits)
    entropies: Tensor  # [R] float32 nats, of what stays; NaN for a row that defines no distribution
    support: Tensor | None  # [R, 3] int32: the bits of least and tied (float32), and last; None where all rows keep everything


def truncates(truncations: Truncations) -> bool:
    """True if a row may lose a token. For truncations on the CPU, whose values are at hand."""
    return bool(((truncations.top_k > 0) | (truncations.top_p < 1) | (truncations.min_p > 0)).any())


def row_stats(logits: Tensor, truncations: Truncations, *, may_truncate: bool = True) -> RowStats:
    """logits [R, V] of any float dtype, contiguous; truncations R, on the logits' device. may_truncate=False: temperatures only.

    The support is truncation.truncate_'s, ties included, unless a nucleus' mass is within float32 rounding of top_p. Rows with a NaN,
    +inf or nothing but -inf keep everything, and their entropy is NaN.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    stats = torch.empty(3, num_rows, dtype=torch.float32, device=device)
    support = torch.empty(num_rows, 3, dtype=torch.int32, device=device) if may_truncate else None
    temperatures = truncations.temperatures
    if num_rows:
        _row_stats[(num_rows,)](
            logits, temperatures, temperatures.reciprocal(), truncations.top_k, truncations.top_p, truncations.min_p.log(),
            *stats, support, vocab_size, chunk=CHUNK,
        )  # fmt: skip
    return RowStats(log_normalisers=stats[0], raw_log_normalisers=stats[1], entropies=stats[2], support=support)


@triton.jit
def _outside(x, v, least, tied, last):
    """True for the logits x of tokens v that do not stay; never for a NaN."""
    return (x < least) | ((x <= tied) & (v > last))


@triton.jit
def dropped(x, v, row, support):
    """``_outside`` of a row's support, as it was stored."""
    least = tl.load(support + 3 * row).to(tl.float32, bitcast=True)
    tied = tl.load(support + 3 * row + 1).to(tl.float32, bitcast=True)
    return _outside(x, v, least, tied, tl.load(support + 3 * row + 2))


@triton.jit
def _key(x):
    """int64 ordered as the float32 x: the bits, with a negative number's magnitude turned over; -0 and 0 share one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _chunk_keys(base, begin, vocab_size, temperature, chunk: tl.constexpr):
    """(logits, their quotients, the quotients' keys) of a chunk; behind the vocabulary no key."""
    v = begin + tl.arange(0, chunk)
    x = tl.load(base + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32)
    quotient = tl.div_rn(x, temperature)
    return x, quotient, tl.where(v < vocab_size, _key(quotient), _NO_KEY)


@triton.jit
def _weight_from(base, vocab_size, temperature, most, bound, by_mass: tl.constexpr, chunk: tl.constexpr):
    """Of the keys >= bound: (their weight, the least of them), and the largest key below. A weight is e^(x - most), or 1."""
    weight = tl.zeros((chunk,), tl.float64)
    above = tl.zeros((chunk,), tl.int64) + (1 << 31)
    below = tl.zeros((chunk,), tl.int64) + _NO_KEY
    for begin in range(0, vocab_size, chunk):
        _, quotient, key = _chunk_keys(base, begin, vocab_size, temperature, chunk)
        inside = key >= bound
        one = tl.where(inside, 1.0, 0.0)
        if by_mass:
            one = tl.where(inside, tl.exp(quotient - most), 0.0)
        weight += one
        above = tl.minimum(above, tl.where(inside, key, 1 << 31))
        below = tl.maximum(below, tl.where(inside, _NO_KEY, key))
    return tl.sum(weight, axis=0), tl.min(above, axis=0), tl.max(below, axis=0)


@triton.jit
def _edge(base, vocab_size, temperature, most, low, wanted, by_mass: tl.constexpr, chunk: tl.constexpr):
    """The largest key whose keys from it on weigh at least ``wanted``, and what those above it weigh. From ``low`` on they do."""
    high = _key(most) + 1  # from here on they do not
    above = wanted * 0.0
    while high - low > 1:
        middle = low + (high - low) // 2
        weight, least, largest_below = _weight_from(base, vocab_size, temperature, most, middle, by_mass, chunk)
        if weight >= wanted:
            low = least
        else:
            high = largest_below + 1
            above = weight
    return low, above


@triton.jit
def _truncate(base, vocab_size, temperature, most, top_k, top_p, log_min_p, chunk: tl.constexpr):
    """(key from which on tokens stay, how many of those that have it: the first ones in order of id)."""
    low = _key((most.to(tl.float64) + log_min_p).to(tl.float32))
    num_tied = tl.sum(tl.zeros((chunk,), tl.int32), axis=0) + vocab_size
    if (top_k > 0) & (top_k < vocab_size):
        wanted = top_k.to(tl.float64)
        count, _, _ = _weight_from(base, vocab_size, temperature, most, low, False, chunk)
        if count >= wanted:
            low, _above = _edge(base, vocab_size, temperature, most, low, wanted, False, chunk)
    if top_p < 1:
        total, _, _ = _weight_from(base, vocab_size, temperature, most, low, True, chunk)
        wanted = top_p * total
        low, above = _edge(base, vocab_size, temperature, most, low, wanted, True, chunk)
        own = tl.exp(_value(low) - most).to(tl.float64)
        # The first number of them at which the mass is reached; the quotient may be rounded to either side of it.
        number = tl.maximum(tl.ceil((wanted - above) / own), 1.0)
        number = tl.where((number > 1) & (above + (number - 1) * own >= wanted), number - 1, number)
        number = tl.where(above + number * own < wanted, number + 1, number)
        num_tied = number.to(tl.int32)
    return low, num_tied


@triton.jit
def _bounds(base, vocab_size, temperature, edge, num_tied, chunk: tl.constexpr):
    """(least, tied, last) of a row whose tokens stay from the key ``edge`` on, of those that have it the first num_tied."""
    least = tl.full((chunk,), float("inf"), tl.float32)
    tied = tl.full((chunk,), float("-inf"), tl.float32)
    last = tl.zeros((chunk,), tl.int32) + vocab_size
    seen = tl.sum(tl.zeros((chunk,), tl.int32), axis=0)
    for begin in range(0, vocab_size, chunk):
        x, _, key = _chunk_keys(base, begin, vocab_size, temperature, chunk)
        is_tied = key == edge
        least = tl.minimum(least, tl.where(key >= edge, x, float("inf")))
        tied = tl.maximum(tied, tl.where(is_tied, x, float("-inf")))
        order = seen + tl.cumsum(is_tied.to(tl.int32), axis=0)
        last = tl.minimum(last, tl.where(is_tied & (order == num_tied), begin + tl.arange(0, chunk), vocab_size))
        seen += tl.sum(is_tied.to(tl.int32), axis=0)
    smallest = tl.min(least, axis=0)
    return smallest, tl.maximum(tl.max(tied, axis=0), smallest), tl.min(last, axis=0)  # min-p's edge is no token's


@triton.jit
def _row_stats(
    logits, temperatures, inv_temperatures, top_ks, top_ps, log_min_ps, log_normalisers, raw_log_normalisers, entropies, support,
    vocab_size, chunk: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inv_temperatures + row)
    base = logits + row * vocab_size
    most = tl.full((chunk,), float("-inf"), tl.float32)
    poison = tl.zeros((chunk,), tl.float32)
    for begin in range(0, vocab_size, chunk):
        v = begin + tl.arange(0, chunk)
        x = tl.load(base + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32)
        poison += tl.where(x == x, 0.0, 1.0)
        most = tl.maximum(most, x)
    most = tl.max(most, axis=0)
    if support is not None:
        temperature = tl.load(temperatures + row)
        top_k, top_p, log_min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(log_min_ps + row)
        least = tl.min(tl.full((chunk,), float("-inf"), tl.float32), axis=0)
        tied = least
        last = tl.sum(tl.zeros((chunk,), tl.int32), axis=0) + vocab_size
        is_law = (tl.sum(poison, axis=0) == 0) & (most > float("-inf")) & (most < float("inf"))
        if is_law & ((top_k > 0) | (top_p < 1) | (log_min_p > float("-inf"))):
            largest = tl.div_rn(most, temperature)
            edge, num_tied = _truncate(base, vocab_size, temperature, largest, top_k, top_p, log_min_p, chunk)
            least, tied, last = _bounds(base, vocab_size, temperature, edge, num_tied, chunk)
        tl.store(support + 3 * row, least.to(tl.int32, bitcast=True))
        tl.store(support + 3 * row + 1, tied.to(tl.int32, bitcast=True))
        tl.store(support + 3 * row + 2, last)
    weight = tl.zeros((chunk,), tl.float64)
    raw_weight = tl.zeros((chunk,), tl.float64)
    moment = tl.zeros((chunk,), tl.float64)
    for begin in range(0, vocab_size, chunk):
        v = begin + tl.arange(0, chunk)
        x = tl.load(base + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32)
        below = x - most
        scaled = below * inverse
        e = tl.exp(scaled)
        if support is not None:
            e = tl.where(_outside(x, v, least, tied, last), 0.0, e)
        weight += e
        raw_weight += tl.exp(below)
        moment += e * tl.where(e > 0, scaled, 0.0)  # 0 · −inf is 0 here, NaN stays
    total = tl.sum(weight, axis=0)
    log_total = tl.log(total).to(tl.float32)
    tl.store(log_normalisers + row, most * inverse + log_total)
    tl.store(raw_log_normalisers + row, most + tl.log(tl.sum(raw_weight, axis=0)).to(tl.float32))
    tl.store(entropies + row, (tl.log(total) - tl.sum(moment, axis=0) / total).to(tl.float32))
