"""The engine's own record of a running request, and the rules by which it stops.

Shape legend: T output tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_spec.drafter import RequestView
from rollout_spec.engine.kv import Slot
from rollout_spec.engine.request import Completion, Request, VersionSpan
from rollout_spec.sampling import is_plain

RECOVERED, UNDRAFTED = 0, -1  # Completion.accepted_depths of tokens that no drafter proposed

Detokenize = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class Emission:
    """One emitted token and what is known of it."""

    token_id: int
    logprob: float
    processed_logprob: float
    entropy: float
    accepted_depth: int


@dataclass(kw_only=True, eq=False)
class RunningRequest:
    """One request while it is waiting, filling its KV, or decoding."""

    request: Request
    request_id: str
    prompt_key: str
    seed: int
    stop_token_ids: frozenset[int]
    tokens: list[int]  # prompt + output; all but the last have (or will have) their K/V in the slot
    num_prompt: int
    slot: Slot | None = None
    num_cached: int = 0  # tokens whose K/V is in the slot
    emissions: list[Emission] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    num_rounds: int = 0
    num_draft_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str | None = None
    error: str | None = None
    drafter_knows: bool = False  # the drafter was told that the request runs
    # What the drafter sees: one live object a request, tokens shared, so that building a round's context costs nothing.
    view: RequestView = field(init=False)
    is_plain: bool = field(init=False)  # sampling.is_plain, asked in every round

    def __post_init__(self) -> None:
        self.is_plain = is_plain(self.request.sampling)
        self.view = RequestView(
            request_id=self.request_id,
            prompt_key=self.prompt_key,
            token_ids=self.tokens,
            num_prompt_tokens=self.num_prompt,
            seed=self.seed,
            sampling=self.request.sampling,
        )

    def take_up(self, earlier: Completion) -> None:
        """Go on from an aborted completion: its tokens and what is known of them come first."""
        columns = (earlier.token_ids, earlier.logprobs, earlier.processed_logprobs, earlier.entropies, earlier.accepted_depths)
        self.emissions = [
            Emission(token_id=token, logprob=raw, processed_logprob=processed, entropy=entropy, accepted_depth=depth)
            for token, raw, processed, entropy, depth in zip(*columns, strict=True)
        ]
        self.tokens.extend(earlier.token_ids)
        self.spans = list(earlier.weights_versions)
        self.num_rounds, self.num_draft_tokens = earlier.num_rounds, earlier.num_draft_tokens

    def fail(self, message: str) -> None:
        """End this request with an error; the others go on."""
        if self.error is None:
            self.finish_reason, self.error = "error", message

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def remaining(self) -> int:
        return self.request.max_new_tokens - (len(self.tokens) - self.num_prompt)

    @property
    def is_ready(self) -> bool:
        """True when only the last token is missing from the KV: the request can take part in a round."""
        return self.slot is not None and self.num_cached == len(self.tokens) - 1

    @property
    def last_entropy(self) -> float:
        return self.emissions[-1].entropy if self.emissions else math.nan

    def append(self, emissions: Sequence[Emission], weights_version: int, detokenize: Detokenize | None) -> int:
        """Take emitted tokens up to the first stop; returns how many were kept. Sets finish_reason when the request is done."""
        kept = 0
        for emission in emissions:
            self.tokens.append(emission.token_id)
            self.emissions.append(emission)
            kept += 1
            if emission.token_id in self.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", emission.token_id
            elif self.request.stop and detokenize is not None and self._find_stop_string(detokenize):
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        self._extend_span(kept, weights_version)
        return kept

    def _extend_span(self, num_new: int, weights_version: int) -> None:
        end = len(self.tokens) - self.num_prompt
        if num_new == 0:
            return
        if self.spans and self.spans[-1].weights_version == weights_version:
            self.spans[-1] = VersionSpan(weights_version=weights_version, start=self.spans[-1].start, end=end)
        else:
            self.spans.append(VersionSpan(weights_version=weights_version, start=end - num_new, end=end))

    def _find_stop_string(self, detokenize: Detokenize) -> bool:
        """Look for a stop string that ends in the newest token; only a tail long enough to hold one is decoded."""
        longest = max(len(text) for text in self.request.stop)
        output = self.output
        # A token is at least one byte, a character at most four: this many tokens cover the longest stop string.
        tail = detokenize(output[-(4 * longest + 1) :])
        if not any(text in tail for text in self.request.stop):
            return False
        whole = detokenize(output)
        found = [(whole.index(text), text) for text in self.request.stop if text in whole]
        if not found:
            return False
        begin, self.stop_reason = min(found)
        self.text = whole[:begin]
        return True

    def completion(self, detokenize: Detokenize | None) -> Completion:
        output = tuple(self.output)
        text = self.text
        if text is None and detokenize is not None:
            text = detokenize(output[:-1] if self.finish_reason == "stop" and output and output[-1] in self.stop_token_ids else output)
        return Completion(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.tokens[: self.num_prompt]),
            token_ids=output,
            text=text,
            logprobs=tuple(e.logprob for e in self.emissions),
            processed_logprobs=tuple(e.processed_logprob for e in self.emissions),
            entropies=tuple(e.entropy for e in self.emissions),
            accepted_depths=tuple(e.accepted_depth for e in self.emissions),
            finish_reason=self.finish_reason or "aborted",
            stop_reason=self.stop_reason,
            num_rounds=self.num_rounds,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=sum(e.accepted_depth > 0 for e in self.emissions),
            seed=self.seed,
            weights_versions=tuple(self.spans),
            error=self.error,
        )


def last_tokens(running: Sequence[RunningRequest]) -> Tensor:
    """[B] the root of each request's next round."""
    return torch.tensor([request.tokens[-1] for request in running])


def slot_indices(running: Sequence[RunningRequest]) -> Tensor:
    """[B] cache slots of requests that have one."""
    return torch.tensor([request.slot.index for request in running if request.slot is not None])
