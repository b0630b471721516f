"""``--budget auto`` against fixed draft lengths on a real model, round by round in turn.

    python benchmarks/budget.py --drafters suffix,runs/mtp/drafter --out runs/budget.json [--batch-sizes 1,4,16,32]
        [--temperatures .3,1,1.3] [--lengths 0,1,2,4,8] [--seconds 50]

A cell is a drafter, a temperature and a batch size. In it one engine for each fixed length and one under ``auto`` take turns: one round
each, then the next, on the same prompts with the same seeds, so that all sample the same tokens and differ in nothing but the budget.
Seconds are divided by the pace of their turn (the median over the engines of seconds over the engine's own median): a shared machine that
is slow for a while is slow for all. Rounds of the same shape count with their common mean, whoever ran them, and each engine with its own
deciding besides: what is compared is the budgets' choices and not the luck of the clock. Who begins a turn rotates.

Requests ignore the end of sequence, so that every round is of the full batch. Rounds before ``auto`` and the caches have settled are not
counted; what ``auto`` learns in a cell it keeps for the next of the same drafter and batch size, as an engine would that serves on. Long
drafts at large batches run in every third turn only. Intervals are 95 % of a bootstrap over turns.

The script stops after --seconds and goes on where it was when started again, also with other cells; one that was interrupted is begun anew.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from paired import NUM_RESAMPLES, Interval

from rollout_spec.bench import machine
from rollout_spec.budget import FixedBudget
from rollout_spec.controllers import ThroughputBudget
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.request import Request
from rollout_spec.events import Event, RoundEvent
from rollout_spec.files import resumed, write_text
from rollout_spec.pilot import BudgetPilot
from rollout_spec.sampling import SamplingParams
from rollout_spec.session import Session, drafter_factory, open_session
from rollout_spec_rl.compose import COMPOSITION

AUTO = "auto"
WARM_TURNS = 24
TURNS = {1: 210, 4: 120, 16: 60, 32: 42}  # counted, by batch size
LONGEST_RELATIVE = 3.0
RARE_FROM, RARE_LENGTH, RARE_EVERY = 16, 4, 3  # batches from, and lengths from, which a variant runs in every third turn


@dataclass(frozen=True, kw_only=True)
class Cell:
    drafter: str
    temperature: float
    batch_size: int

    @property
    def key(self) -> str:
        return f"{Path(self.drafter).parent.name if '/' in self.drafter else self.drafter}/T={self.temperature:g}/B={self.batch_size}"


@dataclass(kw_only=True)
class Rounds:
    """A sink that keeps the rounds of one variant."""

    events: list[RoundEvent] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        if isinstance(event, RoundEvent):
            self.events.append(event)

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One counted round of one variant."""

    number: int
    num_tokens: int
    seconds: float  # without deciding
    budget_s: float  # deciding and learning
    shape: tuple[int, ...]  # requests, deepest draft, drafted tokens


@dataclass(kw_only=True)
class Variant:
    """One engine in its cell, and its counted rounds."""

    name: str
    engine: Engine
    rounds: Rounds
    turns: list[Turn] = field(default_factory=list)

    def turn(self, number: int) -> None:
        """One round; turns before number 0 are not counted."""
        before = len(self.rounds.events)
        began = time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - began
        if number >= 0 and len(self.rounds.events) > before:  # else its requests have ended
            event = self.rounds.events[-1]
            self.turns.append(
                Turn(
                    number=number,
                    num_tokens=event.num_emitted_tokens,
                    seconds=seconds - event.budget_s,
                    budget_s=event.budget_s,
                    shape=(event.num_requests, event.draft_depth, event.num_draft_tokens),
                )
            )


class Sums:
    """Tokens and seconds of every turn, [variants, turns]; zero where a variant had none."""

    def __init__(self, turns_of: Mapping[str, Sequence[Turn]]) -> None:
        self._names = list(turns_of)
        shape = len(turns_of), 1 + max(turn.number for turns in turns_of.values() for turn in turns)
        self._tokens, self._seconds, relative = np.zeros(shape), np.zeros(shape), np.full(shape, np.nan)
        usual = [statistics.median(turn.seconds for turn in turns) for turns in turns_of.values()]
        for row, turns in enumerate(turns_of.values()):
            for turn in turns:
                self._tokens[row, turn.number] = turn.num_tokens
                relative[row, turn.number] = turn.seconds / usual[row]
        pace = np.nanmedian(relative, axis=0)
        # Where one engine alone took three times its usual time, the machine was elsewhere.
        steady = np.minimum(relative / pace, LONGEST_RELATIVE) * np.array(usual)[:, None]
        alike: dict[tuple[int, ...], list[float]] = {}
        for row, turns in enumerate(turns_of.values()):
            for turn in turns:
                alike.setdefault(turn.shape, []).append(steady[row, turn.number])
        for row, turns in enumerate(turns_of.values()):
            for turn in turns:
                self._seconds[row, turn.number] = statistics.fmean(alike[turn.shape]) + turn.budget_s / pace[turn.number]

    def speeds(self) -> dict[str, float]:
        """Tokens a second by variant."""
        return dict(zip(self._names, (self._tokens.sum(1) / self._seconds.sum(1)).tolist(), strict=True))

    def ratio(self, name: str, baseline: str) -> Interval:
        """Of two variants' tokens a second."""
        generator = np.random.default_rng(0)
        drawn = generator.integers(self._tokens.shape[1], size=(NUM_RESAMPLES, self._tokens.shape[1]))
        pair = [self._names.index(name), self._names.index(baseline)]
        tokens, seconds = self._tokens[pair], self._seconds[pair]
        speeds = tokens[:, drawn].sum(2) / seconds[:, drawn].sum(2)
        low, high = np.quantile(speeds[0] / speeds[1], (0.025, 0.975))
        whole = tokens.sum(1) / seconds.sum(1)
        return Interval(value=float(whole[0] / whole[1]), low=float(low), high=float(high))


class Study:
    """Cells, one after the other, of one loaded model."""

    def __init__(self, session: Session, lengths: Sequence[int], max_new_tokens: int) -> None:
        self._session, self._lengths, self._max_new_tokens = session, lengths, max_new_tokens
        self._pilots: dict[tuple[str, int], BudgetPilot] = {}

    def run(self, cell: Cell) -> dict[str, Any]:
        """Tokens a second of every variant, and what ``auto`` chose and expected."""
        pilot = self._pilots.setdefault((cell.drafter, cell.batch_size), BudgetPilot(ThroughputBudget(max_length=max(self._lengths))))
        variants = [self._variant(cell, f"fixed:{length}", BudgetPilot(FixedBudget(draft_length=length))) for length in self._lengths]
        variants.append(self._variant(cell, AUTO, pilot))
        for variant in variants:
            while not variant.rounds.events:
                variant.engine.step()
        for turn in range(-WARM_TURNS, TURNS[cell.batch_size]):
            first = turn % len(variants)
            for variant in (*variants[first:], *variants[:first]):
                if variant.name == AUTO or turn % self._every(cell, variant.name) == 0:
                    variant.turn(turn)
        return self._result(cell, variants)

    def _every(self, cell: Cell, name: str) -> int:
        return RARE_EVERY if cell.batch_size >= RARE_FROM and int(name.partition(":")[2]) >= RARE_LENGTH else 1

    def _variant(self, cell: Cell, name: str, pilot: BudgetPilot) -> Variant:
        make = drafter_factory(COMPOSITION, self._session.loaded, scheme=None, seeded=True, tree_width=(1,))
        rounds = Rounds()
        engine = Engine(
            self._session.runner,
            config=EngineConfig(max_batch=cell.batch_size, max_context=self._session.max_context, max_tree_nodes=16, seed=1),
            drafter=make(cell.drafter),
            controller=pilot,
            sink=rounds,
        )
        for index in range(cell.batch_size):
            engine.add(self._request(index, cell.temperature))
        return Variant(name=name, engine=engine, rounds=rounds)

    def _request(self, index: int, temperature: float) -> Request:
        prompt = self._session.prompts[index % len(self._session.prompts)]
        return Request(
            prompt_token_ids=prompt.token_ids,
            max_new_tokens=self._max_new_tokens,
            sampling=SamplingParams(temperature=temperature),
            seed=index,
            ignore_eos=True,
            prompt_key=prompt.prompt_id,
        )

    def _result(self, cell: Cell, variants: Sequence[Variant]) -> dict[str, Any]:
        sums = Sums({variant.name: variant.turns for variant in variants})
        speeds = sums.speeds()
        fixed = {name: speed for name, speed in speeds.items() if name != AUTO}
        best = max(fixed, key=lambda name: fixed[name])
        events = variants[-1].rounds.events[-TURNS[cell.batch_size] :]
        taken = math.fsum(event.draft_s + event.target_s + event.verify_s + event.other_s for event in events)
        told = [(event.predicted_accept_prob, event.mean_accept_prob_by_depth[0]) for event in events if event.mean_accept_prob_by_depth]
        return {
            "drafter": cell.drafter,
            "temperature": cell.temperature,
            "batch_size": cell.batch_size,
            "tokens_per_s": speeds,
            "best_fixed": best,
            "auto_to_best_fixed": asdict(sums.ratio(AUTO, best)),
            "auto_to_off": asdict(sums.ratio(AUTO, "fixed:0")),
            "mean_entropy": _mean([event.mean_entropy for event in events]),
            "auto_drafted": _mean([event.num_draft_tokens / event.num_requests for event in events]),
            "budget_share": math.fsum(event.budget_s for event in events) / taken,
            "predicted_accept_prob": _mean([predicted for predicted, _ in told]),
            "realised_accept_prob": _mean([realised for _, realised in told]),
        }


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a cell."""
    names = list(results[0]["tokens_per_s"])
    lines = [f"| cell | H | {' | '.join(names)} | auto / best fixed | auto / off |", "|" + "---|" * (len(names) + 4)]
    for row in results:
        cell = Cell(drafter=row["drafter"], temperature=row["temperature"], batch_size=row["batch_size"])
        speeds = " | ".join(f"{row['tokens_per_s'][name]:.0f}" for name in names)
        best, off = (
            f"{row[key]['value']:.3f} ({row[key]['low']:.2f}–{row[key]['high']:.2f})" for key in ("auto_to_best_fixed", "auto_to_off")
        )
        ratios = f"{row['best_fixed']}: {best} | {off}"
        lines.append(f"| {cell.key} | {row['mean_entropy']:.1f} | {speeds} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafters", default="suffix")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", default="gsm_symbolic:8@2000")
    parser.add_argument("--temperatures", default=".3,1,1.3")
    parser.add_argument("--batch-sizes", default="1,4,16,32")
    parser.add_argument("--lengths", default="0,1,2,4,8")
    parser.add_argument("--max-new-tokens", type=int, default=700)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further cell after so many")
    given = parser.parse_args()
    began = time.perf_counter()
    settings = {name: vars(given)[name] for name in ("model", "prompts", "lengths", "max_new_tokens", "dtype")}
    try:
        held = resumed(given.out, {"machine": machine(), "settings": settings})
    except ValueError as error:
        parser.error(str(error))
    results: dict[str, dict[str, Any]] = held.setdefault("results", {})
    cells = [
        Cell(drafter=drafter, temperature=float(temperature), batch_size=int(size))
        for size in given.batch_sizes.split(",")
        for drafter in given.drafters.split(",")
        for temperature in given.temperatures.split(",")
    ]
    missing = [cell for cell in cells if cell.key not in results]
    if missing:
        session = open_session(
            COMPOSITION,
            model=given.model,
            prompts=given.prompts,
            dtype=given.dtype,
            threads=None,
            max_new_tokens=given.max_new_tokens,
            report=print,
        )
        study = Study(session, [int(length) for length in given.lengths.split(",")], given.max_new_tokens)
    for cell in missing:
        if time.perf_counter() - began > given.seconds:
            break
        row = results[cell.key] = study.run(cell)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(given.out, json.dumps(held, indent=2) + "\n")
        print(
            f"{cell.key}: {row['auto_to_best_fixed']['value']:.3f} of {row['best_fixed']}, {row['auto_to_off']['value']:.3f} of off",
            flush=True,
        )
    print(table([results[cell.key] for cell in cells if cell.key in results]))


if __name__ == "__main__":
    main()
