"""BudgetPilot: the controller with what it decides from, the entropy monitor and the costs. The one mutable thing about budgets.

The engine asks ``decide`` before a round and tells ``observe`` what became of it; a simulated world does the same.

Shape legend: B requests, D depths.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rollout_spec.budget import Budget, BudgetController, BudgetSignals, Decision
from rollout_spec.cost import OnlineCosts, RoundShape
from rollout_spec.events import BudgetEvent, DrafterStaleEvent, Event
from rollout_spec.files import write_text
from rollout_spec.monitor import EntropyMonitor
from rollout_spec.rounds_seen import Forecast, RoundOutcome

_FORMAT = 3
_HOLD_ROUNDS = 4  # that a decision stands for ...
_HOLD_OFF_ROUNDS = 8  # ... or one to draft nothing
_EVENT_EVERY = 64  # rounds, when nothing changes


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundReport:
    """What ``observe`` is told of a round."""

    outcome: RoundOutcome
    shape: RoundShape | None  # None: what it took says nothing of such rounds, for something else was done beside
    draft_s: float
    rest_s: float  # everything but drafting and deciding


class BudgetPilot:
    """Monitor and costs are kept up to date whatever the controller makes of them: the monitor also tells when a drafter has gone stale."""

    def __init__(
        self,
        controller: BudgetController,
        *,
        monitor: EntropyMonitor | None = None,
        costs: OnlineCosts | None = None,
    ) -> None:
        self.controller = controller
        self.monitor = EntropyMonitor() if monitor is None else monitor
        self.costs = OnlineCosts() if costs is None else costs
        self._state: object = None
        self._forecast: Forecast | None = None
        self._held: tuple[tuple[str, ...], Budget] | None = None  # the latest decision and its requests
        self._num_held = 0  # rounds that it stood for
        self._unlearnt: list[RoundOutcome] = []  # of rounds under it
        self._found_stale = False  # and not told yet
        self._told: tuple[str, int] | None = None  # reason and depth of the latest event
        self._since_told = 0

    def decide(self, request_ids: tuple[str, ...], remaining: Tensor, context_lengths: Tensor) -> Budget:
        """The next round's budget for these requests; remaining and context_lengths [B].

        A decision stands for a few rounds of the same requests, unless something changed at once: deciding costs time too.
        """
        if self._held is not None and self._stands(*self._held, request_ids, remaining):
            self._num_held += 1
            return self._held[1]
        self._learn()
        self._forecast = self.monitor.forecast(request_ids)
        signals = BudgetSignals(
            remaining=remaining,
            context_lengths=context_lengths,
            request_ids=request_ids,
            forecast=self._forecast,
            costs=self.costs.snapshot(),
            num_rounds=max(self._num_held, 1),
        )
        budget, self._state = self.controller.decide(signals, self._state)
        self._held, self._num_held = (request_ids, budget), 1
        return budget

    def _stands(self, held_for: tuple[str, ...], budget: Budget, request_ids: tuple[str, ...], remaining: Tensor) -> bool:
        lasts = budget.decision.holds and self._num_held < (_HOLD_ROUNDS if budget.max_depth else _HOLD_OFF_ROUNDS)
        return lasts and held_for == request_ids and bool((remaining > budget.draft_lengths).all())

    def observe(self, report: RoundReport) -> bool:
        """What became of the round that was decided last. True if the drafter was found stale by it or by those before."""
        if report.shape is not None:
            self.costs.observe(report.shape, report.draft_s, report.rest_s)
        self._unlearnt.append(report.outcome)
        if self._held is None or not self._held[1].decision.holds or len(self._unlearnt) >= _HOLD_ROUNDS:
            self._learn()
        told, self._found_stale = self._found_stale, False
        return told

    def _learn(self) -> None:
        """The monitor takes in the rounds of a decision together: at a single request that is what learning costs."""
        if not self._unlearnt:
            return
        outcomes, self._unlearnt = self._unlearnt, []
        epoch = self.monitor.epoch
        self._found_stale |= self.monitor.observe_rounds(outcomes, self._forecast)
        if self.monitor.epoch != epoch:
            self._held = None

    def events(self, round_index: int, budget: Budget, weights_version: int, drafter: str, *, found_stale: bool) -> list[Event]:
        """What is worth telling of the round: a decision that is another than before (or was not told for long), a stale drafter."""
        told: list[Event] = []
        if found_stale:
            now, reference = self.monitor.first_accept()
            told.append(
                DrafterStaleEvent(
                    round_index=round_index,
                    drafter=drafter,
                    weights_version=weights_version,
                    accept_prob=now,
                    reference_accept_prob=reference,
                    mean_entropy=self.monitor.mean_entropy,
                )
            )
        decided = (budget.decision.reason, budget.max_depth)
        self._since_told += 1
        if decided != self._told or self._since_told >= _EVENT_EVERY:
            self._told, self._since_told = decided, 0
            told.append(_budget_event(round_index, self.controller.name, budget))
        return told

    def finish(self, request_id: str) -> None:
        self._learn()
        self.monitor.finish(request_id)

    def target_updated(self) -> None:
        """The policy's weights changed."""
        self._learn()
        self._held = None
        self.monitor.target_updated()

    def drafter_updated(self) -> None:
        """The drafter's own weights changed."""
        self._learn()
        self._held = None
        self.monitor.drafter_updated()

    def save(self, path: Path) -> None:
        """What was learnt, as JSON, all or nothing."""
        self._learn()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"format": _FORMAT, "monitor": self.monitor.state_dict(), "costs": self.costs.state_dict()}))

    def load(self, path: Path) -> None:
        """Go on from what ``save`` wrote. ValueError if the file is damaged or of another format; nothing changes then."""
        monitor, costs = EntropyMonitor(self.monitor.config), OnlineCosts()
        try:
            held = json.loads(path.read_text())
            if held["format"] != _FORMAT:
                raise ValueError(f"format {held['format']}, not {_FORMAT}")
            monitor.load_state_dict(held["monitor"])
            costs.load_state_dict(held["costs"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no budget state that can be used ({error}); delete it to learn anew") from None
        self.monitor, self.costs = monitor, costs
        self._held, self._unlearnt, self._found_stale = None, [], False


def _budget_event(round_index: int, controller: str, budget: Budget) -> BudgetEvent:
    decision: Decision = budget.decision
    return BudgetEvent(
        round_index=round_index,
        controller=controller,
        draft_lengths=tuple(budget.draft_lengths.tolist()),
        reason=decision.reason,
        predicted_accept_by_depth=decision.accept_by_depth,
        predicted_accepted_tokens=decision.num_accepted,
        predicted_round_s=decision.round_s,
        predicted_gain=decision.gain,
    )


def outcome_of(
    request_ids: tuple[str, ...],
    *,
    asked: Tensor,  # [B]
    accept_probs: Tensor,  # [B, D]
    num_accepted: Tensor,  # [B]
    node_depths: Tensor,  # [B, N] depth of every draft node, 0 for padding
    entropies: Tensor,  # [B, D + 1]
) -> RoundOutcome:
    """A verdict's part that the monitor may see."""
    depth = accept_probs.shape[1]
    nodes = torch.bincount(node_depths.flatten(), minlength=depth + 1)[1 : depth + 1]
    return RoundOutcome(
        request_ids=request_ids,
        asked=asked.numpy(),
        accept_probs=accept_probs.double().numpy(),
        num_accepted=num_accepted.numpy(),
        nodes_by_depth=nodes.double().numpy(),
        entropies=entropies.double().numpy(),
    )


def expected_of(decision: Decision) -> dict[str, float]:
    """The part of a decision that every RoundEvent repeats, so that sinks can hold it against what happened."""
    first = decision.accept_by_depth[0] if decision.accept_by_depth else math.nan
    return {
        "predicted_accept_prob": first,
        "predicted_accepted_tokens": decision.num_accepted,
        "predicted_round_s": decision.round_s,
    }
