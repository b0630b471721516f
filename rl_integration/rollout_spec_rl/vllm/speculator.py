"""Speculator: one vLLM engine's drafter, budget and verifier, between the runner's forwards.

A round in vLLM is cut in two: ``propose`` ends one step, ``verify`` samples in the next. In between the scheduler may have dropped a
request, cut its draft short or left it for later, so drafts are kept by request until they are verified.

Shape legend: B requests of a step, R rows, H hidden size, V vocabulary, K draft tokens, Vd draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_spec.budget import Budget
from rollout_spec.drafter import DraftContext, Drafter
from rollout_spec.engine.ops import Ops
from rollout_spec.events import EventSink
from rollout_spec.pilot import BudgetPilot
from rollout_spec.tree import DraftTree
from rollout_spec.verify import CounterNoise, Scheme, default_scheme
from rollout_spec_rl.vllm.reporting import Decided, Reporter, Verified
from rollout_spec_rl.vllm.requests import Tracked, TrackedRequests
from rollout_spec_rl.vllm.rows import StepRows
from rollout_spec_rl.vllm.states import NewStates, StateLedger


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What the runner did in one forward. Requests in the batch's order, each with consecutive rows."""

    request_ids: tuple[str, ...]  # B
    first_positions: Sequence[int]  # [B] absolute position of each request's first row
    num_rows: Sequence[int]  # [B]
    num_drafted: Sequence[int]  # [B] of those rows, drafted tokens at the end
    hidden: Mapping[int, Tensor]  # layer -> [R, H], as DrafterNeeds.hidden_layers names them


@dataclass(frozen=True, kw_only=True, eq=False)
class _Held:
    """A draft that waits to be verified: a row of a proposal."""

    tree: DraftTree
    row: int
    tokens: list[int]


class Speculator:
    """All calls come from the runner's thread. ``requests`` of the calls is the runner's own record, by request id."""

    def __init__(
        self,
        *,
        drafter: Drafter,
        pilot: BudgetPilot,
        scheme: Scheme | None,
        ops: Ops,
        tracked: TrackedRequests,
        ledger: StateLedger,
        sink: EventSink,
    ) -> None:
        self.drafter, self.pilot, self.ops = drafter, pilot, ops
        self.weights_version = 0
        self.sink = sink
        self._scheme, self._tracked, self._ledger = scheme, tracked, ledger
        self._held: dict[str, _Held] = {}
        self._decided: Decided | None = None
        self._verified: Verified | None = None
        self.reporter = Reporter(sink, pilot, drafter.name)

    # Sampling

    def verify(self, request_ids: Sequence[str], requests: Any, rows: StepRows, drafts: Sequence[Sequence[int]]) -> Tensor:
        """[B, D + 1] int64 the tokens each request emits, -1 after them; drafts [B]: what the scheduler says was drafted."""
        began = time.perf_counter()
        entered = self._tracked.enter(request_ids, requests)
        tree = self._tree(request_ids, drafts)
        scheme = self._scheme or default_scheme(tree.draw, seeded=False, is_chain=True)
        noise = CounterNoise([request.view.seed for request in entered], [request.view.next_position for request in entered], self.ops)
        verdict = self.ops.verify(tree, rows, noise, scheme)
        self._verified = Verified(
            request_ids=tuple(request_ids), tree=tree, verdict=verdict, scheme=scheme, began=began, ended=time.perf_counter()
        )
        return verdict.emitted(tree)

    def _tree(self, request_ids: Sequence[str], drafts: Sequence[Sequence[int]]) -> DraftTree:
        """[B] the drafts that are to be verified now, cut as the scheduler cut them."""
        held = [self._held.pop(request_id, None) if tokens else None for request_id, tokens in zip(request_ids, drafts, strict=True)]
        lengths = [0 if own is None else _length(own.tokens, tokens) for own, tokens in zip(held, drafts, strict=True)]
        depth = max(lengths, default=0)
        if depth == 0:
            return DraftTree.empty(len(request_ids))
        trees = {id(own.tree): own.tree for own in held if own is not None}
        first = next(iter(trees.values()))
        rows = [-1 if own is None else own.row for own in held]
        if len(trees) == 1 and rows == list(range(first.batch_size)):
            return _cut(first, torch.tensor(lengths), depth)
        return _gathered(first, held, lengths, depth)

    # Drafting

    def propose(self, step: Step, requests: Any, sampled: Sequence[Sequence[int]], *, recorded: bool = True) -> list[list[int]]:
        """Take in what a step showed and draft for the next; sampled [B]: committed tokens, none for prompts that go on.

        recorded: the runner's record of the requests has them already.
        """
        began = time.perf_counter()
        entered = self._tracked.enter(step.request_ids, requests)
        for request, tokens in zip(entered, sampled, strict=True):
            if tokens and request.first_version < 0:
                request.first_version = self.weights_version
        states = [requests[request.request_id] for request in entered]
        kept = [_take(request, state, tokens, recorded) for request, state, tokens in zip(entered, states, sampled, strict=True)]
        self._ledger.add(_new_states(step, entered, sampled))
        self.reporter.step(step, entered, kept, self._decided, self._verified, began, self.weights_version)
        self._tell_drafter()
        self._decided = self._verified = None
        self._forget_finished(requests)
        asked = [request for request, tokens in zip(entered, sampled, strict=True) if tokens and request.finish_reason is None]
        proposed = self._draft(asked, began) if asked else {}
        return [proposed.get(request_id, []) for request_id in step.request_ids]

    def _draft(self, asked: Sequence[Tracked], began: float) -> dict[str, list[int]]:
        ids = tuple(request.request_id for request in asked)
        able = [request.may_draft and not self._ledger.is_blind(request.request_id) for request in asked]
        # A round emits one token whether it drafts or not: with one left there is nothing to draft for.
        remaining = torch.tensor([request.remaining if fit else 1 for request, fit in zip(asked, able, strict=True)]).clamp_min(1)
        contexts = torch.tensor([len(request.tokens) - 1 for request in asked])
        deciding = time.perf_counter()
        budget = self.pilot.decide(ids, remaining, contexts)
        drafting = time.perf_counter()
        wanted = list(range(len(asked))) if self.drafter.needs.every_round else budget.draft_lengths.nonzero()[:, 0].tolist()
        proposed, num_states = self._propose([asked[i] for i in wanted], budget, wanted)
        ended = time.perf_counter()
        self._decided = Decided(
            request_ids=ids,
            budget=budget,
            context=int(contexts.sum()),
            contexts=contexts.tolist(),
            num_new_states=num_states,
            learn_s=deciding - began,
            decide_s=drafting - deciding,
            draft_s=ended - drafting,
            ended=ended,
        )
        return proposed

    def _propose(self, wanted: Sequence[Tracked], budget: Budget, rows: Sequence[int]) -> tuple[dict[str, list[int]], int]:
        """Drafted tokens by request, and how many states the drafter was handed for them."""
        if not wanted:
            return {}, 0
        for request in wanted:
            if not request.drafter_knows:
                self.drafter.start(request.view)
                request.drafter_knows = True
        states = self._ledger.take([request.request_id for request in wanted])
        context = DraftContext(requests=[request.view for request in wanted], weights_version=self.weights_version, states=states)
        own = dataclasses.replace(budget, draft_lengths=budget.draft_lengths[torch.tensor(rows)])
        tree = self.drafter.propose(context, own)
        tokens, lengths = tree.token_ids.tolist(), tree.num_nodes.tolist()
        proposed = {}
        for row, (request, length) in enumerate(zip(wanted, lengths, strict=True)):
            if length:
                proposed[request.request_id] = tokens[row][:length]
                self._held[request.request_id] = _Held(tree=tree, row=row, tokens=tokens[row][:length])
        return proposed, 0 if states is None else states.positions.numel()

    def _tell_drafter(self) -> None:
        """What became of the latest proposal, for drafters that learn from it."""
        done = self._verified
        if done is None or done.tree.max_nodes == 0:
            return
        drafted = done.tree.num_nodes.nonzero()[:, 0]
        views = [self._tracked[done.request_ids[i]].view for i in drafted.tolist()]
        context = DraftContext(requests=views, weights_version=self.weights_version)
        self.drafter.observe(context, _rows_of(done.tree, drafted), done.verdict_of(drafted))

    # Ends and weights

    def _forget_finished(self, requests: Any) -> None:
        for request in self._tracked.take_finished(requests):
            self._held.pop(request.request_id, None)
            self._ledger.drop(request.request_id)
            self.pilot.finish(request.request_id)
            if request.drafter_knows:
                self.drafter.finish(request.view)
            self.reporter.finished(request, self.weights_version)

    def close(self) -> None:
        """The engine ends: requests that still ran are aborted ones, and sinks deliver what they hold. Closing twice is allowed."""
        self._forget_finished({})
        self.sink.close()

    def target_updated(self, version: int) -> None:
        """The policy's weights changed: states of the old ones are void, and requests that run on are no longer drafted for by them."""
        self.weights_version = version
        self._ledger.clear()
        self.drafter.target_updated(version)
        self.pilot.target_updated()

    def drafter_updated(self) -> None:
        self.pilot.drafter_updated()


def _length(held: Sequence[int], scheduled: Sequence[int]) -> int:
    """Tokens of a draft that are verified. vLLM pads requests that have none of ours with -1."""
    if scheduled[0] < 0:
        return 0
    if list(held[: len(scheduled)]) != list(scheduled):
        raise AssertionError(f"vLLM verifies {list(scheduled)} where {list(held)} was drafted")
    return len(scheduled)


def _take(request: Tracked, state: Any, sampled: Sequence[int], recorded: bool) -> int:
    """Append what was sampled, or begin anew from the runner's record where that is another one; returns tokens kept."""
    known = len(state.output_token_ids) - (len(sampled) if recorded else 0)
    if len(request.tokens) == request.num_prompt + known and request.finish_reason is None:
        return request.append(sampled)
    request.tokens[request.num_prompt :] = state.output_token_ids if recorded else [*state.output_token_ids, *sampled]
    return len(sampled)


def _new_states(step: Step, entered: Sequence[Tracked], sampled: Sequence[Sequence[int]]) -> list[NewStates]:
    """The rows that are committed: all of a prompt's, and of a draft those that were accepted."""
    found, begin = [], 0
    columns = (entered, step.first_positions, step.num_rows, step.num_drafted, sampled)
    for request, first, rows, drafted, tokens in zip(*columns, strict=True):
        count = rows - drafted + max(len(tokens) - 1, 0)
        part = slice(begin, begin + count)
        begin += rows
        if step.hidden:
            # Copies: the forward's tensors are as long as the batch, and some runners write them again.
            states = {layer: hidden[part].clone() for layer, hidden in step.hidden.items()}
            found.append(
                NewStates(
                    request_id=request.request_id,
                    token_ids=request.tokens,
                    num_prompt_tokens=request.num_prompt,
                    first=first,
                    states=states,
                )
            )
    return found


def _rows_of(tree: DraftTree, rows: Tensor) -> DraftTree:
    return dataclasses.replace(
        tree,
        token_ids=tree.token_ids[rows],
        parents=tree.parents[rows],
        num_nodes=tree.num_nodes[rows],
        draft_probs=None if tree.draft_probs is None else tree.draft_probs[rows],
    )


def _cut(tree: DraftTree, lengths: Tensor, depth: int) -> DraftTree:
    """The chains of a proposal, cut to lengths [B]."""
    if depth == tree.max_nodes:
        return dataclasses.replace(tree, num_nodes=lengths)
    probs = None if tree.draft_probs is None else tree.draft_probs[:, :depth]
    return DraftTree.chains(tree.token_ids[:, :depth], lengths, tree.draw, draft_probs=probs, draft_token_ids=tree.draft_token_ids)


def _gathered(like: DraftTree, held: Sequence[_Held | None], lengths: Sequence[int], depth: int) -> DraftTree:
    """Chains [B] from rows of one or more proposals, none where nothing is held."""
    batch, probs = len(held), like.draft_probs
    token_ids = torch.zeros(batch, depth, dtype=torch.int64)
    draft_probs = None if probs is None else probs.new_zeros(batch, depth, probs.shape[2])
    for row, (own, length) in enumerate(zip(held, lengths, strict=True)):
        if own is not None and length:
            token_ids[row, :length] = own.tree.token_ids[own.row, :length]
            if draft_probs is not None:
                assert own.tree.draft_probs is not None
                draft_probs[row, :length] = own.tree.draft_probs[own.row, :length]
    return DraftTree.chains(token_ids, torch.tensor(lengths), like.draw, draft_probs=draft_probs, draft_token_ids=like.draft_token_ids)
