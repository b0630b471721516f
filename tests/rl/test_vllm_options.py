"""What is said about speculation in vLLM is checked where it is said. No vLLM is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_spec.tree import Draw
from rollout_spec_rl.vllm import VllmOptions, engine_args
from rollout_spec_rl.vllm.requests import TrackedRequests


def test_one_call_says_all_that_vllm_needs(tmp_path: Path) -> None:
    given = engine_args(drafter=str(tmp_path), draft_length=3, budget="fixed:2")
    assert given["speculative_config"] == {
        "method": "custom_class",
        "model": "rollout_spec_rl.vllm.proposer.SpecProposer",
        "num_speculative_tokens": 3,
    }
    own = VllmOptions.parse(given["additional_config"]["rollout_spec"])
    assert (own.drafter, own.draft_length, own.controller().name, own.draw) == (str(tmp_path), 3, "fixed:2", Draw.SAMPLED)
    assert VllmOptions.parse({"drafter": str(tmp_path), "verifier": "gumbel"}).draw is Draw.GUMBEL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "drafter is not set"),
        ({"drafter": "self"}, "neither one of ngram, suffix nor a directory"),
        ({"drafter": "suffix", "draft": 3}, "unknown option additional_config.rollout_spec.draft: known are"),
        ({"drafter": "suffix", "draft_length": 0}, "must be from 1 to 32"),
        ({"drafter": "suffix", "draft_length": True}, "must be a whole number, got True"),
        ({"drafter": "suffix", "verifier": "block"}, "needs sampled drafts"),
        ({"drafter": "suffix", "verifier": "traversal"}, "in vLLM drafts are chains"),
        ({"drafter": "suffix", "budget": "much"}, "give off, fixed:K"),
        ({"drafter": "suffix", "draft_length": 3, "budget": "fixed:4"}, "drafts up to 4 tokens, and vLLM is given room for 3"),
        ({"drafter": "suffix", "sinks": ["prometheus"]}, "needs additional_config.rollout_spec.events"),
    ],
)
def test_what_is_wrong_is_said_with_its_mend(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_args(**options)


def test_a_speculative_config_of_vllms_own_is_handed_on() -> None:
    eagle = {"method": "eagle", "model": "heads/eagle", "num_speculative_tokens": 5}
    given = engine_args(speculative_config=eagle, budget="entropy", replica="3")
    assert given["speculative_config"] == {**eagle, "draft_sample_method": "probabilistic"}
    own = VllmOptions.parse(given["additional_config"]["rollout_spec"])
    assert (own.drafter, own.is_native, own.draft_length, own.controller().name, own.replica) == ("vllm", True, 5, "entropy", "3")
    greedy = engine_args(speculative_config={**eagle, "draft_sample_method": "greedy"}, verifier="exact_match")
    assert greedy["speculative_config"]["draft_sample_method"] == "greedy"


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"method": "ngram"}, {}, r"none of draft_model, eagle, eagle3, mtp, dflash: ours does the same: drafter=ngram"),
        ({"method": "medusa"}, {}, "it is not driven by our budgets"),
        ({"method": None}, {}, "is none of draft_model"),
        ({"num_speculative_tokens": None}, {}, "must say how deep drafts may go, got None"),
        ({"num_speculative_tokens": 40}, {}, "must be from 1 to 32"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 2]]}, {}, "two budgets would decide"),
        ({"disable_padded_drafter_batch": True}, {}, "leave it out"),
        ({"use_heterogeneous_vocab": True}, {}, "with the policy's vocabulary"),
        ({"parallel_drafting": True}, {}, "drafts a fixed number of tokens"),
        ({"rejection_sample_method": "block"}, {}, "choose with our option verifier"),
        ({"draft_sample_method": "greedy"}, {"verifier": "block"}, "verifier=block needs sampled drafts: set .*=probabilistic"),
        ({"draft_sample_method": "greedy"}, {"verifier": "rejection"}, "needs sampled drafts"),
        ({}, {"drafter": "suffix"}, "leave drafter and draft_length out"),
        ({}, {"draft_length": 2}, "leave drafter and draft_length out"),
        ({}, {"verifier": "traversal"}, "in vLLM drafts are chains"),
    ],
)
def test_what_of_vllms_own_is_not_driven(config: dict[str, Any], options: dict[str, Any], message: str) -> None:
    eagle = {"method": "eagle", "model": "heads/eagle", "num_speculative_tokens": 5}
    with pytest.raises(ValueError, match=message):
        engine_args(speculative_config={**eagle, **config}, **options)


def test_a_table_goes_no_deeper_than_vllm_has_room_for(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text('{"4": 5, "16": 1}')
    assert VllmOptions(drafter="suffix", draft_length=5, budget=f"batch_table:{table}").controller().name == "batch_table"
    with pytest.raises(ValueError, match="drafts up to 5 tokens, and vLLM is given room for 4"):
        VllmOptions(drafter="suffix", draft_length=4, budget=f"batch_table:{table}")


def test_vllms_own_drafters_have_no_name_among_ours() -> None:
    with pytest.raises(ValueError, match="give engine_args that instead"):
        engine_args(drafter="vllm")


def state(**params: Any) -> SimpleNamespace:
    given = {
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_tokens": 4,
        "stop_token_ids": [9],
        "eos_token_id": 2,
        "min_tokens": 0,
        "structured_outputs": None,
        "seed": None,
    } | params
    return SimpleNamespace(req_id="a", prompt_token_ids=[5, 6, 7], output_token_ids=[], sampling_params=SimpleNamespace(**given))


def tracked(**params: Any) -> Any:
    requests = TrackedRequests(max_model_len=64)
    return requests.enter(["a"], {"a": state(**params)})[0]


def test_a_stop_inside_a_draft_ends_what_is_kept() -> None:
    request = tracked()
    assert request.append([4, 9, 8]) == 2
    assert (request.tokens, request.finish_reason, request.may_draft) == ([5, 6, 7, 4, 9], "stop", False)


def test_the_length_ends_it_too() -> None:
    request = tracked(max_tokens=3)
    assert request.remaining == 3
    assert request.append([1, 1]) == 2
    assert request.append([1, 1]) == 1
    assert (request.finish_reason, request.remaining) == ("length", 0)


def test_no_drafts_under_a_grammar_or_before_the_least_length() -> None:
    assert not tracked(structured_outputs="json").may_draft
    request = tracked(min_tokens=2)
    assert not request.may_draft
    request.append([1, 1])
    assert request.may_draft


def test_who_is_gone_was_aborted_or_stopped_by_a_text() -> None:
    requests = TrackedRequests(max_model_len=64)
    requests.enter(["a"], {"a": state()})
    (gone,) = requests.take_finished({})
    assert gone.finish_reason == "aborted"
    assert not list(requests)
