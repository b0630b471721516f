"""The worlds that ``rollout-spec simulate`` knows by name."""

from __future__ import annotations

import math
from dataclasses import replace

from rollout_spec.simulate.world import CPU, GPU, Progress, World


def _steady(value: float) -> Progress:
    return lambda _: value


def _ramp(first: float, last: float) -> Progress:
    return lambda share: first + (last - first) * share


def _jump(first: float, last: float, at: float = 0.5) -> Progress:
    return lambda share: first if share < at else last


_BASE = World(
    name="steady",
    about="nothing changes: batch 16 on a GPU",
    costs=GPU,
    num_requests=96,
    max_batch=16,
    mean_tokens=300,
    intercept=_steady(0.75),
    entropy=_steady(1.0),
)

_CPU = replace(_BASE, costs=CPU, max_batch=8, num_requests=48)
_ALL = (
    replace(
        _CPU,
        name="entropy_up",
        about="entropy rises from .1 to 8 nats: batch 4 on a CPU",
        max_batch=4,
        num_requests=24,
        intercept=_steady(0.72),
        slope=-0.075,
        entropy=_ramp(0.1, 8.0),
    ),
    replace(
        _BASE,
        name="entropy_down",
        about="entropy falls from 8 nats to .1: batch 64 on a GPU",
        max_batch=64,
        num_requests=256,
        slope=-0.075,
        entropy=_ramp(8.0, 0.1),
    ),
    replace(
        _CPU,
        name="bimodal",
        about="half of the prompts accept .6 more than the others: batch 16 on a CPU",
        max_batch=16,
        num_requests=96,
        intercept=_steady(0.62),
        offsets=(0.3, -0.3),
    ),
    replace(
        _BASE,
        name="long_tail",
        about="one batch of 256 that thins out to one request on a GPU",
        num_requests=256,
        max_batch=256,
        mean_tokens=250,
        tail=0.9,
    ),
    replace(
        _CPU,
        name="stale",
        about="the policy jumps half-way and the drafter no longer fits: batch 8 on a CPU",
        intercept=_jump(0.85, 0.2),
        policy_updates=(0.5,),
    ),
    replace(
        _CPU,
        name="refreshed",
        about="a useless drafter is replaced by a good one half-way: batch 8 on a CPU",
        intercept=_jump(0.12, 0.85),
        drafter_updates=(0.5,),
    ),
    replace(
        _CPU,
        name="noisy_clock",
        about="measured rounds swing by half and one in twenty takes five times as long: batch 8 on a CPU",
        clock_noise=0.2,
        clock_drift=0.4,
        outliers=0.05,
    ),
    replace(
        _CPU,
        name="expensive_drafter",
        about="drafting never pays: batch 16 on a CPU",
        max_batch=16,
        num_requests=96,
        costs=replace(CPU, draft_s=0.012, step_s=0.01),
        intercept=_steady(0.5),
    ),
    replace(
        _CPU,
        name="retrieval",
        about="a free drafter finds something four times in ten, and the verifier tells 0 or 1: batch 4 on a CPU",
        max_batch=4,
        num_requests=24,
        costs=replace(CPU, draft_s=0.0001, step_s=0.0, draft_row_s=0.0),
        found=0.4,
        realised=True,
        intercept=_steady(0.7),
    ),
    replace(
        _CPU,
        name="temperatures",
        about="evaluation and exploration in turn: entropy .2 and 4 nats, batch 8 on a CPU",
        slope=-0.1,
        intercept=_steady(0.72),
        entropy=lambda share: 0.2 if math.sin(12 * math.pi * share) >= 0 else 4.0,
    ),
)
WORLDS: dict[str, World] = {world.name: world for world in _ALL}
