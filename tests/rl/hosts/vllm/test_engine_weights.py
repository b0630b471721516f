"""New weights while vLLM runs: the policy's alone make a drafter stale, its own bring acceptance back, wrong ones change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vllm import PROMPT, load, runner_of, sample, totals_of
from torch import Tensor

QUIET = 1e-4


def weights(policy: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load(policy).state_dict().items()}


def memoryless(policy: Path, folder: Path) -> Path:
    """The policy with a body that adds next to nothing: the next token's law depends on the last token alone."""
    model = load(policy)
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight.mul_(QUIET)
        model.model.embed_tokens.weight.mul_(4)
    model.save_pretrained(folder)
    return folder


def knowing_drafter(policy: Path, folder: Path) -> Path:
    """An MTP head that knows such a policy's law: the last token's embedding under the policy's own norm."""
    from rollout_spec_mtp.checkpoint import save_drafter
    from rollout_spec_mtp.kinds import kind_of
    from rollout_spec_mtp.training.protocol import PolicyParts

    parts = PolicyParts.of(load(policy))
    model = kind_of("mtp").build({"draft_length": 3, "hidden_layers": [-1]}, parts, None)
    with torch.no_grad():
        model.fc.weight.copy_(torch.cat([torch.eye(parts.hidden_size), torch.full((parts.hidden_size,) * 2, 1e-6)], dim=1))
        for part in (model.layer.self_attn.o_proj, model.layer.mlp.down_proj):
            part.weight.fill_(1e-6)
        model.norm.weight.copy_(parts.final_norm)
    save_drafter(folder, model, parts)
    return folder


@pytest.fixture(scope="module")
def plain_policy(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return memoryless(policy, tmp_path_factory.mktemp("memoryless") / "model")


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], plain_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    drafter = knowing_drafter(plain_policy, tmp_path_factory.mktemp("knowing") / "mtp")
    return start(options={"drafter": str(drafter), "draft_length": 3, "budget": "fixed:3"}, model=str(plain_policy))


def ask(llm: Any) -> dict[str, float]:
    sample(llm, 48, 24, temperature=1.0)
    return totals_of(llm)


def sync(llm: Any, what: str, tensors: dict[str, Tensor], version: int) -> str:
    (checksum,) = llm.collective_rpc(f"rollout_spec_update_{what}", args=(list(tensors.items()), version))
    llm.reset_prefix_cache()
    return str(checksum)


def test_acceptance_falls_with_the_policys_weights_and_returns_with_the_drafters(llm: Any, plain_policy: Path) -> None:
    drafter = runner_of(llm).drafter.speculator.drafter
    begun, own = weights(plain_policy), {name: tensor.clone() for name, tensor in drafter.named_weights().items()}
    before = ask(llm)
    assert before["rollout/spec_accept_rate"] > 0.95
    assert before["rollout_spec/num_stale_alarms"] == 0

    generator = torch.Generator().manual_seed(2)
    moved = begun | {"model.norm.weight": begun["model.norm.weight"] * (1 + 1.5 * torch.randn(64, generator=generator))}
    checksum = sync(llm, "policy", moved, 1)
    assert all(torch.equal(drafter.named_weights()[name], tensor) for name, tensor in own.items())
    stale = ask(llm)
    assert stale["rollout/spec_accept_rate"] < 0.6 * before["rollout/spec_accept_rate"]
    assert stale["rollout_spec/num_stale_alarms"] == 1
    assert stale["rollout_spec/policy_version"] == 1

    sync(llm, "drafter", own | {"norm.weight": moved["model.norm.weight"]}, 1)
    after = ask(llm)
    assert after["rollout/spec_accept_rate"] > 0.95
    assert (after["rollout_spec/num_stale_alarms"], after["rollout_spec/drafter_version"]) == (0, 1)

    # Back to where it began: the same bytes have the same checksum, and the law is the policy's again.
    assert sync(llm, "policy", begun, 2) != checksum
    assert sync(llm, "policy", moved, 3) == checksum


def test_the_policy_that_samples_is_the_new_one(llm: Any, plain_policy: Path) -> None:
    model = load(plain_policy)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    sync(llm, "policy", dict(model.state_dict()), 4)
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(16):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert sample(llm, 1, 16, temperature=0)[0] == tuple(tokens[len(PROMPT) :])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "missing tensor model.norm.weight"),
        ("unknown", "unknown tensor model.extra.weight"),
        ("misshapen", r"model.norm.weight has shape \(3,\)"),
        ("not finite", "model.norm.weight holds NaN"),
    ],
)
def test_faulty_weights_are_refused_by_name_and_change_nothing(fault: str, message: str, llm: Any, plain_policy: Path) -> None:
    given, before = weights(plain_policy), sample(llm, 1, 12, temperature=0)
    if fault == "missing":
        del given["model.norm.weight"]
    elif fault == "unknown":
        given["model.extra.weight"] = torch.ones(1)
    else:
        given["model.norm.weight"] = torch.ones(3) if fault == "misshapen" else torch.full((64,), torch.nan)
    with pytest.raises(ValueError, match=message):
        sync(llm, "policy", given, 9)
    assert sample(llm, 1, 12, temperature=0) == before
