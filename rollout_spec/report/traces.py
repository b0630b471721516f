"""Traces: what panels are made of, one a run, over rounds or over something else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_spec.metrics import BY_NAME
from rollout_spec.report.bins import Bin
from rollout_spec.report.runs import Run


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


def number_of(value: object) -> float | None:
    """Four digits: more is noise, and bytes."""
    return float(f"{value:.4g}") if isinstance(value, int | float) and math.isfinite(value) else None


def axis(title: str, **more: object) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


ROUNDS = {"xaxis": axis("round")}
NO_DRAFTS = "Nothing was drafted."


def over_rounds(run: Run, number: int, value: Callable[[Bin], float], *, name: str = "", **more: object) -> dict[str, Any]:
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
        "y": [number_of(value(part)) for part in run.bins.bins],
        "customdata": [part.policy_version for part in run.bins.bins],
        "hovertemplate": "%{y:.3g} at round %{x}, policy version %{customdata}",
        **more,
    }


def metric(name: str) -> Callable[[Bin], float]:
    def of(part: Bin) -> float:
        value = BY_NAME[name].compute(part.totals)
        assert isinstance(value, int | float)
        return value

    return of


def each(runs: Sequence[Run], make: Callable[[Run, int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [trace for number, run in enumerate(runs) for trace in make(run, number)]
