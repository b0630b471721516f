"""A rollout process that dies: Ray starts it again and it takes the weights of another. Real processes, killed for real."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_server import PROMPT, SAMPLED, perturbed

from rollout_spec_rl.verl.options import plan_rollouts
from rollout_spec_rl.verl.weights import WeightBucket

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture
def replicas(tiny_policy: Path, rollout: Any) -> Iterator[list[Any]]:
    """Two servers as a replica starts them."""
    import ray

    from rollout_spec_rl.verl.names import server_name
    from rollout_spec_rl.verl.recovery import MAX_RESTARTS
    from rollout_spec_rl.verl.server import RolloutServer

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        plan = plan_rollouts(rollout({"seed": 1, "drafter": "suffix"}, ignore_eos=True, response_length=400, max_model_len=512))
        options = {"num_cpus": 0, "max_concurrency": 100, "max_restarts": MAX_RESTARTS, "max_task_retries": -1}
        names = [server_name(rank) for rank in range(2)]
        servers = [
            ray.remote(RolloutServer).options(name=name, **options).remote(plan, str(tiny_policy), rank, name)
            for rank, name in enumerate(names)
        ]
        ray.get([server.ready.remote() for server in servers])
        yield servers
    finally:
        ray.shutdown()


def process_of(server: Any) -> int:
    import ray

    return int(ray.get(server.__ray_call__.remote(lambda _: os.getpid())))


def send(servers: list[Any], tensors: dict[str, torch.Tensor], version: int) -> list[str]:
    import ray

    bucket = WeightBucket.pack(version, tensors.items())
    ray.get([server.receive_bucket.remote(bucket) for server in servers])
    sums: list[str] = ray.get([server.commit_weights.remote(version, len(tensors)) for server in servers])
    return sums


def ask(server: Any, seed: int) -> Any:
    return server.generate.remote(PROMPT, {**SAMPLED, "seed": seed, "max_tokens": 400}, f"request-{seed}")


def test_a_killed_replica_comes_back_with_the_newest_weights_and_answers_everything(tiny_policy: Path, replicas: list[Any]) -> None:
    import ray

    send(replicas, perturbed(tiny_policy), 7)
    wanted = [output.token_ids for output in ray.get([ask(replicas[1], seed) for seed in range(8)])]
    died = process_of(replicas[0])
    answers = [ask(replicas[0], seed) for seed in range(8)]
    ray.wait(answers, timeout=0.2)  # some rounds of them
    os.kill(died, signal.SIGKILL)
    outputs = ray.get(answers, timeout=300)
    assert process_of(replicas[0]) != died
    # The same seeds under the same weights: what the dead process owed is what any other would have answered.
    assert [output.token_ids for output in outputs] == wanted
    assert {output.extra_fields["global_steps"] for output in outputs} == {7}
    held = ray.get([server.export_weights.remote() for server in replicas])
    assert held[0].checksums == held[1].checksums
    totals = ray.get([server.take_metrics.remote() for server in replicas])
    assert [total.num_restarts for total in totals] == [1, 0]
    assert [total.policy_version for total in totals] == [7, 7]
    # It takes part in the next synchronisation like any other.
    assert len(set(send(replicas, perturbed(tiny_policy), 8))) == 1


def test_the_only_replica_that_knew_the_weights_cannot_be_replaced(tiny_policy: Path, replicas: list[Any]) -> None:
    """Sampling from the weights on disk would be silent and wrong."""
    import ray
    from ray.exceptions import RayActorError

    send(replicas[:1], perturbed(tiny_policy), 7)
    os.kill(process_of(replicas[0]), signal.SIGKILL)
    with pytest.raises(RayActorError, match="no other replica holds the trainer's weights: resume the job from its checkpoint"):
        ray.get(ask(replicas[0], 0), timeout=300)
