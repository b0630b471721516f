"""Events: what the code says happened. Only sinks format, count or log them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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


@dataclass(frozen=True, kw_only=True)
class PrefillEvent:
    num_prompts: int
    num_tokens: int
    num_shared_tokens: int  # prompt tokens whose KV was copied from another slot instead of computed
    target_s: float


@dataclass(frozen=True, kw_only=True)
class WeightSyncEvent:
    role: str  # target | drafter
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
class TrainEvent:
    step: int
    loss: float
    metrics: dict[str, float]


Event = RoundEvent | RequestEvent | PrefillEvent | WeightSyncEvent | BudgetEvent | TrainEvent


class EventSink(Protocol):
    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...
