"""ThroughputBudget: the most expected tokens a second, jointly over draft length and batch; nothing where nothing pays. ``auto``."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rollout_spec.budget import Budget, BudgetSignals, Decision, TreeGrowth, check_widths
from rollout_spec.controllers.probing import ProbeConfig, ProbeState
from rollout_spec.controllers.selection import Ints, Selection, accept_by_depth, probe_lengths, select, valued
from rollout_spec.cost import DEEPER


@dataclass(frozen=True, kw_only=True)
class ThroughputBudget:
    """Weighs expected acceptance against measured costs every round (``selection.select``).

    Kinds of rounds that were never measured at about this number of requests are run a few times each: without a draft, one deep, two deep.
    Afterwards a budget of 0 is left only for an advantage of ``hysteresis``, and taken where less than half of it is left: of many
    estimates the best is too good. While acceptance is known so little, after weights or entropy changed or it jumped, that
    ``optimism`` standard errors more than what is expected would make probing everybody gain ``upside``, every round probes.
    """

    max_length: int = 8
    tree_width: tuple[int, ...] = (1,)
    max_tree_nodes: int = 32  # of one request, for drafters that size their trees themselves
    hysteresis: float = 0.02
    optimism: float = 1.5
    upside: float = 0.04
    probes: ProbeConfig = field(default_factory=ProbeConfig)
    name: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_length", "max_tree_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.optimism < 0 or self.upside < 0:
            raise ValueError(f"optimism and upside must be 0 or more, got {self.optimism} and {self.upside}")
        if not 0 <= self.hysteresis < 1:
            raise ValueError(f"hysteresis must be in [0, 1), got {self.hysteresis}")
        check_widths(self.tree_width)

    def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]:
        forecast, costs, probes = signals.forecast, signals.costs, self.probes
        probing = (state if isinstance(state, ProbeState) else ProbeState()).enter(forecast.epoch, float(forecast.entropies.mean()), probes)
        limits = np.clip(signals.remaining.numpy() - 1, 0, min(self.max_length, forecast.accept.shape[1]))
        batch, context = len(limits), int(signals.context_lengths.sum())
        nothing = np.zeros_like(limits)
        for depth in range(min(DEEPER, int(limits.max())) + 1):
            if not costs.is_measured(batch, depth):
                return self._budget(signals, valued(forecast, costs, np.minimum(limits, depth), context), "explore"), probing
        best = select(forecast, costs, limits, context)
        worth = best.gain >= (0.5 if probing.drafting else 1.0) * self.hysteresis
        if best.lengths.any() and worth:
            if probing.wants_reference(best.gain, probes):
                return self._budget(signals, valued(forecast, costs, nothing, context), "reference"), probing.looked_without()
            return self._budget(signals, best, "best"), probing.drafted(signals.num_rounds, probes)
        hoped = valued(forecast.at_best(self.optimism), costs, np.minimum(limits, probes.length), context)
        news = probes.missing(forecast.num_asked)
        missing = max(news, probes.doubt_requests if hoped.gain >= self.upside else 0)
        probe = valued(forecast, costs, probe_lengths(probing, limits, missing, probes), context)
        if probing.wants_probe(probe.round_s / probe.plain_s - 1.0, missing, probes) and probe.lengths.any():
            probed = probing.probed(int((probe.lengths > 0).sum()), probes)
            return self._budget(signals, probe, "probe", holds=missing > news), probed
        return self._budget(signals, valued(forecast, costs, nothing, context), "off"), probing.stayed_off(signals.num_rounds)

    def _budget(self, signals: BudgetSignals, chosen: Selection, reason: str, *, holds: bool = False) -> Budget:
        drafting = bool(chosen.lengths.any())
        decision = Decision(
            reason=reason,
            accept_by_depth=accept_by_depth(signals.forecast, chosen.lengths) if drafting else (),
            num_accepted=chosen.num_accepted,
            round_s=chosen.round_s,
            gain=chosen.gain if drafting else 0.0,
            holds=holds or reason in ("best", "off"),
        )
        return Budget(
            draft_lengths=torch.from_numpy(chosen.lengths),
            tree_width=self.tree_width,
            growth=self._growth(signals, chosen.lengths) if drafting and max(self.tree_width) > 1 and signals.costs.known else None,
            decision=decision,
        )

    def _growth(self, signals: BudgetSignals, lengths: Ints) -> TreeGrowth:
        batch, drafting = len(lengths), int((lengths > 0).sum())
        rows = batch + np.arange(drafting * self.max_tree_nodes + 1, dtype=np.float64)
        depths = np.full(len(rows), float(lengths.max()))
        seconds = signals.costs.round_s(batch, int(signals.context_lengths.sum()), depths, rows)
        return TreeGrowth(num_requests=batch, round_s=torch.from_numpy(seconds), max_nodes=self.max_tree_nodes)
