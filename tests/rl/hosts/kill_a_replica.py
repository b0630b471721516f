"""Two real servers under Ray, one killed in the middle of its requests; then the other one too. Prints what became of it as JSON.

python kill_a_replica.py POLICY
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import ray
import torch
from served import PROMPT, SAMPLED, perturbed
from transformers import AutoModelForCausalLM

from rollout_spec.engine.weights import checksums, combine
from rollout_spec_rl.verl.adapter import RolloutSpecAdapter
from rollout_spec_rl.verl.mailbox import open_mailbox
from rollout_spec_rl.verl.options import plan_rollouts
from rollout_spec_rl.verl.recovery import MAX_RESTARTS
from rollout_spec_rl.verl.server import RolloutServer

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


def sender_to(server: Any) -> RolloutSpecAdapter:
    """The training worker's end, as far as it sends."""
    sender = RolloutSpecAdapter.__new__(RolloutSpecAdapter)
    sender.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1))
    sender._server, sender._mailbox = server, None
    return sender


def checksum_of(server: Any) -> str:
    """What the server's engine holds."""
    held: str = ray.get(server.__ray_call__.remote(lambda own: combine(checksums(own._engine._engine.runner.named_weights()))))
    return held


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
    servers = [start(policy, rank) for rank in range(2)]
    ray.get([server.ready.remote() for server in servers])
    senders = [sender_to(server) for server in servers]
    for sender in senders:
        asyncio.run(sender.update_weights(iter(perturbed(policy).items()), global_steps=7))
    first = [checksum_of(server) for server in servers]
    wanted = [answer.token_ids for answer in ray.get(ask(servers[1]))]
    replaced, answers = answers_of_the_killed(servers[0])
    totals = ray.get([server.take_metrics.remote() for server in servers])
    # The next version, of which every bucket went to the process that died.
    unperturbed = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).state_dict()
    asyncio.run(senders[1].update_weights(iter(unperturbed.items()), global_steps=8))
    ray.get(servers[0].commit_weights.remote(8, len(unperturbed)))
    second = [checksum_of(server) for server in servers]
    # Killed while a version is under way: it must neither wait for that in its start nor sample from the weights on disk.
    ray.get(open_mailbox().begin.remote(9, again=True))
    os.kill(process_of(servers[0]), signal.SIGKILL)
    ray.get(servers[0].ready.remote())
    waiting = ask(servers[0])
    early, _ = ray.wait(waiting, timeout=3)
    asyncio.run(senders[0].update_weights(iter(unperturbed.items()), global_steps=9))
    late = ray.get(waiting)
    report = {
        "early": len(early),
        "late_versions": sorted({answer.extra_fields["global_steps"] for answer in late}),
        "replaced": replaced,
        "same_tokens": [answer.token_ids for answer in answers] == wanted,
        "num_tokens": [len(answer.token_ids) for answer in answers],
        "versions": sorted({answer.extra_fields["global_steps"] for answer in answers}),
        "restarts": [total.num_restarts for total in totals],
        "policy_versions": [total.policy_version for total in totals],
        "checksums": [first, second],
    }
    print(json.dumps(report))  # noqa: T201  # its result


if __name__ == "__main__":
    main()
