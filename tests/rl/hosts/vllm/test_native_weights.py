"""New weights of vLLM's own drafters: they draft by them as an engine that began with them does, and the policy stays as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_law import greedy
from safetensors.torch import save_file
from tiny_vllm import driver_of, load, native, runner_of, sample, totals_of, write_mtp_policy, write_policy
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext
from rollout_spec.engine.weights import checksums, combine
from rollout_spec.events import WeightSyncEvent
from rollout_spec.sinks import read_events
from rollout_spec.tree import DraftTree
from rollout_spec_rl.vllm.checkpoint_files import read_tensors
from rollout_spec_rl.vllm.native import NativeDrafter

KINDS = ("draft", "eagle", "eagle3", "dflash")


def moved(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Other weights of the same drafter: norms, projections, and DFlash's keys and values among them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        keep = not tensor.is_floating_point() or name == "embed_tokens.weight"
        found[name] = (
            tensor
            if keep
            else tensor + 0.3 * tensor.float().std(correction=0).clamp_min(0.3) * torch.randn(tensor.shape, generator=generator)
        )
    return {name: tensor.to(tensors[name].dtype).contiguous() for name, tensor in found.items()}


def settings(kind: str, natives: Path, **options: Any) -> dict[str, Any]:
    return {**native(kind, natives), "budget": "fixed:1", **options}


def drafted(llm: Any, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """[T, V] what the drafter draws its first token of a round from, along the policy's likeliest tokens.

    The policy is sampled with top-k 1, for greedy requests are drafted for without a distribution.
    """
    seen: list[Tensor] = []
    right = NativeDrafter.propose

    def listening(self: NativeDrafter, context: DraftContext, budget: Budget) -> DraftTree:
        probs = right(self, context, budget).draft_probs
        seen.extend([] if probs is None else [probs[0, 0]])
        # Nothing is verified, so that every round begins at the next token, whatever was drawn.
        return DraftTree.empty(len(context.requests))

    with monkeypatch.context() as patch:
        patch.setattr(NativeDrafter, "propose", listening)
        llm.reset_prefix_cache()
        sample(llm, 1, 20, temperature=1.0, top_k=1)
    return torch.stack(seen)


def written(tensors: dict[str, Tensor], like: Path, folder: Path) -> None:
    """A checkpoint folder with other tensors."""
    shutil.copytree(like, folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def update(llm: Any, tensors: dict[str, Tensor], version: int) -> str:
    (checksum,) = llm.collective_rpc("rollout_spec_update_drafter", args=(list(tensors.items()), version))
    return str(checksum)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_new_weights(
    kind: str, start: Callable[..., Any], natives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = dict(read_tensors(natives / kind))
    new = moved(old, seed=7)
    written(new, natives / kind, tmp_path / kind)
    llm = start(options=settings(kind, tmp_path))
    expected, policy = drafted(llm, monkeypatch), sample(llm, 1, 20, temperature=0)
    del llm

    llm = start(options=settings(kind, natives, events=str(tmp_path / "events")))
    before = drafted(llm, monkeypatch)
    assert before.shape == expected.shape
    assert (before - expected).abs().max() > 0.05, "the weights are too much alike to be told apart"
    checksum = update(llm, old, 1)
    torch.testing.assert_close(drafted(llm, monkeypatch), before, rtol=1e-5, atol=1e-6)
    assert update(llm, new, 2) != checksum
    torch.testing.assert_close(drafted(llm, monkeypatch), expected, rtol=1e-5, atol=1e-6)
    assert update(llm, old, 3) == checksum
    torch.testing.assert_close(drafted(llm, monkeypatch), before, rtol=1e-5, atol=1e-6)
    assert sample(llm, 1, 20, temperature=0) == policy
    llm.collective_rpc("rollout_spec_close")
    events = [event for event in read_events(tmp_path / "events" / "replica-0.jsonl") if isinstance(event, WeightSyncEvent)]
    assert [(event.role, event.version, event.num_tensors) for event in events] == [("drafter", version, len(old)) for version in range(4)]
    assert events[0].checksum == events[1].checksum == checksum == combine(checksums(old))


def test_a_folder_will_do_as_well(start: Callable[..., Any], natives: Path) -> None:
    llm = start(options=settings("draft", natives))
    (checksum,) = llm.collective_rpc("rollout_spec_update_drafter", args=(str(natives / "draft"), 1))
    assert checksum == combine(checksums(dict(read_tensors(natives / "draft"))))


def test_a_head_in_the_policys_checkpoint_is_updated_alone(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = write_mtp_policy(tmp_path / "model")
    whole = dict(read_tensors(policy))
    head = {name: tensor for name, tensor in whole.items() if ".mtp_layers." in name}
    llm = start(model=str(policy), options={"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "budget": "fixed:1"})
    tokens, before = sample(llm, 1, 20, temperature=0), drafted(llm, monkeypatch)
    checksum = update(llm, head, 1)
    assert checksum == combine(checksums(head)) == combine(driver_of(llm).speculator.drafter.loaded)
    torch.testing.assert_close(drafted(llm, monkeypatch), before, rtol=1e-5, atol=1e-6)
    # The policy's own tensors may come along, and are left out.
    assert update(llm, {name: 2 * tensor for name, tensor in whole.items()} | moved(head, seed=8), 2) != checksum
    assert (drafted(llm, monkeypatch) - before).abs().max() > 0.05
    assert sample(llm, 1, 20, temperature=0) == tokens
    assert update(llm, whole, 3) == checksum
    torch.testing.assert_close(drafted(llm, monkeypatch), before, rtol=1e-5, atol=1e-6)
    # The policy's update is all of its checkpoint, and leaves the head in it alone.
    llm.collective_rpc("rollout_spec_update_policy", args=(list((whole | moved(head, seed=8)).items()), 1))
    torch.testing.assert_close(drafted(llm, monkeypatch), before, rtol=1e-5, atol=1e-6)
    assert sample(llm, 1, 20, temperature=0) == tokens


def test_what_a_head_borrows_follows_the_policys_update(
    start: Callable[..., Any], policy: Path, natives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An EAGLE head without an embedding uses the policy's, and its output head: those of an engine that began with the new policy."""
    tensors = dict(read_tensors(natives / "eagle"))
    del tensors["embed_tokens.weight"]
    written(tensors, natives / "eagle", tmp_path / "eagle")
    new = moved(dict(read_tensors(policy)), seed=9)
    new["model.norm.weight"] = new["model.norm.weight"].abs() + 0.5
    written(new, policy, tmp_path / "policy")
    llm = start(model=str(tmp_path / "policy"), options=settings("eagle", tmp_path))
    expected, tokens = drafted(llm, monkeypatch), sample(llm, 1, 20, temperature=0)
    del llm
    llm = start(options=settings("eagle", tmp_path))
    assert (drafted(llm, monkeypatch) - expected).abs().max() > 0.05
    llm.collective_rpc("rollout_spec_update_policy", args=(list(new.items()), 1))
    torch.testing.assert_close(drafted(llm, monkeypatch), expected, rtol=1e-5, atol=1e-6)
    assert sample(llm, 1, 20, temperature=0) == tokens


def test_what_a_drafter_shares_with_the_policy_stays_the_policys(
    start: Callable[..., Any], natives: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lets a head whose embedding equals the policy's use the policy's: loading another one must not land there."""
    llm = start(options=settings("eagle", natives))
    runner = runner_of(llm)
    target = runner.get_model()
    assert runner.drafter.model.model.embed_tokens is target.model.embed_tokens
    policy, before = sample(llm, 1, 20, temperature=0), drafted(llm, monkeypatch)
    held = target.model.embed_tokens.weight.clone()
    tensors = dict(read_tensors(natives / "eagle"))
    update(llm, tensors | {"embed_tokens.weight": 2 * tensors["embed_tokens.weight"] + 1}, 1)
    assert torch.equal(target.model.embed_tokens.weight, held)
    assert runner.drafter.model.model.embed_tokens is target.model.embed_tokens
    assert sample(llm, 1, 20, temperature=0) == policy
    torch.testing.assert_close(drafted(llm, monkeypatch), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "missing tensor layers.1.self_attn.k_proj.weight"),
        ("unknown", "unknown tensor layers.9.weight"),
        ("misshapen", r"norm.weight has shape \(3,\)"),
        ("not finite", "norm.weight holds NaN"),
    ],
)
def test_faulty_weights_are_refused_by_name_and_change_nothing(
    fault: str, message: str, start: Callable[..., Any], natives: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(options=settings("dflash", natives))
    given, before = dict(read_tensors(natives / "dflash")), drafted(llm, monkeypatch)
    if fault == "missing":
        del given["layers.1.self_attn.k_proj.weight"]
    elif fault == "unknown":
        given["layers.9.weight"] = torch.ones(1)
    else:
        given["norm.weight"] = torch.ones(3) if fault == "misshapen" else torch.full((64,), torch.nan)
    with pytest.raises(ValueError, match=message):
        update(llm, given, 9)
    assert torch.equal(drafted(llm, monkeypatch), before)


def test_a_head_that_is_tied_to_the_embedding_follows_it(start: Callable[..., Any], tmp_path: Path) -> None:
    """Nothing is loaded into such a head by its own name: the policy's and a draft model's would go on with the old one, packed."""
    first, second = (write_policy(tmp_path / str(seed), seed, tied=True) for seed in (0, 1))
    config = {"method": "draft_model", "model": str(first), "num_speculative_tokens": 3}
    llm = start(model=str(first), options={"speculative_config": config, "budget": "fixed:3"})

    def ask() -> tuple[tuple[int, ...], float]:
        llm.reset_prefix_cache()
        tokens = sample(llm, 1, 24, temperature=0)[0]
        totals_of(llm)
        sample(llm, 24, 24, temperature=1.0)
        return tokens, totals_of(llm)["rollout/spec_accept_rate"]

    tokens, rate = ask()
    assert (tokens, rate > 0.999) == (greedy(load(first), 24), True)
    for version, folder in enumerate((second, first), start=1):
        llm.collective_rpc("rollout_spec_update_policy", args=(str(folder), version))
        tokens, rate = ask()
        assert (tokens, rate < 0.8) == (greedy(load(folder), 24), True)
        update(llm, dict(read_tensors(folder)), version)
        tokens, rate = ask()
        assert (tokens, rate > 0.999) == (greedy(load(folder), 24), True)


def test_a_policys_update_makes_its_drafter_stale_and_the_drafters_brings_it_back(start: Callable[..., Any], natives: Path) -> None:
    llm = start(options={**native("self", natives), "budget": "fixed:3"})
    begun = dict(read_tensors(natives / "self"))
    generator = torch.Generator().manual_seed(2)
    other = begun | {"model.norm.weight": begun["model.norm.weight"] * (1 + 1.5 * torch.randn(64, generator=generator))}

    def ask() -> dict[str, float]:
        llm.reset_prefix_cache()
        sample(llm, 48, 24, temperature=1.0)
        return totals_of(llm)

    assert ask()["rollout/spec_accept_rate"] > 0.999
    llm.collective_rpc("rollout_spec_update_policy", args=(list(other.items()), 1))
    stale = ask()
    assert stale["rollout/spec_accept_rate"] < 0.6
    assert (stale["rollout_spec/num_stale_alarms"], stale["rollout_spec/policy_version"]) == (1, 1)
    update(llm, other, 1)
    after = ask()
    assert after["rollout/spec_accept_rate"] > 0.999
    assert (after["rollout_spec/num_stale_alarms"], after["rollout_spec/drafter_version"]) == (0, 1)
