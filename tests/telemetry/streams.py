"""Event streams whose every figure is known: made by a rule, not by a model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollout_spec.events import Event, PrefillEvent, RequestEvent, RoundEvent, WeightSyncEvent
from rollout_spec.sinks.jsonl import JsonlSink


def a_round(index: int = 0, **changes: object) -> RoundEvent:
    """Two requests, three drafted tokens each; one kept two, the other none."""
    fields: dict[str, object] = {
        "round_index": index,
        "num_requests": 2,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 2,
        "num_emitted_tokens": 4,
        "drafted_by_depth": (2, 1, 1),
        "accepted_by_depth": (1, 1, 0),
        "mean_accept_prob_by_depth": (0.5, 0.75, 0.25),
        "mean_entropy": 1.0,
        "draft_s": 0.002,
        "target_s": 0.014,
        "verify_s": 0.003,
        "other_s": 0.001,
        "weights_version": 0,
        "drafter": "suffix",
        "verifier": "block",
        "rounds_by_context": (1, 1),
        "drafted_by_context": (3, 3),
        "accepted_by_context": (2, 0),
        "draft_depth": 3,
    }
    return RoundEvent(**{**fields, **changes})  # type: ignore[arg-type]


def plain_round(index: int = 0, *, num_requests: int = 2, seconds: float = 0.015, **changes: object) -> RoundEvent:
    """Nothing drafted: one token a request."""
    fields: dict[str, object] = {
        "num_requests": num_requests,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "num_emitted_tokens": num_requests,
        "drafted_by_depth": (),
        "accepted_by_depth": (),
        "mean_accept_prob_by_depth": (),
        "draft_s": 0.0,
        "target_s": seconds,
        "verify_s": 0.0,
        "other_s": 0.0,
        "rounds_by_context": (num_requests,),
        "drafted_by_context": (0,),
        "accepted_by_context": (0,),
        "draft_depth": 0,
    }
    return a_round(index, **{**fields, **changes})


def a_request(accepted: int = 2, rounds: int = 2, **changes: object) -> RequestEvent:
    fields: dict[str, object] = {
        "request_id": "r",
        "finish_reason": "length",
        "num_prompt_tokens": 5,
        "num_tokens": accepted + rounds,
        "num_rounds": rounds,
        "num_draft_tokens": 3 * rounds,
        "num_accepted_tokens": accepted,
        "weights_version": 0,
        "oldest_weights_version": 0,
    }
    return RequestEvent(**{**fields, **changes})  # type: ignore[arg-type]


def story(
    num_rounds: int,
    *,
    accept: Sequence[float],
    entropy: Sequence[float],
    draft_length: int = 3,
    num_requests: int = 4,
    plain_every: int = 8,
    drafter_follows: bool = False,
    seed: int = 0,
) -> Iterator[Event]:
    """A run of as many steps (policy versions) as ``accept`` has entries: acceptance probability and entropy of each step.

    A drafted round takes 20 ms, one without a draft 15 ms; every ``plain_every``-th has no draft.
    """
    draw = random.Random(seed)
    yield PrefillEvent(num_prompts=num_requests, num_tokens=40, num_shared_tokens=20, target_s=0.05)
    per_step = num_rounds // len(accept)
    for step, (alpha, nats) in enumerate(zip(accept, entropy, strict=True)):
        yield WeightSyncEvent(role="target", version=step, num_tensors=9, checksum=f"{step:04x}beef", seconds=0.2)
        if drafter_follows or step == 0:
            yield WeightSyncEvent(role="drafter", version=step, num_tensors=3, checksum=f"{step:04x}cafe", seconds=0.1)
        for number in range(per_step):
            index = step * per_step + number
            round_entropy = max(0.01, nats + draw.gauss(0, 0.15))
            if number % plain_every == 0:
                yield plain_round(index, num_requests=num_requests, mean_entropy=round_entropy, weights_version=step)
                continue
            # Within a step acceptance follows the entropy of the round, .1 a nat.
            here = min(1.0, max(0.0, alpha - 0.1 * (round_entropy - nats)))
            lengths = [_accepted(draw, here, draft_length) for _ in range(num_requests)]
            accepted_by_depth = [sum(length > depth for length in lengths) for depth in range(draft_length)]
            drafted_by_depth = [num_requests, *accepted_by_depth[:-1]]
            deepest = sum(count > 0 for count in drafted_by_depth)
            yield a_round(
                index,
                num_requests=num_requests,
                num_draft_tokens=draft_length * num_requests,
                num_accepted_tokens=sum(lengths),
                num_emitted_tokens=sum(lengths) + num_requests,
                drafted_by_depth=tuple(drafted_by_depth[:deepest]),
                accepted_by_depth=tuple(accepted_by_depth[:deepest]),
                mean_accept_prob_by_depth=(here,) * deepest,
                mean_entropy=round_entropy,
                weights_version=step,
                rounds_by_context=(num_requests,),
                drafted_by_context=(draft_length * num_requests,),
                accepted_by_context=(sum(lengths),),
                draft_depth=draft_length,
            )
        yield a_request(weights_version=step, oldest_weights_version=max(step - 1, 0))


def _accepted(draw: random.Random, alpha: float, draft_length: int) -> int:
    length = 0
    while length < draft_length and draw.random() < alpha:
        length += 1
    return length


def write(path: Path, events: Iterator[Event]) -> Path:
    """A log of these events."""
    sink = JsonlSink(path)
    for event in events:
        sink.emit(event)
    sink.close()
    return path
