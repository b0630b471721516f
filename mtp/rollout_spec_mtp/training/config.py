"""TrainConfig: one tree of settings from a YAML file; unknown keys are refused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollout_spec_mtp.configs import build
from rollout_spec_mtp.losses import LossConfig
from rollout_spec_mtp.training.collect import CollectConfig

PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class DrafterSection:
    kind: str = "mtp"
    draft_vocabulary: int | None = None  # so many tokens, the likeliest on the training rollouts; None = all
    settings: Mapping[str, Any] = field(default_factory=dict)  # the kind's own: MTPConfig, BlockConfig


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the curriculum: its share of the steps, the loss it trains on, and how much of each draft."""

    share: float
    loss: LossConfig
    slots: int | None = None  # the first so many drafted tokens (an MTP head's steps cost alike, and the first teaches most); None = all

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"phases: slots must be 1 or more, got {self.slots}")
        if not 0 < self.share <= 1:
            raise ValueError(f"phases: share must be in (0, 1], got {self.share}")


@dataclass(frozen=True, kw_only=True)
class OptimSection:
    """AdamW with a linear warm-up and a cosine down to ``final_lr_rate`` of the learning rate."""

    epochs: float = 4.0
    rows_per_step: int = 4  # packed rows of one optimiser step, over all processes and micro-batches
    micro_rows: int = 4  # packed rows of one forward
    row_tokens: int = 512  # tokens of a packed row
    lr: float = 1e-3
    final_lr_rate: float = 0.1
    warmup_steps: int = 20
    weight_decay: float = 0.01
    betas: tuple[float, ...] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    ema_decay: float | None = None  # evaluate and save a running mean of the weights
    precision: str = "float32"  # of the products; weights and their updates are float32
    chunk_mib: int = 64  # for logits; small enough for a CPU's cache, more on a GPU
    seed: int = 0
    checkpoint_steps: int = 50
    log_steps: int = 1
    trackers: tuple[str, ...] = ()  # accelerate's: wandb, tensorboard

    def __post_init__(self) -> None:
        for name in ("rows_per_step", "micro_rows", "row_tokens", "chunk_mib", "checkpoint_steps", "log_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} must be 1 or more, got {getattr(self, name)}")
        if self.rows_per_step % self.micro_rows:
            raise ValueError(f"train.rows_per_step {self.rows_per_step} must be a multiple of train.micro_rows {self.micro_rows}")
        if not (self.epochs > 0 and self.lr > 0 and self.max_grad_norm > 0):
            raise ValueError("train.epochs, train.lr and train.max_grad_norm must be positive")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 <= self.final_lr_rate <= 1:
            raise ValueError(f"train.final_lr_rate must be in [0, 1], got {self.final_lr_rate}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"train.ema_decay must be in (0, 1), got {self.ema_decay}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"train.precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")

    def lr_at(self, step: int, num_steps: int) -> float:
        """Learning rate of step 0, 1, ..."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        return self.lr * (self.final_lr_rate + (1 - self.final_lr_rate) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    """``held_out`` of the prompts, with all their samples, are never trained on."""

    held_out: float = 0.05
    every_steps: int = 50
    max_rows: int = 16  # packed rows of held-out sequences that are looked at
    patience: int | None = None  # end after so many evaluations without a longer accepted length
    served_prompts: str | None = None  # prompts for the engine's own acceptance length at the end; None = leave it out
    served_max_new_tokens: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"evaluate.held_out must be in (0, 1), got {self.held_out}")
        for name in ("every_steps", "max_rows", "served_max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluate.{name} must be 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    model: str
    out: str
    collect: CollectConfig
    drafter: DrafterSection = field(default_factory=DrafterSection)
    phases: tuple[Phase, ...] = (Phase(share=0.4, loss=LossConfig(hybrid=1.0)), Phase(share=0.6, loss=LossConfig(e2e_tv=1.0)))
    train: OptimSection = field(default_factory=OptimSection)
    evaluate: EvalSection = field(default_factory=EvalSection)
    threads: int | None = None

    def __post_init__(self) -> None:
        if not self.phases or not math.isclose(sum(phase.share for phase in self.phases), 1.0, abs_tol=1e-6):
            raise ValueError(f"the phases' shares must add up to 1, got {[phase.share for phase in self.phases]}")

    def phase_at(self, step: int, num_steps: int) -> Phase:
        """The phase of step 0, 1, ... of num_steps."""
        end = 0.0
        for phase in self.phases:
            end += phase.share
            if step < round(end * num_steps):
                return phase
        return self.phases[-1]


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The YAML file, with ``section.key=value`` overrides (values in YAML). ValueError for what cannot be read or is refused."""
    if not path.is_file():
        raise ValueError(f"config file {path} does not exist")
    try:
        mapping = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(mapping, dict):
        raise ValueError(f"{path} must hold a mapping of settings")
    for override in overrides:
        _override(mapping, override)
    return build(TrainConfig, mapping, "config")


def _override(mapping: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--set {text!r}: give section.key=value, like train.lr=3e-4")
    *sections, last = key.split(".")
    for section in sections:
        mapping = mapping.setdefault(section, {})
        if not isinstance(mapping, dict):
            raise ValueError(f"--set {text!r}: {section} is no section")
    parsed = yaml.safe_load(value)
    # YAML takes 3e-4 for a text.
    if isinstance(parsed, str):
        with contextlib.suppress(ValueError):
            parsed = float(parsed)
    mapping[last] = parsed
