"""RolloutServer: the Ray actor of one replica, the embedded engine behind verl's server calls.

verl talks to it from three sides: agent loops call ``generate``, the trainer calls what starts and stops generation, and the adapter in the
training worker sends weights. All of it runs on the actor's event loop; the engine has a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.workers.rollout.replica import TokenOutput

from rollout_spec.engine.async_engine import AsyncEngine
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import load_model, make_runner
from rollout_spec.events import EventSink, TrainEvent
from rollout_spec.session import set_threads
from rollout_spec.sinks import JsonlSink
from rollout_spec.sinks.queued import QueuedSink
from rollout_spec.sinks.specs import SinkPlace, open_telemetry
from rollout_spec.sinks.window import Axis
from rollout_spec_rl.compose import make_ops
from rollout_spec_rl.verl.drafter_policy import DraftRefresher, ServedDrafter, serve_drafter
from rollout_spec_rl.verl.generation import make_request, output_fields
from rollout_spec_rl.verl.mailbox import open_mailbox, read
from rollout_spec_rl.verl.metrics import StepSink, StepTotals
from rollout_spec_rl.verl.options import RolloutPlan
from rollout_spec_rl.verl.recovery import take_newest_weights, was_restarted
from rollout_spec_rl.verl.weights import NamedTensor, WeightBucket, WeightInbox, check_held

logger = logging.getLogger(__name__)

NO_VERSION = -1  # before the trainer's first weights


class Gate:
    """Open: requests may run. Closed: they wait for it to open, or are turned away, as the closing said."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._rejects = False
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def enter(self) -> bool:
        """True: go on, and ``leave`` afterwards. False: turned away."""
        while not self._open.is_set():
            if self._rejects:
                return False
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        return True

    def leave(self) -> None:
        self._inside -= 1
        if self._inside == 0:
            self._empty.set()

    def close(self, *, rejects: bool) -> int:
        """Returns how many are inside."""
        self._rejects = rejects
        self._open.clear()
        return self._inside

    def open(self) -> None:
        self._rejects = False
        self._open.set()

    async def wait_until_empty(self) -> None:
        await self._empty.wait()


class RolloutServer:
    """One replica. ``plan`` is checked by the replica before this process starts."""

    def __init__(self, plan: RolloutPlan, model_path: str, replica_rank: int) -> None:
        set_threads(plan.options.threads)
        self._plan, self._rank = plan, replica_rank
        self._metrics = StepSink()
        self._inbox = WeightInbox()
        self._gate = Gate()
        self._version = NO_VERSION
        served = build_engine(plan, model_path, self._sink(), replica_rank)
        engine = served.engine
        self._precisions = {name: tensor.dtype for name, tensor in engine.runner.named_weights().items()}
        self._aliases = dict(engine.runner.tied_names())
        self._restarted = was_restarted()
        if self._restarted:
            self._version = take_newest_weights(engine, replica_rank, NO_VERSION)
            self._metrics.count_restart()
            if self._version == NO_VERSION:
                self._gate.close(rejects=False)  # nothing is sampled from the weights on disk; the next sync opens it
        self._engine = AsyncEngine(engine)
        self._refresher = None
        if served.drafter.online is not None:
            self._refresher = DraftRefresher(self._engine, served.drafter.online, plan.options, lambda: engine.pilot.monitor.stale)

    def _sink(self) -> EventSink:
        options = self._plan.options
        if options.events is None:
            return self._metrics
        folder, replica = Path(options.events), str(self._rank)
        # The folder may be on another machine: not even the log is waited for.
        log = QueuedSink("log", JsonlSink(folder / f"replica-{replica}.jsonl"))
        place = SinkPlace(folder=folder, replica=replica, drafter=Path(options.drafter).name, axis=Axis.GLOBAL_STEP)
        return open_telemetry(self._metrics, options.sinks, place, [log])

    async def ready(self) -> int:
        """The replica's rank, once the engine is there."""
        return self._rank

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **further: Any,
    ) -> TokenOutput:
        """One sample. An abort ends it with what it has and stop_reason "aborted"; verl's client then asks for the rest."""
        given = {name for name, value in {"image_data": image_data, "video_data": video_data, **further}.items() if value is not None}
        if given:
            raise ValueError(f"the embedded engine serves text only, and takes no {', '.join(sorted(given))}")
        if not await self._gate.enter():
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self._version})
        try:
            # verl may ask again under an id whose first request has not quite ended; the engine wants its own.
            request = make_request(self._plan, prompt_ids, sampling_params, f"{request_id}-{uuid4().hex[:8]}")
            completion = await self._engine.generate(request)
        finally:
            self._gate.leave()
        fields = output_fields(self._plan, completion, logprobs=bool(sampling_params.get("logprobs")), version=self._version)
        return TokenOutput(**fields)

    # Weights: buckets, then one commit

    async def receive_bucket(self, bucket: WeightBucket) -> None:
        """One bucket of the trainer's weights; ValueError names tensors whose checksum does not match."""
        self._inbox.add(bucket)

    async def commit_weights(self, version: int, num_tensors: int) -> str:
        """Put the received weights to use between two rounds. Returns the checksum of what the engine then holds."""
        tensors = await self._received(version, num_tensors)
        if self._refresher is not None:
            await self._refresher.before_sync(self._version)
        report = await asyncio.wrap_future(self._engine.update_weights(tensors, version))
        check_held(tensors, report, self._precisions, self._aliases)
        if self._restarted and self._version == NO_VERSION:
            self._gate.open()
        self._version = version
        logger.info("replica %d: weights version %d, %d tensors, checksum %s", self._rank, version, num_tensors, report.checksum)
        return report.checksum

    async def _received(self, version: int, num_tensors: int) -> list[NamedTensor]:
        try:
            return self._inbox.take(version, num_tensors)
        except ValueError:
            if not self._restarted:
                raise
            # The first buckets went to the process that died.
            return [pair async for bucket in read(open_mailbox(), version) for pair in bucket.checked()]

    async def set_global_steps(self, global_steps: int) -> None:
        """verl tells the version again after a sync; it must be the one whose weights came."""
        if global_steps != self._version:
            raise RuntimeError(f"verl says weights version {global_steps}, the engine of replica {self._rank} holds {self._version}")

    # Starting and stopping

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, int]:
        """End what runs and let nothing new begin until ``resume_generation``; returns when all of it has been answered.

        Whoever is inside the gate is with the engine already: nothing is awaited between the two, and its commands keep their order.
        """
        inside = self._gate.close(rejects=reject_request)
        await asyncio.wrap_future(self._engine.abort_all())
        await self._gate.wait_until_empty()
        return {"aborted_count": inside}

    async def resume_generation(self) -> None:
        self._gate.open()

    async def wait_for_requests_to_drain(self) -> None:
        await self._gate.wait_until_empty()

    async def sleep(self) -> None:
        """The engine keeps its memory; verl only needs to know that nothing runs. A drafter's refresh may begin."""
        await self._gate.wait_until_empty()
        if self._refresher is not None:
            self._refresher.begin_if_due(self._version)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing was given up."""

    async def clear_kv_cache(self) -> None:
        """The engine forgets K/V by itself when weights change; of unchanged weights it stays right."""

    async def release_kv_cache(self) -> None:
        """See ``sleep``."""

    async def resume_kv_cache(self) -> None:
        """See ``sleep``."""

    # What the trainer asks once a step

    async def take_metrics(self) -> StepTotals:
        return self._metrics.take()

    async def note_training(self, step: int, loss: float, metrics: dict[str, float]) -> None:
        """The trainer's figures of a step, for the event log and the sinks."""
        event = TrainEvent(step=step, loss=loss, metrics=metrics, role="policy")
        await asyncio.wrap_future(self._engine.run(lambda engine: engine.emit(event)))

    async def start_profile(self, **_: Any) -> None:
        """Rounds are timed always (``rollout_spec/ms_per_round`` and the event log)."""

    async def stop_profile(self) -> None:
        """See ``start_profile``."""


@dataclass(frozen=True, kw_only=True)
class ServedEngine:
    engine: Engine
    drafter: ServedDrafter


def build_engine(plan: RolloutPlan, model_path: str, sink: EventSink, replica_rank: int) -> ServedEngine:
    """The engine that the plan describes, with the policy's weights from disk. ValueError if the drafter does not fit it."""
    options = plan.options
    loaded = load_model(model_path, plan.dtype)
    ops = make_ops()
    drafter = serve_drafter(plan, loaded, ops, replica_rank)
    config = EngineConfig(
        max_batch=options.max_batch,
        max_context=plan.max_context,
        prefill_chunk=options.prefill_chunk,
        scheme=options.scheme,
    )
    engine = Engine(
        make_runner(loaded.module, max_context=plan.max_context, ops=ops),
        config=config,
        drafter=drafter.drafter,
        controller=options.controller(),
        sink=sink,
        detokenize=loaded.detokenize,
    )
    began = drafter.loaded()
    if began is not None:
        engine.emit(began)
    return ServedEngine(engine=engine, drafter=drafter)
