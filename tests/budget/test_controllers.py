"""Controllers decide purely, from what they may see, and choose what brute force would."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.budget import Budget, BudgetController, BudgetSignals, FixedBudget
from rollout_spec.controllers import BatchTableBudget, EntropyBudget, ThroughputBudget
from rollout_spec.controllers.probing import ProbeConfig, ProbeState
from rollout_spec.controllers.selection import select, valued
from rollout_spec.cost import OnlineCosts, RoundCosts, RoundShape
from rollout_spec.monitor import EntropyMonitor
from rollout_spec.rounds_seen import Forecast
from rollout_spec.session import parse_budget
from rollout_spec.simulate.world import CPU, GPU, CostCurve


def forecast(accept: np.ndarray, *, entropies: float = 1.0, epoch: int = 0, num_asked: float = math.inf, spread: float = 0.0) -> Forecast:
    depth = accept.shape[1]
    return Forecast(
        accept=accept,
        steps=accept,
        nodes=np.ones(depth),
        spread=np.full_like(accept, spread),
        entropies=np.full(len(accept), entropies),
        epoch=epoch,
        num_observed=1e6,
        num_asked=num_asked,
    )


def measured(curve: CostCurve, *sizes: int) -> RoundCosts:
    costs = OnlineCosts()
    for _, size, depth in itertools.product(range(4), sizes, (0, 1, 2, 4, 8)):
        rows = size * (1 + depth)
        draft, rest = curve.parts(size, 300 * size, np.array([float(depth)]), np.array([float(rows)]))
        states = 2 * size if depth else 0
        shape = RoundShape(num_requests=size, num_rows=rows, depth=depth, context=300 * size, num_new_states=states)
        costs.observe(shape, float(draft[0]), float(rest[0]))
    return costs.snapshot()


def signals(accept: np.ndarray, costs: RoundCosts, *, remaining: int = 100, **changes: typing.Any) -> BudgetSignals:
    batch = len(accept)
    return BudgetSignals(
        remaining=torch.full((batch,), remaining),
        context_lengths=torch.full((batch,), 300),
        request_ids=tuple(f"request {i}" for i in range(batch)),
        forecast=forecast(accept, **changes),
        costs=costs,
    )


@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from([CPU, GPU]))
def test_no_other_draft_lengths_bring_more_tokens_a_second(seed: int, batch: int, curve: CostCurve) -> None:
    noise = np.random.default_rng(seed)
    expected = forecast(noise.uniform(0.05, 0.99, (batch, 3)))
    limits = noise.integers(0, 4, batch)
    found = select(expected, curve, limits, 300 * batch)
    assert (found.lengths <= limits).all()
    best = max(
        valued(expected, curve, np.array(lengths), 300 * batch).gain
        for lengths in itertools.product(*(range(limit + 1) for limit in limits))
    )
    assert found.gain == pytest.approx(best, abs=1e-12)
    assert valued(expected, curve, found.lengths, 300 * batch).gain == pytest.approx(best, abs=1e-12)


CONTROLLERS: tuple[BudgetController, ...] = (
    FixedBudget(draft_length=3),
    BatchTableBudget(table=((4, 4), (16, 1))),
    EntropyBudget(),
    ThroughputBudget(),
)


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda controller: controller.name)
def test_decisions_are_pure(controller: BudgetController) -> None:
    """The same signals and states, in any order, give the same budgets; nothing is remembered beside the state."""
    noise = np.random.default_rng(0)
    inputs = [signals(noise.uniform(0.1, 0.9, (4, 16)), measured(CPU, 4), epoch=i // 3) for i in range(9)]

    def run() -> list[tuple[list[int], object]]:
        out, state = [], None
        for one in inputs:
            budget, state = controller.decide(one, state)
            out.append((budget.draft_lengths.tolist(), state))
        return out

    assert run() == run()
    assert hash(controller) == hash(dataclasses.replace(typing.cast(typing.Any, controller)))


def test_no_sampled_token_can_reach_a_controller() -> None:
    """By signature: nothing that a controller is given can hold a draft token or what it was drawn from."""
    for controller in CONTROLLERS:
        hints = typing.get_type_hints(type(controller).decide)
        assert hints == {"signals": BudgetSignals, "state": object, "return": tuple[Budget, object]}
    seen: set[str] = set()
    todo: list[typing.Any] = [BudgetSignals]
    while todo:
        kind = todo.pop()
        for field in dataclasses.fields(kind):
            seen.add(field.name)
            hint = typing.get_type_hints(kind)[field.name]
            todo += [hint] if dataclasses.is_dataclass(hint) else []
    assert seen == {
        *("remaining", "context_lengths", "request_ids", "forecast", "costs", "num_rounds"),
        *("accept", "steps", "nodes", "spread", "entropies", "epoch", "num_observed", "num_asked"),
        *("rest", "draft", "speed", "measured"),
    }


def test_auto_drafts_where_it_pays_and_for_whom() -> None:
    auto = ThroughputBudget()
    good, _ = auto.decide(signals(np.full((1, 16), 0.9), measured(CPU, 1)), None)
    assert good.draft_lengths.item() >= 4
    assert good.decision.reason == "best"
    assert good.decision.gain > 0.5
    assert good.decision.accept_by_depth == pytest.approx((0.9,) * good.max_depth)
    assert good.decision.num_accepted == pytest.approx(sum(0.9**d for d in range(1, good.max_depth + 1)))
    _, state = auto.decide(signals(np.full((16, 16), 0.2), measured(CPU, 16)), None)  # a probe, as after all news
    poor, _ = auto.decide(signals(np.full((16, 16), 0.2), measured(CPU, 16)), state)
    assert not poor.draft_lengths.any()
    assert poor.decision.reason == "off"
    mixed, _ = auto.decide(signals(np.repeat([[0.95], [0.1]], 8, axis=0) * np.ones(16), measured(CPU, 16)), None)
    assert (mixed.draft_lengths[:8] > 0).all()
    assert not mixed.draft_lengths[8:].any()


def test_nothing_is_drafted_beyond_what_a_request_may_emit() -> None:
    costs = measured(CPU, 1)
    for controller in (ThroughputBudget(), EntropyBudget(), FixedBudget(draft_length=8)):
        for remaining in (1, 2, 4):
            budget, _ = controller.decide(signals(np.full((1, 16), 0.95), costs, remaining=remaining), None)
            assert budget.draft_lengths.item() == remaining - 1


def test_what_was_never_measured_is_tried_first() -> None:
    costs, state, reasons = OnlineCosts(), None, []
    for _ in range(11):
        budget, state = ThroughputBudget().decide(signals(np.full((4, 16), 0.5), costs.snapshot()), state)
        depth = budget.max_depth
        reasons.append((budget.decision.reason, depth))
        shape = RoundShape(num_requests=4, num_rows=4 * (1 + depth), depth=depth, context=1200, num_new_states=8 * (depth > 0))
        costs.observe(shape, 0.001 * depth, 0.02)
    assert reasons[:9] == [("explore", 0)] * 3 + [("explore", 1)] * 3 + [("explore", 2)] * 3
    assert reasons[9][0] == "best"


def test_an_off_drafter_is_probed_ever_more_rarely_and_at_once_after_news() -> None:
    costs, state, probes = measured(CPU, 8), None, []
    auto = ThroughputBudget()
    for round_index in range(1200):
        budget, state = auto.decide(signals(np.full((8, 16), 0.1), costs, epoch=int(round_index >= 1000)), state)
        if budget.decision.reason == "probe":
            probes.append(round_index)
            assert 1 <= int((budget.draft_lengths > 0).sum()) <= 2
            assert budget.max_depth == 1
        else:
            assert not budget.draft_lengths.any()
    gaps = np.diff([probe for probe in probes if probe < 1000])
    assert gaps[-1] > 2 * gaps[0]
    assert len(gaps) < 25
    assert 1000 in probes


@pytest.mark.parametrize("controller", [ThroughputBudget(), EntropyBudget()])
def test_new_weights_are_looked_at_whatever_is_expected_of_the_drafter(controller: BudgetController) -> None:
    costs, state, drafted = measured(CPU, 12), None, []
    for _ in range(20):
        _, state = controller.decide(signals(np.full((12, 16), 0.05), costs), state)
    for _ in range(6):
        budget, state = controller.decide(signals(np.full((12, 16), 0.05), costs, num_asked=float(sum(drafted))), state)
        drafted.append(int((budget.draft_lengths > 0).sum()))
        assert budget.max_depth <= 1
    assert drafted == [12, 12, 8, 0, 0, 0]


@pytest.mark.parametrize(("batch", "drafted"), [(1, 1), (16, 8)])
def test_what_may_well_pay_is_looked_at_in_every_round(batch: int, drafted: int) -> None:
    """A jump in a few rounds of one request is soon believed and hard to unlearn with a probe now and then."""
    costs, auto = measured(CPU, batch), ThroughputBudget()
    state = None
    for _ in range(40):  # whatever there was to probe
        _, state = auto.decide(signals(np.full((batch, 16), 0.1), costs), state)
    unsure = signals(np.full((batch, 16), 0.1), costs, spread=0.4)
    for _ in range(3):
        budget, state = auto.decide(unsure, state)
        assert budget.decision.reason == "probe"
        assert int((budget.draft_lengths > 0).sum()) == drafted
    sure = [auto.decide(signals(np.full((batch, 16), 0.1), costs, spread=0.001), state)[0] for _ in range(3)]
    assert all(budget.decision.reason == "off" for budget in sure)


def test_an_off_drafter_that_became_good_is_used_at_once() -> None:
    costs = measured(CPU, 8)
    auto, state = ThroughputBudget(), None
    for _ in range(20):
        _, state = auto.decide(signals(np.full((8, 16), 0.1), costs), state)
    budget, _ = auto.decide(signals(np.full((8, 16), 0.8), costs), state)
    assert budget.decision.reason == "best"
    assert (budget.draft_lengths > 0).all()


def test_rounds_without_a_draft_are_looked_at_while_drafting() -> None:
    costs, state, reasons = measured(CPU, 4), None, []
    config = ProbeConfig(reference_every=10, small_gain=10.0)
    for _ in range(40):
        budget, state = ThroughputBudget(probes=config).decide(signals(np.full((4, 16), 0.7), costs), state)
        reasons.append(budget.decision.reason)
        assert (budget.decision.reason == "reference") == (not budget.draft_lengths.any())
    assert reasons.count("reference") == 3
    assert set(reasons) == {"best", "reference"}


def test_probes_take_turns() -> None:
    config = ProbeConfig(batch_share=0.01)
    state = ProbeState().enter(0, 1.0, config)
    seen: list[int] = []
    for _ in range(4):
        seen += state.chosen(8, 0, config)
        state = state.probed(2, config)
    assert sorted(seen) == list(range(8))


def test_the_entropy_budget_follows_expected_acceptance_by_request() -> None:
    accept = np.array([[0.9], [0.6], [0.2]]) * np.ones(16)
    budget, _ = EntropyBudget(threshold=0.3).decide(signals(accept, OnlineCosts().snapshot()), None)
    assert budget.draft_lengths.tolist() == [8, 2, 0]
    assert budget.decision.reason == "threshold"


def test_batch_tables(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"16": 1, "4": 4}))
    table = parse_budget(f"batch_table:{path}", 8, (1,))
    costs = OnlineCosts().snapshot()
    for batch, length in ((1, 4), (4, 4), (5, 1), (16, 1), (17, 0)):
        budget, _ = table.decide(signals(np.full((batch, 16), 0.5), costs), None)
        assert budget.draft_lengths.tolist() == [length] * batch
    for text in ("[]", "{}", '{"a": 1}', '{"4": -1}', '{"0": 1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="batch table"):
            BatchTableBudget.load(path)


def test_budgets_by_name() -> None:
    assert parse_budget("auto", 8, (1,)) == ThroughputBudget()
    assert parse_budget("auto", 3, (2, 1)) == ThroughputBudget(max_length=3, tree_width=(2, 1))
    assert parse_budget("entropy", 5, (1,)) == EntropyBudget(max_length=5)
    assert parse_budget("fixed:4", 8, (1,)) == FixedBudget(draft_length=4)
    assert parse_budget("off", 8, (1,)) == FixedBudget(draft_length=0) == parse_budget("auto", 0, (1,))
    for wrong in ("", "fixed", "fixed:x", "batch_table:", "lenient"):
        with pytest.raises(ValueError, match="give off, fixed:K"):
            parse_budget(wrong, 8, (1,))
    with pytest.raises(ValueError, match="draft_length must be 0 or more"):
        parse_budget("auto", -1, (1,))


def test_trees_get_the_costs_to_grow_by() -> None:
    budget, _ = ThroughputBudget(tree_width=(3, 2), max_tree_nodes=10).decide(signals(np.full((4, 16), 0.8), measured(CPU, 4)), None)
    assert budget.growth is not None
    assert budget.growth.num_requests == 4
    assert budget.growth.round_s.shape == (41,)
    assert (budget.growth.round_s.diff() >= 0).all()
    chain, _ = ThroughputBudget().decide(signals(np.full((4, 16), 0.8), measured(CPU, 4)), None)
    assert chain.growth is None


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ThroughputBudget, {"max_length": 0}),
        (ThroughputBudget, {"hysteresis": 1.0}),
        (ThroughputBudget, {"tree_width": ()}),
        (EntropyBudget, {"threshold": 0.0}),
        (EntropyBudget, {"max_length": 0}),
        (ProbeConfig, {"last_share": 0.5}),
        (ProbeConfig, {"backoff": 0.0}),
        (ProbeConfig, {"at_most": 1}),
        (ProbeConfig, {"length": 0}),
    ],
)
def test_wrong_settings_are_refused(kind: type, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|needs|hold|less than"):
        kind(**wrong)


def test_a_new_monitor_and_new_costs_make_a_forecast_that_controllers_accept() -> None:
    ids = ("a", "b")
    given_signals = dataclasses.replace(
        signals(np.full((2, 16), 0.5), OnlineCosts().snapshot()), request_ids=ids, forecast=EntropyMonitor().forecast(ids)
    )
    for controller in CONTROLLERS:
        budget, _ = controller.decide(given_signals, None)
        assert budget.draft_lengths.shape == (2,)
