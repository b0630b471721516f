"""What a budget has learnt, kept for the next run: costs by model and machine, law and costs of one folder of rollouts.

Costs that no run has left yet are calibrated: some seconds of the policy's forwards.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from rollout_spec import files
from rollout_spec.bench import machine
from rollout_spec.budget import BudgetController
from rollout_spec.controllers import ThroughputBudget
from rollout_spec.engine.calibrate import calibrate, num_forwards
from rollout_spec.engine.runner import ModelRunner
from rollout_spec.pilot import BudgetPilot

logger = logging.getLogger(__name__)


def prepared_pilot(
    controller: BudgetController,
    runner: ModelRunner,
    *,
    model: Path,
    max_batch: int,
    max_context: int,
    cache_dir: Path | None = None,
    on_forward: Callable[[int, int], None] = lambda _done, _total: None,
) -> BudgetPilot:
    """A pilot whose costs are known: from the cache, else calibrated now and kept there. on_forward gets forwards done and to do.

    Controllers that weigh no costs get an empty one. A cached file that cannot be read is measured anew.
    """
    pilot = BudgetPilot(controller)
    if not isinstance(controller, ThroughputBudget):
        return pilot
    path = costs_path(model, runner, max_batch, files.cache_dir() / "costs" if cache_dir is None else cache_dir)
    try:
        pilot.load(path)
    except (OSError, ValueError):  # not there, damaged, or another version's; another process may write it at this moment
        total = num_forwards(max_batch)
        calibrate(runner, pilot.costs, max_batch=max_batch, max_context=max_context, on_measured=lambda done: on_forward(done, total))
        try:
            pilot.save(path)
        except OSError as error:  # a cache that cannot be written costs the next run some seconds, not this one
            logger.warning("the measured costs are not kept: %s", error)
    return pilot


def costs_path(model: Path, runner: ModelRunner, max_batch: int, cache_dir: Path) -> Path:
    """One file for every model, dtype, kind of operations, machine with its threads, and batch size."""
    told = machine()
    parts = [str(model.resolve()), str(runner.dtype), runner.ops.name, told["cpu"], told["cores"], torch.get_num_threads(), max_batch]
    return cache_dir / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.json"
