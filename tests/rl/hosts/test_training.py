"""Real trainings: verl's own trainer, a tiny model, rollouts by us, on this CPU. Each takes minutes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def train(root: Path, run: Path, *overrides: str, spec: str = "suffix") -> list[dict[str, Any]]:
    """Run the example; returns the metrics of its training steps."""
    environment = {**os.environ, "RUN": str(run), "SPEC": spec, "PYTHON": sys.executable, "RAY_DEDUP_LOGS": "0"}
    script = root / "examples" / "verl_grpo_tiny" / "run.sh"
    done = subprocess.run([str(script), *overrides], capture_output=True, text=True, check=False, cwd=root, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    lines = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "training/global_step" in line]


def check_steps(steps: list[dict[str, Any]], num_steps: int) -> None:
    """What holds in every mode: steps were made, acceptance is there, the trainer finds the log-probabilities that we reported."""
    assert [step["training/global_step"] for step in steps] == list(range(1, num_steps + 1))
    for step in steps:
        assert step["training/rollout_probs_diff_valid"] == 1
        assert step["rollout_spec/num_failed_requests"] == 0
        assert 1 <= step.get("rollout/spec_accept_length", 1) <= 9
        assert 0 <= step.get("rollout/spec_accept_rate", 0) <= 1
        if step["training/off_policy/trajectory_staleness_worst/max"] > 0:
            continue  # the trainer's policy is a newer one than the samples'
        assert step["training/rollout_probs_diff_max"] < 1e-4
        # Ratios of the trainer's probability to the reported one: log-probabilities within 1e-3.
        assert math.exp(-1e-3) < step["rollout_corr/rollout_is_min"] <= step["rollout_corr/rollout_is_max"] < math.exp(1e-3)
    # What was generated ahead is counted in the step that waited for it, so a single step may have generated nothing.
    assert sum(step["rollout_spec/num_tokens"] for step in steps) > 32 * num_steps
    assert sum("rollout/spec_accept_rate" in step for step in steps) > 0
    assert 0 < steps[0]["rollout_spec/entropy"] < 6
    versions = [step["rollout_spec/policy_version"] for step in steps]
    assert versions == sorted(versions)
    assert versions[-1] >= num_steps - 1
    assert steps[0]["training/off_policy/trajectory_staleness_worst/max"] == 0  # so the log-probabilities of one step were compared


@pytest.fixture(scope="module")
def sync_run(repository_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("sync")
    train(repository_root, run)
    return run


def test_synchronous(sync_run: Path) -> None:
    lines = [json.loads(line)["data"] for line in (sync_run / "metrics.jsonl").read_text().splitlines()]
    check_steps(lines, 3)
    # The weights of a step are in use when its metrics are logged, and every sample is of this step.
    assert [line["rollout_spec/policy_version"] for line in lines] == [1, 2, 3]
    assert [line["rollout_spec/num_requests"] for line in lines] == [32, 32, 32]
    summary = json.loads((sync_run / "summary.json").read_text())
    assert summary["num_steps"] == 3
    assert summary["largest_logprob_difference"] < 1e-3
    assert summary["mean"]["rollout/spec_accept_length"] >= 1


def test_colocated_asynchronous(repository_root: Path, tmp_path: Path) -> None:
    """Prompts of the next step are under way while this one trains: requests are cut, their weights change, and they go on."""
    steps = train(repository_root, tmp_path, "trainer.v1.trainer_mode=colocate_async", "trainer.total_training_steps=4")
    check_steps(steps, 4)
    assert all("training/off_policy/trajectory_staleness/mean" in step for step in steps)


def test_separate_asynchronous(repository_root: Path, tmp_path: Path) -> None:
    """Trainer and rollouts in two workers; weights through the object store."""
    steps = train(
        repository_root,
        tmp_path,
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.total_training_steps=4",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=rollout_spec",
        "ray_kwargs.ray_init.num_gpus=2",
    )
    check_steps(steps, 4)
    assert all(step["rollout_spec/weight_send_mb"] > 0 for step in steps)


def samples(folder: Path) -> list[list[tuple[str, str, float]]]:
    """(prompt, answer, score) of every step, sorted: siblings may finish in any order."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    steps = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    return [sorted((row["input"], row["output"], row["score"]) for row in step) for step in steps]


def test_a_seeded_run_is_the_same_with_and_without_speculation(repository_root: Path, tmp_path: Path) -> None:
    """Same answers, same scores, and so the same policy at the end of ten steps."""
    import torch

    found, weights = {}, {}
    for spec in ("off", "suffix"):
        run = tmp_path / spec
        steps = train(
            repository_root,
            run,
            "trainer.total_training_steps=10",
            "trainer.save_freq=10",
            f"trainer.default_local_dir={run}/checkpoints",
            f"trainer.rollout_data_dir={run}/samples",
            "data.seed=1",
            "+actor_rollout_ref.rollout.custom.rollout_spec.seed=1",
            spec=spec,
        )
        assert (sum(step["rollout_spec/draft_tokens_per_round"] for step in steps) > 0) == (spec == "suffix")
        found[spec] = samples(run / "samples")
        (saved,) = (run / "checkpoints" / "global_step_10" / "actor").glob("model_world_size_1_rank_0.pt")
        weights[spec] = torch.load(saved, weights_only=False)
    assert len(found["off"]) == 10
    assert found["suffix"] == found["off"]
    for name, tensor in weights["off"].items():
        difference = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor) - (
            weights["suffix"][name].full_tensor() if hasattr(tensor, "full_tensor") else weights["suffix"][name]
        )
        # Siblings may be summed in another order; nothing else differs.
        assert float(difference.abs().max()) < 1e-4, name
