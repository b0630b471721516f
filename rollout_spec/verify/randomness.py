"""VerifyNoise: where verifiers get their randomness from, always passed in.

Shape legend: B requests, R rows asked for, D depths, T trials, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rollout_spec.noise import Stream, gumbel_noise, uniforms
from rollout_spec.verify.categorical import gumbel_argmax, row_slices


class KeyedNoise(Protocol):
    """Noise by key: this package's own in numpy and torch, or kernels that draw the same bits."""

    def uniforms(self, seeds: Sequence[int], positions: Sequence[int], stream: Stream, num: int = 1) -> Tensor:
        """[R, num] float64: noise.uniforms."""

    def gumbel_argmax(self, log_probs: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
        """[R] int64: keyed_gumbel_argmax."""


class NumpyNoise:
    """KeyedNoise without kernels."""

    def uniforms(self, seeds: Sequence[int], positions: Sequence[int], stream: Stream, num: int = 1) -> Tensor:
        return uniforms(seeds, positions, stream, num)

    def gumbel_argmax(self, log_probs: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
        return keyed_gumbel_argmax(log_probs, seeds, positions)


def keyed_gumbel_argmax(log_probs: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """[R] int64: the race of log_probs [R, V] with noise.gumbel_noise of the TARGET stream, a few rows at a time."""
    parts = []
    for part in row_slices(log_probs, log_probs.shape[1]):
        noise = gumbel_noise(seeds[part], positions[part], log_probs.shape[1], Stream.TARGET).to(log_probs.device)
        parts.append(gumbel_argmax(log_probs[part], noise))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=log_probs.device)


class VerifyNoise(Protocol):
    """Depth d is the position of the d-th token a round emits (0 = the first). Every number is used for one decision only."""

    def accept(self, requests: Tensor, depths: Tensor, trial: int) -> Tensor:
        """[R] float64 uniforms in [0, 1) for the acceptance tests of requests [R] at depths [R]."""

    def recover(self, requests: Tensor, depths: Tensor) -> Tensor:
        """[R] float64 uniforms in [0, 1) from which recovered, bonus and exactly matched tokens are drawn."""

    def gumbel_argmax(self, requests: Tensor, depths: Tensor, log_probs: Tensor) -> Tensor:
        """[R] int64: argmax_v (log p(v) + G(v)) of log_probs [R, V], G the target's standard Gumbel noise of that request and depth."""


class CounterNoise:
    """Noise of one round as a function of each request's seed and the absolute position of the round's first token.

    A token's own draw (``recover``, ``gumbel_argmax``) is keyed by the token's absolute position: it is used once, by the round that
    emits the token, so any way of cutting a text into rounds draws the same numbers.

    Acceptance tests are keyed by where the *round* starts, then by (depth, trial) within it. They must not be keyed by the absolute
    position of the token under test: block verification looks at uniforms beyond the last token it emits, and the next round would
    test the same uniforms again, now knowing that they were large (tests/statistical plants that bug).
    """

    def __init__(self, seeds: Sequence[int], positions: Sequence[int], keyed: KeyedNoise | None = None) -> None:
        if len(seeds) != len(positions):
            raise ValueError(f"one seed and one position for each request; got {len(seeds)} and {len(positions)}")
        self.seeds, self.positions, self.keyed = seeds, positions, keyed or NumpyNoise()
        self._accept = torch.empty(len(seeds), 0, dtype=torch.float64)

    def accept(self, requests: Tensor, depths: Tensor, trial: int) -> Tensor:
        """[R] word (depth, trial) of the round's ACCEPT stream, counted along diagonals so that neither needs a bound."""
        diagonal = depths + trial
        words = diagonal * (diagonal + 1) // 2 + trial
        if words.numel() and int(words.max()) >= self._accept.shape[1]:
            num_words = max(16, 2 * int(words.max()))
            self._accept = self.keyed.uniforms(self.seeds, self.positions, Stream.ACCEPT, num_words).to(depths.device)
        return self._accept[requests, words]

    def recover(self, requests: Tensor, depths: Tensor) -> Tensor:
        """[R] the RECOVER stream at the tokens' absolute positions."""
        return self.keyed.uniforms(*self._keys(requests, depths), Stream.RECOVER)[:, 0].to(depths.device)

    def gumbel_argmax(self, requests: Tensor, depths: Tensor, log_probs: Tensor) -> Tensor:
        """[R] int64, with the TARGET stream at the tokens' absolute positions: the noise Gumbel-coupled drafters use too."""
        return self.keyed.gumbel_argmax(log_probs, *self._keys(requests, depths))

    def _keys(self, requests: Tensor, depths: Tensor) -> tuple[list[int], list[int]]:
        rows = requests.tolist()
        positions = [self.positions[row] + depth for row, depth in zip(rows, depths.tolist(), strict=True)]
        return [self.seeds[row] for row in rows], positions


class DenseNoise:
    """Noise given as tensors, for tests and for kernels that draw it themselves; ask only for what was given."""

    def __init__(self, *, accept: Tensor | None = None, recover: Tensor | None = None, gumbel: Tensor | None = None) -> None:
        self._accept = accept  # [B, D, T]
        self._recover = recover  # [B, D]
        self.gumbel = gumbel  # [B, D, V], for kernels that run the race themselves

    def accept(self, requests: Tensor, depths: Tensor, trial: int) -> Tensor:
        assert self._accept is not None, "no acceptance uniforms were given"
        return self._accept[requests, depths, trial]

    def recover(self, requests: Tensor, depths: Tensor) -> Tensor:
        assert self._recover is not None, "no recovery uniforms were given"
        return self._recover[requests, depths]

    def gumbel_argmax(self, requests: Tensor, depths: Tensor, log_probs: Tensor) -> Tensor:
        assert self.gumbel is not None, "no Gumbel noise was given"
        return gumbel_argmax(log_probs, self.gumbel[requests, depths])
