"""Counter-based noise: every random number is a function of (seed, stream, absolute position, index), never of history.

Bits are Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") with key (seed, stream) and counter
(block, position, 0, 0): block b yields four 64-bit words. Vocabulary noise takes 32-bit word v (low half of word v // 2
first) for token v; a GPU kernel that follows this paragraph draws the same bits.

Shape legend: R rows, V vocabulary, W words a row, C counter blocks of all rows.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_WORD = 1 << 64
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF_BITS = np.uint64(32)
# Multipliers of counter words 0 and 2, and the increments of the two key words (Salmon et al. 2011, section 4.3; Random123).
_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_KEY_INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_NUM_ROUNDS = 10
# For many rows of few words, all rows at once in numpy beat one call of the C generator a row: .2 against .46 ms for 128 rows of
# 8 words; below 40 rows its fixed cost (.15 ms) loses. The bits are the same.
_MIN_VECTORISED_ROWS = 40
_MAX_VECTORISED_WORDS = 32


# Positions of a drafter's own stream: where the round starts, plus a multiple of LANE that tells the round's draws apart (the step of a
# chain, the parent node of a tree). Cousins must be independent, and so must a position drafted again in a later round, whose first
# draft block and traversal verification have already looked at.
LANE = 1 << 40


class Stream(enum.IntEnum):
    """Independent streams. Sharing one between two uses biases the output, so each use has its own."""

    TARGET = 0  # Gumbel noise of the target, shared with Gumbel-coupled drafters
    ACCEPT = 1  # acceptance tests
    RECOVER = 2  # recovered and bonus tokens
    DRAFT = 3  # drafters that sample independently of the target


def vocab_bits(seed: int, stream: Stream, position: int, vocab_size: int) -> np.ndarray:
    """[V] uint32: one word of noise for each token at one position."""
    return _halves(_RowGenerator(stream).words(seed, position, (vocab_size + 1) // 2), vocab_size)


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], tokens: int | Tensor, stream: Stream = Stream.TARGET) -> Tensor:
    """[R, V] float32 standard Gumbel noise, row r keyed by (seeds[r], stream, positions[r]); always finite.

    ``tokens`` is the vocabulary's size V, or ids [V] int64: then column c is the noise of token tokens[c].

    ``G = -log(E)`` with ``E = -log1p(-u)``, ``u = min((word + 1/2) / 2**32, 1 - 2**-24)`` in float32: small u, where large noise
    comes from, is exact to float32. The bound is the largest float32 below 1; without it u rounds to 1 with probability 2**-25
    and G = -inf, which would let a token of probability 0 tie with (and, coming first, beat) the only token of a greedy row.

    Seeds may be any int (taken modulo 2**64); positions must be in [0, 2**64), else ValueError. Row r does not depend on the
    other rows, bit for bit: each is computed in a buffer of its own, so vector lanes and thread chunks are the same for all.
    """
    _check_positions(positions)
    if isinstance(tokens, Tensor):
        vocab_size = int(tokens.max()) + 1 if tokens.numel() else 0
        return gumbel_noise(seeds, positions, vocab_size, stream)[:, tokens.cpu()]
    vocab_size = tokens
    noise = torch.empty(len(seeds), vocab_size)
    generator = _RowGenerator(stream)
    for row, seed, position in zip(noise, seeds, positions, strict=True):
        words = generator.words(seed, position, (vocab_size + 1) // 2)
        uniform = torch.from_numpy(_halves(words, vocab_size)).to(torch.float32)
        uniform.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
        row.copy_(uniform.neg_().log1p_().neg_().log_().neg_())
    return noise


def uniforms(seeds: Sequence[int], positions: Sequence[int], stream: Stream, num: int = 1) -> Tensor:
    """[R, num] float64 uniforms in [0, 1) of 53 bits, row r keyed by (seeds[r], stream, positions[r]).

    Entry i of a row is word i of its stream, whatever ``num`` is. Seeds and positions as for ``gumbel_noise``.
    """
    _check_positions(positions)
    if len(seeds) != len(positions):
        raise ValueError(f"{len(seeds)} seeds but {len(positions)} positions")
    if len(seeds) >= _MIN_VECTORISED_ROWS and num <= _MAX_VECTORISED_WORDS:
        words = _words_vectorised(seeds, stream, positions, num)
    else:
        generator = _RowGenerator(stream)
        rows = [generator.words(seed, position, num) for seed, position in zip(seeds, positions, strict=True)]
        words = np.stack(rows) if rows else np.empty((0, num), np.uint64)
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _check_positions(positions: Sequence[int]) -> None:
    for position in positions:
        if not 0 <= position < _WORD:
            raise ValueError(f"noise positions must be in [0, 2**64), got {position}")


def _halves(words: np.ndarray, num: int) -> np.ndarray:
    """The first num 32-bit words of 64-bit words, low half first on any machine."""
    return words.astype("<u8", copy=False).view("<u4")[:num].astype(np.uint32, copy=False)


class _RowGenerator:
    """numpy's C Philox, re-keyed for every row: setting its state costs a tenth of building a generator."""

    def __init__(self, stream: Stream) -> None:
        self._stream = int(stream)
        self._philox = np.random.Philox(key=0)

    def words(self, seed: int, position: int, num: int) -> np.ndarray:
        """[num] uint64, words 0 .. num - 1 of (seed, stream, position)."""
        # numpy steps the 256-bit counter before it makes a block, so it starts one below block 0.
        counter = [_WORD - 1, position - 1, 0, 0] if position > 0 else [_WORD - 1] * 4
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {"counter": np.array(counter, np.uint64), "key": np.array([seed % _WORD, self._stream], np.uint64)},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,  # empty
            "has_uint32": 0,
            "uinteger": 0,
        }
        words: np.ndarray = self._philox.random_raw(num)
        return words


def _words_vectorised(seeds: Sequence[int], stream: Stream, positions: Sequence[int], num: int) -> np.ndarray:
    """[R, num] uint64: the same words as ``_RowGenerator``, all rows at once."""
    num_blocks = (num + 3) // 4
    shape = (len(seeds), num_blocks)
    block = np.broadcast_to(np.arange(num_blocks, dtype=np.uint64), shape)
    position = np.broadcast_to(np.array(positions, dtype=np.uint64)[:, None], shape)
    key = np.broadcast_to(np.array([seed % _WORD for seed in seeds], dtype=np.uint64)[:, None], shape)
    words = philox_4x64(block.reshape(-1), position.reshape(-1), key.reshape(-1), int(stream))
    return words.reshape(len(seeds), num_blocks * 4)[:, :num]


def philox_4x64(counter_0: np.ndarray, counter_1: np.ndarray, key_0: np.ndarray, key_1: int) -> np.ndarray:
    """Philox4x64-10 of the counters (counter_0, counter_1, 0, 0) and keys (key_0, key_1): [C] uint64 each -> [C, 4] uint64."""
    # The two halves of a round run side by side: even = counter words (0, 2), odd = counter words (1, 3), key = both key words.
    even = np.stack([counter_0, np.zeros_like(counter_0)])  # [2, C]
    odd = np.stack([counter_1, np.zeros_like(counter_1)])
    key = np.stack([key_0, np.full_like(key_0, key_1)])
    increments = np.array(_KEY_INCREMENTS, dtype=np.uint64)[:, None]
    for round_index in range(_NUM_ROUNDS):
        if round_index:
            key += increments
        high, low = _multiply(even)
        # Word 0 takes the high half of word 2's product, word 2 that of word 0's; the low halves cross over likewise.
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1)


def _multiply(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """High and low 64 bits of _MULTIPLIERS * words [2, C], by 32-bit halves (numpy has no 128-bit product)."""
    low, high = words & _LOW_HALF, words >> _HALF_BITS
    factor_low, factor_high = _MULTIPLIERS & _LOW_HALF, _MULTIPLIERS >> _HALF_BITS
    cross = low * factor_high
    # At most (2**32 - 1)**2 + 2 * (2**32 - 1) = 2**64 - 1: the sum cannot overflow.
    middle = high * factor_low + ((low * factor_low) >> _HALF_BITS) + (cross & _LOW_HALF)
    return high * factor_high + (cross >> _HALF_BITS) + (middle >> _HALF_BITS), words * _MULTIPLIERS
