"""How well the entropy monitor's law describes a real drafter, and how well it foretells acceptance.

    python benchmarks/entropy_law.py --drafter runs/mtp/drafter --json FILE [--figure docs/figures/entropy_law.svg]
        [--prompts gsm_symbolic:8@4000] [--temperatures .3,.6,.8,1,1.2,1.4] [--cycles 4] [--batch 8] [--tokens 96]

Waves of requests, each at one temperature, cycle through the temperatures: the policy's entropy moves as it does over a run. Every round
drafts the same length under block verification; the monitor says what it expects of each request's depths before the round, and what came
is held against it.

- The law, ``α_d = c_d + m H``: least squares by depth over windows of rounds in the first half of the cycles; R² of these lines on the
  windows of the second half, and of lines through single positions.
- The forecast: expected against realised acceptance of every request and depth, in the second half, by tenths of what was expected.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from progress import Lines

from rollout_spec.acceptance import fit_entropy_law
from rollout_spec.budget import FixedBudget
from rollout_spec.composition import DrafterOptions
from rollout_spec.engine.engine import Engine, EngineConfig
from rollout_spec.engine.load import load_model, make_runner
from rollout_spec.engine.request import Request
from rollout_spec.files import write_text
from rollout_spec.monitor import EntropyMonitor
from rollout_spec.pilot import BudgetPilot
from rollout_spec.prompts import load_prompts
from rollout_spec.rounds_seen import Forecast, RoundOutcome
from rollout_spec.sampling import SamplingParams
from rollout_spec_rl.compose import make_drafter, make_ops

Floats = NDArray[np.float64]

MODEL = "smollm2-135m"
WINDOW = 12  # rounds whose means make one point


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """One round: what was expected and what came."""

    cycle: int
    temperature: float
    entropies: Floats  # [B, D] at the positions that the drafts stood for, NaN where a request emitted fewer
    expected: Floats  # [B, D]
    accept_probs: Floats  # [B, D], NaN where the walk did not get


class WatchedMonitor(EntropyMonitor):
    """The engine's own, with a record of every round."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.seen: list[Seen] = []
        self.cycle, self.temperature = 0, 1.0

    def observe(self, outcome: RoundOutcome, expected: Forecast | None = None) -> bool:
        assert expected is not None
        accept = outcome.accept_probs  # shallower where all requests are about to end
        missing = np.full((len(accept), self.depth - accept.shape[1]), np.nan)
        self.seen.append(
            Seen(
                cycle=self.cycle,
                temperature=self.temperature,
                entropies=np.hstack([outcome.entropies[:, : accept.shape[1]], missing]),
                expected=expected.accept[:, : self.depth],
                accept_probs=np.hstack([accept, missing]),
            )
        )
        return super().observe(outcome, expected)


def roll_out(options: argparse.Namespace) -> list[Seen]:
    loaded, ops, monitor = load_model(MODEL), make_ops(), WatchedMonitor(options.length)
    prompts = load_prompts(options.prompts, loaded.tokenizer)
    engine = Engine(
        make_runner(loaded.module, max_context=512, ops=ops),
        config=EngineConfig(max_batch=options.batch, max_context=512, seed=0),
        drafter=make_drafter(DrafterOptions(spec=options.drafter, draw=None), loaded, ops),
        controller=BudgetPilot(FixedBudget(draft_length=options.length), monitor=monitor),
    )
    temperatures = [float(temperature) for temperature in options.temperatures.split(",")]
    advance, waves = Lines().bar("waves", options.cycles * len(temperatures), 0), 0
    for monitor.cycle in range(options.cycles):
        for monitor.temperature in temperatures:
            sampling = SamplingParams(temperature=monitor.temperature)
            engine.generate(
                [
                    Request(prompt_token_ids=prompt.token_ids, max_new_tokens=options.tokens, sampling=sampling, ignore_eos=True)
                    for prompt in (prompts[index % len(prompts)] for index in range(options.batch))
                ]
            )
            waves += 1
            advance(waves, f"T = {monitor.temperature:g}")
    return monitor.seen


# What it adds up to: pure


def windows(rounds: Sequence[Seen]) -> tuple[Floats, Floats]:
    """Means over each WINDOW rounds of one wave: entropies [W], acceptance by depth [W, D]."""
    points: list[tuple[float, Floats]] = []
    begin = 0
    while begin < len(rounds):
        wave = (rounds[begin].cycle, rounds[begin].temperature)
        end = begin
        while end < len(rounds) and end - begin < WINDOW and (rounds[end].cycle, rounds[end].temperature) == wave:
            end += 1
        part = rounds[begin:end]
        accept = np.concatenate([seen.accept_probs for seen in part])
        if not np.isnan(accept).all(0).any():
            points.append((float(np.nanmean(np.concatenate([seen.entropies for seen in part]))), np.nanmean(accept, axis=0)))
        begin = end
    return np.array([entropy for entropy, _ in points]), np.stack([accept for _, accept in points])


def r_squared(realised: Floats, expected: Floats) -> float:
    """1 - squared errors over the variance of what was realised, NaN pairs left out; below 0 if the mean would have told more."""
    known = ~(np.isnan(realised) | np.isnan(expected))
    realised, expected = realised[known], expected[known]
    return float(1 - np.square(realised - expected).sum() / np.square(realised - realised.mean()).sum())


def law_rows(first: Sequence[Seen], second: Sequence[Seen]) -> list[dict[str, float]]:
    """By depth: the line through the first half's windows, and R² on the second half."""
    (x, y), (held_x, held_y) = windows(first), windows(second)
    positions = [
        [np.concatenate([getattr(seen, name) for seen in half]) for name in ("entropies", "accept_probs")] for half in (first, second)
    ]
    rows = []
    for depth in range(y.shape[1]):
        line = fit_entropy_law(torch.from_numpy(x), torch.from_numpy(y[:, depth]))
        own, held = ([entropies[:, depth], accept[:, depth]] for entropies, accept in positions)
        single = fit_entropy_law(torch.from_numpy(own[0]), torch.from_numpy(own[1]))
        rows.append(
            {
                "depth": depth + 1,
                "intercept": line.intercept,
                "slope": line.slope,
                "r_squared_windows": r_squared(held_y[:, depth], line.intercept + line.slope * held_x),
                "r_squared_positions": r_squared(held[1], single.intercept + single.slope * held[0]),
            }
        )
    return rows


def calibration(rounds: Sequence[Seen], num_bins: int = 10) -> dict[str, Any]:
    """Expected against realised acceptance in bins of as many observations each, by depth and for all depths together."""
    expected, realised = (np.concatenate([getattr(seen, name) for seen in rounds]) for name in ("expected", "accept_probs"))

    def of(columns: slice) -> dict[str, Any]:
        known = ~np.isnan(realised[:, columns])
        told, came = expected[:, columns][known], realised[:, columns][known]
        parts = np.array_split(np.argsort(told, kind="stable"), num_bins)
        bins = [{"num": len(part), "expected": float(told[part].mean()), "realised": float(came[part].mean())} for part in parts]
        return {
            "num": len(told),
            "expected": float(told.mean()),
            "realised": float(came.mean()),
            "calibration_error": sum(row["num"] * abs(row["expected"] - row["realised"]) for row in bins) / len(told),
            "bins": bins,
        }

    return {"all": of(slice(None)), "by_depth": [of(slice(depth, depth + 1)) for depth in range(expected.shape[1])]}


def table(result: dict[str, Any]) -> str:
    lines = ["| depth | law | R² of windows | R² of positions | expected | realised | calibration error |", "|" + "---|" * 7]
    for law, told in zip(result["law"], result["calibration"]["by_depth"], strict=True):
        line = f"{law['intercept']:.2f} {'+-'[law['slope'] < 0]} {abs(law['slope']):.3f} H"
        fits = f"{law['r_squared_windows']:.2f} | {law['r_squared_positions']:.2f}"
        lines.append(
            f"| {law['depth']} | {line} | {fits} | {told['expected']:.3f} | {told['realised']:.3f} | {told['calibration_error']:.3f} |"
        )
    return "\n".join(lines)


def draw(seen: Sequence[Seen], result: dict[str, Any], path: Path) -> None:
    """Windows with their lines, and the calibration. Needs matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "entropy law", "font.size": 9}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        entropies, accept = windows(seen)
        for row, values, colour, marker in zip(result["law"], accept.T, ("#4c72b0", "#c44e52", "#55a868", "#8172b3"), "osd^", strict=False):
            left.plot(entropies, values, marker, color=colour, markersize=3, alpha=0.6, label=f"depth {row['depth']}")
            ends = np.array([entropies.min(), entropies.max()])
            left.plot(ends, row["intercept"] + row["slope"] * ends, color=colour, linewidth=1)
        left.set(xlabel=f"entropy, nats (means of {WINDOW} rounds)", ylabel="acceptance probability", ylim=(0, 1))
        left.legend(fontsize=8)
        bins = result["calibration"]["all"]["bins"]
        right.plot([0, 1], [0, 1], color="#888888", linewidth=0.8, linestyle="--")
        right.plot([row["expected"] for row in bins], [row["realised"] for row in bins], "o", color="#4c72b0")
        right.set(xlabel="expected acceptance (tenths of the observations)", ylabel="realised", xlim=(0, 1), ylim=(0, 1))
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", default="gsm_symbolic:8@4000")
    parser.add_argument("--temperatures", default=".3,.6,.8,1,1.2,1.4")
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    if options.cycles < 2:
        parser.error("--cycles must be 2 or more: half of them is for the fit, half is held out")
    seen = roll_out(options)
    first, second = ([one for one in seen if (one.cycle >= options.cycles // 2) == late] for late in (False, True))
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("json", "figure")}
    result = {"settings": settings, "num_rounds": len(seen), "law": law_rows(first, second), "calibration": calibration(second)}
    write_text(options.json, json.dumps(result, indent=2) + "\n")
    if options.figure is not None:
        draw(second, result, options.figure)
    print(table(result))


if __name__ == "__main__":
    main()
