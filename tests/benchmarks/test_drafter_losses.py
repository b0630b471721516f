"""The comparison of losses: arms start alike, are kept, resumed and compared on the same sequences."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from drafter_losses import ARMS, Comparison
from loss_report import COMPARISONS, summarise, table
from mtp_tiny import collect, tiny_policy, train_config, trainer_for

from rollout_spec_mtp.losses import LossConfig
from rollout_spec_mtp.serving import load_trained
from rollout_spec_mtp.training.batches import split_held_out
from rollout_spec_mtp.training.protocol import PolicyParts
from rollout_spec_mtp.training.trainer import Trainer


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    policy = tiny_policy()
    rollouts = collect(policy, tmp_path / "rollouts", count=30)
    config = train_config(train={"checkpoint_steps": 3})
    return Comparison(
        config=config,
        policy=PolicyParts.of(policy),
        rollouts=rollouts,
        held_out=split_held_out(rollouts, config.evaluate.held_out)[1],
        out=tmp_path / "out",
        warmup_steps=12,
        steps=8,
        lr=2e-3,
        seed=1,
    )


def read(comparison: Comparison, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((comparison.out / f"{name}.json").read_text())
    return record


def test_arms_start_from_the_warm_up_and_are_judged_alike(comparison: Comparison) -> None:
    comparison.run_warm_up()
    for name in ("ce", "e2e_tv"):
        comparison.run_arm(name, ARMS["mtp"][name])
    records = {name: read(comparison, name) for name in ("start", "ce", "e2e_tv")}
    assert [records[name]["num_steps"] for name in records] == [12, 8, 8]
    assert all(len(record["sequences"]) == len(comparison.held_out) for record in records.values())
    # The first step of either arm sees the same tokens with the same weights, whatever its loss.
    first = [
        json.loads((comparison.out / "arms" / name / "train.jsonl").read_text().splitlines()[0])["metrics"] for name in ("ce", "e2e_tv")
    ]
    assert first[0]["overlap_by_depth_1"] == first[1]["overlap_by_depth_1"]
    summary = summarise(records, COMPARISONS["mtp"])
    assert [(row["arm"], row["over"]) for row in summary["gains"]] == [("e2e_tv", "ce")]
    lengths = {name: arm["rejection_length"]["value"] for name, arm in summary["arms"].items()}
    assert lengths["e2e_tv"] > lengths["start"]
    gain = summary["gains"][0]["rejection_length"]
    assert gain["value"] == pytest.approx(lengths["e2e_tv"] / lengths["ce"] - 1)
    assert table(summary).count("\n| ") == 3 + 2


def test_a_finished_arm_is_kept_and_not_mixed(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison.run_warm_up()
    written = (comparison.out / "start.json").read_text()
    monkeypatch.setattr(Trainer, "run", lambda *_: pytest.fail("trained again"))
    comparison.run_warm_up()
    assert (comparison.out / "start.json").read_text() == written
    with pytest.raises(ValueError, match=r"start\.json was made with other settings"):
        dataclasses.replace(comparison, warmup_steps=13).run_warm_up()


def test_a_broken_arm_resumes_to_the_same_numbers(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison.run_warm_up()
    comparison.run_arm("kl", {"kl": 1.0})
    unbroken = read(comparison, "kl")["sequences"]
    (comparison.out / "kl.json").unlink()
    whole_step = Trainer._step

    def killed(trainer: Trainer, step: int) -> dict[str, float]:
        if step == 5:
            raise KeyboardInterrupt
        return whole_step(trainer, step)

    monkeypatch.setattr(Trainer, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        comparison.run_arm("kl", {"kl": 1.0})
    steps: list[int] = []
    monkeypatch.setattr(Trainer, "_step", lambda trainer, step: steps.append(step) or whole_step(trainer, step))
    comparison.run_arm("kl", {"kl": 1.0})
    assert steps == [3, 4, 5, 6, 7]
    assert read(comparison, "kl")["sequences"] == unbroken


def test_sums_of_single_texts_are_the_trainers_means_of_packed_ones(comparison: Comparison, tmp_path: Path) -> None:
    comparison.run_warm_up()
    sequences = read(comparison, "start")["sequences"]
    config = dataclasses.replace(comparison.config, evaluate=dataclasses.replace(comparison.config.evaluate, max_rows=100))
    trainer, model = trainer_for(config, comparison.policy.module, comparison.rollouts, tmp_path / "trainer")
    model.load_state_dict(load_trained(comparison.out / "arms" / "start" / "last", comparison.policy).state_dict())
    packed = trainer.evaluate()
    num = sum(sequence["num_positions"] for sequence in sequences)
    for name in ("rejection_length", "block_length"):
        assert sum(sequence[name] for sequence in sequences) / num == pytest.approx(packed[f"held_out_{name}_estimate"], rel=1e-4)
    assert sum(sequence["e2e_length"] for sequence in sequences) / num == pytest.approx(packed["held_out_e2e_length"], rel=1e-4)
    for depth in range(3):
        slots = sum(sequence["num_slots_by_depth"][depth] for sequence in sequences)
        overlap = sum(sequence["overlap_by_depth"][depth] for sequence in sequences) / slots
        assert overlap == pytest.approx(packed[f"held_out_overlap_by_depth_{depth + 1}"], rel=1e-4)


def test_arms_of_other_sequences_are_not_compared() -> None:
    def record(key: str) -> dict[str, Any]:
        return {"sequences": [{"key": key}]}

    with pytest.raises(ValueError, match="different sequences"):
        summarise({"ce": record("a"), "kl": record("b")}, [])


@pytest.mark.parametrize("kind", ["mtp", "block"])
def test_every_arm_is_a_loss_and_every_comparison_has_its_arms(kind: str) -> None:
    for loss in ARMS[kind].values():
        LossConfig.from_mapping(loss)
    assert {name for pair in COMPARISONS[kind] for name in pair} <= set(ARMS[kind])
