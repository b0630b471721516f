"""The trainer's side of the metrics: asks every server of the run for what it did since the last step."""

from __future__ import annotations

import logging

import ray
from ray.exceptions import RayActorError

from rollout_spec_rl.verl.metrics import StepTotals, merge, named
from rollout_spec_rl.verl.names import server_names

logger = logging.getLogger(__name__)


def step_metrics() -> dict[str, float]:
    """Metrics of all live servers together; empty when no server is ours. A server that died is named in the log and left out."""
    names = server_names()
    if not names:
        return {}
    parts: list[StepTotals] = []
    for name in names:
        try:
            parts.append(ray.get(ray.get_actor(name).take_metrics.remote()))
        except (RayActorError, ValueError) as error:  # ValueError: gone between the listing and the look-up
            logger.warning("%s gave no metrics for this step: %s", name, str(error).splitlines()[0])
    return {**named(merge(parts)), "rollout_spec/num_replicas": float(len(parts))}
