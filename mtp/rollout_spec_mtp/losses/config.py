"""LossConfig: which objectives a drafter is trained on, with which weights, and the interventions added to them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from rollout_spec_mtp.losses.stats import Extra


@dataclass(frozen=True, kw_only=True)
class PositionWeight:
    """Weight e^{-(k-1)/decay} of slot k in the slot objectives: early slots decide whether later ones are reached."""

    decay: float = 7.0  # arXiv 2606.11552 takes 7 for blocks of 16

    def __post_init__(self) -> None:
        _require_positive("position_weight.decay", self.decay)


@dataclass(frozen=True, kw_only=True)
class FirstErrorFocal:
    """Adds weight * (1 - q_f)^exponent * CE_f at the first slot f where the drafter errs."""

    weight: float
    exponent: float = 2.0

    def __post_init__(self) -> None:
        _require_positive("first_error_focal.weight", self.weight)
        if not (math.isfinite(self.exponent) and self.exponent >= 0):
            raise ValueError(f"first_error_focal.exponent must be finite and 0 or more, got {self.exponent}")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss is the weighted sum of its objectives; an objective of weight 0 is not computed.

    Slot objectives (mean over valid slots): ce, kl, tv, hybrid. Anchor objectives (mean over anchors): e2e_tv,
    rejection_length and block_length, each ``1 - length / valid slots``; chain, ``-sum_j prod_{i<=j} q_i(y_i)``.
    """

    ce: float = 0.0
    kl: float = 0.0
    tv: float = 0.0
    hybrid: float = 0.0
    e2e_tv: float = 0.0
    rejection_length: float = 0.0
    block_length: float = 0.0
    chain: float = 0.0
    first_error_focal: FirstErrorFocal | None = None
    position_weight: PositionWeight | None = None
    hybrid_decay: float = 3.0

    def __post_init__(self) -> None:
        for name in SLOT_OBJECTIVES + ANCHOR_OBJECTIVES:
            weight = getattr(self, name)
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"loss weight {name} must be finite and 0 or more, got {weight}")
        _require_positive("hybrid_decay", self.hybrid_decay)
        if not any(getattr(self, name) for name in SLOT_OBJECTIVES + ANCHOR_OBJECTIVES) and self.first_error_focal is None:
            raise ValueError(
                f"the loss has no objective: give a positive weight to one of {', '.join(SLOT_OBJECTIVES + ANCHOR_OBJECTIVES)}"
            )
        if self.position_weight is not None and not any(getattr(self, name) for name in SLOT_OBJECTIVES):
            raise ValueError(f"position_weight weighs the slot objectives {', '.join(SLOT_OBJECTIVES)}, and none of them is on")

    @staticmethod
    def from_mapping(mapping: Mapping[str, object]) -> LossConfig:
        """Build from parsed YAML or JSON, e.g. ``{"hybrid": 1.0, "position_weight": {"decay": 7}}``.

        Raises ValueError for unknown keys, values of the wrong kind and what the constructors refuse.
        """
        _refuse_unknown("loss", mapping, LossConfig)
        arguments: dict[str, object] = {}
        for key, value in mapping.items():
            if key == "position_weight":
                arguments[key] = None if value is None else PositionWeight(**_numbers(key, value, PositionWeight))
            elif key == "first_error_focal":
                arguments[key] = None if value is None else FirstErrorFocal(**_numbers(key, value, FirstErrorFocal))
            else:
                arguments[key] = _number(key, value)
        return LossConfig(**arguments)  # type: ignore[arg-type]  # every value was checked against its field just above

    @property
    def extras(self) -> frozenset[Extra]:
        """The optional statistics these objectives need."""
        needed = set()
        if self.kl or self.hybrid:
            needed.add(Extra.KL)
        if self.block_length:
            needed.add(Extra.BLOCK_OVERLAP)
        return frozenset(needed)


SLOT_OBJECTIVES = ("ce", "kl", "tv", "hybrid")
ANCHOR_OBJECTIVES = ("e2e_tv", "rejection_length", "block_length", "chain")


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and positive, got {value}")


def _refuse_unknown(owner: str, mapping: Mapping[str, object], kind: type) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(mapping) - set(known))
    if unknown:
        raise ValueError(f"{owner} config: unknown keys {', '.join(unknown)}; known are {', '.join(known)}")


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"loss config: {key} must be a number, got {value!r}")
    return float(value)


def _numbers(key: str, value: object, kind: type) -> dict[str, float]:
    """The number-valued arguments of a nested config."""
    if not isinstance(value, Mapping):
        raise ValueError(f"loss config: {key} must be a mapping, got {value!r}")
    _refuse_unknown(key, value, kind)
    missing = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name not in value]
    if missing:
        raise ValueError(f"loss config: {key} needs {', '.join(missing)}")
    return {name: _number(f"{key}.{name}", number) for name, number in value.items()}
