"""Drafter losses: pure functions from drafter and target laws to a loss, readable (reference) and in chunks (chunked)."""

from rollout_spec_mtp.losses.chunked import DraftBatch, chunked_loss, chunked_stats
from rollout_spec_mtp.losses.compute import LossOutput, compute_loss
from rollout_spec_mtp.losses.config import FirstErrorFocal, LossConfig, PositionWeight
from rollout_spec_mtp.losses.curriculum import base_weight, domino_loss
from rollout_spec_mtp.losses.stats import Extra, SlotCounts, SlotStats

__all__ = [
    "DraftBatch",
    "Extra",
    "FirstErrorFocal",
    "LossConfig",
    "LossOutput",
    "PositionWeight",
    "SlotCounts",
    "SlotStats",
    "base_weight",
    "chunked_loss",
    "chunked_stats",
    "compute_loss",
    "domino_loss",
]
