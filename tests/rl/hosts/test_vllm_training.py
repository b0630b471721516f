"""A real training with rollouts by vLLM: verl's own trainer and server, our proposer in its worker. Some minutes."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
from test_training import train

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_three_steps_of_grpo(repository_root: Path, tmp_path: Path) -> None:
    """Acceptance stands in verl's log, every sync is a version, and log-probabilities are the actor's within 1e-3."""
    budget = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.rollout_spec.budget=fixed:4"
    steps = train(repository_root, tmp_path / "run", budget, spec="vllm_suffix")
    check(steps)
    for step in steps:
        assert 1 <= step["rollout/spec_accept_length"] <= 9
        # An untrained policy of three nats repeats itself seldom: something is drafted, and what is accepted may be nothing.
        assert step["rollout_spec/draft_tokens_per_round"] > 0
        assert 0 <= step["rollout/spec_accept_rate"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "longest"), [("vllm_mtp", 3), ("vllm_block", 4)])
def test_a_head_that_is_trained_before_the_first_step(spec: str, longest: int, repository_root: Path, tmp_path: Path) -> None:
    """Some minutes each. The drafter knows the policy's first weights, so that its drafts are accepted from the first step on."""
    options = (
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.rollout_spec.budget=fixed:{longest}",
        f"+actor_rollout_ref.rollout.custom.rollout_spec.drafter_cache={tmp_path / 'cache'}",
    )
    steps = train(repository_root, tmp_path / "run", *options, spec=spec)
    check(steps)
    assert len([*tmp_path.glob("cache/*/model.safetensors")]) == 1
    for step in steps:
        assert 1.05 < step["rollout/spec_accept_length"] <= longest + 1
        assert longest / 2 < step["rollout_spec/draft_tokens_per_round"] <= longest


@pytest.mark.slow
@pytest.mark.model
def test_a_real_policy_whose_head_is_its_embedding(repository_root: Path, tmp_path: Path) -> None:
    """Some minutes. SmolLM2's embedding fills a bucket, and the head that is tied to it comes in another."""
    overrides = (
        "trainer.total_training_steps=3",
        "data.max_response_length=48",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.rollout_spec.budget=fixed:4",
    )
    steps = train(repository_root, tmp_path / "run", *overrides, spec="vllm_suffix", example="verl_grpo_smollm2")
    check(steps, num_requests=8)
    assert sum(step["rollout/spec_accept_rate"] for step in steps) > 0


def check(steps: list[dict[str, Any]], num_requests: int = 32) -> None:
    """What holds whoever drafts."""
    assert [step["training/global_step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["training/rollout_probs_diff_valid"] == 1
        assert math.exp(-1e-3) < step["rollout_corr/rollout_is_min"] <= step["rollout_corr/rollout_is_max"] < math.exp(1e-3)
        assert step["rollout_spec/num_requests"] == num_requests
        assert step["rollout_spec/num_failed_requests"] == 0
        assert 0 < step["rollout_spec/entropy"] < 6
    assert [step["rollout_spec/policy_version"] for step in steps] == [1, 2, 3], "each step's weights reached the worker"
