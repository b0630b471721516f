"""Reporter: from what a vLLM step showed to the pilot's lesson and to events.

Shape legend: B requests of a step, A requests that the latest decision was made for, D depth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.cost import RoundShape
from rollout_spec.engine.rounds import acceptance_counts, counts_by_context, tree_depth, verdict_of
from rollout_spec.events import EventSink, PrefillEvent, RequestEvent, RoundEvent
from rollout_spec.pilot import BudgetPilot, RoundReport, expected_of, outcome_of
from rollout_spec.rounds_seen import RoundOutcome
from rollout_spec.tree import DraftTree
from rollout_spec.verdict import Verdict
from rollout_spec.verify import Scheme
from rollout_spec_rl.vllm.requests import Tracked

if TYPE_CHECKING:
    from rollout_spec_rl.vllm.speculator import Step


_KEPT_RECORDS = 4096
_SUFFIX = len("-00000000")  # what vLLM puts behind a request's id to make it its own


@dataclass(frozen=True, kw_only=True, eq=False)
class Decided:
    """The latest decision and what drafting by it took."""

    request_ids: tuple[str, ...]  # A
    budget: Budget
    context: int
    contexts: Sequence[int]  # [A]
    num_new_states: int
    learn_s: float
    decide_s: float
    draft_s: float
    ended: float  # perf_counter


@dataclass(frozen=True, kw_only=True, eq=False)
class Verified:
    """What became of a step's rows."""

    request_ids: tuple[str, ...]  # B
    tree: DraftTree  # [B]
    verdict: Verdict  # [B]
    scheme: Scheme
    began: float
    ended: float

    def verdict_of(self, rows: Tensor) -> Verdict:
        return verdict_of(self.verdict, rows)


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """What became of one request. vLLM's own ``spec_decode_metrics`` counts the same drafts, and knows no entropy."""

    request_id: str  # as the user knows it
    finish_reason: str
    num_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_entropy: float  # nats, over its tokens


class Reporter:
    """Holds a counter, where events go, and records of the latest requests."""

    def __init__(self, sink: EventSink, pilot: BudgetPilot, drafter: str) -> None:
        self._sink, self._pilot, self._drafter = sink, pilot, drafter
        self._round_index = 0
        self._records: deque[RequestRecord] = deque(maxlen=_KEPT_RECORDS)

    def take_records(self) -> list[RequestRecord]:
        """Of requests that finished since they were last asked for; the newest few thousand."""
        taken = list(self._records)
        self._records.clear()
        return taken

    def step(
        self,
        step: Step,
        entered: Sequence[Tracked],
        kept: Sequence[int],
        decided: Decided | None,
        verified: Verified | None,
        began: float,
        weights_version: int,
    ) -> None:
        """kept [B]: tokens that each request took. began: when the runner had sampled and called for drafts."""
        place = {request_id: row for row, request_id in enumerate(step.request_ids)}
        running = [] if decided is None else [place[request_id] for request_id in decided.request_ids if request_id in place]
        prompts = [row for row in range(len(entered)) if row not in set(running)]
        num_rows = sum(step.num_rows)
        waited = 0.0 if decided is None or verified is None else max(verified.began - decided.ended, 0.0)
        share = sum(step.num_rows[row] for row in prompts) / num_rows
        if verified is not None:
            _add_entropies(entered, kept, verified.verdict)
        if prompts:
            self._prefilled(step, entered, prompts, waited * share)
        if decided is None or verified is None or not running:
            return
        learnt = self._learn(step, decided, verified, place, pure=not prompts, rest_s=began - decided.ended)
        for event in self._pilot.events(self._round_index, decided.budget, weights_version, self._drafter, found_stale=learnt):
            self._sink.emit(event)
        seconds = (waited * (1 - share), verified.ended - verified.began, began - verified.ended)
        self._round(entered, kept, decided, verified, running, seconds, weights_version)

    def _prefilled(self, step: Step, entered: Sequence[Tracked], prompts: Sequence[int], target_s: float) -> None:
        begun = [row for row in prompts if step.first_positions[row] + step.num_rows[row] >= entered[row].num_prompt]
        self._sink.emit(
            PrefillEvent(
                num_prompts=len(begun),
                num_tokens=sum(step.num_rows[row] for row in prompts),
                num_shared_tokens=sum(step.first_positions[row] for row in begun),
                target_s=target_s,
            )
        )

    def _learn(self, step: Step, decided: Decided, verified: Verified, place: dict[str, int], *, pure: bool, rest_s: float) -> bool:
        """Tell the pilot; its costs only of rounds in which no prompt was read. True if the drafter was found stale by it."""
        shape = None
        if pure and len(step.request_ids) == len(decided.request_ids) and rest_s > 0:
            shape = RoundShape(
                num_requests=len(step.request_ids),
                num_rows=sum(step.num_rows),
                depth=decided.budget.max_depth,
                context=decided.context,
                num_new_states=decided.num_new_states,
            )
        outcome = _outcome(decided, verified, place)
        return self._pilot.observe(RoundReport(outcome=outcome, shape=shape, draft_s=decided.draft_s, rest_s=rest_s))

    def _round(
        self,
        entered: Sequence[Tracked],
        kept: Sequence[int],
        decided: Decided,
        verified: Verified,
        running: Sequence[int],
        seconds: tuple[float, float, float],
        weights_version: int,
    ) -> None:
        rows = torch.tensor(running)
        verdict = verified.verdict_of(rows)
        live = [True] * len(running)
        depths, accepted, means = acceptance_counts(verdict, live)
        num_drafted = verified.tree.num_nodes[rows].tolist()
        num_accepted = [min(count, kept[row]) for count, row in zip(verdict.num_accepted.tolist(), running, strict=True)]
        for row, drafts, taken in zip(running, num_drafted, num_accepted, strict=True):
            entered[row].num_rounds += 1
            entered[row].num_draft_tokens += drafts
            entered[row].num_accepted_tokens += taken
        behind = [entered[row].view.next_position - kept[row] - 1 for row in running]
        by_context = counts_by_context(behind, live, num_drafted, num_accepted)
        target_s, verify_s, other_s = seconds
        self._sink.emit(
            RoundEvent(
                round_index=self._round_index,
                num_requests=len(running),
                num_draft_tokens=sum(num_drafted),
                num_accepted_tokens=sum(num_accepted),
                num_emitted_tokens=sum(kept[row] for row in running),
                drafted_by_depth=depths,
                accepted_by_depth=accepted,
                mean_accept_prob_by_depth=means,
                mean_entropy=_mean_entropy(verdict, [kept[row] for row in running]),
                draft_s=decided.draft_s + decided.decide_s,
                target_s=target_s,
                verify_s=verify_s,
                other_s=other_s + decided.learn_s,
                weights_version=weights_version,
                drafter=self._drafter,
                verifier=verified.scheme.value,
                rounds_by_context=by_context[0],
                drafted_by_context=by_context[1],
                accepted_by_context=by_context[2],
                draft_depth=tree_depth(verified.tree),
                budget_s=decided.decide_s + decided.learn_s,
                **expected_of(decided.budget.decision),
            )
        )
        self._round_index += 1

    def finished(self, request: Tracked, weights_version: int) -> None:
        assert request.finish_reason is not None
        num_tokens = len(request.tokens) - request.num_prompt
        self._records.append(
            RequestRecord(
                request_id=request.request_id[:-_SUFFIX],
                finish_reason=request.finish_reason,
                num_tokens=num_tokens,
                num_rounds=request.num_rounds,
                num_draft_tokens=request.num_draft_tokens,
                num_accepted_tokens=request.num_accepted_tokens,
                mean_entropy=request.entropy_sum / num_tokens if num_tokens else math.nan,
            )
        )
        self._sink.emit(
            RequestEvent(
                request_id=request.request_id,
                finish_reason=request.finish_reason,
                num_prompt_tokens=request.num_prompt,
                num_tokens=num_tokens,
                num_rounds=request.num_rounds,
                num_draft_tokens=request.num_draft_tokens,
                num_accepted_tokens=request.num_accepted_tokens,
                weights_version=weights_version,
                oldest_weights_version=request.first_version,
            )
        )


def _outcome(decided: Decided, verified: Verified, place: dict[str, int]) -> RoundOutcome:
    """What the round showed of the requests that were decided for [A]; those that are gone were not asked."""
    rows = torch.tensor([place.get(request_id, -1) for request_id in decided.request_ids])
    there, at = rows >= 0, rows.clamp_min(0)
    verdict, tree = verified.verdict, verified.tree
    assert verdict.entropies is not None
    drafted = torch.where(there, tree.num_nodes[at], 0)
    return outcome_of(
        decided.request_ids,
        asked=torch.where(there, decided.budget.draft_lengths, 0),
        accept_probs=torch.where(there[:, None], verdict.accept_probs[at], torch.nan),
        num_accepted=torch.where(there, verdict.num_accepted[at], 0),
        node_depths=torch.arange(1, tree.max_nodes + 1) * (torch.arange(tree.max_nodes) < drafted[:, None]),
        entropies=torch.where(there[:, None], verdict.entropies[at], torch.nan),
    )


def _add_entropies(entered: Sequence[Tracked], kept: Sequence[int], verdict: Verdict) -> None:
    assert verdict.entropies is not None
    for request, taken, entropies in zip(entered, kept, verdict.entropies.tolist(), strict=True):
        request.entropy_sum += sum(entropies[:taken])


def _mean_entropy(verdict: Verdict, kept: Sequence[int]) -> float:
    """Over the tokens that requests kept."""
    assert verdict.entropies is not None
    values = verdict.entropies[torch.arange(verdict.entropies.shape[1]) < torch.tensor(kept)[:, None]]
    return float(values.mean()) if values.numel() else math.nan
