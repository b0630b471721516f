"""LossConfig, the interventions by hand-computed numbers, and the curriculum.

Shape legend: T anchors, G slots.
"""

from __future__ import annotations

import math

import pytest
import torch

from rollout_spec_mtp.losses import (
    Extra,
    FirstErrorFocal,
    LossConfig,
    PositionWeight,
    SlotStats,
    base_weight,
    compute_loss,
    domino_loss,
)

# Two anchors of three slots; the second has one valid slot.
DRAFT = torch.tensor([[0.5, 0.25, 0.8], [0.4, 1.0, 1.0]], dtype=torch.float64)
STATS = SlotStats(
    valid=torch.tensor([[True, True, True], [True, False, False]]),
    overlap=torch.tensor([[0.9, 0.8, 0.5], [0.6, 1.0, 1.0]], dtype=torch.float64),
    draft_logprobs=DRAFT.log(),
    target_logprobs=torch.tensor([[0.25, 0.5, 0.8], [0.5, 1.0, 1.0]], dtype=torch.float64).log(),
    draft_correct=torch.tensor([[True, False, False], [True, True, True]]),
    kl=torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.0, 0.0]], dtype=torch.float64),
    block_overlap=torch.tensor([[0.9, 0.85, 0.55], [0.6, 1.0, 1.0]], dtype=torch.float64),
)
# log q/p = log 2, -log 2, 0: rejection survives 1, 1, .5; block's credit of the first slot pays for the second.
E2E = ((1 - (0.9 + 0.72 + 0.36) / 3) + (1 - 0.6)) / 2
REJECTION = ((1 - (0.9 + 0.8 + 0.5 * 0.5) / 3) + (1 - 0.6)) / 2
BLOCK = ((1 - (0.9 + 0.85 + 0.55) / 3) + (1 - 0.6)) / 2
CHAIN = -((0.5 + 0.125 + 0.1) + 0.4) / 2
CE = [-math.log(value) for value in (0.5, 0.25, 0.8, 0.4)]


def hybrid(kl: float, alpha: float, decay: float) -> float:
    share = math.exp(-decay * alpha)
    return share * kl + (1 - share) * (1 - alpha)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LossConfig(ce=2.0), 2 * sum(CE) / 4),
        (LossConfig(kl=1.0), (0.1 + 0.2 + 0.3 + 0.4) / 4),
        (LossConfig(tv=1.0), (0.1 + 0.2 + 0.5 + 0.4) / 4),
        (LossConfig(hybrid=1.0), sum(hybrid(k, a, 3) for k, a in ((0.1, 0.9), (0.2, 0.8), (0.3, 0.5), (0.4, 0.6))) / 4),
        (LossConfig(hybrid=1.0, hybrid_decay=1.0), sum(hybrid(k, a, 1) for k, a in ((0.1, 0.9), (0.2, 0.8), (0.3, 0.5), (0.4, 0.6))) / 4),
        (LossConfig(e2e_tv=1.0), E2E),
        (LossConfig(rejection_length=1.0), REJECTION),
        (LossConfig(block_length=1.0), BLOCK),
        (LossConfig(chain=1.0), CHAIN),
        (LossConfig(first_error_focal=FirstErrorFocal(weight=0.5, exponent=2.0)), 0.5 * (0.75**2 * CE[1]) / 2),
        (
            LossConfig(ce=1.0, position_weight=PositionWeight(decay=2.0)),
            (CE[0] + CE[1] * math.exp(-0.5) + CE[2] * math.exp(-1) + CE[3]) / (2 + math.exp(-0.5) + math.exp(-1)),
        ),
        (
            LossConfig(e2e_tv=0.5, chain=0.25, first_error_focal=FirstErrorFocal(weight=1.0, exponent=0.0)),
            0.5 * E2E + 0.25 * CHAIN + CE[1] / 2,
        ),
    ],
)
def test_losses_by_hand(config: LossConfig, expected: float) -> None:
    assert compute_loss(STATS, config).loss.item() == pytest.approx(expected, abs=1e-14)


def test_metrics_by_hand() -> None:
    metrics = compute_loss(STATS, LossConfig(ce=3.0)).metrics
    assert metrics["ce"].item() == pytest.approx(sum(CE) / 4)  # unweighted
    assert metrics["overlap"].item() == pytest.approx((0.9 + 0.8 + 0.5 + 0.6) / 4)
    assert metrics["overlap_by_depth"].tolist() == pytest.approx([0.75, 0.8, 0.5])
    assert metrics["draft_correct_rate"].item() == pytest.approx(0.5)
    assert metrics["e2e_length"].item() == pytest.approx((0.9 + 0.72 + 0.36 + 0.6) / 2)
    assert metrics["rejection_length_estimate"].item() == pytest.approx((0.9 + 0.8 + 0.25 + 0.6) / 2)
    assert metrics["block_length_estimate"].item() == pytest.approx((0.9 + 0.85 + 0.55 + 0.6) / 2)


def test_tokens_outside_the_draft_vocabulary_teach_nothing_and_break_nothing() -> None:
    logprobs = torch.tensor([[-1.0, -torch.inf, -1.0]], dtype=torch.float64, requires_grad=True)
    stats = SlotStats(
        valid=torch.ones(1, 3, dtype=torch.bool),
        overlap=torch.full((1, 3), 0.5, dtype=torch.float64),
        draft_logprobs=logprobs,
        target_logprobs=torch.full((1, 3), -0.5, dtype=torch.float64),
        draft_correct=torch.tensor([[True, False, False]]),
        block_overlap=torch.full((1, 3), 0.5, dtype=torch.float64),
    )
    config = LossConfig(ce=1.0, chain=1.0, rejection_length=1.0, block_length=1.0, first_error_focal=FirstErrorFocal(weight=1.0))
    output = compute_loss(stats, config)
    survive = math.exp(-0.5)
    lengths = 0.5 + survive * 0.5  # the third slot is never reached
    assert output.metrics["ce"].item() == pytest.approx(2 / 3)
    assert output.metrics["chain"].item() == pytest.approx(-math.exp(-1))
    assert output.metrics["rejection_length"].item() == pytest.approx(1 - lengths / 3)
    assert output.metrics["block_length"].item() == pytest.approx(1 - lengths / 3)
    assert output.metrics["first_error_focal"].item() == 0.0
    output.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 1] == 0


def test_from_mapping() -> None:
    config = LossConfig.from_mapping(
        {"hybrid": 1, "position_weight": {"decay": 4}, "first_error_focal": {"weight": 0.5}, "hybrid_decay": 2.0}
    )
    focal = FirstErrorFocal(weight=0.5, exponent=2.0)
    assert config == LossConfig(hybrid=1.0, position_weight=PositionWeight(decay=4.0), first_error_focal=focal, hybrid_decay=2.0)
    assert LossConfig.from_mapping({"ce": 1.0, "position_weight": None, "first_error_focal": None}) == LossConfig(ce=1.0)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"hybird": 1.0}, "unknown keys hybird; known are ce, kl"),
        ({"ce": 1.0, "position_weight": {"gamma": 7}}, "position_weight config: unknown keys gamma"),
        ({"first_error_focal": {"exponent": 2}}, "first_error_focal needs weight"),
        ({"first_error_focal": 0.5}, "first_error_focal must be a mapping"),
        ({"first_error_focal": {"weight": 0}}, "first_error_focal.weight must be finite and positive"),
        ({"first_error_focal": {"weight": 1, "exponent": -1}}, "exponent must be finite and 0 or more"),
        ({"ce": "1.0"}, "ce must be a number"),
        ({"ce": True}, "ce must be a number"),
        ({"ce": -1.0}, "loss weight ce must be finite and 0 or more"),
        ({"ce": float("nan")}, "loss weight ce must be finite"),
        ({}, "no objective"),
        ({"e2e_tv": 1.0, "position_weight": {"decay": 7}}, "position_weight weighs the slot objectives"),
        ({"ce": 1.0, "position_weight": {"decay": 0}}, "position_weight.decay must be finite and positive"),
        ({"hybrid": 1.0, "hybrid_decay": float("inf")}, "hybrid_decay must be finite"),
    ],
)
def test_bad_configs_are_refused(mapping: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig.from_mapping(mapping)


def test_extras_follow_the_objectives() -> None:
    assert LossConfig(ce=1.0, e2e_tv=1.0, rejection_length=1.0).extras == frozenset()
    assert LossConfig(hybrid=1.0).extras == {Extra.KL}
    assert LossConfig(kl=1.0, block_length=1.0).extras == {Extra.KL, Extra.BLOCK_OVERLAP}


def test_a_missing_statistic_is_named() -> None:
    bare = SlotStats(
        valid=STATS.valid,
        overlap=STATS.overlap,
        draft_logprobs=STATS.draft_logprobs,
        target_logprobs=STATS.target_logprobs,
        draft_correct=STATS.draft_correct,
    )
    with pytest.raises(ValueError, match="block_overlap, kl"):
        compute_loss(bare, LossConfig(kl=1.0, block_length=1.0))


def test_domino_curriculum() -> None:
    assert [base_weight(step, 4) for step in (0, 1, 4, 9)] == [1.0, 0.75, 0.0, 0.0]
    final, base = torch.tensor(2.0), torch.tensor(6.0)
    assert domino_loss(final, base, 0.25).item() == 3.0
    with pytest.raises(ValueError, match="num_steps > 0"):
        base_weight(0, 0)
    with pytest.raises(ValueError, match=r"lie in \[0, 1\]"):
        domino_loss(final, base, 1.5)
