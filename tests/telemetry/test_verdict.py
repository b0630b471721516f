"""The sentences on top, on runs whose story is known."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from streams import a_request, a_round, plain_round, story, write

from rollout_spec.events import DrafterStaleEvent, Event
from rollout_spec.report.runs import read_run, read_runs
from rollout_spec.report.samples import origins
from rollout_spec.report.verdict import find_change, sentences


def told(folder: Path, events: Iterator[Event]) -> str:
    write(folder / "events.jsonl", events)
    return " ".join(sentence.text for sentence in sentences([read_run(folder)])[0])


def test_what_was_saved_is_what_the_rounds_say(tmp_path: Path) -> None:
    """Drafted rounds emit 2 tokens a request in 20 ms, the others 1 in 15 ms: 10 of each take .35 s, and would have taken .45 s."""
    said = told(tmp_path / "run", iter([part for index in range(10) for part in (a_round(2 * index), plain_round(2 * index + 1))]))
    assert said.startswith("Speculation saved 22% of the rollout time (1.29 times as fast: against its own rounds without a draft")


def test_a_loss_is_told_as_a_loss(tmp_path: Path) -> None:
    said = told(tmp_path / "run", story(400, accept=[0.02], entropy=[1.0]))
    assert "Speculation cost" in said
    assert "Hardly a draft is accepted" in said


def test_without_rounds_to_compare_with_only_a_bound_is_told(tmp_path: Path) -> None:
    good = told(tmp_path / "good", iter([a_round(index) for index in range(20)]))
    assert "cannot be told from this run alone" in good
    assert "At most 1.80 times" in good
    bad = told(tmp_path / "bad", iter([a_round(index, num_emitted_tokens=2, num_accepted_tokens=0) for index in range(20)]))
    assert "At most 0.90 times as fast as without: it loses time" in bad


def test_a_run_without_speculation_of_the_same_work_is_the_better_measure(tmp_path: Path) -> None:
    write(tmp_path / "with" / "events.jsonl", iter([a_round(index) for index in range(20)]))
    write(tmp_path / "without" / "events.jsonl", iter([plain_round(index, seconds=0.0125) for index in range(20)]))
    for name in ("with", "without"):
        (tmp_path / name / "settings.json").write_text(json.dumps({"model": "m", "prompts": "p", "drafter": name}))
    said = [part[0].text for part in sentences(read_runs([tmp_path / "with", tmp_path / "without"]))]
    assert said[0].startswith(
        "Speculation saved 20% of the rollout time (1.25 times as fast: 200 tokens a second of engine time against 160"
    )
    assert said[1] == "This run did not speculate."
    (tmp_path / "without" / "settings.json").write_text(json.dumps({"model": "another", "prompts": "p"}))
    said = [part[0].text for part in sentences(read_runs([tmp_path / "with", tmp_path / "without"]))]
    assert "cannot be told" in said[0]


def test_entropy_is_blamed_when_the_law_of_before_predicts_the_fall(tmp_path: Path) -> None:
    """Acceptance falls .1 a nat within each step and .2 over the two nats between steps 3 and 4; nobody refreshed the drafter."""
    said = told(tmp_path / "run", story(4_000, accept=[0.7] * 4 + [0.5] * 4, entropy=[1.0] * 4 + [3.0] * 4))
    assert "Acceptance fell at step 4, from 0.70 to 0.50" in said or "Acceptance fell at step 4, from 0.70 to 0.51" in said
    assert "because entropy rose" in said
    assert "not because the drafter is stale" in said


def test_the_drafter_is_blamed_when_the_policy_moved_and_entropy_did_not(tmp_path: Path) -> None:
    said = told(tmp_path / "run", story(4_000, accept=[0.7] * 4 + [0.4] * 4, entropy=[1.0] * 8))
    assert "Acceptance fell at step 4" in said
    assert "the drafter is stale (the policy is at version 4 and the drafter at 0)" in said


def test_nothing_is_blamed_that_did_not_change(tmp_path: Path) -> None:
    said = told(tmp_path / "run", story(4_000, accept=[0.7] * 4 + [0.4] * 4, entropy=[1.0] * 8, drafter_follows=True))
    assert "neither entropy" in said
    assert "nor the weights' versions explain it" in said


def test_the_monitor_is_quoted(tmp_path: Path) -> None:
    stale = DrafterStaleEvent(round_index=1, drafter="mtp", weights_version=4, accept_prob=0.4, reference_accept_prob=0.7, mean_entropy=1.0)
    events = [*story(4_000, accept=[0.7] * 4 + [0.4] * 4, entropy=[1.0] * 8, drafter_follows=True), stale]
    assert "the monitor says so too" in told(tmp_path / "run", iter(events))


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_run_has_no_change(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "run"
    write(folder / "events.jsonl", story(2_000, accept=[0.6] * 5, entropy=[1.0] * 5, seed=seed))
    assert find_change(read_run(folder).bins.bins) is None


def test_errors_and_numbers_that_are_none_are_named(tmp_path: Path) -> None:
    failed = a_request(finish_reason="error", error="logits are not finite")
    said = told(tmp_path / "run", iter([a_round(0, mean_entropy=float("nan")), failed, dataclasses.replace(failed, error="other"), failed]))
    assert "1 rounds have an entropy or acceptance probability that is no number" in said
    assert "3 requests failed; most often: logits are not finite" in said


def test_a_round_ends_with_one_token_that_was_not_drafted() -> None:
    assert origins([-1, 1, 2, -1, 1, 0, 0, -1, 1]) == ["undrafted", "1", "2", "bonus", "1", "recovered", "recovered", "undrafted", "1"]
