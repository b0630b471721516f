"""The wheel, built once a run and installed outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., str]


@pytest.fixture(scope="session")
def wheel(repository_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(repository_root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what `pip install rollout-spec` puts into site-packages."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    done = subprocess.run([*command, "--target", str(target), str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Runs a program in a new interpreter, in an empty folder, with ``paths`` before site-packages; returns what it printed."""

    def run(program: str, *arguments: str, paths: tuple[Path, ...] = (), cwd: Path | None = None) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd or tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
