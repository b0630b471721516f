"""Logits -> target distribution: every logits processor, applied row by row with that row's own history.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

# (history [T] int64: prompt + path to this node, logits [V] float32) -> logits [V]; must not modify its inputs.
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled from the model's logits; the order of application is vLLM's (see process_logits)."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt + output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
