"""What is accepted, and what it depends on: depth, entropy, context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_spec.events import context_edge
from rollout_spec.metrics import BY_NAME, accepted_length_counts
from rollout_spec.report.runs import Run
from rollout_spec.report.traces import NO_DRAFTS, ROUNDS, Panel, axis, each, metric, number_of, over_rounds
from rollout_spec.report.verdict import entropy_law


def acceptance(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        length = over_rounds(run, number, metric("accept_length_when_drafted"), name="tokens a draft")
        return [length, over_rounds(run, number, metric("accept_rate"), name="rate", yaxis="y2", line={"dash": "dot"})]

    return Panel(
        name="acceptance",
        title="Acceptance length and rate",
        about="Tokens a draft, the bonus counted (left), and accepted over drafted tokens (right, dotted); ratios of sums.",
        traces=each([run for run in runs if run.drafts], make),
        layout={
            **ROUNDS,
            "yaxis": axis("tokens a draft"),
            "yaxis2": axis("rate", overlaying="y", side="right", range=[0, 1], showgrid=False),
        },
        empty=NO_DRAFTS,
    )


def by_depth(runs: Sequence[Run]) -> Panel:
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
                    "y": [number_of(value) for value in values],
                    "line": {"dash": dash},
                }
            )
        return traces

    return Panel(
        name="depth",
        title="α by depth",
        about="Accepted at a depth over request rounds that reached a drafted token there; dotted: the mean acceptance probability.",
        traces=each(runs, make),
        layout={"xaxis": axis("depth", dtick=1), "yaxis": axis("α", range=[0, 1])},
        empty=NO_DRAFTS,
    )


def entropy(runs: Sequence[Run]) -> Panel:
    return Panel(
        name="entropy",
        title="Entropy of the policy",
        about="Mean over emitted positions of the law that was sampled from. Acceptance falls as it rises.",
        traces=each(runs, lambda run, number: [over_rounds(run, number, metric("entropy"))]),
        layout={**ROUNDS, "yaxis": axis("nats")},
        empty="No entropies were logged.",
    )


def alpha_against_entropy(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        total = run.bins.total()
        cells = [cell for _, cell in sorted(total.entropy_cells.items()) if cell.num_drafts]
        x = [number_of(cell.entropy_sum / cell.num_drafts) for cell in cells]
        points = {
            "type": "scatter",
            "mode": "markers",
            "name": run.name,
            "run": number,
            "x": x,
            "y": [number_of(cell.num_accepted / cell.num_drafts) for cell in cells],
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
            "y": [number_of(min(1.0, max(0.0, law.intercept + law.slope * value))) for value in ends],
            "line": {"dash": "dot"},
        }
        return [points, line]

    return Panel(
        name="alpha_entropy",
        title="α against entropy",
        about="Acceptance of first drafted tokens in rounds of nearly the same mean entropy, and the line through them.",
        traces=each(runs, make),
        layout={"xaxis": axis("mean entropy of the round, nats"), "yaxis": axis("α at depth 1", range=[0, 1])},
        empty=NO_DRAFTS,
    )


def by_context(runs: Sequence[Run]) -> Panel:
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
                "y": [number_of(value) for value in values],
            }
        ]

    return Panel(
        name="context",
        title="Acceptance by context length",
        about="Tokens a request round, the bonus counted, by prompt and output tokens before the round.",
        traces=each([run for run in runs if run.drafts], make),
        layout={"xaxis": axis("context, tokens", type="category"), "yaxis": axis("tokens a request round")},
        empty="Nothing was drafted, or the log does not say at which contexts.",
    )


def lengths(runs: Sequence[Run]) -> Panel:
    def make(run: Run, number: int) -> list[dict[str, Any]]:
        counts = accepted_length_counts(run.bins.total().totals)
        whole = sum(counts)
        y = [number_of(count / whole) for count in counts] if whole else []
        return [{"type": "bar", "name": run.name, "run": number, "x": list(range(len(counts))), "y": y}]

    return Panel(
        name="lengths",
        title="Accepted lengths",
        about="Share of request rounds whose verifier accepted exactly so many drafted tokens (the bonus not counted).",
        traces=each([run for run in runs if run.drafts], make),
        layout={"barmode": "group", "xaxis": axis("accepted tokens", dtick=1), "yaxis": axis("share", range=[0, 1])},
        empty=NO_DRAFTS,
    )
