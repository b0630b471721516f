"""When a server's process dies, Ray starts it again, with the policy's weights from disk: it takes the newest from the mailbox.

Requests that were running go to the new process and begin anew; what was finished was answered already.
"""

from __future__ import annotations

import logging

import ray

from rollout_spec.engine.engine import Engine
from rollout_spec_rl.verl.mailbox import read_newest

logger = logging.getLogger(__name__)

MAX_RESTARTS = 8  # of one server; more is no accident


def was_restarted() -> bool:
    """Whether this process stands in for one that died."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


def take_newest_weights(engine: Engine, replica_rank: int, no_version: int) -> int:
    """Load what the trainer sent last; returns its version, or ``no_version`` if it is about to send some."""
    buckets = read_newest()
    if buckets is None:
        logger.warning("replica %d: its process died and was started again; requests wait for the next weights", replica_rank)
        return no_version
    report = engine.update_weights([pair for bucket in buckets for pair in bucket.checked()], buckets[0].version)
    logger.warning(
        "replica %d: its process died and was started again; weights version %d taken from the mailbox, checksum %s. "
        "Requests that were running begin anew.",
        replica_rank,
        report.version,
        report.checksum,
    )
    return report.version
