"""What becomes of a trained drafter while the policy learns: served frozen or with the policy's head, or refreshed between rollouts.

A refresh that is due begins when verl puts the server to sleep, which is when a step's rollouts are over, and runs in a thread while the
trainer works on them. The next weights wait for its end (it is bounded); where no sleep came before them, as in asynchronous modes, it runs
then. So the states it trains on and the head they are compared with are always of one version. Nothing here imports verl.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_spec.composition import DrafterOptions
from rollout_spec.drafter import Drafter, HasWeights
from rollout_spec.engine.async_engine import AsyncEngine
from rollout_spec.engine.load import LoadedModel
from rollout_spec.engine.ops import Ops
from rollout_spec.engine.weights import checksums, combine
from rollout_spec.events import WeightSyncEvent
from rollout_spec_rl.compose import make_drafter
from rollout_spec_rl.verl.options import FOLLOW_HEAD, RolloutPlan, RolloutSpecOptions

if TYPE_CHECKING:
    from rollout_spec_mtp.online.serving import OnlineDrafter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServedDrafter:
    """The engine's drafter, and what refreshes it if anything does."""

    drafter: Drafter | None
    online: OnlineDrafter | None = None

    def loaded(self) -> WeightSyncEvent | None:
        """Says with which weights it began."""
        if not isinstance(self.drafter, HasWeights):
            return None
        sums = checksums(self.drafter.named_weights())
        version = self.drafter.weights_version
        return WeightSyncEvent(role="drafter", version=version, num_tensors=len(sums), checksum=combine(sums), seconds=0.0)


def serve_drafter(plan: RolloutPlan, loaded: LoadedModel, ops: Ops, replica_rank: int) -> ServedDrafter:
    """The drafter that the plan names. ValueError if it does not fit the model."""
    options = plan.options
    if not options.refreshes:
        follow_head = options.drafter_policy == FOLLOW_HEAD
        wanted = DrafterOptions(spec=options.drafter, draw=options.draw, follow_head=follow_head)
        return ServedDrafter(drafter=make_drafter(wanted, loaded, ops))
    from rollout_spec_mtp.online.serving import open_online
    from rollout_spec_mtp.online.trainer import RefreshSettings

    online = open_online(
        Path(options.drafter).expanduser(),
        loaded.module,
        ops,
        options.draw,
        settings=RefreshSettings(
            temperature=plan.temperature, max_steps=options.refresh_steps, max_seconds=options.refresh_seconds, lr=options.refresh_lr
        ),
        buffer_tokens=options.refresh_buffer_tokens,
        kept_in=replica_folder(options, replica_rank),
    )
    return ServedDrafter(drafter=online.drafter, online=online)


def replica_folder(options: RolloutSpecOptions, replica_rank: int) -> Path | None:
    """Where a replica keeps its refreshed drafters: each refreshes its own, on its own rollouts."""
    return None if options.drafter_dir is None else Path(options.drafter_dir).expanduser() / f"replica-{replica_rank}"


class DraftRefresher:
    """Decides when, and publishes between two rounds. All calls come from the server's event loop."""

    def __init__(self, engine: AsyncEngine, online: OnlineDrafter, options: RolloutSpecOptions, is_stale: Callable[[], bool]) -> None:
        self._engine, self._online, self._options, self._is_stale = engine, online, options, is_stale
        self._num_syncs = 0  # since the last refresh
        self._running: asyncio.Task[None] | None = None

    def begin_if_due(self, version: int) -> None:
        """Start a refresh on rollouts of policy ``version``, which is what the engine holds, unless one runs."""
        every = self._options.refresh_every
        due = (every is not None and self._num_syncs >= every) or (self._options.refresh_when_stale and self._is_stale())
        if due and self._running is None:
            self._running = asyncio.create_task(self._refresh(version))

    async def before_sync(self, version: int) -> None:
        """Call before the engine gets new weights; ``version`` is still the old one's. Raises what went wrong in a refresh."""
        self.begin_if_due(version)
        running, self._running = self._running, None
        if running is not None:
            await running
        self._num_syncs += 1

    async def _refresh(self, version: int) -> None:
        refreshed = await asyncio.to_thread(self._online.train, version)
        if refreshed is None:
            logger.info("drafter not refreshed for weights %d: too few finished sequences", version)
            return
        self._num_syncs = 0
        if refreshed.improved:
            await asyncio.wrap_future(self._engine.update_drafter(refreshed.tensors.items(), version))
        await asyncio.wrap_future(self._engine.run(lambda engine: engine.emit(refreshed.event())))
        logger.info(
            "drafter refreshed for weights %d in %.1f s, %d steps: held-out length %.3f, before %.3f%s",
            version,
            refreshed.seconds,
            refreshed.num_steps,
            refreshed.length_after,
            refreshed.length_before,
            "" if refreshed.improved else " (kept as it was)",
        )
