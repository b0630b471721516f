"""vLLM's own drafters under our budgets and verifiers: what is sampled has the law of the policy itself, whatever length was chosen."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_law import COUNT, LAWS, LEAST_P, LENGTH, fit, greedy, laws_of
from tiny_vllm import PROMPT, driver_of, load, native, sample, totals_of, write_mtp_policy
from torch import Tensor

from rollout_spec.budget import Budget, BudgetSignals, FixedBudget
from rollout_spec.drafter import DraftContext
from rollout_spec.events import RoundEvent
from rollout_spec.sinks import read_events
from rollout_spec.tree import DraftTree
from rollout_spec_rl.vllm.native import NativeDrafter

CASES = [
    ("draft", "auto", "auto"),
    ("eagle", "entropy", "rejection"),
    ("eagle3", "fixed:2", "auto"),
    ("dflash", "fixed:3", "auto"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("draft", "fixed:3", "auto"),
            ("draft", "entropy", "gumbel"),
            ("eagle", "auto", "auto"),
            ("eagle", "fixed:2", "exact_match"),
            ("dflash", "auto", "rejection"),
            ("dflash", "entropy", "auto"),
        )
    ),
]


def check_laws(llm: Any, laws: dict[str, Any], model: Any) -> dict[str, float]:
    """Our metrics of the samples that were held against the laws."""
    found = {name: fit(sample(llm, COUNT, LENGTH, **params), laws[name]) for name, params in LAWS.items()}
    seen = totals_of(llm)
    assert min(found.values()) > LEAST_P, found
    assert seen["rollout_spec/num_requests"] >= COUNT * (len(LAWS) - 1)
    assert sample(llm, 1, 24, temperature=0)[0] == greedy(model, 24)
    return seen


@pytest.mark.parametrize(("kind", "budget", "verifier"), CASES)
def test_the_law_is_the_policys(
    kind: str, budget: str, verifier: str, start: Callable[..., Any], natives: Path, laws: dict[str, Any], model: Any
) -> None:
    seen = check_laws(start(options={**native(kind, natives), "budget": budget, "verifier": verifier}), laws, model)
    if budget != "auto":
        assert 0.02 < seen["rollout/spec_accept_rate"] < 0.98, "nothing was tested: drafts were always, or never, accepted"


def test_the_law_with_the_head_of_the_policys_own_checkpoint(start: Callable[..., Any], tmp_path: Path) -> None:
    policy = write_mtp_policy(tmp_path / "model")
    own = load(policy)
    expected = laws_of(own)
    options = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "budget": "fixed:2"}
    assert 0.02 < check_laws(start(model=str(policy), options=options), expected, own)["rollout/spec_accept_rate"] < 0.98


def test_drafts_that_are_no_draws_are_verified_by_exact_match(
    start: Callable[..., Any], natives: Path, laws: dict[str, Any], model: Any
) -> None:
    options = {**native("draft", natives, draft_sample_method="greedy"), "budget": "fixed:2"}
    assert 0.02 < check_laws(start(options=options), laws, model)["rollout/spec_accept_rate"] < 0.98


def test_the_policy_as_its_own_drafter_is_always_accepted(start: Callable[..., Any], natives: Path) -> None:
    """What we take for a draft's distribution is what vLLM drew it from, at any temperature, and beside greedy requests."""
    from vllm import SamplingParams

    llm = start(options={**native("self", natives), "budget": "fixed:3"})
    params = [
        SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True, detokenize=False) for temperature in (1.0, 0.0, 0.6) * 8
    ]
    llm.generate([{"prompt_token_ids": list(PROMPT)}] * len(params), params, use_tqdm=False)
    assert totals_of(llm)["rollout/spec_accept_rate"] > 0.999


@pytest.mark.parametrize("kind", ["draft", "dflash"])
def test_drafts_are_draws_from_the_distribution_that_is_kept_of_them(
    kind: str, start: Callable[..., Any], natives: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the request samples from less than that: with one token left to the policy all requests go the same way, and are
    drafted for from the same distribution."""
    seen: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    right = NativeDrafter.propose

    def listening(self: NativeDrafter, context: DraftContext, budget: Budget) -> DraftTree:
        tree = right(self, context, budget)
        if tree.draft_probs is not None:
            for request, tokens, probs in zip(context.requests, tree.token_ids.tolist(), tree.draft_probs[:, 0], strict=True):
                seen[request.next_position].append((tokens[0], probs.double()))
        return DraftTree.empty(len(context.requests))

    monkeypatch.setattr(NativeDrafter, "propose", listening)
    llm = start(options={**native(kind, natives), "budget": "fixed:3"})
    for params in ({"top_k": 1}, {"top_p": 1e-6}):
        seen.clear()
        sample(llm, 64, 40, temperature=1.3, **params)
        assert sum(map(len, seen.values())) > 2000
        excess, variance = 0.0, 0.0
        for drafts in seen.values():
            law = drafts[0][1]
            assert max(float((probs - law).abs().max()) for _, probs in drafts) < 1e-4
            # Of -log q(x): its mean is the entropy if x was drawn from q.
            surprise = -law.clamp_min(1e-30).log()
            mean = float((law * surprise).sum())
            excess += sum(float(surprise[token]) - mean for token, _ in drafts)
            variance += len(drafts) * float((law * (surprise - mean) ** 2).sum())
        assert abs(excess) < 4 * variance**0.5, f"{params}: {excess / variance**0.5:.1f} standard deviations"


def test_a_wrong_distribution_is_noticed(
    start: Callable[..., Any], natives: Path, laws: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = NativeDrafter._probs

    def of_the_next_token(self: NativeDrafter, *args: Any) -> Tensor:
        return right(self, *args).roll(1, -1)

    monkeypatch.setattr(NativeDrafter, "_probs", of_the_next_token)
    llm = start(options={**native("draft", natives), "budget": "fixed:3"})
    assert fit(sample(llm, COUNT, LENGTH, temperature=1.0), laws["T1"]) < LEAST_P


def accepted_a_draft(llm: Any) -> tuple[float, int]:
    """By vLLM's own counters: accepted tokens a draft, and how many drafts."""
    found = {metric.name.removeprefix("vllm:spec_decode_num_"): getattr(metric, "value", None) for metric in llm.get_metrics()}
    return found["accepted_tokens"] / found["drafts"], int(found["drafts"])


def test_block_verification_accepts_no_less_than_vllm_on_the_same_drafter(start: Callable[..., Any], natives: Path) -> None:
    config = native("draft", natives, draft_sample_method="probabilistic")["speculative_config"]
    ways: dict[str, dict[str, Any]] = {
        "vllm": {"speculative_config": config},
        "ours": {"options": {"speculative_config": config, "budget": "fixed:3"}},
    }
    found = {}
    for name, settings in ways.items():
        llm = start(disable_log_stats=False, **settings)
        sample(llm, 400, 40, temperature=1.0)
        found[name] = accepted_a_draft(llm)
        del llm
    # Of a difference of means: the variance of an accepted length is below 1.5.
    error = (2 * 1.5 / min(drafts for _, drafts in found.values())) ** 0.5
    assert found["ours"][0] > found["vllm"][0] - 3 * error, found
    assert found["ours"][0] < 2 * found["vllm"][0], found


def rounds_of(folder: Path) -> list[RoundEvent]:
    return [event for event in read_events(folder / "replica-0.jsonl") if isinstance(event, RoundEvent)]


@pytest.mark.parametrize("budget", ["auto", "entropy"])
def test_a_useless_drafter_is_not_asked_any_more(budget: str, start: Callable[..., Any], natives: Path, tmp_path: Path) -> None:
    llm = start(options={**native("useless", natives), "budget": budget, "events": str(tmp_path)})
    sample(llm, 24, 80, temperature=1.0)
    llm.collective_rpc("rollout_spec_close")
    rounds = rounds_of(tmp_path)
    assert sum(event.num_draft_tokens for event in rounds[:20]) > 0, "it has to be tried first"
    late = rounds[len(rounds) // 2 :]
    assert sum(event.draft_depth == 0 for event in late) > 0.8 * len(late)
    assert sum(event.num_draft_tokens for event in late) < 0.2 * sum(event.num_requests for event in late)


def test_a_good_drafter_is_asked_for_all_it_may_draft(start: Callable[..., Any], natives: Path, tmp_path: Path) -> None:
    llm = start(options={**native("self", natives), "budget": "entropy", "events": str(tmp_path)})
    sample(llm, 24, 80, temperature=1.0)
    llm.collective_rpc("rollout_spec_close")
    late = rounds_of(tmp_path)[10:-6]
    assert sum(event.draft_depth == 3 for event in late) > 0.8 * len(late)


class Pause:
    """No drafts for the first rounds, three tokens from then on."""

    name = "pause"

    def __init__(self, num_rounds: int) -> None:
        self.num_rounds = num_rounds

    def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]:
        self.num_rounds -= 1
        budget, state = FixedBudget(draft_length=0 if self.num_rounds >= 0 else 3).decide(signals, state)
        return dataclasses.replace(budget, decision=dataclasses.replace(budget.decision, holds=False)), state


@pytest.mark.parametrize("kind", ["self", "dflash"])
def test_a_pause_costs_no_acceptance_afterwards(kind: str, start: Callable[..., Any], natives: Path) -> None:
    """Without the tokens of the pause in the drafter's K/V some .7 of the policy's own drafts are accepted here, instead of all."""
    llm = start(options={**native(kind, natives), "budget": "fixed:3"})
    pilot = driver_of(llm).speculator.pilot
    rates = []
    for num_rounds in (0, 16):
        pilot.controller, pilot._held = Pause(num_rounds), None
        sample(llm, 200, num_rounds + 20, temperature=1.0)
        rates.append(totals_of(llm)["rollout/spec_accept_rate"])
    if kind == "self":
        assert min(rates) > 0.999
    else:
        assert rates[1] == pytest.approx(rates[0], abs=0.05)


def test_with_the_budget_off_the_drafter_does_not_run(start: Callable[..., Any], natives: Path, model: Any) -> None:
    llm = start(options={**native("draft", natives), "budget": "off"})
    calls = []
    driver_of(llm)._runner.drafter.model.register_forward_hook(lambda *_: calls.append(1))
    assert sample(llm, 1, 24, temperature=0)[0] == greedy(model, 24)
    assert not calls
    assert totals_of(llm)["rollout_spec/num_tokens"] == 23


def test_a_distribution_that_is_none_is_an_error(start: Callable[..., Any], natives: Path) -> None:
    """Weights that became NaN would be seen by nobody: what is sampled stays right, only nothing is accepted."""
    llm = start(options={**native("draft", natives), "budget": "fixed:3"})
    with torch.no_grad():
        driver_of(llm)._runner.drafter.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="tokens of probability 0 or NaN"):
        sample(llm, 2, 8, temperature=1.0)
