"""Counter-based noise: every random number is a function of (seed, stream, absolute position, index), never of history.

Bits are Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with key (seed, stream) and counter
(block, position, 0, 0): block b yields four 64-bit words. Vocabulary noise takes 32-bit word v (low half of word v // 2
first) for token v; a GPU kernel that follows this paragraph draws the same bits.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Stream(enum.IntEnum):
    """Independent streams. Sharing one between two uses biases the output, so each use has its own."""

    TARGET = 0  # Gumbel noise of the target, shared with Gumbel-coupled drafters
    ACCEPT = 1  # acceptance tests
    RECOVER = 2  # recovered and bonus tokens
    DRAFT = 3  # drafters that sample independently of the target


def _words(seed: int, stream: Stream, position: int, num_words: int) -> np.ndarray:
    """The first num_words 64-bit words of a stream at one position."""
    # numpy steps the 256-bit counter before it makes a block, so it starts one below block 0.
    counter = ((position << 64) - 1) % (1 << 256)
    key = (int(stream) << 64) | (seed % (1 << 64))
    return np.random.Philox(counter=counter, key=key).random_raw(num_words)


def vocab_bits(seed: int, stream: Stream, position: int, vocab_size: int) -> np.ndarray:
    """[V] uint32: one word of noise for each token at one position."""
    return _words(seed, stream, position, (vocab_size + 1) // 2).astype("<u8", copy=False).view("<u4")[:vocab_size]


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, stream: Stream = Stream.TARGET) -> Tensor:
    """[R, V] float32 standard Gumbel noise, row r keyed by (seeds[r], stream, positions[r]).

    ``G = -log(E)`` with ``E = -log1p(-u)``, ``u = (word + 1/2) / 2**32``: small u, where large noise comes from, is exact in
    float32, and u that rounds to 1 gives G = -inf (such a token never wins; probability 2**-25 a token) instead of +inf.
    """
    words = np.empty((len(seeds), vocab_size), dtype=np.uint32)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        words[row] = vocab_bits(seed, stream, position, vocab_size)
    uniform = torch.from_numpy((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32))
    return uniform.neg_().log1p_().neg_().log_().neg_()


def uniforms(seeds: Sequence[int], positions: Sequence[int], stream: Stream, num: int = 1) -> Tensor:
    """[R, num] float64 uniforms in [0, 1) of 53 bits, row r keyed by (seeds[r], stream, positions[r])."""
    words = np.stack([_words(s, stream, p, num) for s, p in zip(seeds, positions, strict=True)]) if len(seeds) else np.empty((0, num), np.uint64)
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)
