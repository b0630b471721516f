"""Does it pay? Speed-up, budgets, and where the time goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rollout_spec.report.bins import Bin
from rollout_spec.report.runs import Run
from rollout_spec.report.traces import NO_DRAFTS, ROUNDS, Panel, axis, each, metric, number_of, over_rounds

_PARTS = ("draft", "target", "verify", "other")


def speedup(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        plain = run.bins.total().totals.speed.plain
        return [
            over_rounds(run, number, lambda part: part.totals.speed.speedup(plain)),
            over_rounds(run, number, lambda part: part.totals.speed.speedup_bound(), name="at most", line={"dash": "dot"}),
        ]

    return Panel(
        name="speedup",
        title="Speed-up against no drafting",
        about="Time that this run's own rounds without a draft would have taken for the same tokens, over the time taken. Above 1 it pays. "
        "Dotted: at most, as if drafted rows cost the target nothing.",
        traces=each(runs, make),
        layout={**ROUNDS, "yaxis": axis("times as fast"), "line_at": 1},
        empty=NO_DRAFTS,
    )


def budget(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        by_length = run.bins.total().totals.speed.by_length()
        all_s = sum(part.seconds for part in by_length.values())
        lengths = list(by_length)
        share = {
            "type": "bar",
            "name": f"{run.name} share of time",
            "run": number,
            "x": lengths,
            "y": [number_of(part.seconds / all_s) for part in by_length.values()],
            "yaxis": "y2",
            "opacity": 0.45,
        }
        gain = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"{run.name} speed-up",
            "run": number,
            "x": lengths,
            "y": [number_of(part.speedup) for part in by_length.values()],
        }
        return [share, gain]

    return Panel(
        name="budget",
        title="Budget: what was chosen, what was best",
        about="Bars: share of the time spent at each draft length. Line: measured speed-up at that length; the best budget is where it is "
        "highest, and the bars should stand there.",
        traces=each([run for run in runs if run.drafts], make),
        layout={
            "xaxis": axis("deepest draft of the round", tickformat="d", dtick=1, rangemode="nonnegative"),
            "yaxis": axis("times as fast"),
            "yaxis2": axis("share of time", overlaying="y", side="right", range=[0, 1], showgrid=False),
            "barmode": "group",
            "line_at": 1,
        },
        empty=NO_DRAFTS,
    )


def chosen(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        def gain(part: Bin) -> float:
            return part.gain_sum / part.gain_count if part.gain_count else math.nan

        drafted = over_rounds(run, number, metric("draft_tokens_per_request_round"), name="drafted")
        return [drafted, over_rounds(run, number, gain, name="expected gain", yaxis="y2", line={"dash": "dot"})]

    return Panel(
        name="drafted",
        title="Drafted tokens and expected gain",
        about="Draft tokens a request and round; dotted: the gain that the controller expected of them (0 = none), where it predicts.",
        traces=each([run for run in runs if run.drafts], make),
        layout={
            **ROUNDS,
            "yaxis": axis("draft tokens"),
            "yaxis2": axis("expected gain", overlaying="y", side="right", showgrid=False),
        },
        empty=NO_DRAFTS,
    )


def tokens_a_round(runs: Sequence[Run]) -> Panel:
    return Panel(
        name="tokens",
        title="Tokens a round",
        about="Emitted tokens a request and round, the recovered or bonus token counted.",
        traces=each(runs, lambda run, number: [over_rounds(run, number, metric("tokens_per_request_round"))]),
        layout={**ROUNDS, "yaxis": axis("tokens a request round")},
        empty="There are no rounds.",
    )


def time_a_round(runs: Sequence[Run]) -> Panel:
    return Panel(
        name="time",
        title="Time a round",
        about="Milliseconds, prefills left out. More tokens a round only pay if this grows less.",
        traces=each(runs, lambda run, number: [over_rounds(run, number, metric("ms_per_round"))]),
        layout={**ROUNDS, "yaxis": axis("ms a round", rangemode="tozero")},
        empty="There are no rounds.",
    )


def time_split(runs: Sequence[Run]) -> Panel:
    counted = [run for run in runs if run.num_rounds]
    totals = [run.bins.total().totals for run in counted]
    traces = []
    for number, part in enumerate(_PARTS):
        ms = [1e3 * (sums.seconds[part] - (sums.prefill_s if part == "target" else 0.0)) / sums.num_rounds for sums in totals]
        traces.append(
            {"type": "bar", "name": part, "part": number, "x": [run.name for run in counted], "y": [number_of(value) for value in ms]}
        )
    return Panel(
        name="split",
        title="Where a round's time goes",
        about="Drafting, the target's forward with its head, verification, everything else; means over the run.",
        traces=traces,
        layout={"barmode": "stack", "xaxis": {"type": "category"}, "yaxis": axis("ms a round")},
        empty="There are no rounds.",
    )
