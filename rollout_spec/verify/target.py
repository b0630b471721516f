"""TargetRows: the target's distributions, computed only at the rows a verifier reaches.

Shape legend: B requests, N nodes, R rows asked for, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout_spec.verify.categorical import draw_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """What the target says of tokens that were emitted."""

    raw_logprobs: Tensor  # [R] log-softmax of the model's own logits
    processed_logprobs: Tensor  # [R] after every logits processor
    entropies: Tensor  # [R] nats, of the processed distribution


@dataclass(frozen=True, kw_only=True, eq=False)
class AllRows:
    """A target's rows as one block: request b's root is row roots[b], its node n row roots[b] + 1 + n."""

    log_probs: Tensor  # [R, V] float32 or float64
    roots: Tensor  # [B] int64
    entropies: Tensor | None  # [R] nats, where log_probs are those of the model's own logits too and so tell a token's scores; else None


class TargetRows(Protocol):
    """The processed target distribution after any node of a batch of trees. A row asked for twice should be cached."""

    @property
    def batch_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def log_probs(self, requests: Tensor, nodes: Tensor) -> Tensor:
        """[R, V] float32 or float64 normalised log-probabilities after nodes [R] (NO_PARENT = the root) of requests [R].

        The caller does not modify the result.
        """

    def all_rows(self, *, needed: bool) -> AllRows | None:
        """Every row at once. None if that costs more than the rows a verifier reaches, unless all are needed, or if they lie scattered."""

    def draw(self, log_probs: Tensor, uniforms: Tensor) -> Tensor:
        """[R] int64: one token a row of log_probs [R, V] (rows that log_probs returned) by inverse CDF from uniforms [R] float64."""

    def score(self, requests: Tensor, nodes: Tensor, token_ids: Tensor) -> TokenScores | None:
        """Scores of token_ids [R] emitted after nodes [R]; None if the model's own logits are unknown."""


class DenseTarget:
    """A target given as probabilities: row 0 of a request is its root, row n + 1 comes after node n."""

    def __init__(self, target_probs: Tensor) -> None:
        if target_probs.ndim != 3:
            raise ValueError(f"target_probs must be [B, N + 1, V]; got {tuple(target_probs.shape)}")
        self.target_probs = target_probs  # [B, N + 1, V]
        self.batch_size, self.vocab_size = target_probs.shape[0], target_probs.shape[2]

    def log_probs(self, requests: Tensor, nodes: Tensor) -> Tensor:
        """[R, V] logarithms of the rows."""
        return self.target_probs[requests, nodes + 1].log()

    def all_rows(self, *, needed: bool) -> AllRows:  # noqa: ARG002 - the protocol's signature
        """Logarithms of all rows; there is nothing to save."""
        num_requests, num_rows, _ = self.target_probs.shape
        roots = torch.arange(num_requests, device=self.target_probs.device) * num_rows
        return AllRows(log_probs=self.target_probs.log().flatten(0, 1), roots=roots, entropies=None)

    def draw(self, log_probs: Tensor, uniforms: Tensor) -> Tensor:
        """[R] int64 by categorical.inverse_cdf."""
        return draw_tokens(log_probs, uniforms)

    def score(self, requests: Tensor, nodes: Tensor, token_ids: Tensor) -> TokenScores | None:  # noqa: ARG002 - the protocol's signature
        """None: probabilities do not tell the model's own logits."""
        return None
