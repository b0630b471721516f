"""Running a world through a controller, an oracle or a fixed length, and what comes out.

Time is the world's own, free of the noise that controllers measure; what deciding takes is not in it (docs/budget.md has that).

Shape legend: B running requests, D depths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rollout_spec.budget import BudgetController, FixedBudget
from rollout_spec.controllers import BatchTableBudget, EntropyBudget, ThroughputBudget
from rollout_spec.controllers.selection import select, valued
from rollout_spec.cost import RoundShape
from rollout_spec.pilot import BudgetPilot, RoundReport
from rollout_spec.rounds_seen import Forecast, RoundOutcome
from rollout_spec.simulate.world import Array, Ints, World

DEPTH = 12
FIXED = (0, 1, 2, 3, 4, 6, 8)
ORACLE = "oracle"


@dataclass(kw_only=True)
class Trace:
    """What happened, round by round."""

    share: list[float] = field(default_factory=list)  # of all tokens, emitted before the round
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)  # expected, over the draws of acceptance: realised ones are noisier by far
    rate_of_best: list[float] = field(default_factory=list)  # expected tokens a second over the oracle's in the same situation
    stale: list[bool] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / math.fsum(self.seconds)

    def rounds_to_react(self, at: float, good: float = 0.9, window: int = 8) -> int:
        """Rounds after a change at that share until the mean of ``window`` in a row is ``good`` of the oracle's tokens a second."""
        first = next((i for i, share in enumerate(self.share) if share >= at), len(self.share))
        for i in range(first, len(self.share) - window + 1):
            if sum(self.rate_of_best[i : i + window]) >= good * window:
                return i - first
        return len(self.share) - first

    def rounds_to_stale(self, at: float) -> int | None:
        """Rounds after that share until the drafter was reported stale."""
        first = next((i for i, share in enumerate(self.share) if share >= at), len(self.share))
        return next((i - first for i in range(first, len(self.stale)) if self.stale[i]), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Drafts:
    """One round's drafts and what was accepted of them."""

    accept_probs: Array  # [B, D], NaN where none was drafted or reached
    num_accepted: Ints  # [B]
    num_nodes: Ints  # [B]


class _Requests:
    """All requests of a world in arrays; ``running`` holds the indices of those in the batch."""

    def __init__(self, world: World, noise: np.random.Generator) -> None:
        self._world, self._noise = world, noise
        self.left = world.lengths(noise)
        self.total = int(self.left.sum())
        self.context = np.full(world.num_requests, world.prompt_tokens)
        self.offset = np.resize(np.array(world.offsets), world.num_requests)
        noise.shuffle(self.offset)
        self.entropy_rate = noise.lognormal(-0.5 * world.entropy_spread**2, world.entropy_spread, world.num_requests)
        self._waiting = list(range(world.num_requests))[::-1]
        self.running: Ints = np.empty(0, dtype=np.int64)
        self.emitted = 0

    def admit(self) -> bool:
        """Fill the batch; False when everything is done."""
        self.running = self.running[self.left[self.running] > 0]
        free = self._world.max_batch - len(self.running)
        new = [self._waiting.pop() for _ in range(min(free, len(self._waiting)))]
        self.running = np.concatenate([self.running, np.array(new, dtype=np.int64)])
        return len(self.running) > 0

    def truth(self) -> Forecast:
        """What an oracle knows: mean acceptance by request and depth, as things are now."""
        world, share = self._world, self.emitted / self.total
        entropies = world.entropy(share) * self.entropy_rate[self.running]
        first = world.intercept(share) + world.slope * entropies + self.offset[self.running]
        accept = np.clip(first[:, None] * world.depth_ratio ** np.arange(DEPTH), 0.02, 0.98)
        return Forecast(
            accept=accept,
            steps=accept * world.found,
            nodes=np.full(DEPTH, world.found).cumprod(),
            spread=np.zeros_like(accept),
            entropies=entropies,
            epoch=0,
            num_observed=math.inf,
        )

    def draft(self, truth: Forecast, lengths: Ints) -> _Drafts:
        """Drafts of these lengths [B], and their verification."""
        world, batch, depth = self._world, len(lengths), int(lengths.max(initial=0))
        has_node = (self._noise.random((batch, depth)) < world.found) & (np.arange(depth) < lengths[:, None])
        has_node = np.logical_and.accumulate(has_node, axis=1)
        mean = truth.accept[:, :depth]
        # Beta-distributed around the mean: positions differ a lot, as they do in text.
        strength = np.maximum(mean * (1 - mean) / world.position_spread**2 - 1, 0.2)
        probs = self._noise.beta(mean * strength, (1 - mean) * strength)
        kept = (self._noise.random((batch, depth)) < probs) & has_node
        num_accepted = np.logical_and.accumulate(kept, axis=1).sum(1)
        reached = has_node & (np.arange(depth) <= num_accepted[:, None])
        told = (np.arange(depth) < num_accepted[:, None]).astype(np.float64) if world.realised else probs
        return _Drafts(accept_probs=np.where(reached, told, np.nan), num_accepted=num_accepted, num_nodes=has_node.sum(1))

    def emit(self, num_accepted: Ints) -> None:
        """Hand out the accepted tokens and one more."""
        kept = np.minimum(num_accepted + 1, self.left[self.running])
        self.left[self.running] -= kept
        self.context[self.running] += kept
        self.emitted += int(kept.sum())


def simulate(world: World, controller: BudgetController | str, *, seed: int = 0) -> Trace:
    """Roll the whole world out under a controller, or under ``ORACLE``, which knows law and cost."""
    noise = np.random.default_rng(seed)
    requests, trace = _Requests(world, noise), Trace()
    pilot = None if isinstance(controller, str) else BudgetPilot(controller)
    learns = pilot is not None and not isinstance(controller, FixedBudget)
    updates = sorted([(at, "drafter") for at in world.drafter_updates] + [(at, "policy") for at in world.policy_updates])
    while requests.admit():
        share = requests.emitted / requests.total
        while updates and updates[0][0] <= share:
            _, what = updates.pop(0)
            if pilot is not None:
                pilot.drafter_updated() if what == "drafter" else pilot.target_updated()
        situation = _Situation.of(requests)
        lengths = situation.best(world) if pilot is None else _decided(pilot, requests, situation)
        draft = requests.draft(situation.truth, lengths)
        shape = situation.shape(lengths, draft)
        depths, rows = np.array([float(shape.depth)]), np.array([float(shape.num_rows)])
        draft_s, rest_s = (float(part[0]) for part in world.costs.parts(shape.num_requests, shape.context, depths, rows))
        if pilot is not None and learns:
            outcome = situation.outcome(noise, lengths, draft)
            clocks = _clocks(world, noise, len(trace.seconds))
            pilot.observe(RoundReport(outcome=outcome, shape=shape, draft_s=draft_s * clocks[0], rest_s=rest_s * clocks[1]))
            for index in requests.running[requests.left[requests.running] <= draft.num_accepted + 1].tolist():
                pilot.finish(str(index))
            trace.stale.append(pilot.monitor.stale)
            if world.policy_updates or world.drafter_updates:
                trace.rate_of_best.append(situation.rate(world, lengths) / situation.rate(world, situation.best(world)))
        trace.share.append(share)
        trace.seconds.append(draft_s + rest_s)
        trace.tokens.append(situation.expected_tokens(world, lengths))
        requests.emit(draft.num_accepted)
    return trace


@dataclass(frozen=True, kw_only=True, eq=False)
class _Situation:
    """One round before it is drafted for."""

    truth: Forecast
    limits: Ints  # [B]
    context: int
    ids: tuple[str, ...]

    @staticmethod
    def of(requests: _Requests) -> _Situation:
        running = requests.running
        return _Situation(
            truth=requests.truth(),
            limits=np.clip(requests.left[running] - 1, 0, FIXED[-1]),
            context=int(requests.context[running].sum()),
            ids=tuple([str(index) for index in running.tolist()]),
        )

    def best(self, world: World) -> Ints:
        """[B] what the oracle drafts."""
        return select(self.truth, world.costs, self.limits, self.context).lengths

    def expected_tokens(self, world: World, lengths: Ints) -> float:
        return len(lengths) + valued(self.truth, world.costs, lengths, self.context).num_accepted

    def rate(self, world: World, lengths: Ints) -> float:
        """Expected tokens a second with draft lengths [B]."""
        value = valued(self.truth, world.costs, lengths, self.context)
        return (len(lengths) + value.num_accepted) / value.round_s

    def shape(self, lengths: Ints, draft: _Drafts) -> RoundShape:
        batch, depth = len(lengths), int(lengths.max(initial=0))
        return RoundShape(
            num_requests=batch,
            num_rows=batch + int(draft.num_nodes.sum()),
            depth=depth,
            context=self.context,
            num_new_states=2 * batch if depth else 0,
        )

    def outcome(self, noise: np.random.Generator, lengths: Ints, draft: _Drafts) -> RoundOutcome:
        """What the verifier tells of the round. A position's entropy has a long tail around its request's mean."""
        batch, depth = draft.accept_probs.shape
        emitted = np.arange(depth + 1) <= draft.num_accepted[:, None]
        entropies = noise.gamma(0.6, self.truth.entropies[:, None] / 0.6, (batch, depth + 1))
        return RoundOutcome(
            request_ids=self.ids,
            asked=lengths,
            accept_probs=draft.accept_probs,
            num_accepted=draft.num_accepted,
            nodes_by_depth=(draft.num_nodes[:, None] > np.arange(depth)).sum(0).astype(np.float64),
            entropies=np.where(emitted, entropies, np.nan),
        )


def _clocks(world: World, noise: np.random.Generator, round_index: int) -> tuple[float, float]:
    """What the drafter's and the rest's measured seconds are multiplied with."""
    swing = world.clock_drift * math.sin(round_index / 40.0)
    factors = np.exp(swing + world.clock_noise * noise.standard_normal(2)) * np.where(noise.random(2) < world.outliers, 5.0, 1.0)
    return float(factors[0]), float(factors[1])


def _decided(pilot: BudgetPilot, requests: _Requests, situation: _Situation) -> Ints:
    running = requests.running
    budget = pilot.decide(situation.ids, torch.from_numpy(requests.left[running]), torch.from_numpy(requests.context[running]))
    lengths: Ints = budget.draft_lengths.numpy()
    return lengths


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One controller in one world."""

    world: str
    controller: str
    tokens_per_s: float
    ratio_to_oracle: float
    ratio_to_best_fixed: float
    rounds_to_react: int | None = None  # to what changes at a certain moment; None where nothing does, and for what never reacts or knows


def compare(
    world: World, on_run: Callable[[str], None], *, controllers: Sequence[BudgetController] | None = None, seeds: Sequence[int] = (0,)
) -> list[Comparison]:
    """The oracle, every fixed length and the controllers in one world, from the same requests; seeds are pooled, reactions the slowest."""
    adaptive = default_controllers() if controllers is None else controllers
    traces: dict[str, list[Trace]] = {}
    runs: list[BudgetController | str] = [ORACLE, *(FixedBudget(draft_length=length) for length in FIXED), *adaptive]
    for controller in runs:
        name = controller if isinstance(controller, str) else controller.name
        for seed in seeds:
            on_run(f"{name} in {world.name}")
            traces.setdefault(name, []).append(simulate(world, controller, seed=seed))
    speeds = {
        name: sum(sum(trace.tokens) for trace in own) / sum(math.fsum(trace.seconds) for trace in own) for name, own in traces.items()
    }
    best_fixed = max(speed for name, speed in speeds.items() if name == "off" or name.startswith("fixed:"))
    changes = (*world.drafter_updates, *world.policy_updates)
    return [
        Comparison(
            world=world.name,
            controller=name,
            tokens_per_s=speeds[name],
            ratio_to_oracle=speeds[name] / speeds[ORACLE],
            ratio_to_best_fixed=speeds[name] / best_fixed,
            rounds_to_react=max(trace.rounds_to_react(at) for trace in own for at in changes) if own[0].rate_of_best else None,
        )
        for name, own in traces.items()
    ]


def num_runs() -> int:
    """How often ``compare`` calls back a seed."""
    return 1 + len(FIXED) + len(default_controllers())


def default_controllers() -> tuple[BudgetController, ...]:
    """Those that ``--budget`` names; the table drafts less the more requests there are."""
    return (BatchTableBudget(table=((4, 4), (16, 2), (64, 1))), EntropyBudget(), ThroughputBudget())
