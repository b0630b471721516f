"""verl's sampling parameters and outputs against the engine's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from rollout_spec.engine.request import Completion, VersionSpan
from rollout_spec.errors import RequestError
from rollout_spec.sampling import SamplingParams
from rollout_spec_rl.verl.generation import make_request, output_fields
from rollout_spec_rl.verl.options import plan_rollouts

Rollout = Callable[..., dict[str, Any]]

COMPLETION = Completion(
    request_id="a",
    prompt_token_ids=(1, 2),
    token_ids=(5, 6, 7),
    text=None,
    logprobs=(-1.0, -2.0, -3.0),
    processed_logprobs=(-0.5, -1.5, -2.5),
    entropies=(1.0, 1.0, 1.0),
    accepted_depths=(1, 2, -1),
    finish_reason="stop",
    stop_reason=7,
    num_rounds=1,
    num_draft_tokens=4,
    num_accepted_tokens=2,
    seed=3,
    weights_versions=(VersionSpan(weights_version=4, start=0, end=2), VersionSpan(weights_version=5, start=2, end=3)),
)


def test_parameters_as_verl_sends_them(rollout: Rollout) -> None:
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    request = make_request(plan_rollouts(rollout()), [1, 2, 3], given, "r")
    assert request.sampling == SamplingParams(temperature=0.7, top_p=0.9)
    assert request.max_new_tokens == 24
    assert (request.seed, request.stop, request.ignore_eos, request.request_id) == (None, (), False, "r")


def test_every_parameter_arrives(rollout: Rollout) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"4": 1},
        "seed": 9,
        "stop": "end",
        "stop_token_ids": [8],
        "ignore_eos": True,
        "max_tokens": 7,
    }
    request = make_request(plan_rollouts(rollout()), [1], given, "r")
    wanted = SamplingParams(
        temperature=0.5,
        top_p=0.8,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={4: 1.0},
    )
    assert request.sampling == wanted
    assert (request.seed, request.stop, request.stop_token_ids, request.ignore_eos, request.max_new_tokens) == (9, ("end",), (8,), True, 7)


@pytest.mark.parametrize(
    ("given", "prompt", "limit"),
    [
        ({}, 16, 24),  # the response length
        ({}, 20, 20),  # a longer prompt takes from the response, so that the sum stays
        ({"max_new_tokens": 5}, 20, 5),
        ({"max_tokens": 100}, 30, 10),  # never beyond the context
        ({"max_tokens": 0}, 3, 1),
    ],
)
def test_limits(rollout: Rollout, given: dict[str, Any], prompt: int, limit: int) -> None:
    assert make_request(plan_rollouts(rollout()), [1] * prompt, given, "r").max_new_tokens == limit


def test_what_cannot_be_honoured_is_refused(rollout: Rollout) -> None:
    plan = plan_rollouts(rollout())
    with pytest.raises(RequestError, match="'prompt_logprobs' is not known"):
        make_request(plan, [1], {"prompt_logprobs": 1}, "r")
    with pytest.raises(RequestError, match="prompt of 40 tokens leaves no room in a context of 40"):
        make_request(plan, [1] * 40, {}, "r")


def test_outputs(rollout: Rollout) -> None:
    fields = output_fields(plan_rollouts(rollout()), COMPLETION, logprobs=True, version=9)
    assert fields["token_ids"] == [5, 6, 7]
    assert fields["log_probs"] == [-0.5, -1.5, -2.5]
    assert fields["stop_reason"] == "completed"
    extra = fields["extra_fields"]
    assert (extra["global_steps"], extra["min_global_steps"], extra["max_global_steps"]) == (5, 4, 5)
    assert (extra["spec_num_draft_tokens"], extra["spec_num_accepted_tokens"], extra["spec_num_verify_steps"]) == (4, 2, 1)
    assert extra["rollout_spec_versions"] == [(4, 0, 2), (5, 2, 3)]


def test_log_probabilities_are_of_the_kind_that_was_asked_for(rollout: Rollout) -> None:
    raw = plan_rollouts(rollout(logprobs_mode="raw_logprobs"))
    assert output_fields(raw, COMPLETION, logprobs=True, version=9)["log_probs"] == [-1.0, -2.0, -3.0]
    assert output_fields(raw, COMPLETION, logprobs=False, version=9)["log_probs"] is None


def test_an_aborted_request_says_so_and_a_failed_one_raises(rollout: Rollout) -> None:
    plan = plan_rollouts(rollout())
    nothing = dataclasses.replace(
        COMPLETION, finish_reason="aborted", token_ids=(), logprobs=(), processed_logprobs=(), weights_versions=()
    )
    fields = output_fields(plan, nothing, logprobs=True, version=9)
    assert (fields["stop_reason"], fields["token_ids"], fields["extra_fields"]["global_steps"]) == ("aborted", [], 9)
    with pytest.raises(RequestError, match="NaN"):
        output_fields(plan, dataclasses.replace(COMPLETION, finish_reason="error", error="NaN"), logprobs=True, version=9)
