"""Real trainings: verl's own trainer, a tiny model, rollouts by us, on this CPU. Each takes minutes; a few of them guard every change."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(3600)


def start(
    root: Path, run: Path, *overrides: str, spec: str = "suffix", mode: str = "sync", example: str = "verl_grpo_tiny"
) -> subprocess.Popen[str]:
    """The example, begun; what it says goes to a file beside its run."""
    environment = {**os.environ, "RUN": str(run), "SPEC": spec, "MODE": mode, "PYTHON": sys.executable, "RAY_DEDUP_LOGS": "0"}
    script = root / "examples" / example / "run.sh"
    with log_of(run).open("w") as log:
        return subprocess.Popen([str(script), *overrides], stdout=log, stderr=log, text=True, cwd=root, env=environment)


def log_of(run: Path) -> Path:
    return run.with_suffix(".log")


def finish(started: subprocess.Popen[str], run: Path) -> list[dict[str, Any]]:
    """The metrics of its training steps, once it has ended well."""
    assert started.wait() == 0, log_of(run).read_text()[-8000:]
    return steps_of(run)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Those of the training steps that were logged so far."""
    path = run / "metrics.jsonl"
    lines = [record["data"] for record in records(path)] if path.exists() else []
    return [line for line in lines if "training/global_step" in line]


def records(path: Path) -> list[Any]:
    """The whole lines of a file that may still grow; answers hold separators that splitlines would take for ends of lines."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def wait_for_step(started: subprocess.Popen[str], run: Path, step: int) -> None:
    """Until so many steps are logged; the next one is under way then."""
    while len(steps_of(run)) < step:
        assert started.poll() is None, log_of(run).read_text()[-8000:]
        time.sleep(0.2)


def family(started: subprocess.Popen[str]) -> list[psutil.Process]:
    """Everything that the example runs: verl's program, Ray and its workers."""
    return [process for process in psutil.Process(started.pid).children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE]


def train(root: Path, run: Path, *overrides: str, **chosen: str) -> list[dict[str, Any]]:
    """Run an example, chosen as start has it; returns the metrics of its training steps."""
    return finish(start(root, run, *overrides, **chosen), run)


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
    lines = steps_of(sync_run)
    check_steps(lines, 3)
    # The weights of a step are in use when its metrics are logged, and every sample is of this step.
    assert [line["rollout_spec/policy_version"] for line in lines] == [1, 2, 3]
    assert [line["rollout_spec/num_requests"] for line in lines] == [32, 32, 32]
    summary = json.loads((sync_run / "summary.json").read_text())
    assert summary["num_steps"] == 3
    assert summary["largest_logprob_difference"] < 1e-3
    assert summary["mean"]["rollout/spec_accept_length"] >= 1


@pytest.mark.slow
def test_colocated_asynchronous(repository_root: Path, tmp_path: Path) -> None:
    """Prompts of the next step are under way while this one trains: requests are cut, their weights change, and they go on."""
    steps = train(repository_root, tmp_path, "trainer.total_training_steps=4", mode="colocate_async")
    check_steps(steps, 4)
    assert all("training/off_policy/trajectory_staleness/mean" in step for step in steps)


@pytest.mark.slow
def test_separate_asynchronous(repository_root: Path, tmp_path: Path) -> None:
    """Trainer and rollouts in two workers; weights through the object store."""
    steps = train(repository_root, tmp_path, "trainer.total_training_steps=4", mode="separate_async")
    check_steps(steps, 4)
    assert all(step["rollout_spec/weight_send_mb"] > 0 for step in steps)


@pytest.mark.slow
def test_fully_asynchronous(repository_root: Path, tmp_path: Path) -> None:
    """A stream of samples; what the servers count arrives although verl builds its own client here."""
    steps = train(repository_root, tmp_path, mode="fully_async")
    assert len(steps) == 3  # verl logs a step's figures with the next one
    assert all(step["rollout_spec/num_failed_requests"] == 0 for step in steps)
    assert [step["rollout_spec/policy_version"] for step in steps] == [2, 3, 4]
    assert sum(step["rollout_spec/num_requests"] for step in steps) == 32 * 4
    assert all(step["rollout/spec_accept_length"] >= 1 for step in steps)


def samples(folder: Path) -> list[list[tuple[str, str, float]]]:
    """(prompt, answer, score) of every step, sorted: siblings may finish in any order."""
    files = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem))
    return [sorted((row["input"], row["output"], row["score"]) for row in records(path)) for path in files]


# The policy itself at another temperature: drafts three tokens every round, and is wrong often enough.
DRAFTED = (
    "actor_rollout_ref.rollout.custom.rollout_spec.drafter=self:1.3",
    "+actor_rollout_ref.rollout.custom.rollout_spec.budget=fixed:3",
)


def test_a_seeded_run_is_the_same_with_and_without_speculation(repository_root: Path, tmp_path: Path) -> None:
    """Same answers, same scores, and so the same policy at the end of ten steps."""
    found, weights = {}, {}
    for spec, overrides in (("off", ()), ("suffix", DRAFTED)):
        run = tmp_path / spec
        steps = train(
            repository_root,
            run,
            "trainer.total_training_steps=10",
            "trainer.save_freq=10",
            f"trainer.rollout_data_dir={run}/samples",
            "data.seed=1",
            "+actor_rollout_ref.rollout.custom.rollout_spec.seed=1",
            *overrides,
            spec=spec,
        )
        drafted = [step["rollout_spec/draft_tokens_per_round"] for step in steps]
        assert max(drafted) == 0 if spec == "off" else min(drafted) > 2
        if spec != "off":
            assert all(0.3 < step["rollout/spec_accept_rate"] < 0.95 for step in steps)
        found[spec], weights[spec] = samples(run / "samples"), saved_policy(run, 10)
    assert len(found["off"]) == 10
    assert found["suffix"] == found["off"]
    # Siblings may be summed in another order; nothing else differs.
    assert max(float((weights["suffix"][name] - tensor).abs().max()) for name, tensor in weights["off"].items()) < 1e-4


def saved_policy(run: Path, step: int) -> dict[str, Any]:
    """The trainer's weights in its checkpoint, whole."""
    import torch

    saved = torch.load(run / "checkpoints" / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.pt", weights_only=False)
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in saved.items()}


def test_a_rollout_process_is_killed_in_the_middle_of_a_step(repository_root: Path, tmp_path: Path) -> None:
    """Two replicas beside the trainer, one killed: every step gets all its samples, and the log and the metrics say what happened."""
    run = tmp_path / "run"
    started = start(
        repository_root,
        run,
        "trainer.total_training_steps=5",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=3",
        f"trainer.rollout_data_dir={run}/samples",
        # Long answers, so that requests are under way at any time.
        "data.max_response_length=256",
        "actor_rollout_ref.rollout.ignore_eos=true",
        mode="separate_async",
    )
    wait_for_step(started, run, 2)
    servers = [process for process in family(started) if "RolloutServer" in process.cmdline()[0]]
    assert len(servers) == 2
    servers[0].kill()
    steps = finish(started, run)
    assert [step["training/global_step"] for step in steps] == [1, 2, 3, 4, 5]
    assert sum(step["rollout_spec/num_restarts"] for step in steps) == 1
    assert [step["rollout_spec/num_replicas"] for step in steps][-1] == 2
    found = samples(run / "samples")
    assert [len(step) for step in found] == [32] * 5
    assert all(step["rollout_spec/num_failed_requests"] == 0 for step in steps)
    assert "its process died and was started again; weights version" in log_of(run).read_text()


@pytest.mark.slow
def test_a_killed_trainer_resumes_from_its_checkpoint(repository_root: Path, tmp_path: Path) -> None:
    """The same steps as a run that nobody killed: policy and versions come back, and the drafter that was refreshed meanwhile."""
    ours = "actor_rollout_ref.rollout.custom.rollout_spec"
    common = (
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.resume_mode=auto",
        "data.seed=1",
        f"+{ours}.seed=1",
        f"+{ours}.budget=fixed:3",
        # A head that is trained before the first step, and then with every version.
        f"+{ours}.drafter_cache={tmp_path}/cache",
        f"+{ours}.refresh_every=1",
        f"+{ours}.refresh_steps=8",
        f"+{ours}.refresh_lr=3e-3",
    )
    whole, run = tmp_path / "whole", tmp_path / "run"
    steps = train(repository_root, whole, *common, f"trainer.rollout_data_dir={whole}/samples", spec="mtp")
    assert sum(step["rollout_spec/drafter_refreshes"] for step in steps) >= 3
    assert all(step["rollout/spec_accept_rate"] > 0.03 for step in steps)
    started = start(repository_root, run, *common, f"trainer.rollout_data_dir={run}/samples", spec="mtp")
    wait_for_step(started, run, 3)
    for process in [psutil.Process(started.pid), *family(started)]:
        process.kill()
    started.wait()
    # Of what died, step 3 was not saved: it is done again.
    before = steps_of(run)
    assert before[1]["rollout_spec/drafter_version"] > 0
    (run / "metrics.jsonl").rename(run / "first.jsonl")
    steps = train(repository_root, run, *common, f"trainer.rollout_data_dir={run}/samples", spec="mtp")
    assert [step["training/global_step"] for step in steps] == [3, 4]
    assert [step["rollout_spec/policy_version"] for step in steps] == [3, 4]
    assert steps[0]["rollout_spec/drafter_version"] >= before[1]["rollout_spec/drafter_version"]
    # A seeded answer is the same whatever drafts it.
    assert samples(run / "samples") == samples(whole / "samples")
