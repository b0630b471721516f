"""EntropyBudget: each request drafts as deep as its tokens are still likely to be accepted. It looks at no cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rollout_spec.budget import Budget, BudgetSignals, Decision, check_widths
from rollout_spec.controllers.probing import ProbeConfig, ProbeState
from rollout_spec.controllers.selection import Ints, accept_by_depth, probe_lengths, valued

_PROBE_COST = 0.2  # of a round: it looks at no cost


@dataclass(frozen=True, kw_only=True)
class EntropyBudget:
    """Depth d is drafted while the expected probability that the walk accepts it, ``Π_{i<=d} α_i``, is at least ``threshold``."""

    max_length: int = 8
    threshold: float = 0.3
    tree_width: tuple[int, ...] = (1,)
    probes: ProbeConfig = field(default_factory=ProbeConfig)
    name: str = "entropy"

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"max_length must be 1 or more, got {self.max_length}")
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold must be in (0, 1), got {self.threshold}")
        check_widths(self.tree_width)

    def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]:
        probing = state if isinstance(state, ProbeState) else ProbeState()
        probing = probing.enter(signals.forecast.epoch, float(signals.forecast.entropies.mean()), self.probes)
        limits = np.clip(signals.remaining.numpy() - 1, 0, self.max_length)
        lengths = np.minimum((signals.forecast.accepted[:, : self.max_length] >= self.threshold).sum(1), limits)
        if lengths.any():
            return self._budget(signals, lengths, "threshold"), probing.drafted(signals.num_rounds, self.probes)
        missing = self.probes.missing(signals.forecast.num_asked)
        if probing.wants_probe(_PROBE_COST, missing, self.probes):
            probed = probe_lengths(probing, limits, missing, self.probes)
            return self._budget(signals, probed, "probe"), probing.probed(int((probed > 0).sum()), self.probes)
        return self._budget(signals, lengths, "off"), probing.stayed_off(signals.num_rounds)

    def _budget(self, signals: BudgetSignals, lengths: Ints, reason: str) -> Budget:
        value = valued(signals.forecast, signals.costs, lengths, int(signals.context_lengths.sum()))
        decision = Decision(
            reason=reason,
            accept_by_depth=accept_by_depth(signals.forecast, lengths) if lengths.any() else (),
            num_accepted=value.num_accepted,
            round_s=value.round_s,
            gain=value.gain,
            holds=reason != "probe",
        )
        return Budget(draft_lengths=torch.from_numpy(lengths), tree_width=self.tree_width, decision=decision)
