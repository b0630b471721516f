"""The trainer's side of the metrics: asks every server of the run for what it did since the last step."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from numbers import Real

import ray
from ray.exceptions import RayActorError

from rollout_spec_rl.verl.metrics import StepTotals, merge, named
from rollout_spec_rl.verl.names import server_names

logger = logging.getLogger(__name__)

# Of a training step, what an event log wants: does the trainer hold the law that was sampled from?
_KEPT = ("rollout_corr/", "training/rollout_probs_diff", "actor/ppo_kl", "actor/entropy", "critic/score/mean", "response_length/mean")


def step_metrics() -> dict[str, float]:
    """Metrics of all live servers together; empty when no server is ours. A server that died is named in the log and left out."""
    names = server_names()
    parts: list[StepTotals] = []
    num_ours = 0
    for name in names:
        try:
            server = ray.get_actor(name)
            if not hasattr(server, "take_metrics"):
                continue
            num_ours += 1
            parts.append(ray.get(server.take_metrics.remote()))
        except (RayActorError, ValueError) as error:  # ValueError: gone between the listing and the look-up
            logger.warning("%s gave no metrics for this step: %s", name, str(error).splitlines()[0])
    return {**named(merge(parts)), "rollout_spec/num_replicas": float(len(parts))} if num_ours else {}


def report_training(data: Mapping[str, object], step: int) -> None:
    """Tell the first live server the trainer's figures of a step; they stand in its event log and sinks."""
    kept = {name: float(value) for name, value in data.items() if name.startswith(_KEPT) and isinstance(value, Real)}
    loss = data.get("actor/pg_loss")
    for name in server_names():
        try:
            server = ray.get_actor(name)
            if not hasattr(server, "note_training"):
                continue
            ray.get(server.note_training.remote(step, float(loss) if isinstance(loss, Real) else math.nan, kept))
        except (RayActorError, ValueError) as error:
            logger.warning("%s took no figures of step %d: %s", name, step, str(error).splitlines()[0])
        else:
            return
