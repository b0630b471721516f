"""The replica's server without Ray: one process, the real engine, verl's calls in verl's order."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served import PROMPT, SAMPLED, perturbed
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout_spec_rl.verl.options import plan_rollouts
from rollout_spec_rl.verl.weights import buckets

Rollout = Callable[..., dict[str, Any]]


def serve(work: Callable[[Any], Awaitable[Any]], policy: Path, settings: dict[str, Any]) -> Any:
    """Run ``work(server)`` on an event loop of its own, as in the actor; the engine's thread ends with it."""
    from rollout_spec_rl.verl.server import RolloutServer

    async def run() -> Any:
        server = RolloutServer(plan_rollouts(settings), str(policy), 0)
        try:
            return await work(server)
        finally:
            server._engine.close()

    return asyncio.run(run())


async def send(server: Any, tensors: dict[str, Tensor], version: int, limit: int = 20_000, skip: int = -1) -> str:
    """As the adapter does; ``skip`` loses the bucket of that number on the way."""

    async def source() -> AsyncIterator[tuple[str, Tensor]]:
        for pair in tensors.items():
            yield pair

    number = 0
    async for bucket in buckets(source(), version, limit):
        if number != skip:
            await server.receive_bucket(bucket)
        number += 1
    assert number > 1
    checksum: str = await server.commit_weights(version, len(tensors))
    return checksum


def recomputed(policy: Path, tokens: list[int], weights: dict[str, Tensor] | None = None, temperature: float = 1.0) -> Tensor:
    """[T] log-probabilities of the answer as a trainer computes them: one forward of prompt and answer by transformers."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(weights)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("drafter", ["none", "suffix", "self"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_the_trainer_computes(tiny_policy: Path, rollout: Rollout, drafter: str, temperature: float) -> None:
    async def work(server: Any) -> Any:
        wanted = [server.generate(PROMPT, {**SAMPLED, "temperature": temperature}, f"r{index}") for index in range(4)]
        return await asyncio.gather(*wanted)

    for output in serve(work, tiny_policy, rollout({"drafter": drafter}, ignore_eos=True)):
        assert len(output.token_ids) == len(output.log_probs) == 24
        difference = torch.tensor(output.log_probs) - recomputed(tiny_policy, output.token_ids, temperature=temperature)
        assert float(difference.abs().max()) < 1e-4
        assert output.stop_reason == "completed"
        # The suffix drafter finds little to repeat in the answers of a random model.
        assert (output.extra_fields["spec_num_draft_tokens"] > 0) == (drafter == "self") or drafter == "suffix"


def test_seeded_tokens_are_the_same_with_and_without_speculation(tiny_policy: Path, rollout: Rollout) -> None:
    async def work(server: Any) -> list[list[int]]:
        wanted = [server.generate(PROMPT, {**SAMPLED, "seed": index}, f"r{index}") for index in range(6)]
        return [output.token_ids for output in await asyncio.gather(*wanted)]

    plain = serve(work, tiny_policy, rollout({"drafter": "none", "seed": 1}))
    assert len({tuple(tokens) for tokens in plain}) == 6
    for custom in ({"drafter": "self"}, {"drafter": "suffix", "max_batch": 2}, {"drafter": "self", "tree_width": [2, 1]}):
        assert serve(work, tiny_policy, rollout({"seed": 1, **custom})) == plain


def test_an_aborted_sample_goes_on_where_it_stopped(tiny_policy: Path, rollout: Rollout) -> None:
    """verl's client sends prompt + what came back under the same seed: the whole is what an undisturbed run gives."""
    settings = rollout({"drafter": "suffix", "seed": 1}, response_length=200, ignore_eos=True)

    async def whole(server: Any) -> list[int]:
        output = await server.generate(PROMPT, {**SAMPLED, "seed": 3, "max_tokens": 200}, "r")
        return list(output.token_ids)

    async def in_parts(server: Any) -> tuple[list[int], int, dict[str, int]]:
        running = asyncio.create_task(server.generate(PROMPT, {**SAMPLED, "seed": 3, "max_tokens": 200}, "r"))
        await asyncio.sleep(0.05)
        told = await server.abort_all_requests()
        part = await running
        assert part.stop_reason == "aborted"
        assert len(part.log_probs) == len(part.token_ids)
        await server.resume_generation()
        left = 200 - len(part.token_ids)
        rest = await server.generate(PROMPT + part.token_ids, {**SAMPLED, "seed": 3, "max_tokens": left}, "r")
        return part.token_ids + rest.token_ids, len(part.token_ids), told

    tokens, cut, told = serve(in_parts, tiny_policy, settings)
    assert tokens == serve(whole, tiny_policy, settings)
    assert 0 <= cut < 200
    assert told == {"aborted_count": 1}


def test_closed_means_closed(tiny_policy: Path, rollout: Rollout) -> None:
    async def work(server: Any) -> None:
        await server.abort_all_requests()
        waiting = asyncio.create_task(server.generate(PROMPT, SAMPLED, "waits"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await server.resume_generation()
        assert (await waiting).stop_reason == "completed"
        await server.abort_all_requests(reject_request=True)
        turned_away = await server.generate(PROMPT, SAMPLED, "turned away")
        assert (turned_away.stop_reason, turned_away.token_ids) == ("aborted", [])
        # A plain abort, as in a weight sync, lets late requests wait again.
        await server.abort_all_requests()
        waiting = asyncio.create_task(server.generate(PROMPT, SAMPLED, "waits again"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await server.resume_generation()
        assert (await waiting).stop_reason == "completed"

    serve(work, tiny_policy, rollout())


def test_sleep_waits_for_what_runs(tiny_policy: Path, rollout: Rollout) -> None:
    async def work(server: Any) -> None:
        running = asyncio.create_task(server.generate(PROMPT, {**SAMPLED, "ignore_eos": True}, "r"))
        await asyncio.sleep(0)
        await server.sleep()
        await asyncio.sleep(0)
        assert running.done()
        await server.wake_up()

    serve(work, tiny_policy, rollout())


def test_new_weights_are_used_and_named(tiny_policy: Path, rollout: Rollout) -> None:
    weights = perturbed(tiny_policy)

    async def work(server: Any) -> tuple[Any, Any]:
        before = await server.generate(PROMPT, SAMPLED, "before")
        assert before.extra_fields["global_steps"] == 0
        checksum = await send(server, weights, 7)
        assert checksum == await send(server, weights, 8)
        await server.set_global_steps(8)
        with pytest.raises(RuntimeError, match="verl says weights version 9, the engine of replica 0 holds 8"):
            await server.set_global_steps(9)
        return await server.generate(PROMPT, SAMPLED, "after"), await server.take_metrics()

    after, metrics = serve(work, tiny_policy, rollout(ignore_eos=True))
    assert after.extra_fields["rollout_spec_versions"] == [(8, 0, 24)]
    assert metrics.policy_version == 8
    difference = torch.tensor(after.log_probs) - recomputed(tiny_policy, after.token_ids, weights)
    assert float(difference.abs().max()) < 1e-4


def test_weights_under_way_are_all_or_nothing(tiny_policy: Path, rollout: Rollout) -> None:
    """A lost bucket, a missing tensor, a tensor that is not the model's, a NaN: an error by name, and the old weights stay."""
    weights = perturbed(tiny_policy)
    name = "model.layers.1.mlp.up_proj.weight"
    faults: list[tuple[dict[str, Tensor], int, str]] = [
        (weights, 0, "nothing was changed"),
        ({key: value for key, value in weights.items() if key != name}, -1, f"missing tensor {name}"),
        ({**weights, "model.layers.9.extra": torch.zeros(2)}, -1, r"unknown tensor model\.layers\.9\.extra"),
        ({**weights, name: torch.full_like(weights[name], float("nan"))}, -1, f"{name} holds NaN"),
    ]

    async def work(server: Any) -> Any:
        for tensors, skip, said in faults:
            with pytest.raises(ValueError, match=said):
                await send(server, tensors, 4, skip=skip)
        return await server.generate(PROMPT, SAMPLED, "after")

    after = serve(work, tiny_policy, rollout(ignore_eos=True))
    assert after.extra_fields["global_steps"] == 0
    assert float((torch.tensor(after.log_probs) - recomputed(tiny_policy, after.token_ids)).abs().max()) < 1e-4


def test_requests_that_cannot_be_served(tiny_policy: Path, rollout: Rollout) -> None:
    async def work(server: Any) -> None:
        with pytest.raises(ValueError, match="serves text only, and takes no image_data"):
            await server.generate(PROMPT, SAMPLED, "r", image_data=["picture"])
        with pytest.raises(ValueError, match="'prompt_logprobs' is not known"):
            await server.generate(PROMPT, {**SAMPLED, "prompt_logprobs": 1}, "r")
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await server.generate([10**6], SAMPLED, "r")
        # None of them is left inside the gate.
        await asyncio.wait_for(server.wait_for_requests_to_drain(), timeout=5)
        assert (await server.generate(PROMPT, SAMPLED, "r")).stop_reason == "completed"

    serve(work, tiny_policy, rollout())


def fetch(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read().decode())


def test_events_are_written_where_they_are_wanted(tiny_policy: Path, rollout: Rollout, tmp_path: Path) -> None:
    from rollout_spec.events import RequestEvent, TrainEvent
    from rollout_spec.sinks import read_events

    log = tmp_path / "run" / "replica-0.jsonl"

    async def work(server: Any) -> None:
        await server.generate(PROMPT, SAMPLED, "r")
        await server.note_training(3, 0.5, {"rollout_corr/rollout_is_mean": 1.0})
        assert (await server.take_metrics()).num_drafter_refreshes == 0  # it is the policy that was trained
        (targets,) = (tmp_path / "prometheus").iterdir()
        (found,) = json.loads(targets.read_text())
        assert found["labels"] == {"engine": "rollout_spec", "replica": "0", "drafter": "none"}
        assert "rollout_spec_rounds_total" in await asyncio.to_thread(fetch, f"http://{found['targets'][0]}/metrics")
        # The log is written beside the rollouts, not by them.
        deadline = time.monotonic() + 30
        while not any(isinstance(event, TrainEvent) for event in read_events(log)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    serve(work, tiny_policy, rollout({"events": str(tmp_path / "run"), "sinks": ["prometheus"]}))
    events = read_events(log)
    (finished,) = [event for event in events if isinstance(event, RequestEvent)]
    assert finished.finish_reason in ("stop", "length")
    (trained,) = [event for event in events if isinstance(event, TrainEvent)]
    assert (trained.role, trained.step, trained.metrics) == ("policy", 3, {"rollout_corr/rollout_is_mean": 1.0})
