"""RoundLoop: one draft -> verify -> commit round of the ready requests.

Shape legend: B requests in the round, N draft nodes, R rows of the forward.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.cost import RoundShape
from rollout_spec.drafter import DraftContext, Drafter
from rollout_spec.engine.kv import KVSlots
from rollout_spec.engine.plan import AttentionPlan
from rollout_spec.engine.rounds import (
    acceptance_counts,
    counts_by_context,
    draft_faults,
    emissions_of,
    kv_moves,
    round_input,
    spread_tree,
    tree_depth,
    verdict_of,
)
from rollout_spec.engine.runner import ModelRunner, StepOutput
from rollout_spec.engine.running import Detokenize, Emission, RunningRequest, last_tokens, slot_indices
from rollout_spec.engine.states import StateBuffer
from rollout_spec.engine.target import LogitsTarget, TargetAccess
from rollout_spec.events import EventSink, RoundEvent
from rollout_spec.pilot import BudgetPilot, RoundReport, expected_of, outcome_of
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verdict import Verdict
from rollout_spec.verify import CounterNoise, Scheme, VerifyFn, default_scheme


@dataclass(frozen=True, kw_only=True, eq=False)
class _Draft:
    """What was drafted for a round, and for whom: the drafter sees only requests whose budget is above 0."""

    tree: DraftTree  # of all B requests
    budget: Budget
    context: DraftContext | None = None  # as the drafter saw it; None if it did not run
    requests: Tensor | None = None  # [A] those requests; None = all
    own_tree: DraftTree | None = None  # [A] theirs
    num_new_states: int = 0
    decide_s: float = 0.0


class RoundLoop:
    """Holds what a round needs; its only own state is a counter."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        kv: KVSlots,
        states: StateBuffer,
        drafter: Drafter | None,
        pilot: BudgetPilot,
        scheme: Scheme | None,
        verify: VerifyFn,
        max_tree_nodes: int,
        sink: EventSink,
    ) -> None:
        self._runner, self._kv, self._states, self._drafter = runner, kv, states, drafter
        self.pilot, self._scheme, self._verify = pilot, scheme, verify
        self._max_tree_nodes, self._sink = max_tree_nodes, sink
        self._round_index = 0

    def run(self, ready: Sequence[RunningRequest], weights_version: int, detokenize: Detokenize | None) -> None:
        """Advance every ready request by one to depth + 1 tokens; those that are done have their finish_reason set."""
        began = time.perf_counter()
        context_lengths = torch.tensor([request.num_cached for request in ready])
        self._states.enter(ready)
        draft = self._draft(ready, context_lengths, weights_version)
        tree, drafted = draft.tree, time.perf_counter()
        step = round_input(tree, last_tokens(ready), context_lengths, slot_indices(ready), self._states.layers)
        built = time.perf_counter()
        out = self._runner.forward(step, self._kv)
        forwarded = time.perf_counter()
        scheme = self._scheme_for(tree, ready)
        target = LogitsTarget(
            hidden=out.hidden,
            runner=self._runner,
            row_offsets=step.plan.row_offsets,
            tree=tree,
            running=ready,
        )
        positions = [len(request.tokens) for request in ready]
        noise = CounterNoise([request.seed for request in ready], positions, self._runner.ops)
        verdict = self._verify(tree, target, noise, scheme)
        verified = time.perf_counter()
        for index in target.failed:
            ready[index].fail("the model's logits are not finite (NaN or infinity): check the weights of the last update")
        if self._drafter is not None and draft.context is not None and draft.own_tree is not None:
            own = verdict if draft.requests is None else verdict_of(verdict, draft.requests)
            self._drafter.observe(draft.context, draft.own_tree, own)
        emissions = emissions_of(tree, verdict)
        emitted = self._commit(ready, tree, verdict, emissions, out, step.plan, weights_version, detokenize)
        ended = time.perf_counter()
        learn_s = self._learn(ready, draft, verdict, context_lengths, step.plan.num_rows, drafted - began, ended - drafted, weights_version)
        self._emit_event(
            ready,
            draft,
            verdict,
            emissions,
            emitted,
            context_lengths=context_lengths.tolist(),
            seconds=(
                drafted - began,
                forwarded - built + target.head_s,
                verified - forwarded - target.head_s,
                built - drafted + ended - verified + learn_s,
            ),
            budget_s=draft.decide_s + learn_s,
            weights_version=weights_version,
            scheme=scheme,
        )

    def _draft(self, ready: Sequence[RunningRequest], context_lengths: Tensor, weights_version: int) -> _Draft:
        batch = len(ready)
        if self._drafter is None:
            return _Draft(tree=DraftTree.empty(batch), budget=Budget(draft_lengths=torch.zeros(batch, dtype=torch.int64)))
        began = time.perf_counter()
        ids = tuple([request.request_id for request in ready])
        budget = self.pilot.decide(ids, torch.tensor([request.remaining for request in ready]), context_lengths)
        decide_s = time.perf_counter() - began
        for request in ready:
            if not request.drafter_knows:
                self._drafter.start(request.view)
                request.drafter_knows = True
        every = self._drafter.needs.every_round
        wanted = torch.arange(batch) if every else budget.draft_lengths.nonzero()[:, 0]
        if not wanted.numel():
            return _Draft(tree=DraftTree.empty(batch), budget=budget, decide_s=decide_s)
        partial = wanted.numel() < batch
        asked = [ready[index] for index in wanted.tolist()] if partial else ready
        own = dataclasses.replace(budget, draft_lengths=budget.draft_lengths[wanted]) if partial else budget
        contexts = context_lengths[wanted] if partial else context_lengths
        states = self._states.take(asked)
        context = DraftContext(
            requests=[request.view for request in asked],
            weights_version=weights_version,
            states=states,
            run_target=TargetAccess(self._runner, self._kv, asked, contexts) if self._drafter.needs.run_target else None,
        )
        tree = self._checked(self._drafter.propose(context, own), own, asked)
        return _Draft(
            tree=spread_tree(tree, wanted, batch) if partial else tree,
            budget=budget,
            context=context,
            requests=wanted if partial else None,
            own_tree=tree,
            num_new_states=0 if states is None else states.positions.numel(),
            decide_s=decide_s,
        )

    def _learn(
        self,
        ready: Sequence[RunningRequest],
        draft: _Draft,
        verdict: Verdict,
        context_lengths: Tensor,
        num_rows: int,
        draft_s: float,
        rest_s: float,
        weights_version: int,
    ) -> float:
        """Tell the pilot of the round, and the sink what is worth telling of the decision. Returns the seconds that took."""
        if self._drafter is None:
            return 0.0
        began = time.perf_counter()
        tree, lengths = draft.tree, draft.budget.draft_lengths
        assert verdict.entropies is not None
        depths = torch.arange(1, tree.max_nodes + 1) * tree.valid() if tree.is_chain() else tree.depths()
        report = RoundReport(
            outcome=outcome_of(
                tuple([request.request_id for request in ready]),
                asked=lengths,
                accept_probs=verdict.accept_probs,
                num_accepted=verdict.num_accepted,
                node_depths=depths,
                entropies=verdict.entropies,
            ),
            shape=RoundShape(
                num_requests=len(ready),
                num_rows=num_rows,
                depth=draft.budget.max_depth,
                context=int(context_lengths.sum()),
                num_new_states=draft.num_new_states,
            ),
            draft_s=draft_s - draft.decide_s,
            rest_s=rest_s,
        )
        found_stale = self.pilot.observe(report)
        for event in self.pilot.events(self._round_index, draft.budget, weights_version, self._drafter.name, found_stale=found_stale):
            self._sink.emit(event)
        return time.perf_counter() - began

    def _checked(self, tree: DraftTree, budget: Budget, ready: Sequence[RunningRequest]) -> DraftTree:
        """Requests whose draft is faulty are failed and lose their draft; the others go on."""
        if tree.batch_size != len(ready):
            raise ValueError(f"drafter proposed {tree.batch_size} trees for {len(ready)} requests")
        if tree.max_nodes > self._max_tree_nodes:
            raise ValueError(
                f"drafter proposed {tree.max_nodes} nodes a request; the engine keeps room for max_tree_nodes = {self._max_tree_nodes}"
            )
        faults = draft_faults(tree, self._runner.vocab_size, budget.draft_lengths)
        if not faults:
            return tree
        for index, reason in faults.items():
            ready[index].fail(f"faulty draft: {reason}")
        keep = torch.tensor([index not in faults for index in range(len(ready))])
        return dataclasses.replace(tree, num_nodes=torch.where(keep, tree.num_nodes, 0))

    def _scheme_for(self, tree: DraftTree, ready: Sequence[RunningRequest]) -> Scheme:
        if self._scheme is not None:
            return self._scheme
        seeded = any(request.request.seed is not None for request in ready)
        if tree.max_nodes == 0:
            return default_scheme(Draw.DETERMINISTIC, seeded=seeded, is_chain=True)
        return default_scheme(tree.draw, seeded=seeded, is_chain=tree.draw is not Draw.SAMPLED or tree.is_chain())

    def _commit(
        self,
        ready: Sequence[RunningRequest],
        tree: DraftTree,
        verdict: Verdict,
        emissions: Sequence[Sequence[Emission]],
        out: StepOutput,
        plan: AttentionPlan,
        weights_version: int,
        detokenize: Detokenize | None,
    ) -> tuple[int, list[int]]:
        """Keep the accepted path's K/V behind the context and hand the emitted tokens [B, up to D + 1] to their requests.

        Returns how many tokens were kept (a stop drops what comes after it), and for every request how many of its own were drafted.
        """
        self._runner.commit(self._kv, plan, verdict.path, kv_moves(tree, verdict))
        if self._states.layers:
            live = [
                (request, path, root)
                for request, path, root in zip(ready, verdict.path.tolist(), plan.row_offsets.tolist()[:-1], strict=True)
                if request.error is None
            ]
            rows = [[root, *(root + 1 + node for node in path if node >= 0)] for _, path, root in live]
            self._states.add_round([request for request, _, _ in live], rows, out.taps)
        num_emitted, num_accepted = 0, [0] * len(ready)
        num_nodes = tree.num_nodes.tolist()
        for index, (request, emitted) in enumerate(zip(ready, emissions, strict=True)):
            if request.error is not None:
                continue
            request.num_rounds += 1
            request.num_draft_tokens += num_nodes[index]
            kept = request.append(emitted, weights_version, detokenize)
            request.num_cached += kept
            num_emitted += kept
            num_accepted[index] = sum(emission.accepted_depth > 0 for emission in emitted[:kept])
        return num_emitted, num_accepted

    def _emit_event(
        self,
        ready: Sequence[RunningRequest],
        draft: _Draft,
        verdict: Verdict,
        emissions: Sequence[Sequence[Emission]],
        kept: tuple[int, list[int]],
        *,
        context_lengths: Sequence[int],
        seconds: tuple[float, float, float, float],
        budget_s: float,
        weights_version: int,
        scheme: Scheme,
    ) -> None:
        live = [request.error is None for request in ready]
        drafted, accepted, mean_probs = acceptance_counts(verdict, live)
        entropies = [emission.entropy for emitted, alive in zip(emissions, live, strict=True) if alive for emission in emitted]
        draft_s, target_s, verify_s, other_s = seconds
        num_drafted = [nodes if alive else 0 for nodes, alive in zip(draft.tree.num_nodes.tolist(), live, strict=True)]
        by_context = counts_by_context(context_lengths, live, num_drafted, kept[1])
        self._sink.emit(
            RoundEvent(
                round_index=self._round_index,
                num_requests=sum(live),
                num_draft_tokens=sum(num_drafted),
                num_accepted_tokens=sum(kept[1]),
                num_emitted_tokens=kept[0],
                drafted_by_depth=drafted,
                accepted_by_depth=accepted,
                mean_accept_prob_by_depth=mean_probs,
                mean_entropy=sum(entropies) / len(entropies) if entropies else float("nan"),
                draft_s=draft_s,
                target_s=target_s,
                verify_s=verify_s,
                other_s=other_s,
                weights_version=weights_version,
                drafter="none" if self._drafter is None else self._drafter.name,
                verifier=scheme.value,
                rounds_by_context=by_context[0],
                drafted_by_context=by_context[1],
                accepted_by_context=by_context[2],
                draft_depth=tree_depth(draft.tree),
                budget_s=budget_s,
                **({} if self._drafter is None else expected_of(draft.budget.decision)),
            )
        )
        self._round_index += 1
