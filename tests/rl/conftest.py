"""Tests of the RL integration. Those under hosts/ need verl and Ray: `make test-hosts` runs them; without verl they are not collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

collect_ignore = [] if importlib.util.find_spec("verl") is not None else ["hosts"]


@pytest.fixture
def rollout() -> Callable[..., dict[str, Any]]:
    """verl's rollout config as far as we read it, with changes; ``custom`` is our own part."""

    def make(custom: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        settings = {
            "name": "rollout_spec",
            "dtype": "float32",
            "prompt_length": 16,
            "response_length": 24,
            "max_model_len": None,
            "temperature": 1.0,
            "logprobs_mode": "processed_logprobs",
            "calculate_log_probs": True,
            "free_cache_engine": False,
            "ignore_eos": False,
            "tensor_model_parallel_size": 1,
            "custom": None if custom is None else {"rollout_spec": custom},
        }
        return {**settings, **changes}

    return make
