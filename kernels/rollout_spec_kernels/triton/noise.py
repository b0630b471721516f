"""The core's counter-based noise in Triton: the bits of rollout_spec/noise.py, whose paragraph says what they are.

Gumbel noise is made from these bits by Triton's logarithm: it differs from the other implementations' in the last places.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout_spec.noise import Stream

TARGET, ACCEPT, RECOVER = (tl.constexpr(int(stream)) for stream in (Stream.TARGET, Stream.ACCEPT, Stream.RECOVER))


@triton.jit
def philox(seed, stream: tl.constexpr, position, block):
    """Philox4x64-10 (Salmon et al. 2011): the four words of counter blocks ``block`` (uint64), key (seed, stream), position int64."""
    zero = tl.zeros_like(block)
    first = zero + tl.full((1,), 0xD2E7470EE14C6C93, tl.uint64)
    second = zero + tl.full((1,), 0xCA5A826395121157, tl.uint64)
    first_step = tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
    second_step = tl.full((1,), 0xBB67AE8584CAA73B, tl.uint64)
    c0 = block
    c1 = zero + position.to(tl.uint64, bitcast=True)
    c2 = zero
    c3 = zero
    key0 = zero + seed.to(tl.uint64, bitcast=True)
    key1 = zero + tl.full((1,), stream, tl.uint64)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(first, c0)
        low0 = first * c0
        high2 = tl.umulhi(second, c2)
        low2 = second * c2
        c0 = high2 ^ c1 ^ key0
        c1 = low2
        c2 = high0 ^ c3 ^ key1
        c3 = low0
        key0 = key0 + first_step
        key1 = key1 + second_step
    return c0, c1, c2, c3


@triton.jit
def uniform(seed, stream: tl.constexpr, position, index):
    """Word ``index`` of the key's stream as a uniform of 53 bits in [0, 1), float64 (a scalar)."""
    block = (tl.zeros((1,), tl.int64) + index // 4).to(tl.uint64)
    c0, c1, c2, c3 = philox(seed, stream, position, block)
    which = index % 4
    word = tl.where(which == 0, c0, tl.where(which == 1, c1, tl.where(which == 2, c2, c3)))
    return tl.sum((word >> 11).to(tl.float64) * 1.1102230246251565e-16, axis=0)


@triton.jit
def accept_uniform(handed, index, seed, position, depth, trial):
    """The uniform of an acceptance test: entry ``index`` of those that were handed over, or (None) CounterNoise's of (depth, trial)."""
    if handed is not None:
        u = tl.load(handed + index)
    else:
        diagonal = depth + trial
        u = uniform(seed, ACCEPT, position, diagonal * (diagonal + 1) // 2 + trial)
    return u


@triton.jit
def recover_uniform(handed, index, seed, position, depth):
    """The uniform that the token at a depth is drawn with, handed over or (None) CounterNoise's."""
    if handed is not None:
        u = tl.load(handed + index)
    else:
        u = uniform(seed, RECOVER, position + depth, 0)
    return u


@triton.jit
def gumbel(word):
    """-log(-log1p(-u)), u = min((word + 1/2) / 2^32, 1 - 2^-24), of 32-bit words held in uint64: finite float32."""
    scaled = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(scaled, 0.99999994)
    # log1p(-u) = log(w) + (what rounding w = 1 - u lost) / w.
    w = 1.0 - u
    lost = (1.0 - w) - u
    return -tl.log(-(tl.log(w) + lost / w))
