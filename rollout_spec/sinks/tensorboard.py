"""TensorBoard: scalars and the histogram of accepted lengths, one point a span of time. Needs the extra ``tensorboard``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_spec.events import TrainEvent


class TensorBoardWriter:
    """A PointWriter for WindowSink. Raises ValueError with the mend when tensorboard is not installed."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("the TensorBoard sink needs the package tensorboard: pip install 'rollout-spec[tensorboard]'") from None
        self._writer: Any = SummaryWriter(str(folder))

    def point(self, step: int, figures: dict[str, float], accepted_lengths: Sequence[int]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"rollout_spec/{name}", value, step)
        if sum(accepted_lengths):
            # Bucket k ends at k + .5: lengths are whole numbers.
            self._writer.add_histogram_raw(
                "rollout_spec/accepted_length",
                min=0,
                max=len(accepted_lengths) - 1,
                num=sum(accepted_lengths),
                sum=sum(length * count for length, count in enumerate(accepted_lengths)),
                sum_squares=sum(length**2 * count for length, count in enumerate(accepted_lengths)),
                bucket_limits=[length + 0.5 for length in range(len(accepted_lengths))],
                bucket_counts=list(accepted_lengths),
                global_step=step,
            )

    def train(self, event: TrainEvent) -> None:
        for name, value in {"loss": event.loss, **event.metrics}.items():
            self._writer.add_scalar(f"train_{event.role}/{name}", value, event.step)

    def close(self) -> None:
        self._writer.close()
