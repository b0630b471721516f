"""Is it right, is it stale, is anything lost? Weights, lags, importance ratios, events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_spec.report.runs import Run
from rollout_spec.report.traces import ROUNDS, Panel, axis, each, number_of


def versions(runs: Sequence[Run]) -> Panel:
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
        traces=each(runs, make),
        layout={**ROUNDS, "yaxis": axis("version")},
        empty="No weights were updated during the run.",
    )


def lag(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        lags = run.bins.total().totals.policy_lags
        whole = sum(lags.values())
        x = sorted(lags)
        return [{"type": "bar", "name": run.name, "run": number, "x": x, "y": [number_of(lags[lag] / whole) for lag in x]}]

    return Panel(
        name="lag",
        title="Staleness of samples",
        about="Share of finished requests by how many policy versions passed between their first token and their end (0 = on-policy).",
        traces=each(runs, make),
        layout={"barmode": "group", "xaxis": axis("versions", dtick=1), "yaxis": axis("share", range=[0, 1])},
        empty="The log does not say with which version requests began.",
    )


def importance(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        names = sorted({name for event in run.trained for name in event.metrics if _tells_importance(name)})
        return [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{run.name} {name}",
                "run": number,
                "x": [event.step for event in run.trained],
                "y": [number_of(event.metrics.get(name)) for event in run.trained],
                "line": {"dash": ("solid", "dot", "dash")[place % 3]},
            }
            for place, name in enumerate(names)
        ]

    return Panel(
        name="importance",
        title="Importance ratio",
        about="The trainer's probability of sampled tokens over the rollout's, or their difference, as the trainer logged it. A mean away "
        "from 1 (a difference from 0) says that rollout and trainer do not hold the same law.",
        traces=each(runs, make),
        layout={"xaxis": axis("step"), "yaxis": axis("")},
        empty="No trainer logged importance ratios beside this run.",
    )


def _tells_importance(name: str) -> bool:
    return "importance_ratio" in name or "rollout_is_mean" in name or "rollout_probs_diff_mean" in name


def drops(runs: Sequence[Run]) -> Panel:
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
        traces=each(runs, make),
        layout={"barmode": "group", "xaxis": {"type": "category"}, "yaxis": axis("events", rangemode="tozero")},
        empty="The run had no sinks besides its event log.",
    )
