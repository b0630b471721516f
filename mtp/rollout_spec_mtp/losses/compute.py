"""compute_loss: slot statistics and a config -> one loss and what to log about it.

Shape legend: T anchors, G slots of an anchor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec_mtp.losses import objectives
from rollout_spec_mtp.losses.config import ANCHOR_OBJECTIVES, SLOT_OBJECTIVES, LossConfig
from rollout_spec_mtp.losses.stats import SlotCounts, SlotStats


@dataclass(frozen=True, kw_only=True, eq=False)
class LossOutput:
    loss: Tensor  # []
    # Detached. One scalar for each objective that is on, unweighted and under its config name, and about the draft: overlap,
    # draft_correct_rate (means over slots), e2e_length, rejection_length_estimate, block_length_estimate (if its statistic is
    # there; lengths are without the bonus token, means over anchors) and overlap_by_depth [G].
    metrics: Mapping[str, Tensor]


def compute_loss(stats: SlotStats, config: LossConfig, counts: SlotCounts | None = None) -> LossOutput:
    """The config's weighted sum of objectives over stats [T, G].

    Slot objectives are means over valid slots (weighted by position if the config says so), anchor objectives means over
    anchors with a valid slot. ``counts`` are the denominators, by default those of ``stats.valid``; give the counts of the
    whole batch to get this shard's share of the loss and metrics (shares add up; DDP averages gradients, so multiply the share
    by the number of processes there). Without a valid slot the loss is 0 with zero gradients.

    Raises ValueError if a statistic that the config needs is missing.
    """
    missing = [extra.value for extra in config.extras if getattr(stats, extra.value) is None]
    if missing:
        raise ValueError(f"the loss needs the statistics {', '.join(sorted(missing))}: compute them with extras=config.extras")
    counts = SlotCounts.of(stats.valid) if counts is None else counts
    values = _slot_values(stats, config, counts) | _anchor_values(stats, config, counts)
    loss = torch.stack([_weight(config, name) * value for name, value in values.items()]).sum()
    metrics = {name: value.detach() for name, value in values.items()} | _draft_metrics(stats, counts)
    return LossOutput(loss=loss, metrics=metrics)


def position_weights(config: LossConfig, num_slots: int, like: Tensor) -> Tensor:
    """[G] weight of each depth in the slot objectives: e^{-(k-1)/decay} at slot k = 1..G, or ones; dtype and device of like."""
    if config.position_weight is None:
        return torch.ones(num_slots, dtype=like.dtype, device=like.device)
    return torch.exp(-torch.arange(num_slots, dtype=like.dtype, device=like.device) / config.position_weight.decay)


def _weight(config: LossConfig, name: str) -> float:
    if name == "first_error_focal":
        assert config.first_error_focal is not None
        return config.first_error_focal.weight
    return float(getattr(config, name))


def _slot_values(stats: SlotStats, config: LossConfig, counts: SlotCounts) -> dict[str, Tensor]:
    """Weighted mean over valid slots of every slot objective that is on."""
    weights = position_weights(config, stats.valid.shape[1], stats.overlap)
    denominator = (weights * counts.by_depth).sum()
    # An empty mask has denominator 0; any positive one then gives 0.
    denominator = torch.where(denominator > 0, denominator, 1.0)
    values = {}
    for name in SLOT_OBJECTIVES:
        if getattr(config, name):
            per_slot = _per_slot(name, stats, config)
            values[name] = (torch.where(stats.valid, per_slot, 0.0) * weights).sum() / denominator
    return values


def _per_slot(name: str, stats: SlotStats, config: LossConfig) -> Tensor:
    """[T, G] loss of one slot objective."""
    match name:
        case "ce":
            return objectives.ce_per_slot(stats)
        case "kl":
            return objectives.kl_per_slot(stats)
        case "tv":
            return objectives.tv_per_slot(stats)
        case "hybrid":
            return objectives.hybrid_per_slot(stats, config.hybrid_decay)
    raise AssertionError(name)


def _anchor_values(stats: SlotStats, config: LossConfig, counts: SlotCounts) -> dict[str, Tensor]:
    """Mean over anchors with a valid slot of every anchor objective that is on."""
    slots = objectives.valid_slots(stats.valid, stats.overlap.dtype)
    per_anchor = {name: _per_anchor(name, stats, slots) for name in ANCHOR_OBJECTIVES if getattr(config, name)}
    if config.first_error_focal is not None:
        per_anchor["first_error_focal"] = objectives.first_error_focal(stats, config.first_error_focal.exponent)
    return {name: _anchor_mean(value, stats.valid, counts) for name, value in per_anchor.items()}


def _per_anchor(name: str, stats: SlotStats, slots: Tensor) -> Tensor:
    """[T] loss of one anchor objective; slots [T] valid slots."""
    match name:
        case "e2e_tv":
            return 1.0 - objectives.e2e_length(stats) / slots
        case "rejection_length":
            return 1.0 - objectives.rejection_length(stats) / slots
        case "block_length":
            return 1.0 - objectives.block_length(stats) / slots
        case "chain":
            return -objectives.chain_length(stats)
    raise AssertionError(name)


def _anchor_mean(per_anchor: Tensor, valid: Tensor, counts: SlotCounts) -> Tensor:
    return torch.where(valid.any(dim=1), per_anchor, 0.0).sum() / counts.anchors.clamp(min=1)


@torch.no_grad()
def _draft_metrics(stats: SlotStats, counts: SlotCounts) -> dict[str, Tensor]:
    """How good the draft is, whatever the loss. Depths without a valid slot give 0 in overlap_by_depth."""
    slots = counts.by_depth.sum().clamp(min=1)
    overlap = torch.where(stats.valid, stats.overlap, 0.0)
    metrics = {
        "overlap": overlap.sum() / slots,
        "overlap_by_depth": overlap.sum(dim=0) / counts.by_depth.clamp(min=1),
        "draft_correct_rate": (stats.draft_correct & stats.valid).sum() / slots,
        "e2e_length": _anchor_mean(objectives.e2e_length(stats), stats.valid, counts),
        "rejection_length_estimate": _anchor_mean(objectives.rejection_length(stats), stats.valid, counts),
    }
    if stats.block_overlap is not None:
        metrics["block_length_estimate"] = _anchor_mean(objectives.block_length(stats), stats.valid, counts)
    return metrics
