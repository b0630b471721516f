"""A CPU as verl's platform, so that its trainer runs where there is no accelerator.

verl asks its platform for a module like ``torch.cuda`` and for a Ray resource. Here the module is ``torch.cpu`` with what it lacks answered
for a CPU (memory figures are the host's, cache calls do nothing), and the resource is Ray's "GPU", of which ``+machine=cpu`` declares as
many as there are workers: they are places in verl's schedule, not devices.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase

from rollout_spec_rl.verl import CPU


def _memory_info(_: object = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _resident_bytes(_: object = None) -> int:
    return int(psutil.Process().memory_info().rss)


def _nothing(*_: object, **__: object) -> None:
    return None


def _device_module() -> types.ModuleType:
    """``torch.cpu`` and what verl calls of ``torch.cuda`` besides."""
    module = types.ModuleType("torch_cpu_as_device")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "synchronize"):
        setattr(module, name, _nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, _resident_bytes)
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "get_device_name": lambda *_: CPU,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "mem_get_info": _memory_info,
    }
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module


_DEVICE_MODULE = _device_module()


class PlatformCPU(PlatformBase):
    """One "device" a process: the CPU. Collectives go over gloo; there is no IPC of device memory and no device profiler."""

    @property
    def device_name(self) -> str:
        return CPU

    @property
    def vendor_name(self) -> str:
        return CPU

    @property
    def device_module(self) -> types.ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return CPU  # used as a torch device everywhere; a bare index would mean an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:  # noqa: ARG002
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # noqa: ARG002
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
