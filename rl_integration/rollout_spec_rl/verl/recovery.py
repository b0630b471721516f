"""When a server's process dies, Ray starts it again, with the policy's weights from disk: it takes the newest from another replica.

Requests that were running go to the new process and begin anew; what was finished was answered already. A death that hits the only replica
cannot be mended here: nobody else holds the weights that the trainer is at, so the job ends and resumes from its checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import ray
from ray.exceptions import RayError

from rollout_spec.engine.engine import Engine
from rollout_spec_rl.verl.names import server_names
from rollout_spec_rl.verl.weights import WeightBucket

logger = logging.getLogger(__name__)

MAX_RESTARTS = 8  # of one server; more is no accident
_ANSWER_S = 120.0  # a replica that is in the middle of a round answers after it


def was_restarted() -> bool:
    """Whether this process stands in for one that died."""
    return bool(ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed)


def take_newest_weights(engine: Engine, replica_rank: int, own_name: str) -> int:
    """Load what the most advanced other replica holds; returns its version. Raises RuntimeError if no other replica has any."""
    newest = _newest(name for name in server_names() if name != own_name)
    if newest is None:
        raise RuntimeError(
            f"the process of replica {replica_rank} died, and no other replica holds the trainer's weights: "
            "resume the job from its checkpoint"
        )
    report = engine.update_weights(newest.checked(), newest.version)
    logger.warning(
        "replica %d: its process died and was started again; weights version %d from another replica, checksum %s. "
        "Requests that were running begin anew.",
        replica_rank,
        newest.version,
        report.checksum,
    )
    return newest.version


def _newest(names: Iterable[str]) -> WeightBucket | None:
    held: list[WeightBucket] = []
    for name in names:
        try:
            bucket = ray.get(ray.get_actor(name).export_weights.remote(), timeout=_ANSWER_S)
        except (RayError, ValueError) as error:  # ValueError: gone between the listing and the look-up
            logger.warning("%s could not give its weights: %s", name, str(error).splitlines()[0])
            continue
        if bucket is not None:
            held.append(bucket)
    return max(held, key=lambda bucket: bucket.version, default=None)
