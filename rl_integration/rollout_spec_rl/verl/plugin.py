"""Imported by verl in every process (entry-point group ``verl.plugins``): registers the backend, the CPU platform and the Hydra groups.

verl swallows what goes wrong in a plugin, so it is logged here first, as an error with its mend.
"""

from __future__ import annotations

import logging
import os

from rollout_spec_rl.verl import BACKEND, CPU

logger = logging.getLogger(__name__)


def register() -> None:
    """Everything that has to be known before verl looks for it. Raises ValueError for an untested verl."""
    from rollout_spec_rl.verl import patches

    patches.check_version()
    register_platform()
    _register_backend()
    _register_configs()
    for patch in patches.IN_EVERY_PROCESS:
        patch.apply()


def has_accelerator() -> bool:
    """Whether verl would find a device of its own in this process or on this machine."""
    import torch
    from verl.plugin.platform import PlatformRegistry

    names = (name for name in PlatformRegistry.registered_names() if name != CPU)
    platforms = (PlatformRegistry.get(name) for name in names)
    return torch.cuda.is_available() or any(cls is not None and cls().is_platform_available(use_smi_check=True) for cls in platforms)


def register_platform() -> None:
    """The CPU platform and what goes with it, unless there is something better or the user named another one (VERL_PLATFORM)."""
    if os.environ.get("VERL_PLATFORM", CPU) != CPU or has_accelerator():
        return
    from verl.plugin.platform import PlatformRegistry

    from rollout_spec_rl.verl import patches
    from rollout_spec_rl.verl.platform import PlatformCPU

    PlatformRegistry.register(platform=CPU)(PlatformCPU)
    os.environ["VERL_PLATFORM"] = CPU
    # verl's training engines are registered by device; the one for "cuda" is written against the platform and runs here as well.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    for patch in patches.ON_CPU:
        patch.apply()


def _register_backend() -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    def load() -> type[RolloutReplica]:
        from rollout_spec_rl.verl import patches
        from rollout_spec_rl.verl.replica import RolloutSpecReplica

        for patch in patches.IN_THE_TRAINER:
            if patch.loaded:
                patch.apply()
        return RolloutSpecReplica

    base._ROLLOUT_REGISTRY[(BACKEND, "async")] = "rollout_spec_rl.verl.adapter.RolloutSpecAdapter"  # noqa: SLF001  # verl's only way in

    def load_vllm() -> type[RolloutReplica]:
        from rollout_spec_rl.verl.vllm_server import SpecVllmReplica

        return SpecVllmReplica

    RolloutReplicaRegistry.register(BACKEND, load)
    RolloutReplicaRegistry.register("vllm", load_vllm)


def _register_configs() -> None:
    from hydra.core.plugins import Plugins

    from rollout_spec_rl.verl.search_path import RolloutSpecSearchPath

    Plugins.instance().register(RolloutSpecSearchPath)


def _register_loudly() -> None:
    try:
        register()
    except Exception:
        logger.exception("rollout_spec could not register with verl; rollout.name=%s will not be known", BACKEND)
        raise


_register_loudly()
