"""Triton's kernels compile for GPUs, which the interpreter does not show. No GPU is needed: Triton brings NVIDIA's assembler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kernels_compile_for_every_architecture() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'rollout-spec[triton]'")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_triton.py"
    done = subprocess.run([sys.executable, str(script), "80", "90"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) >= 36
    assert all(line.endswith(" bytes") for line in lines)
