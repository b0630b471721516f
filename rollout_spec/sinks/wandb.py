"""Weights & Biases: figures over a step axis of their own, and histograms by depth. Needs the extra ``wandb``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_spec.events import TrainEvent
from rollout_spec.sinks.window import Axis


class WandbWriter:
    """A PointWriter for WindowSink, one run of wandb each. WANDB_MODE=offline keeps it on this machine.

    wandb's own step only counts calls; every figure is plotted over ``round`` or ``global_step`` (the axis), those of training over
    ``global_step``, whatever order they come in.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, object], *, axis: Axis = Axis.ROUND) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError("the wandb sink needs the package wandb: pip install 'rollout-spec[wandb]'") from None
        folder.mkdir(parents=True, exist_ok=True)
        self._histogram: Any = wandb.Histogram
        self._axis = axis
        self._run: Any = wandb.init(project=project, dir=str(folder), config=dict(config))
        for step in Axis:
            self._run.define_metric(step.value)
        self._run.define_metric("rollout_spec/*", step_metric=axis.value)
        for role in ("drafter", "policy"):
            self._run.define_metric(f"train_{role}/*", step_metric=Axis.GLOBAL_STEP.value)

    def point(self, step: int, figures: dict[str, float], accepted_lengths: Sequence[int]) -> None:
        row: dict[str, Any] = {f"rollout_spec/{name}": value for name, value in figures.items()}
        edges = [length - 0.5 for length in range(len(accepted_lengths) + 1)]
        row["rollout_spec/accepted_length_histogram"] = self._histogram(np_histogram=(list(accepted_lengths), edges))
        row[self._axis.value] = step
        self._run.log(row)

    def train(self, event: TrainEvent) -> None:
        row = {f"train_{event.role}/{name}": value for name, value in {"loss": event.loss, **event.metrics}.items()}
        self._run.log({**row, Axis.GLOBAL_STEP.value: event.step})

    def close(self) -> None:
        self._run.finish()
