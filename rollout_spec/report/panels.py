"""The panels: what each shows of every run, as traces for plotly and as a table for whoever cannot see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_spec.events import context_edge
from rollout_spec.metrics import BY_NAME, accepted_length_counts
from rollout_spec.report.bins import Bin
from rollout_spec.report.runs import Run
from rollout_spec.report.verdict import entropy_law

Numbers = list[float | None]
_PARTS = ("draft", "target", "verify", "other")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """``traces`` are plotly's, but for "run" (which colour and dash) and "part" (which pattern): the page chooses those by its theme."""

    name: str
    title: str
    about: str  # how to read it
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    empty: str = ""  # why there is nothing to see

    def record(self) -> dict[str, Any]:
        shown = [trace for trace in self.traces if any(value is not None for value in trace["y"])]
        return {
            "name": self.name,
            "title": self.title,
            "about": self.about,
            "traces": shown,
            "layout": self.layout,
            "empty": "" if shown else self.empty,
        }


def panels(runs: Sequence[Run]) -> list[Panel]:
    """All of them, in reading order: does it pay, what is accepted and why, is it stale, is anything lost."""
    return [
        _speedup(runs),
        _acceptance(runs),
        _by_depth(runs),
        _entropy(runs),
        _alpha_against_entropy(runs),
        _budget(runs),
        _chosen(runs),
        _tokens_a_round(runs),
        _time_a_round(runs),
        _time_split(runs),
        _by_context(runs),
        _lengths(runs),
        _versions(runs),
        _lag(runs),
        _importance(runs),
        _drops(runs),
    ]


def _number(value: object) -> float | None:
    """Four digits: more is noise, and bytes."""
    return float(f"{value:.4g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _axis(title: str, **more: object) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def _over_rounds(run: Run, number: int, value: Callable[[Bin], float], *, name: str = "", **more: object) -> dict[str, Any]:
    """One point a bin, at its last round; the policy's version is in the hover text."""
    ends, x = 0, []
    for part in run.bins.bins:
        ends += part.totals.num_rounds
        x.append(ends)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{run.name} {name}".strip(),
        "run": number,
        "x": x,
        "y": [_number(value(part)) for part in run.bins.bins],
        "customdata": [part.policy_version for part in run.bins.bins],
        "hovertemplate": "%{y:.3g} at round %{x}, policy version %{customdata}",
        **more,
    }


def _metric(name: str) -> Callable[[Bin], float]:
    def of(part: Bin) -> float:
        value = BY_NAME[name].compute(part.totals)
        assert isinstance(value, int | float)
        return value

    return of


def _each(runs: Sequence[Run], make: Callable[[Run, int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [trace for number, run in enumerate(runs) for trace in make(run, number)]


_ROUNDS = {"xaxis": _axis("round")}
_NO_DRAFTS = "Nothing was drafted."


def _speedup(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        plain = run.bins.total().totals.speed.plain
        return [
            _over_rounds(run, number, lambda part: part.totals.speed.speedup(plain)),
            _over_rounds(run, number, lambda part: part.totals.speed.speedup_bound(), name="at most", line={"dash": "dot"}),
        ]

    return Panel(
        name="speedup",
        title="Speed-up against no drafting",
        about="Time that this run's own rounds without a draft would have taken for the same tokens, over the time taken. Above 1 it pays. "
        "Dotted: at most, as if drafted rows cost the target nothing.",
        traces=_each(runs, make),
        layout={**_ROUNDS, "yaxis": _axis("times as fast"), "line_at": 1},
        empty=_NO_DRAFTS,
    )


def _acceptance(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        length = _over_rounds(run, number, _metric("accept_length_when_drafted"), name="tokens a draft")
        return [length, _over_rounds(run, number, _metric("accept_rate"), name="rate", yaxis="y2", line={"dash": "dot"})]

    return Panel(
        name="acceptance",
        title="Acceptance length and rate",
        about="Tokens a draft, the bonus counted (left), and accepted over drafted tokens (right, dotted); ratios of sums.",
        traces=_each([run for run in runs if run.drafts], make),
        layout={
            **_ROUNDS,
            "yaxis": _axis("tokens a draft"),
            "yaxis2": _axis("rate", overlaying="y", side="right", range=[0, 1], showgrid=False),
        },
        empty=_NO_DRAFTS,
    )


def _by_depth(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        totals = run.bins.total().totals
        traces = []
        for name, label, dash in (("accept_rate_by_depth", "accepted", "solid"), ("accept_prob_by_depth", "probability", "dot")):
            values = BY_NAME[name].compute(totals)
            assert isinstance(values, list)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{run.name} {label}",
                    "run": number,
                    "x": list(range(1, len(values) + 1)),
                    "y": [_number(value) for value in values],
                    "line": {"dash": dash},
                }
            )
        return traces

    return Panel(
        name="depth",
        title="α by depth",
        about="Accepted at a depth over request rounds that reached a drafted token there; dotted: the mean acceptance probability.",
        traces=_each(runs, make),
        layout={"xaxis": _axis("depth", dtick=1), "yaxis": _axis("α", range=[0, 1])},
        empty=_NO_DRAFTS,
    )


def _entropy(runs: Sequence[Run]) -> Panel:
    return Panel(
        name="entropy",
        title="Entropy of the policy",
        about="Mean over emitted positions of the law that was sampled from. Acceptance falls as it rises.",
        traces=_each(runs, lambda run, number: [_over_rounds(run, number, _metric("entropy"))]),
        layout={**_ROUNDS, "yaxis": _axis("nats")},
        empty="No entropies were logged.",
    )


def _alpha_against_entropy(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        total = run.bins.total()
        cells = [cell for _, cell in sorted(total.entropy_cells.items()) if cell.num_drafts]
        x = [_number(cell.entropy_sum / cell.num_drafts) for cell in cells]
        points = {
            "type": "scatter",
            "mode": "markers",
            "name": run.name,
            "run": number,
            "x": x,
            "y": [_number(cell.num_accepted / cell.num_drafts) for cell in cells],
            "customdata": [cell.num_drafts for cell in cells],
            "hovertemplate": "α %{y:.3f} at %{x:.2f} nats, %{customdata} drafts",
        }
        law = entropy_law(run.bins.bins)
        if law is None or not cells:
            return [points]
        ends = [value for value in (x[0], x[-1]) if value is not None]
        line = {
            "type": "scatter",
            "mode": "lines",
            "name": f"{run.name}: {law.intercept:.2f} {law.slope:+.3f} H",
            "run": number,
            "x": ends,
            "y": [_number(min(1.0, max(0.0, law.intercept + law.slope * value))) for value in ends],
            "line": {"dash": "dot"},
        }
        return [points, line]

    return Panel(
        name="alpha_entropy",
        title="α against entropy",
        about="Acceptance of first drafted tokens in rounds of nearly the same mean entropy, and the line through them.",
        traces=_each(runs, make),
        layout={"xaxis": _axis("mean entropy of the round, nats"), "yaxis": _axis("α at depth 1", range=[0, 1])},
        empty=_NO_DRAFTS,
    )


def _budget(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        by_length = run.bins.total().totals.speed.by_length()
        all_s = sum(part.seconds for part in by_length.values())
        lengths = list(by_length)
        share = {
            "type": "bar",
            "name": f"{run.name} share of time",
            "run": number,
            "x": lengths,
            "y": [_number(part.seconds / all_s) for part in by_length.values()],
            "yaxis": "y2",
            "opacity": 0.45,
        }
        gain = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"{run.name} speed-up",
            "run": number,
            "x": lengths,
            "y": [_number(part.speedup) for part in by_length.values()],
        }
        return [share, gain]

    return Panel(
        name="budget",
        title="Budget: what was chosen, what was best",
        about="Bars: share of the time spent at each draft length. Line: measured speed-up at that length; the best budget is where it is "
        "highest, and the bars should stand there.",
        traces=_each([run for run in runs if run.drafts], make),
        layout={
            "xaxis": _axis("deepest draft of the round", dtick=1),
            "yaxis": _axis("times as fast"),
            "yaxis2": _axis("share of time", overlaying="y", side="right", range=[0, 1], showgrid=False),
            "barmode": "group",
            "line_at": 1,
        },
        empty=_NO_DRAFTS,
    )


def _chosen(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        def gain(part: Bin) -> float:
            return part.gain_sum / part.gain_count if part.gain_count else math.nan

        drafted = _over_rounds(run, number, _metric("draft_tokens_per_request_round"), name="drafted")
        return [drafted, _over_rounds(run, number, gain, name="expected gain", yaxis="y2", line={"dash": "dot"})]

    return Panel(
        name="drafted",
        title="Drafted tokens and expected gain",
        about="Draft tokens a request and round; dotted: the gain that the controller expected of them (0 = none), where it predicts.",
        traces=_each([run for run in runs if run.drafts], make),
        layout={
            **_ROUNDS,
            "yaxis": _axis("draft tokens"),
            "yaxis2": _axis("expected gain", overlaying="y", side="right", showgrid=False),
        },
        empty=_NO_DRAFTS,
    )


def _tokens_a_round(runs: Sequence[Run]) -> Panel:
    return Panel(
        name="tokens",
        title="Tokens a round",
        about="Emitted tokens a request and round, the recovered or bonus token counted.",
        traces=_each(runs, lambda run, number: [_over_rounds(run, number, _metric("tokens_per_request_round"))]),
        layout={**_ROUNDS, "yaxis": _axis("tokens a request round")},
        empty="There are no rounds.",
    )


def _time_a_round(runs: Sequence[Run]) -> Panel:
    return Panel(
        name="time",
        title="Time a round",
        about="Milliseconds, prefills left out. More tokens a round only pay if this grows less.",
        traces=_each(runs, lambda run, number: [_over_rounds(run, number, _metric("ms_per_round"))]),
        layout={**_ROUNDS, "yaxis": _axis("ms a round", rangemode="tozero")},
        empty="There are no rounds.",
    )


def _time_split(runs: Sequence[Run]) -> Panel:
    counted = [run for run in runs if run.num_rounds]
    totals = [run.bins.total().totals for run in counted]
    traces = []
    for number, part in enumerate(_PARTS):
        ms = [1e3 * (sums.seconds[part] - (sums.prefill_s if part == "target" else 0.0)) / sums.num_rounds for sums in totals]
        traces.append(
            {"type": "bar", "name": part, "part": number, "x": [run.name for run in counted], "y": [_number(value) for value in ms]}
        )
    return Panel(
        name="split",
        title="Where a round's time goes",
        about="Drafting, the target's forward with its head, verification, everything else; means over the run.",
        traces=traces,
        layout={"barmode": "stack", "xaxis": {"type": "category"}, "yaxis": _axis("ms a round")},
        empty="There are no rounds.",
    )


def _by_context(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        values = BY_NAME["accept_length_by_context"].compute(run.bins.total().totals)
        assert isinstance(values, list)
        return [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": run.name,
                "run": number,
                "x": [f"≤ {context_edge(bucket)}" for bucket in range(len(values))],
                "y": [_number(value) for value in values],
            }
        ]

    return Panel(
        name="context",
        title="Acceptance by context length",
        about="Tokens a request round, the bonus counted, by prompt and output tokens before the round.",
        traces=_each([run for run in runs if run.drafts], make),
        layout={"xaxis": _axis("context, tokens", type="category"), "yaxis": _axis("tokens a request round")},
        empty="Nothing was drafted, or the log does not say at which contexts.",
    )


def _lengths(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        counts = accepted_length_counts(run.bins.total().totals)
        whole = sum(counts)
        y = [_number(count / whole) for count in counts] if whole else []
        return [{"type": "bar", "name": run.name, "run": number, "x": list(range(len(counts))), "y": y}]

    return Panel(
        name="lengths",
        title="Accepted lengths",
        about="Share of request rounds whose verifier accepted exactly so many drafted tokens (the bonus not counted).",
        traces=_each([run for run in runs if run.drafts], make),
        layout={"barmode": "group", "xaxis": _axis("accepted tokens", dtick=1), "yaxis": _axis("share", range=[0, 1])},
        empty=_NO_DRAFTS,
    )


def _versions(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        traces = []
        for role, dash in (("target", "solid"), ("drafter", "dot")):
            marked = [mark for mark in run.syncs if mark.event.role == role]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{run.name} {'policy' if role == 'target' else role}",
                    "run": number,
                    "x": [mark.round_index for mark in marked],
                    "y": [mark.event.version for mark in marked],
                    "customdata": [mark.event.checksum for mark in marked],
                    "hovertemplate": "version %{y}, checksum %{customdata}",
                    "line": {"shape": "hv", "dash": dash},
                }
            )
        stale = {
            "type": "scatter",
            "mode": "markers",
            "name": f"{run.name} found stale",
            "run": number,
            "x": [mark.round_index for mark in run.stale],
            "y": [mark.event.weights_version for mark in run.stale],
            "marker": {"symbol": "x", "size": 11},
        }
        return [*traces, stale]

    return Panel(
        name="versions",
        title="Weights: versions and checksums",
        about="Every update of the policy and of the drafter (dotted), with the checksum of what is held afterwards; × where the monitor "
        "found the drafter stale.",
        traces=_each(runs, make),
        layout={**_ROUNDS, "yaxis": _axis("version")},
        empty="No weights were updated during the run.",
    )


def _lag(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        lags = run.bins.total().totals.policy_lags
        whole = sum(lags.values())
        x = sorted(lags)
        return [{"type": "bar", "name": run.name, "run": number, "x": x, "y": [_number(lags[lag] / whole) for lag in x]}]

    return Panel(
        name="lag",
        title="Staleness of samples",
        about="Share of finished requests by how many policy versions passed between their first token and their end (0 = on-policy).",
        traces=_each(runs, make),
        layout={"barmode": "group", "xaxis": _axis("versions", dtick=1), "yaxis": _axis("share", range=[0, 1])},
        empty="The log does not say with which version requests began.",
    )


def _importance(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        names = sorted({name for event in run.trained for name in event.metrics if _tells_importance(name)})
        return [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{run.name} {name}",
                "run": number,
                "x": [event.step for event in run.trained],
                "y": [_number(event.metrics.get(name)) for event in run.trained],
                "line": {"dash": ("solid", "dot", "dash")[place % 3]},
            }
            for place, name in enumerate(names)
        ]

    return Panel(
        name="importance",
        title="Importance ratio",
        about="The trainer's probability of sampled tokens over the rollout's, or their difference, as the trainer logged it. A mean away "
        "from 1 (a difference from 0) says that rollout and trainer do not hold the same law.",
        traces=_each(runs, make),
        layout={"xaxis": _axis("step"), "yaxis": _axis("")},
        empty="No trainer logged importance ratios beside this run.",
    )


def _tells_importance(name: str) -> bool:
    return "importance_ratio" in name or "rollout_is_mean" in name or "rollout_probs_diff_mean" in name


def _drops(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        return [
            {
                "type": "bar",
                "name": f"{run.name} {what}",
                "run": number,
                "x": list(run.sinks),
                "y": [getattr(event, f"num_{what}") for event in run.sinks.values()],
            }
            for what in ("dropped", "failed")
        ]

    return Panel(
        name="drops",
        title="Lost events",
        about="Events that a sink's queue had no room for, or that it failed on. The event log itself loses none.",
        traces=_each(runs, make),
        layout={"barmode": "group", "xaxis": {"type": "category"}, "yaxis": _axis("events", rangemode="tozero")},
        empty="The run had no sinks besides its event log.",
    )
