"""A world made from the event log of a real run: its batch sizes, entropies, acceptance and costs.

Shape legend: R rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rollout_spec.cost import non_negative
from rollout_spec.events import RequestEvent, RoundEvent
from rollout_spec.simulate.world import Array, CostCurve, Progress, World
from rollout_spec.sinks import read_events

_SLOPE = -0.04  # acceptance a nat between requests of one moment, which a log by rounds does not show
_MIN_ROUNDS = 32
_WINDOWS = 24  # pieces of the run that its course is averaged over


def recorded_world(path: Path) -> World:
    """The world of an events.jsonl, or of the folder that holds one.

    Raises ValueError if it holds too few rounds, or too few with a draft to tell what drafting costs and brings.
    """
    log = path / "events.jsonl" if path.is_dir() else path
    events = read_events(log)
    rounds = [event for event in events if isinstance(event, RoundEvent) and event.num_requests]
    lengths = [event.num_tokens for event in events if isinstance(event, RequestEvent) and event.num_tokens]
    drafting = [event for event in rounds if event.mean_accept_prob_by_depth]
    if len(drafting) < _MIN_ROUNDS or not lengths:
        held = f"{len(drafting)} rounds with a draft and {len(lengths)} finished requests"
        raise ValueError(f"{log} has {held}; {_MIN_ROUNDS} and 1 are needed")
    logs = np.log(np.array(lengths, dtype=np.float64))
    entropy = _course(rounds, rounds, lambda event: event.mean_entropy)
    accept = _course(rounds, drafting, lambda event: event.mean_accept_prob_by_depth[0])
    return World(
        name=path.name if path.is_dir() else path.parent.name,
        about=f"recorded in {log}",
        costs=_costs(rounds),
        num_requests=len(lengths),
        max_batch=max(event.num_requests for event in rounds),
        mean_tokens=float(np.mean(lengths)),
        tail=float(logs.std()),
        intercept=lambda share: accept(share) - _SLOPE * entropy(share),
        slope=_SLOPE,
        depth_ratio=_depth_ratio(drafting),
        entropy=entropy,
        found=_found(drafting),
    )


def _course(rounds: Sequence[RoundEvent], chosen: Sequence[RoundEvent], value: Callable[[RoundEvent], float]) -> Progress:
    """A figure of the chosen rounds as a function of the share of all tokens, averaged over windows."""
    emitted = np.cumsum([event.num_emitted_tokens for event in rounds])
    shares = dict(zip((event.round_index for event in rounds), emitted / emitted[-1], strict=True))
    known = [(shares[event.round_index], value(event)) for event in chosen if not math.isnan(value(event))]
    windows = np.array_split(np.array(known, dtype=np.float64), min(_WINDOWS, len(known)))
    at, means = np.array([window[:, 0].mean() for window in windows]), np.array([window[:, 1].mean() for window in windows])
    return lambda share: float(np.interp(share, at, means))


def _depth_ratio(drafting: Sequence[RoundEvent]) -> float:
    """Mean of a second draft's acceptance over a first one's; 1 where nothing was drafted so deep."""
    both = [event.mean_accept_prob_by_depth[:2] for event in drafting if len(event.mean_accept_prob_by_depth) > 1]
    return min(max(sum(second for _, second in both) / sum(first for first, _ in both), 0.5), 1.0) if both else 1.0


def _found(drafting: Sequence[RoundEvent]) -> float:
    """How often a request of a drafting round had a first draft."""
    return sum(event.drafted_by_depth[0] for event in drafting) / sum(event.num_requests for event in drafting)


def _costs(rounds: Sequence[RoundEvent]) -> CostCurve:
    """Least squares on the recorded seconds, slow rounds (three times the median of their kind and more) left out."""
    rest = np.array([event.target_s + event.verify_s + event.other_s for event in rounds])
    rows = np.array([float(event.num_requests + event.num_draft_tokens) for event in rounds])
    requests = np.array([float(event.num_requests) for event in rounds])
    base, row, request = _fit(np.stack([np.ones_like(rows), rows, requests], axis=1), rest)
    drafted = np.array([float(event.num_draft_tokens) for event in rounds])
    depth = np.array([float(len(event.drafted_by_depth)) for event in rounds])
    asked = depth > 0
    draft_s = np.array([event.draft_s for event in rounds])
    features = np.stack([np.ones_like(rows), depth, drafted], axis=1)[asked]
    start, step, draft_row = _fit(features, draft_s[asked])
    return CostCurve(base_s=base, row_s=row, request_s=request, draft_s=start, step_s=step, draft_row_s=draft_row)


def _fit(features: Array, seconds: Array) -> tuple[float, float, float]:
    """Three coefficients >= 0 of features [R, 3]."""
    kept = seconds <= 3.0 * np.median(seconds)
    used, target = features[kept], seconds[kept]
    scale = np.maximum(used.max(0), 1e-9)
    gram = (used / scale).T @ (used / scale) + 1e-9 * len(target) * np.eye(3)
    first, second, third = (non_negative(gram, (used / scale).T @ target) / scale).tolist()
    return first, second, third
