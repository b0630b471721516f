"""Test-wide settings: threads, seeds and the one real model."""

from __future__ import annotations

import os

# Before transformers is imported: no test may depend on a network, and tokenizers' own threads would compete with torch's.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

NUM_THREADS = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
torch.set_num_threads(NUM_THREADS)

# The same examples on every run and every machine: a failure is reproducible, and a slow machine is not a failure.
settings.register_profile("rollout_spec", derandomize=True, deadline=None, database=None)
settings.load_profile("rollout_spec")


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Every test starts from the same global noise, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repository_root() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a plain model directory (converted once, then cached). For tests marked ``model``."""
    from rollout_spec.engine.models import resolve_model

    return resolve_model("smollm2-135m")
