"""What stands between verl and a server: seeds of trajectories, the counting client, the adapter, the mailbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def test_seeds_differ_by_everything_that_names_a_trajectory() -> None:
    from rollout_spec_rl.verl.agent_loop import trajectory_seed

    names = [(seed, step, row, session) for seed in range(3) for step in range(3) for row in range(3) for session in range(3)]
    seeds = {trajectory_seed(*name, validate=validate) for name in names for validate in (False, True)}
    assert len(seeds) == 2 * len(names)
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert trajectory_seed(1, 2, 3, 4, validate=False) == trajectory_seed(1, 2, 3, 4, validate=False)


def test_a_worker_gives_its_trajectories_seeds(rollout: Callable[..., dict[str, Any]]) -> None:
    from rollout_spec_rl.verl.agent_loop import SeededWorker, _PlainWorker, trajectory_seed
    from rollout_spec_rl.verl.options import RolloutSpecOptions

    seen: list[dict[str, Any]] = []

    async def record(self: Any, sampling_params: dict[str, Any], trajectory: Any, **_: Any) -> None:
        seen.append(sampling_params)

    trajectory = {"step": 2, "sample_index": 5, "rollout_n": 0, "validate": False}
    given = {"temperature": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_PlainWorker, "_run_agent_loop", record)
        for seed in (None, 11):
            worker = SeededWorker.__new__(SeededWorker)
            worker._options = RolloutSpecOptions(seed=seed)
            asyncio.run(worker._run_agent_loop(given, trajectory, session_id=3, trace=False))
    assert seen == [{"temperature": 1.0}, {"temperature": 1.0, "seed": trajectory_seed(11, 2, 5, 3, validate=False)}]
    assert given == {"temperature": 1.0}  # shared by all sessions of a prompt


def part(tokens: int, reason: str, version: int, drafted: int) -> Any:
    from verl.workers.rollout.replica import TokenOutput

    extra = {
        "global_steps": version,
        "spec_num_draft_tokens": drafted,
        "spec_num_accepted_tokens": tokens // 2,
        "spec_num_verify_steps": tokens - tokens // 2,
        "rollout_spec_versions": [(version, 0, tokens)] if tokens else [],
    }
    return TokenOutput(token_ids=[7] * tokens, log_probs=[-1.0] * tokens, stop_reason=reason, extra_fields=extra)


def test_counts_survive_verls_client_for_partial_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples at once, each in parts: counts are summed sample by sample, and versions keep their place."""
    from verl.workers.rollout import llm_server

    from rollout_spec_rl.verl.agent_loop import CountingClient

    answers = {
        "a": [part(4, "aborted", 1, 6), part(0, "aborted", 1, 0), part(6, "completed", 2, 9)],
        "b": [part(10, "completed", 2, 1)],
    }

    async def answer(self: Any, request_id: str, **_: Any) -> Any:
        await asyncio.sleep(0.01)
        return answers[request_id].pop(0)

    async def no_wait(_: float) -> None:
        await real_sleep(0)

    real_sleep = asyncio.sleep
    monkeypatch.setattr(llm_server.LLMServerClient, "generate", answer)
    monkeypatch.setattr(llm_server.asyncio, "sleep", no_wait)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(response_length=10)))
    client = CountingClient.like(llm_server.FullyAsyncLLMServerClient(config=config))
    assert type(client) is CountingClient

    async def both() -> list[Any]:
        return await asyncio.gather(*[client.generate(name, prompt_ids=[1, 2], sampling_params={}) for name in ("a", "b")])

    first, second = asyncio.run(both())
    assert len(first.token_ids) == 10
    assert first.extra_fields["rollout_spec_versions"] == [(1, 0, 4), (2, 4, 10)]
    assert (first.extra_fields["min_global_steps"], first.extra_fields["max_global_steps"]) == (1, 2)
    counts = [first.extra_fields[f"spec_num_{name}"] for name in ("draft_tokens", "accepted_tokens", "verify_steps")]
    assert counts == [15, 2 + 3, 2 + 3]
    assert second.extra_fields["spec_num_draft_tokens"] == 1


def test_other_clients_are_left_alone() -> None:
    from verl.workers.rollout.llm_server import LLMServerClient

    from rollout_spec_rl.verl.agent_loop import CountingClient

    client = LLMServerClient(config=None)
    assert CountingClient.like(client) is client


class FakeServer:
    """Records calls; ``server.method.remote(...)`` as with a Ray handle."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> None:
            self.calls.append((name, arguments))

        return SimpleNamespace(remote=call)


def adapter(server: FakeServer) -> Any:
    from rollout_spec_rl.verl.adapter import RolloutSpecAdapter

    made = RolloutSpecAdapter.__new__(RolloutSpecAdapter)
    made.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1))
    made.replica_rank, made._server, made._mailbox = 0, server, None
    return made


def in_process(box: Any) -> Any:
    """A mailbox called as through Ray."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=getattr(box, name)) for name in ("begin", "put", "end", "get", "newest")})


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> Any:
    from rollout_spec_rl.verl import adapter as module
    from rollout_spec_rl.verl import mailbox

    box = mailbox.Mailbox()
    monkeypatch.setattr(mailbox.ray, "put", lambda bucket: bucket)
    monkeypatch.setattr(module, "open_mailbox", lambda: in_process(box))
    return box


def test_the_adapter_sends_buckets_then_commits(mailbox: Any) -> None:
    server = FakeServer()
    weights = [(f"w{index}", torch.randn(200_000)) for index in range(3)]
    asyncio.run(adapter(server).update_weights(iter(weights), global_steps=4))
    assert [name for name, _ in server.calls] == ["receive_bucket"] * 3 + ["commit_weights", "set_global_steps"]
    assert server.calls[3][1] == (4, 3)
    # A server that is started again finds the very same.
    version, letters = asyncio.run(mailbox.newest())
    assert version == 4
    assert [letter[0] for letter in letters] == [arguments[0] for name, arguments in server.calls if name == "receive_bucket"]


def test_the_adapter_holds_its_mailbox(mailbox: Any) -> None:
    """A named actor ends with its last handle: one that is opened anew for every version would lose the version before."""
    sender = adapter(FakeServer())
    asyncio.run(sender.update_weights(iter([("w", torch.ones(3))]), global_steps=4))
    held = sender._mailbox
    asyncio.run(sender.update_weights(iter([("w", torch.ones(3))]), global_steps=5))
    assert held is not None
    assert sender._mailbox is held


def test_one_sender_of_several_fills_the_mailbox(mailbox: Any) -> None:
    servers = [FakeServer(), FakeServer()]
    weights = [(f"w{index}", torch.randn(200_000)) for index in range(3)]
    for server in servers:
        asyncio.run(adapter(server).update_weights(iter(weights), global_steps=4))
    assert [len(server.calls) for server in servers] == [5, 5]
    assert len(asyncio.run(mailbox.newest())[1]) == 3


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"wire_format": "delta_flush", "global_steps": 1}, "takes full tensors"),
        ({"peft_config": {"r": 8}, "global_steps": 1}, "lora.merge=True"),
        ({}, "without a version"),
    ],
)
def test_weights_in_other_forms_are_refused(named: dict[str, Any], said: str) -> None:
    server = FakeServer()
    with pytest.raises(ValueError, match=said):
        asyncio.run(adapter(server).update_weights(iter([]), **named))
    assert server.calls == []


def test_a_mailbox_waits_for_its_version() -> None:
    from rollout_spec_rl.verl.mailbox import Mailbox

    async def work() -> None:
        box = Mailbox()
        assert await box.newest() is None
        early = asyncio.create_task(box.get(2, 0))
        assert await box.begin(1, again=False)
        await box.put(1, ["old"])
        await box.end(1)
        assert await box.get(1, 0) == ["old"]
        assert await box.get(1, 1) is None
        assert not early.done()
        assert await box.begin(2, again=False)
        assert not await box.begin(2, again=False)
        late = asyncio.create_task(box.get(2, 1))
        await box.put(2, ["first"])
        assert await early == ["first"]
        assert not late.done()
        await box.end(2)
        assert await late is None
        # A second reader gets the same, however late it comes.
        assert await box.get(2, 0) == ["first"]
        assert await box.newest() == (2, [["first"]])
        # A trainer that resumes may send a version once more.
        assert await box.begin(2, again=True)
        # Half of a version is none, and nobody waits for the rest: the sender may wait for the one that asks.
        assert await box.newest() is None
        await box.put(2, ["other"])
        await box.end(2)
        assert await box.newest() == (2, [["other"]])

    asyncio.run(work())


def test_metrics_come_from_every_server_that_lives(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from ray.exceptions import ActorDiedError

    from rollout_spec_rl.verl import collect
    from rollout_spec_rl.verl.metrics import StepTotals

    alive = {"rollout_spec_server_0": StepTotals(num_requests=3), "rollout_spec_server_2": StepTotals(num_requests=4)}
    names = [*alive, "rollout_spec_server_1", "rollout_spec_server_3", "another_actor"]

    def get(name: str) -> StepTotals:
        if name == "rollout_spec_server_1":
            raise ActorDiedError
        return alive[name]

    def get_actor(name: str) -> Any:
        if name == "rollout_spec_server_3":
            raise ValueError("Failed to look up actor")
        return SimpleNamespace(take_metrics=SimpleNamespace(remote=lambda: name))

    monkeypatch.setattr(collect.ray.util, "list_named_actors", lambda: names)
    monkeypatch.setattr(collect.ray, "get_actor", get_actor)
    monkeypatch.setattr(collect.ray, "get", get)
    found = collect.step_metrics()
    assert (found["rollout_spec/num_requests"], found["rollout_spec/num_replicas"]) == (7, 2)
    assert "rollout_spec_server_1 gave no metrics" in caplog.text
    assert "rollout_spec_server_3 gave no metrics" in caplog.text
    names[:] = ["another_actor"]
    assert collect.step_metrics() == {}
