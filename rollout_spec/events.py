"""Events: what the code says happened. Only sinks format, count or log them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

_FIRST_CONTEXT_EDGE = 64


def context_bucket(context_length: int) -> int:
    """Index of the bucket that counts by context length use: 0 up to 64 tokens, 1 up to 128, 2 up to 256, ..., doubling."""
    return (max(context_length - 1, 0) // _FIRST_CONTEXT_EDGE).bit_length()


def context_edge(bucket: int) -> int:
    """The longest context of that bucket."""
    return _FIRST_CONTEXT_EDGE << bucket


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """One draft -> verify -> commit round of the running batch. Lists by depth count from depth 1."""

    round_index: int
    num_requests: int
    num_draft_tokens: int
    num_accepted_tokens: int  # drafted tokens that requests kept: what a stop cut off is not counted, here as in RequestEvent
    num_emitted_tokens: int  # those + one recovered or bonus token for each request that no stop cut short
    drafted_by_depth: tuple[int, ...]  # requests that had a node at this depth and reached it
    accepted_by_depth: tuple[int, ...]  # of those, requests whose verifier accepted one, kept or not
    mean_accept_prob_by_depth: tuple[float, ...]
    mean_entropy: float  # nats, over emitted positions
    draft_s: float
    target_s: float
    verify_s: float
    other_s: float
    weights_version: int
    drafter: str
    verifier: str
    # By context length, entry i for ``context_bucket`` i; empty in logs of versions that did not count them.
    rounds_by_context: tuple[int, ...] = ()  # requests of this round
    drafted_by_context: tuple[int, ...] = ()  # their draft tokens
    accepted_by_context: tuple[int, ...] = ()  # those that they kept
    draft_depth: int = -1  # of the deepest node that was drafted, reached or not; -1 = the log does not say
    # What the budget's controller expected; NaN where it predicts nothing, and in logs of versions that did not.
    predicted_accept_prob: float = math.nan  # of the first drafted token, mean over the requests that had one
    predicted_accepted_tokens: float = math.nan
    predicted_round_s: float = math.nan
    budget_s: float = math.nan  # deciding and learning: in draft_s and other_s too


@dataclass(frozen=True, kw_only=True)
class RequestEvent:
    request_id: str
    finish_reason: str  # stop | length | aborted | error
    num_prompt_tokens: int
    num_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    weights_version: int
    error: str | None = None
    oldest_weights_version: int = -1  # that sampled its first token; -1 = it has none, or the log does not say


@dataclass(frozen=True, kw_only=True)
class PrefillEvent:
    num_prompts: int
    num_tokens: int
    num_shared_tokens: int  # prompt tokens whose KV was copied from another slot instead of computed
    target_s: float


@dataclass(frozen=True, kw_only=True)
class WeightSyncEvent:
    role: str  # target | drafter: its own weights | drafter_head: what it uses of the target's, after a sync of the target
    version: int
    num_tensors: int
    checksum: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class BudgetEvent:
    round_index: int
    controller: str
    draft_lengths: tuple[int, ...]
    reason: str  # docs/budget.md lists them
    # What was expected of it; empty and NaN where the controller predicts nothing, and in older logs.
    predicted_accept_by_depth: tuple[float, ...] = ()
    predicted_accepted_tokens: float = math.nan  # all requests together
    predicted_round_s: float = math.nan
    predicted_gain: float = math.nan  # tokens a second over those of the same round without a draft, minus 1


@dataclass(frozen=True, kw_only=True)
class DrafterStaleEvent:
    """The drafter accepts clearly less than when its weights were new, and the policy's entropy does not explain it."""

    round_index: int
    drafter: str
    weights_version: int  # of the policy
    accept_prob: float  # of a first drafted token, at the mean entropy of now
    reference_accept_prob: float  # what it was at that entropy when the drafter's weights were new
    mean_entropy: float


@dataclass(frozen=True, kw_only=True)
class SinkEvent:
    """What became of the events given to one sink so far; emitted when it loses some, and at the end."""

    sink: str
    num_delivered: int
    num_dropped: int  # its queue was full, or it was closed before they were delivered
    num_failed: int  # it raised an error


@dataclass(frozen=True, kw_only=True)
class TrainEvent:
    step: int
    loss: float
    metrics: dict[str, float]
    role: str = "drafter"  # whose training: drafter | policy


Event = RoundEvent | RequestEvent | PrefillEvent | WeightSyncEvent | BudgetEvent | DrafterStaleEvent | SinkEvent | TrainEvent


class EventSink(Protocol):
    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...
