"""What vLLM samples with our drafts has the law of the policy itself, whoever drafts and however deep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vllm import PROMPT, exact_law, fit, load, sample, totals_of
from torch import Tensor

from rollout_spec.sampling import SamplingParams, process_logits

LENGTH, COUNT = 5, 1500
LEAST_P = 1e-4
LAWS: dict[str, dict[str, Any]] = {"T1": {"temperature": 1.0}, "T.7 k20": {"temperature": 0.7, "top_k": 20}, "p.9": {"top_p": 0.9}}
CASES = [
    ("mtp", "fixed:3", "auto"),
    ("block", "entropy", "rejection"),
    ("suffix", "auto", "auto"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("mtp", "auto", "rejection"),
            ("mtp", "fixed:3", "gumbel"),
            ("block", "fixed:3", "auto"),
            ("suffix", "fixed:3", "auto"),
        )
    ),
]


def processor(**params: Any) -> Callable[[Tensor], Tensor]:
    own = SamplingParams(**params)
    return lambda logits: process_logits(logits, [own] * logits.shape[0])


@pytest.fixture(scope="module")
def model(policy: Path) -> Any:
    return load(policy)


@pytest.fixture(scope="module")
def laws(model: Any) -> dict[str, dict[tuple[int, ...], float]]:
    return {name: exact_law(model, processor(**params), LENGTH) for name, params in LAWS.items()}


def options_of(kind: str, drafters: Path, budget: str, verifier: str) -> dict[str, Any]:
    return {"drafter": kind if kind == "suffix" else str(drafters / kind), "draft_length": 3, "budget": budget, "verifier": verifier}


@torch.inference_mode()
def greedy(model: Any, length: int) -> tuple[int, ...]:
    tokens = list(PROMPT)
    for _ in range(length):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(PROMPT) :])


@pytest.mark.parametrize(("kind", "budget", "verifier"), CASES)
def test_the_law_is_the_policys(
    kind: str, budget: str, verifier: str, start: Callable[..., Any], drafters: Path, laws: dict[str, Any], model: Any
) -> None:
    llm = start(options=options_of(kind, drafters, budget, verifier))
    found = {name: fit(sample(llm, COUNT, LENGTH, **params), laws[name]) for name, params in LAWS.items()}
    seen = totals_of(llm)
    assert min(found.values()) > LEAST_P, found
    if budget != "auto":
        assert 0.02 < seen["rollout/spec_accept_rate"] < 0.98, "nothing was tested: drafts were always, or never, accepted"
    assert seen["rollout_spec/num_requests"] >= COUNT * (len(LAWS) - 1)
    assert sample(llm, 1, 24, temperature=0)[0] == greedy(model, 24)


def test_a_wrong_distribution_is_noticed(
    start: Callable[..., Any], drafters: Path, laws: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout_spec_rl.vllm.speculator import Speculator

    right = Speculator._tree

    def of_the_next_token(self: Speculator, *args: Any) -> Any:
        tree = right(self, *args)
        return tree if tree.draft_probs is None else dataclasses.replace(tree, draft_probs=tree.draft_probs.roll(1, -1))

    monkeypatch.setattr(Speculator, "_tree", of_the_next_token)
    llm = start(options=options_of("mtp", drafters, "fixed:3", "auto"))
    assert fit(sample(llm, COUNT, LENGTH, temperature=1.0), laws["T1"]) < LEAST_P
