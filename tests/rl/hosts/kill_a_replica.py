"""Two real servers under Ray, one killed in the middle of its requests; then the other one too. Prints what became of it as JSON.

python kill_a_replica.py POLICY
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import ray
from served import PROMPT, SAMPLED, perturbed

from rollout_spec_rl.verl.mailbox import Posting, open_mailbox
from rollout_spec_rl.verl.options import plan_rollouts
from rollout_spec_rl.verl.recovery import MAX_RESTARTS
from rollout_spec_rl.verl.server import RolloutServer
from rollout_spec_rl.verl.weights import WeightBucket

NUM_REQUESTS = 8
LENGTH = 400


def start(policy: str, rank: int) -> Any:
    """As the replica does it."""
    settings = {
        "dtype": "float32",
        "prompt_length": len(PROMPT),
        "response_length": LENGTH,
        "temperature": 1.0,
        "ignore_eos": True,
        "custom": {"rollout_spec": {"seed": 1, "drafter": "suffix"}},
    }
    options = {"num_cpus": 0, "max_concurrency": 100, "max_restarts": MAX_RESTARTS, "max_task_retries": -1}
    return ray.remote(RolloutServer).options(name=f"rollout_spec_server_{rank}", **options).remote(plan_rollouts(settings), policy, rank)


def process_of(server: Any) -> int:
    return int(ray.get(server.__ray_call__.remote(lambda _: os.getpid())))


def ask(server: Any) -> list[Any]:
    return [
        server.generate.remote(PROMPT, {**SAMPLED, "seed": seed, "max_tokens": LENGTH}, f"request-{seed}") for seed in range(NUM_REQUESTS)
    ]


async def send(servers: list[Any], bucket: WeightBucket) -> list[str]:
    posting = Posting(open_mailbox(), bucket.version)
    await posting.begin()
    reference = await posting.put(bucket)
    await posting.end()
    ray.get([server.receive_bucket.remote(reference) for server in servers])
    sums: list[str] = ray.get([server.commit_weights.remote(bucket.version, len(bucket.tensors)) for server in servers])
    return sums


def answers_of_the_killed(server: Any) -> tuple[bool, list[Any]]:
    """Whether another process answered, and what."""
    process, requests = process_of(server), ask(server)
    ready, _ = ray.wait(requests, timeout=0.2)  # some rounds of them
    assert not ready, "the requests ended before the process could be killed"
    os.kill(process, signal.SIGKILL)
    answers = ray.get(requests, timeout=600)
    return process_of(server) != process, answers


def main() -> None:
    policy = sys.argv[1]
    ray.init(num_cpus=2, include_dashboard=False)
    mailbox = open_mailbox()  # held by whoever trains
    servers = [start(policy, rank) for rank in range(2)]
    ray.get([server.ready.remote() for server in servers])
    bucket = WeightBucket.pack(7, perturbed(policy).items())
    first = asyncio.run(send(servers, bucket))
    wanted = [answer.token_ids for answer in ray.get(ask(servers[1]))]
    replaced, answers = answers_of_the_killed(servers[0])
    totals = ray.get([server.take_metrics.remote() for server in servers])
    # A bucket that the dead process had is not lost either: it is fetched when the rest arrives.
    late = WeightBucket.pack(8, perturbed(policy).items())
    posting = Posting(mailbox, 8)

    async def post() -> Any:
        await posting.begin()
        reference = await posting.put(late)
        await posting.end()
        return reference

    asyncio.run(post())
    second = ray.get(servers[0].commit_weights.remote(8, len(late.tensors)))
    report = {
        "replaced": replaced,
        "same_tokens": [answer.token_ids for answer in answers] == wanted,
        "num_tokens": [len(answer.token_ids) for answer in answers],
        "versions": sorted({answer.extra_fields["global_steps"] for answer in answers}),
        "restarts": [total.num_restarts for total in totals],
        "policy_versions": [total.policy_version for total in totals],
        "checksums": [*first, second],
    }
    print(json.dumps(report))  # noqa: T201  # its result


if __name__ == "__main__":
    main()
