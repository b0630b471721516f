"""What the comparison of acceptance in two engines makes of their logs. The engines themselves: tests/rl/hosts/vllm."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_acceptance
from vllm_acceptance import Asked, Setting, Trace, behind_first_token, coupled, free, traces

from rollout_spec.events import Event, RequestEvent, RoundEvent


def round_event(reached: tuple[int, ...], accepted: tuple[int, ...]) -> RoundEvent:
    seconds = {"draft_s": 0.0, "target_s": 0.0, "verify_s": 0.0, "other_s": 0.0}
    return RoundEvent(
        round_index=0,
        num_requests=1,
        num_draft_tokens=2,
        num_accepted_tokens=sum(accepted),
        num_emitted_tokens=sum(accepted) + 1,
        drafted_by_depth=reached,
        accepted_by_depth=accepted,
        mean_accept_prob_by_depth=(0.5,) * len(reached),
        mean_entropy=1.0,
        weights_version=0,
        drafter="mtp",
        verifier="block",
        **seconds,
    )


def request_event(num_rounds: int) -> RequestEvent:
    return RequestEvent(
        request_id="r",
        finish_reason="length",
        num_prompt_tokens=3,
        num_tokens=4,
        num_rounds=num_rounds,
        num_draft_tokens=2,
        num_accepted_tokens=1,
        weights_version=0,
    )


def trace(*rounds: tuple[tuple[int, ...], tuple[int, ...]], token_ids: tuple[int, ...] = (7, 8, 9)) -> Trace:
    return Trace(token_ids=token_ids, reached=tuple(one for one, _ in rounds), accepted=tuple(two for _, two in rounds))


def test_rounds_belong_to_the_request_that_ends_after_them() -> None:
    events: list[Event] = [
        round_event((1, 1), (1, 0)),
        round_event((), ()),
        request_event(2),
        round_event((1,), (0,)),
        request_event(1),
    ]
    found = traces([(7, 8, 9), (5,)], iter(events))
    assert found == [trace(((1, 1), (1, 0)), ((), ())), trace(((1,), (0,)), token_ids=(5,))]
    crowded = dataclasses.replace(round_event((2,), (1,)), num_requests=2)
    with pytest.raises(AssertionError):
        traces([(7,)], iter([crowded, request_event(1)]))


def test_prompts_are_drawn_again_with_all_their_samples() -> None:
    rich, poor = trace(((1, 1), (1, 1)), ((1, 1), (1, 0))), trace(((1,), (0,)), ((1, 1), (1, 0)))
    found = free([rich, rich, poor, poor], [poor, poor, rich, rich], num_samples=2, depth=2)
    for measure in found.values():
        assert measure["vllm"] == measure["embedded"]
        assert measure["difference"]["value"] == 0.0
        assert measure["difference"]["low"] < 0 < measure["difference"]["high"], "the two prompts differ"
    assert found["accept_rate_depth_1"]["vllm"]["value"] == 6 / 8
    assert found["accept_rate_depth_2"]["vllm"]["value"] == 2 / 6
    assert found["accept_rate_depth_2"]["counted"] == {"vllm": 6, "embedded": 6}
    assert found["accepted_tokens_per_round"]["vllm"]["value"] == 8 / 8
    better = free([rich] * 4, [poor] * 4, num_samples=2, depth=2)
    assert better["accepted_tokens_per_round"]["difference"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_requests_are_equal_in_tokens_and_in_what_was_accepted() -> None:
    rounds = ((1, 1), (1, 0)), ((1,), (0,))
    vllm = [trace(*rounds, token_ids=(7, 1, 2, 3))] * 3
    embedded = [
        trace(*rounds, token_ids=(1, 2, 3)),
        trace(*rounds, token_ids=(1, 9, 3)),
        trace(rounds[0], token_ids=(1, 2, 3)),
    ]
    found = coupled(vllm, embedded)
    assert found == {"requests": 3, "equal_requests": 1, "tokens": 9, "tokens_before_a_difference": 3 + 1 + 3, "rounds": 6}
    asked = [Asked(prompt=(4, 5), seed=11, num_tokens=4)]
    assert behind_first_token(asked, vllm[:1]) == [Asked(prompt=(4, 5, 7), seed=11, num_tokens=3)]


def test_drafters_that_are_in_the_file_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def compare(setting: Setting, *_: Any) -> dict[str, str]:
        asked.append((setting.drafter, setting.max_context))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {"of": setting.drafter}

    monkeypatch.setattr(os, "environ", {**os.environ})  # main sets what vLLM reads
    file = tmp_path / "not there yet" / "found.json"
    monkeypatch.setattr(vllm_acceptance, "compare", compare)
    monkeypatch.setattr(vllm_acceptance, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: None))
    monkeypatch.setattr(vllm_acceptance, "load_prompts", lambda *_: [SimpleNamespace(token_ids=[1, 2, 3])])
    given = ["vllm_acceptance.py", "--model", "m", "--tokens", "5", "--json", str(file), "--drafters"]
    monkeypatch.setattr(sys, "argv", [*given, "a", "b"])
    with pytest.raises(KeyboardInterrupt):
        vllm_acceptance.main()
    assert json.loads(file.read_text())["found"] == {"a": {"of": "a"}}
    vllm_acceptance.main()
    assert json.loads(file.read_text())["found"] == {"a": {"of": "a"}, "b": {"of": "b"}}
    assert asked == [("a", 8), ("b", 8), ("b", 8)]
    monkeypatch.setattr(sys, "argv", [*given, "a", "--samples", "3"])
    with pytest.raises(ValueError, match="samples 2 there, 3 here"):
        vllm_acceptance.main()
