"""VerifyNoise: where verifiers get their randomness from, always passed in.

Shape legend: B requests, R rows asked for, D depths, T trials, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rollout_spec.noise import Stream, gumbel_noise, uniforms

GumbelNoise = Callable[[Sequence[int], Sequence[int], int, Stream], Tensor]  # seeds [R], positions [R], V, stream -> [R, V]


class VerifyNoise(Protocol):
    """Depth d is the position of the d-th token a round emits (0 = the first). Every number is used for one decision only."""

    def accept(self, requests: Tensor, depths: Tensor, trial: int) -> Tensor:
        """[R] float64 uniforms in [0, 1) for the acceptance tests of requests [R] at depths [R]."""

    def recover(self, requests: Tensor, depths: Tensor) -> Tensor:
        """[R] float64 uniforms in [0, 1) from which recovered, bonus and exactly matched tokens are drawn."""

    def gumbel(self, requests: Tensor, depths: Tensor) -> Tensor:
        """[R, V] standard Gumbel noise of the target."""


class CounterNoise:
    """Noise of one round as a function of each request's seed and the absolute position of the round's first token.

    A token's own draw (``recover``, ``gumbel``) is keyed by the token's absolute position: it is used once, by the round that
    emits the token, so any way of cutting a text into rounds draws the same numbers.

    Acceptance tests are keyed by where the *round* starts, then by (depth, trial) within it. They must not be keyed by the absolute
    position of the token under test: block verification looks at uniforms beyond the last token it emits, and the next round would
    test the same uniforms again, now knowing that they were large (tests/statistical plants that bug).
    """

    def __init__(
        self,
        seeds: Sequence[int],
        positions: Sequence[int],
        vocab_size: int,
        gumbel_noise: GumbelNoise = gumbel_noise,
    ) -> None:
        if len(seeds) != len(positions):
            raise ValueError(f"one seed and one position for each request; got {len(seeds)} and {len(positions)}")
        self._seeds, self._positions, self._vocab_size = seeds, positions, vocab_size
        self._gumbel_noise = gumbel_noise  # noise.gumbel_noise, or a kernel that draws the same bits
        self._accept = torch.empty(len(seeds), 0, dtype=torch.float64)

    def accept(self, requests: Tensor, depths: Tensor, trial: int) -> Tensor:
        """[R] word (depth, trial) of the round's ACCEPT stream, counted along diagonals so that neither needs a bound."""
        diagonal = depths + trial
        words = diagonal * (diagonal + 1) // 2 + trial
        if words.numel() and int(words.max()) >= self._accept.shape[1]:
            num_words = max(16, 2 * int(words.max()))
            self._accept = uniforms(self._seeds, self._positions, Stream.ACCEPT, num_words).to(depths.device)
        return self._accept[requests, words]

    def recover(self, requests: Tensor, depths: Tensor) -> Tensor:
        """[R] the RECOVER stream at the tokens' absolute positions."""
        return uniforms(*self._keys(requests, depths), Stream.RECOVER)[:, 0].to(depths.device)

    def gumbel(self, requests: Tensor, depths: Tensor) -> Tensor:
        """[R, V] float32, the TARGET stream at the tokens' absolute positions: the noise Gumbel-coupled drafters use too."""
        return self._gumbel_noise(*self._keys(requests, depths), self._vocab_size, Stream.TARGET).to(depths.device)

    def _keys(self, requests: Tensor, depths: Tensor) -> tuple[list[int], list[int]]:
        rows = requests.tolist()
        positions = [self._positions[row] + depth for row, depth in zip(rows, depths.tolist(), strict=True)]
        return [self._seeds[row] for row in rows], positions


class DenseNoise:
    """Noise given as tensors, for tests and for kernels that draw it themselves; ask only for what was given."""

    def __init__(self, *, accept: Tensor | None = None, recover: Tensor | None = None, gumbel: Tensor | None = None) -> None:
        self._accept = accept  # [B, D, T]
        self._recover = recover  # [B, D]
        self._gumbel = gumbel  # [B, D, V]

    def accept(self, requests: Tensor, depths: Tensor, trial: int) -> Tensor:
        assert self._accept is not None, "no acceptance uniforms were given"
        return self._accept[requests, depths, trial]

    def recover(self, requests: Tensor, depths: Tensor) -> Tensor:
        assert self._recover is not None, "no recovery uniforms were given"
        return self._recover[requests, depths]

    def gumbel(self, requests: Tensor, depths: Tensor) -> Tensor:
        assert self._gumbel is not None, "no Gumbel noise was given"
        return self._gumbel[requests, depths]
