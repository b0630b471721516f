"""Requests and completions: what goes into the engine and what comes out.

Shape legend: T output tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_spec.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Output tokens ``start:end`` were sampled from weights of this version."""

    weights_version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished (or aborted, or refused) request. All lists run over the output tokens, a resumed prefix included."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # [T], a stop token included
    text: str | None  # cut before a stop string; None without a tokenizer
    logprobs: tuple[float, ...]  # [T] of the model's own logits: no temperature, no filter
    processed_logprobs: tuple[float, ...]  # [T] of the distribution that was sampled from
    entropies: tuple[float, ...]  # [T] nats, of the distribution that was sampled from
    accepted_depths: tuple[int, ...]  # [T] depth at which the token was drafted and accepted; 0 = recovered, -1 = bonus or undrafted
    finish_reason: str  # stop | length | aborted | error
    stop_reason: int | str | None  # the stop token or string
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int  # output tokens that a drafter proposed
    seed: int
    weights_versions: tuple[VersionSpan, ...]
    error: str | None = None

    @staticmethod
    def refused(request: Request, request_id: str, message: str) -> Completion:
        """The completion of a request that was never run."""
        return Completion(
            request_id=request_id,
            prompt_token_ids=tuple(request.prompt_token_ids),
            token_ids=(),
            text=None,
            logprobs=(),
            processed_logprobs=(),
            entropies=(),
            accepted_depths=(),
            finish_reason="error",
            stop_reason=None,
            num_rounds=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            seed=-1 if request.seed is None else request.seed,
            weights_versions=(),
            error=message,
        )

    @property
    def weights_version(self) -> int:
        """The version that sampled the last token; -1 when there is none."""
        return self.weights_versions[-1].weights_version if self.weights_versions else -1


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample to generate. n samples of a prompt are n requests; they share the prompt's prefill.

    ``seed``: the same request with the same seed gives the same tokens with and without speculation, at any batch size
    (Gumbel-coupled verification; bitwise where the forward is row-invariant, docs/engine.md). Without one a random seed is taken.
    ``resume`` continues an aborted completion of the same request: its tokens and logprobs come first in the result.
    """

    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence tokens
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    request_id: str | None = None
    prompt_key: str | None = None  # default: a hash of the prompt's tokens
    resume: Completion | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens}")
        if isinstance(self.stop, str):
            raise ValueError("stop must be a tuple of strings, not one string")
        if any(not text for text in self.stop):
            raise ValueError("an empty stop string would end every request at once; leave it out")
        if self.resume is not None and tuple(self.resume.prompt_token_ids) != tuple(self.prompt_token_ids):
            raise ValueError("resume holds a completion of another prompt")


def prompt_key(prompt_token_ids: Sequence[int]) -> str:
    """A prompt's name in every epoch: a hash of its tokens."""
    return hashlib.sha256(",".join(map(str, prompt_token_ids)).encode()).hexdigest()[:16]
