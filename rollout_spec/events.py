"""Events: what the code says happened. Only sinks format, count or log them."""

from __future__ import annotations

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
    reason: str


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


Event = RoundEvent | RequestEvent | PrefillEvent | WeightSyncEvent | BudgetEvent | SinkEvent | TrainEvent


class EventSink(Protocol):
    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...
