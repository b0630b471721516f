"""Drafts wait by request until vLLM verifies them, whatever its scheduler does in between. No vLLM is needed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_spec.budget import Budget, FixedBudget
from rollout_spec.drafter import DraftContext, DrafterNeeds
from rollout_spec.engine.ops import TorchOps
from rollout_spec.events import RequestEvent, RoundEvent
from rollout_spec.pilot import BudgetPilot
from rollout_spec.sinks import MemorySink
from rollout_spec.tree import DraftTree, Draw
from rollout_spec_rl.vllm.requests import TrackedRequests
from rollout_spec_rl.vllm.rows import Processed, StepRows
from rollout_spec_rl.vllm.speculator import Speculator, Step
from rollout_spec_rl.vllm.states import StateLedger

VOCAB = 8


class Certain:
    """Drafts token r, r + 1, ... for request r, with a distribution that holds little else."""

    name, vocab_size, needs = "certain", VOCAB, DrafterNeeds(draws=frozenset({Draw.SAMPLED}))

    def __init__(self) -> None:
        self.observed: list[list[int]] = []

    def start(self, request: Any) -> None: ...

    def finish(self, request: Any) -> None: ...

    def target_updated(self, version: int) -> None: ...

    def observe(self, context: DraftContext, tree: DraftTree, verdict: Any) -> None:
        self.observed.append(verdict.num_accepted.tolist())

    def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
        first = torch.tensor([int(request.request_id[1:9]) for request in context.requests])
        tokens = (first[:, None] + torch.arange(budget.max_depth)) % VOCAB
        probs = torch.full((*tokens.shape, VOCAB), 1e-4).scatter_(2, tokens[:, :, None], 1 - 7e-4)
        return DraftTree.chains(tokens, budget.draft_lengths, Draw.SAMPLED, draft_probs=probs)


def request_of(number: int, max_tokens: int = 20) -> SimpleNamespace:
    params = SimpleNamespace(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        max_tokens=max_tokens,
        stop_token_ids=[],
        eos_token_id=None,
        min_tokens=0,
        structured_outputs=None,
        seed=number,
    )
    return SimpleNamespace(req_id=name_of(number), prompt_token_ids=[1, 2, 3], output_token_ids=[], sampling_params=params)


def name_of(number: int) -> str:
    return f"r{number:08d}-abcdefgh"


class World:
    """As much of a runner as the speculator sees; the policy wants what the drafter drafts."""

    def __init__(self, count: int, **settings: Any) -> None:
        self.drafter, self.sink = Certain(), MemorySink()
        self.requests = {name_of(number): request_of(number, **settings) for number in range(count)}
        self.speculator = Speculator(
            drafter=self.drafter,
            pilot=BudgetPilot(FixedBudget(draft_length=3)),
            scheme=None,
            ops=TorchOps(),
            tracked=TrackedRequests(max_model_len=64),
            ledger=StateLedger((), block_size=4, max_tokens=0),
            sink=self.sink,
        )

    def step(
        self, ids: Sequence[str], drafts: Sequence[Sequence[int]], *, recorded: bool = True
    ) -> tuple[list[list[int]], list[list[int]]]:
        """One forward, with these drafts scheduled: what was sampled, and what is drafted for the next one.

        recorded: the runner notes what was sampled before it asks for drafts, not after.
        """
        counts = torch.tensor([len(tokens) + 1 for tokens in drafts])
        logits = torch.full((int(counts.sum()), VOCAB), -9.0)
        rows = [number for number, tokens in zip(ids, drafts, strict=True) for number in [number] * (len(tokens) + 1)]
        depths = [depth for tokens in drafts for depth in range(len(tokens) + 1)]
        for row, (request_id, depth) in enumerate(zip(rows, depths, strict=True)):
            logits[row, (int(request_id[1:9]) + depth) % VOCAB] = 0.0
        ones = torch.ones(len(rows))
        processed = Processed(logits=logits, inv_temperatures=ones, greedy=ones == 0)
        target = StepRows(logits, processed, counts.cumsum(0) - counts, TorchOps())
        emitted = self.speculator.verify(ids, self.requests, target, drafts)
        sampled = [[token for token in row if token >= 0] for row in emitted.tolist()]
        if recorded:
            self._record(ids, sampled)
        step = Step(
            request_ids=tuple(ids),
            first_positions=[3] * len(ids),
            num_rows=counts.tolist(),
            num_drafted=[len(tokens) for tokens in drafts],
            hidden={},
        )
        proposed = self.speculator.propose(step, self.requests, sampled, recorded=recorded)
        if not recorded:
            self._record(ids, sampled)
        return sampled, proposed

    def _record(self, ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        for request_id, tokens in zip(ids, sampled, strict=True):
            self.requests[request_id].output_token_ids += tokens


def test_drafts_are_accepted_where_the_policy_wants_them() -> None:
    world = World(2)
    ids = list(world.requests)
    sampled, drafts = world.step(ids, [[], []])
    assert (sampled, drafts) == ([[0], [1]], [[0, 1, 2], [1, 2, 3]])
    sampled, _ = world.step(ids, drafts)
    assert sampled == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert world.drafter.observed == [[3, 3]]
    (event,) = [event for event in world.sink.events if isinstance(event, RoundEvent)]
    assert (event.num_requests, event.num_draft_tokens, event.num_accepted_tokens, event.num_emitted_tokens) == (2, 6, 6, 8)


def test_a_draft_that_was_left_for_later_is_verified_with_its_own_distribution() -> None:
    world = World(3)
    first, second, third = world.requests
    _, (one, two, three) = world.step([first, second, third], [[], [], []])
    _, (two_again,) = world.step([second], [two])  # no room for the others
    sampled, _ = world.step([third, second, first], [three, two_again, one])
    assert sampled == [[2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]


def test_a_shortened_draft_and_padding_are_no_faults() -> None:
    world = World(3)
    ids = list(world.requests)
    _, (one, _, three) = world.step(ids, [[], [], []])
    sampled, _ = world.step(ids, [one[:1], [-1, -1, -1], three])
    assert sampled == [[0, 1], [1], [2, 3, 4, 5]]
    assert world.drafter.observed == [[1, 3]]


def test_the_runner_may_note_what_was_sampled_before_or_after_it_asks_for_drafts() -> None:
    tokens = []
    for recorded in (True, False):
        world = World(2)
        ids = list(world.requests)
        _, drafts = world.step(ids, [[], []], recorded=recorded)
        sampled, _ = world.step(ids, drafts, recorded=recorded)
        # A request that the runner knows more of than we saw begins anew from what it knows.
        world.requests[ids[0]].output_token_ids += [7]
        world.step(ids, [[], []], recorded=recorded)
        known = [request.tokens for request in world.speculator._tracked]
        assert known == [[1, 2, 3, *world.requests[name].output_token_ids] for name in ids]
        assert sampled == [[0, 1, 2, 3], [1, 2, 3, 4]]
        tokens.append(known)
    assert tokens[0] == tokens[1]


def test_a_drafter_that_wants_every_round_is_asked_for_nothing_too() -> None:
    world = World(1)
    asked: list[list[int]] = []
    propose = world.drafter.propose

    def listening(context: DraftContext, budget: Budget) -> DraftTree:
        asked.append(budget.draft_lengths.tolist())
        return propose(context, budget) if budget.max_depth else DraftTree.empty(len(context.requests))

    world.drafter.propose = listening  # type: ignore[method-assign]
    world.speculator.pilot.controller = FixedBudget(draft_length=0)
    world.step([name_of(0)], [[]])
    assert asked == []
    world.drafter.needs = DrafterNeeds(every_round=True, draws=frozenset({Draw.SAMPLED}))
    _, drafts = world.step([name_of(0)], [[]])
    assert (asked, drafts) == ([[0]], [[]])


def test_tokens_that_nobody_drafted_are_a_fault() -> None:
    world = World(1)
    _, drafts = world.step([name_of(0)], [[]])
    with pytest.raises(AssertionError, match=r"vLLM verifies \[5, 6\] where \[0, 1, 2\] was drafted"):
        world.step([name_of(0)], [[5, 6]])
    assert drafts == [[0, 1, 2]]


def test_an_end_is_told_at_once_and_an_abort_when_the_runner_forgets() -> None:
    world = World(2, max_tokens=3)
    ids = list(world.requests)
    _, drafts = world.step(ids, [[], []])
    assert [len(tokens) for tokens in drafts] == [1, 1]  # two tokens are left: one drafted, one besides
    del world.requests[ids[1]]
    world.step(ids[:1], drafts[:1])
    ends = {event.request_id: event for event in world.sink.events if isinstance(event, RequestEvent)}
    assert {name: (end.finish_reason, end.num_tokens) for name, end in ends.items()} == {ids[0]: ("length", 3), ids[1]: ("aborted", 1)}
    records = world.speculator.reporter.take_records()
    assert [record.request_id for record in records] == ["r00000000", "r00000001"]
    assert world.speculator.reporter.take_records() == []


def test_logits_that_are_no_law_are_an_error() -> None:
    logits = torch.full((1, VOCAB), torch.nan)
    processed = Processed(logits=logits, inv_temperatures=torch.ones(1), greedy=torch.zeros(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="check the weights of the last update"):
        StepRows(logits, processed, torch.zeros(1, dtype=torch.int64), TorchOps())


def test_greedy_rows_are_point_masses() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    processed = Processed(logits=logits, inv_temperatures=torch.ones(2), greedy=torch.tensor([True, False]))
    rows = StepRows(logits, processed, torch.tensor([0, 1]), TorchOps())
    law = rows.log_probs(torch.tensor([0, 1]), torch.tensor([-1, -1])).exp()
    assert torch.equal(law[0], torch.tensor([0.0, 1.0, 0.0]))
    assert torch.allclose(law[1], logits[1].softmax(-1))
    soft = rows.values(torch.tensor([0]), "processed_logprobs")
    assert torch.allclose(soft[0], logits[0].log_softmax(-1))
