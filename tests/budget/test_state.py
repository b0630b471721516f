"""Costs are measured once a model, machine and batch size; a damaged file is measured anew."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from rollout_spec.budget import FixedBudget
from rollout_spec.budget_state import costs_path, prepared_pilot
from rollout_spec.controllers import ThroughputBudget
from rollout_spec.cost import OnlineCosts
from rollout_spec.engine.calibrate import calibrate, calibration_shapes, num_forwards
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.runner import ModelRunner


def tiny_runner(max_context: int) -> ModelRunner:
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=256
    )
    return make_runner(AutoModelForCausalLM.from_config(config).eval(), max_context=max_context)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return tiny_runner(160)


def test_calibration_tells_what_a_round_without_a_draft_costs(runner: ModelRunner) -> None:
    costs, done = OnlineCosts(), list[int]()
    calibrate(runner, costs, max_batch=4, max_context=160, on_measured=done.append)
    assert done == list(range(1, num_forwards(4) + 1))
    known = costs.snapshot()
    assert known.known
    assert all(known.is_measured(size, 0) for size in (1, 2, 4))
    assert not known.is_measured(4, 1)  # the drafter did not run
    seconds = known.round_s(4, 400, np.zeros(2), np.array([4.0, 20.0]))
    assert 0 < seconds[0] <= seconds[1]


def test_a_short_context_is_calibrated_too() -> None:
    costs = OnlineCosts()
    calibrate(tiny_runner(max_context=20), costs, max_batch=2, max_context=20)
    assert costs.snapshot().is_measured(2, 0)


def test_shapes_end_at_the_batch_size() -> None:
    assert sorted({size for size, _ in calibration_shapes(6)}) == [1, 2, 4, 6]
    assert sorted({size for size, _ in calibration_shapes(1)}) == [1]


def test_costs_are_measured_once(runner: ModelRunner, tmp_path: Path) -> None:
    def forwards(controller: ThroughputBudget | FixedBudget) -> int:
        done: list[int] = []
        pilot = prepared_pilot(
            controller,
            runner,
            model=tmp_path,
            max_batch=2,
            max_context=160,
            cache_dir=tmp_path,
            on_forward=lambda now, total: done.append(now),
        )
        assert pilot.costs.snapshot().known == isinstance(controller, ThroughputBudget)
        return len(done)

    assert forwards(FixedBudget(draft_length=2)) == 0
    assert forwards(ThroughputBudget()) == num_forwards(2)
    assert forwards(ThroughputBudget()) == 0
    path = costs_path(tmp_path, runner, 2, tmp_path)
    kept = json.loads(path.read_text())
    fewer = {**kept["costs"], "rest": kept["costs"]["rest"][:-1]}
    for unusable in ({"cells": 3}, {**kept, "format": 0}, {**kept, "costs": fewer}):  # damaged, or of another version
        path.write_text(json.dumps(unusable))
        assert forwards(ThroughputBudget()) == num_forwards(2)
        assert forwards(ThroughputBudget()) == 0
    assert costs_path(tmp_path, runner, 4, tmp_path) != path


def test_a_cache_that_cannot_be_written_costs_a_warning(runner: ModelRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    pilot = prepared_pilot(ThroughputBudget(), runner, model=tmp_path, max_batch=1, max_context=160, cache_dir=tmp_path / "file" / "costs")
    assert pilot.costs.snapshot().known
    assert "the measured costs are not kept" in caplog.text
