"""TrackedRequests: vLLM's running requests as drafters, budgets and noise see them.

Shape legend: T tokens of a request so far.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_spec.drafter import RequestView
from rollout_spec.engine.request import prompt_key
from rollout_spec.sampling import SamplingParams


@dataclass(kw_only=True, eq=False)
class Tracked:
    """One running request. ``tokens`` grow with what is sampled; a stop that the worker can see ends them."""

    request_id: str
    tokens: list[int]  # prompt + output; the view holds the same list
    num_prompt: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    min_tokens: int
    is_free: bool  # no grammar
    view: RequestView
    finish_reason: str | None = None  # stop | length, as far as the worker can see it
    drafter_knows: bool = False
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    entropy_sum: float = 0.0  # nats, over its tokens
    first_version: int = -1  # of the weights that sampled its first token

    @property
    def may_draft(self) -> bool:
        """Not while a grammar or a least length holds: there what vLLM does with drafts depends on their tokens, or is not its own law.

        A grammar cuts a draft at the first token it refuses, which biases what follows; a least length is counted without the drafts.
        """
        return self.is_free and self.finish_reason is None and len(self.tokens) - self.num_prompt >= self.min_tokens

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit."""
        return self.max_tokens - (len(self.tokens) - self.num_prompt)

    def append(self, sampled: Sequence[int]) -> int:
        """Take sampled tokens up to the first stop; returns how many were kept."""
        for kept, token in enumerate(sampled, start=1):
            self.tokens.append(token)
            if token in self.stop_token_ids:
                self.finish_reason = "stop"
            elif self.remaining <= 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return kept
        return len(sampled)


@dataclass(kw_only=True)
class TrackedRequests:
    """Follows the runner's own record of requests. ``max_model_len``: tokens that no request may exceed."""

    max_model_len: int
    _known: dict[str, Tracked] = field(default_factory=dict)

    def __getitem__(self, request_id: str) -> Tracked:
        return self._known[request_id]

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._known.values())

    def enter(self, request_ids: Sequence[str], states: Any) -> list[Tracked]:
        """Those of a batch, in its order; states: the runner's ``requests``. New ones begin with all that they have so far."""
        for request_id in request_ids:
            if request_id not in self._known:
                self._known[request_id] = track(states[request_id], self.max_model_len)
        return [self._known[request_id] for request_id in request_ids]

    def take_finished(self, states: Any) -> list[Tracked]:
        """Those that came to their end, and those that the runner no longer knows."""
        over = [name for name, request in self._known.items() if request.finish_reason is not None or name not in states]
        gone = [self._known.pop(request_id) for request_id in over]
        for request in gone:
            # A stop string is found behind the worker's back, and looks like an abort from here.
            request.finish_reason = request.finish_reason or "aborted"
        return gone


def track(state: Any, max_model_len: int) -> Tracked:
    """From vLLM's CachedRequestState."""
    prompt = list(state.prompt_token_ids or ())
    tokens = [*prompt, *state.output_token_ids]
    given = state.sampling_params
    sampling = SamplingParams(temperature=given.temperature, top_k=max(given.top_k, 0), top_p=given.top_p, min_p=given.min_p)
    return Tracked(
        request_id=state.req_id,
        tokens=tokens,
        num_prompt=len(prompt),
        max_tokens=min(given.max_tokens or max_model_len, max_model_len - len(prompt)),
        stop_token_ids=frozenset((*(given.stop_token_ids or ()), *(() if given.eos_token_id is None else (given.eos_token_id,)))),
        min_tokens=given.min_tokens,
        is_free=state.prompt_token_ids is not None and given.structured_outputs is None,
        view=RequestView(
            request_id=state.req_id,
            prompt_key=prompt_key(prompt),
            token_ids=tokens,
            num_prompt_tokens=len(prompt),
            seed=secrets.randbits(63) if given.seed is None else given.seed,
            sampling=sampling,
        ),
    )
