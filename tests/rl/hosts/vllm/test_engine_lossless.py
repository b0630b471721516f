"""What vLLM samples with our drafts has the law of the policy itself, whoever drafts and however deep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from policy_law import COUNT, LAWS, LEAST_P, LENGTH, fit, greedy
from tiny_vllm import PROMPT, load, sample, totals_of

from rollout_spec.budget import FixedBudget
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.request import Request
from rollout_spec.events import RoundEvent
from rollout_spec.sinks.memory import MemorySink
from rollout_spec_mtp.serving import load_drafter
from rollout_spec_rl.compose import make_ops

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


def options_of(kind: str, drafters: Path, budget: str, verifier: str) -> dict[str, Any]:
    return {"drafter": kind if kind == "suffix" else str(drafters / kind), "draft_length": 3, "budget": budget, "verifier": verifier}


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


def embedded_acceptance(policy: Path, drafter: Path) -> list[float]:
    """Accepted over reached drafts by depth, of our own engine on the same requests."""
    module, ops, sink = load(policy), make_ops(), MemorySink()
    engine = Engine(
        make_runner(module, max_context=128, ops=ops),
        config=EngineConfig(max_batch=64, max_context=128),
        drafter=load_drafter(drafter, module, ops, None),
        controller=FixedBudget(draft_length=3),
        sink=sink,
    )
    engine.generate([Request(prompt_token_ids=PROMPT, max_new_tokens=LENGTH, ignore_eos=True) for _ in range(COUNT)])
    reached, accepted = np.zeros(3), np.zeros(3)
    for event in sink.events:
        if isinstance(event, RoundEvent):
            reached[: len(event.drafted_by_depth)] += event.drafted_by_depth
            accepted[: len(event.accepted_by_depth)] += event.accepted_by_depth
    rates: list[float] = (accepted / reached).tolist()
    return rates


def test_as_many_drafts_are_accepted_as_in_the_embedded_engine(start: Callable[..., Any], drafters: Path, policy: Path) -> None:
    llm = start(options=options_of("mtp", drafters, "fixed:3", "auto"))
    sample(llm, COUNT, LENGTH, temperature=1.0)
    seen = totals_of(llm)
    found = [seen[f"rollout_spec/accept_rate_depth_{depth}"] for depth in (1, 2)]
    # Some 3,000 and 1,000 drafts: standard errors of .01 and .02 on either side.
    expected = embedded_acceptance(policy, drafters / "mtp")
    assert found[0] == pytest.approx(expected[0], abs=0.05)
    assert found[1] == pytest.approx(expected[1], abs=0.1)


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
