"""Budgets in the engine: tokens do not depend on them, a budget of 0 costs the drafter nothing, and a stale drafter is told of."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny import ScriptedDrafter, chain, oracle, tiny_model

from rollout_spec.budget import Budget, BudgetController, BudgetSignals, FixedBudget
from rollout_spec.controllers import EntropyBudget, ThroughputBudget
from rollout_spec.drafter import DraftContext
from rollout_spec.drafters.self_draft import SelfConfig, SelfDrafter
from rollout_spec.drafters.suffix import SuffixDrafter
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import make_runner
from rollout_spec.engine.request import Completion, Request
from rollout_spec.events import BudgetEvent, DrafterStaleEvent, RoundEvent
from rollout_spec.pilot import BudgetPilot
from rollout_spec.sampling import SamplingParams
from rollout_spec.sinks import MemorySink
from rollout_spec.tree import DraftTree, Draw
from rollout_spec.verify import Scheme

PROMPTS = [tuple(range(first, first + n)) for first, n in ((3, 5), (20, 9), (40, 1), (30, 14))]


class Restless:
    """Another budget every round, none for some: what an adaptive one might come to."""

    name = "restless"

    def __init__(self, tree_width: tuple[int, ...] = (1,)) -> None:
        self._width = tree_width

    def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]:
        turn = state if isinstance(state, int) else 0
        wanted = torch.tensor([(turn + 2 * b) % 4 if turn % 5 else 0 for b in range(signals.remaining.numel())])
        return Budget(draft_lengths=torch.minimum(wanted, signals.remaining - 1), tree_width=self._width), turn + 1


def make_engine(**settings: object) -> Engine:
    config = EngineConfig(**{"max_batch": 4, "max_context": 160, "seed": 1, **settings.pop("config", {})})  # type: ignore[arg-type, dict-item]
    return Engine(make_runner(tiny_model(), max_context=160), config=config, **settings)  # type: ignore[arg-type]


def requests(length: int = 24, *, seed: int | None = 100, temperature: float = 0.8) -> list[Request]:
    return [
        Request(
            prompt_token_ids=prompt,
            max_new_tokens=length + 3 * i,
            seed=None if seed is None else seed + i,
            ignore_eos=True,
            sampling=SamplingParams(temperature=temperature),
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


CONTROLLERS: dict[str, BudgetController] = {
    "auto": ThroughputBudget(max_length=4),
    "auto-tree": ThroughputBudget(max_length=3, tree_width=(2, 1)),
    "entropy": EntropyBudget(max_length=4),
    "restless": Restless(),
    "restless-tree": Restless((2, 2)),
}


@pytest.mark.parametrize("name", CONTROLLERS)
def test_seeded_tokens_do_not_depend_on_the_budget(name: str) -> None:
    wanted = tokens(make_engine(config={"max_batch": 1}).generate(requests()))
    for drafter in (SuffixDrafter(), SelfDrafter(SelfConfig(draw=Draw.GUMBEL))):
        engine = make_engine(drafter=drafter, controller=CONTROLLERS[name])
        for _ in range(2):
            assert tokens(engine.generate(requests())) == wanted


@pytest.mark.parametrize(
    ("draw", "scheme", "name"),
    [
        (Draw.SAMPLED, Scheme.BLOCK, "auto"),
        (Draw.SAMPLED, Scheme.REJECTION, "restless"),
        (Draw.WITHOUT_REPLACEMENT, Scheme.TRAVERSAL, "auto-tree"),
        (Draw.WITHOUT_REPLACEMENT, Scheme.REJECTION_WALK, "restless-tree"),
        (Draw.DETERMINISTIC, Scheme.EXACT_MATCH, "auto-tree"),
    ],
)
def test_greedy_tokens_do_not_depend_on_it_under_any_scheme(draw: Draw, scheme: Scheme, name: str) -> None:
    wanted = tokens(make_engine().generate(requests(temperature=0.0)))
    drafter = SelfDrafter(SelfConfig(draw=draw, temperature=1.0))
    engine = make_engine(drafter=drafter, controller=CONTROLLERS[name], config={"scheme": scheme})
    assert tokens(engine.generate(requests(temperature=0.0))) == wanted


def test_drafters_see_only_requests_with_a_budget() -> None:
    class First:
        name = "first"

        def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]:
            turn = state if isinstance(state, int) else 0
            lengths = torch.zeros_like(signals.remaining)
            if turn % 3 == 0:
                lengths[:2] = torch.minimum(signals.remaining[:2] - 1, torch.tensor(2))
            return Budget(draft_lengths=lengths), turn + 1

    drafter = ScriptedDrafter(lambda tokens: chain([5, 6]), hidden_layers=(0, -1))
    sink = MemorySink()
    done = make_engine(drafter=drafter, controller=First(), sink=sink).generate(requests(80))
    rounds = [event for event in sink.events if isinstance(event, RoundEvent)]
    assert len(drafter.contexts) < len(rounds) / 2
    assert all(len(context.requests) <= 2 for context in drafter.contexts)
    assert len(drafter.verdicts) == len(drafter.contexts)
    assert [verdict.num_accepted.numel() for verdict in drafter.verdicts] == [len(context.requests) for context in drafter.contexts]
    # States that nobody asked for meanwhile come together, in order, with nothing missing.
    seen: dict[str, list[int]] = {}
    for context in drafter.contexts:
        assert context.states is not None
        offsets = context.states.offsets.tolist()
        for request, begin, end in zip(context.requests, offsets, offsets[1:], strict=False):
            seen.setdefault(request.request_id, []).extend(context.states.positions[begin:end].tolist())
        assert all(rows.shape[0] == context.states.positions.numel() for rows in context.states.hidden.values())
    assert seen
    assert all(positions == list(range(len(positions))) for positions in seen.values())
    assert max(map(len, seen.values())) > 60
    assert tokens(done) == tokens(make_engine().generate(requests(80)))


def test_states_that_waited_are_those_that_came_at_once() -> None:
    """Two runs of the same tokens, one drafted for in every round, one only once in a while: the same states."""

    class Rarely:
        name = "rarely"

        def __init__(self, every: int) -> None:
            self._every = every

        def decide(self, signals: BudgetSignals, state: object) -> tuple[Budget, object]:
            turn = state if isinstance(state, int) else 0
            wanted = int(turn % self._every == self._every - 1)
            return Budget(draft_lengths=torch.clamp(signals.remaining - 1, max=wanted)), turn + 1

    collected = []
    for every in (1, 45):
        rows: dict[int, torch.Tensor] = {}

        class Keeping(ScriptedDrafter):
            def propose(self, context: DraftContext, budget: Budget) -> DraftTree:
                assert context.states is not None
                for position, row in zip(context.states.positions.tolist(), context.states.hidden[0], strict=True):
                    rows[position] = row.clone()  # noqa: B023
                return super().propose(context, budget)

        drafter = Keeping(lambda tokens: chain([60]), hidden_layers=(0,))
        make_engine(drafter=drafter, controller=Rarely(every)).generate(requests(100)[:1])
        collected.append(rows)
    common = sorted(collected[0].keys() & collected[1].keys())
    assert len(common) > 80
    for position in common:
        torch.testing.assert_close(collected[0][position], collected[1][position], atol=1e-5, rtol=1e-4)


def test_decisions_are_told_with_their_reasons(tmp_path: Path) -> None:
    plain = make_engine().generate(requests(90))
    answers: dict[tuple[int, ...], Sequence[int]] = {
        prompt: completion.token_ids for prompt, completion in zip(PROMPTS, plain, strict=True)
    }
    sink = MemorySink()
    engine = make_engine(drafter=ScriptedDrafter(oracle(answers, 4)), controller=ThroughputBudget(max_length=4), sink=sink)
    engine.generate(requests(90))
    told = [event for event in sink.events if isinstance(event, BudgetEvent)]
    assert told[0].reason == "explore"
    assert {event.controller for event in told} == {"auto"}
    best = [event for event in told if event.reason == "best"]
    assert best
    for event in best:
        assert event.predicted_accept_by_depth
        assert event.predicted_round_s > 0
        assert math.isfinite(event.predicted_gain)
        assert len(event.draft_lengths) <= 4
    rounds = [event for event in sink.events if isinstance(event, RoundEvent)]
    assert len(told) < len(rounds)
    assert all(event.budget_s > 0 for event in rounds)
    assert any(event.predicted_accept_prob > 0.8 for event in rounds)
    # What was learnt goes on in another engine.
    engine.pilot.save(tmp_path / "state" / "budget.json")
    later = BudgetPilot(ThroughputBudget(max_length=4))
    later.load(tmp_path / "state" / "budget.json")
    assert later.monitor.first_accept() == engine.pilot.monitor.first_accept()
    again = MemorySink()
    make_engine(drafter=ScriptedDrafter(oracle(answers, 4)), controller=later, sink=again).generate(requests(90))
    assert next(event for event in again.events if isinstance(event, BudgetEvent)).reason != "explore"


@pytest.mark.parametrize("text", ["", "{}", '{"format": 9}', '{"format": 2}', '{"format": 3, "monitor": {}, "costs": {}}'])
def test_damaged_states_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "budget.json"
    path.write_text(text)
    pilot = BudgetPilot(FixedBudget(draft_length=1))
    monitor = pilot.monitor
    with pytest.raises(ValueError, match=r"budget\.json holds no budget state"):
        pilot.load(path)
    assert pilot.monitor is monitor
    pilot.save(path)
    assert json.loads(path.read_text())["format"] == 3


def test_a_policy_that_jumps_away_from_its_drafter_is_told_of_and_drafted_for_less() -> None:
    """The drafter knows the old policy's outputs by heart; then the policy's weights change, and its drafts are worth nothing."""
    many = [Request(prompt_token_ids=prompt, max_new_tokens=140, seed=i, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    plain = make_engine().generate(many)
    answers: dict[tuple[int, ...], Sequence[int]] = {
        prompt: completion.token_ids for prompt, completion in zip(PROMPTS, plain, strict=True)
    }
    sink = MemorySink()
    engine = make_engine(drafter=ScriptedDrafter(oracle(answers, 3)), controller=EntropyBudget(max_length=3), sink=sink)
    for _ in range(4):
        engine.generate(many)
    assert not engine.pilot.monitor.stale
    before = [event for event in sink.events if isinstance(event, RoundEvent)]
    generator = torch.Generator().manual_seed(3)
    jumped = {name: weight + 0.5 * torch.randn(weight.shape, generator=generator) for name, weight in engine.runner.named_weights().items()}
    engine.update_weights(jumped.items(), version=1)
    engine.generate(many)
    assert engine.pilot.monitor.stale
    after = [event for event in sink.events if isinstance(event, RoundEvent)][len(before) :]
    stale = [event for event in sink.events if isinstance(event, DrafterStaleEvent)]
    assert len(stale) == 1
    assert stale[0].round_index - after[0].round_index <= 20
    assert stale[0].accept_prob < 0.5 < stale[0].reference_accept_prob
    drafted_before = sum(event.num_draft_tokens for event in before[-40:]) / sum(event.num_requests for event in before[-40:])
    drafted_after = sum(event.num_draft_tokens for event in after[20:]) / sum(event.num_requests for event in after[20:])
    assert drafted_before > 1.5
    assert drafted_after < 0.3
