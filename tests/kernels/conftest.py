from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout_spec_kernels.cpu import CpuOps, unavailable_reason

sys.path.insert(0, str(Path(__file__).parent))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a test imports one of Triton's kernels
    if importlib.util.find_spec("triton") is not None:
        from exactness.interpreter import make_quick

        make_quick()


@pytest.fixture(scope="session")
def ops() -> CpuOps:
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(f"no CPU kernels here: {reason}")
    return CpuOps()


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """Fill what torch.empty returns with NaN, so that an entry no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
