"""verl's agent loops with two things added: seeds, and speculation counts that survive partial rollouts.

``SeededAgentLoopManager`` is named by ``rollout.agent.agent_loop_manager_class``, which verl imports after its trainer and servers are up.
fully_async has a manager of its own, which no setting replaces: a patch puts a ``seeded_manager`` in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import ray
from verl.experimental.agent_loop import AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_spec_rl.verl.options import RolloutSpecOptions, plan_rollouts
from rollout_spec_rl.verl.replica import as_mapping

_COUNTS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
# What the servers answered to the sample that the current task is generating, part by part.
_parts: ContextVar[list[TokenOutput] | None] = ContextVar("rollout_spec_parts", default=None)

# Ray forbids to inherit from an actor class; this is the plain class that it was made of.
_PlainWorker = AgentLoopWorkerTQ.__ray_metadata__.modified_class


def trajectory_seed(seed: int, step: object, sample: object, session: int, *, validate: bool) -> int:
    """The seed of one trajectory: 62 bits that depend on the run's seed, the step, the dataset's row and the sample's number only."""
    digest = hashlib.sha256(f"{seed}/{step}/{sample}/{session}/{validate}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


class _Seeded:
    """Gives every trajectory its own seed when the run has one. Stands before one of verl's workers."""

    def __init__(self, config: Any, *further: Any, **named: Any) -> None:
        super().__init__(config, *further, **named)  # type: ignore[call-arg]  # of the worker that stands behind
        self._options: RolloutSpecOptions = plan_rollouts(as_mapping(config.actor_rollout_ref.rollout)).options

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **further: Any) -> Any:
        if self._options.seed is not None:
            # A stream of prompts has no steps; what it has is a number for each prompt that it sends out.
            step = trajectory["step"] if trajectory["step"] >= 0 else further["uid"]
            seed = trajectory_seed(
                self._options.seed,
                step,
                trajectory["sample_index"],
                int(further.get("session_id", trajectory["rollout_n"])),
                validate=bool(trajectory["validate"]),
            )
            sampling_params = {**sampling_params, "seed": seed}
        return await super()._run_agent_loop(sampling_params, trajectory, **further)  # type: ignore[misc]


class SeededWorker(_Seeded, _PlainWorker):  # type: ignore[valid-type,misc]
    """Of the trainers with a TransferQueue: sync, colocate_async and separate_async."""


class SeededStreamWorker(_Seeded, AgentLoopWorker):
    """Of fully_async."""


class _RecordingClient(LLMServerClient):
    """Stands between verl's asynchronous client and its base: sees every part that a server answered."""

    async def generate(self, request_id: Any, **named: Any) -> TokenOutput:
        output: TokenOutput = await super().generate(request_id, **named)
        parts = _parts.get()
        if parts is not None:
            parts.append(output)
        return output


class CountingClient(FullyAsyncLLMServerClient, _RecordingClient):
    """verl's client for partial rollouts, which joins the parts of a sample but drops what the servers say beside the tokens."""

    @classmethod
    def like(cls, client: Any) -> Any:
        """Our client in place of verl's asynchronous one; any other client already keeps what servers say."""
        if type(client) is not FullyAsyncLLMServerClient:
            return client
        return cls(config=client.config, load_balancer_handle=client._load_balancer, only_hybrid=client._only_hybrid)  # noqa: SLF001

    async def generate(self, request_id: Any, **named: Any) -> TokenOutput:
        parts: list[TokenOutput] = []
        token = _parts.set(parts)
        try:
            output: TokenOutput = await super().generate(request_id, **named)
        finally:
            _parts.reset(token)
        output.extra_fields.update(joined_fields([(len(part.token_ids), part.extra_fields) for part in parts]))
        return output


def joined_fields(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """One sample's extra fields from its parts, each (number of tokens, extra fields): counts summed, spans of versions in their place."""
    spans: list[tuple[int, int, int]] = []
    offset = 0
    for num_tokens, fields in parts:
        for version, start, end in fields.get("rollout_spec_versions", ()):
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], offset + end)
            else:
                spans.append((version, offset + start, offset + end))
        offset += num_tokens
    joined: dict[str, Any] = {name: sum(fields.get(name, 0) for _, fields in parts) for name in _COUNTS}
    joined["rollout_spec_versions"] = spans
    if spans:
        joined["min_global_steps"], joined["max_global_steps"] = spans[0][0], spans[-1][0]
    return joined


def seeded_manager(manager: type[Any], worker: type[Any]) -> type[Any]:
    """One of verl's managers with our workers and our client."""

    class SeededManager(manager):
        def __init__(self, config: Any, llm_client: Any, *further: Any, **named: Any) -> None:
            super().__init__(config, CountingClient.like(llm_client), *further, **named)
            self.agent_loop_workers_class = ray.remote(worker)

    return SeededManager


SeededAgentLoopManager = seeded_manager(AgentLoopManagerTQ, SeededWorker)
