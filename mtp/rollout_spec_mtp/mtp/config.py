"""MTPConfig: the shape of an MTP head."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """``hidden_layers`` are the target's layers whose states the head reads: -1 is the final norm's output, i decoder layer i's."""

    draft_length: int = 4  # recursive steps it is trained for; it may be asked for more
    hidden_layers: tuple[int, ...] = (-1,)
    start_from_policy: bool = True  # the layer reads as the policy's last one at first, not at random

    def __post_init__(self) -> None:
        if self.draft_length < 1:
            raise ValueError(f"drafter.draft_length must be 1 or more, got {self.draft_length}")
        if not self.hidden_layers or len(set(self.hidden_layers)) != len(self.hidden_layers) or min(self.hidden_layers) < -1:
            raise ValueError(f"drafter.hidden_layers must be different layers (-1 = the final norm's output), got {self.hidden_layers}")
