"""CpuNoise: the core's counter-based noise in C++.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_spec.noise import Stream
from rollout_spec_kernels.library import checked, library


class CpuNoise:
    """rollout_spec.verify.randomness.KeyedNoise in C++. Raises BuildError where the kernels cannot be built."""

    def __init__(self) -> None:
        self._library = library()

    def gumbel_noise(self, seeds: Sequence[int], positions: Sequence[int], tokens: int | Tensor, stream: Stream = Stream.TARGET) -> Tensor:
        """[R, V] float32: rollout_spec.noise.gumbel_noise from the same bits; ``tokens`` is V, or the ids [V] that are wanted.

        The logarithms round differently from torch's, so the noise differs by a few units in the last place of E = exp(-G): runs
        that must agree token for token must draw it from one implementation.
        """
        keys = _keys(seeds, positions)
        ids = checked("tokens", tokens, torch.int64, tokens.shape[:1]) if isinstance(tokens, Tensor) else None
        num_tokens = tokens if isinstance(tokens, int) else tokens.numel()
        noise = torch.empty(len(seeds), num_tokens)
        address = None if ids is None else ids.data_ptr()
        self._library.rs_gumbel_noise(*keys, int(stream), address, noise.data_ptr(), len(seeds), num_tokens, torch.get_num_threads())
        return noise

    def uniforms(self, seeds: Sequence[int], positions: Sequence[int], stream: Stream, num: int = 1) -> Tensor:
        """[R, num] float64: rollout_spec.noise.uniforms, bit for bit."""
        keys = _keys(seeds, positions)
        out = torch.empty(len(seeds), num, dtype=torch.float64)
        self._library.rs_uniforms(*keys, int(stream), out.data_ptr(), len(seeds), num)
        return out

    def gumbel_argmax(self, log_probs: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
        """[R] int64 argmax_v (log p(v) + G(v)) of log_probs [R, V] float32, lowest token on ties; G is gumbel_noise's of the target."""
        num_rows, vocab_size = log_probs.shape
        log_probs = checked("log_probs", log_probs, torch.float32, (num_rows, vocab_size)).contiguous()
        if not len(seeds) == len(positions) == num_rows:
            raise ValueError(f"{num_rows} rows need as many seeds and positions; got {len(seeds)} and {len(positions)}")
        keys = _keys(seeds, positions)
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        self._library.rs_gumbel_argmax(
            log_probs.data_ptr(),
            *keys,
            int(Stream.TARGET),
            token_ids.data_ptr(),
            num_rows,
            vocab_size,
            torch.get_num_threads(),
        )
        return token_ids


def words(values: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    """The low 64 bits of each value, as C++ takes seeds and positions; for one value a tenth of the time of making a tensor."""
    return (ctypes.c_uint64 * len(values))(*values)


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_uint64], ctypes.Array[ctypes.c_uint64]]:
    if len(seeds) != len(positions):
        raise ValueError(f"seeds and positions must be of one length; got {len(seeds)} and {len(positions)}")
    return words(seeds), words(positions)
