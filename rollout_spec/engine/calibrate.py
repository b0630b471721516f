"""Calibration: what forwards of typical shapes take on this machine, measured once, so that budgets need not find out by trying.

Only the target is run. What drafting costs shows in the first rounds with a draft.

Shape legend: R rows of a forward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from rollout_spec.cost import OnlineCosts, RoundShape
from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.runner import ModelRunner, StepInput

_LONGEST_CONTEXT = 96
_ROWS = (1, 2, 3, 5)  # of each request: the token to go on from, and drafts
_REPEATS = 3


def calibration_shapes(max_batch: int) -> list[tuple[int, int]]:
    """(number of requests, rows of each): powers of two up to max_batch, and max_batch."""
    sizes = sorted({min(1 << power, max_batch) for power in range(max_batch.bit_length() + 1)})
    return [(size, rows) for size in sizes for rows in _ROWS]


def calibrate(
    runner: ModelRunner, costs: OnlineCosts, *, max_batch: int, max_context: int, on_measured: Callable[[int], None] = lambda _: None
) -> None:
    """Measure all shapes, interleaved, and teach them to ``costs``; on_measured gets the number of forwards so far.

    Some seconds for a small model on a CPU. A shape's cost is the median of three forwards with their output rows.
    """
    context = max(min(_LONGEST_CONTEXT, max_context - max(_ROWS)), 0)
    kv = runner.make_slots(max_batch, context + max(_ROWS))
    kv.pretend(context)
    shapes = calibration_shapes(max_batch)
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    _forward(runner, kv, *shapes[-1], context)
    for repeat in range(_REPEATS):
        for place, shape in enumerate(shapes):
            began = time.perf_counter()
            _forward(runner, kv, *shape, context)
            seconds[shape].append(time.perf_counter() - began)
            on_measured(repeat * len(shapes) + place + 1)
    for (num_requests, rows), measured in seconds.items():
        of_round = RoundShape(num_requests=num_requests, num_rows=num_requests * rows, depth=rows - 1, context=num_requests * context)
        costs.calibrate(of_round, statistics.median(measured))


def num_forwards(max_batch: int) -> int:
    """What on_measured counts up to."""
    return _REPEATS * len(calibration_shapes(max_batch))


def _forward(runner: ModelRunner, kv: KVSlots, num_requests: int, rows: int, context: int) -> None:
    """Random tokens behind a context of whatever lies in the slots: only the time matters."""
    offsets = torch.arange(num_requests + 1) * rows
    contexts = torch.full((num_requests,), context)
    plan = AttentionPlan(row_offsets=offsets, slots=torch.arange(num_requests), context_lengths=contexts)
    tokens = torch.arange(num_requests * rows) * 7919 % runner.vocab_size
    positions = context + torch.arange(num_requests * rows) % rows
    hidden = runner.forward(StepInput(token_ids=tokens, positions=positions, plan=plan), kv).hidden
    runner.ops.log_softmax_stats(runner.logits(hidden), torch.ones(num_requests * rows))
